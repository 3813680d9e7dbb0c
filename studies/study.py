"""What a study is: claims with the criteria that they are judged by, arms, the runs, and what is made of them."""

import json
import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from transformers import AutoTokenizer, Trainer

from lsgpt.training.arguments import Arguments, parse_arguments
from lsgpt.training.callbacks import read_metrics
from lsgpt.training.compare import checkpoint_or_empty, join_arm, prepare_tokenizer
from lsgpt.training.data import pack, tokenize
from lsgpt.training.plots import average_in_bins
from lsgpt.training.report import points_of
from lsgpt.training.train import build_trainer, largest, load_texts, train
from lsgpt.utilities import table


VERDICTS = ("seen", "not seen", "opposite", "open")

NUM_POINTS = 60
"""Points of a curve that are kept: as many as a plot can show."""


class Claim(NamedTuple):
    """A claim, and what counts as seen or as the opposite, said before anything is run; the rest is not seen."""

    text: str
    source: str
    """Who says it: the paper, its reviewers, or which of its open questions it answers."""
    seen: str
    opposite: str


EXCHANGED = "the same with the names exchanged"


def below(what: str, first: str, second: str) -> str:
    """The criterion that `is_below` computes, in words."""
    return f"{what} of `{first}` is below that of `{second}` by more than two standard errors"


class Finding(NamedTuple):
    """What the runs of a study say about a claim."""

    figure: str
    """The figures that the verdict rests on, with their spread over seeds."""
    verdict: str
    """One of `VERDICTS`."""


NOT_RUN = Finding("not run yet", "open")


class Scale(NamedTuple):
    """The size at which a study is run."""

    recipe: str | None
    """Shipped recipe that the trainings start from, where there are any."""
    fields: dict
    """Recipe fields that replace those of the recipe."""
    num_seeds: int
    hours: float
    """What all runs take: at `micro` hours of two CPU cores, at `paper` hours of one GPU (an estimate)."""


class NotRunError(LookupError):
    """An arm was not run, or with fewer than two seeds: no verdict rests on one."""


class Runs(dict[str, list[dict]]):
    """For each arm the values of its runs, in the order of their seeds."""

    def of(self, arm: str) -> list[dict]:
        """The runs of an arm, two or more. Raises `NotRunError`."""
        if len(self.get(arm, ())) < 2:
            raise NotRunError(arm)
        return self[arm]

    def column(self, arm: str, key: str) -> list[float]:
        """One loss or logit of every run of an arm, infinite where the run diverged. Raises `NotRunError`."""
        return [number(run[key]) for run in self.of(arm)]


class Study(ABC):
    """
    An experiment. Its runs, one for each arm and seed, are made by `run`, each in a process of its own; everything
    else is made from what they return, so that a report can be written again without running anything.
    """

    name: ClassVar[str]
    """As on the command line."""
    title: ClassVar[str]
    question: ClassVar[str]
    protocol: ClassVar[str]
    """What is run and measured, for the report."""
    claims: ClassVar[dict[str, Claim]]
    scales: ClassVar[dict[str, Scale]]

    @abstractmethod
    def arms(self, scale: str) -> Mapping[str, Any]:
        """The arms, by names that can be folders; what they are made of is the study's own affair."""

    def prepare(self, scale: str, folder: Path, fields: Sequence[str]):
        """Makes in `folder` what all runs share."""
        return

    @abstractmethod
    def run(self, arm: str, seed: int, scale: str, folder: Path, fields: Sequence[str]) -> dict:
        """
        Makes one run.

        Args:
            arm, seed: Which.
            scale: One of `scales`.
            folder: Where it may leave what it needs to go on after an interruption.
            fields: Command-line fields of the recipe, where there is one.

        Returns:
            Numbers, texts, lists and mappings that JSON can hold; no more than the report needs.
        """

    def describe(self) -> str:
        """The study in words, for the command line."""
        claims = "\n".join(f"- {claim.text} ({claim.source})" for claim in self.claims.values())
        sizes = "\n".join(
            f"--scale {name}: {len(self.arms(name))} arms, {scale.num_seeds} seeds, about {scale.hours:g} hours of "
            + ("two CPU cores" if name == "micro" else "a GPU (an estimate; nobody has run it)")
            for name, scale in self.scales.items()
        )
        arms = ", ".join(dict.fromkeys(arm for scale in self.scales for arm in self.arms(scale)))
        return f"{self.title}\n\n{self.question}\n\nClaims:\n{claims}\n\n{sizes}\n\nArms: {arms}"

    @abstractmethod
    def judge(self, runs: Runs) -> dict[str, Finding]:
        """What the runs say about each of `claims`. May raise `NotRunError`: then all of them are open."""

    @abstractmethod
    def report(self, runs: Runs, folder: Path) -> str:
        """Draws plots into `folder`, and returns the tables and the plots in Markdown. Not all arms may be there."""


