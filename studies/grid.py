"""
Grids of short training runs on books, as data: learning rates, stabilizers, numbers of global heads, windows, split
layers, positions, lengths, and hidden keys.
"""

import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import Trainer

from lsgpt.configuration import load_arms
from lsgpt.training.data import collate_blocks
from lsgpt.training.metrics import token_losses

from .comparisons import DOUBLINGS, LOGIT, LOSS, NEGLIGIBLE, Across, Best, Comparison, Metric, less
from .measurements import load
from .plots import plot
from .study import Runs, Scale, TrainingStudy, blocks_of, number, results_table, validation_blocks


PAIRED = """\
Criteria were two standard errors of the difference of means until all runs had been made; they were then replaced by
paired intervals with the quantiles of Student's t, which decide less."""

LOSS_LABEL, LOGIT_LABEL = "final validation loss (nats per token)", "largest |logit| on the way"


class Series(NamedTuple):
    """A plot of a metric over a quantity in which arms differ."""

    file: str
    xlabel: str
    arms: Mapping[str, Mapping[Any, str]]
    """For each label, the arm of each x."""
    metric: Metric = LOSS
    log_x: bool = True
    log_y: bool = False


class Grid(TrainingStudy):
    """Runs of the recipe `micro` with every combination of some fields."""

    def __init__(
        self,
        name: str,
        title: str,
        question: str,
        protocol: str,
        arms: Mapping[str, Any],
        comparisons: Mapping[str, Comparison],
        hours: float,
        series: tuple[Series, ...] = (),
        changes: str = PAIRED,
        fields: Mapping[str, Any] | None = None,
        change: Callable[[Trainer, str], None] | None = None,
        measure: Callable[[Path], dict] | None = None,
    ):
        self.name, self.title, self.question, self.protocol = name, title, question, protocol
        self.comparisons, self.changes, self.series = comparisons, changes, series
        self.scales = {"micro": Scale("micro", {"max_steps": 600, **(fields or {})}, 3, hours)}
        self._arms, self._change, self._measure = arms, change, measure

    def arms(self, scale: str) -> Mapping[str, Any]:
        """Recipe fields of each arm."""
        return self._arms

    def change(self, trainer: Trainer, arm: str):
        """Makes the change of this grid, if it has one."""
        if self._change is not None:
            self._change(trainer, arm)

    def measure(self, folder: Path) -> dict:
        """Makes the measurements of this grid, if it has any."""
        return {} if self._measure is None else self._measure(folder)

    def report(self, runs: Runs, folder: Path) -> str:
        """A table of the final figures, and plots."""
        sections = [results_table(runs)]
        for series in self.series:
            curves = {label: over(runs, places, series.metric) for label, places in series.arms.items()}
            label = LOGIT_LABEL if series.metric == LOGIT else LOSS_LABEL
            plot(folder / series.file, curves, series.xlabel, label, log_x=series.log_x, log_y=series.log_y)
            sections.append(f"![{label} over {series.xlabel}]({series.file})")
        return "\n\n".join(sections)


def over(runs: Runs, places: Mapping[Any, str], metric: Metric) -> list[list[tuple[float, float]]]:
    """Curves of a metric over the x values of arms, one for each seed."""
    seeds = sorted({run["seed"] for arm in places.values() for run in runs.get(arm, ())})
    by_arm = {x: {run["seed"]: metric.of(run) for run in runs[arm]} for x, arm in places.items() if arm in runs}
    return [[(x, values[seed]) for x, values in by_arm.items() if seed in values] for seed in seeds]


def below(claim: str, source: str, first: Any, second: Any, metric: Metric = LOSS, **options) -> Comparison:
    """A claim that `first` has the lower loss than `second`, or is equal within the margin."""
    if metric == LOSS:
        options = {"margin": NEGLIGIBLE, **options}
    return Comparison(claim, source, metric, first, second, **options)


