"""Loads Llama-family models from llama.cpp's GGUF files, and refuses what Transformers would silently leave out."""

import importlib.util
import re
import struct
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations.gguf import read_gguf_metadata

from .llama import check_llama
from .nanogpt import refuse_tensors


_LLAMA_TENSORS = {
    *("token_embd.weight", "output_norm.weight", "output.weight"),
    *(f"blk.N.attn_{name}.weight" for name in ("norm", "q", "k", "v", "output")),
    *(f"blk.N.ffn_{name}.weight" for name in ("norm", "gate", "up", "down")),
}
_TENSORS = {
    "llama": _LLAMA_TENSORS,  # Mistral's too
    "qwen2": _LLAMA_TENSORS | {"blk.N.attn_q.bias", "blk.N.attn_k.bias", "blk.N.attn_v.bias"},
    "qwen3": _LLAMA_TENSORS | {"blk.N.attn_q_norm.weight", "blk.N.attn_k_norm.weight"},
}
"""The names of the tensors that Transformers reads, by architecture."""

_UNREAD_SETTINGS = {
    "attention.scale": (None, 0.0),
    "attention.sliding_window": (None, 0),
    "expert_count": (None, 0),
    "rope.scaling.factor": (None, 0.0, 1.0),
    "rope.scaling.type": (None, "none"),
}
"""Settings that Transformers does not read, with the values that make no difference."""

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
    if importlib.util.find_spec("gguf") is None:
        raise ImportError("reading a GGUF file needs the package `gguf`; install it: pip install gguf")
    metadata, tensors = _read(path)
    _check(metadata, tensors)
    place = {"pretrained_model_name_or_path": Path(path).parent, "gguf_file": Path(path).name}
    try:
        config = AutoConfig.from_pretrained(**place)
        for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):  # Transformers leaves these out
            setattr(config, f"{ours}_token_id", metadata.get(f"tokenizer.ggml.{theirs}_token_id"))
        check_llama(config)
        model, found = AutoModelForCausalLM.from_pretrained(
            **place, config=config, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True
        )
    except (ValueError, IndexError, RuntimeError) as error:
        raise ValueError(f"the GGUF file {str(path)!r} cannot be read: {error}") from error
    shapes = [f"{name} {tuple(there)} instead of {tuple(here)}" for name, there, here in found["mismatched_keys"]]
    refuse_tensors(sorted(found["missing_keys"]), [], sorted(shapes))
    return model


def load_gguf_tokenizer(path: str | Path) -> PreTrainedTokenizerBase | None:
    """Loads the tokenizer in a GGUF file, with its chat template; returns None if there is none."""
    metadata, _ = _read(path)
    if "tokenizer.ggml.tokens" not in metadata:
        return None
    tokenizer = AutoTokenizer.from_pretrained(Path(path).parent, gguf_file=Path(path).name)
    if metadata.get("tokenizer.ggml.pre") == "smollm":  # Transformers does not know that it splits digits
        backend = tokenizer.backend_tokenizer
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
    return tokenizer


def read_gguf_origin(path: str | Path) -> dict[str, str]:
    """Reads what a GGUF file says about licence and origin, under the field names of model cards."""
    metadata, _ = _read(path)
    origin = {field: metadata[name] for field, name in _CARD_FIELDS.items() if metadata.get(name)}
    if "base_model" in origin:
        origin["base_model"] = origin["base_model"].removeprefix("https://huggingface.co/")
    return origin


def _read(path: str | Path) -> tuple[dict, tuple[str, ...]]:
    """Reads the metadata (of lists of strings, only their lengths) and the names of the tensors."""
    try:
        return read_gguf_metadata(str(path))
    except (ValueError, IndexError, struct.error) as error:
        raise ValueError(f"the GGUF file {str(path)!r} cannot be read: {error}") from error


def _check(metadata: dict, tensors: tuple[str, ...]):
    architecture, remedy = metadata["general.architecture"], "convert the checkpoint that the file was made from"
    if architecture not in _TENSORS:
        raise ValueError(
            f"`general.architecture` of a GGUF file to convert must be one of {', '.join(_TENSORS)}; "
            f"got {architecture!r}"
        )
    for name, harmless in _UNREAD_SETTINGS.items():
        value = metadata.get(f"{architecture}.{name}")
        if value not in harmless:
            raise ValueError(
                f"`{architecture}.{name}` of a GGUF file to convert must be unset, because Transformers does not read "
                f"it; got {value!r}; {remedy}"
            )
    if "rope_freqs.weight" in tensors:
        raise ValueError(
            "a GGUF file to convert must not have `rope_freqs.weight`, the rope scaling of Llama 3.1 and later, "
            f"because Transformers does not read it; {remedy}"
        )
    known = _TENSORS[architecture]
    refuse_tensors([], [name for name in tensors if re.sub(r"^blk\.\d+", "blk.N", name) not in known], [])
