"""Converts a checkpoint of other code to a folder that the Auto classes can load."""

from pathlib import Path

import torch

from lsgpt.modeling_lsgpt import LSGPTForCausalLM
from lsgpt.training.folders import free_folder
from lsgpt.utilities import check_writable, looks_like_a_path, refuse_not_finite

from .calibration import Calibration, budget_heads, calibrate, write_report
from .decoders import NORM_TYPES
from .heads import with_global_heads
from .nanogpt import load_nanogpt
from .pretrained import convert_pretrained, load_config, load_pretrained, load_tokenizer, read_origin, write_origin
from .shards import convert_shards


CACHE_SHARE = 0.2
"""Size of the cache as a share of the source's, by default."""

_WEIGHT_FILES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".gguf")


def convert(
    source: str | Path,
    folder: str | Path,
    global_kv_heads: int | float | None = None,
    window: int | None = None,
    text: str | None = None,
    balance: str | None = None,
    max_blocks: int | None = None,
    cache_share: float | None = None,
) -> tuple[LSGPTForCausalLM, Calibration | None]:
    """
    Converts a checkpoint of nanoGPT, the paper's code, GPT-2 or a decoder with Llama's blocks (see `decoders`) to an
    LSGPT checkpoint with the same logits. The dtype is kept; GGUF files become float32. Tokenizer, chat template and
    generation configuration are carried over; license and origin are written into the metadata of a README.md.

    With a text, some heads become local and get sinks: those that the loss needs least. This is measured on one part
    of the text, and perplexity and retrieval before and after on the other. `report.md` shows the results. How
    many heads become local, and how many tokens they see, follows from `cache_share`, or is given instead.

    Args:
        source: A file that nanoGPT or the paper's code wrote (`ckpt.pt`); or a model of one of the other kinds: its
            folder, its name on the Hub, or, except for GPT-2, a GGUF file.
        folder: A new or empty folder.
        global_kv_heads: Number of key/value heads in the whole model that stay global, or their share (below 1).
        window: Number of keys that a query of a local head sees, including its own.
        text: See `calibrate`.
        balance: See `choose_global_heads`; `"overall"` by default.
        max_blocks: See `calibrate`; 4 by default.
        cache_share: Size of the key/value cache at 8,192 tokens as a share of the source's, see `budget_heads`; 0.2
            without `global_kv_heads` and `window`.

    Returns:
        The converted model, and the calibration, if there is a `text`. The weights of a model that was converted
        tensor by tensor (see `convert_shards`) are read from the new files when they are used.

    Raises:
        ValueError: If the source is none of these, LSGPT cannot express it, or its weights are not finite; if the
            folder is not empty, some arguments are missing or do not fit the source, or the text is too short.
        ImportError: If the source is a GGUF file and the package `gguf` is not installed.
    """
    source, folder = str(source), Path(folder)
    _check_options(folder, text, global_kv_heads, window, cache_share, balance, max_blocks)
    balance, max_blocks = balance or "overall", 4 if max_blocks is None else max_blocks

    pretrained = tokenizer = origin = calibration = None
    is_saved = False  # `convert_shards` saves and checks the weights itself
    if _is_nanogpt(source):
        if text is not None:
            raise ValueError(
                "`text` (`--calibrate`) must be unset for a checkpoint of nanoGPT or of the paper's code, which has "
                f"no tokenizer to read a text with; got {text!r}"
            )
        model = load_nanogpt(source)
    else:
        source_config = None if Path(source).suffix == ".gguf" else load_config(source)
        tokenizer, origin = load_tokenizer(source), read_origin(source)
        model = None
        if text is None and source_config is not None and source_config.model_type in NORM_TYPES:
            model = convert_shards(source, source_config, folder)
        is_saved = model is not None
        if model is None:
            pretrained = load_pretrained(source)
            model = convert_pretrained(pretrained)
    if not is_saved:
        refuse_not_finite(model.named_parameters(), f"the weights of {source!r}")
    if text is not None:
        _check_measurable(source, model, tokenizer, text)
        if global_kv_heads is None or window is None:
            share = CACHE_SHARE if cache_share is None else cache_share
            global_kv_heads, window = budget_heads(model.config, share, balance)
        model = model.to("cuda" if torch.cuda.is_available() else "cpu")
        calibration = calibrate(model, tokenizer, text, global_kv_heads, window, balance, max_blocks)
        model = with_global_heads(model, calibration.global_kv_heads, window, calibration.changes.sinks)

    if pretrained is not None:
        model.generation_config = pretrained.generation_config
    if not is_saved:
        model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    if origin is not None:
        write_origin(source, folder, origin)
    if calibration is not None:
        write_report(folder, source, text, calibration, model.config)
    return model, calibration


def _check_options(folder, text, global_kv_heads, window, cache_share, balance, max_blocks):
    """Raises `ValueError` if the folder is in use, or for arguments of `convert` that do not go together."""
    if free_folder(folder) != folder:
        raise ValueError(f"the folder to write must be new or empty; got {str(folder)!r}, which is not")
    sizes = {"`global_kv_heads`": global_kv_heads, "`window`": window, "`cache_share`": cache_share}
    given = [name for name, value in sizes.items() if value is not None]
    if given not in ([], ["`global_kv_heads`", "`window`"], ["`cache_share`"]):
        raise ValueError(
            "`global_kv_heads` and `window` must be given together, or `cache_share` instead of them; got "
            f"{' and '.join(given)}"
        )
    given += [name for name, value in (("`balance`", balance), ("`max_blocks`", max_blocks)) if value is not None]
    if given and text is None:
        raise ValueError(f"`text` (`--calibrate`) must be given with {' and '.join(given)}: heads are measured on it")
    check_writable(folder)


def _check_measurable(source, model, tokenizer, text):
    """Raises `ValueError` if the heads of a source cannot be measured on a text."""
    if tokenizer is None:
        raise ValueError(f"the source must have a tokenizer, to read a text with; {source!r} has none")
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"the source's tokenizer must have an end-of-text token, to separate documents; set `eos_token` in the "
            f"tokenizer_config.json of {source!r}"
        )
    counts = model.config.num_global_heads_per_layer
    if 0 in counts:
        rest = ", and make heads of its other layers local with `with_global_heads`" if any(counts) else ""
        raise ValueError(
            "`text` (`--calibrate`) must be unset for a model with layers that have a window, because their heads "
            f"would be measured as if they had none; got {text!r}. Convert it without{rest}"
        )


def _is_nanogpt(source: str) -> bool:
    """Whether the source is a file that nanoGPT or the paper's code wrote. Raises `ValueError` if nothing is there."""
    path = Path(source)
    if path.is_file():
        if path.suffix == ".safetensors":
            raise ValueError(f"the source must be a model's folder, not a file in it; got {source!r}")
        return path.suffix != ".gguf"
    if path.suffix in _WEIGHT_FILES:
        raise ValueError(f"there is no file {source!r}")
    if looks_like_a_path(source) and not path.exists():
        raise ValueError(f"there is no model {source!r}: no such file or folder")
    return False
