"""Tiny decoders for the tests of soft thinking, their vocabulary, and rollouts of them."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lsgpt import LSGPTConfig, LSGPTForCausalLM
from lsgpt.training import generate_soft_thinking


WORDS = ["<pad>", "<eos>", "<unk>", "</think>", *"0123456789+="]
PAD, EOS, _, END = range(4)

PADDED = torch.tensor([[PAD, PAD, 6, 15], [5, 14, 6, 15], [PAD, 9, 14, 8], [4, 4, 4, 4]])
"""Prompts."""

both = pytest.mark.parametrize("name", ["lsgpt", "llama"])


def make_model(name, **options):
    """A tiny decoder with random weights: an LSGPT with learned positions and tied embeddings, or a Llama."""
    torch.manual_seed(0)
    sizes = {"vocab_size": len(WORDS), "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"initializer_range": 0.2, "pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": None, **options}
    if name == "lsgpt":
        return LSGPTForCausalLM(LSGPTConfig(**sizes, sliding_window=4, tie_word_embeddings=True)).eval()
    return LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=48, num_key_value_heads=2)).eval()


def roll_out(model, input_ids=PADDED, seed=0, **options):
    options = {"end_of_thinking_id": END, "max_new_tokens": 12, "pad_token_id": PAD, **options}
    return generate_soft_thinking(
        model, input_ids, (input_ids != PAD).long(), generator=torch.Generator().manual_seed(seed), **options
    )