def heads(count: int | str | list[int], **fields) -> dict[str, Any]:
    """Recipe fields for a number of global heads, and other fields of the configuration."""
    return {"config_overrides": {"num_global_heads": count, **fields}}


SHIPPED = load_arms()


# Learning rates and stabilizers


def at_rate(name: str, rate: float) -> str:
    """The name of an arm at a learning rate."""
    return f"{name}-lr{rate:g}"


def at_best(name: str, rates: tuple[float, ...]) -> Best:
    """An arm at its best rate."""
    return Best(name, tuple(at_rate(name, rate) for rate in rates))


def over_rates(names: tuple[str, ...], rates: tuple[float, ...]) -> dict[str, Any]:
    """Every arm at every rate."""
    return {at_rate(name, rate): {**SHIPPED[name], "learning_rate": rate} for rate in rates for name in names}


def rate_plots(names: tuple[str, ...], rates: tuple[float, ...]) -> tuple[Series, ...]:
    """Plots of loss and logits over the rates."""
    arms = {name: {rate: at_rate(name, rate) for rate in rates} for name in names}
    return (
        Series("loss.png", "learning rate", arms),
        Series("max_logit.png", "learning rate", arms, LOGIT, log_y=True),
    )


RATES, FEW_RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1), (3e-3, 1e-2, 3e-2)
NAMES = ("mhsa", "ls", "ls-sinks", "local-only")
METHODS = ("qknorm", "softcap", "zloss", "qkclip", "adagc")
STABILIZED = ("mhsa", "ls", *(f"{kind}-{method}" for kind in ("mhsa", "ls") for method in METHODS))

CAPPED = Metric(
    "the sensitivity (mean over rates of the final loss, at most that before training, less the lowest)",
    lambda run: run["first_loss"] if run["diverged"] else min(number(run["eval_loss"]), run["first_loss"]),
)


def sensitivity(name: str) -> Across:
    """The sensitivity of an arm to the rate (arXiv:2309.14322)."""
    arms = tuple(at_rate(name, rate) for rate in RATES)
    return Across(f"`{name}`", arms, lambda losses: sum(losses) / len(losses) - min(losses))


LEARNING_RATES = Grid(
    "learning-rates",
    "Learning rates",
    """\
The paper trains at one learning rate. Instabilities of large models show in small ones, too, at higher
rates (arXiv:2309.14322). How do the final loss and the largest attention logit depend on the rate?""",
    """\
Every arm is trained at every rate: `mhsa` has global heads only (six in each layer), `ls` one global head and the
rest local, `ls-sinks` the same with a learned sink for each local head, `local-only` no global head. A run has
diverged when its loss became not finite or ended above where it began. The spike score is the share of steps whose
loss is more than six standard deviations above the mean of the 128 steps before. After 600 steps, the global heads of
these models have hardly learnt to look anywhere: their attention is as far away as that of equal weights. At the rate
0.01, `mhsa` with learned positions is bimodal over seeds, which the mean hides.""",
    over_rates(NAMES, RATES),
    {
        "lower-loss": below(
            "LS-attention reaches a lower loss than multi-head attention in 600 steps",
            "paper",
            at_best("ls", RATES),
            at_best("mhsa", RATES),
        ),
        "smaller-logits": below(
            "LS-attention keeps the attention logits small where those of multi-head attention explode",
            "paper",
            at_rate("ls", 3e-2),
            at_rate("mhsa", 3e-2),
            DOUBLINGS,
        ),
        "less-sensitive": below(
            "LS-attention is less sensitive to the learning rate",
            "paper: it trains where multi-head attention diverges",
            sensitivity("ls"),
            sensitivity("mhsa"),
            CAPPED,
        ),
        "global-head": below(
            "without a global head the loss is higher",
            "paper: 15 to 20% of perplexity",
            at_best("ls", RATES),
            at_best("local-only", RATES),
        ),
        "sinks": below(
            "learned sinks for local heads lower the loss of LS-attention",
            "ours",
            at_best("ls-sinks", RATES),
            at_best("ls", RATES),
        ),
    },
    1.3,
    rate_plots(NAMES, RATES),
    f"{PAIRED} The rate of the second claim is the lowest at which a logit of `mhsa` passes 100 in all seeds.",
)

