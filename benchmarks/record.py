"""Result files: where they go, and what each of them records about the measurement."""

import json
import shlex
from pathlib import Path

from lsgpt.utilities.environment import describe_environment


OUTPUT = Path("runs") / "bench"
"""Default folder of all results."""


def begin_result(*command: str) -> dict:
    """
    Returns the beginning of every result file: the `command` that was run, and hardware, versions and commit as
    `environment`. Call it before anything is measured, because the clone may have another commit afterwards.
    """
    return {"command": shlex.join(("lsgpt", "bench", *command)), "environment": describe_environment()}


def write_result(path: Path, result: dict):
    """Writes results as JSON, and creates the folder if necessary."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
