"""A model in figures: its shape and size, and what it costs beside plain multi-head attention."""

from lsgpt.modeling_lsgpt import LSGPTConfig

from .wording import with_unit


def describe(config: LSGPTConfig) -> dict[str, str]:
    """The shape and size of a model, in words to their values."""
    counts, heads = config.num_global_heads_per_layer, config.num_attention_heads
    if len(set(counts)) == 1:
        kinds = f"{counts[0]} global + {heads - counts[0]} local"
    else:
        kinds = f"{heads}, of them global by layer: {' '.join(map(str, counts))}"
    shared = "" if config.num_key_value_heads == heads else f" ({config.num_key_value_heads} key/value heads)"
    return {
        "layers": str(config.num_hidden_layers),
        "hidden size": f"{config.hidden_size} (MLP {config.intermediate_size})",
        "heads per layer": f"{kinds}, {config.head_dim} dimensions each{shared}",
        "window": f"{config.sliding_window} tokens",
        "positions": f"{config.position_embedding_type}, {config.max_position_embeddings:,}",
        "vocabulary": f"{config.vocab_size:,}",
        "parameters": with_unit(config.num_parameters()),
    }


def compare_costs(config: LSGPTConfig, length: int) -> dict[str, tuple[str, str, str]]:
    """What `length` tokens cost, beside the same model with all heads global: this model, that one, the ratio."""
    mhsa = config.equal_mhsa()
    costs = {
        "forward FLOPs per token": ("", config.flops_per_token(length), mhsa.flops_per_token(length)),
        "KV cache in 16 bit, one sequence": ("B", config.kv_cache_bytes(length), mhsa.kv_cache_bytes(length)),
    }
    return {
        name: (with_unit(ours, unit), with_unit(theirs, unit), f"{ours / theirs:.1%}")
        for name, (unit, ours, theirs) in costs.items()
    }
