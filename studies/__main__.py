"""Performs one run of a study: `python -m lsgpt.studies NAME ARM SEED FOLDER [--field value]`."""

import json
import os
import signal
import sys
import time
from datetime import datetime, timezone
from pathlib import Path

import torch

from lsgpt.utilities.environment import describe_environment
from lsgpt.utilities.strict_json import finite

from . import RecipeArms, load_study
from .runner import result_file


def main(name: str, arm: str, seed: str, folder: str, *fields: str):
    """Performs the run and writes its results and a description of the environment to `FOLDER/ARM/seed-SEED.json`."""
    # With large logits, many probabilities are below 1e-38, where float32 is denormal and attention on a CPU takes
    # several times as long. Such probabilities are as good as 0.
    torch.set_flush_denormal(True)
    # Ctrl-C reaches all processes of a terminal: the run ends as with SIGTERM, and saves its work.
    signal.signal(signal.SIGINT, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    start, environment = time.perf_counter(), describe_environment()
    study = RecipeArms(Path(folder)) if name == RecipeArms.name else load_study(name)
    values = study.run(arm, int(seed), Path(folder), fields)
    line = {
        "arm": arm,
        "seed": int(seed),
        "fields": list(fields),
        "seconds": round(time.perf_counter() - start, 1),
        "ended": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "criteria": study.digest(),
        "environment": values.pop("environment", None) or environment,  # that of the training, if there was one
        "values": values,
    }
    file = result_file(Path(folder), arm, int(seed))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(finite(line)), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
