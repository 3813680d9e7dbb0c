"""What we rely on in Transformers' models and configurations beyond what they promise, one test for each thing."""

import inspect
import re
from functools import partial
from importlib import import_module

import pytest
import torch
from accelerate import cpu_offload
from huggingface_hub.dataclasses import strict
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from transformers import (
    AttentionInterface,
    AutoModel,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    initialization,
)
from transformers.distributed import DistributedConfig
from transformers.masking_utils import create_masks_for_generate
from transformers.modeling_layers import GradientCheckpointingLayer

from lsgpt.modeling_lsgpt import CACHE


class TinyConfig(PreTrainedConfig):
    """As much of a configuration as these models need."""

    model_type = "tiny"
    num_hidden_layers, num_attention_heads, hidden_size = 2, 4, 8


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


def test_init_weights_is_called_for_every_module_with_parameters():
    model = TinyModel(TinyConfig())
    assert model.block[0] in model.initialised


def test_initialization_leaves_what_a_checkpoint_has_filled():
    for fill in (initialization.zeros_, lambda x: initialization.normal_(x, mean=0.0, std=1.0)):
        weights = [nn.Parameter(torch.full((3,), 2.0)) for _ in range(2)]
        weights[0]._is_hf_initialized = True
        with torch.no_grad():
            for weight in weights:
                fill(weight)
        assert weights[0].tolist() == [2, 2, 2] and 2 not in weights[1].tolist()


def test_attention_implementations_can_be_set_if_the_layers_file_asks_the_interface(tmp_path, monkeypatch):
    code = (
        "from torch import nn\n"
        "from transformers import PreTrainedModel\n"
        "class TinyAttention(nn.Module):\n    def forward(self): {}\n"
        "class Tiny(PreTrainedModel): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name, body in (("with_interface", "ALL_ATTENTION_FUNCTIONS.get_interface()"), ("without_interface", "pass")):
        (tmp_path / f"{name}.py").write_text(code.format(body))
        assert import_module(name).Tiny._can_set_attn_implementation() is (name == "with_interface")


def test_local_entries_of_an_interface_hide_those_of_all_instances():
    interface, others = AttentionInterface(), AttentionInterface()
    interface["sdpa"] = str
    assert interface["sdpa"] is interface.get_interface("sdpa", None) is interface.get("sdpa") is str
    assert others["sdpa"] is AttentionInterface._global_mapping["sdpa"] is not str
    assert interface["flash_attention_2"] is others["flash_attention_2"]


def test_gradient_checkpointing_layer_drops_the_cache_and_checkpoints_forward_while_training():
    seen = []

    class Layer(GradientCheckpointingLayer):
        def forward(self, x, **kwargs):
            seen.append(kwargs[CACHE])
            return x * 2

    layer = Layer()
    layer.gradient_checkpointing, layer._gradient_checkpointing_func = True, partial(checkpoint, use_reentrant=False)
    layer(torch.ones(1, requires_grad=True), **{CACHE: "cache"}).sum().backward()
    assert set(seen) == {None}
    count = len(seen)
    layer.eval()(torch.ones(1), **{CACHE: "cache"})
    assert seen[count:] == ["cache"]


def test_maybe_distribute_model_gets_the_configuration_in_which_pp_size_stands():
    parameters = inspect.signature(PreTrainedModel.maybe_distribute_model).parameters
    assert list(parameters)[:2] == ["model", "distributed_config"]
    assert "cls.maybe_distribute_model(model, distributed_config, " in inspect.getsource(
        PreTrainedModel.from_pretrained
    )
    assert DistributedConfig(pp_size=2).pp_size == 2


def test_strict_validates_after_post_init_and_asks_validate_layer_type():
    order = []

    @strict
    class Config(PreTrainedConfig):
        model_type = "tiny"
        size: int = 1

        def __post_init__(self, **kwargs):
            order.append("__post_init__")
            super().__post_init__(**kwargs)

        def validate_layer_type(self):
            order.append("validate_layer_type")

        def validate_architecture(self):
            order.append("validate_architecture")
            if self.size < 0:
                raise ValueError("negative")

    Config()
    assert order[0] == "__post_init__" and {"validate_layer_type", "validate_architecture"} == set(order[1:])
    with pytest.raises(Exception, match="negative") as raised:
        Config(size=-1)
    assert not isinstance(raised.value, ValueError)


def test_hooks_of_accelerate_replace_forward_of_the_instance():
    layer = nn.Linear(2, 2)
    assert "forward" not in vars(layer)
    cpu_offload(layer, execution_device=torch.device("cpu"))
    assert "forward" in vars(layer)


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


def test_prepare_position_ids_for_generation_may_return_none():
    class Counted(LlamaForCausalLM):
        def _prepare_position_ids_for_generation(self, inputs_tensor, model_kwargs):
            self.mask = model_kwargs["attention_mask"]

        def forward(self, input_ids=None, attention_mask=None, position_ids=None, **kwargs):
            self.positions = position_ids
            return super().forward(input_ids, attention_mask, position_ids, **kwargs)

    config = LlamaConfig(
        vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, eos_token_id=None
    )
    model = Counted(config)
    assert model.generate(torch.ones(1, 4, dtype=torch.long), max_new_tokens=3).shape == (1, 7)
    assert model.positions is None and model.mask.tolist() == [[1, 1, 1, 1]]


def test_generate_asks_the_model_for_masks_if_its_cache_is_static():
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model, asked = LlamaForCausalLM(LlamaConfig(vocab_size=8, **sizes)).eval(), []

    def create_masks(inputs_embeds, **arguments):
        asked.append((inputs_embeds.shape[1], sorted(arguments)))
        return create_masks_for_generate(inputs_embeds=inputs_embeds, **arguments)

    model.create_masks_for_generate = create_masks
    ids = torch.tensor([[1, 2, 3]])
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, cache_implementation="static")
    known = {"config", "attention_mask", CACHE, "position_ids"}
    assert [length for length, _ in asked][-2:] == [1, 1]
    assert all(known <= set(arguments) for _, arguments in asked)


def test_assistant_early_exit_changes_the_configurations_number_of_layers():
    numbers = set()

    class Counted(LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            numbers.add(self.config.num_hidden_layers)
            return super().forward(*args, **kwargs)

    config = LlamaConfig(
        vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2, eos_token_id=None
    )
    Counted(config).generate(torch.ones(1, 4, dtype=torch.long), max_new_tokens=4, assistant_early_exit=1)
    assert numbers == {1, 2}


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
