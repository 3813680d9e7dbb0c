"""Output folders of runs, and the checkpoints in them."""

import contextlib
import json
import shlex
from pathlib import Path

from transformers import TrainingArguments

from lsgpt.utilities import check_writable


def make_folder(args: TrainingArguments):
    """
    Creates the output folder. Raises `ValueError` if it is read-only, or contains anything but the resumed run up to
    its checkpoint.
    """
    folder = Path(args.output_dir)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"`output_dir` must be a folder; got {str(folder)!r}, which is a file")
    checkpoint = args.resume_from_checkpoint and Path(args.resume_from_checkpoint).resolve()
    is_own = checkpoint and folder.resolve() in (checkpoint.parent, checkpoint)
    if folder.exists() and any(folder.iterdir()) and not is_own:
        remedy = "It has no checkpoint to resume from: choose another folder, or delete this one"
        if _complete_checkpoints(folder):
            remedy = f"To resume the run in it: --resume_from_checkpoint {shlex.quote(str(folder))}"
        raise ValueError(
            f"`output_dir` must be a new or an empty folder, or that of the run to resume; got {str(folder)!r}, which "
            f"is not empty. {remedy}"
        )
    if is_own:
        step = _complete_checkpoints(checkpoint)[checkpoint]
        if later := [str(place) for place, other in _complete_checkpoints(folder).items() if other > step]:
            raise ValueError(
                "`resume_from_checkpoint` must be the last checkpoint of its run; got "
                f"{args.resume_from_checkpoint!r}, but {later[0]!r} is later, and the run would resume from that one "
                "the next time. To go back, delete the later ones, or continue in another folder with --output_dir"
            )
    check_writable(folder, "`output_dir`")
    folder.mkdir(parents=True, exist_ok=True)


def free_folder(folder: Path) -> Path:
    """Returns the first of `folder`, `folder-2`, `folder-3`, ... that does not exist or is empty."""
    candidate, number = folder, 1
    while candidate.exists() and (not candidate.is_dir() or any(candidate.iterdir())):
        number += 1
        candidate = folder.with_name(f"{folder.name}-{number}")
    return candidate


def find_checkpoint(folder: str | Path) -> Path:
    """Returns `folder` if it is a complete checkpoint, or else the last one in it. Raises `ValueError` without one."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"`resume_from_checkpoint` must be the folder of a run; there is no {str(folder)!r}")
    complete = _complete_checkpoints(folder)
    if not complete:
        remedy, place = "", shlex.quote(str(folder))
        if (folder / "results.json").is_file():
            remedy = f". The run kept none; to train its weights further: --model_name_or_path {place}"
        elif (folder / "recipe.yaml").is_file():
            remedy = f". The run ended before its first checkpoint; start it again: lsgpt train {place}/recipe.yaml"
        raise ValueError(
            f"`resume_from_checkpoint` must be or contain a complete checkpoint; got {str(folder)!r}{remedy}"
        )
    return max(complete, key=complete.__getitem__)


def _complete_checkpoints(folder: Path) -> dict[Path, int]:
    """Maps the complete checkpoints to their steps: those with `trainer_state.json`, which is written last."""
    steps = {}
    for path in (folder, *folder.glob("checkpoint-*")):
        with contextlib.suppress(OSError, ValueError, KeyError):
            steps[path] = json.loads((path / "trainer_state.json").read_text(encoding="utf-8"))["global_step"]
    return steps


def check_checkpoint(checkpoint: str | Path):
    """Raises `ValueError` for a checkpoint that lacks a part without which a `Trainer` silently starts over."""
    checkpoint = Path(checkpoint)
    if (checkpoint / "latest").is_file():
        return  # a checkpoint of DeepSpeed, which looks for its files itself
    # The optimizer has a file or, with FSDP, a folder; every process has a file with its random states.
    missing = [name for name in ("optimizer*", "scheduler.pt", "rng_state*.pth") if not any(checkpoint.glob(name))]
    if missing:
        names = ", ".join(name.replace("*.", ".").replace("*", ".pt") for name in missing)
        raise ValueError(
            f"`resume_from_checkpoint` must contain all that a run needs to resume; got {str(checkpoint)!r} without "
            f"{names} (`save_only_model` saves none of them). To start a new run from the weights alone: "
            f"--model_name_or_path {shlex.quote(str(checkpoint))}"
        )
