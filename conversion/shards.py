"""Converts models that need not fit into memory: reads, converts and writes one tensor after the other."""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file
from transformers.utils.hub import get_checkpoint_shard_files

from lsgpt.modeling_lsgpt import LSGPTConfig, LSGPTForCausalLM
from lsgpt.utilities import refuse_not_finite

from .decoders import convert_config, convert_tensor
from .weights import model_from_weights, without_false_ties


TIED = "lm_head.weight", "model.embed_tokens.weight"
"""Matrices that are one if the configuration ties them, unless the files have both and they differ."""

MAX_SHARD_SIZE = 10**9
"""
Bytes in a file that is written, or more for a single tensor that is larger. The tensors of one such file are in memory
at a time, along with the one that is being converted.
"""


def convert_shards(source: str | Path, source_config: PreTrainedConfig, folder: str | Path) -> LSGPTForCausalLM | None:
    """
    Converts a model in safetensors files tensor by tensor, and saves it.

    Args:
        source: Its folder or its name on the Hub.
        source_config: Its configuration, of one of the types in `decoders.NORM_TYPES`.
        folder: A new or empty folder to write.

    Returns:
        The converted model, whose weights are read from the new files when they are used; or `None`, with nothing
        written, if the source has other files, or other tensors in them than its class.

    Raises:
        ValueError: If a file cannot be read, LSGPT cannot express the configuration, or a weight is not finite.
    """
    with torch.device("meta"):
        original = AutoModelForCausalLM.from_config(source_config)
    files = {path: _read_shapes(path) for path in _find_files(source)}
    found = {name: shape for shapes in files.values() for name, shape in shapes.items()}
    if source_config.tie_word_embeddings and "model.embed_tokens.weight" in found:
        matrices = [_read(path, name) for name in TIED for path, shapes in files.items() if name in shapes]
        source_config = without_false_ties(source_config, matrices[0], matrices[-1])
        del matrices
        found.setdefault("lm_head.weight", found["model.embed_tokens.weight"])
    if found != {name: tensor.shape for name, tensor in original.state_dict().items()}:
        return None

    config, folder, is_new = convert_config(source_config, found), Path(folder), not Path(folder).exists()
    generation_config = _generation_config(source)
    folder.mkdir(parents=True, exist_ok=True)
    parts: list[Path] = []
    try:
        pending: dict[str, torch.Tensor] = {}
        for path, shapes in files.items():
            for name in shapes:
                tensor = _read(path, name)
                tensor = tensor.to(source_config.dtype or tensor.dtype)
                refuse_not_finite([(name, tensor)], f"the weights of {str(source)!r}")
                for new_name, new in convert_tensor(source_config, config, name, tensor).items():
                    if pending and sum(each.nbytes for each in pending.values()) + new.nbytes > MAX_SHARD_SIZE:
                        parts.append(_write(pending, folder / f"part-{len(parts)}"))
                        pending = {}
                    pending[new_name] = new.contiguous()
        parts.append(_write(pending, folder / f"part-{len(parts)}"))
        del tensor, new, pending
        return _finish(config, generation_config, folder, parts)
    except BaseException:
        for path in folder.iterdir():
            path.unlink()
        if is_new:
            folder.rmdir()
        raise


def _find_files(source: str | Path) -> list[Path]:
    """The safetensors files of a checkpoint, downloaded if necessary; none if it has none."""
    options = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    if whole := cached_file(source, SAFE_WEIGHTS_NAME, **options):
        return [Path(whole)]
    index = cached_file(source, SAFE_WEIGHTS_INDEX_NAME, **options)
    return [] if index is None else [Path(file) for file in get_checkpoint_shard_files(source, index)[0]]


def _read_shapes(path: Path) -> dict[str, torch.Size]:
    try:
        file = safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(
            f"{str(path)!r} cannot be read: {error}. It may be cut off, or a pointer of Git LFS; download it again"
        ) from error
    with file:
        # Without the frequencies in old files of Llama, which Transformers ignores, too.
        names = [name for name in file.keys() if not name.endswith("rotary_emb.inv_freq")]  # noqa: SIM118
        return {name: torch.Size(file.get_slice(name).get_shape()) for name in names}


def _read(path: Path, name: str) -> torch.Tensor:
    # Opened for a single tensor, because everything that was read stays in memory while a file is open.
    with safe_open(path, framework="pt") as file:
        return file.get_tensor(name)


def _write(tensors: dict[str, torch.Tensor], path: Path) -> Path:
    save_file(tensors, path, metadata={"format": "pt"})
    return path


def _generation_config(source: str | Path) -> GenerationConfig:
    try:
        return GenerationConfig.from_pretrained(source)
    except OSError:  # there is no such file: old checkpoints have such fields in their config.json
        # Marked as such, or it would take over all other fields, too.
        return GenerationConfig.from_pretrained(source, config_file_name=CONFIG_NAME, _from_model_config=True)


def _finish(
    config: LSGPTConfig, generation_config: GenerationConfig, folder: Path, parts: list[Path]
) -> LSGPTForCausalLM:
    """Gives the files the names that Transformers expects, saves everything but the weights, and opens the model."""
    tensors = {path: load_file(path) for path in parts}
    weights = {name: tensor for part in tensors.values() for name, tensor in part.items()}
    model = model_from_weights(config, weights)
    model.generation_config = generation_config
    model.save_pretrained(folder, state_dict={})  # would remove files with these names
    weight_map = {}
    for i, path in enumerate(parts, start=1):
        name = f"model-{i:05}-of-{len(parts):05}.safetensors" if len(parts) > 1 else SAFE_WEIGHTS_NAME
        weight_map |= dict.fromkeys(tensors[path], name)
        path.rename(folder / name)
    if len(parts) > 1:
        metadata = {"total_parameters": config.num_parameters(), "total_size": sum(x.nbytes for x in weights.values())}
        index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return model
