"""The report of a training run: a Markdown page and its plots."""

import shlex
from pathlib import Path

import torch
import yaml

from lsgpt.modeling_lsgpt import LSGPTConfig
from lsgpt.utilities import describe, table, with_unit
from lsgpt.utilities.plots import CONTEXT_LABEL, average_in_bins, plot_curves, plot_max_logits

from .results import RunResult
from .telemetry import THRESHOLD


def write_report(
    folder: str | Path,
    recipe: dict,
    config: LSGPTConfig,
    results: RunResult,
    log_history: list[dict],
    max_logits: torch.Tensor,
    sample: str,
) -> Path:
    """
    Writes `report.md` and its plots into the run's folder, and returns the path of the report. `log_history` is that
    of the Trainer's `state`, `max_logits` what `lsgpt.measure_max_logits` returns for the trained model, and `sample`
    a text that it generated.
    """
    folder = Path(folder)
    plots = _draw(folder, config, results, log_history, max_logits, bool(recipe.get("teacher")))
    fence = "````"
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

{table(results.environment.items())}
"""
    path = folder / "report.md"
    path.write_text(report, encoding="utf-8")
    return path


def _before_and_after(recipe: dict, results: RunResult) -> str:
    """Returns a section that compares a checkpoint before and after further training, if there are figures for it."""
    before, teacher = results.perplexity_before_training, results.teacher_perplexity
    if not recipe.get("model_name_or_path") or (before is None and teacher is None):
        return ""
    rows = {
        f"teacher, `{recipe.get('teacher')}`": teacher,
        f"before the training, `{recipe['model_name_or_path']}`": before,
        "after the training": results.eval_perplexity,
    }

    def show(value: float) -> str:
        return f"{value:.2f} ({value / teacher:.3f} of the teacher's)" if teacher else f"{value:.2f}"

    shown = {name: show(value) for name, value in rows.items() if value is not None}
    section = f"## Before and after\n\nPerplexity on the held-out text:\n\n{table(shown.items())}\n\n"
    if teacher is None:
        section += (
            "This run had no teacher. What it gained may come from learning this text rather than from healing. To "
            "tell\nthem apart, train the source on the same text, too: `lsgpt compare heal`, see docs/healing.md.\n\n"
        )
    return section


def _draw(folder, config, results, log_history, max_logits, has_teacher) -> str:
    """Draws the plots for which there is data, and returns the Markdown that shows them."""
    step, losses_label = "optimizer step", "cross-entropy (nats per token)"
    training = "training (divergence from the teacher)" if has_teacher else "training"
    lines = []

    def curves(file, title, keys, ylabel, **options):
        if points := {label: [line] for key, label in keys.items() if (line := points_of(log_history, key))}:
            plot_curves(folder / file, points, step, ylabel, **options)
            lines.append(f"![{title}]({file})\n")

    averaged = "evaluation, averaged weights"
    losses = {"loss": training, "eval_loss": "evaluation (held-out text)", "eval_averaged_loss": averaged}
    label = "loss (nats per token)" if has_teacher else losses_label
    curves("loss.png", "Training and evaluation loss", losses, label)
    perplexity = {"eval_perplexity": "evaluation (held-out text)", "eval_averaged_perplexity": averaged}
    curves("perplexity.png", "Evaluation perplexity", perplexity, "perplexity per token", log_y=True)
    kinds = {"max_logit_global": "global heads", "max_logit_local": "local heads"}
    curves("max_logits.png", "Largest attention logits", kinds, "largest |logit|", log_y=True, threshold=THRESHOLD)
    plot_max_logits(max_logits, folder / "max_logits_by_head.png", config)
    lines.append("![Largest attention logit of each head of the trained model](max_logits_by_head.png)\n")
    lines.append("Curves and table show the largest logits over whole batches, at every logged step. The heat map")
    lines.append("shows those of the trained model in one block of held-out text, which are usually smaller.\n")
    by_position = {"evaluation (held-out text)": [average_in_bins(results.loss_by_position)]}
    plot_curves(folder / "loss_by_position.png", by_position, CONTEXT_LABEL, losses_label, log_x=True)
    lines.append("![Evaluation loss by position in the block: does context help?](loss_by_position.png)\n")
    return "\n".join(lines)


def points_of(log_history: list[dict], key: str) -> list[tuple[int, float]]:
    """Returns `(step, value)` for every log that contains `key`."""
    return [(log["step"], log[key]) for log in log_history if key in log]


def format_results(results: RunResult) -> dict[str, str]:
    """Formats results for reading, with their units."""
    rows = {
        "status": results.status,
        "evaluation loss (nats per token)": f"{results.eval_loss:.4f}",
        "evaluation perplexity (per token)": f"{results.eval_perplexity:.2f}",
        "evaluation bits per byte": f"{results.eval_bits_per_byte:.4f}",
        "parameters": f"{results.parameters:,}",
        "optimizer steps": f"{results.step:,} of {results.max_steps:,}",
        "training tokens": f"{results.tokens:,}",
        "training tokens per second (median step, without waiting for data)": f"{results.tokens_per_second:,.0f}",
        "peak memory of the training (process 0)": with_unit(results.peak_memory_bytes, "B"),
        "wall time of the training since its last start, evaluation included (s)": f"{results.train_seconds:.1f}",
    }
    if results.eval_averaged_perplexity is not None:
        rows["evaluation perplexity with averaged weights"] = f"{results.eval_averaged_perplexity:.2f}"
    if results.max_logit is not None:
        rows["largest attention logit seen in training"] = f"{results.max_logit:.4g}"
    return rows
