"""Result files: where they go, and what each of them records about the measurement."""

import argparse
import shlex
from collections.abc import Callable
from pathlib import Path

from lsgpt.utilities import check_writable
from lsgpt.utilities.environment import describe_environment
from lsgpt.utilities.strict_json import to_json


OUTPUT = Path("runs") / "bench"
"""Default folder of all results."""


def result_file(text: str) -> Path:
    """
    The type of an option that names a result file. Raises `ArgumentTypeError`, before anything is measured, if it is
    no JSON file or cannot be written.
    """
    path = Path(text)
    if path.suffix != ".json" or path.is_dir():
        raise argparse.ArgumentTypeError(f"must be a .json file; got {text!r}")
    try:
        check_writable(path.parent)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return path


def at_least(lowest: int) -> Callable[[str], int]:
    """The type of an option that is a number of at least `lowest`."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < lowest:
            raise argparse.ArgumentTypeError(f"must be an integer of {lowest} or more; got {text!r}")
        return int(text)

    return number


def begin_result(*command: str) -> dict:
    """
    Returns the beginning of every result file: the `command` that was run, and hardware, versions and commit as
    `environment`. Call it before anything is measured, because the clone may have another commit afterwards.
    """
    return {"command": shlex.join(("lsgpt", "bench", *command)), "environment": describe_environment()}


def write_result(path: Path, result: dict):
    """Writes results in the form of `to_json`, and creates the folder if necessary."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(to_json(result, indent=2) + "\n", encoding="utf-8")
