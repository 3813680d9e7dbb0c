"""Base classes of studies, with their claims, arms, runs and verdicts, and functions that studies share."""

import hashlib
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
from lsgpt.training.compare import find_checkpoint_or_delete_run, join_arm, prepare_tokenizer
from lsgpt.training.data import pack, tokenize
from lsgpt.training.plots import average_in_bins
from lsgpt.training.report import points_of
from lsgpt.training.train import build_trainer, largest, load_texts, train
from lsgpt.utilities import table

from .comparisons import Bounds, Comparison, Sooner


VERDICTS = ("seen", "not seen", "opposite", "open")

NUM_POINTS = 60
"""Maximum number of points that are kept of a curve: as many as a plot can show."""

SEED_OF_EVALUATION = 2**31
"""Never the seed of a run, so models are evaluated on data that were generated for no training."""


class Claim(NamedTuple):
    """A claim and its criteria, fixed before any run. A result that meets neither criterion counts as not seen."""

    text: str
    source: str
    """Where the claim comes from, for example the paper, its reviewers, or one of its open questions."""
    seen: str
    opposite: str


EXCHANGED = "the same with the names exchanged"


def below(what: str, first: str, second: str) -> str:
    """The criterion that `is_below` tests, in words."""
    return f"{what} of `{first}` is below that of `{second}` by more than two standard errors"


NEGLIGIBLE = 0.05
"""Difference between losses, in nats, up to which a claim that there is none holds."""


def no_lower(others: str, arm: str) -> str:
    """The criterion that `is_no_lower` tests, in words."""
    return (
        f"the mean loss of {others} is not lower than that of {arm} by {NEGLIGIBLE:g} nats or more, even if two "
        "standard errors are added to the difference"
    )


class Finding(NamedTuple):
    """What the runs of a study say about a claim."""

    figure: str
    """The numbers behind the verdict, with their spread over seeds."""
    verdict: str
    """One of `VERDICTS`."""


NOT_RUN = Finding("too few runs so far", "open")


class Scale(NamedTuple):
    """The size at which a study is run."""

    recipe: str | None
    """Shipped recipe that the runs are based on, or `None` if the study uses no recipe."""
    fields: dict
    """Fields that replace those of the recipe, or the study's own settings if there is no recipe."""
    num_seeds: int
    hours: float
    """Total time of all runs: at `micro` on two CPU cores, at `paper` on one GPU (an estimate)."""


class NotRunError(LookupError):
    """An arm was run with fewer than two seeds, which is not enough for a verdict."""


class Runs(dict[str, list[dict]]):
    """Maps each arm to the values of its runs, in the order of their seeds."""

    scale = "micro"
    """The scale at which they were made."""

    def of(self, arm: str) -> list[dict]:
        """The runs of an arm. Raises `NotRunError` if there are fewer than two."""
        if len(self.get(arm, ())) < 2:
            raise NotRunError(arm)
        return self[arm]

    def column(self, arm: str, key: str) -> list[float]:
        """
        A loss or logit of every run of an arm, infinite where it is not a number; the loss of a run that diverged is
        infinite, too. Raises `NotRunError` as `of`.
        """
        return [number(run[key]) for run in self.of(arm)]


class Study(ABC):
    """
    Base class of experiments. `run` is called once for each arm and seed, each time in a separate process. Everything
    else works with the values that it returned, so a report can be rewritten without running anything again.
    """

    name: ClassVar[str]
    """Name on the command line."""
    title: ClassVar[str]
    question: ClassVar[str]
    protocol: ClassVar[str]
    """What is run and measured, for the report."""
    claims: ClassVar[dict[str, Claim]] = {}
    comparisons: ClassVar[Mapping[str, Comparison | Bounds | Sooner]] = {}
    """The claims as data, which are judged and worded by `lsgpt.studies.comparisons`."""
    changes: ClassVar[str] = ""
    """What was changed after results existed, for the report."""
    earlier_criteria: ClassVar[tuple[str, ...]] = ()
    """Digests of criteria that were in force when committed runs were made, and that `changes` tells about."""
    scales: ClassVar[dict[str, Scale]]
    first_seed: ClassVar[int] = 42

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
        texts = [(claim.text, claim.source) for claim in self.claims.values()]
        texts += [(item.claim, item.source) for item in self.comparisons.values()]
        claims = "\n".join(f"- {text} ({source})" for text, source in texts)
        sizes = "\n".join(
            f"--scale {name}: {len(self.arms(name))} arms, {scale.num_seeds} seeds, about {scale.hours:g} hours of "
            + ("two CPU cores" if name == "micro" else "a GPU (an estimate; nobody has run it)")
            for name, scale in self.scales.items()
        )
        arms = ", ".join(dict.fromkeys(arm for scale in self.scales for arm in self.arms(scale)))
        return f"{self.title}\n\n{self.question}\n\nClaims:\n{claims}\n\n{sizes}\n\nArms: {arms}"

    def judge(self, runs: Runs) -> dict[str, Finding]:
        """Judges each of `claims` by the runs. If this raises `NotRunError`, all of them stay open."""
        return {}

    @abstractmethod
    def report(self, runs: Runs, folder: Path) -> str:
        """Saves plots in `folder`, and returns tables and plots in Markdown. Some arms may not have been run yet."""


