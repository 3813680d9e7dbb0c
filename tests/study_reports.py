"""Reports of studies that are made from invented or tiny runs."""

import contextlib
import json

import torch
from matplotlib.image import imread

from lsgpt.studies import __main__ as one_run
from lsgpt.studies import write_report
from lsgpt.utilities.strict_json import finite


def report_of(study, runs, folder):
    """
    Writes runs, `{arm: [values of each seed]}`, as `lsgpt study` does, and returns the report that is made from the
    file alone. All of its plots must be there.
    """
    rest = {"seconds": 1.0, "fields": [], "environment": {"system": "any"}}
    lines = [
        {"arm": arm, "seed": seed, "values": values, **rest}
        for arm, of_arm in runs.items()
        for seed, values in enumerate(of_arm, start=42)
    ]
    folder.mkdir(exist_ok=True)
    text = "".join(json.dumps(finite(line)) + "\n" for line in lines)
    (folder / "runs.jsonl").write_text(text, encoding="utf-8")
    text = write_report(study, folder).read_text(encoding="utf-8")
    for line in text.splitlines():
        if line.startswith("!["):
            assert has_curves(folder / line.rpartition("(")[2].rstrip(")"))
    return text


def has_curves(path):
    """Whether a plot has more in it than axes, which are grey: coloured pixels."""
    pixels = imread(path)[..., :3]
    return (pixels.max(-1) - pixels.min(-1) > 0.2).mean() > 1e-4


def run_here(commands, logs, num_processes=1):
    """In place of `run_commands`: performs runs in this process, which has imported everything already."""
    for index, (arguments, log) in enumerate(zip(commands, logs)):
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a", encoding="utf-8") as file, contextlib.redirect_stdout(file):
            try:
                one_run.main(*arguments[3:])
            finally:
                torch.set_flush_denormal(False)
        yield index, 0
