"""Long runs on books: is the explosion of the logits a matter of positions, and does it appear at the paper's size?"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lsgpt.configuration import load_arms
from lsgpt.inspection import FIGURES
from lsgpt.utilities import table

from .comparisons import DOUBLINGS, LOGIT, LOSS, NEGLIGIBLE, Bounds, Comparison, Limit, Metric, decide, format_values
from .measurements import (
    load,
    losses_by_context,
    over_heads,
    parts_of_logits,
    statistics_of,
    uniform_figures,
    validation_loss,
)
from .plots import plot
from .study import Runs, Scale, TrainingStudy, number, points, results_table, validation_blocks


GAIN = 0.05
"""What a model must gain from context beyond 64 tokens, in nats, or nothing is said about heads that look there."""

NEAR = 64

PAIRED_SPREAD = 0.03
EARLIER = "as in the long and the short runs with learned positions and RoPE that were made before"


def _improvement(first: int, last: int) -> Metric:
    return Metric(
        f"the fall of the validation loss from step {first:,} to step {last:,}",
        lambda run: number(run["validation"][str(first)]) - number(run["validation"][str(last)]),
        3,
    )


def _gain(longest: int) -> Metric:
    return Metric(
        f"the gain from context beyond {NEAR} tokens, the loss with {NEAR} less that with {longest:,},",
        lambda run: number(run["by_context"][str(NEAR)]) - number(run["by_context"][str(longest)]),
        3,
    )


def _largest_part(words: str, key: str) -> Metric:
    return Metric(words, lambda run: max(max(row) for row in run["parts"][key]), 1)


POSITION_PART = _largest_part("the largest |mean over texts| of a logit, which is due to positions,", "max_position")
CONTENT_PART = _largest_part(
    "the largest deviation of a logit from that mean, which is due to content,", "max_content"
)
DIVERGED = Metric("the number of divergences", lambda run: float(run["diverged"]), 0)


def _looks(words: str, name: str, local: bool) -> Metric:
    return Metric(words, lambda run: over_heads(run["looks"], name, local), 3)


FAR_MASS = _looks(
    "the share of global heads' attention on far tokens, without the first,", "far_mass_without_first", False
)
FAR_ENTROPY = _looks("the normalized entropy of global heads' attention among far tokens", "far_entropy", False)


def use_of_context(arm: str, longest: int) -> Comparison:
    """The condition for all that is said about global heads in text."""
    return Comparison(
        "multi-head attention makes use of context beyond 64 tokens",
        "a condition for all that is said about global heads",
        Metric("", "", 3),
        GAIN,
        arm,
        second_metric=_gain(longest),
    )


def lower_loss(claim: str, source: str, first: str, second: str) -> Comparison:
    """A claim about the losses at the end."""
    return Comparison(claim, source, LOSS, first, second, margin=NEGLIGIBLE, spread=PAIRED_SPREAD, spread_from=EARLIER)


def gap_closes(source: str, first: str, second: str) -> Comparison:
    """A claim about the gap between the losses over the steps."""
    return Comparison(
        "from step 5,000 to step 20,000, the gap between the losses closes",
        source,
        _improvement(5000, 20_000),
        first,
        second,
        spread=0.015,
        spread_from="as in the training losses of the long runs with learned positions",
    )


class LongRuns(TrainingStudy):
    """Long training runs, on whose checkpoints the measurements are made."""

    steps: tuple[int, ...] = (2500, 5000, 10_000, 20_000)
    """The checkpoints whose validation loss is measured."""
    contexts: tuple[int, ...] = (16, 64, 256, 512)
    num_blocks = 16
    """Number of validation blocks for the measurements of attention."""
    num_targets = 32_768

    def measure(self, folder: Path) -> dict:
        """Loss over steps and over context, parts of the logits and figures of the heads, all on validation text."""
        length = max(self.contexts)
        blocks = validation_blocks(folder, None, length)
        losses = {}
        for step in self.steps:
            if (checkpoint := folder / f"checkpoint-{step}").exists():  # a run that diverged has fewer
                losses[str(step)] = validation_loss(load(checkpoint), blocks)
        model = load(folder)
        some = blocks[:: max(1, len(blocks) // self.num_blocks)][: self.num_blocks]
        return {
            "validation": losses | {str(step): math.inf for step in self.steps if str(step) not in losses},
            "validation_tokens": blocks.numel(),
            "by_context": losses_by_context(model, blocks, self.contexts, self.num_targets),
            "parts": parts_of_logits(model, some),
            "looks": statistics_of(model, some[: self.num_blocks // 2], model.config.sliding_window),
        }

    def report(self, runs: Runs, folder: Path) -> str:
        """Final figures, loss and its gap over the steps, logits, contexts, and where heads look."""
        by_context = {
            arm: [[(int(context), number(loss)) for context, loss in run["by_context"].items()] for run in of_arm]
            for arm, of_arm in runs.items()
        }
        plot(folder / "context.png", by_context, "tokens of context", "validation loss (nats per token)", log_x=True)
        by_position = {arm: [points(run["loss_by_position"]) for run in of_arm] for arm, of_arm in runs.items()}
        plot(folder / "position.png", by_position, "tokens of context in a block", "validation loss", log_x=True)
        sections = [
            over_steps(runs, folder),
            f"### Loss over steps\n\n{self._loss_over_steps(runs)}\n\n{self._gaps(runs)}",
            f"### Loss with the context cut\n\n{self._by_context(runs)}\n\n![Loss over context](context.png)\n\n"
            "![Loss by position in a block](position.png)",
            f"### Parts of the logits\n\n{_parts_table(runs)}",
            f"### Where heads look\n\n{self._looks_table(runs)}",
        ]
        return "\n\n".join(sections)

    def _loss_over_steps(self, runs: Runs) -> str:
        rows = [
            [
                f"`{arm}`",
                *(format_values([number(run["validation"][str(step)]) for run in of_arm]) for step in self.steps),
            ]
            for arm, of_arm in runs.items()
        ]
        return table(rows, ["arm, validation loss", *(f"step {step:,}" for step in self.steps)])

    def _gaps(self, runs: Runs) -> str:
        """The gaps of the validation losses with their intervals, and what they would become if they went on."""
        *_, before, last = self.steps
        rows = []
        for arm, other in ((arm, arm.replace("mhsa", "ls")) for arm in runs if arm.startswith("mhsa")):
            losses = [{run["seed"]: run["validation"] for run in runs.get(name, ())} for name in (arm, other)]
            seeds = sorted(losses[0].keys() & losses[1].keys())
            by_step = {
                step: [number(losses[0][seed][str(step)]) - number(losses[1][seed][str(step)]) for seed in seeds]
                for step in self.steps
            }
            if seeds and all(math.isfinite(x) for gaps in by_step.values() for x in gaps):
                doublings = math.log2(last / before)
                ahead = [
                    [gap + (gap - earlier) * 2 / doublings for earlier, gap in zip(by_step[before], by_step[last])],
                    [
                        gap * (gap / earlier) ** (2 / doublings) if gap * earlier > 0 else gap
                        for earlier, gap in zip(by_step[before], by_step[last])
                    ],
                ]
                rows.append([f"`{arm}` - `{other}`", *map(_with_interval, [*by_step.values(), *ahead])])
        if not rows:
            return ""
        head = ["gap", *(f"step {step:,}" for step in self.steps), f"step {4 * last:,}, linear", "the same, geometric"]
        return (
            f"{table(rows, head)}\n\nWith 95% intervals (Student's t). The last two columns are no measurements: they "
            f"go on as from step {before:,} to step {last:,} for two more doublings, with the same difference for "
            "each doubling, or with the same ratio."
        )

    def _by_context(self, runs: Runs) -> str:
        rows = [
            [f"`{arm}`", *(format_values([run["by_context"][str(n)] for run in of_arm]) for n in self.contexts)]
            for arm, of_arm in runs.items()
        ]
        return table(rows, ["arm", *(f"{n:,} tokens" for n in self.contexts)])

    def _looks_table(self, runs: Runs) -> str:
        rows, length = [], max(self.contexts)
        for arm, of_arm in runs.items():
            for kind, local in (("global", False), ("local", True)):
                if any(is_local == local for row in of_arm[0]["looks"]["is_local"] for is_local in row):
                    values = [[over_heads(run["looks"], name, local) for run in of_arm] for name in FIGURES]
                    cells = [format_values([x for x in column if math.isfinite(x)]) for column in values]
                    rows.append([f"`{arm}`, {kind} heads", *cells])
        window = self.window
        for what, size in (("every earlier key", length), (f"the last {window} keys", window)):
            cells = [f"{x:.3f}" if math.isfinite(x) else "-" for x in uniform_figures(length, size, window).values()]
            rows.append([f"equal weights on {what}", *cells])
        words = "\n".join(f"- {title}: {text}" for title, text in FIGURES.values())
        return f"{table(rows, ['heads', *(title for title, _ in FIGURES.values())])}\n\n{words}"

    window = 12
    """The window of local heads, in tokens: keys outside it are far."""


def _with_interval(values: list[float]) -> str:
    finding = decide(values, [0.0] * len(values), False, None)
    interval = f" ({finding.low:.3f} to {finding.high:.3f})" if math.isfinite(finding.low) else ""
    return f"{finding.effect:.3f}{interval}"


def over_steps(runs: Runs, folder: Path) -> str:
    """Final figures, and plots of the training loss, of its gap and of the logits over the steps."""
    curves = {arm: [points(run["curves"]["loss"]) for run in of_arm] for arm, of_arm in runs.items()}
    logits = {}
    for arm, of_arm in runs.items():
        for kind in ("global", "local"):
            lines = [run["curves"][f"max_logit_{kind}"] for run in of_arm if f"max_logit_{kind}" in run["curves"]]
            if lines:
                logits[f"{arm}, {kind}"] = [points(line) for line in lines]
    gaps = {
        f"{arm} - {arm.replace('mhsa', 'ls')}": _gap(of_arm, runs[arm.replace("mhsa", "ls")])
        for arm, of_arm in runs.items()
        if arm.startswith("mhsa") and arm.replace("mhsa", "ls") in runs
    }
    step, loss = "optimizer step", "training loss (nats per token)"
    plot(folder / "loss.png", curves, step, loss)
    plot(folder / "gap.png", gaps, step, f"difference of the {loss}")
    plot(folder / "max_logit.png", logits, step, "largest |logit|", log_y=True)
    return (
        f"{results_table(runs)}\n\n![Training loss](loss.png)\n\n![Gap of the training losses](gap.png)\n\n"
        "![Largest attention logit over the training](max_logit.png)"
    )


def _gap(first: list[dict], second: list[dict]) -> list[list[tuple[float, float]]]:
    """The difference of two arms' curves of the training loss, for every seed that both have."""
    others = {run["seed"]: run for run in second}
    pairs = [(run, others[run["seed"]]) for run in first if run["seed"] in others]
    return [
        [(x, y - z) for (x, y), (_, z) in zip(points(a["curves"]["loss"]), points(b["curves"]["loss"]))]
        for a, b in pairs
    ]


