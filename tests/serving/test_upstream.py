"""What the plugin uses of the insides of vLLM, one test for each thing; see `tests/upstream`."""

import inspect

import torch
from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix


def takes(function, *names):
    """Whether a function or class can be called with these keyword arguments."""
    return set(names) <= set(inspect.signature(function).parameters)


def test_models_config_map_holds_what_verifies_a_configuration():
    assert all(issubclass(checks, VerifyAndUpdateConfig) for checks in MODELS_CONFIG_MAP.values())
    assert takes(VerifyAndUpdateConfig.verify_and_update_config, "vllm_config")


def test_plugins_are_found_in_the_group_general_plugins():
    from vllm.plugins import DEFAULT_PLUGINS_GROUP  # noqa: PLC0415

    assert DEFAULT_PLUGINS_GROUP == "vllm.general_plugins"


def test_get_attn_backend_and_its_supported_head_sizes():
    from vllm.v1.attention.selector import get_attn_backend  # noqa: PLC0415

    assert list(inspect.signature(get_attn_backend).parameters)[:3] == ["head_size", "dtype", "kv_cache_dtype"]
    from vllm.v1.attention.backend import AttentionBackend  # noqa: PLC0415

    assert callable(AttentionBackend.get_supported_head_sizes) and callable(AttentionBackend.get_name)


def test_weights_mapper_has_orig_to_new_stacked():
    mapper = WeightsMapper(orig_to_new_stacked={".q_proj": (".qkv_proj", "q")})
    assert mapper.orig_to_new_stacked == {".q_proj": (".qkv_proj", "q")}
    assert takes(AutoWeightsLoader.load_weights, "weights", "mapper")
    assert maybe_prefix("", "model") == "model" and maybe_prefix("a", "model") == "a.model"


def test_attention_takes_a_window_and_a_soft_cap_for_each_layer():
    from vllm.model_executor.layers.attention import Attention  # noqa: PLC0415

    names = ("num_kv_heads", "cache_config", "quant_config", "logits_soft_cap", "per_layer_sliding_window", "prefix")
    assert list(inspect.signature(Attention).parameters)[:3] == ["num_heads", "head_size", "scale"]
    assert takes(Attention, *names)


def test_the_cpu_backend_takes_sinks_and_others_say_whether_they_do():
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl  # noqa: PLC0415
    from vllm.v1.attention.selector import get_attn_backend  # noqa: PLC0415

    assert takes(CPUAttentionBackendImpl, "sinks")
    assert takes(get_attn_backend, "has_sink", "has_sliding_window")


def test_a_parameter_can_have_its_own_loader():
    from vllm.model_executor.model_loader.weight_utils import sharded_weight_loader  # noqa: PLC0415
    from vllm.model_executor.utils import set_weight_attrs  # noqa: PLC0415

    parameter = torch.nn.Parameter(torch.zeros(2))
    set_weight_attrs(parameter, {"weight_loader": sharded_weight_loader(0)})
    assert takes(parameter.weight_loader, "param", "loaded_weight")


def test_layers_take_the_arguments_of_ours():
    from vllm.model_executor.layers.layernorm import LayerNorm, RMSNorm  # noqa: PLC0415
    from vllm.model_executor.layers.linear import (  # noqa: PLC0415
        ColumnParallelLinear,
        MergedColumnParallelLinear,
        QKVParallelLinear,
        RowParallelLinear,
    )
    from vllm.model_executor.layers.rotary_embedding import get_rope  # noqa: PLC0415
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead  # noqa: PLC0415

    assert takes(LayerNorm, "eps", "bias") and takes(RMSNorm, "eps")
    for layer in (ColumnParallelLinear, MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear):
        assert takes(layer, "bias", "quant_config", "prefix")
    assert list(inspect.signature(MergedColumnParallelLinear).parameters)[:2] == ["input_size", "output_sizes"]
    order = ["hidden_size", "head_size", "total_num_heads", "total_num_kv_heads"]
    assert list(inspect.signature(QKVParallelLinear).parameters)[:4] == order
    assert takes(get_rope, "rope_parameters")
    assert takes(ParallelLMHead.tie_weights, "embed_tokens") and takes(ParallelLMHead, "quant_config", "prefix")


def test_support_torch_compile_compiles_by_the_names_of_forwards_arguments():
    from vllm.compilation.decorators import support_torch_compile  # noqa: PLC0415

    @support_torch_compile
    class Model(torch.nn.Module):
        def __init__(self, *, vllm_config, prefix=""):
            super().__init__()

        def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return positions

    assert takes(Model, "vllm_config", "prefix")


def test_get_impl_cls_names_the_class_that_takes_sinks():
    """`supported_head_size` looks for `sinks` among its arguments."""
    from vllm.model_executor.layers.attention import Attention  # noqa: PLC0415
    from vllm.v1.attention.backends.cpu_attn import (  # noqa: PLC0415
        CPUAttentionBackend,
        CPUAttentionBackendImpl,
    )

    assert CPUAttentionBackend.get_impl_cls() is CPUAttentionBackendImpl
    assert "get_impl_cls()" in inspect.getsource(Attention)


def test_model_config_has_hf_config():
    from vllm.config import ModelConfig, ParallelConfig, VllmConfig  # noqa: PLC0415

    assert {"hf_config", "max_model_len"} <= set(ModelConfig.__dataclass_fields__)
    assert {"model_config", "parallel_config", "cache_config", "quant_config"} <= set(VllmConfig.__dataclass_fields__)
    assert "tensor_parallel_size" in ParallelConfig.__dataclass_fields__


def test_supports_quant_gives_a_quantization_the_names_of_fused_layers():
    from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer  # noqa: PLC0415
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config  # noqa: PLC0415
    from vllm.model_executor.models.interfaces import SupportsQuant  # noqa: PLC0415

    from lsgpt.serving.modeling_vllm import LSGPTForCausalLM  # noqa: PLC0415

    fused = LSGPTForCausalLM.packed_modules_mapping

    class Model(SupportsQuant):
        packed_modules_mapping = fused

        def __init__(self, quant_config):
            pass

    quant_config = Fp8Config()
    assert Model(quant_config).quant_config is quant_config and quant_config.packed_modules_mapping == fused
    parts = ["a.q_proj", "a.k_proj", "a.v_proj"]
    assert should_ignore_layer("a.qkv_proj", parts, fused)
    assert not should_ignore_layer("a.qkv_proj", parts, {})


def test_parameters_say_which_axis_is_divided_among_the_ranks():
    from vllm.model_executor import parameter  # noqa: PLC0415

    columns, both = parameter.ChannelQuantScaleParameter, parameter.PackedvLLMParameter
    assert hasattr(columns, "output_dim") and not hasattr(columns, "input_dim")
    assert all(hasattr(both, name) for name in ("output_dim", "input_dim", "packed_dim", "packed_factor"))
    assert not hasattr(parameter.PerTensorScaleParameter, "output_dim")


def test_weights_mapper_maps_names():
    mapper = WeightsMapper(orig_to_new_stacked={".q_proj": (".qkv_proj", "q")})
    assert mapper.map_name("a.q_proj.weight") == "a.qkv_proj.weight"
