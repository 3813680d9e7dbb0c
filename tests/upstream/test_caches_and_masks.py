"""What we rely on in Transformers' caches, masks and engines beyond what they promise, one test for each thing."""

import inspect
import sys
import types
from collections import defaultdict

import pytest
import torch
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    DynamicCache,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    configuration_utils,
)
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticCache
from transformers.modeling_flash_attention_utils import _process_flash_attention_kwargs
from transformers.modeling_layers import GradientCheckpointingLayer

from lsgpt.modeling_lsgpt import CACHE


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


def test_layers_that_can_checkpoint_with_a_cache_keep_it():
    class Layer(GradientCheckpointingLayer):
        def forward(self, x, **kwargs):
            return x if kwargs[CACHE] is None else 2 * x

    layer = Layer().train()
    layer.gradient_checkpointing, layer._gradient_checkpointing_func = True, lambda function, *args: function(*args)
    assert layer(1.0, **{CACHE: "a cache"}) == 1.0
    layer._can_checkpoint_with_cache = True
    assert layer(1.0, **{CACHE: "a cache"}) == 2.0


def test_the_window_of_flash_attention_counts_a_query_s_own_key():
    """`sliding_window` is W, as here; FlashAttention's own argument counts the keys on each side."""
    supported = defaultdict(bool, window_size=True)
    arguments = {"query_length": 20, "key_length": 20, "is_causal": True, "supports_mapping": supported}
    assert _process_flash_attention_kwargs(sliding_window=8, **arguments)["window_size"] == (7, 7)
