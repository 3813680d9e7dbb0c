"""What cannot be served is refused with a reason, most of it before a model is loaded."""

import pytest
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from lsgpt.serving import modeling_vllm


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({"num_global_heads": [2, 1]}, "layer 1 has 1 global and 5 local ones"),
        (
            {"num_attention_heads": 10, "num_key_value_heads": 5, "num_global_heads": 4},
            "layer 0 has 2 global and 3 local ones",
        ),
    ],
)
def test_tensor_parallelism_needs_heads_to_share(tiny_model, tmp_path, start_engine, values, found):
    tiny_model(head_dim=32, **values).save_pretrained(tmp_path)
    message = f"`tensor_parallel_size` must divide .* got 2, and {found}"
    with pytest.raises(ValueError, match=message), start_engine(tmp_path, tensor_parallel_size=2):
        pass


def test_rotary_positions_that_vllm_computes_differently(tiny_model, tmp_path, start_engine):
    rope_parameters = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    model = tiny_model(head_dim=32, position_embedding_type="rope", rope_parameters=rope_parameters)
    model.save_pretrained(tmp_path)
    message = "`rope_parameters` must be of a `rope_type` among default, linear, llama3, yarn, .* got 'dynamic'"
    with pytest.raises(ValueError, match=message), start_engine(tmp_path):
        pass


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"norm_type": "rms_norm_after"},
            "`norm_type` must be 'layer_norm' or 'rms_norm' to be served .* got 'rms_norm_after'",
        ),
        ({"qk_norm": "all_heads"}, "`qk_norm` must be False or True to be served with vLLM; got 'all_heads'"),
        ({"final_logit_softcapping": 30.0}, "`final_logit_softcapping` must be None to be served .* got 30.0"),
        (
            {
                "num_global_heads": [0, 6],
                "position_embedding_type": "rope",
                "rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}},
            },
            "`rope_parameters` must be of a `rope_type` among .* in all layers alike, .* got {'full_attention'",
        ),
    ],
)
def test_blocks_that_the_plugin_lacks(tiny_model, tmp_path, start_engine, values, message):
    tiny_model(head_dim=32, **values).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message), start_engine(tmp_path):
        pass


def test_positions_that_vllm_lacks(tiny_model, tmp_path, start_engine):
    rope = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 2.0, "original_max_position_embeddings": 64}
    tiny_model(head_dim=32, position_embedding_type="rope", rope_parameters=rope).save_pretrained(tmp_path)
    message = "`max_model_len` must be at most 128, the positions that vLLM computes with these .* got 256"
    with pytest.raises(ValueError, match=message), start_engine(tmp_path):
        pass


def test_learned_positions_end(tiny_model, tmp_path, start_engine, monkeypatch):
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    tiny_model(head_dim=32).save_pretrained(tmp_path)
    message = "`max_model_len` must be at most 256, the number of learned positions .* got 300"
    with pytest.raises(ValueError, match=message), start_engine(tmp_path, max_model_len=300):
        pass


def test_head_dim_that_the_backend_lacks(tiny_model, tmp_path, start_engine):
    tiny_model(head_dim=520).save_pretrained(tmp_path)
    message = "`head_dim` must be at most 512 for vLLM's attention backend CPU_ATTN; got 520"
    with pytest.raises(ValueError, match=message), start_engine(tmp_path):
        pass


def test_sinks_for_queries_with_a_full_window(tiny_model, tmp_path, start_engine):
    tiny_model(head_dim=32, attention_sinks="full_window").save_pretrained(tmp_path)
    message = '`attention_sinks` must be True or False to be served with vLLM, .* got "full_window"'
    with pytest.raises(ValueError, match=message), start_engine(tmp_path):
        pass


class SinklessImpl(CPUAttentionBackendImpl):
    """Ignores what it does not know, as some of vLLM's do."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args)


class SinklessBackend(CPUAttentionBackend):
    """Attention on the CPU without sinks."""

    @staticmethod
    def get_impl_cls():
        return SinklessImpl


def test_attention_backend_without_sinks(tiny_model, tmp_path, start_engine):
    tiny_model(head_dim=96, attention_sinks=True).save_pretrained(tmp_path)  # vLLM has chosen for other widths already
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.SinklessBackend")
    message = "`attention_sinks` must be False for attention backends .* got True, and CPU_ATTN has none"
    try:
        with pytest.raises(ValueError, match=message), start_engine(tmp_path):
            pass
    finally:
        AttentionBackendEnum.CPU_ATTN.clear_override()


def test_heads_with_a_window_may_have_a_backend_of_their_own(tiny_model, tmp_path, start_engine, monkeypatch):
    """As with vLLM's option `backend_per_kind`. The engine stops after the first layer has asked for both."""
    asked, ask = [], modeling_vllm.get_attn_backend

    def record(*args, has_sliding_window, **options):
        asked.append(has_sliding_window)
        if len(asked) == 2:
            raise ValueError("that is enough")
        return ask(*args, has_sliding_window=has_sliding_window, **options)

    monkeypatch.setattr(modeling_vllm, "get_attn_backend", record)
    tiny_model(head_dim=32).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="that is enough"), start_engine(tmp_path):
        pass
    assert asked == [False, True]
