"""What does it cost to have few global heads where the far past matters?"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from lsgpt import LSGPTConfig
from lsgpt.configuration import load_preset
from lsgpt.utilities import table
from lsgpt.utilities.plots import average_in_bins

from .comparisons import Best, Comparison, Metric, format_values
from .plots import plot
from .streams import train_on_stream
from .study import SEED_OF_EVALUATION, Runs, Scale, Study, points


MARK, ASK = 0, 1
"""The two tokens that are not symbols."""

MIN_SIZE = 4
"""Length of the shortest string to copy, and smallest number of keys in a row of `recall`."""

CLOSE = 0.05
"""The largest difference in accuracy that counts as none."""

TASK_NAMES = ("recall", "copy", "needle")

MODEL = {
    "preset": "demo",
    "config": {
        "vocab_size": 34,
        "hidden_size": 96,
        "max_position_embeddings": 128,
        "sliding_window": 8,
        "initializer_range": 0.1,
        "tie_word_embeddings": False,
    },
}
"""The models and rows of this study and of time-to-learn."""

FAR = Metric("the accuracy of far answers", "far_accuracy")


def all_global(task: str) -> Best:
    """All heads global, at the best of three rates."""
    return Best(f"{task}-6", (f"{task}-6", f"{task}-6-lr0.001", f"{task}-6-lr0.004"), FAR, sign=-1)


class Row(NamedTuple):
    """A sequence of a task."""

    input_ids: np.ndarray
    """`(n,)`."""
    labels: np.ndarray
    """`(n,)`: answers, and -100 elsewhere. As usual in causal models, answers are predicted from the token before."""
    distances: np.ndarray
    """`(n,)`: for each answer, the number of tokens since the place where it was last given, and 0 elsewhere."""


class LongRange(Study):
    """Recall, copying and finding a needle at all distances, with none to all of the heads global."""

    name = "long-range"
    title = "Long range"
    question = """\
LS-attention keeps one head or a few for the far past, because long-range dependencies are sparse. Language modelling
rewards little else than the near past. What does the split cost in tasks that are all about the far past?"""
    protocol = """\
Three tasks, each row of which is new. `recall` (multi-query associative recall, arXiv:2312.04927): a row consists of
pairs of a random key and the value that this row has drawn for it; the answer is the value of any key that has come
before. `copy`: a string of different symbols, of random length, comes again and again; the answer is each of its
symbols but for the first time. `needle`: a single marked value in a row of values, for which questions ask from all
over the rest of the row, without telling the answer. Only answers count, in the loss and in the accuracy: the share
of answers, in 512 new rows, to which the model gives the highest probability. An answer is far when it was last given
so long before that local heads cannot reach it, not even one layer after the other: more than (W - 1) x layers tokens
before the question. At `micro`: 2 layers of 6 heads of width 16, rotary positions, rows of 128 tokens of 34 symbols,
W = 8, 16 rows in a batch, 1,500 steps at a rate of 2e-3. Arms are named after the task and the number of global
heads. The sizes were chosen by trials with the first of the seeds, in which one global head learnt what all heads
global did not. That suggested the comparison with all heads global, which was therefore not written down before all
runs. For the same reason, models with all heads global are also trained at half and at twice the rate (`-lr...`):
claims are about the best of the three rates. Their loss of `recall` is flat to the end: they have not begun to learn
it in 1,500 steps, at any distance, which says nothing about what they can learn (see time-to-learn)."""
    changes = """\
