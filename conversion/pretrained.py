"""Converts pretrained models of Transformers to LSGPT, along with their tokenizer, license and origin."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import yaml
from huggingface_hub import ModelCard, ModelCardData, hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError, StrictDataclassError
from huggingface_hub.repocard import metadata_load
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from lsgpt.modeling_lsgpt import LSGPTForCausalLM
from lsgpt.utilities import load_complete

from .decoders import NORM_TYPES, convert_config, convert_decoder
from .gguf import check_source, load_gguf, load_gguf_tokenizer, read_gguf_origin
from .gpt2 import check_gpt2, convert_gpt2


logger = logging.get_logger(__name__)

_MOE = "its MLPs are mixtures of experts, and those of LSGPT are dense"

# What LSGPT cannot express, with the reason.
_REFUSED = {
    **dict.fromkeys(("gpt_oss", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe"), _MOE),
    "gemma3": "it also reads images. Save its language model on its own: load it with Transformers' "
    "`Gemma3ForConditionalGeneration`, and save a `Gemma3ForCausalLM` with its `model.language_model` and `lm_head`",
    "gemma3n": "its layers have embeddings of their own",
    "gemma4": "its heads differ in width between layers",
}

_CONVERTERS: dict[str, tuple[Callable, Callable]] = {
    "gpt2": (check_gpt2, convert_gpt2),
    **dict.fromkeys(NORM_TYPES, (convert_config, convert_decoder)),
}

# Every checkpoint with a tokenizer has one of these files.
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")

_CARD_FIELDS = ("license", "license_name", "license_link", "base_model")


def load_pretrained(source: str | Path) -> PreTrainedModel:
    """
    Loads a model for `convert_pretrained` from a folder, by its name on the Hub, or from a GGUF file. Its dtype is the
    one in its config.json, or else that of its weights; models from GGUF files are float32.

    Raises:
        ValueError: If it is another kind of model, LSGPT cannot express it, or tensors are missing, unknown or do not
            have the shapes of the configuration; the message names them.
        ImportError: If it is a GGUF file and the package `gguf` is not installed.
    """
    if _is_gguf(source):
        return load_gguf(source)
    config = load_config(source)
    try:
        return load_complete(source, may_have_more=False, config=config)
    except (OSError, RuntimeError) as error:
        raise ValueError(f"the weights of {str(source)!r} cannot be loaded: {error}") from error


def load_config(source: str | Path) -> PreTrainedConfig:
    """
    Loads the configuration of a model from its folder or by its name on the Hub.

    Raises:
        ValueError: If it is another kind of model, or LSGPT cannot express it; the message names the reason.
    """
    try:
        values, _ = PreTrainedConfig.get_config_dict(source)
    except OSError as error:
        if Path(source).is_dir():
            raise ValueError(f"the configuration of {str(source)!r} cannot be read: {error}") from error
        raise ValueError(
            f"there is no folder {str(source)!r} here, and no model of that name could be read from the Hub: {error}"
        ) from error
    kind = values.get("model_type")
    if kind in _REFUSED:
        raise ValueError(
            f"{str(source)!r} is of the model type {kind!r}, which LSGPT cannot express: {_REFUSED[kind]}"
        )
    if kind not in _CONVERTERS:
        found = f"is of the model type {kind!r}" if kind else "has no config.json that names a model type"
        if not kind and Path(source).is_dir() and any(Path(source).glob("*.gguf")):
            found += ", but a GGUF file: name that file as the source"
        raise ValueError(
            "the source must be a file of nanoGPT or of the paper's code (`ckpt.pt`), a GGUF file, or a model of the "
            f"type {', '.join(_CONVERTERS)}, given by its folder or its name on the Hub; {str(source)!r} {found}"
        )
    if values.get("quantization_config"):
        method = values["quantization_config"].get("quant_method")
        raise ValueError(
            f"`quantization_config` of a model to convert must be unset; {str(source)!r} is quantized with {method}: "
            "convert the model that it was made from, or load it with Transformers, call `dequantize()` and save it"
        )
    check, _ = _CONVERTERS[kind]
    try:
        config = AutoConfig.from_pretrained(source)
    except (ValueError, KeyError, StrictDataclassError) as error:
        raise ValueError(f"the configuration of {str(source)!r} cannot be read: {error}") from error
    check(config)
    return config


def convert_pretrained(model: PreTrainedModel) -> LSGPTForCausalLM:
    """
    Converts a model to an LSGPT model with the same logits and dtype. Heads with a sliding window stay local, and all
    others are global.

    Args:
        model: GPT-2 or a model of one of the types in `decoders.NORM_TYPES`, with its language-modelling head.

    Raises:
        ValueError: If it is another model, or LSGPT cannot express its configuration.
    """
    kind = model.config.model_type
    if kind not in _CONVERTERS:
        raise ValueError(f"the model must be one of {', '.join(_CONVERTERS)}; got {kind!r}")
    _, convert = _CONVERTERS[kind]
    return convert(model)


def load_tokenizer(source: str | Path) -> PreTrainedTokenizerBase | None:
    """
    Loads the tokenizer of a source, with its chat template; returns None if there is no tokenizer.

    Raises:
        ValueError: If the tokenizer cannot be loaded, or as `load_pretrained` for a GGUF file.
        ImportError: If it is a GGUF file and the package `gguf` is not installed.
    """
    if _is_gguf(source):
        check_source(source)  # whose errors are not those of a tokenizer
    try:
        if _is_gguf(source):
            return load_gguf_tokenizer(source)
        # Checked by name, because without these files Transformers makes a tokenizer with an empty vocabulary.
        if not any(find_file(source, name) for name in _VOCABULARIES):
            return None
        return AutoTokenizer.from_pretrained(source)
    except Exception as error:  # `tokenizers` raises nothing more specific
        raise ValueError(f"the tokenizer of {str(source)!r} cannot be loaded: {error}") from error


def find_file(source: str | Path, name: str) -> Path | None:
    """
    Returns the path of a checkpoint's file, downloading it if necessary; None if there is no such file. Warns if the
    Hub cannot be reached and the file is not in the cache, because nobody knows then whether there is one.
    """
    folder = Path(source)
    if folder.is_dir():
        return folder / name if (folder / name).is_file() else None
    try:
        return Path(hf_hub_download(str(source), name))
    except LocalEntryNotFoundError:
        logger.warning(
            f"the Hub cannot be reached, and {name} of {str(source)!r} is not in the cache: if there is such a file, "
            f"the converted model will lack it. Download the whole repository first: hf download {source}"
        )
        return None
    except EntryNotFoundError:
        return None


def read_origin(source: str | Path) -> dict:
    """
    Reads what a model card should say about a source: `license`, with `license_name` and `license_link` if the Hub
    does not list it, and `base_model`, which is the source's name on the Hub or, for local files, the name of the
    model that they were made from. Fields that are not stated anywhere are left out.

    Raises:
        ValueError: If the metadata of the README.md cannot be read.
    """
    known = {}
    readme = find_file(Path(source).parent if _is_gguf(source) else source, "README.md")
    if readme is not None:
        try:
            known = metadata_load(readme) or {}
        except (ValueError, yaml.YAMLError) as error:
            raise ValueError(f"the metadata of {str(readme)!r} cannot be read: {error}") from error
    if _is_gguf(source):
        known |= read_gguf_origin(source)
    elif not Path(source).is_dir():
        known["base_model"] = str(source)
    return {field: known[field] for field in _CARD_FIELDS if known.get(field)}


def write_origin(source: str | Path, folder: str | Path, origin: dict):
    """
    Writes what `read_origin` found into the metadata of a README.md, and copies the source's LICENSE, or the file that
    its metadata names. What lies beside a GGUF file need not belong to it, so that a LICENSE is copied only if named.
    """
    name = source if origin.get("base_model") == str(source) else os.path.basename(os.path.abspath(source))
    text = f"Converted from `{name}` by `lsgpt convert`. `lsgpt publish` takes the license and origin from this file."
    ModelCard(f"---\n{ModelCardData(**origin).to_yaml()}\n---\n\n{text}\n").save(Path(folder) / "README.md")
    link = origin.get("license_link")
    for name in {link, None if _is_gguf(source) else "LICENSE"} - {None}:
        copy = Path(folder) / name
        if Path(name).name != name or copy.exists():  # an address, or a file of another kind
            continue
        if file := find_file(Path(source).parent if _is_gguf(source) else source, name):
            shutil.copy(file, copy)


def _is_gguf(source: str | Path) -> bool:
    return Path(source).suffix == ".gguf"
