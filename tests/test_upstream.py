"""
What we rely on in other libraries beyond what they promise, one test for each thing.

When a test here fails after an upgrade, its name says what changed, and where it is used is the code to mend. Those of
vLLM stand in `tests/serving/test_upstream.py`.
"""

import inspect
import math
import re
import sys
import types
from dataclasses import replace

import datasets
import evaluate
import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    AttentionInterface,
    AutoModel,
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    configuration_utils,
)
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticCache
from transformers.integrations.gguf import read_gguf_metadata


class TinyForCausalLM(nn.Module):
    """As much of a language model as a `Trainer` needs, under a name that Transformers does not know."""

    def __init__(self):
        super().__init__()
        self.config = PreTrainedConfig()
        self.table = nn.Parameter(torch.randn(7, 7))
        self.inputs = []

    def forward(self, input_ids, **inputs):
        self.inputs.append(inputs)
        return {"loss": self.table.sum(), "logits": self.table[input_ids]}


@pytest.fixture
def trainer(tmp_path):
    """Builds a `Trainer` of a `TinyForCausalLM`: `trainer(label_smoothing_factor=..., compute_loss_func=...)`."""

    def build(compute_loss_func=None, **options):
        args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", **options)
        return Trainer(TinyForCausalLM(), args, compute_loss_func=compute_loss_func)

    return build


BATCH = {"input_ids": torch.tensor([[1, 2, 3, 4]]), "labels": torch.tensor([[1, 2, 3, 4]])}


class TinyConfig(PreTrainedConfig):
    """A configuration of two layers with three caches, as a layer with two kinds of heads has them."""

    model_type = "tiny"
    num_hidden_layers, num_attention_heads, hidden_size, sliding_window = 2, 4, 8, 4
    layer_types = ("full_attention", "sliding_attention", "full_attention")

    @property
    def per_layer_config(self):
        """One view for each cache, with its number of heads."""
        return [types.SimpleNamespace(num_attention_heads=n, head_dim=2, sliding_window=4) for n in (1, 3, 4)]

    def validate_layer_type(self):
        """Transformers insists on one entry per layer here."""


class TinyModel(PreTrainedModel):
    """A model of one projection, which notes which modules it is asked to initialise."""

    config_class = TinyConfig
    base_model_prefix = "model"
    _supports_sdpa = _supports_flash_attn = True

    def __init__(self, config):
        super().__init__(config)
        self.initialised = []
        self.block = nn.Sequential(nn.Linear(4, 4), nn.GELU())
        self.post_init()

    def _init_weights(self, module):
        self.initialised.append(module)
        super()._init_weights(module)


# The Trainer


def test_trainer_shifts_labels_for_smoothing_by_the_name_of_the_models_class(trainer, monkeypatch):
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: PLC0415

    trainer = trainer(label_smoothing_factor=0.1)
    losses = {}
    for known in (False, True):
        if known:
            monkeypatch.setitem(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "tiny", "TinyForCausalLM")
        losses[known] = trainer.compute_loss(trainer.model, dict(BATCH)).item()
        outputs = trainer.model(**BATCH)
        assert losses[known] == trainer.label_smoother(outputs, BATCH["labels"], shift_labels=known).item()
    assert losses[False] != losses[True]


def test_trainer_takes_the_labels_away_for_compute_loss_func_and_label_smoothing(trainer):
    for options in ({"label_smoothing_factor": 0.1}, {"compute_loss_func": lambda outputs, labels, **kwargs: 0.0}):
        instance = trainer(**options)
        instance.compute_loss(instance.model, dict(BATCH))
        assert instance.model.inputs == [{}]
    assert trainer().label_smoother is None and trainer().compute_loss_func is None


def test_trainer_writes_the_log_history_before_callbacks_are_asked(trainer):
    instance, seen = trainer(), []

    class Callback(type(instance.callback_handler.callbacks[0])):
        def on_log(self, args, state, control, logs=None, **kwargs):
            seen.append((state.log_history[-1], logs))

    instance.add_callback(Callback())
    instance.log({"loss": 1.0})
    ((last, logs),) = seen
    assert last["loss"] == logs["loss"] == 1.0 and last is not logs


