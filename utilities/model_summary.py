"""Summarises a model: its shape and size, and its costs compared with plain multi-head attention."""

from lsgpt.modeling_lsgpt import FULL_WINDOW, LSGPTConfig

from .wording import with_unit


def describe(config: LSGPTConfig) -> dict[str, str]:
    """The shape and size of a model, as labels and values. Omits what is as in GPT-2's blocks."""
    counts, heads = config.num_global_heads_per_layer, config.num_attention_heads
    if len(set(counts)) == 1:
        kinds = f"{counts[0]} global + {heads - counts[0]} local"
    else:
        kinds = f"{heads}, of them global by layer: {' '.join(map(str, counts))}"
    shared = "" if config.num_key_value_heads == heads else f" ({config.num_key_value_heads} key/value heads)"
    sinks = ", and a learned sink for each local head" if has_sinks(config) else ""
    sinks += " (for queries with a full window)" if sinks and config.attention_sinks == FULL_WINDOW else ""
    blocks = {"blocks": parts} if (parts := _describe_blocks(config)) else {}
    window = {"window": f"{config.sliding_window} tokens{sinks}"} if min(counts) < heads else {}
    return {
        "layers": str(config.num_hidden_layers),
        "hidden size": f"{config.hidden_size} (MLP {config.intermediate_size})",
        **blocks,
        "heads per layer": f"{kinds}, {config.head_dim} dimensions each{shared}",
        **window,
        "positions": f"{config.position_embedding_type}, {config.max_position_embeddings:,}",
        "vocabulary": f"{config.vocab_size:,}",
        "parameters": with_unit(config.num_parameters()),
    }


def has_sinks(config: LSGPTConfig) -> bool:
    """Whether any head has a sink, which only local heads can have."""
    return bool(config.attention_sinks) and min(config.num_global_heads_per_layer) < config.num_attention_heads


VLLM_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""
Types of rotary embeddings that vLLM and Transformers compute in the same way. Of the others, "dynamic" and "longrope"
depend on the length of the request in Transformers, and on `max_model_len` in vLLM.
"""


def runs_on_vllm(config: LSGPTConfig) -> bool:
    """Whether vLLM computes the sinks and the positions of a model in the same way as Transformers."""
    if has_sinks(config) and config.attention_sinks == FULL_WINDOW:
        return False
    return config.position_embedding_type != "rope" or config.rope_parameters["rope_type"] in VLLM_ROPE_TYPES


def _describe_blocks(config: LSGPTConfig) -> str:
    """Describes how blocks differ from the default ones, with layer norms, no biases and a GELU MLP."""
    places = {"qkv_proj": "queries, keys and values", "o_proj": "attention output", "mlp": "MLP"}
    if config.norm_type == "layer_norm":
        places["norm"] = "norms"
    biased = [place for part, place in places.items() if config.has_bias(part)]
    parts = {
        "RMSNorm": config.norm_type == "rms_norm",
        f"gated MLP ({config.hidden_act})": config.gated_mlp,
        f"MLP with {config.hidden_act}": not config.gated_mlp and config.hidden_act != LSGPTConfig.hidden_act,
        "biases": len(biased) == len(places),
        f"biases of {', '.join(biased)}": 0 < len(biased) < len(places),
        "RMSNorm of queries and keys": config.qk_norm,
        f"attention logits capped at {config.attn_logit_softcapping}": config.attn_logit_softcapping is not None,
        "tied embeddings": config.tie_word_embeddings,
    }
    return ", ".join(part for part, is_there in parts.items() if is_there)


def compare_costs(config: LSGPTConfig, length: int) -> dict[str, tuple[str, str, str]]:
    """The cost of `length` tokens in this model and in the same model with all heads global, and the ratio of both."""
    mhsa = config.equal_mhsa()
    costs = {
        "forward FLOPs per token": ("", config.flops_per_token(length), mhsa.flops_per_token(length)),
        "KV cache in 16 bit, one sequence": ("B", config.kv_cache_bytes(length), mhsa.kv_cache_bytes(length)),
    }
    return {
        name: (with_unit(ours, unit), with_unit(theirs, unit), f"{ours / theirs:.1%}")
        for name, (unit, ours, theirs) in costs.items()
    }
