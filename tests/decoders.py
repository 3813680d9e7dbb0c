"""Decoders to convert: small random models of other architectures, and a tokenizer for them."""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from lsgpt.training import train_tokenizer


SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-3,
    "initializer_range": 0.2,  # logits far apart, so that equal greedy text means equal computation
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "pad_token_id": 0,
    "attention_dropout": 0.1,
}


def make_source(config_class=LlamaConfig, **values):
    """A model all of whose weights matter, norms and biases too."""
    model = AutoModelForCausalLM.from_config(config_class(**{**SIZES, **values}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


@torch.no_grad()
def relative_error(model, source, ids, **inputs):
    """Of the logits, where there is no padding."""
    seen = inputs.get("attention_mask", torch.ones_like(ids)).bool()
    actual, expected = (m(input_ids=ids, **inputs).logits[seen] for m in (model, source))
    return ((actual - expected).norm() / expected.norm()).item()


def make_tokenizer():
    tokenizer = train_tokenizer(["to be or not to be, that is the question 12 34"], 290)
    tokenizer.chat_template = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    return tokenizer
