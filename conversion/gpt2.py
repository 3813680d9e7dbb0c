"""Converts GPT-2 to LSGPT."""

from transformers import GPT2Config, GPT2LMHeadModel

from lsgpt.modeling_lsgpt import LSGPTConfig, LSGPTForCausalLM

from .weights import model_from_weights, rename_gpt2, without_false_ties


def check_gpt2(config: GPT2Config):
    """Raises `ValueError` for a configuration that LSGPT cannot express."""
    reasons = {
        "scale_attn_weights": (True, "LSGPT divides the logits by the square root of `head_dim`"),
        "scale_attn_by_inverse_layer_idx": (False, "LSGPT scales the logits of all layers in the same way"),
        "is_causal": (True, "LSGPT is causal"),
        "add_cross_attention": (False, "LSGPT is a decoder without an encoder"),
    }
    for field, (value, reason) in reasons.items():
        if (given := getattr(config, field, value)) != value:
            raise ValueError(f"`{field}` of a GPT-2 to convert must be {value}: {reason}; got {given}")


def convert_gpt2(model: GPT2LMHeadModel) -> LSGPTForCausalLM:
    """
    Converts a GPT-2 to an LSGPT model with the same logits and all heads global.

    Raises:
        ValueError: If LSGPT cannot express the configuration.
    """
    check_gpt2(model.config)
    weights = model.state_dict()
    gpt2 = without_false_ties(model.config, weights["lm_head.weight"], weights["transformer.wte.weight"])
    config = LSGPTConfig(
        vocab_size=gpt2.vocab_size,
        hidden_size=gpt2.n_embd,
        num_hidden_layers=gpt2.n_layer,
        num_attention_heads=gpt2.n_head,
        num_global_heads=gpt2.n_head,
        intermediate_size=gpt2.n_inner,
        hidden_act=gpt2.activation_function,
        max_position_embeddings=gpt2.n_positions,
        use_bias=True,
        attention_dropout=gpt2.attn_pdrop,
        resid_dropout=gpt2.resid_pdrop,
        embd_dropout=gpt2.embd_pdrop,
        layer_norm_eps=gpt2.layer_norm_epsilon,
        initializer_range=gpt2.initializer_range,
        tie_word_embeddings=gpt2.tie_word_embeddings,
        bos_token_id=gpt2.bos_token_id,
        eos_token_id=gpt2.eos_token_id,
        pad_token_id=gpt2.pad_token_id,
    )
    # The linear layers inside the blocks are `Conv1D`s, whose weights are transposed.
    weights = {
        name: tensor.t().contiguous() if tensor.ndim == 2 and ".h." in name else tensor
        for name, tensor in weights.items()
    }
    return model_from_weights(config, rename_gpt2(weights, config.num_hidden_layers))
