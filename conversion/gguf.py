"""Loads models from llama.cpp's GGUF files, and refuses what Transformers would silently leave out."""

import re
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from lsgpt.utilities import check_gguf, load_complete, read_gguf, refuse_tensors

from .decoders import convert_config


_LLAMA_TENSORS = {
    *("token_embd.weight", "output_norm.weight", "output.weight"),
    *(f"blk.N.attn_{name}.weight" for name in ("norm", "q", "k", "v", "output")),
    *(f"blk.N.ffn_{name}.weight" for name in ("norm", "gate", "up", "down")),
}
_GEMMA_NORMS = {"blk.N.post_attention_norm.weight", "blk.N.post_ffw_norm.weight"}
_TENSORS = {
    "llama": _LLAMA_TENSORS,  # Mistral's too
    "qwen2": _LLAMA_TENSORS | {"blk.N.attn_q.bias", "blk.N.attn_k.bias", "blk.N.attn_v.bias"},
    "qwen3": _LLAMA_TENSORS | {"blk.N.attn_q_norm.weight", "blk.N.attn_k_norm.weight"},
    "gemma2": _LLAMA_TENSORS | _GEMMA_NORMS,
    "gemma3": _LLAMA_TENSORS | _GEMMA_NORMS | {"blk.N.attn_q_norm.weight", "blk.N.attn_k_norm.weight"},
    "phi3": _LLAMA_TENSORS | {"blk.N.attn_qkv.weight"},
}
"""The names of the tensors that Transformers reads, by architecture."""

_CARD_FIELDS = {
    "license": "general.license",
    "license_name": "general.license.name",
    "license_link": "general.license.link",
    "base_model": "general.base_model.0.repo_url",
}


def load_gguf(path: str | Path) -> PreTrainedModel:
    """
    Loads the model in a GGUF file with Transformers, in float32.

    Raises:
        ValueError: If this is not a GGUF file, or its architecture, settings or tensors cannot be converted.
        ImportError: If the package `gguf` is not installed.
    """
    check_source(path)
    metadata, _ = read_gguf(path)
    try:
        config = AutoConfig.from_pretrained(Path(path).parent, gguf_file=Path(path).name)
    except (ValueError, IndexError) as error:
        raise ValueError(f"the configuration of {str(path)!r} cannot be read: {error}") from error
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):  # Transformers leaves these out
        setattr(config, f"{ours}_token_id", metadata.get(f"tokenizer.ggml.{theirs}_token_id"))
    convert_config(config)
    try:
        return load_complete(path, config=config, dtype=torch.float32)
    except (ValueError, IndexError, RuntimeError) as error:
        raise ValueError(f"the GGUF file {str(path)!r} cannot be read: {error}") from error


def load_gguf_tokenizer(path: str | Path) -> PreTrainedTokenizerBase | None:
    """Loads the tokenizer in a GGUF file, with its chat template; returns None if there is none."""
    metadata, _ = read_gguf(path)
    if "tokenizer.ggml.tokens" not in metadata:
        return None
    tokenizer = AutoTokenizer.from_pretrained(Path(path).parent, gguf_file=Path(path).name)
    if metadata.get("tokenizer.ggml.pre") == "smollm":  # Transformers does not know that it splits digits
        backend = tokenizer.backend_tokenizer
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
    return tokenizer


def read_gguf_origin(path: str | Path) -> dict[str, str]:
    """Reads what a GGUF file says about license and origin, under the field names of model cards."""
    metadata, _ = read_gguf(path)
    origin = {field: metadata[name] for field, name in _CARD_FIELDS.items() if metadata.get(name)}
    if "base_model" in origin:
        origin["base_model"] = origin["base_model"].removeprefix("https://huggingface.co/")
    return origin


def check_source(path: str | Path):
    """Raises `ValueError` or `ImportError` as `load_gguf` does, before anything is loaded."""
    metadata, tensors = read_gguf(path)
    architecture = metadata["general.architecture"]
    if architecture not in _TENSORS:
        raise ValueError(
            f"`general.architecture` of a GGUF file to convert must be one of {', '.join(_TENSORS)}; "
            f"got {architecture!r}"
        )
    check_gguf(metadata, tensors)
    rotated, heads = (
        metadata.get(f"{architecture}.{name}") for name in ("rope.dimension_count", "attention.head_count")
    )
    if architecture == "phi3" and rotated not in (None, metadata["phi3.embedding_length"] // heads):
        raise ValueError(
            "`phi3.rope.dimension_count` of a GGUF file to convert must be the width of its heads, because LSGPT "
            f"rotates whole heads; got {rotated}"
        )
    known = _TENSORS[architecture]
    refuse_tensors([], [name for name in tensors if re.sub(r"^blk\.\d+", "blk.N", name) not in known], [])