class TrainingStudy(Study):
    """
    A study that trains language models in the same way as `lsgpt train`. Its arms are recipe fields, which are merged
    with the recipe as in `lsgpt compare`.
    """

    def prepare(self, scale: str, folder: Path, fields: Sequence[str]):
        """Trains the tokenizer, once for all runs."""
        prepare_tokenizer(self.base(scale, fields), folder)

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
        if (tokenizer := folder / "tokenizer").exists():
            overrides += ["--tokenizer", str(tokenizer)]
        if not (run_folder / "results.json").exists():
            if checkpoint := find_checkpoint_or_delete_run(run_folder):
                overrides += ["--resume_from_checkpoint", str(checkpoint)]
            arguments = join_arm(base.recipe, arm, self.arms(scale)[arm], overrides)
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


def blocks_of(length: int, scale: str) -> dict[str, Any]:
    """Recipe fields for blocks of `length` tokens, with as many tokens in a step and the same text for evaluation."""
    fields = {"block_size": length, "per_device_train_batch_size": (2048 if scale == "micro" else 2**18) // length}
    # By default, `micro` evaluates on 100 blocks of 512 tokens, and `paper` on all of the validation text.
    return {**fields, "max_eval_blocks": 100 * 512 // length} if scale == "micro" else fields


def validation_blocks(folder: Path, count: int, block_size: int) -> torch.Tensor:
    """The first blocks of a run's validation text: token ids `(count, block_size)`."""
    data = parse_arguments(folder / "recipe.yaml", ["--output_dir", str(folder)]).data
    tokens = tokenize(load_texts(data)["validation"], AutoTokenizer.from_pretrained(folder))
    return torch.stack([torch.as_tensor(row["input_ids"]).long() for row in islice(pack(tokens, block_size), count)])


def collect(folder: Path) -> dict:
    """
    Collects the results of a training run: final figures, the largest logit during training, the spike score, the loss
    by position, and curves of up to `NUM_POINTS` points. Each point summarizes the steps since the previous one by the
    mean loss or the largest logit.
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


def deviation(values: Iterable[float]) -> float:
    """The sample standard deviation of the finite values; 0 if there are fewer than two."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return statistics.stdev(finite) if len(finite) > 1 else 0.0


def differences(first: Iterable[float], second: Iterable[float]) -> list[float]:
    """The differences `first - second`, seed by seed."""
    return [a - b for a, b in zip(first, second)]


def format_values(values: Iterable[float | None], digits: int = 3) -> str:
    """Formats the mean ± sample standard deviation of the finite values, and the number of values that are not."""
    values = [math.nan if value is None else value for value in values]
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return "not finite" if values else "-"
    spread = f" ± {deviation(finite):,.{digits}f}" if len(finite) > 1 else ""
    lost = f" ({len(values) - len(finite)} not finite)" if len(finite) < len(values) else ""
    return f"{mean(finite):,.{digits}f}{spread}{lost}"


def results_table(runs: Runs) -> str:
    """A table of the final figures of training runs, one row for each arm."""
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
    """Converts a curve to the form that `plot_curves` takes, with NaN for missing values."""
    return [(x, math.nan if y is None else y) for x, y in curve]


def curves_over(runs: Runs, places: Iterable[tuple[float, str]], key: str) -> list[list[tuple[float, float]]]:
    """Curves of `key` for `plot_curves`, one for each seed; `places` gives the x values and their arms."""
    present = [(x, runs[arm]) for x, arm in places if arm in runs]
    num_seeds = max((len(of_arm) for _, of_arm in present), default=0)
    return [points([(x, of_arm[i][key]) for x, of_arm in present if i < len(of_arm)]) for i in range(num_seeds)]


def is_below(first: Sequence[float], second: Sequence[float], margin: float = 0.0) -> bool:
    """
    Whether the mean of `first` is below the mean of `second` by more than `margin` and by more than twice the standard
    error of the difference (Welch's, from the spread over seeds). If values are infinite, those are all of `second`
    and none of `first`; or, with minus infinity (a gain over a run that diverged), all of `first` and none of
    `second`. If a value is NaN, the answer is False.
    """
    if not all(map(math.isfinite, (*first, *second))):
        above = all(map(math.isfinite, first)) and all(value == math.inf for value in second)
        return above or (all(map(math.isfinite, second)) and all(value == -math.inf for value in first))
    return mean(second) - mean(first) > max(margin, 2 * standard_error(first, second))


def verdict_below(first: Sequence[float], second: Sequence[float]) -> str:
    """`seen` if `first` is below `second` (see `is_below`), `opposite` if it is above, otherwise `not seen`."""
    if is_below(first, second):
        return "seen"
    return "opposite" if is_below(second, first) else "not seen"


def is_no_lower(first: Sequence[float], second: Sequence[float]) -> bool:
    """
    Whether the mean of the losses `first` is at most negligibly below that of `second`: by less than `NEGLIGIBLE`,
    even if two standard errors are added, so that a large spread over seeds makes this false. If a value is not
    finite, the answer is False.
    """
    if not all(map(math.isfinite, (*first, *second))):
        return False
    return mean(second) - mean(first) + 2 * standard_error(first, second) < NEGLIGIBLE


def standard_error(first: Sequence[float], second: Sequence[float]) -> float:
    """The standard error of the difference between two means (Welch's, from the spread over seeds)."""
    return math.sqrt(sum(deviation(values) ** 2 / max(len(values), 1) for values in (first, second)))


def compare_losses(
    losses: dict[str, list[float]], first: str, second: str, rates: dict[str, float] | None = None
) -> Finding:
    """Whether the losses of the first arm are below those of the second."""
    parts = [
        f"{format_values(losses[name])} for `{name}`" + (f" (rate {rates[name]:g})" if rates else "")
        for name in (first, second)
    ]
    return Finding(f"loss {parts[0]}, {parts[1]}", verdict_below(losses[first], losses[second]))
