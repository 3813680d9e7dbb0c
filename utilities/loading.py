"""Loads models, and raises an error if their files lack weights, which would stay random; checks folders."""

import importlib.util
import struct
import tempfile
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BatchEncoding,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.integrations.gguf import read_gguf_metadata
from transformers.utils import logging


logger = logging.get_logger(__name__)


UNREAD_GGUF_SETTINGS = {
    "attention.causal": (None, True),
    "attention.scale": (None, 0.0),
    "attention.sliding_window": (None, 0),
    "expert_count": (None, 0),
    "rope.scale_linear": (None, 0.0, 1.0),  # of older files
    "rope.scaling.factor": (None, 0.0, 1.0),
    "rope.scaling.type": (None, "none"),
}
"""Settings of GGUF files that Transformers does not read, with the values that make no difference."""

GGUF_SETTINGS_OF: dict[str, dict[str, tuple | None]] = {
    "gemma2": {
        "attention.key_length": (256,),
        "attention.sliding_window": None,
        "attn_logit_softcapping": (None, 50.0),
        "final_logit_softcapping": (None, 30.0),
    },
    "gemma3": {
        "attention.key_length": (256,),
        "attention.sliding_window": None,
        "final_logit_softcapping": (None,),
        "rope.freq_base_swa": (None, 10_000.0),
    },
}
"""
Entries that replace or extend `UNREAD_GGUF_SETTINGS` for an architecture; `None` accepts every value, because
Transformers reads the setting. Gemma divides logits by the square root of a number that is not in the files.
Transformers assumes 256, which is right for all models with heads of this width; the others (27B) have another one.
"""

CHECKED_AT_ONCE = 2**22
"""Numbers in a tensor that are checked at a time, because a check makes copies of them."""


def load_complete(name: str | Path, may_lack: Collection[str] = (), may_have_more: bool = True, **options):
    """
    Loads a causal language model with all of its weights.

    Args:
        name: Its folder, its name on the Hub, or a GGUF file.
        may_lack: Endings of the names of weights that may be missing and then keep their initial values.
        may_have_more: Whether the files may hold other weights, too. They are ignored, with a warning.
        **options: Other arguments of `from_pretrained`.

    Returns:
        The model.

    Raises:
        ValueError: If the files cannot be read, lack weights, have them in other shapes, or have others; or as
            `check_gguf`.
        OSError, ValueError, KeyError, RuntimeError: As `from_pretrained`.
        ImportError: As `read_gguf`.
    """
    path = Path(name)
    if path.suffix == ".gguf":
        check_gguf(*read_gguf(path))
        options["gguf_file"] = path.name
    model: PreTrainedModel
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            path.parent if path.suffix == ".gguf" else name,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **options,
        )
    except SafetensorError as error:  # of a file that was cut off; not a `ValueError`
        raise ValueError(f"the weights in {str(name)!r} cannot be read: {error}") from error
    refuse_tensors(
        sorted(key for key in found["missing_keys"] if not key.endswith(tuple(may_lack))),
        # Old files of GPT-2 have a constant of its mask.
        [] if may_have_more else sorted(x for x in found["unexpected_keys"] if not x.endswith(".attn.masked_bias")),
        sorted(f"{key} {tuple(there)} instead of {tuple(here)}" for key, there, here in found["mismatched_keys"]),
        f"the weights in {str(name)!r}",
    )
    return model


def looks_like_a_path(name: str) -> bool:
    """
    Returns whether `name` can only mean a file or a folder, because a name on the Hub is `NAME` or `USER/NAME`. If it
    does not exist, there is no need to ask the Hub, which takes half a minute without a network.
    """
    path = Path(name)
    return (
        name.startswith((".", "~"))
        or path.is_absolute()
        or len(path.parts) > 2
        or (len(path.parts) == 2 and path.parent.is_dir())
    )


def load_tokenizer(name: str | Path, **options) -> PreTrainedTokenizerBase:
    """
    Loads a tokenizer. Raises `ValueError` if a folder has none, or it cannot be loaded.

    Args:
        name: Its folder, or its name on the Hub.
        **options: Other arguments of `from_pretrained`.
    """
    # Checked by name, because without this file Transformers would make up another tokenizer.
    if Path(name).is_dir() and not (Path(name) / "tokenizer_config.json").is_file():
        raise ValueError(
            f"{str(name)!r} has no tokenizer (no tokenizer_config.json): save the model's tokenizer into it, with "
            "`tokenizer.save_pretrained`"
        )
    try:
        return AutoTokenizer.from_pretrained(name, **options)
    except Exception as error:  # `tokenizers` raises nothing more specific
        raise ValueError(f"the tokenizer {str(name)!r} cannot be loaded: {error}") from error


