"""Files of results: where they go, and what each of them says about its making."""

import json
import shlex
from pathlib import Path

from lsgpt.training.report import describe_environment


OUTPUT = Path("runs") / "bench"
"""Default folder of all results."""


def begin_result(*command: str) -> dict:
    """
    What every file of results begins with: the `command` that was run, and hardware, versions and commit as
    `environment`. To be called before anything is measured: the clone may have another commit afterwards.
    """
    return {"command": shlex.join(("lsgpt", "bench", *command)), "environment": describe_environment()}


def write_result(path: Path, result: dict):
    """Writes results as JSON, and makes the folder if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