def test_trainer_save_model_pushes_unless_it_is_an_internal_call(trainer, monkeypatch, tmp_path):
    instance, pushes = trainer(), []
    monkeypatch.setattr(instance, "push_to_hub", lambda **kwargs: pushes.append(kwargs))
    instance.args.push_to_hub = True
    instance.save_model(str(tmp_path), _internal_call=True)
    assert pushes == []
    instance.save_model(str(tmp_path))
    assert len(pushes) == 1


def test_trainer_names_the_description_and_the_prefix_for_its_evaluation_loop(trainer):
    instance, seen = trainer(), []
    loop = instance.evaluation_loop

    def evaluation_loop(dataloader, **options):
        seen.append((options["description"], options["metric_key_prefix"]))
        return loop(dataloader, **options)

    instance.evaluation_loop = evaluation_loop
    rows = [{"input_ids": [1, 2]}]
    instance.evaluate(rows, metric_key_prefix="mine")
    instance.evaluate({"first": rows})
    instance.predict(rows)
    assert seen == [("Evaluation", "mine"), ("Evaluation", "eval_first"), ("Prediction", "test")]


def test_trainer_asks_the_methods_that_are_overridden(trainer):
    seen = []

    class Asked(Trainer):
        def create_accelerator_and_postprocess(self):
            seen.append("create_accelerator_and_postprocess")
            super().create_accelerator_and_postprocess()

        def get_decay_parameter_names(self, model):
            seen.append("get_decay_parameter_names")
            return [*super().get_decay_parameter_names(model), "table"]

    instance = trainer()
    instance = Asked(instance.model, instance.args)
    assert seen == ["create_accelerator_and_postprocess"] and instance.optimizer is None
    decayed, others = instance.create_optimizer().param_groups
    assert seen[1:] == ["get_decay_parameter_names"] and instance.create_optimizer() is instance.optimizer
    assert decayed["params"] == [instance.model.table] and others["params"] == []


def test_get_available_reporting_integrations():
    from transformers.integrations import get_available_reporting_integrations  # noqa: PLC0415

    assert "tensorboard" in get_available_reporting_integrations()


def test_accelerate_state_tells_whether_it_is_initialized_and_the_parallelism(trainer):
    from accelerate import state  # noqa: PLC0415

    trainer()
    assert state.is_initialized()
    assert state.AcceleratorState().parallelism_config is None


def test_environment_variables_that_accelerate_launch_sets():
    from accelerate.utils import launch  # noqa: PLC0415

    source = inspect.getsource(launch)
    assert 'current_env["ACCELERATE_USE_FSDP"] = "true"' in source
    assert '"ACCELERATE_USE_PARALLELISM_CONFIG"' in source


def test_unset_hf_deepspeed_config():
    from transformers.integrations import deepspeed  # noqa: PLC0415

    configuration = PreTrainedConfig()  # anything: only a weak reference is kept
    deepspeed.set_hf_deepspeed_config(configuration)
    assert deepspeed._hf_deepspeed_config_weak_ref() is configuration
    deepspeed.unset_hf_deepspeed_config()
    assert deepspeed._hf_deepspeed_config_weak_ref is None
    assert not deepspeed.is_deepspeed_zero3_enabled()


def test_fsdp_plugin_mixed_precision_policy_is_read_when_the_model_is_prepared():
    from accelerate import FullyShardedDataParallelPlugin  # noqa: PLC0415
    from accelerate.utils import fsdp_utils  # noqa: PLC0415

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, mixed_precision_policy="bf16")
    policy = replace(plugin.mixed_precision_policy, reduce_dtype=torch.float32, output_dtype=None)
    plugin.mixed_precision_policy = policy
    assert (policy.param_dtype, policy.reduce_dtype, policy.output_dtype) == (torch.bfloat16, torch.float32, None)
    assert "fsdp2_plugin.mixed_precision_policy" in inspect.getsource(fsdp_utils.fsdp2_prepare_model)


def test_fsdp2_puts_a_class_of_torchs_before_the_models_own():
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        model = fully_shard(nn.Linear(2, 2), mesh=mesh)
        first, second = type(model).__mro__[:2]
        assert first.__module__.startswith("torch.") and second.__module__.startswith("torch.distributed.")
        assert nn.Linear in type(model).__mro__
    finally:
        torch.distributed.destroy_process_group()