def has_learned_positions(config: PreTrainedConfig) -> bool:
    """Whether a model cannot read a text that is longer than its `max_position_embeddings`."""
    has_option = getattr(config, "position_embedding_type", None) == "learned"
    return has_option or config.model_type in ("gpt2", "gpt_bigcode", "gpt_neo", "opt")


def fits_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> bool:
    """
    Returns whether a model with `vocab_size` embeddings can read what a tokenizer makes of text. Special tokens that
    text does not contain, such as Gemma 3's for images, may have no embedding; a warning names them.
    """
    beyond = {token: index for token, index in tokenizer.get_vocab().items() if index >= vocab_size}
    added = tokenizer.added_tokens_decoder
    needed = {tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token}
    if not all(index in added and added[index].special and token not in needed for token, index in beyond.items()):
        return False
    if beyond:
        logger.warning(f"the model has no embedding for special tokens of its tokenizer: {', '.join(beyond)}")
    return True


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str, **options) -> BatchEncoding:
    """
    Tokenizes a text to continue, as inputs `(1, T)`, without the end-of-text token that some tokenizers add. Other
    `options` are those of the tokenizer.
    """
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False, **options)
    end = tokenizer.eos_token_id
    is_added = inputs["input_ids"].shape[1] > 1 and not prompt.endswith(tokenizer.eos_token or "")
    if is_added and inputs["input_ids"][0, -1] == end:
        inputs.update({name: values[:, :-1] for name, values in inputs.items()})
    return inputs


def refuse_not_finite(weights: Iterable[tuple[str, torch.Tensor]], what: str):
    """Raises `ValueError`, with `what` in its message, if one of the named weights has NaN or infinite values."""
    for name, weight in weights:
        if not all(numbers.isfinite().all() for numbers in weight.flatten().split(CHECKED_AT_ONCE)):
            raise ValueError(f"{what} must be finite; {name} has NaN or infinite values")


def refuse_tensors(
    missing: Sequence[str], unknown: Sequence[str], misshapen: Sequence[str], what: str = "the checkpoint's tensors"
):
    """Raises `ValueError` unless all are empty."""
    problems = []
    for kind, names in (("missing", missing), ("unknown", unknown), ("of another shape", misshapen)):
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            problems.append(f"{kind}: {', '.join(names[:5])}{more}")
    if problems:
        raise ValueError(f"{what} must match the model's configuration; {'; '.join(problems)}")


def read_gguf(path: str | Path) -> tuple[dict, tuple[str, ...]]:
    """
    Reads the metadata of a GGUF file (of lists of strings, only their lengths) and the names of its tensors.

    Raises:
        ValueError: If this is not a GGUF file.
        ImportError: If the package `gguf` is not installed, which Transformers needs to load the file.
    """
    if importlib.util.find_spec("gguf") is None:
        raise ImportError("reading a GGUF file needs the package `gguf`; install it: pip install gguf")
    try:
        return read_gguf_metadata(str(path))
    except (ValueError, IndexError, struct.error) as error:
        raise ValueError(f"the GGUF file {str(path)!r} cannot be read: {error}") from error


def check_gguf(metadata: dict, tensors: Collection[str]):
    """Raises `ValueError` if Transformers would silently leave out a part of the model in a GGUF file."""
    architecture, remedy = metadata["general.architecture"], "use the checkpoint that the file was made from"
    for name, harmless in {**UNREAD_GGUF_SETTINGS, **GGUF_SETTINGS_OF.get(architecture, {})}.items():
        value = metadata.get(f"{architecture}.{name}")
        if harmless is not None and value not in harmless:
            rule = "unset" if harmless[0] is None else f"{harmless[0]}"
            raise ValueError(
                f"`{architecture}.{name}` of a GGUF file must be {rule}, because Transformers does not read it; got "
                f"{value!r}; {remedy}"
            )
    if "rope_freqs.weight" in tensors:
        raise ValueError(
            "a GGUF file must not have `rope_freqs.weight`, the rope scaling of Llama 3.1 and later, because "
            f"Transformers does not read it; {remedy}"
        )


def check_writable(folder: Path, name: str = "the output"):
    """Raises `ValueError`, with `name` in its message, if a folder cannot be written or created."""
    existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    try:
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        raise ValueError(f"{name} must be a writable folder; got {str(folder)!r}: {error}") from error
