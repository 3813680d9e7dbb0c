"""The report of a training run: a Markdown page and its plots."""

import contextlib
import importlib.metadata
import json
import math
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import torch
import yaml

from lsgpt.modeling_lsgpt import LSGPTConfig
from lsgpt.utilities import describe, table, with_unit

from .callbacks import read_metrics
from .plots import CONTEXT_LABEL, average_in_bins, plot_curves, plot_max_logits


_MAY_BE_MISSING = ("eval_averaged_perplexity", "max_logit", "perplexity_before_training", "teacher_perplexity")
_REPORTED_PACKAGES = ("lsgpt", "torch", "transformers", "accelerate", "datasets", "tokenizers")


def describe_environment() -> dict[str, str]:
    """Returns the hardware, software versions and commit of this project, which all reports contain."""
    hardware = f"{_processor()}, {torch.get_num_threads()} of {os.cpu_count()} cores used"
    if hasattr(os, "sysconf"):
        hardware += f", {os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"
    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory / 2**30
        name = torch.cuda.get_device_name()
        hardware = f"{torch.cuda.device_count()} x {name}, {memory:.0f} GiB, CUDA {torch.version.cuda}; {hardware}"
    versions = {name: importlib.metadata.version(name) for name in _REPORTED_PACKAGES}
    system = {"system": platform.system(), "Python": platform.python_version()}
    return {"hardware": hardware, **system, "commit": describe_commit(), **versions}


def describe_commit() -> str:
    """
    Returns the commit of the clone that this code runs from, with `-dirty` if tracked files have changed. An installed
    package has no commit; its version is returned instead.
    """
    folder = Path(__file__).resolve().parents[1]
    if not (folder / ".git").exists():  # no search in parent folders, which may be another project's clone
        return f"none: the installed package, version {importlib.metadata.version('lsgpt')}"
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown: git cannot read the clone"


def _processor() -> str:
    """Returns the CPU's name, if the system reports it, and its instruction set."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name} ({torch.backends.cpu.get_cpu_capability()})"


def reset_peak_memory():
    """Resets the peak, so that `peak_memory` counts from now on (for main memory, on Linux only)."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # see proc(5)


def peak_memory() -> int:
    """Returns the peak memory of this process in bytes: on its GPU if it uses one, else in main memory."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return torch.cuda.max_memory_allocated()
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:  # not Linux
        if sys.platform == "win32":
            import psutil  # noqa: PLC0415 (a dependency of Accelerate; only needed here)

            return psutil.Process().memory_info().peak_wset
        import resource  # noqa: PLC0415 (not available on Windows)

        unit = 1 if sys.platform == "darwin" else 1024  # the unit of `ru_maxrss` depends on the system
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def finite(value):
    """Replaces numbers that JSON cannot represent (NaN and infinity) by `None`, also inside lists and dictionaries."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_results(folder: Path, results: dict):
    """Writes `results.json`; numbers that JSON cannot represent become `null`."""
    text = json.dumps(finite(results), indent=2)
    (folder / "results.json").write_text(text + "\n", encoding="utf-8")


def read_results(folder: Path) -> dict:
    """
    Reads the `results.json` of a run, with `null` as NaN; except for figures that a run need not have, which are then
    None. `max_logit` is infinite if `metrics.jsonl` has a measurement that was NaN or infinite.
    """
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    results = {name: math.nan if x is None and name not in _MAY_BE_MISSING else x for name, x in results.items()}
    metrics = read_metrics(folder / "metrics.jsonl") if (folder / "metrics.jsonl").is_file() else []
    if any("max_logit" in log and log["max_logit"] is None for log in metrics):  # logs of other steps lack the key
        results["max_logit"] = math.inf
    return results


def write_report(
    folder: str | Path,
    recipe: dict,
    config: LSGPTConfig,
    results: dict,
    log_history: list[dict],
    max_logits: torch.Tensor,
    sample: str,
) -> Path:
    """
    Writes `report.md` and its plots.

    Args:
        folder: The run's folder.
        recipe: The resolved recipe.
        config: The model's configuration.
        results: What `lsgpt.training.train.train` returns.
        log_history: `trainer.state.log_history`.
        max_logits: What `lsgpt.measure_max_logits` returns for the trained model.
        sample: Text generated by the trained model.

    Returns:
        The path of the report.
    """
    folder = Path(folder)
    plots = _draw(folder, recipe, config, results, log_history, max_logits)
    fence = "`" * 4
    report = f"""# {recipe["run_name"]}: training report

## Results

{table(format_results(results).items())}

{_before_and_after(recipe, results)}{plots}
## A sample

{fence}text
{sample}
{fence}

## Model

{table(describe(config).items())}

## Recipe

Repeat this run with `{shlex.join(["lsgpt", "train", str(folder / "recipe.yaml")])}`.

{fence}yaml
{yaml.safe_dump(recipe, sort_keys=False).strip()}
{fence}

## Environment

{table(describe_environment().items())}
"""
    path = folder / "report.md"
    path.write_text(report, encoding="utf-8")
    return path