STABILIZERS = Grid(
    "stabilizers",
    "Stabilizers beside LS-attention",
    """\
Reviewers asked how LS-attention compares with the usual remedies for exploding logits and loss spikes:
QK-norm, soft-capping, z-loss, QK-clip and AdaGC. Is it an alternative to them, and do they add to it?""",
    """\
Multi-head and LS-attention, without stabilizers and with each of them, at three rates, 600 steps. Stabilizers have
their published defaults, see docs/training.md. The logits are those before soft-capping. At the two
lower rates, QK-clip never acts, and at the lowest, soft-capping changes no loss by more than 1e-4: that they are equal
there says nothing about runs that need them.""",
    over_rates(STABILIZED, FEW_RATES),
    {
        "instead": below(
            "LS-attention alone does what the best stabilizer does for the loss of multi-head attention, or more",
            "paper and reviewers",
            at_best("ls", FEW_RATES),
            Best(
                "mhsa",
                tuple(at_rate(f"mhsa-{method}", rate) for method in METHODS for rate in FEW_RATES),
                what="with the best stabilizer at its best rate",
            ),
        ),
        **{
            method: below(
                f"{method} lowers the loss of LS-attention",
                "reviewers",
                at_best(f"ls-{method}", FEW_RATES),
                at_best("ls", FEW_RATES),
            )
            for method in METHODS
        },
    },
    2.4,
    tuple(
        series._replace(
            file=f"{kind}_{series.file}",
            arms={name: places for name, places in series.arms.items() if name.startswith(kind)},
        )
        for kind in ("mhsa", "ls")
        for series in rate_plots(STABILIZED, FEW_RATES)
    ),
)


# Heads, windows and layers

WINDOWS, SHORT_WINDOWS = (4, 8, 12, 24, 48, 96, 256), (4, 8, 12, 24, 48)
OF_COUNT = {count: "w12" if count == 1 else f"g{count}" for count in range(7)}

HEADS_AND_WINDOWS = Grid(
    "heads-and-windows",
    "Number of global heads, and window",
    """\
The paper has one global head among 6 or 12 and windows of 50 to 100 tokens, and leaves open how to choose them.
Reviewers asked for both ablations. Is there a rule in the length n and the dimension d of a head?""",
    """\
All models have six heads in each layer, learned positions and the rate 0.01, and are trained for 600 steps. `g0` to
`g6` have that number of global heads, and a window of 12 tokens, the paper's share of the length. `w...` have one
global head, and windows of that many tokens. `n128-w...` are the same on blocks of 128 tokens, with as many tokens in
a step and the same text in the evaluation. After 600 steps, the global heads have hardly learnt to look anywhere, and
no model gains from context beyond 256 tokens: these runs cannot tell how many global heads text needs.""",
    {
        **{OF_COUNT[count]: heads(count) for count in OF_COUNT if count != 1},
        **{f"w{window}": {"config_overrides": {"sliding_window": window}} for window in WINDOWS},
        **{
            f"n128-w{window}": {"config_overrides": {"sliding_window": window}, **blocks_of(128)}
            for window in SHORT_WINDOWS
        },
    },
    {
        **{
            f"g{count}": below(
                f"with one global head in a layer, the loss is lower than with {count or 'none'}",
                "paper: one is enough",
                "w12",
                f"g{count}",
            )
            for count in (0, 2, 3, 4, 5, 6)
        },
        **{
            f"w{window}": below(
                f"with a window of a fortieth of the length, the loss is lower than with one of {window} tokens",
                "paper: 50 of 2,048 tokens is a good choice",
                "w12",
                f"w{window}",
            )
            for window in WINDOWS
            if window != 12
        },
    },
    0.9,
    (
        Series("heads.png", "global heads of 6", {"n = 512": OF_COUNT}, log_x=False),
        Series(
            "windows.png",
            "window (tokens)",
            {
                "n = 512": {window: f"w{window}" for window in WINDOWS},
                "n = 128": {window: f"n128-w{window}" for window in SHORT_WINDOWS},
            },
        ),
    ),
    f"{PAIRED} Before that, the judge of this study was changed three minutes after its first 32 runs. A claim that "
    "the best window grows with the length was dropped: it compared the best of several, chosen on the same runs.",
)