def test_fsdp2_keeps_the_outermost_module_whole_after_a_forward_until_it_reshards():
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415
    from torch.distributed.tensor import DTensor  # noqa: PLC0415

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        model, inputs = fully_shard(nn.Linear(2, 2, bias=False), mesh=mesh), torch.ones(1, 2)
        with torch.no_grad():
            assert model(inputs).any() and not isinstance(model.weight, DTensor)
            model.reshard()
            assert isinstance(model.weight, DTensor)
            model.weight.detach().to_local().zero_()
            assert not model(inputs).any()
    finally:
        torch.distributed.destroy_process_group()


# Caches and masks


def test_caches_have_a_layer_for_each_of_layer_types_and_per_layer_config():
    config = TinyConfig()
    dynamic = DynamicCache(config=config)
    assert [layer.is_sliding for layer in dynamic.layers] == [False, True, False]
    assert type(dynamic.layers[0]) is DynamicLayer
    static = StaticCache(config=config, max_cache_len=6)
    assert [layer.max_cache_len for layer in static.layers] == [6, 4, 6]
    if hasattr(configuration_utils, "get_head_shapes"):  # not in 5.17
        assert configuration_utils.get_head_shapes(config) == ([1, 3, 4], 2)


def test_dynamic_layer_lazy_initialization_update_and_offload():
    layer, states = DynamicLayer(), torch.randn(1, 2, 3, 4)
    assert not layer.is_initialized and layer.get_seq_length() == 0
    keys, values = layer.update(states, states + 1)  # calls lazy_initialization
    assert layer.is_initialized and keys is layer.keys and values is layer.values
    assert list(inspect.signature(layer.lazy_initialization).parameters) == ["key_states", "value_states"]
    assert list(inspect.signature(layer.update).parameters) == ["key_states", "value_states", "args", "kwargs"]
    assert torch.equal(layer.update(states, states)[0], torch.cat([states, states], dim=2))
    layer.offload()
    assert layer.keys is not None and layer.get_seq_length() == 6


def test_get_mask_sizes_of_a_sliding_layer_announce_what_update_returns():
    layer = DynamicSlidingWindowLayer(sliding_window=4)
    length = 0
    for tokens in (3, 1, 6, 1, 2):
        announced, offset = layer.get_mask_sizes(tokens)
        keys, _ = layer.update(torch.randn(1, 1, tokens, 2), torch.randn(1, 1, tokens, 2))
        assert keys.shape[2] == announced
        length += tokens
        assert offset == length - announced


def test_create_block_mask_has_a_head_axis_and_compile():
    from torch.nn.attention.flex_attention import create_block_mask  # noqa: PLC0415

    def visible(batch, head, query, key):
        return (key <= query) & ((head < 1) | (key > query - 2))

    mask = create_block_mask(visible, None, 2, 256, 256, device="cpu", _compile=False)
    assert mask.shape == (1, 2, 256, 256)
    assert mask.to_dense().sum(dim=(-1, -2)).tolist() == [[3, 3]]  # blocks of 128 keys


