"""Grids of short training runs on books: learning rates, stabilizers, lengths, and hidden keys."""

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import Trainer

from lsgpt.configuration import load_arms
from lsgpt.training.data import collate_blocks
from lsgpt.training.metrics import token_losses

from .comparisons import DOUBLINGS, LOGIT, LOSS, NEGLIGIBLE, Across, Best, Comparison, Metric, Runs, Side, less
from .measurements import load
from .plots import plot
from .study import FINAL, TrainingStudy, number, tabulate, validation_blocks


PAIRED = """\
Until all runs had been made, the criteria were two standard errors of the difference between means; they were then
replaced by paired intervals with the quantiles of Student's t, which decide less."""

SHIPPED = load_arms()


class Series(NamedTuple):
    """A plot of a metric over a quantity in which arms differ."""

    file: str
    xlabel: str
    arms: Mapping[str, Mapping[float, str]]
    """For each label, the arm of each x."""
    metric: Metric = LOSS


class Grid(TrainingStudy):
    """Runs of the recipe `micro` with every combination of some fields."""

    fields: Mapping[str, Any] = {"max_steps": 600}
    changes = PAIRED
    series: Sequence[Series] = ()

    def report(self, runs: Runs, folder: Path) -> str:
        """A table of the final figures, and plots."""
        sections = [tabulate(runs, FINAL, diverged=True)]
        for file, xlabel, arms, metric in self.series:
            curves = {label: over(runs, places, metric) for label, places in arms.items()}
            ylabel = "largest |logit| on the way" if metric == LOGIT else "final validation loss (nats per token)"
            plot(folder / file, curves, xlabel, ylabel, log_x=True, log_y=metric == LOGIT)
            sections.append(f"![{ylabel} over {xlabel}]({file})")
        return "\n\n".join(sections)


def over(runs: Runs, places: Mapping[float, str], metric: Metric) -> list[list[tuple[float, float]]]:
    """Curves of a metric over the x values of arms, one for each seed."""
    by_arm = {x: {run["seed"]: metric.of(run) for run in runs[arm]} for x, arm in places.items() if arm in runs}
    seeds = sorted({seed for values in by_arm.values() for seed in values})
    return [[(x, values[seed]) for x, values in by_arm.items() if seed in values] for seed in seeds]


BEYOND = Metric(
    "the loss at 4n tokens less that at n", lambda run: number(run["beyond"]["4"]) - number(run["beyond"]["1"])
)


def below(source: str, first: Side, second: Side, metric: Metric = LOSS, **options) -> Comparison:
    """A claim that `first` has the lower loss than `second`, or is equal within the margin."""
    if metric in (LOSS, BEYOND):
        options = {"margin": NEGLIGIBLE, **options}
    return Comparison(source, metric, first, second, **options)


# Learning rates and stabilizers

RATES, FEW_RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1), (3e-3, 1e-2, 3e-2)
METHODS = ("qknorm", "softcap", "zloss", "qkclip", "adagc")
NAMES = ("mhsa", "ls", "ls-sinks", "local-only")
STABILIZED = ("mhsa", "ls", *(f"{kind}-{method}" for kind in ("mhsa", "ls") for method in METHODS))


def at_rate(name: str, rate: float) -> str:
    """The name of an arm at a learning rate."""
    return f"{name}-lr{rate:g}"


def at_best(name: str, rates: tuple[float, ...]) -> Best:
    """An arm at its best rate."""
    return Best(name, tuple(at_rate(name, rate) for rate in rates))


def over_rates(names: tuple[str, ...], rates: tuple[float, ...]) -> dict[str, Any]:
    """Every arm at every rate."""
    return {at_rate(name, rate): {**SHIPPED[name], "learning_rate": rate} for rate in rates for name in names}


def rate_plots(prefix: str, names: Sequence[str], rates: tuple[float, ...]) -> list[Series]:
    """Plots of loss and logits over the rates."""
    arms = {name: {rate: at_rate(name, rate) for rate in rates} for name in names}
    files = (("loss", LOSS), ("max_logit", LOGIT))
    return [Series(f"{prefix}{file}.png", "learning rate", arms, metric) for file, metric in files]


CAPPED = Metric(
    "the sensitivity (mean over rates of the final loss, at most that before training, less the lowest)",
    lambda run: run["first_loss"] if run["diverged"] else min(number(run["eval_loss"]), run["first_loss"]),
)