class TrainingStudy(Study):
    """
    A study whose runs are language models trained by `lsgpt train`. Its arms are recipe fields, joined with the recipe
    as those of `lsgpt compare` are.
    """

    def prepare(self, scale: str, folder: Path, fields: Sequence[str]):
        """Trains the tokenizer, once for all runs."""
        prepare_tokenizer(self.base(scale, fields), folder)

    def base(self, scale: str, fields: Sequence[str]) -> Arguments:
        """The recipe of a scale, with the fields of the command line."""
        recipe, changes, _, _ = self.scales[scale]
        arguments = parse_arguments(recipe, fields)
        given = {field.split("=")[0].removeprefix("--").replace("-", "_") for field in fields}
        changes = {name: value for name, value in changes.items() if name not in given}
        return join_arm(arguments.recipe, self.name, changes)

    def run(self, arm: str, seed: int, scale: str, folder: Path, fields: Sequence[str]) -> dict:
        """Trains, or goes on from the last checkpoint, and collects what the run left."""
        base = self.base(scale, fields)
        run_folder = folder / arm / f"seed-{seed}"
        overrides = ["--seed", str(seed), "--output_dir", str(run_folder)]
        if (tokenizer := folder / "tokenizer").exists():
            overrides += ["--tokenizer", str(tokenizer)]
        if not (run_folder / "results.json").exists():
            if checkpoint := checkpoint_or_empty(run_folder):
                overrides += ["--resume_from_checkpoint", str(checkpoint)]
            arguments = join_arm(base.recipe, arm, self.arms(scale)[arm], overrides)
            trainer = self.build(arguments, arm)
            if train(trainer, arguments) is None:
                raise SystemExit("interrupted; the checkpoint is saved")
        return collect(run_folder) | self.measure(run_folder)

    def build(self, arguments: Arguments, arm: str) -> Trainer:
        """The trainer of a run, changed by `change`."""
        trainer = build_trainer(arguments)
        self.change(trainer, arm)
        return trainer

    def change(self, trainer: Trainer, arm: str):
        """Changes the trainer of a run in what a recipe cannot say."""

    def measure(self, folder: Path) -> dict:
        """What the study wants to know of a trained model beyond what `collect` returns; `folder` is its run's."""
        return {}


def validation_blocks(folder: Path, count: int, block_size: int) -> torch.Tensor:
    """The first blocks of the validation text of the run in a folder, `(count, block_size)` token ids."""
    data = parse_arguments(folder / "recipe.yaml", ["--output_dir", str(folder)]).data
    tokens = tokenize(load_texts(data)["validation"], AutoTokenizer.from_pretrained(folder))
    return torch.stack([torch.as_tensor(row["input_ids"]).long() for row in islice(pack(tokens, block_size), count)])


def collect(folder: Path) -> dict:
    """
    What is kept of a training: final figures, the largest logit on the way, the spike score, the loss by position, and
    curves of up to `NUM_POINTS` points. Of the loss these are means over the steps between, of the logits maxima.
    """
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    logs = read_metrics(folder / "metrics.jsonl")
    curves = {"loss": thin(points_of(logs, "loss", math.nan), statistics.fmean)}
    for key in sorted({key for log in logs for key in log if key.startswith("max_logit")}):
        curves[key] = thin(points_of(logs, key, math.nan), largest)
    losses = [loss for _, loss in points_of(logs, "loss", math.nan)]
    kept = ("status", "step", "eval_loss", "eval_bits_per_byte", "max_logit", "parameters", "train_seconds")
    by_position = [math.nan if x is None else x for x in results["loss_by_position"]]
    is_finite = results["status"] == "finished" and results["eval_loss"] is not None
    return {name: results[name] for name in kept} | {
        "diverged": not (is_finite and results["eval_loss"] < losses[0]),
        "first_loss": losses[0],
        "spike_score": spike_score(losses),
        "loss_by_position": average_in_bins(by_position) if is_finite else [],
        "curves": curves,
    }