def test_get_interface_is_asked_in_every_forward_and_named_in_the_file_of_the_layer():
    from transformers.models.gpt2 import modeling_gpt2  # noqa: PLC0415
    from transformers.models.llama import modeling_llama  # noqa: PLC0415

    asked = []

    class Interface(AttentionInterface):
        def get_interface(self, attn_implementation, default):
            asked.append((attn_implementation, default))
            return super().get_interface(attn_implementation, default)

    sizes = {"vocab_size": 7, "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 8}
    for file, config in (
        (modeling_llama, LlamaConfig(**sizes, intermediate_size=8)),
        (modeling_gpt2, GPT2Config(**sizes, bos_token_id=1, eos_token_id=1)),
    ):
        for engine in ("sdpa", "eager"):
            model = AutoModelForCausalLM.from_config(config, attn_implementation=engine)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(file, "ALL_ATTENTION_FUNCTIONS", Interface())
                for _ in range(2):
                    asked.clear()
                    model(torch.tensor([[1, 2]]))
                    assert asked == [(engine, file.eager_attention_forward)]
        layers = [module for module in model.modules() if hasattr(module, "is_causal")]
        assert [(layer.layer_idx, layer.is_causal) for layer in layers] == [(0, True)]


@pytest.mark.parametrize("engine", ["sdpa", "eager", "flash_attention_2"])
def test_masks_of_an_engine(engine):
    """What attention functions get: `sdpa` none for causality alone, `eager` added ones, flash none."""
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask  # noqa: PLC0415

    config = LlamaConfig(sliding_window=2)
    config._attn_implementation = engine
    padding = torch.tensor([[True, True, True, False]])
    arguments = {"config": config, "inputs_embeds": torch.zeros(1, 4, 8), "past_key_values": None}
    plain, padded = (create_causal_mask(**arguments, attention_mask=x) for x in (None, padding))
    windowed = create_sliding_window_causal_mask(**arguments, attention_mask=None)
    if engine == "flash_attention_2":
        assert plain is None and windowed is None and padded.equal(padding)
        return
    visible = torch.ones(4, 4).bool().tril()
    masks = {"padded": padded, "windowed": windowed}
    if engine == "sdpa":
        assert plain is None
    else:
        masks["plain"] = plain
        assert all(set(mask.unique().tolist()) == {0.0, torch.finfo(torch.float32).min} for mask in masks.values())
        masks = {name: mask == 0 for name, mask in masks.items()}
        assert masks["plain"][0, 0].equal(visible)
    assert masks["padded"][0, 0].equal(visible & padding)  # the query at the padding does not see itself
    assert masks["windowed"][0, 0].equal(visible & ~visible.tril(-2))


def test_paged_attention_is_given_its_cache_as_a_keyword():
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: PLC0415

    function = ALL_ATTENTION_FUNCTIONS["paged|eager"]
    assert "cache" in inspect.signature(function).parameters or 'kwargs.pop("cache"' in inspect.getsource(function)


def test_lazy_import_flash_attention_returns_the_varlen_function_second(monkeypatch):
    from transformers import modeling_flash_attention_utils as utils  # noqa: PLC0415

    names = ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache")
    package = types.SimpleNamespace(**{name: lambda q, k, v, s_aux=None: None for name in names})
    monkeypatch.setitem(sys.modules, "flash_attn_interface", package)
    monkeypatch.setattr(utils, "_loaded_implementation", None)
    assert utils.lazy_import_flash_attention("flash_attention_3")[0][1] is package.flash_attn_varlen_func


def test_get_query_offset_and_is_compileable_tell_caches_apart():
    states = torch.randn(1, 1, 3, 2)
    dynamic, static = DynamicCache(config=TinyConfig()), StaticCache(config=TinyConfig(), max_cache_len=6)
    for cache in (dynamic, static):
        for layer in range(3):
            cache.update(states, states, layer)
            assert cache.get_query_offset(layer) == 3
    assert isinstance(dynamic.get_query_offset(1), int) and isinstance(static.get_query_offset(0), torch.Tensor)
    assert static.is_compileable and not dynamic.is_compileable


# Models


def test_init_weights_is_called_for_every_module_with_parameters():
    model = TinyModel(TinyConfig())
    assert model.block[0] in model.initialised


def test_sdpa_can_dispatch_and_flash_attn_can_dispatch_judge_the_chosen_engine():
    class Picky(TinyModel):
        def _sdpa_can_dispatch(self, is_init_check=False):
            raise ValueError("no sdpa")

        def _flash_attn_can_dispatch(self, flash_attn_version, is_init_check=False):
            raise ValueError("no flash")

    for engine, message in (("sdpa", "no sdpa"), ("flash_attention_2", "no flash")):
        config = TinyConfig()
        config._attn_implementation = engine
        with pytest.raises(ValueError, match=message):
            Picky(config)


def test_class_attributes_that_say_what_a_model_can_do():
    names = ("_supports_attention_backend", "_supports_flex_attn", "_can_compile_fullgraph", "_tied_weights_keys")
    for name in (*names, "_can_record_outputs", "_no_split_modules", "_skip_keys_device_placement"):
        assert hasattr(PreTrainedModel, name)


def test_causal_language_models_have_the_very_function_forcausallmloss():
    from transformers.loss.loss_utils import ForCausalLMLoss  # noqa: PLC0415

    class OtherForCausalLM(TinyModel):
        pass

    assert OtherForCausalLM(TinyConfig()).loss_function is ForCausalLMLoss


def test_merge_with_config_defaults_and_capture_outputs():
    from transformers.modeling_outputs import BaseModelOutput  # noqa: PLC0415
    from transformers.utils.generic import merge_with_config_defaults  # noqa: PLC0415
    from transformers.utils.output_capturing import capture_outputs  # noqa: PLC0415

    class Recorded(TinyModel):
        _can_record_outputs = {"hidden_states": nn.Linear}

        @merge_with_config_defaults
        @capture_outputs
        def forward(self, x, use_cache=None, **kwargs):
            self.use_cache = use_cache
            return BaseModelOutput(last_hidden_state=self.block(x))

    config = TinyConfig()
    config.use_cache = "from the configuration"
    model = Recorded(config)
    outputs = model(torch.randn(1, 4), output_hidden_states=True, return_dict=True)
    assert model.use_cache == "from the configuration"
    assert len(outputs.hidden_states) == 2


def test_is_tracing_knows_fake_tensors():
    from transformers.utils.import_utils import is_tracing  # noqa: PLC0415

    assert not is_tracing(torch.zeros(2))
    with FakeTensorMode():
        assert is_tracing(torch.zeros(2))


def test_is_torchdynamo_exporting_while_torch_exports():
    from transformers.utils.import_utils import is_torchdynamo_exporting  # noqa: PLC0415

    class Asking(nn.Module):
        def forward(self, x):
            return x + 1 if is_torchdynamo_exporting() else x

    assert Asking()(torch.zeros(2)).sum() == 0
    assert torch.export.export(Asking(), (torch.zeros(2),)).module()(torch.zeros(2)).sum() == 2


def test_generic_heads_build_their_decoder_with_auto_model():
    from transformers.modeling_layers import (  # noqa: PLC0415
        GenericForSequenceClassification,
        GenericForTokenClassification,
    )

    class HeadedConfig(TinyConfig):
        model_type = "tiny-headed"

    class Decoder(TinyModel):
        config_class = HeadedConfig

    AutoModel.register(HeadedConfig, Decoder)
    for head in (GenericForSequenceClassification, GenericForTokenClassification):
        assert type(type("Headed", (head, Decoder), {})(HeadedConfig()).model) is Decoder


def test_rope_init_functions_have_the_names_of_rope_types():
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: PLC0415

    assert {"linear", "dynamic", "yarn", "longrope", "llama3"} <= ROPE_INIT_FUNCTIONS.keys()


def test_llamas_rotary_embedding_and_repeat_kv():
    from transformers.integrations.sdpa_attention import repeat_kv  # noqa: PLC0415
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb  # noqa: PLC0415

    config = LlamaConfig(hidden_size=8, num_attention_heads=2, head_dim=4, num_hidden_layers=1)
    query = torch.randn(1, 2, 3, 4)
    cos, sin = LlamaRotaryEmbedding(config)(query, torch.arange(3)[None])
    assert cos.shape == sin.shape == (1, 3, 4)
    angles = torch.arange(3.0)[:, None] * torch.tensor([1.0, 0.01])
    turned = torch.view_as_complex(torch.stack(query.chunk(2, dim=-1), dim=-1)) * torch.polar(torch.ones(3, 2), angles)
    expected = torch.cat([turned.real, turned.imag], dim=-1)
    torch.testing.assert_close(apply_rotary_pos_emb(query, query, cos, sin)[0], expected)
    assert torch.equal(repeat_kv(query, 2), query.repeat_interleave(2, dim=1))


def test_keyword_arguments_that_configurations_take_besides_their_fields():
    from lsgpt.modeling_lsgpt.configuration_lsgpt import _TRANSFORMERS_KWARGS  # noqa: PLC0415

    taken = set(re.findall(r"kwargs\.pop\(\"(\w+)\"", inspect.getsource(PreTrainedConfig.__post_init__)))
    assert taken and taken <= {*_TRANSFORMERS_KWARGS, *PreTrainedConfig.__dataclass_fields__}
    assert {"do_sample", "temperature", "top_k"} <= GenerationConfig._get_default_generation_params().keys()


def test_get_relative_import_files_follows_imports(tmp_path):
    from transformers.dynamic_module_utils import get_relative_import_files  # noqa: PLC0415

    for name, content in {"a": "from .b import x", "b": "from .c import x", "c": "x = 1"}.items():
        (tmp_path / f"{name}.py").write_text(content)
    assert {file.rsplit("/")[-1] for file in map(str, get_relative_import_files(tmp_path / "a.py"))} == {
        "b.py",
        "c.py",
    }


# PyTorch and Triton


def test_read_gguf_metadata_returns_values_and_the_lengths_of_lists_of_texts(tmp_path):
    writer = GGUFWriter(tmp_path / "tiny.gguf", "llama")
    writer.add_token_list(["a", "b", "c"])
    writer.add_tensor("rope_freqs.weight", np.ones(2, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata, tensors = read_gguf_metadata(str(tmp_path / "tiny.gguf"))
    assert metadata == {"general.architecture": "llama", "tokenizer.ggml.tokens": 3}
    assert tensors == ("rope_freqs.weight",)


def test_scaled_dot_product_flash_attention_for_cpu_and_its_backward():
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    assert str(forward.default._schema).endswith(
        "(Tensor query, Tensor key, Tensor value, float dropout_p=0., bool is_causal=False, *, "
        "Tensor? attn_mask=None, float? scale=None) -> (Tensor output, Tensor logsumexp)"
    )
    assert str(backward.default._schema).endswith(
        "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, float dropout_p, "
        "bool is_causal, *, Tensor? attn_mask=None, float? scale=None) "
        "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value)"
    )
    query, key, value = torch.randn(3, 1, 2, 5, 4)
    _, lse = forward(query, key, value, 0.0, True, scale=0.5)
    logits = (query @ key.mT * 0.5).masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
    torch.testing.assert_close(lse, logits.logsumexp(-1))  # natural, (B, H, T)


def test_scaled_dot_product_flash_attention_for_cpu_takes_masks_and_other_log_sum_exps():
    """The log-sum-exp is that of the masked logits; with a sink in it, the backward pass has the sink's weights."""
    query, key, value, gradient = torch.randn(4, 1, 2, 5, 4)
    inputs = [x.requires_grad_() for x in (query, key, value)]
    mask = torch.zeros(1, 1, 5, 5).masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
    logits = query @ key.mT * 0.5 + mask
    weights = torch.cat([logits, torch.ones(1, 2, 5, 1)], dim=-1).softmax(-1)[..., :-1]
    expected = torch.autograd.grad(weights @ value, inputs, gradient)
    with torch.no_grad():
        options = {"attn_mask": mask, "scale": 0.5}
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        output, lse = attend(query, key, value, 0.0, False, **options)
        torch.testing.assert_close(lse, logits.logsumexp(-1))
        with_sink = torch.logaddexp(lse, torch.ones(()))
        output = output * (lse - with_sink).exp()[..., None]
        torch.testing.assert_close(output, weights @ value)
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        gradients = backward(gradient, query, key, value, output, with_sink, 0.0, False, **options)
    for actual, right in zip(gradients, expected, strict=True):
        torch.testing.assert_close(actual, right)


def test_compile_friendly_flex_attention_passes_aux_request_on():
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask  # noqa: PLC0415
    from transformers.integrations.flex_attention import compile_friendly_flex_attention  # noqa: PLC0415

    query, key, value = torch.randn(3, 1, 2, 5, 4)
    mask = create_block_mask(lambda b, h, q, k: k <= q, None, None, 5, 5, device="cpu")
    options = {"score_mod": lambda logit, *indices: logit, "block_mask": mask, "scale": 0.5, "enable_gqa": True}
    with torch.compiler.set_stance("force_eager"):
        for training in (False, True):
            output, aux = compile_friendly_flex_attention(
                query, key, value, training=training, return_aux=AuxRequest(lse=True), **options
            )
            logits = (query @ key.mT * 0.5).masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
            torch.testing.assert_close(output, logits.softmax(-1) @ value)
            torch.testing.assert_close(aux.lse, logits.logsumexp(-1))  # natural, (B, H, T)


def test_triton_interpreter_is_known_by_the_type_of_kernels():
    triton = pytest.importorskip("triton")

    @triton.jit
    def kernel(x):
        pass

    assert isinstance(kernel, triton.JITFunction) == (not triton.knobs.runtime.interpret)


def test_dynamo_configuration_names():
    assert {"recompile_limit", "fail_on_recompile_limit_hit"} <= set(torch._dynamo.config.get_config_copy())


# Datasets and Evaluate


def test_datasets_fingerprint_and_new_fingerprint():
    first, second = (datasets.Dataset.from_dict({"text": [text]}) for text in "ab")
    assert first._fingerprint != second._fingerprint
    assert first.map(lambda row: row, new_fingerprint="given")._fingerprint == "given"
    assert datasets.fingerprint.Hasher.hash(["a", 1]) == datasets.fingerprint.Hasher.hash(["a", 1])


def test_evaluate_finalize_and_writer():
    class Length(evaluate.Metric):
        finalized = 0

        def _info(self):
            features = datasets.Features(
                {"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}
            )
            return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

        def _finalize(self):
            self.finalized += 1
            assert self.writer is not None
            super()._finalize()

        def _compute(self, predictions, references):
            return {"length": len(predictions)}

    metric = Length(keep_in_memory=True)
    assert metric.writer is None
    assert metric.compute(predictions=[1, 2], references=[1, 2]) == {"length": 2}
    assert metric.writer is None and metric.finalized == 1


# TRL


def test_trl_grpo_trainer_asks_the_methods_that_are_overridden(tmp_path):
    trl = pytest.importorskip("trl")
    from tokenizers import Tokenizer, models  # noqa: PLC0415
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    asked, batches = [], []

    class Asked(trl.GRPOTrainer):
        def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations, *others):
            asked.append("_generate_single_turn")
            assert prompt_ids == [[2]] * 4 and images is None and not others
            return [[2, 1]] * 3 + [[2, 2, 1]], None

        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            asked.append("_generate_and_score_completions")
            assert output["completion_ids"].tolist() == [[2, 1, 0]] * 3 + [[2, 2, 1]]
            assert output["num_items_in_batch"] == output["completion_mask"].sum() == 9
            return {**output, "extra": torch.arange(24).view(4, 3, 2)}

        def _get_per_token_logps_and_entropies(
            self,
            model,
            input_ids,
            attention_mask,
            logits_to_keep,
            batch_size=None,
            compute_entropy=False,
            compute_aux_loss=False,
            **others,
        ):
            asked.append("_get_per_token_logps_and_entropies")
            assert not any(value is not None for value in others.values())
            assert input_ids.shape == attention_mask.shape and logits_to_keep == 3
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy, compute_aux_loss
            )

        def _compute_loss(self, model, inputs):
            asked.append("_compute_loss")
            batches.append(inputs["extra"])
            loss = super()._compute_loss(model, inputs)
            unmasked = super()._compute_loss(
                model, {**inputs, "tool_mask": torch.zeros_like(inputs["completion_ids"])}
            )
            assert unmasked == 0
            return loss

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "a": 2}, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(vocab_size=3, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    )
    args = trl.GRPOConfig(
        str(tmp_path),
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        max_steps=2,
        per_device_train_batch_size=2,
        steps_per_generation=2,
        num_generations=4,
    )
    data = datasets.Dataset.from_dict({"prompt": ["a"]})
    trainer = Asked(model, lambda completion_ids, **_: [1.0, 2.0, 3.0, 4.0], args, data, processing_class=tokenizer)
    assert (trainer.eos_token_ids[0], trainer._tokenizer.pad_token_id) == (1, 0)
    assert not (trainer.tools or trainer.rollout_func or trainer.environment_factories or trainer._is_vlm)
    assert not trainer.aux_loss_enabled and trainer.max_completion_length == args.max_completion_length
    trainer.train()
    scoring = ["_get_per_token_logps_and_entropies"]
    step = ["_compute_loss", *scoring, *scoring]
    assert asked == ["_generate_single_turn", *scoring, "_generate_and_score_completions", *step, *step]
    assert sorted(torch.cat(batches).flatten().tolist()) == list(range(24))  # every row once, in either batch


def test_trl_unwrap_model_for_generation_turns_gradient_checkpointing_off(trainer):
    models = pytest.importorskip("trl.models")
    sizes = {"vocab_size": 7, "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 8}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, intermediate_size=8)).train()
    model.gradient_checkpointing_enable()
    with models.unwrap_model_for_generation(model, trainer().accelerator) as unwrapped:
        assert unwrapped is model and not model.is_gradient_checkpointing
    assert model.is_gradient_checkpointing


def test_trl_pad():
    pad = pytest.importorskip("trl.trainer.utils").pad
    rows = [torch.tensor([1]), torch.tensor([2, 3])]
    assert pad(rows, 9, padding_side="left").tolist() == [[9, 1], [2, 3]]
