"""Quantized checkpoints, beside Transformers with the weights that they stand for."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from vllm import SamplingParams
from vllm.model_executor.models.interfaces import SupportsQuant

from lsgpt import LSGPTConfig, LSGPTForCausalLM
from lsgpt.serving import modeling_vllm
from lsgpt.serving.modeling_vllm import check_fits, in_rank_order


GROUP = 32  # inputs that share a scale, in the kinds with 4 bits


def pack(values, dim, order=range(8)):
    """Packs unsigned 4-bit integers along `dim`, 8 of them into an int32, in this order from the lowest bits on."""
    eights = values.long().unflatten(dim, (-1, 8)).movedim(dim + 1, 0)
    return sum(eights[i] << 4 * place for place, i in enumerate(order)).int().contiguous()


def in_groups(weight):
    """4-bit integers `(N, K)` from -8 to 7, their scales `(N, K / GROUP)`, and the weights that they stand for."""
    groups = weight.unflatten(1, (-1, GROUP))
    scale = (groups.abs().amax(-1, keepdim=True) / 7).bfloat16().float()
    integers = (groups / scale).round().clamp(-8, 7)
    return integers.flatten(1).int(), scale.squeeze(-1), (integers * scale).flatten(1)


def int8(weight):
    """compressed-tensors, 8 bits: one scale for each output; inputs are quantized when the model runs."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    integers = (weight / scale).round()
    return {"weight": integers.to(torch.int8), "weight_scale": scale}, integers * scale


def int4(weight):
    """compressed-tensors, 4 bits."""
    integers, scale, dequantized = in_groups(weight)
    shape = torch.tensor(weight.shape)
    return {"weight_packed": pack(integers + 8, 1), "weight_scale": scale, "weight_shape": shape}, dequantized


def gptq(weight):
    integers, scale, dequantized = in_groups(weight)
    tensors = {
        "qweight": pack(integers.T + 8, 0),
        "scales": scale.T.contiguous(),
        "qzeros": pack(torch.full_like(scale.T, 7), 1),  # one less, as AutoGPTQ writes it
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // GROUP,
    }
    return tensors, dequantized


def awq(weight):
    integers, scale, dequantized = in_groups(weight)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        "qweight": pack(integers.T + 8, 1, order),
        "scales": scale.T.contiguous(),
        "qzeros": pack(torch.full_like(scale.T, 8), 1, order),
    }
    return tensors, dequantized


def compressed_tensors(format, weights, inputs=None):
    """The configuration of one scheme for all projections."""
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": scheme}}


CONFIGS = {
    int8: compressed_tensors(
        "int-quantized",
        {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
        {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True},
    ),
    int4: compressed_tensors(
        "pack-quantized",
        {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP},
    ),
    gptq: {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True},
    awq: {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
}


@torch.no_grad()
def save_quantized(folder, quantize, ignore=(), **changes):
    """Saves a model with quantized projections but for those to ignore, and returns what it stands for."""
    config = LSGPTConfig(
        **{
            "vocab_size": 97,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 12,
            "num_key_value_heads": 6,
            "num_global_heads": [4, 8],
            "head_dim": 32,
            "sliding_window": 8,
            "attention_sinks": True,
            "intermediate_size": 128,
            "gated_mlp": True,
            "max_position_embeddings": 256,
            "position_embedding_type": "rope",
            "use_bias": True,
            "initializer_range": 0.2,
        }
        | changes
    )
    model = LSGPTForCausalLM(config).eval()
    model.save_pretrained(folder)
    tensors = {}
    for name, weight in model.state_dict().items():
        layer, _, kind = name.rpartition(".")
        if kind != "weight" or not layer.endswith("_proj") or layer in ignore:
            tensors[name] = weight.clone()
            continue
        quantized, dequantized = quantize(weight)
        tensors |= {f"{layer}.{name}": tensor for name, tensor in quantized.items()}
        weight.copy_(dequantized)
    if config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    content = json.loads((folder / "config.json").read_text())
    # Without its own list, vLLM takes `self_attn` for a layer that AWQ left alone, as `self_attn.sinks` is a float.
    key = "modules_to_not_convert" if quantize is awq else "ignore"
    content["quantization_config"] = CONFIGS[quantize] | {key: ["lm_head", *ignore]}
    (folder / "config.json").write_text(json.dumps(content))
    return model


@torch.no_grad()
def differences(model, llm):
    """The mean difference of the log-probabilities of prompts of 5, 40 and 100 tokens."""
    prompts = [torch.randint(model.config.vocab_size, (length,)) for length in (5, 40, 100)]
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt.tolist()} for prompt in prompts], params, use_tqdm=False)
    results = []
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = model(prompt[None]).logits[0, :-1].log_softmax(-1).gather(1, prompt[1:, None])[:, 0]
        given = [logprobs[token.item()].logprob for token, logprobs in zip(prompt[1:], output.prompt_logprobs[1:])]
        results.append((torch.tensor(given) - expected).abs().mean().item())
    print("mean differences:", *(f"{result:.5f}" for result in results))
    return results


LAYER_0 = [
    f"model.layers.0.{name}_proj" for name in ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.gate", "mlp.up")
]


