"""Base classes of studies, with their arms, runs and comparisons, and functions that studies share."""

import hashlib
import math
import shutil
import statistics
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoTokenizer, Trainer

from lsgpt.training.arguments import Arguments, parse_arguments
from lsgpt.training.callbacks import read_metrics
from lsgpt.training.data import ALGORITHMS, first_blocks
from lsgpt.training.folders import check_checkpoint, find_checkpoint
from lsgpt.training.report import points_of
from lsgpt.training.results import RunResult
from lsgpt.training.train import build_trainer, largest, load_texts, make_tokenizer, train
from lsgpt.utilities import table
from lsgpt.utilities.plots import average_in_bins

from .comparisons import Bounds, Comparison, Sooner, format_values


NUM_POINTS = 60
"""Maximum number of points that are kept of a curve: as many as a plot can show."""

SEED_OF_EVALUATION = 2**31
"""Never the seed of a run, so models are evaluated on data that were generated for no training."""


class Scale(NamedTuple):
    """The size at which a study is run."""

    recipe: str | None
    """Shipped recipe that the runs are based on, or `None` if the study uses no recipe."""
    fields: dict
    """Fields that replace those of the recipe, or the study's own settings if there is no recipe."""
    num_seeds: int
    hours: float
    """Total time of all runs: at `micro` on two CPU cores, at `paper` on one GPU (an estimate)."""


class Runs(dict[str, list[dict]]):
    """Maps each arm to the values of its runs, each with its `seed`, in the order of their seeds."""

    scale = "micro"
    """The scale at which they were made."""


class Study(ABC):
    """
    Base class of experiments. `run` is called once for each arm and seed, each time in a separate process. Everything
    else works with the values that it returned, so a report can be rewritten without running anything again.
    """

    name: str
    """Name on the command line."""
    title: str
    question: str
    protocol: str
    """What is run and measured, for the report."""
    comparisons: Mapping[str, Comparison | Bounds | Sooner]
    """The claims as data, which are judged and worded by `lsgpt.studies.comparisons`."""
    changes: str = ""
    """What was changed after results existed, for the report."""
    earlier_criteria: tuple[str, ...] = ()
    """Digests of criteria that were in force when committed runs were made, and that `changes` tells about."""
    scales: dict[str, Scale]
    first_seed = 42

    @abstractmethod
    def arms(self, scale: str) -> Mapping[str, Any]:
        """Maps the names of the arms, which must be valid folder names, to whatever defines them in this study."""

    def check(self, arm: str, scale: str, fields: Sequence[str]):
        """Checks that an arm can be run; called for each of them before the first run."""
        return

    def prepare(self, scale: str, folder: Path, fields: Sequence[str]):
        """Creates in `folder` what all runs share."""
        return

    @abstractmethod
    def run(self, arm: str, seed: int, scale: str, folder: Path, fields: Sequence[str]) -> dict:
        """
        Performs one run.

        Args:
            arm: One of `arms`.
            seed: Random seed.
            scale: One of `scales`.
            folder: The folder given to `prepare`. A run may also store there what it needs to resume.
            fields: Command-line fields that replace those of the recipe, if there is one.

        Returns:
            Values that JSON can represent, limited to what the report needs.
        """

    def num_seeds(self, arm: str, scale: str) -> int:
        """Number of seeds of an arm, if the command line does not say it."""
        return self.scales[scale].num_seeds

    def digest(self) -> str:
        """Identifies the wording of all criteria. Every run records it, which shows that they are older."""
        words = "\n".join(f"{key}: {item.claim} {item.criterion()}" for key, item in self.comparisons.items())
        return hashlib.sha256(words.encode()).hexdigest()[:16]

    def describe(self) -> str:
        """Describes the study for the command line."""
        claims = "\n".join(f"- {item.claim} ({item.source})" for item in self.comparisons.values())
        sizes = "\n".join(
            f"--scale {name}: {len(self.arms(name))} arms, {scale.num_seeds} seeds, about {scale.hours:g} hours of "
            + ("two CPU cores" if name == "micro" else "a GPU (an estimate; nobody has run it)")
            for name, scale in self.scales.items()
        )
        arms = ", ".join(dict.fromkeys(arm for scale in self.scales for arm in self.arms(scale)))
        return f"{self.title}\n\n{self.question}\n\nClaims:\n{claims}\n\n{sizes}\n\nArms: {arms}"

    @abstractmethod
    def report(self, runs: Runs, folder: Path) -> str:
        """Saves plots in `folder`, and returns tables and plots in Markdown. Some arms may not have been run yet."""


