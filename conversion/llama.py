"""Converts the Llama family: Llama, Mistral, Qwen2 and Qwen3, whose parameters have the same names as LSGPT's."""

import copy

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN

from lsgpt.modeling_lsgpt import GLOBAL, LSGPTConfig, LSGPTForCausalLM

from .weights import model_from_weights


MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")

# The parts of a model that may have biases, each with a projection that tells whether it has them.
_BIASED_PARTS = {"qkv_proj": "self_attn.q_proj", "o_proj": "self_attn.o_proj", "mlp": "mlp.up_proj"}


def check_llama(config: PreTrainedConfig):
    """Raises `ValueError` for a configuration that LSGPT cannot express."""

    def require(condition: bool, field: str, rule: str, value):
        if not condition:
            raise ValueError(f"`{field}` of a {config.model_type} model to convert must be {rule}; got {value!r}")

    require(config.hidden_act in ACT2FN, "hidden_act", "an activation that Transformers knows", config.hidden_act)
    rope = config.rope_parameters or {}
    rope_type, rotated = rope.get("rope_type", "default"), rope.get("partial_rotary_factor", 1.0)
    require(rope_type in ROPE_TYPES, "rope_type", f"one of {', '.join(ROPE_TYPES)}", rope_type)
    require(rotated == 1.0, "partial_rotary_factor", "1, because LSGPT rotates whole heads", rotated)

    window, positions = getattr(config, "sliding_window", None), config.max_position_embeddings
    has_window = config.model_type == "mistral" and window is not None
    if config.model_type.startswith("qwen"):  # `use_sliding_window` has set the layer types
        has_window = set(config.layer_types) != {GLOBAL}
    require(
        not has_window or (window is not None and window >= positions),
        "sliding_window",
        "unset, or at least `max_position_embeddings`, because its heads become global. A smaller "
        "`max_position_embeddings` in the source's config.json gives a model for texts that fit into the window. "
        f"`max_position_embeddings` is {positions}",
        window,
    )


def convert_llama(model: PreTrainedModel) -> LSGPTForCausalLM:
    """
    Converts a model to an LSGPT model with the same logits and all heads global. They share their tensors.

    Args:
        model: `LlamaForCausalLM`, `MistralForCausalLM`, `Qwen2ForCausalLM` or `Qwen3ForCausalLM`.

    Raises:
        ValueError: If LSGPT cannot express the configuration; the message names the field and its value.
    """
    source, weights = model.config, model.state_dict()
    check_llama(source)
    biased = [part for part, name in _BIASED_PARTS.items() if f"model.layers.0.{name}.bias" in weights]
    config = LSGPTConfig(
        vocab_size=source.vocab_size,
        hidden_size=source.hidden_size,
        num_hidden_layers=source.num_hidden_layers,
        num_attention_heads=source.num_attention_heads,
        num_key_value_heads=source.num_key_value_heads,
        head_dim=getattr(source, "head_dim", None),
        num_global_heads=source.num_attention_heads,
        intermediate_size=source.intermediate_size,
        gated_mlp=True,
        hidden_act=source.hidden_act,
        max_position_embeddings=source.max_position_embeddings,
        position_embedding_type="rope",
        rope_parameters=copy.deepcopy(source.rope_parameters),
        norm_type="rms_norm",
        use_bias=biased or False,
        qk_norm=source.model_type == "qwen3",
        attention_dropout=source.attention_dropout or 0.0,
        layer_norm_eps=source.rms_norm_eps,
        initializer_range=source.initializer_range,
        tie_word_embeddings=source.tie_word_embeddings,
        bos_token_id=source.bos_token_id,
        eos_token_id=source.eos_token_id,
        pad_token_id=source.pad_token_id,
    )
    return model_from_weights(config, weights)
