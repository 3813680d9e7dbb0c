"""
Converts decoders with Llama's blocks: Llama, Mistral, Ministral, Qwen2, Qwen3, OLMo-2, OLMo-3, Gemma 2 and 3, Phi-3.

Their parameters have nearly the same names as LSGPT's. What LSGPT does not have, such as the scale of Gemma's token
embeddings, becomes part of the weights. Each tensor is converted by itself, so a model need not fit into memory.
"""

import copy
import math
from collections.abc import Collection

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN

from lsgpt.modeling_lsgpt import GLOBAL, LOCAL, LSGPTConfig, LSGPTForCausalLM

from .weights import model_from_weights, without_false_ties


NORM_TYPES = {
    **dict.fromkeys(("llama", "mistral", "ministral", "qwen2", "qwen3", "phi3"), "rms_norm"),
    **dict.fromkeys(("olmo2", "olmo3"), "rms_norm_after"),
    **dict.fromkeys(("gemma2", "gemma3_text"), "rms_norm_around"),
}
"""`norm_type` by the model types that are converted here."""

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")

_QK_NORMS = {"qwen3": True, "gemma3_text": True, "olmo2": "all_heads", "olmo3": "all_heads"}

# The parts of a model that may have biases, each with a projection that tells whether it has them.
_BIASED_PARTS = {"qkv_proj": "self_attn.q_proj", "o_proj": "self_attn.o_proj", "mlp": "mlp.up_proj"}

# LSGPT's names of the norms in models that also have some after attention and MLP.
_NORMS = {
    "post_attention_layernorm": "post_self_attn_layernorm",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "post_mlp_layernorm",
}


def convert_config(source: PreTrainedConfig, tensors: Collection[str] = ()) -> LSGPTConfig:
    """
    Converts a configuration. Heads become global, except in layers with a sliding window, whose heads stay local.

    Args:
        source: The configuration of a model of one of the types in `NORM_TYPES`.
        tensors: The names of the model's tensors, which tell what has biases.

    Raises:
        ValueError: If LSGPT cannot express the configuration; the message names the field and its value.
    """
    kind = source.model_type

    def require(condition: bool, field: str, rule: str, value):
        if not condition:
            raise ValueError(f"`{field}` of a {kind} model to convert must be {rule}; got {value!r}")

    def known(field: str):
        """A field's value; None if the source's class does not have the field, which its model ignores."""
        return getattr(source, field, None) if hasattr(type(source), field) else None

    activation = known("hidden_activation") or source.hidden_act
    require(activation in ACT2FN, "hidden_act", "an activation that Transformers knows", activation)
    bidirectional = getattr(source, "use_bidirectional_attention", None)
    require(not bidirectional, "use_bidirectional_attention", "unset: LSGPT is causal", bidirectional)
    is_causal = getattr(source, "is_causal", True)
    require(is_causal is not False, "is_causal", "unset: LSGPT is causal", is_causal)

    layers, window = source.num_hidden_layers, known("sliding_window")
    layer_types = known("layer_types") or [LOCAL if window else GLOBAL] * layers
    require(set(layer_types) <= {GLOBAL, LOCAL}, "layer_types", f"{GLOBAL} or {LOCAL} in each layer", layer_types)
    ropes = source.rope_parameters or {}
    if LOCAL in ropes and (len(set(layer_types)) == 1 or ropes[LOCAL] == ropes[GLOBAL]):
        ropes = ropes[layer_types[0]]
    for rope in (ropes.get(GLOBAL, ropes), ropes.get(LOCAL, ropes)):
        rope_type, rotated = rope.get("rope_type", "default"), rope.get("partial_rotary_factor", 1.0)
        require(rope_type in ROPE_TYPES, "rope_type", f"one of {', '.join(ROPE_TYPES)}", rope_type)
        require(rotated == 1.0, "partial_rotary_factor", "1, because LSGPT rotates whole heads", rotated)
    # A window that no text outgrows changes nothing. Where it also decides about the rotation, layers keep it.
    if window is None or (window >= source.max_position_embeddings and LOCAL not in ropes):
        layer_types = [GLOBAL]
    require(layer_types == [GLOBAL] or window >= 2, "sliding_window", "at least 2", window)

    heads = source.num_attention_heads
    counts = [heads if layer_type == GLOBAL else 0 for layer_type in layer_types]
    biased = [part for part, name in _BIASED_PARTS.items() if f"model.layers.0.{name}.bias" in tensors]
    return LSGPTConfig(
        vocab_size=source.vocab_size,
        hidden_size=source.hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=source.num_key_value_heads,
        head_dim=getattr(source, "head_dim", None),
        num_global_heads=counts if len(set(counts)) > 1 else counts[0],
        **({} if layer_types == [GLOBAL] else {"sliding_window": window}),
        intermediate_size=source.intermediate_size,
        gated_mlp=True,
        hidden_act=activation,
        max_position_embeddings=source.max_position_embeddings,
        position_embedding_type="rope",
        rope_parameters=copy.deepcopy(ropes),
        norm_type=NORM_TYPES[kind],
        use_bias=biased or False,
        qk_norm=_QK_NORMS.get(kind, False),
        # Gemma 3 has this field, too, but does not use it.
        attn_logit_softcapping=source.attn_logit_softcapping if kind == "gemma2" else None,
        final_logit_softcapping=known("final_logit_softcapping"),
        attention_dropout=source.attention_dropout or 0.0,
        resid_dropout=known("resid_pdrop") or 0.0,
        layer_norm_eps=source.rms_norm_eps,
        initializer_range=source.initializer_range,
        tie_word_embeddings=source.tie_word_embeddings,
        bos_token_id=source.bos_token_id,
        eos_token_id=source.eos_token_id,
        pad_token_id=source.pad_token_id,
    )


