"""How many steps does it take to learn recall and copying, with few and with many global heads?"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import TrainerCallback, set_seed

from lsgpt import LSGPTForCausalLM
from lsgpt.configuration import load_preset
from lsgpt.utilities import table
from lsgpt.utilities.plots import of_runs, plot_curves

from .comparisons import Best, Bounds, Limit, Metric, Runs, Sooner, format_steps
from .study import SEED_OF_EVALUATION, Stream, Study, train_small


COUNTS = (0, 1, 2, 3, 6)
RATES = (1e-3, 2e-3, 4e-3)
CAP, GOAL, EVERY = 6000, 0.95, 50
MIN_SIZE = 4
"""Length of the shortest string to copy, and smallest number of keys in a row of `recall`."""

STEPS = Metric("the number of steps", "steps", 0)


class Row(NamedTuple):
    """A sequence of a task, in arrays `(n,)`."""

    input_ids: np.ndarray
    labels: np.ndarray
    """Answers, and -100 elsewhere. As usual in causal models, answers are predicted from the token before."""
    distances: np.ndarray
    """For each answer, the number of tokens since the place where it was last given, and 0 elsewhere."""


def make_recall(generator: np.random.Generator, length: int, vocab_size: int) -> Row:
    """Pairs of a key and the value that belongs to it in this row; the answers are values of keys that came before."""
    keys, values = 2 + np.arange((vocab_size - 2) // 2 * 2).reshape(2, -1)
    size = generator.integers(MIN_SIZE, len(keys) + 1)
    ids = np.empty(length // 2 * 2, dtype=np.int64)
    which = generator.integers(size, size=length // 2)
    ids[::2], ids[1::2] = generator.permutation(keys)[which], generator.permutation(values)[which]
    labels, distances = np.full(len(ids), -100), np.zeros(len(ids), dtype=np.int64)
    last: dict[int, int] = {}
    for place, key in enumerate(which):
        if key in last:
            labels[2 * place + 1], distances[2 * place + 1] = ids[2 * place + 1], 2 * (place - last[key])
        last[key] = place
    return Row(ids, labels, distances)


def make_copy(generator: np.random.Generator, length: int, vocab_size: int) -> Row:
    """A string of different symbols, of random length, again and again; all but the first time it is the answer."""
    size = generator.integers(MIN_SIZE, min(vocab_size - 2, length // 2) + 1)
    ids = np.resize(2 + generator.permutation(vocab_size - 2)[:size], length)
    is_answer = np.arange(length) >= size
    return Row(ids, np.where(is_answer, ids, -100), np.where(is_answer, size, 0))


TASKS: dict[str, Callable[..., Row]] = {"recall": make_recall, "copy": make_copy}


@torch.no_grad()
def answer(model: torch.nn.Module, rows: Sequence[Row], batch_size: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """For each answer, whether the model gives it the highest probability, and its distance."""
    ids, labels, distances = (np.stack(x) for x in zip(*rows))
    batches = torch.as_tensor(ids, device=model.device).split(batch_size)
    predicted = torch.cat([model(batch).logits.argmax(-1) for batch in batches]).cpu().numpy()
    is_answer = labels[:, 1:] >= 0
    return (predicted[:, :-1] == labels[:, 1:])[is_answer], distances[:, 1:][is_answer]


class StopAtGoal(TrainerCallback):
    """Measures the accuracy of far answers every few steps, and ends the training at the goal."""

    def __init__(self, rows: Sequence[Row], far: int):
        self.rows, self.far = rows, far
        self.steps: int | None = None
        self.curve: list[tuple[int, float]] = []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step % EVERY:
            return
        is_right, distances = answer(model.eval(), self.rows)
        model.train()
        self.curve.append((state.global_step, round(float(is_right[distances > self.far].mean()), 4)))
        if self.curve[-1][1] >= GOAL:
            self.steps = state.global_step
            control.should_training_stop = True


def arm_of(task: str, count: int, rate: float) -> str:
    """The name of an arm."""
    return f"{task}-{count}-lr{rate:g}"


def tuned(task: str, count: int) -> Best:
    """A number of global heads at the rate with the smallest median or, of equal ones, with the smallest mean."""

    def score(steps: Sequence[float]) -> tuple[float, float]:
        capped = [min(value, 2 * CAP) for value in steps]
        return statistics.median(capped), statistics.fmean(capped)

    return Best(f"{task}-{count}", tuple(arm_of(task, count, rate) for rate in RATES), score=score)


class TimeToLearn(Study):
    name = "time-to-learn"
    title = "Time to learn recall and copying"
    question = """\
LS-attention keeps one head or a few for the distant past, because long-range dependencies are sparse. How many steps
does it take to learn tasks that are all about the distant past, with 0, 1, 2, 3 and 6 of 6 heads global? (In the
earlier study long-range, models with all heads global had not begun to learn recall after 1,500 steps, a number that
was chosen on one of its seeds.)"""
    protocol = f"""\