def _parts_table(runs: Runs) -> str:
    rows = []
    for arm, of_arm in runs.items():
        columns = [
            [max(map(max, run["parts"][key])) for run in of_arm]
            for key in ("max_logit", "max_position", "max_content")
        ]
        shares = [
            sum(map(sum, run["parts"]["position_share"])) / sum(map(len, run["parts"]["position_share"]))
            for run in of_arm
        ]
        rows.append([f"`{arm}`", *(format_values(column, 1) for column in columns), format_values(shares)])
    head = [
        "arm",
        "largest |logit|",
        "of the mean over texts (positions)",
        "of the rest (content)",
        "share of the variance that is due to positions, mean over heads",
    ]
    return table(rows, head)


ROPE = {"position_embedding_type": "rope"}
QK_NORM = {"qk_norm": True}
SCHEDULE = {
    "max_steps": 20_000,
    "lr_scheduler_kwargs": {"min_lr_rate": 0.1, "num_training_steps": 240_000},
    "max_eval_blocks": None,
    "save_steps": 500,
    "save_total_limit": None,
    "max_logit_every_n_steps": 20,
}


class PositionsLong(LongRuns):
    """20,000 steps at `micro` with rotary positions, with and without QK-norm."""

    name = "positions-long"
    title = "Long training with rotary positions"
    question = """\
With learned positions, the logits of a small model with multi-head attention grow to several hundreds in 20,000 steps
(see long-training), and those of LS-attention stay below 50. Is that a matter of positions? And what is left of the
gap of the losses at the end?"""
    protocol = f"""\
As in long-training: the recipe `micro` (4 layers, hidden size 48, 6 heads, 512 tokens, 4 rows a step), a rate of
2.4e-3 after 800 steps of warm-up, the beginning of a cosine over 240,000 steps, 20,000 steps. The arms have rotary
positions, `-qknorm` also QK-norm; `mhsa` has global heads only, `ls` one in each layer, `local-only` none. Runs with
the same seed see the same text in the same order. Losses are those of all validation text (about a million tokens of
seven books), in training every 20th step's largest logit is measured. On checkpoints: the validation loss at steps
2,500 to 20,000; the loss of 32,768 tokens all over the validation text with the context cut to 16, 64, 256 and 512
tokens; the part of the logits that is due to positions (their mean over 16 texts) and the rest; and where heads look
(8 texts), compared with equal weights. The runs with learned positions are those of long-training (two seeds).
Nothing is said about global heads in text unless multi-head attention gains {GAIN:g} nats or more from context beyond
{NEAR} tokens."""
    gate = use_of_context("mhsa-rope", 512)
    comparisons = {
        "use-of-context": gate,
        "explosion": Bounds(
            "with rotary positions, too, the logits of multi-head attention explode, and those of LS-attention do not",
            "paper, with learned positions: above 200 and below 50",
            (Limit("mhsa-rope", LOGIT, above=200), Limit("ls-rope", LOGIT, below=50)),
        ),
        "explosion-qknorm": Bounds(
            "the same with QK-norm",
            "reviewers",
            (Limit("mhsa-rope-qknorm", LOGIT, above=200), Limit("ls-rope-qknorm", LOGIT, below=50)),
        ),
        "smaller-logits": Comparison(
            "with rotary positions, LS-attention has the smaller logits in a long training",
            "paper",
            DOUBLINGS,
            "ls-rope",
            "mhsa-rope",
            spread=0.3,
            spread_from="as in the short runs with rotary positions",
        ),
        "lower-loss": lower_loss(
            "with rotary positions, LS-attention has the lower loss after a long training",
            "paper",
            "ls-rope",
            "mhsa-rope",
        ),
        "lower-loss-qknorm": lower_loss(
            "with rotary positions and QK-norm, LS-attention has the lower loss after a long training",
            "reviewers",
            "ls-rope-qknorm",
            "mhsa-rope-qknorm",
        ),
        "gap-closes": gap_closes("ours: with learned positions, it was falling", "ls-rope", "mhsa-rope"),
        "global-head": Comparison(
            "with a global head in each layer, the loss is lower than without any",
            "paper: 15 to 20% of perplexity",
            LOSS,
            "ls-rope",
            "local-only-rope",
            margin=NEGLIGIBLE,
            spread=0.02,
            spread_from="as in the short runs",
            gate=gate,
        ),
        "from-positions": Comparison(
            "with rotary positions, the largest logits of multi-head attention are due to content, not to positions",
            "ours",
            POSITION_PART,
            "mhsa-rope",
            "mhsa-rope",
            second_metric=CONTENT_PART,
        ),
        "near": Bounds(
            "the heads of multi-head attention have most of their attention on near tokens and the first",
            "paper",
            (Limit("mhsa-rope", FAR_MASS, below=0.5),),
            gate=gate,
        ),
        "sparse": Bounds(
            "their attention to the far past is sparse",
            "paper",
            (Limit("mhsa-rope", FAR_ENTROPY, below=0.5),),
            gate=gate,
        ),
    }
    scales = {"micro": Scale("micro", {"learning_rate": 2.4e-3, "warmup_steps": 800, **SCHEDULE}, 3, 9.0)}

    def arms(self, scale: str) -> Mapping[str, Any]:
        """`mhsa` and `ls` with and without QK-norm, and `local-only`."""
        shipped, names = load_arms(), ("mhsa-rope", "ls-rope", "local-only-rope")
        arms = {name: shipped[name] for name in names}
        for name in names[:2]:
            arms[f"{name}-qknorm"] = {"config_overrides": {**shipped[name]["config_overrides"], **QK_NORM}}
        return arms