def convert_tensor(
    source: PreTrainedConfig, config: LSGPTConfig, name: str, tensor: torch.Tensor
) -> dict[str, torch.Tensor]:
    """
    Converts one tensor of a model.

    Args:
        source: The model's configuration.
        config: What `convert_config` has made of it.
        name: Name of the tensor.
        tensor: The tensor, in the dtype that the result is to have.

    Returns:
        The tensors of the LSGPT model that it becomes, by name: the same one where nothing has to be changed, several
        for fused projections, and none for an output projection that is tied to the token embeddings.
    """
    path, _, suffix = name.rpartition(".")
    prefix, _, module = path.rpartition(".")
    if module == "lm_head" and config.tie_word_embeddings:
        return {}
    if module == "qkv_proj":
        q_size, kv_size = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        parts = tensor.split([q_size, kv_size, kv_size])
        return {f"{prefix}.{x}_proj.{suffix}": part.clone() for x, part in zip("qkv", parts)}
    if module == "gate_up_proj":
        return {f"{prefix}.{x}_proj.{suffix}": part.clone() for x, part in zip(("gate", "up"), tensor.chunk(2))}
    if config.norm_type != "rms_norm" and module in _NORMS:
        name = f"{prefix}.{_NORMS[module]}.{suffix}"
    if source.model_type.startswith("gemma"):
        tensor = _convert_gemma(source, config, module, tensor)
    return {name: tensor}


def _convert_gemma(source: PreTrainedConfig, config: LSGPTConfig, module: str, tensor: torch.Tensor) -> torch.Tensor:
    """
    Makes Gemma's scales part of its weights: norms multiply by `1 + weight`; token embeddings are multiplied by
    `sqrt(hidden_size)`, which tied output projections must not be, so that the last norm divides by it; and logits of
    attention are divided by `sqrt(query_pre_attn_scalar)` instead of `sqrt(head_dim)`.
    """
    dtype = tensor.dtype
    embedding_scale = torch.tensor(config.hidden_size**0.5, dtype=dtype).item()  # Gemma rounds it, too
    if "norm" in module:
        tensor = 1 + tensor.double()
    if module == "embed_tokens":
        tensor = tensor * embedding_scale
    elif module == "norm" and config.tie_word_embeddings:
        tensor = tensor / embedding_scale
    elif module == ("q_norm" if config.qk_norm else "q_proj") and source.query_pre_attn_scalar != config.head_dim:
        tensor = tensor * math.sqrt(config.head_dim / source.query_pre_attn_scalar)
    return tensor.to(dtype)


def convert_decoder(model: PreTrainedModel) -> LSGPTForCausalLM:
    """
    Converts a model to an LSGPT model with the same logits. They share the tensors that are equal.

    Args:
        model: A model of one of the types in `NORM_TYPES`, with its language-modelling head.

    Raises:
        ValueError: If LSGPT cannot express the configuration; the message names the field and its value.
    """
    weights = model.state_dict()
    source = without_false_ties(model.config, weights["lm_head.weight"], weights["model.embed_tokens.weight"])
    config = convert_config(source, weights)
    converted = {}
    for name, tensor in weights.items():
        converted |= convert_tensor(source, config, name, tensor)
    return model_from_weights(config, converted)