LAYERS = {"one": ("first", "middle", "last"), "half": ("odd", "even")}
SPLITS: dict[str, Any] = {"mhsa": "all", "ls": 1, "one-spread": [1, 2, 1, 2]}
SPLITS |= {f"one-{name}-layer": [6 * (i == layer) for i in range(4)] for name, layer in zip(LAYERS["one"], (0, 2, 3))}
SPLITS |= {"half-spread": 3, "half-odd-layers": [6, 0, 6, 0], "half-even-layers": [0, 6, 0, 6]}


def in_layers(number: str, metric: Metric) -> Best:
    """The best arrangement of global heads in whole layers."""
    suffix = "layer" if number == "one" else "layers"
    arms = tuple(f"{number}-{name}-{suffix}" for name in LAYERS[number])
    return Best(f"{number}-...-{suffix}", arms, metric, what="at its best place")


HEADS_OR_LAYERS = Grid(
    "heads-or-layers",
    "Split heads or split layers",
    """\
Gemma 2 and 3, gpt-oss and other models have a window in some layers and none in the others. LS-attention has both
kinds of heads in every layer. With equally many global heads, and so with a KV cache of the same size, which design
learns better?""",
    """\
All models have rotary positions, like models with windowed layers, and are trained for 600 steps. In `one-...`, as
many heads are global as one layer has: spread over the layers as evenly as possible (`one-spread`), or all heads of
the first, the middle or the last layer. In `half-...`, half of the heads are global: half of those of each layer
(`half-spread`), or all heads of the first, the third and so on (`half-odd-layers`) or of the others
(`half-even-layers`). `ls` has one global head in each layer, and `mhsa` has global heads only. Spread heads are
compared with the arrangement in layers that has the lowest mean, which favours the layers a little. There is no arm
without global heads, which would show whether these runs need any.""",
    {arm: heads(count, position_embedding_type="rope") for arm, count in SPLITS.items()},
    {
        f"{key}-{number}": below(
            f"spread over all layers, {words} of the heads as global heads do better than in whole layers ({what})",
            source,
            f"{number}-spread",
            in_layers(number, metric),
            metric,
        )
        for key, metric, what, source in (
            ("loss", LOSS, "loss", "ours: every layer then sees both what is near and what is far"),
            ("logits", DOUBLINGS, "logits", "follows from the paper: a global layer must take care of what is near"),
        )
        for number, words in (("one", "a quarter"), ("half", "half"))
    },
    0.4,
)


# Positions and lengths

KINDS = ("learned", "sinusoidal", "rope", "none")