def sensitivity(name: str) -> Across:
    """The sensitivity of an arm to the rate (arXiv:2309.14322)."""
    arms = tuple(at_rate(name, rate) for rate in RATES)
    return Across(f"`{name}`", arms, lambda losses: sum(losses) / len(losses) - min(losses))


class LearningRates(Grid):
    """Four kinds of attention at five learning rates."""

    name = "learning-rates"
    title = "Learning rates"
    question = """\
The paper trains at one learning rate. Instabilities of large models also appear in small ones, at higher rates
(arXiv:2309.14322). How do the final loss and the largest attention logit depend on the rate?"""
    protocol = """\
Every arm is trained at every rate for 600 steps: `mhsa` has only global heads (six in each layer), `ls` one global
head and the rest local, `ls-sinks` the same with a learned sink for each local head, `local-only` no global head. A
run has diverged if its loss became NaN or infinite, or ended above where it began. The spike score is the fraction of
steps whose loss is more than six standard deviations above the mean of the 128 steps before. After 600 steps, the
global heads have hardly learned to look anywhere: they attend as far back as with equal weights. At the rate 0.01,
`mhsa` with learned positions is bimodal over seeds, which the mean hides."""
    changes = (
        f"{PAIRED} The rate in the second claim is the lowest at which a logit of `mhsa` exceeds 100 in all seeds."
    )
    arms = over_rates(NAMES, RATES)
    comparisons = {
        "lower-loss": below("paper", at_best("ls", RATES), at_best("mhsa", RATES)),
        "smaller-logits": below("paper", at_rate("ls", 3e-2), at_rate("mhsa", 3e-2), DOUBLINGS),
        "less-sensitive": below(
            "paper: it trains where others diverge", sensitivity("ls"), sensitivity("mhsa"), CAPPED
        ),
        "global-head": below("paper: 15 to 20% of perplexity", at_best("ls", RATES), at_best("local-only", RATES)),
        "sinks": below("ours", at_best("ls-sinks", RATES), at_best("ls", RATES)),
    }
    hours = 1.3
    series = rate_plots("", NAMES, RATES)


class Stabilizers(Grid):
    """Multi-head and LS-attention with the usual remedies for exploding logits."""

    name = "stabilizers"
    title = "Stabilizers compared with LS-attention"
    question = """\
Reviewers asked how LS-attention compares with the usual remedies for exploding logits and loss spikes: QK-norm,
soft-capping, z-loss, QK-clip and AdaGC. Can it replace them, and do they improve it?"""
    protocol = """\
Multi-head and LS-attention, without stabilizers and with each of them, at three rates, for 600 steps. Stabilizers
have their published defaults, see docs/training.md. Logits are those before soft-capping. At the two lower rates,
QK-clip never acts, and at the lowest, soft-capping changes no loss by more than 1e-4: equal results there say nothing
about runs that need them."""
    arms = over_rates(STABILIZED, FEW_RATES)
    comparisons = {
        "instead": below(
            "paper and reviewers",
            at_best("ls", FEW_RATES),
            Best(
                "mhsa",
                tuple(at_rate(f"mhsa-{method}", rate) for method in METHODS for rate in FEW_RATES),
                what="with the best stabilizer at its best rate",
            ),
        ),
    } | {
        method: below("reviewers", at_best(f"ls-{method}", FEW_RATES), at_best("ls", FEW_RATES)) for method in METHODS
    }
    hours = 2.4
    series = [
        *rate_plots("mhsa_", [name for name in STABILIZED if name.startswith("mhsa")], FEW_RATES),
        *rate_plots("ls_", [name for name in STABILIZED if name.startswith("ls")], FEW_RATES),
    ]


# Lengths

HEADS = {"mhsa": "all", "ls": 1}
LENGTHS = (64, 128, 256, 512, 1024, 2048)


