"""Summarizes a model: its shape and size, and its costs compared with plain multi-head attention."""

from lsgpt.modeling_lsgpt import FULL_WINDOW, LOCAL, LSGPTConfig
from lsgpt.modeling_lsgpt.context_parallel_lsgpt import count_tokens_sent

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


SERVED_VALUES = {
    "norm_type": ("layer_norm", "rms_norm"),
    "qk_norm": (False, True),
    "final_logit_softcapping": (None,),
}
"""
The values of fields that the vLLM plugin implements. For all other fields, it implements every value except the
`attention_sinks` and the types of rotary embeddings that `runs_on_vllm` excludes.
"""


def runs_on_vllm(config: LSGPTConfig) -> bool:
    """Whether the vLLM plugin implements a model, and vLLM computes its positions in the same way as Transformers."""
    if has_sinks(config) and config.attention_sinks == FULL_WINDOW:
        return False
    is_served = all(getattr(config, field) in supported for field, supported in SERVED_VALUES.items())
    rope_type = (config.rope_parameters or {}).get("rope_type")  # none if layers differ in their rotary embeddings
    return is_served and (config.position_embedding_type != "rope" or rope_type in VLLM_ROPE_TYPES)


def _describe_blocks(config: LSGPTConfig) -> str:
    """Describes how blocks differ from the default ones, with layer norms, no biases and a GELU MLP."""
    places = {"qkv_proj": "queries, keys and values", "o_proj": "attention output", "mlp": "MLP"}
    if config.norm_type == "layer_norm":
        places["norm"] = "norms"
    biased = [place for part, place in places.items() if config.has_bias(part)]
    parts = {
        "RMSNorm": config.norm_type == "rms_norm",
        "RMSNorm after attention and MLP": config.norm_type == "rms_norm_after",
        "RMSNorm before and after attention and MLP": config.norm_type == "rms_norm_around",
        f"gated MLP ({config.hidden_act})": config.gated_mlp,
        f"MLP with {config.hidden_act}": not config.gated_mlp and config.hidden_act != LSGPTConfig.hidden_act,
        "biases": len(biased) == len(places),
        f"biases of {', '.join(biased)}": 0 < len(biased) < len(places),
        "RMSNorm of queries and keys": bool(config.qk_norm),
        "other rotary embeddings in layers without global heads": LOCAL in (config.rope_parameters or {}),
        f"logits capped at {config.final_logit_softcapping}": config.final_logit_softcapping is not None,
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
    return {name: _with_ratio(ours, theirs, unit) for name, (unit, ours, theirs) in costs.items()}


def compare_split(config: LSGPTConfig, length: int, processes: int) -> dict[str, tuple[str, str, str]]:
    """
    The cost of splitting sequences of `length` tokens over processes, in this model and in the same model with all
    heads global, and the ratio of both. Raises `ValueError` if there are no equal parts.
    """
    if length % processes:
        raise ValueError(f"`length` must be a multiple of `processes`, which is {processes}; got {length}")
    mhsa = config.equal_mhsa()
    own = mhsa.kv_cache_bytes(length // processes) / config.num_hidden_layers
    (keys, traded), (equal_keys, equal_traded) = (split_bytes(each, length, processes) for each in (config, mhsa))
    slowest, equal_slowest = (slowest_share(each, length, processes) for each in (config, mhsa))
    return {
        "received per layer, forward, 16 bit": _with_ratio(keys + traded, equal_keys + equal_traded, "B"),
        "keys and values per layer, 16 bit": _with_ratio(own + keys, own + equal_keys, "B"),
        "work of the slowest process / mean": (f"{slowest:.2f}", f"{equal_slowest:.2f}", ""),
    }


def split_bytes(config: LSGPTConfig, length: int, processes: int, bytes_per_value: int = 2) -> tuple[float, float]:
    """
    Bytes of keys and values, and of traded queries and their outputs, that the last of `processes` receives in a
    forward pass over `length` tokens, averaged over the layers. No process receives more, and none sends more in the
    forward pass. The backward pass moves the same number of bytes in the other direction.

    With T tokens in each of R parts, a key/value head needs `2 * D` numbers for each earlier token that it sees:
    `(R - 1) * T` of them if it is global, `min(W - 1, (R - 1) * T)` if it is local. A global query head trades the
    queries and outputs of `T / 2` tokens, `D` numbers each.
    """
    groups, part = config.num_attention_heads // config.num_key_value_heads, length // processes
    kinds = [(config.window(kind), heads) for kind, heads in config.cache_layers]
    earlier = sum(
        heads // groups * count_tokens_sent(sender, processes - 1, processes, part, window)
        for window, heads in kinds
        for sender in range(processes - 1)
    )
    traded = sum(heads * (part // 2) for window, heads in kinds if window is None and processes > 1)
    per_token = 2 * config.head_dim * bytes_per_value / config.num_hidden_layers
    return per_token * earlier, per_token * traded


def slowest_share(config: LSGPTConfig, length: int, processes: int) -> float:
    """
    Operations of the slowest process relative to the mean over all, if each computes the first half of its part and
    the second half of another. (Local heads keep their second half, which takes them as long, except at the beginning
    of the sequence.) See `LSGPTConfig.flops_per_token` for what counts.
    """
    part, half = length // processes, length // processes // 2

    def operations(begin: int, end: int) -> float:
        return sum(sign * n * config.flops_per_token(n) for sign, n in ((1, end), (-1, begin)) if n)

    shares = [
        operations(rank * part, (rank + 1) * part - half)
        + operations((processes - rank) * part - half, (processes - rank) * part)
        for rank in range(processes)
    ]
    return max(shares) / (sum(shares) / processes)


def _with_ratio(ours: float, theirs: float, unit: str) -> tuple[str, str, str]:
    return with_unit(ours, unit), with_unit(theirs, unit), f"{ours / theirs:.1%}" if theirs else ""
