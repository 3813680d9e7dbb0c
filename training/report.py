"""The report of a training run: a Markdown page with its plots beside it."""

import importlib.metadata
import os
import platform
from pathlib import Path

import torch
import yaml
from matplotlib.figure import Figure


_REPORTED_PACKAGES = ("lsgpt", "torch", "transformers", "accelerate", "datasets", "tokenizers")


def plot_loss(log_history: list[dict], path: str | Path):
    """
    Draws training and evaluation loss over optimizer steps.

    Args:
        log_history: `trainer.state.log_history`.
        path: The PNG file to write.
    """
    # A Figure of its own, without pyplot: no window, and the backend of the caller's plots stays as it is.
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for key, label, style in (("loss", "training", "-"), ("eval_loss", "evaluation (held-out text)", "o-")):
        points = [(log["step"], log[key]) for log in log_history if key in log]
        if points:
            axes.plot(*zip(*points), style, label=label)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("cross-entropy (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def describe_environment() -> dict[str, str]:
    """Hardware and software versions."""
    if torch.cuda.is_available():
        device = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    else:
        capability = torch.backends.cpu.get_cpu_capability()
        device = f"CPU, {torch.get_num_threads()} of {os.cpu_count()} cores used, {platform.machine()} {capability}"
    versions = {name: importlib.metadata.version(name) for name in _REPORTED_PACKAGES}
    return {"hardware": device, "system": platform.system(), "Python": platform.python_version(), **versions}


def write_report(
    folder: str | Path, recipe: dict, results: dict[str, str], log_history: list[dict], sample: str
) -> Path:
    """
    Writes `report.md` and `loss.png`.

    Args:
        folder: The run's folder.
        recipe: The resolved recipe.
        results: Final figures by their names, formatted for reading.
        log_history: `trainer.state.log_history`.
        sample: Text that the trained model wrote.

    Returns:
        The path of the report.
    """
    folder = Path(folder)
    plot_loss(log_history, folder / "loss.png")
    fence = "`" * 4
    report = f"""# {recipe["run_name"]}: training report

## Results

{_table(results)}

![Training and evaluation loss over optimizer steps](loss.png)

## A sample

{fence}text
{sample}
{fence}

## Recipe

Repeat this run with `lsgpt train {folder / "recipe.yaml"}`.

{fence}yaml
{yaml.safe_dump(recipe, sort_keys=False).strip()}
{fence}

## Environment

{_table(describe_environment())}
"""
    path = folder / "report.md"
    path.write_text(report, encoding="utf-8")
    return path


def _table(rows: dict[str, str]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])