POSITIONS = Grid(
    "positions",
    "Positions",
    """\
The paper has learned absolute positions only. Reviewers asked whether its results are about them: do rotary positions,
which themselves favour near tokens, or none at all leave anything for LS-attention to improve?""",
    """\
Both models are trained with every kind of positions for 600 steps at the same learning rate, that of the recipe, which
was not tuned for any of them. With learned positions, `mhsa` is bimodal over seeds at this rate.""",
    {
        f"{name}-{kind}": heads(count, position_embedding_type=kind)
        for kind in KINDS
        for name, count in (("mhsa", "all"), ("ls", 1))
    },
    {
        f"{key}-{kind}": below(
            f"LS-attention has the {what} in 600 steps with {words} positions",
            "reviewers",
            f"ls-{kind}",
            f"mhsa-{kind}",
            metric,
        )
        for key, what, metric in (("loss", "lower loss", LOSS), ("logits", "smaller logits", DOUBLINGS))
        for kind, words in zip(KINDS, ("learned", "sinusoidal", "rotary", "no"))
    },
    0.5,
    changes=f"{PAIRED} A claim about all kinds at once became one claim for each kind.",
)

LENGTHS = (64, 128, 256, 512, 1024, 2048)
BEYOND = Metric(
    "the loss at 4n tokens less that at n", lambda run: number(run["beyond"]["4"]) - number(run["beyond"]["1"])
)