class TrainingStudy(Study):
    """
    A study that trains language models in the same way as `lsgpt train`. Its arms are recipe fields, which are merged
    with the recipe as in `lsgpt compare`.
    """

    def prepare(self, scale: str, folder: Path, fields: Sequence[str]):
        """Trains the tokenizer, once for all runs that keep the algorithm and the vocabulary size of the base."""
        base = self.base(scale, fields)
        if _trained_tokenizer(base) and not (folder / "tokenizer").exists():
            make_tokenizer(base.data, base.build_config(), load_texts(base.data)).save_pretrained(folder / "tokenizer")

    def check(self, arm: str, scale: str, fields: Sequence[str]):
        """Raises `ValueError` or `ImportError` if the arm's recipe is invalid, or needs a package that is missing."""
        join_arm(self.base(scale, fields).recipe, arm, self.arms(scale)[arm])

    def base(self, scale: str, fields: Sequence[str]) -> Arguments:
        """The recipe of a scale, with the command-line fields applied."""
        recipe, changes, _, _ = self.scales[scale]
        arguments = parse_arguments(recipe, fields)
        given = {field.split("=")[0].removeprefix("--").replace("-", "_") for field in fields}
        changes = {"logging_steps": 1, **changes}  # spike scores and the loss before training are about single steps
        changes = {name: value for name, value in changes.items() if name not in given}
        return join_arm(arguments.recipe, self.name, changes)

    def run(self, arm: str, seed: int, scale: str, folder: Path, fields: Sequence[str]) -> dict:
        """Trains, or resumes from the last checkpoint, and collects the results."""
        base = self.base(scale, fields)
        run_folder = folder / arm / f"seed-{seed}"
        overrides = ["--seed", str(seed), "--output_dir", str(run_folder)]
        arm_fields = self.arms(scale)[arm]
        trained = _trained_tokenizer(join_arm(base.recipe, arm, arm_fields))
        if (tokenizer := folder / "tokenizer").exists() and trained == _trained_tokenizer(base):
            overrides += ["--tokenizer", str(tokenizer)]
        if not (run_folder / "results.json").exists():
            if checkpoint := find_checkpoint_or_delete_run(run_folder):
                overrides += ["--resume_from_checkpoint", str(checkpoint)]
            arguments = join_arm(base.recipe, arm, arm_fields, overrides)
            trainer = self.build(arguments, arm)
            if train(trainer, arguments) is None:
                raise SystemExit("interrupted; the checkpoint is saved")
        return collect(run_folder) | self.measure(run_folder)

    def build(self, arguments: Arguments, arm: str) -> Trainer:
        """Builds the trainer of a run and applies `change` to it."""
        trainer = build_trainer(arguments)
        self.change(trainer, arm)
        return trainer

    def change(self, trainer: Trainer, arm: str):
        """Makes changes to the trainer of a run that a recipe cannot express."""

    def measure(self, folder: Path) -> dict:
        """Further measurements of the trained model in the run's `folder`, added to those of `collect`."""
        return {}


def join_arm(base: dict, name: str, fields: dict, overrides: Sequence[str] = ()) -> Arguments:
    """
    Returns the arguments of an arm that is given by its recipe fields: its `config_overrides` are added to those of
    `base`, and its other fields replace those of `base`. `overrides` are command-line fields, which take precedence.
    """
    merged = {**base, **fields, "run_name": name}
    merged["config_overrides"] = {**(base["config_overrides"] or {}), **(fields.get("config_overrides") or {})}
    return parse_arguments(merged, overrides)


def _trained_tokenizer(arguments: Arguments) -> tuple[str, int] | None:
    """Returns the algorithm and size of the tokenizer that a run trains, or `None` if it trains none."""
    if arguments.model.model_name_or_path or arguments.data.tokenizer not in ALGORITHMS:
        return None
    return arguments.data.tokenizer, arguments.build_config().vocab_size


def find_checkpoint_or_delete_run(run_folder: Path) -> Path | None:
    """Returns the checkpoint from which the run in a folder can resume; if there is none, deletes the folder."""
    try:
        checkpoint = find_checkpoint(run_folder)
        check_checkpoint(checkpoint)
    except ValueError as error:
        if run_folder.exists():
            print(f"Starting the run in {run_folder} anew: {error}", flush=True)
            shutil.rmtree(run_folder)
        return None
    return checkpoint