The criteria about one global head were changed after 19 runs had been committed. Until all runs had been made,
criteria were two standard errors of the difference of means; they were replaced by paired intervals, and claims over
several tasks by one for each task."""
    comparisons = {
        **{
            f"one-head-{task}": Comparison(
                f"in 1,500 steps, one global head learns {task} better than all heads global do",
                "paper: the far past is sparse, and needs few heads",
                FAR,
                all_global(task),
                f"{task}-1",
                margin=CLOSE,
            )
            for task in TASK_NAMES
        },
        **{
            f"no-head-{task}": Comparison(
                f"without a global head, the far past of {task} is lost",
                "a check of the test itself",
                FAR,
                f"{task}-0",
                f"{task}-1",
                margin=CLOSE,
            )
            for task in TASK_NAMES
        },
        **{
            f"second-head-{task}": Comparison(
                f"a second global head helps to learn {task}",
                "reviewers: which share of heads must be global?",
                FAR,
                f"{task}-1",
                f"{task}-2",
                margin=CLOSE,
            )
            for task in TASK_NAMES
        },
    }
    scales = {
        "micro": Scale(
            None,
            {
                **MODEL,
                "global_heads": (0, 1, 2, 6),
                "eval_rows": 512,
                "options": {
                    "max_steps": 1500,
                    "per_device_train_batch_size": 16,
                    "learning_rate": 2e-3,
                    "warmup_steps": 100,
                },
            },
            3,
            0.8,
        ),
    }

    def arms(self, scale: str) -> Mapping[str, Any]:
        """The task, the number of global heads, and the learning rate of each arm."""
        settings = self.scales[scale].fields
        rate, counts = settings["options"]["learning_rate"], settings["global_heads"]
        arms = {f"{task}-{count}": (task, count, rate) for task in TASKS for count in counts}
        for task in TASKS:
            for other in (rate / 2, rate * 2):
                arms[f"{task}-{max(counts)}-lr{other:g}"] = (task, max(counts), other)
        return arms

    def run(self, arm: str, seed: int, scale: str, folder: Path, fields: Sequence[str]) -> dict:
        """Trains a model on the arm's task, and measures its accuracy by distance."""
        settings = self.scales[scale].fields
        task, num_global_heads, learning_rate = self.arms(scale)[arm]
        config = load_preset(settings["preset"], **settings["config"], num_global_heads=num_global_heads)
        options = settings["options"] | {"learning_rate": learning_rate}
        rows = evaluation_rows(task, config, settings["eval_rows"])
        model, values = train_on_stream(config, row_maker(task, config), seed, folder / arm / f"seed-{seed}", options)
        is_right, distances = answer(model, rows)
        is_far = distances - 1 > config.num_hidden_layers * (config.sliding_window - 1)
        by_distance = [is_right[distances == distance] for distance in range(1, config.max_position_embeddings)]
        return {
            "accuracy": _share(is_right),
            "far_accuracy": _share(is_right[is_far]),
            "near_accuracy": _share(is_right[~is_far]),
            "by_distance": average_in_bins([_share(x) for x in by_distance]),
            **values,
        }

    def report(self, runs: Runs, folder: Path) -> str:
        """The accuracy of each arm, and for each task plots of accuracy over distance and of the training loss."""
        rows = [
            [
                f"`{arm}`",
                *(
                    format_values([run[key] for run in of_arm])
                    for key in ("far_accuracy", "near_accuracy", "accuracy")
                ),
                format_values([run["max_logit"] for run in of_arm], 1),
                f"{sum(run['diverged'] for run in of_arm)} of {len(of_arm)}",
            ]
            for arm, of_arm in runs.items()
        ]
        head = ["arm", "accuracy, far answers", "near answers", "all answers", "largest logit on the way", "diverged"]
        sections = [table(rows, head)]
        for task in TASKS:
            arms = {arm: of_arm for arm, of_arm in runs.items() if arm.startswith(f"{task}-")}
            if not arms:
                continue
            curves = {arm: [points(run["by_distance"]) for run in of_arm] for arm, of_arm in arms.items()}
            plot(folder / f"{task}.png", curves, "tokens since the answer was given", "accuracy", log_x=True)
            losses = {arm: [points(run["curves"]["loss"]) for run in of_arm] for arm, of_arm in arms.items()}
            plot(folder / f"{task}_loss.png", losses, "optimizer step", "training loss (nats per answer)")
            sections.append(
                f"### {task.capitalize()}\n\n![Accuracy of {task} over the distance]({task}.png)\n\n"
                f"![Training loss of {task}]({task}_loss.png)"
            )
        return "\n\n".join(sections)


STUDY = LongRange()


