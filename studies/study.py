"""Base classes of studies, with their arms, runs and comparisons, and functions that studies share."""

import hashlib
import math
import shutil
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset
from transformers import AutoTokenizer, PreTrainedModel, TrainerCallback, TrainingArguments, default_data_collator

from lsgpt.configuration import load_recipe
from lsgpt.training import LSGPTTrainer, StopOnBadLossCallback
from lsgpt.training.arguments import Arguments, parse_arguments
from lsgpt.training.callbacks import read_metrics
from lsgpt.training.data import ALGORITHMS, first_blocks
from lsgpt.training.folders import check_checkpoint, find_checkpoint
from lsgpt.training.report import points_of
from lsgpt.training.results import RunResult
from lsgpt.training.train import build_trainer, largest, load_texts, make_tokenizer, train
from lsgpt.utilities import table
from lsgpt.utilities.plots import average_in_bins

from .comparisons import LOSS, Claim, Metric, Runs, format_values


NUM_POINTS = 60
"""Maximum number of points that are kept of a curve: as many as a plot can show."""

ON_A_CORE = {
    "tokenizer": "bpe",
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "per_device_eval_batch_size": 1,
    "eval_strategy": "no",
    "bf16": False,
    "torch_compile": False,
    "dataloader_pin_memory": False,
    "disable_tqdm": True,
}
"""What `paper-v1`, a recipe for a GPU, needs to run on one CPU core, with one row in a step."""

SEED_OF_EVALUATION = 2**31
"""Never the seed of a run, so models are evaluated on data that were generated for no training."""


class Study(ABC):
    """
    Base class of experiments. `run` is called for each arm and seed, each time in a process of its own. Everything
    else works with the values that it returned, so a report can be rewritten without running anything again.
    """

    name: str
    title: str
    question: str
    protocol: str
    """What is run and measured, for the report."""
    arms: Mapping[str, Any]
    """Maps the names of the arms, which must be valid folder names, to whatever defines them in this study."""
    comparisons: Mapping[str, Claim]
    """The claims as data, which are judged and worded by `lsgpt.studies.comparisons`."""
    changes = ""
    """What was changed after results existed, for the report."""
    num_seeds = 3
    fewer_seeds: Mapping[str, int] = {}
    """The number of seeds of arms that have fewer than the others."""
    first_seed = 42
    hours: float
    """Total time of all runs on two CPU cores."""
    recipe: str | None = None
    """Shipped recipe that the runs are based on, or `None` if the study uses no recipe."""
    work = "work"
    """Where runs keep their files, inside the output folder."""

    def seeds_of(self, arm: str) -> int:
        """The planned number of seeds of an arm."""
        return self.fewer_seeds.get(arm, self.num_seeds)

    def prepare(self, folder: Path, arms: Sequence[str], fields: Sequence[str]):
        """Checks that the arms can be run, and creates in `folder` what all runs share."""
        return

    @abstractmethod
    def run(self, arm: str, seed: int, folder: Path, fields: Sequence[str]) -> dict:
        """
        Performs one run of an arm, and returns what the report needs, as values for JSON. The run may store in
        `folder`, which `prepare` was given, what it needs to resume. `fields` are command-line fields that replace
        those of the recipe, if there is one.
        """

    def digest(self) -> str:
        """Identifies the wording of all criteria. Every run records it, which shows that they are older."""
        words = "\n".join(f"{key}: {item.claim} {item.criterion()}" for key, item in self.comparisons.items())
        return hashlib.sha256(words.encode()).hexdigest()[:16]

    def describe(self) -> str:
        """Describes the study for the command line."""
        claims = "\n".join(f"- {item.title} ({item.source})" for item in self.comparisons.values())
        num_runs = sum(map(self.seeds_of, self.arms))
        size = f"{len(self.arms)} arms, {num_runs} runs, about {self.hours:g} h on two CPU cores"
        return f"{self.title}\n\n{self.question}\n\nClaims:\n{claims}\n\n{size}\n\nArms: {', '.join(self.arms)}"

    @abstractmethod
    def report(self, runs: Runs, folder: Path) -> str:
        """Saves plots in `folder`, and returns tables and plots in Markdown. Some arms may not have been run yet."""