def blocks_of(length: int) -> dict[str, Any]:
    """
    Recipe fields of `micro` for blocks of `length` tokens, with as many tokens in a step and the same text for
    evaluation as by default.
    """
    fields = {"block_size": length, "per_device_train_batch_size": 2048 // length}
    return {**fields, "max_eval_blocks": 100 * 512 // length}


def validation_blocks(folder: Path, count: int | None, block_size: int) -> torch.Tensor:
    """The first blocks of a run's validation text: token ids `(count, block_size)`."""
    data = parse_arguments(folder / "recipe.yaml", ["--output_dir", str(folder)]).data
    return first_blocks(load_texts(data)["validation"], AutoTokenizer.from_pretrained(folder), block_size, count)


def collect(folder: Path) -> dict:
    """
    Collects the results of a training run: final figures, the largest logit during training, the spike score, the loss
    by position, and curves of up to `NUM_POINTS` points. Each point summarizes the steps since the previous one by the
    mean loss or the largest logit.
    """
    result, logs = RunResult.read(folder), read_metrics(folder / "metrics.jsonl")
    losses = points_of(logs, "loss")
    curves = {"loss": thin(losses, statistics.fmean)}
    for key in sorted({key for log in logs for key in log if key.startswith("max_logit")}):
        curves[key] = thin(points_of(logs, key), largest)
    first_loss = losses[0][1] if losses else math.nan
    kept = ("status", "step", "eval_loss", "eval_bits_per_byte", "max_logit", "parameters", "train_seconds")
    is_finite = result.outcome == "finished" and math.isfinite(result.eval_loss)
    return {name: getattr(result, name) for name in kept} | {
        "diverged": not is_finite or result.eval_loss >= first_loss,
        "first_loss": first_loss,
        "spike_score": spike_score([loss for _, loss in losses]),
        "loss_by_position": average_in_bins(result.loss_by_position) if is_finite else [],
        "curves": curves,
    }


def thin(points: Sequence[tuple[int, float]], summarize, num_points: int = NUM_POINTS) -> list[tuple[int, float]]:
    """Reduces a curve to at most `num_points` points, each with the last step and the summary of a part of it."""
    size = math.ceil(len(points) / num_points) if points else 1
    parts = [points[i : i + size] for i in range(0, len(points), size)]
    return [(part[-1][0], float(f"{summarize([value for _, value in part]):.5g}")) for part in parts]


def spike_score(values: Sequence[float], window: int = 128, deviations: float = 6.0) -> float:
    """
    Share of the values that are more than 6 standard deviations above the mean of the 128 values before them. Values
    that are not finite count as spikes, too. (This is OLMo's score, arXiv:2501.00656.)
    """
    spikes, num_values = 0, 0
    for i in range(window, len(values)):
        before = [value for value in values[i - window : i] if math.isfinite(value)]
        num_values += 1
        if not math.isfinite(values[i]):
            spikes += 1
        elif len(before) > 1:
            spikes += values[i] > statistics.fmean(before) + deviations * statistics.pstdev(before)
    return spikes / num_values if num_values else 0.0


def number(value: float | None) -> float:
    """Converts a loss or logit read from JSON: null, which stands for NaN and infinity, becomes infinity."""
    return math.inf if value is None else value


def mean(values: Iterable[float]) -> float:
    """The mean of the finite values; NaN if there are none."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return statistics.fmean(finite) if finite else math.nan


def results_table(runs: Runs) -> str:
    """A table of the final figures of training runs, one row for each arm."""
    rows = [
        [
            f"`{arm}`",
            format_values([run["eval_loss"] for run in of_arm]),
            format_values([run["max_logit"] for run in of_arm], 1),
            format_values([run["spike_score"] for run in of_arm], 5),
            f"{sum(run['diverged'] for run in of_arm)} of {len(of_arm)}",
        ]
        for arm, of_arm in runs.items()
    ]
    head = ["arm", "final validation loss (nats per token)", "largest logit on the way", "spike score", "diverged"]
    return table(rows, head)


def points(curve: Sequence[Sequence]) -> list[tuple[float, float]]:
    """Converts a curve to the form that `plot_curves` takes, with NaN for missing values."""
    return [(x, math.nan if y is None else y) for x, y in curve]