def thin(points: Sequence[tuple[int, float]], summarize, num_points: int = NUM_POINTS) -> list[tuple[int, float]]:
    """At most `num_points` of a curve, each for a part of it: the part's last step and the summary of its values."""
    size = math.ceil(len(points) / num_points) if points else 1
    parts = [points[i : i + size] for i in range(0, len(points), size)]
    return [(part[-1][0], float(f"{summarize([value for _, value in part]):.5g}")) for part in parts]


def spike_score(values: Sequence[float], window: int = 128, deviations: float = 6.0) -> float:
    """
    Share of the values that are more than 6 standard deviations above the mean of the 128 before them; those that are
    not finite count, too. (OLMo's score, arXiv:2501.00656.)
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
    """A loss or a logit as JSON has it: null, which stands for NaN and infinity, is larger than any number."""
    return math.inf if value is None else value


def mean(values: Iterable[float]) -> float:
    """The mean of the values that are finite; NaN without any."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return statistics.fmean(finite) if finite else math.nan


def deviation(values: Iterable[float]) -> float:
    """The sample standard deviation of the values that are finite; 0 for fewer than two."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return statistics.stdev(finite) if len(finite) > 1 else 0.0


def format_values(values: Iterable[float | None], digits: int = 3) -> str:
    """Mean ± sample standard deviation of what is finite, and how many values are not, for tables."""
    values = [math.nan if value is None else value for value in values]
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return "not finite" if values else "-"
    spread = f" ± {deviation(finite):,.{digits}f}" if len(finite) > 1 else ""
    lost = f" ({len(values) - len(finite)} not finite)" if len(finite) < len(values) else ""
    return f"{mean(finite):,.{digits}f}{spread}{lost}"


def results_table(runs: Runs) -> str:
    """The final figures of trainings, arm by arm."""
    rows = [
        [
            f"`{arm}`",
            format_values(run["eval_loss"] for run in of_arm),
            format_values((run["max_logit"] for run in of_arm), 1),
            format_values((run["spike_score"] for run in of_arm), 5),
            f"{sum(run['diverged'] for run in of_arm)} of {len(of_arm)}",
        ]
        for arm, of_arm in runs.items()
    ]
    head = ["arm", "final validation loss (nats per token)", "largest logit on the way", "spike score", "diverged"]
    return table(rows, head)


def points(curve: Sequence[Sequence]) -> list[tuple[float, float]]:
    """A curve as `plot_curves` takes it: NaN where there is no number."""
    return [(x, math.nan if y is None else y) for x, y in curve]


def curves_over(runs: Runs, places: Iterable[tuple[float, str]], key: str) -> list[list[tuple[float, float]]]:
    """For `plot_curves`, a curve for each seed over the numbers of `places`, pairs of a number and an arm."""
    present = [(x, runs[arm]) for x, arm in places if arm in runs]
    num_seeds = max((len(of_arm) for _, of_arm in present), default=0)
    return [points([(x, of_arm[i][key]) for x, of_arm in present if i < len(of_arm)]) for i in range(num_seeds)]


def is_below(first: Sequence[float], second: Sequence[float], margin: float = 0.0) -> bool:
    """
    Whether the mean of the first is below that of the second by more than `margin` and by more than twice the standard
    error of the difference (Welch's, from the spread over seeds). Infinite values have no spread: a mean with one is
    above or below every other. What is not a number decides nothing.
    """
    if not all(map(math.isfinite, (*first, *second))):
        return sum(first) / len(first) < sum(second) / len(second)
    error = math.sqrt(sum(deviation(values) ** 2 / max(len(values), 1) for values in (first, second)))
    return mean(second) - mean(first) > max(margin, 2 * error)