class TrainingStudy(Study):
    """
    A study that trains language models in the same way as `lsgpt train`. Its arms are recipe fields, which are merged
    with the recipe as in `lsgpt compare`.
    """

    recipe: str = "micro"
    fields: Mapping[str, Any] = {}
    """Fields that replace those of the recipe in all arms."""

    def prepare(self, folder: Path, arms: Sequence[str], fields: Sequence[str]):
        """
        Trains the tokenizer, once for all runs that keep the algorithm and the vocabulary size of the base. Raises
        `ValueError` or `ImportError` if an arm's recipe is invalid, or needs a package that is missing.
        """
        base = self.base(fields)
        given = {field[2:].partition("=")[0].replace("-", "_") for field in fields if field.startswith("--")}
        for arm in arms:
            own = {"seed", "output_dir", *self.arms[arm]} - {"config_overrides"}  # those are merged
            if clashes := sorted(given & own):
                raise ValueError(f"`{clashes[0]}` must not be given, because every run of {arm} has its own")
            join_arm(base.recipe, arm, self.arms[arm])
        if _trained_tokenizer(base) and not (folder / "tokenizer").exists():
            make_tokenizer(base.data, base.build_config(), load_texts(base.data)).save_pretrained(folder / "tokenizer")

    def base(self, fields: Sequence[str]) -> Arguments:
        """The recipe of all arms, with the command-line fields applied."""
        changes = {"logging_steps": 1, **self.fields}  # spikes and the loss before training are about single steps
        return join_arm({"config_overrides": None, **load_recipe(self.recipe)}, self.name, changes, fields)

    def run(self, arm: str, seed: int, folder: Path, fields: Sequence[str]) -> dict:
        """Trains, or resumes from the last checkpoint, and collects the results."""
        base, run_folder = self.base(fields), folder / arm / f"seed-{seed}"
        overrides = ["--seed", str(seed), "--output_dir", str(run_folder)]
        trained = _trained_tokenizer(join_arm(base.recipe, arm, self.arms[arm]))
        if (tokenizer := folder / "tokenizer").exists() and trained == _trained_tokenizer(base):
            overrides += ["--tokenizer", str(tokenizer)]
        if not (run_folder / "results.json").exists():
            if checkpoint := find_checkpoint_or_delete_run(run_folder):
                overrides += ["--resume_from_checkpoint", str(checkpoint)]
            arguments = join_arm(base.recipe, arm, self.arms[arm], overrides)
            trainer = build_trainer(arguments)
            self.change(trainer, arm)
            if train(trainer, arguments) is None:
                raise SystemExit("interrupted; the checkpoint is saved")
        return collect(run_folder) | self.measure(run_folder)

    def change(self, trainer: LSGPTTrainer, arm: str):
        """Makes changes to the trainer of a run that a recipe cannot express."""

    def measure(self, folder: Path) -> dict:
        """Further measurements of the trained model in the run's `folder`, added to those of `collect`."""
        return {}


def join_arm(base: dict, name: str, fields: Mapping[str, Any], overrides: Sequence[str] = ()) -> Arguments:
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
        check_checkpoint(checkpoint := find_checkpoint(run_folder))
    except ValueError as error:
        if run_folder.exists():
            print(f"Starting the run in {run_folder} anew: {error}", flush=True)
            shutil.rmtree(run_folder)
        return None
    return checkpoint


def validation_blocks(folder: Path, count: int | None, block_size: int) -> torch.Tensor:
    """The first blocks of a run's validation text: token ids `(count, block_size)`."""
    data = parse_arguments(folder / "recipe.yaml", ["--output_dir", str(folder)]).data
    return first_blocks(load_texts(data)["validation"], AutoTokenizer.from_pretrained(folder), block_size, count)


class Stream(IterableDataset):
    """An endless stream of rows, the same in every pass; for a single data loading process."""

    def __init__(self, make_row: Callable[[np.random.Generator], dict[str, np.ndarray]], seed: int):
        self.make_row, self.seed = make_row, seed

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        generator = np.random.default_rng(self.seed)
        while True:
            yield self.make_row(generator)