class PaperSize(LongRuns):
    """The paper's first experiment at its own size, with less text in a step."""

    name = "paper-size"
    title = "The paper's first experiment at its own size"
    question = """\
The paper trains 6 layers of 6 heads of 32 dimensions on sequences of 2,048 tokens. It reports logits above 400 with
multi-head attention, which diverges after 20,000 to 30,000 steps, logits below 50 with LS-attention, and 15 to 20%
more perplexity without global heads. Does the same model show it on a CPU core?"""
    protocol = f"""\
The paper's model (hidden size 192, window 50, learned positions, its initialization), optimizer and schedule (a rate
of 6e-4 after 2,000 steps of warm-up, the beginning of a cosine over 600,000 steps), 20,000 steps. Three things
differ. A step has one row of 2,048 tokens and not 256: 41 million tokens in all, about once through the books, and
gradients whose noise is 16 times as large. The vocabulary has 1,024 tokens and not 10,000. Everything is in float32,
without FlashAttention. So the runs can show whether the logits grow in as many steps, but not what the paper's number
of tokens does. `mhsa` and `ls` have two seeds, `local-only` one, whose figures stand in the tables without a verdict.
Every 20th step's largest logit is measured by layer and kind of head. Losses are those of all validation text (about
a million tokens). On checkpoints: the validation loss at steps 2,500 to 20,000; the loss of 16,384 tokens with the
context cut to 16, 64, 256, 512 and 2,048 tokens; the parts of the logits (8 texts); and where heads look (4 texts).
Nothing is said about global heads in text unless multi-head attention gains {GAIN:g} nats or more from context beyond
{NEAR} tokens."""
    gate = use_of_context("mhsa", 2048)
    comparisons = {
        "use-of-context": gate,
        "explosion": Bounds(
            "the logits of multi-head attention explode, and those of LS-attention do not",
            "paper: above 400 and below 50",
            (Limit("mhsa", LOGIT, above=400), Limit("ls", LOGIT, below=50)),
        ),
        "divergence": Bounds(
            "multi-head attention diverges within 20,000 steps, and LS-attention does not",
            "paper: after 20,000 to 30,000 steps",
            (Limit("mhsa", DIVERGED, above=0.5), Limit("ls", DIVERGED, below=0.5)),
        ),
        "lower-loss": lower_loss("LS-attention has the lower loss after 20,000 steps", "paper", "ls", "mhsa"),
        "gap-closes": gap_closes("ours: at a smaller size, it was falling", "ls", "mhsa"),
        "global-head": Comparison(
            "with a global head in each layer, the loss is lower than without any",
            "paper: 15 to 20% of perplexity, 0.14 to 0.18 nats",
            LOSS,
            "ls",
            "local-only",
            margin=NEGLIGIBLE,
            gate=gate,
        ),
        "from-positions": Comparison(
            "the largest logits of multi-head attention are due to positions and not to content",
            "ours",
            CONTENT_PART,
            "mhsa",
            "mhsa",
            second_metric=POSITION_PART,
        ),
        "sparse": Bounds(
            "the attention of multi-head attention to the far past is sparse",
            "paper",
            (Limit("mhsa", FAR_ENTROPY, below=0.5),),
            gate=gate,
        ),
    }
    scales = {
        "micro": Scale(
            "paper-v1",
            {
                **SCHEDULE,
                "lr_scheduler_kwargs": {"min_lr": 6.0e-5, "num_training_steps": 600_000},
                "config_overrides": {"vocab_size": 1024},
                "tokenizer": "bpe",
                "per_device_train_batch_size": 1,
                "gradient_accumulation_steps": 1,
                "per_device_eval_batch_size": 1,
                "eval_strategy": "no",
                "bf16": False,
                "torch_compile": False,
                "save_steps": 250,
                "dataloader_pin_memory": False,
                "disable_tqdm": True,
            },
            2,
            20.0,
        )
    }
    contexts = (16, 64, 256, 512, 2048)
    num_blocks, num_targets, window = 8, 16_384, 50

    def arms(self, scale: str) -> Mapping[str, Any]:
        """`mhsa`, `ls` and `local-only`."""
        shipped = load_arms()
        return {name: shipped[name] for name in ("mhsa", "ls", "local-only")}

    def num_seeds(self, arm: str, scale: str) -> int:
        """One for `local-only`."""
        return 1 if arm == "local-only" else super().num_seeds(arm, scale)