@torch.no_grad()
def loss_in_second_half(model, blocks: torch.Tensor) -> float:
    """The mean loss of the tokens in the second half of blocks `(N, T)`, in nats."""
    halves = [token_losses(model(input_ids=ids[None]).logits, ids[None])[:, len(ids) // 2 :] for ids in blocks]
    return torch.cat(halves).mean().item()


def measure_beyond(folder: Path, num_blocks: int = 16) -> dict:
    """The loss in the second half of n, 2n and 4n tokens, for positions without an upper limit."""
    model = load(folder)
    if model.config.position_embedding_type not in ("rope", "none"):
        return {}
    n = model.config.max_position_embeddings
    blocks = validation_blocks(folder, num_blocks, 4 * n)
    return {"beyond": {str(factor): loss_in_second_half(model, blocks[:, : factor * n]) for factor in (1, 2, 4)}}


LENGTHS_STUDY = Grid(
    "lengths",
    "Length of the sequences",
    """\
The paper says that multi-head attention lacks degrees of freedom where n is much larger than d, so that LS-attention
gains nothing on short sequences and more on longer ones. And does a model with local heads lose less when it reads
more tokens than it was trained on?""",
    """\
`mhsa-n...` and `ls-n...` are trained on blocks of that many tokens for 600 steps, with the same windows of 12 tokens,
heads of 8 dimensions, 2,048 tokens in a step and 51,200 tokens of text in the evaluation, whatever the length. The
longest length has one row in a step. `mhsa-rope`, `ls-rope`, `mhsa-none` and `ls-none`, with rotary positions and
without any, are trained on 512 tokens and evaluated on the first n, 2n and 4n tokens of the same 16 blocks of
validation text: the loss of the tokens in the second half of each. Without positions, both models lose about as much
(see the table): what is seen is an effect of rotary positions, and the studies set-complement and othello find the
opposite.""",
    {
        f"{name}-{arm}": {
            "config_overrides": {"num_global_heads": count, "max_position_embeddings": n, **fields},
            **blocks_of(n),
        }
        for name, count in (("mhsa", "all"), ("ls", 1))
        for arm, n, fields in (
            *((f"n{n}", n, {}) for n in LENGTHS),
            *((kind, 512, {"position_embedding_type": kind}) for kind in ("rope", "none")),
        )
    },
    {
        "grows-with-length": below(
            "the advantage of LS-attention in loss grows with n / d",
            "paper",
            less("ls-n2048", "mhsa-n2048"),
            less("ls-n64", "mhsa-n64"),
        ),
        "none-when-short": below(
            "on short sequences LS-attention has no advantage in loss",
            "paper",
            "ls-n64",
            "mhsa-n64",
            equal=True,
        ),
        "logits-grow": below(
            "the logits of multi-head attention grow with n / d", "paper", "mhsa-n64", "mhsa-n2048", DOUBLINGS
        ),
        **{
            f"beyond-{kind}": below(
                f"beyond the trained length LS-attention loses less than multi-head attention, {words} positions",
                "ours: only global heads can disperse over more keys than they were trained on (arXiv:2510.08341)",
                f"ls-{kind}",
                f"mhsa-{kind}",
                BEYOND,
                margin=NEGLIGIBLE,
            )
            for kind, words in (("rope", "with rotary"), ("none", "without"))
        },
    },
    1.0,
    tuple(
        Series(file, "tokens in a block, n", {x: {n: f"{x}-n{n}" for n in LENGTHS} for x in ("mhsa", "ls")}, metric)
        for file, metric in (("loss.png", LOSS), ("max_logit.png", LOGIT))
    ),
    f"{PAIRED} Before that, the runs were evaluated anew in their place, so that all lengths have the same text. The "
    "claim about models without positions was added after the runs.",
    measure=measure_beyond,
)


# Hidden keys


def hide_keys(input_ids: torch.Tensor) -> torch.Tensor:
    """
    A causal mask that also hides every earlier key of every query with a probability of one half.

    The random numbers of a row depend only on its tokens: a block has the same mask in every batch, whatever blocks
    came before it. A run that resumes after an interruption therefore sees the same masks as without one.

    Args:
        input_ids: `(B, n)`, on the CPU.

    Returns:
        `(B, 1, n, n)` booleans, True where a query may attend.
    """
    length = input_ids.shape[1]
    mask = torch.empty(len(input_ids), 1, length, length, dtype=torch.bool)
    for row, ids in zip(mask, input_ids):
        seed = zlib.crc32(ids.long().contiguous().numpy().tobytes())
        row.bernoulli_(0.5, generator=torch.Generator().manual_seed(seed))
    return mask.tril(-1) | torch.eye(length, dtype=torch.bool)


def collate_with_hidden_keys(blocks: list[dict]) -> dict[str, torch.Tensor]:
    """Like `collate_blocks`, with the `attention_mask` of `hide_keys`."""
    batch = collate_blocks(blocks)
    return {**batch, "attention_mask": hide_keys(batch["input_ids"])}


def hide_in(trainer: Trainer, arm: str):
    """Gives the trainer of an arm with hidden keys the collator that hides them."""
    if arm.endswith("-hidden"):
        trainer.data_collator = collate_with_hidden_keys


SPARSE_DEPENDENCIES = Grid(
    "sparse-dependencies",
    "Sparse dependencies",
    """\
The paper says that logits explode because almost every token depends on its near neighbours, more of them than
queries and keys can tell apart. Its test is to make these dependencies sparse: half of the keys are hidden, at
random for every query. Do the logits of multi-head attention stay small then?""",
    """\
In the arms with `-hidden`, every query sees each earlier key with a probability of one half, and its own key always;
what is hidden is the same for all heads and layers, in training and in evaluation, and follows from the tokens of the
block alone. The learning rate is one at which the logits of multi-head attention explode in 600 steps (0.03). Losses
with and without hidden keys are of different tasks, and are not compared with each other.""",
    {f"{name}{suffix}": SHIPPED[name] for name in ("mhsa", "ls") for suffix in ("", "-hidden")},
    {
        "mhsa": below(
            "with half of the keys hidden, the logits of multi-head attention stay smaller",
            "paper",
            "mhsa-hidden",
            "mhsa",
            DOUBLINGS,
        ),
        "ls": below(
            "hiding keys lowers the logits of multi-head attention more than those of LS-attention",
            "follows from the paper's explanation: local heads have few keys anyway",
            less("mhsa-hidden", "mhsa"),
            less("ls-hidden", "ls"),
            DOUBLINGS,
        ),
        "gain": below(
            "hiding keys takes away what LS-attention gains in loss over multi-head attention",
            "follows from the paper's explanation",
            less("mhsa-hidden", "ls-hidden"),
            less("mhsa", "ls"),
        ),
    },
    0.7,
    fields={"learning_rate": 3e-2},
    change=hide_in,
)