# Kernels for 4 bits need bfloat16, and so do those for 8 bits where the CPU has AMX. Where a layer is loaded wrongly,
# differences are 0.5 and more.
@pytest.mark.skipif(
    "AVX512" not in torch.backends.cpu.get_cpu_capability(),
    reason="on CPUs with AVX2 only, vLLM 0.32 has no kernels for 4 bits, and those for 8 bits are inaccurate",
)
@pytest.mark.parametrize(
    ("quantize", "ignore", "ranks"),
    [(int8, LAYER_0, 1), (int8, (), 2), (int4, LAYER_0, 2), (gptq, (), 2), (awq, (), 2)],
    ids=["int8-some", "int8-ranks", "int4-some-ranks", "gptq-ranks", "awq-ranks"],
)
def test_equals_transformers(quantize, ignore, ranks, tmp_path, start_engine):
    """The layers that are not quantized are found in vLLM's fused ones, and scales and zeros go with their heads."""
    model = save_quantized(tmp_path, quantize, ignore)
    with start_engine(tmp_path, tensor_parallel_size=ranks, dtype="bfloat16") as llm:
        assert max(differences(model, llm)) < 0.1


CONFIG = LSGPTConfig(
    num_hidden_layers=1, num_attention_heads=16, num_key_value_heads=8, num_global_heads=4, head_dim=32
)


@pytest.mark.parametrize(
    ("name", "shape", "attributes"),
    [
        ("o_proj.weight_scale", (64, 2), {"input_dim": 1, "output_dim": 0}),  # groups of 8 heads; a rank has 2 global
        ("o_proj.weight_scale", (64, 8), {"output_dim": 0}),  # not divided among the ranks
        ("q_proj.qzeros", (4, 33), {"input_dim": 0, "output_dim": 1, "packed_dim": 1, "packed_factor": 8}),
        ("q_proj.unheard_of", (256,), {}),
    ],
)
def test_what_cannot_be_divided_among_ranks(name, shape, attributes):
    name = f"layers.0.self_attn.{name}"
    message = f"`tensor_parallel_size` must be 1 for this checkpoint; got 2, and `{name}` of shape"
    with pytest.raises(ValueError, match=re.escape(message)):
        in_rank_order(name, torch.zeros(shape), SimpleNamespace(**attributes), CONFIG, ranks=2)


@pytest.mark.parametrize(
    ("name", "shape", "attributes", "expected"),
    [
        ("q_proj.weight_scale", (256, 1), {"output_dim": 0}, [0, 2, 3, 4, 1, 5, 6, 7]),
        ("q_proj.qzeros", (1, 64), {"output_dim": 1, "packed_dim": 1, "packed_factor": 8}, [0, 2, 3, 4, 1, 5, 6, 7]),
        ("o_proj.qweight", (64, 1), {"input_dim": 0, "packed_dim": 0, "packed_factor": 8}, [0, 2, 3, 4, 1, 5, 6, 7]),
        ("o_proj.scales", (8, 1), {"input_dim": 0, "output_dim": 1}, [0, 2, 3, 4, 1, 5, 6, 7]),
        ("o_proj.weight_scale", (8, 1), {"output_dim": 0}, list(range(8))),  # one for each output
        ("q_proj.g_idx", (8,), {"input_dim": 0}, list(range(8))),  # one for each input
    ],
)
def test_heads_in_the_order_of_ranks(name, shape, attributes, expected):
    """With 2 global key/value heads and 6 local ones, each rank gets 1 and 3, and the 2 query heads of each."""
    entries = torch.arange(8).repeat_interleave(max(shape) // 8).view(shape)
    ordered = in_rank_order(f"layers.0.self_attn.{name}", entries, SimpleNamespace(**attributes), CONFIG, ranks=2)
    assert ordered.flatten().tolist() == [i for i in expected for _ in range(max(shape) // 8)]


def test_scales_for_whole_tensors_are_for_all_ranks():
    scale = torch.ones(1)
    assert in_rank_order("layers.0.self_attn.q_proj.input_scale", scale, SimpleNamespace(), CONFIG, ranks=2) is scale


@pytest.mark.parametrize(("checkpoint", "layer"), [(torch.bfloat16, torch.int8), (torch.float8_e4m3fn, torch.float32)])
def test_a_layer_is_quantized_where_the_checkpoint_is(checkpoint, layer):
    name = "layers.0.mlp.up_proj.weight"
    with pytest.raises(ValueError, match=f"`quantization_config` must say which .* got `{name}` of type {checkpoint}"):
        check_fits(name, torch.zeros(2, dtype=checkpoint), torch.zeros(2, dtype=layer))
    check_fits(name, torch.zeros(2, dtype=checkpoint), torch.zeros(2, dtype=checkpoint))


def test_vllm_tells_the_quantization_which_layers_are_packed():
    """On every CPU; what follows from it is tested above, where there are kernels."""
    assert issubclass(modeling_vllm.LSGPTForCausalLM, SupportsQuant)
    assert set(modeling_vllm.LSGPTForCausalLM.packed_modules_mapping) == {"qkv_proj", "gate_up_proj"}


def test_tensors_that_vllm_does_not_know():
    with pytest.raises(ValueError, match=r"`quantization_config` must say .* got `layers.0.mlp.up_proj.qweight`"):
        check_fits("layers.0.mlp.up_proj.qweight", torch.zeros(2), None)
    check_fits("layers.0.mlp.up_proj.bias", torch.zeros(2), None)  # GPTQ writes it for layers without a bias
    for name in ("self_attn.k_scale", "self_attn.attn.k_scale", "self_attn.k_proj.k_scale"):
        with pytest.raises(ValueError, match="must not have scales of the key/value cache"):
            check_fits(f"layers.0.{name}", torch.ones(1), None)