def train_small(
    model: PreTrainedModel,
    data: Stream,
    seed: int,
    folder: Path,
    options: Mapping[str, Any],
    callbacks: Sequence[TrainerCallback] = (),
    trainer_class: type = LSGPTTrainer,
) -> bool:
    """
    Trains a new model in place, with the optimizer and schedule of the recipe `micro` and without checkpoints, and
    puts it into evaluation mode. `options` are fields of `TrainingArguments`; `folder` is for `callbacks`, and for
    what is written when the loss becomes NaN or infinite. Returns whether it did.
    """
    fields = {
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
        "weight_decay": 0.1,
        "adam_beta2": 0.95,
        "bf16": torch.cuda.is_available(),
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    guard = StopOnBadLossCallback()
    trainer = trainer_class(
        model=model,
        args=TrainingArguments(output_dir=str(folder), seed=seed, **{**fields, **options}),
        train_dataset=data,
        data_collator=default_data_collator,
        callbacks=[guard, *callbacks],
    )
    trainer.train()
    model.eval()
    return guard.bad_step is not None


def collect(folder: Path) -> dict:
    """
    Collects the results of a training run: final figures, the largest logit during training, the spike score, the loss
    by position, and curves of up to `NUM_POINTS` points. Each point summarizes the steps since the previous one by the
    mean loss or the largest logit.
    """
    result, logs = RunResult.read(folder), read_metrics(folder / "metrics.jsonl")
    losses = points_of(logs, "loss")
    curves = {"loss": thin(losses, statistics.fmean)}
    for key in sorted({"max_logit", *(key for log in logs for key in log if key.startswith("max_logit"))}):
        curves[key] = thin(points_of(logs, key), largest)
    first_loss = losses[0][1] if losses else math.nan
    kept = ("status", "step", "eval_loss", "eval_bits_per_byte", "max_logit", "parameters", "train_seconds")
    # A callback of the study may end a run early, as after an equal time; one that exploded counts as diverged.
    has_ended = result.outcome == "finished" or result.stopped_by == "a callback"
    is_finite = has_ended and math.isfinite(result.eval_loss)
    return {name: getattr(result, name) for name in (*kept, "environment")} | {
        "diverged": not is_finite or result.eval_loss >= first_loss,
        "first_loss": first_loss,
        "spike_score": spike_score([loss for _, loss in losses]),
        "loss_by_position": average_in_bins(result.loss_by_position) if is_finite else [],
        "curves": curves,
    }


def thin(points: Sequence[tuple[float, float]], summarize: Callable) -> list[tuple[float, float]]:
    """Reduces a curve to at most `NUM_POINTS` points, each with the last step and the summary of a part of it."""
    size = math.ceil(len(points) / NUM_POINTS) or 1
    parts = [points[i : i + size] for i in range(0, len(points), size)]
    return [(part[-1][0], float(f"{summarize([value for _, value in part]):.5g}")) for part in parts]


def spike_score(values: Sequence[float]) -> float:
    """
    Share of the values that are more than 6 standard deviations above the mean of the 128 values before them. Values
    that are not finite count as spikes, too. (This is OLMo's score, arXiv:2501.00656.)
    """
    window = 128
    if len(values) <= window:
        return 0.0
    later = np.array(values[window:])
    before = np.ma.masked_invalid(np.lib.stride_tricks.sliding_window_view(np.array(values), window)[:-1])
    limits = (before.mean(1) + 6.0 * before.std(1)).filled(np.inf)
    return float((~np.isfinite(later) | (later > limits)).mean())


FINAL = {
    "final validation loss (nats per token)": LOSS,
    "largest logit on the way": Metric("", "max_logit", 1),
    "spike score": Metric("", "spike_score", 5),
}
"""The final figures of training runs."""


def tabulate(runs: Runs, columns: Mapping[str, Metric], first: str = "arm", diverged: bool = False) -> str:
    """A table of metrics, one row for each arm; `diverged` adds the number of runs that diverged."""
    rows = [
        [
            f"`{arm}`",
            *(format_values([metric.of(run) for run in of_arm], metric.digits) for metric in columns.values()),
            *([f"{sum(run['diverged'] for run in of_arm)} of {len(of_arm)}"] if diverged else []),
        ]
        for arm, of_arm in runs.items()
    ]
    return table(rows, [first, *columns, *(["diverged"] if diverged else [])])
