"""The weights of converted models: GPT-2's names, and models that are built from a state dict."""

import copy

import torch
from accelerate import init_empty_weights
from transformers import PreTrainedConfig

from lsgpt.modeling_lsgpt import LSGPTConfig, LSGPTForCausalLM


_NAMES = {
    "ln_1": "input_layernorm",
    "attn.c_proj": "self_attn.o_proj",
    "ln_2": "post_attention_layernorm",
    "mlp.c_fc": "mlp.up_proj",
    "mlp.c_proj": "mlp.down_proj",
}


def model_from_weights(config: LSGPTConfig, weights: dict[str, torch.Tensor]) -> LSGPTForCausalLM:
    """Builds a model, in evaluation mode, that uses the tensors of a state dict without copying them."""
    # Avoids initializing weights, and a second copy in memory. Buffers are real: the state dict does not have them.
    with init_empty_weights(include_buffers=False):
        model = LSGPTForCausalLM(config)
    if config.tie_word_embeddings:
        weights = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    return model.to(model.device).eval()


def without_false_ties(source: PreTrainedConfig, lm_head: torch.Tensor, embeddings: torch.Tensor) -> PreTrainedConfig:
    """Returns the configuration, but untied if the weights differ: Transformers does not tie them then."""
    if not source.tie_word_embeddings or torch.equal(lm_head, embeddings):
        return source
    source = copy.deepcopy(source)
    source.tie_word_embeddings = False
    return source


def rename_gpt2(weights: dict[str, torch.Tensor], num_layers: int) -> dict[str, torch.Tensor]:
    """Renames the parameters to LSGPT's names; heads keep their order."""
    renamed = {
        "model.embed_tokens.weight": weights["transformer.wte.weight"],
        "model.embed_positions.weight": weights["transformer.wpe.weight"],
        "lm_head.weight": weights["lm_head.weight"],
    }
    for suffix in ("weight", "bias"):
        if f"transformer.ln_f.{suffix}" not in weights:
            continue
        renamed[f"model.norm.{suffix}"] = weights[f"transformer.ln_f.{suffix}"]
        for layer in range(num_layers):
            theirs, ours = f"transformer.h.{layer}.", f"model.layers.{layer}."
            for name, new_name in _NAMES.items():
                renamed[f"{ours}{new_name}.{suffix}"] = weights[f"{theirs}{name}.{suffix}"]
            parts = weights[f"{theirs}attn.c_attn.{suffix}"].chunk(3)
            for name, part in zip("qkv", parts):
                renamed[f"{ours}self_attn.{name}_proj.{suffix}"] = part.clone()
    return renamed