Two tasks, in which every row is new. In `recall` (multi-query associative recall, arXiv:2312.04927), a row consists
of pairs of a random key and the value drawn for it in this row; the answer is the value of any key that has occurred
before. In `copy`, a string of different symbols and of random length is repeated; the answer is each of its symbols,
except for the first time. Only answers count in the loss and in the accuracy. Models have 2 layers, 6 heads of width
16, rotary positions and windows of 8 tokens; a batch has 16 rows of 128 tokens out of 34 symbols. Every number of
global heads is trained at the rates {", ".join(f"{rate:g}" for rate in RATES)}, constant after 100 steps of warm-up,
with 5 seeds (47 to 51) that the earlier study did not use. Every {EVERY} steps, the accuracy is measured on the far
answers of 128 rows that are never trained on: answers that local heads cannot reach, even through two layers. A run
ends when the accuracy is {GOAL:.0%} or more, and is censored after {CAP:,} steps. A number of heads is judged at the
rate with the smallest median; the table shows all rates. Arms are named after the task, the number of global heads
and the rate."""
    arms = {  # the slowest come last
        arm_of(task, count, rate): (task, count, rate) for count in (1, 2, 3, 6, 0) for task in TASKS for rate in RATES
    }
    comparisons = {
        **{
            f"no-head-{task}": Bounds(
                "a check of the test itself",
                tuple(Limit(arm_of(task, 0, rate), STEPS, above=CAP) for rate in RATES),
                claim=f"without a global head, the far past is never learnt ({task})",
            )
            for task in TASKS
        },
        **{
            f"{key}-{task}": Sooner(
                source, STEPS, tuned(task, first), tuned(task, second), CAP, claim=f"{claim} ({task})"
            )
            for key, first, second, claim, source in (
                ("one-all", 1, 6, "with one global head, a task is learnt sooner than with all heads global", "ours"),
                ("half-all", 3, 6, "with half of the heads global, a task is learnt sooner than with all", "ours"),
                ("two-one", 2, 1, "with a second global head, a task is learnt sooner", "reviewers"),
            )
            for task in TASKS
        },
    }
    num_seeds = 5
    first_seed = 47
    hours = 9.0
    eval_rows = 128
    model: Mapping[str, Any] = {
        "vocab_size": 34,
        "hidden_size": 96,
        "max_position_embeddings": 128,
        "sliding_window": 8,
        "initializer_range": 0.1,
        "tie_word_embeddings": False,
    }
    options: Mapping[str, Any] = {
        "max_steps": CAP,
        "per_device_train_batch_size": 16,
        "warmup_steps": 100,
        "lr_scheduler_type": "constant_with_warmup",
        "lr_scheduler_kwargs": {},
    }

    def run(self, arm: str, seed: int, folder: Path, fields: Sequence[str]) -> dict:
        """Trains a model until it reaches the goal."""
        task, count, rate = self.arms[arm]
        config = load_preset("demo", **self.model, num_global_heads=count)
        make = partial(TASKS[task], length=config.max_position_embeddings, vocab_size=config.vocab_size)

        def make_row(generator: np.random.Generator) -> dict[str, np.ndarray]:
            return {"input_ids": (row := make(generator)).input_ids, "labels": row.labels}

        generator = np.random.default_rng(SEED_OF_EVALUATION)
        rows = [make(generator) for _ in range(self.eval_rows)]
        goal = StopAtGoal(rows, 1 + config.num_hidden_layers * (config.sliding_window - 1))
        set_seed(seed)
        model, run_folder = LSGPTForCausalLM(config), folder / arm / f"seed-{seed}"
        options = {**self.options, "learning_rate": rate}
        diverged = train_small(model, Stream(make_row, seed), seed, run_folder, options, [goal])
        return {"steps": goal.steps, "far_accuracy": goal.curve, "diverged": diverged}

    def report(self, runs: Runs, folder: Path) -> str:
        def cell(arm: str) -> str:
            steps = [STEPS.of(run) for run in runs.get(arm, ())]
            learned = sum(value <= CAP for value in steps)
            median = format_steps(statistics.median(steps), CAP) if steps else ""
            return f"{median} ({learned} of {len(steps)} learned)" if steps else "-"

        sections = []
        for task in TASKS:
            rows = [[str(count), *(cell(arm_of(task, count, rate)) for rate in RATES)] for count in COUNTS]
            head = ["global heads, median steps", *(f"rate {rate:g}" for rate in RATES)]
            complete = [tuned(task, n) for n in COUNTS if all(arm_of(task, n, rate) in runs for rate in RATES)]
            best = {arm: runs[arm] for arm in (side.choose(STEPS, runs) for side in complete)}
            curves = of_runs(best, lambda run: run["far_accuracy"])
            accuracy = f"accuracy of far answers ({task}, best rates)"
            shown = plot_curves(folder / f"{task}.png", curves, "optimizer step", accuracy)
            sections.append(f"### {task.capitalize()}\n\n{table(rows, head)}\n\n{shown}")
        return "\n\n".join(sections)
