"""`lsgpt compare`: arms of a recipe as a study without claims, with the machinery of all studies."""

import glob
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from lsgpt.configuration import load_arms
from lsgpt.training.arguments import Arguments, parse_arguments
from lsgpt.training.callbacks import read_metrics
from lsgpt.training.report import points_of
from lsgpt.training.results import RunResult
from lsgpt.utilities import suggest, table, with_unit
from lsgpt.utilities.plots import CONTEXT_LABEL, of_runs, plot_curves

from .comparisons import Runs, format_values
from .runner import run_study
from .study import TrainingStudy, join_arm


COMPARISON_FILE = "comparison.yaml"
"""The recipe that all arms of a comparison share, and the fields of each arm."""


def compare(
    recipe: str | Path | None,
    arms: Sequence[str],
    num_seeds: int = 3,
    output_dir: str | Path | None = None,
    overrides: Sequence[str] = (),
    arms_file: str | Path | None = None,
    num_processes: int = 1,
) -> Path:
    """
    Trains every arm with every seed, and writes `report.md` with a table and plots.

    If the recipe trains a tokenizer, this is done once, and all arms that keep the recipe's algorithm and vocabulary
    size share it. When started again, a comparison continues where it stopped: finished runs are kept, runs with a
    checkpoint resume, and the others start over. More arms and seeds may be added.

    Args:
        recipe: The recipe that all arms share: a shipped name or a YAML file; `demo` by default.
        arms: Names of arms, shipped (`configuration/arms.yaml`) or from `arms_file`.
        num_seeds: Number of seeds, counting up from the recipe's seed.
        output_dir: The output folder; `runs/compare-NAME` by default. Each run is in `ARM/seed-SEED` in it.
        overrides: Command-line fields that replace the recipe's in all arms.
        arms_file: A YAML file with more arms.
        num_processes: Number of simultaneous runs.

    Returns:
        The path of the report.

    Raises:
        ValueError: A name is unknown, a value invalid, or the folder holds another comparison; before the first run.
        ChildProcessError: A run failed; the message names the file with its output.
    """
    if num_seeds < 1:
        raise ValueError(f"`num_seeds` must be at least 1; got {num_seeds}")
    base = parse_arguments(recipe, overrides)
    known = load_arms(arms_file)
    for arm in arms:
        resolve_arm(base.recipe, arm, arms_file)
    folder = Path(output_dir or Path("runs") / f"compare-{base.recipe['run_name']}")
    content: dict[str, Any] = {"recipe": base.recipe, "arms": {arm: known[arm] for arm in arms}}
    file = folder / COMPARISON_FILE
    # A mistake that was found before the first run leaves nothing but this file.
    if file.exists() and list(folder.iterdir()) != [file]:
        earlier = yaml.safe_load(file.read_text(encoding="utf-8"))
        arms_before = {arm: earlier["arms"].get(arm, fields) for arm, fields in content["arms"].items()}
        if {"recipe": earlier["recipe"], "arms": arms_before} != content:
            raise ValueError(
                f"`output_dir` must be new, or hold the same comparison; {file} has another recipe or another arm of "
                "the same name"
            )
        content["arms"] = {**earlier["arms"], **content["arms"]}
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return run_study(RecipeArms(folder), num_seeds, [glob.escape(arm) for arm in arms], folder, num_processes)


def resolve_arm(base: dict, arm: str, arms_file: str | Path | None = None) -> Arguments:
    """The arguments of an arm, see `join_arm`. Raises `ValueError` if it is unknown or its recipe is invalid."""
    arms = load_arms(arms_file)
    if arm not in arms:
        raise ValueError(f"`arms` must be among {', '.join(arms)}; got {arm!r}{suggest(arm, arms)}")
    return join_arm(base, arm, arms[arm])


class RecipeArms(TrainingStudy):
    """The comparison in a folder, as `COMPARISON_FILE` in it describes it."""

    name = "compare"
    question = ""
    protocol = (
        "Each arm replaces fields of the recipe. Perplexity and bits per byte are means over the runs that finished; "
        "the others, which diverged or were stopped, are lost. The largest logit is that of all logged steps of a "
        "run, and the speed the median over its steps, without waiting for data."
    )
    comparisons = {}
    recipe = None
    work = ""

    def __init__(self, folder: Path):
        content = yaml.safe_load((folder / COMPARISON_FILE).read_text(encoding="utf-8"))
        self._recipe, self.arms = content["recipe"], content["arms"]
        self.title = f"Comparison: {self._recipe['run_name']}"
        self.first_seed = self.base(()).training.seed

    def base(self, fields: Sequence[str]) -> Arguments:
        """The recipe that the arms share."""
        return parse_arguments(self._recipe)

    def measure(self, folder: Path) -> dict:
        """What reports of comparisons have in addition to those of studies."""
        result = RunResult.read(folder)
        names = ("outcome", "eval_perplexity", "tokens_per_second", "peak_memory_bytes")
        perplexity = points_of(read_metrics(folder / "metrics.jsonl"), "eval_perplexity")
        return {name: getattr(result, name) for name in names} | {"perplexity_curve": perplexity}

    def report(self, runs: Runs, folder: Path) -> str:
        sections = [_results_table(runs)]

        def add(file: str, curve: Callable, xlabel: str, ylabel: str, **options: bool):
            curves = of_runs(runs, curve)
            if any(map(any, curves.values())):
                sections.append(plot_curves(folder / file, curves, xlabel, ylabel, **options))

        step, loss = "optimizer step", "loss (nats per token)"
        add("loss.png", lambda run: run["curves"]["loss"], step, f"training {loss}")
        add("perplexity.png", lambda run: run["perplexity_curve"], step, "evaluation perplexity", log_y=True)
        add("max_logits.png", lambda run: run["curves"]["max_logit"], step, "largest |logit|", log_y=True)
        add("loss_by_position.png", lambda run: run["loss_by_position"], CONTEXT_LABEL, loss, log_x=True)
        for title, content in (("What differs between the arms", self.arms), ("Recipe", self._recipe)):
            sections.append(f"## {title}\n\n```yaml\n{yaml.safe_dump(content, sort_keys=False).strip()}\n```")
        return "\n\n".join(sections)


def _results_table(runs: Runs) -> str:
    rows = []
    for arm, of_arm in runs.items():
        # A run may diverge after its last measured loss; its perplexity is then not finite.
        finished = [run for run in of_arm if run["outcome"] == "finished" and math.isfinite(run["eval_perplexity"])]
        cells = [
            format_values([run["eval_perplexity"] for run in finished], 2),
            format_values([run["eval_bits_per_byte"] for run in finished], 4),
            format_values([run["max_logit"] for run in of_arm if run["curves"]["max_logit"]], 1),
            # A run that was killed after its last step has taken no step since, whose time could be measured.
            format_values([run["tokens_per_second"] for run in of_arm if run["tokens_per_second"] > 0], 0),
            with_unit(max(run["peak_memory_bytes"] for run in of_arm), "B"),
        ]
        rows.append([arm, *cells, f"{len(of_arm) - len(finished)} of {len(of_arm)}"])
    head = ["arm", "validation perplexity", "bits per byte", "largest logit", "tokens/s", "peak memory", "lost"]
    return table(rows, head)