def _before_and_after(recipe: dict, results: dict) -> str:
    """Returns a section that compares a checkpoint before and after further training, if there are figures for it."""
    before, teacher = results.get("perplexity_before_training"), results.get("teacher_perplexity")
    if not recipe.get("model_name_or_path") or (before is None and teacher is None):
        return ""
    rows = {
        f"teacher, `{recipe.get('teacher')}`": teacher,
        f"before the training, `{recipe['model_name_or_path']}`": before,
        "after the training": results["eval_perplexity"],
    }
    share = (lambda value: f" ({value / teacher:.3f} of the teacher's)") if teacher else (lambda value: "")
    rows = {name: f"{value:.2f}{share(value)}" for name, value in rows.items() if value is not None}
    section = f"## Before and after\n\nPerplexity on the held-out text:\n\n{table(rows.items())}\n\n"
    if teacher is None:
        section += (
            "This run had no teacher. What it gained may come from learning this text rather than from healing. To "
            "tell\nthem apart, train the source on the same text, too: `lsgpt compare heal`, see docs/healing.md.\n\n"
        )
    return section


def _draw(folder, recipe, config, results, log_history, max_logits) -> str:
    """Draws the plots for which there is data, and returns the Markdown that shows them."""
    step = "optimizer step"
    lines = []

    def curves(file, title, keys, ylabel, **options):
        points = {label: [points_of(log_history, key)] for key, label in keys.items()}
        points = {label: lines for label, lines in points.items() if lines[0]}
        if points:
            plot_curves(folder / file, points, step, ylabel, **options)
            lines.append(f"![{title}]({file})\n")

    averaged = "evaluation, averaged weights"
    losses = {"loss": "training", "eval_loss": "evaluation (held-out text)", "eval_averaged_loss": averaged}
    curves("loss.png", "Training and evaluation loss", losses, "cross-entropy (nats per token)")
    perplexity = {"eval_perplexity": "evaluation (held-out text)", "eval_averaged_perplexity": averaged}
    curves("perplexity.png", "Evaluation perplexity", perplexity, "perplexity per token", log_y=True)
    kinds = {"max_logit_global": "global heads", "max_logit_local": "local heads"}
    threshold = recipe["max_logit_threshold"]
    curves("max_logits.png", "Largest attention logits", kinds, "largest |logit|", log_y=True, threshold=threshold)
    plot_max_logits(max_logits, folder / "max_logits_by_head.png", config)
    lines.append("![Largest attention logit of each head of the trained model](max_logits_by_head.png)\n")
    lines.append(
        "The curves and the table show the largest logits over whole batches, at every measured step of the training. "
        "The heat map\nshows those of the trained model in one block of held-out text, which is why its numbers are "
        "usually smaller.\n"
    )
    by_position = {"evaluation (held-out text)": [average_in_bins(results["loss_by_position"])]}
    plot_curves(
        folder / "loss_by_position.png", by_position, CONTEXT_LABEL, "cross-entropy (nats per token)", log_x=True
    )
    lines.append("![Evaluation loss by position in the block: does context help?](loss_by_position.png)\n")
    return "\n".join(lines)


def points_of(log_history: list[dict], key: str, null: float | None = None) -> list[tuple[int, float]]:
    """Returns `(step, value)` for every log that contains `key`; `null` replaces None, which is otherwise left out."""
    points = [(log["step"], null if log[key] is None else log[key]) for log in log_history if key in log]
    return [(step, value) for step, value in points if value is not None]


def format_results(results: dict) -> dict[str, str]:
    """Formats results for reading, with their units."""
    rows = {
        "status": results["status"],
        "evaluation loss (nats per token)": f"{results['eval_loss']:.4f}",
        "evaluation perplexity (per token)": f"{results['eval_perplexity']:.2f}",
        "evaluation bits per byte": f"{results['eval_bits_per_byte']:.4f}",
        "parameters": f"{results['parameters']:,}",
        "optimizer steps": f"{results['step']:,} of {results['max_steps']:,}",
        "training tokens": f"{results['tokens']:,}",
        "training tokens per second (median step, without waiting for data)": f"{results['tokens_per_second']:,.0f}",
        "peak memory of the training (process 0)": with_unit(results["peak_memory_bytes"], "B"),
        "wall time of the training since its last start, evaluation included (s)": f"{results['train_seconds']:.1f}",
    }
    if results.get("eval_averaged_perplexity") is not None:
        rows["evaluation perplexity with averaged weights"] = f"{results['eval_averaged_perplexity']:.2f}"
    if results["max_logit"] is not None:
        rows["largest attention logit seen in training"] = f"{results['max_logit']:.4g}"
    return rows