@torch.no_grad()
def loss_in_second_half(model, blocks: torch.Tensor) -> float:
    """The mean loss of the tokens in the second half of blocks `(N, T)`, in nats."""
    halves = [token_losses(model(input_ids=ids[None]).logits, ids[None])[:, len(ids) // 2 :] for ids in blocks]
    return torch.cat(halves).mean().item()


class Lengths(Grid):
    """Sequences of 64 to 2,048 tokens, and reading more than in training."""

    name = "lengths"
    title = "Length of the sequences"
    question = """\
The paper says that multi-head attention lacks degrees of freedom where n is much larger than d, so that LS-attention
gains nothing on short sequences and more on longer ones. And does a model with local heads lose less when it reads
more tokens than it was trained on?"""
    protocol = """\
`mhsa-n...` and `ls-n...` are trained on blocks of that many tokens for 600 steps, with the same windows of 12 tokens,
heads of 8 dimensions, 2,048 tokens in a step and 51,200 tokens of text in the evaluation, whatever the length.
`mhsa-rope`, `ls-rope`, `mhsa-none` and `ls-none`, with rotary positions and without any, are trained on 512 tokens
and evaluated on the first n, 2n and 4n tokens of the same 16 blocks of validation text: the loss of the tokens in the
second half of each. Without positions, both models lose about as much, so the effect is one of rotary positions; the
studies set-complement and othello find the opposite."""
    changes = (
        f"{PAIRED} Before that, the trained models were evaluated again, so that all lengths have the same text. The "
        "claim about models without positions was added after the runs."
    )
    arms = {
        f"{name}-{arm}": {
            "config_overrides": {"num_global_heads": count, "max_position_embeddings": n, **fields},
            "block_size": n,
            "per_device_train_batch_size": 2048 // n,
            "max_eval_blocks": 51_200 // n,
        }
        for name, count in HEADS.items()
        for arm, n, fields in (
            *((f"n{n}", n, {}) for n in LENGTHS),
            *((kind, 512, {"position_embedding_type": kind}) for kind in ("rope", "none")),
        )
    }
    comparisons = {
        "grows-with-length": below("paper", less("ls-n2048", "mhsa-n2048"), less("ls-n64", "mhsa-n64")),
        "none-when-short": below("paper", "ls-n64", "mhsa-n64", equal=True),
        "logits-grow": below("paper", "mhsa-n64", "mhsa-n2048", DOUBLINGS),
        "beyond-rope": below("ours: only global heads can disperse, arXiv:2510.08341", "ls-rope", "mhsa-rope", BEYOND),
        "beyond-none": below("ours: the same", "ls-none", "mhsa-none", BEYOND),
    }
    hours = 1.0
    series = [
        Series(file, "tokens in a block, n", {x: {n: f"{x}-n{n}" for n in LENGTHS} for x in HEADS}, metric)
        for file, metric in (("loss.png", LOSS), ("max_logit.png", LOGIT))
    ]

    def measure(self, folder: Path) -> dict:
        """The loss in the second half of n, 2n and 4n tokens, for positions without an upper limit."""
        model = load(folder)
        if model.config.position_embedding_type not in ("rope", "none"):
            return {}
        n = model.config.max_position_embeddings
        blocks = validation_blocks(folder, 16, 4 * n)
        return {"beyond": {str(factor): loss_in_second_half(model, blocks[:, : factor * n]) for factor in (1, 2, 4)}}


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


class SparseDependencies(Grid):
    """Half of the keys are hidden from every query."""

    name = "sparse-dependencies"
    title = "Sparse dependencies"
    question = """\
The paper says that logits explode because almost every token depends on its near neighbours, more of them than
queries and keys can tell apart. Its test is to make these dependencies sparse: half of the keys are hidden, at random
for every query. Do the logits of multi-head attention stay small then?"""
    protocol = """\
In the arms with `-hidden`, every query sees each earlier key with a probability of one half, and always its own key;
what is hidden is the same for all heads and layers, in training and in evaluation, and depends only on the tokens of
the block. The learning rate (0.03) is one at which the logits of multi-head attention explode in 600 steps. Losses
with and without hidden keys belong to different tasks, and are not compared with each other."""
    arms = {f"{name}{suffix}": SHIPPED[name] for name in ("mhsa", "ls") for suffix in ("", "-hidden")}
    comparisons = {
        "mhsa": below("paper", "mhsa-hidden", "mhsa", DOUBLINGS),
        "ls": below(
            "follows from the paper's explanation: local heads have few keys anyway",
            less("mhsa-hidden", "mhsa"),
            less("ls-hidden", "ls"),
            DOUBLINGS,
        ),
        "gain": below("follows from it, too", less("mhsa-hidden", "ls-hidden"), less("mhsa", "ls")),
    }
    hours = 0.7
    fields = {"max_steps": 600, "learning_rate": 3e-2}

    def change(self, trainer: Trainer, arm: str):
        """Gives the trainer of an arm with hidden keys the collator that hides them."""
        if arm.endswith("-hidden"):
            trainer.data_collator = collate_with_hidden_keys