def _growth(run: dict) -> float:
    """The largest logit of the last tenth of the steps over that of the second tenth, in doublings."""
    curve = run["curves"]["max_logit"]
    tenth = max(1, len(curve) // 10)
    early, late = (max(number(value) for _, value in part) for part in (curve[tenth : 2 * tenth], curve[-tenth:]))
    return math.log2(late / early)


def _training_loss(run: dict, step: int) -> float:
    """The training loss around a step: the point of the curve that is nearest to it."""
    return number(min(run["curves"]["loss"], key=lambda point: abs(point[0] - step))[1])


class LongTraining(TrainingStudy):
    """20,000 steps with learned positions and the paper's schedule."""

    name = "long-training"
    title = "Long training"
    question = """\
The paper reports that the attention logits of multi-head attention grow to several hundreds, and that
its training diverges after 20,000 to 30,000 steps, while LS-attention stays below 50. Does a small model that
is trained for as many steps show it?"""
    protocol = """\
The schedule is the paper's: a warm-up, then a cosine of which only the beginning is used, so that
the learning rate hardly falls. The paper's rate of 6e-4 is multiplied by the ratio of the hidden sizes (192 / 48),
because smaller models are trained at higher rates. Positions are learned. Growth is the largest logit in the last
tenth of the steps over the largest in the second tenth. The validation text is the first 51,200 tokens of one book.
`mhsa` with seed 42 was interrupted once, and resumed from step 12,000. The logits of `mhsa` rise just when its loss
leaves a plateau; nothing diverges, and the spike scores are equal."""
    changes = """\
Until all runs had been made, criteria were two standard errors of the difference of means, by which the last of these
losses was decided; they were replaced by paired intervals. That the gap closes was looked at after the runs."""
    comparisons = {
        "no-explosion": Bounds(
            "in a long training with learned positions, the logits of multi-head attention explode, and those of "
            "LS-attention do not",
            "paper: above 200 and below 50",
            (Limit("mhsa", LOGIT, above=200), Limit("ls", LOGIT, below=50)),
        ),
        "no-growth": Comparison(
            "the logits of LS-attention grow less than those of multi-head attention",
            "paper",
            Metric("the growth of the largest logit, in doublings,", _growth, 2),
            "ls",
            "mhsa",
        ),
        "divergence": Bounds(
            "multi-head attention diverges in a long training, and LS-attention does not",
            "paper: after 20,000 to 30,000 steps",
            (Limit("mhsa", DIVERGED, above=0.5), Limit("ls", DIVERGED, below=0.5)),
        ),
        "lower-loss": Comparison(
            "after a long training LS-attention has the lower loss", "paper", LOSS, "ls", "mhsa", margin=NEGLIGIBLE
        ),
        "gap-closes": Comparison(
            "from step 5,000 to step 20,000, the gap between the training losses closes",
            "ours, after the runs",
            Metric(
                "the fall of the training loss from step 5,000 to step 20,000",
                lambda run: _training_loss(run, 5000) - _training_loss(run, 20_000),
            ),
            "ls",
            "mhsa",
        ),
    }
    scales = {
        "micro": Scale(
            "micro", {"learning_rate": 2.4e-3, "warmup_steps": 800, **SCHEDULE, "max_eval_blocks": 100}, 2, 2.2
        )
    }

    def arms(self, scale: str) -> Mapping[str, Any]:
        """`mhsa` and `ls`."""
        shipped = load_arms()
        return {name: shipped[name] for name in ("mhsa", "ls")}

    def report(self, runs: Runs, folder: Path) -> str:
        """Final figures, loss, its gap and logits over the steps."""
        return over_steps(runs, folder)


POSITIONS_LONG, PAPER_SIZE, LONG_TRAINING = PositionsLong(), PaperSize(), LongTraining()