def _share(is_right: np.ndarray) -> float:
    return float(is_right.mean()) if len(is_right) else float("nan")


def split_symbols(vocab_size: int) -> np.ndarray:
    """The token ids of keys and values `(2, N)`, each a half of those that are neither `MARK` nor `ASK`."""
    return 2 + np.arange((vocab_size - 2) // 2 * 2).reshape(2, -1)


def make_recall(generator: np.random.Generator, length: int, vocab_size: int) -> Row:
    """Pairs of a key and the value that belongs to it in this row; the answers are values of keys that came before."""
    keys, values = split_symbols(vocab_size)
    size = generator.integers(MIN_SIZE, len(keys) + 1)
    ids = np.empty(length // 2 * 2, dtype=np.int64)
    which = generator.integers(size, size=length // 2)
    ids[::2], ids[1::2] = generator.permutation(keys)[which], generator.permutation(values)[which]
    last = np.full(size, -1)
    since = np.zeros(len(which), dtype=np.int64)
    for i, key in enumerate(which):
        since[i] = 2 * (i - last[key]) if last[key] >= 0 else 0
        last[key] = i
    asked = np.flatnonzero(since)
    return _row(ids, 2 * asked + 1, ids[2 * asked + 1], since[asked])


def make_copy(generator: np.random.Generator, length: int, vocab_size: int) -> Row:
    """A string of different symbols, of random length, again and again; all but the first time it is the answer."""
    size = generator.integers(MIN_SIZE, min(vocab_size - 2, length // 2) + 1)
    string = 2 + generator.permutation(vocab_size - 2)[:size]
    places = np.arange(size, length)
    ids = np.resize(string, length)
    return _row(ids, places, ids[places], np.full(len(places), size))


def make_needle(generator: np.random.Generator, length: int, vocab_size: int) -> Row:
    """A marked value among other values, then questions in an eighth of the row, to all of which it is the answer."""
    _, values = split_symbols(vocab_size)
    ids = generator.choice(values, length)
    places = 2 * np.sort(generator.permutation(length // 2)[: length // 8 + 1])
    needle, asked = places[0], places[1:]
    ids[needle], ids[asked] = MARK, ASK
    return _row(ids, asked + 1, ids[needle + 1], asked - needle)


def _row(ids: np.ndarray, places: np.ndarray, answers: np.ndarray, since: np.ndarray) -> Row:
    labels, distances = np.full(len(ids), -100), np.zeros(len(ids), dtype=np.int64)
    labels[places], distances[places] = answers, since
    return Row(ids, labels, distances)


TASKS = {"recall": make_recall, "copy": make_copy, "needle": make_needle}


def row_maker(task: str, config: LSGPTConfig) -> Callable[[np.random.Generator], dict[str, np.ndarray]]:
    """A function that makes rows of a task for `train_on_stream`."""

    def make_row(generator: np.random.Generator) -> dict[str, np.ndarray]:
        row = TASKS[task](generator, config.max_position_embeddings, config.vocab_size)
        return {"input_ids": row.input_ids, "labels": row.labels}

    return make_row


def evaluation_rows(task: str, config: LSGPTConfig, count: int) -> list[Row]:
    """The rows of a task on which all its models are measured."""
    generator = np.random.default_rng(SEED_OF_EVALUATION)
    return [TASKS[task](generator, config.max_position_embeddings, config.vocab_size) for _ in range(count)]


@torch.no_grad()
def answer(model: torch.nn.Module, rows: Sequence[Row], batch_size: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """For each answer, whether the model gives it the highest probability, and its distance."""
    is_right, distances = [], []
    for begin in range(0, len(rows), batch_size):
        ids, labels, since = (np.stack(x) for x in zip(*rows[begin : begin + batch_size]))
        logits = model(torch.as_tensor(ids, device=model.device)).logits
        predicted = logits.argmax(-1).cpu().numpy()
        is_answer = labels[:, 1:] >= 0
        is_right.append((predicted[:, :-1] == labels[:, 1:])[is_answer])
        distances.append(since[:, 1:][is_answer])
    return np.concatenate(is_right), np.concatenate(distances)
