"""How many steps does it take to learn recall and copying, with few and with many global heads?"""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from lsgpt.configuration import load_preset
from lsgpt.utilities import table

from .comparisons import Best, Bounds, Limit, Metric, Sooner, format_steps
from .long_range import MODEL, answer, evaluation_rows, row_maker
from .plots import plot
from .streams import train_on_stream
from .study import Runs, Scale, Study


TASK_NAMES = ("recall", "copy")
COUNTS = (0, 1, 2, 3, 6)
RATES = (1e-3, 2e-3, 4e-3)
CAP = 6000
GOAL = 0.95
EVERY = 50

STEPS = Metric("the number of steps", lambda run: math.inf if run["steps"] is None else run["steps"], 0)


def arm_of(task: str, count: int, rate: float) -> str:
    """The name of an arm."""
    return f"{task}-{count}-lr{rate:g}"


def tuned(task: str, count: int) -> "BestMedian":
    """A number of global heads at the rate with the smallest median of the steps."""
    return BestMedian(f"{task}-{count}", tuple(arm_of(task, count, rate) for rate in RATES), STEPS)


class BestMedian(Best):
    """The arm with the smallest median; where the medians are equal, that with the smallest mean up to the cap."""

    __slots__ = ()

    def choose(self, runs: Mapping[str, Sequence[dict]]) -> str:
        """The name of the best arm."""
        steps = {arm: [min(self.metric.of(run), 2 * CAP) for run in runs[arm]] for arm in self.arms}
        return min(steps, key=lambda arm: (statistics.median(steps[arm]), statistics.fmean(steps[arm])))


class StopAtGoal(TrainerCallback):
    """Measures the accuracy of far answers every few steps, and ends the training at the goal."""

    def __init__(self, rows: Sequence, far: int):
        self.rows, self.far = rows, far
        self.steps: int | None = None
        self.curve: list[tuple[int, float]] = []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step % EVERY:
            return
        was_training = model.training
        is_right, distances = answer(model.eval(), self.rows)
        model.train(was_training)
        self.curve.append((state.global_step, round(float(is_right[distances > self.far].mean()), 4)))
        if self.curve[-1][1] >= GOAL:
            self.steps = state.global_step
            control.should_training_stop = True


def _sooner(task: str, first: int, second: int, claim: str, source: str) -> Sooner:
    return Sooner(f"{claim} ({task})", source, STEPS, tuned(task, first), tuned(task, second), CAP)


class TimeToLearn(Study):
    """The steps that models with none to all of the heads global need, at the same rates."""

    name = "time-to-learn"
    title = "Time to learn recall and copying"
    question = """\
In the study long-range, models with one global head in each layer learn to recall and to copy, and models with all
heads global do not, in 1,500 steps whose number was chosen on one of its seeds. Is that a matter of time, and of the
rate? How many steps does it take with 0, 1, 2, 3 and 6 of 6 heads global?"""
    protocol = f"""\
The tasks `recall` and `copy`, the models and the batches are those of long-range at `micro`: 2 layers of 6 heads of
width 16, rotary positions, rows of 128 tokens of 34 symbols, W = 8, 16 rows in a batch. Every number of global heads
is trained at the rates {", ".join(f"{rate:g}" for rate in RATES)}, constant after 100 steps of warm-up, with 5 seeds
that long-range did not have (47 to 51). Every {EVERY} steps, the accuracy is measured on
the far answers of 128 rows that are never trained on: answers that local heads cannot reach, not even one layer after
the other. A run ends when it is {GOAL:.0%} or more, and is censored after {CAP:,} steps. A number of heads is judged
at the rate with the smallest median; the table has all of them. Arms are named after the task, the number of global
heads and the rate."""
    comparisons = {
        **{
            f"no-head-{task}": Bounds(
                f"without a global head, the far past is never learnt ({task})",
                "a check of the test itself",
                tuple(Limit(arm_of(task, 0, rate), STEPS, above=CAP) for rate in RATES),
            )
            for task in TASK_NAMES
        },
        **{
            f"one-all-{task}": _sooner(
                task, 1, 6, "with one global head, a task is learnt sooner than with all heads global", "long-range"
            )
            for task in TASK_NAMES
        },
        **{
            f"half-all-{task}": _sooner(
                task, 3, 6, "with half of the heads global, a task is learnt sooner than with all", "ours"
            )
            for task in TASK_NAMES
        },
        **{
            f"two-one-{task}": _sooner(
                task, 2, 1, "with a second global head, a task is learnt sooner", "reviewers: how many must be global?"
            )
            for task in TASK_NAMES
        },
    }
    first_seed = 47
    scales = {
        "micro": Scale(
            None,
            {
                **MODEL,
                "eval_rows": 128,
                "options": {
                    "max_steps": CAP,
                    "per_device_train_batch_size": 16,
                    "warmup_steps": 100,
                    "lr_scheduler_type": "constant_with_warmup",
                    "lr_scheduler_kwargs": {},
                },
            },
            5,
            9.0,
        )
    }

    def arms(self, scale: str) -> Mapping[str, Any]:
        """The task, the number of global heads and the rate; the slowest arms come last."""
        return {
            arm_of(task, count, rate): (task, count, rate)
            for count in (1, 2, 3, 6, 0)
            for task in TASK_NAMES
            for rate in RATES
        }

    def run(self, arm: str, seed: int, scale: str, folder: Path, fields: Sequence[str]) -> dict:
        """Trains a model until it reaches the goal."""
        settings = self.scales[scale].fields
        task, count, rate = self.arms(scale)[arm]
        config = load_preset(settings["preset"], **settings["config"], num_global_heads=count)
        rows = evaluation_rows(task, config, settings["eval_rows"])
        goal = StopAtGoal(rows, 1 + config.num_hidden_layers * (config.sliding_window - 1))
        options = settings["options"] | {"learning_rate": rate}
        run_folder = folder / arm / f"seed-{seed}"
        _, values = train_on_stream(config, row_maker(task, config), seed, run_folder, options, [goal])
        return {"steps": goal.steps, "far_accuracy": goal.curve, "max_logit": values["max_logit"]} | {
            "diverged": values["diverged"]
        }

    def report(self, runs: Runs, folder: Path) -> str:
        """The median number of steps at every rate, and plots of the accuracy over the steps."""
        sections = []
        for task in TASK_NAMES:
            rows = []
            for count in COUNTS:
                cells = []
                for rate in RATES:
                    steps = [STEPS.of(run) for run in runs.get(arm_of(task, count, rate), [])]
                    learnt = sum(value <= CAP for value in steps)
                    cells.append(
                        f"{format_steps(statistics.median(steps), CAP)} ({learnt} of {len(steps)} learnt)"
                        if steps
                        else "-"
                    )
                rows.append([str(count), *cells])
            head = ["global heads, median steps", *(f"rate {rate:g}" for rate in RATES)]
            curves = {}
            for count in COUNTS:
                present = [arm_of(task, count, rate) for rate in RATES if arm_of(task, count, rate) in runs]
                if len(present) == len(RATES):
                    best = tuned(task, count).choose(runs)
                    curves[best] = [[(x, y) for x, y in run["far_accuracy"]] for run in runs[best]]
            picture = ""
            if curves:
                plot(folder / f"{task}.png", curves, "optimizer step", "accuracy of far answers")
                picture = f"\n\n![Accuracy of {task} at the best rates](#)".replace("#", f"{task}.png")
            sections.append(f"### {task.capitalize()}\n\n{table(rows, head)}{picture}")
        return "\n\n".join(sections)


STUDY = TimeToLearn()
