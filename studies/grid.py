"""Grids of short training runs on books: learning rates, stabilizers, lengths, and hidden keys."""

import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from lsgpt.configuration import load_arms
from lsgpt.training import LSGPTTrainer
from lsgpt.training.data import collate_blocks
from lsgpt.utilities.plots import plot_curves

from .comparisons import DOUBLINGS, LOGIT, LOSS, Across, Best, Comparison, Metric, Runs, less
from .measurements import mean_loss
from .study import FINAL, TrainingStudy, tabulate, validation_blocks


PAIRED = """\
Until all runs had been made, the criteria were two standard errors of the difference between means; they were then
replaced by paired intervals with the quantiles of Student's t, which decide less."""

SHIPPED = load_arms()


class Grid(TrainingStudy):
    """Runs of the recipe `micro` with every combination of some fields."""

    fields: Mapping[str, Any] = {"max_steps": 600}
    changes = PAIRED
    lines: tuple[str, str] | None = None
    """A pattern that finds a label and x in the names of arms, and what x is, for plots over x."""

    def report(self, runs: Runs, folder: Path) -> str:
        sections = [tabulate(runs, FINAL, diverged=True)]
        if self.lines:
            pattern, xlabel = self.lines
            losses, logits = (over(runs, pattern, metric) for metric in (LOSS, LOGIT))
            loss, logit = "final validation loss (nats per token)", "largest |logit| on the way"
            sections += [
                plot_curves(folder / "loss.png", losses, xlabel, loss, log_x=True),
                plot_curves(folder / "max_logit.png", logits, xlabel, logit, log_x=True, log_y=True),
            ]
        return "\n\n".join(sections)


def over(runs: Runs, pattern: str, metric: Metric) -> dict[str, list[list[tuple[float, float]]]]:
    """For each label that the pattern finds in the names of arms, the curves of its seeds over x."""
    curves: dict[str, dict[int, list]] = {}
    for match in filter(None, (re.fullmatch(pattern, arm) for arm in runs)):
        by_seed = curves.setdefault(match[1], {})
        for run in runs[match[0]]:
            by_seed.setdefault(run["seed"], []).append((float(match[2]), metric.of(run)))
    return {label: list(by_seed.values()) for label, by_seed in curves.items()}


BEYOND = LOSS._replace(
    words="the loss at 4n tokens less that at n", read=lambda run: run["beyond"]["4"] - run["beyond"]["1"]
)


RATES, FEW_RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1), (3e-3, 1e-2, 3e-2)
METHODS = ("qknorm", "softcap", "zloss", "qkclip", "adagc")
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


CAPPED = Metric(
    "the sensitivity (mean over rates of the final loss, at most that before training, less the lowest)",
    lambda run: min(LOSS.of(run), run["first_loss"]),
)


def sensitivity(name: str) -> Across:
    """The sensitivity of an arm to the rate (arXiv:2309.14322)."""
    arms = tuple(at_rate(name, rate) for rate in RATES)
    return Across(f"`{name}`", arms, lambda losses: sum(losses) / len(losses) - min(losses))


class LearningRates(Grid):
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
    arms = over_rates(("mhsa", "ls", "ls-sinks", "local-only"), RATES)
    comparisons = {
        "lower-loss": Comparison("paper", LOSS, at_best("ls", RATES), at_best("mhsa", RATES)),
        "smaller-logits": Comparison("paper", DOUBLINGS, at_rate("ls", 3e-2), at_rate("mhsa", 3e-2)),
        "less-sensitive": Comparison(
            "paper: it trains where others diverge", CAPPED, sensitivity("ls"), sensitivity("mhsa")
        ),
        "global-head": Comparison(
            "paper: 15 to 20% of perplexity", LOSS, at_best("ls", RATES), at_best("local-only", RATES)
        ),
        "sinks": Comparison("ours", LOSS, at_best("ls-sinks", RATES), at_best("ls", RATES)),
    }
    hours = 1.3
    lines = (r"(.+)-lr(.+)", "learning rate")


class Stabilizers(Grid):
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
        "instead": Comparison(
            "paper and reviewers",
            LOSS,
            at_best("ls", FEW_RATES),
            Best(
                "mhsa",
                tuple(at_rate(f"mhsa-{method}", rate) for method in METHODS for rate in FEW_RATES),
                what="with the best stabilizer at its best rate",
            ),
        ),
    } | {
        method: Comparison("reviewers", LOSS, at_best(f"ls-{method}", FEW_RATES), at_best("ls", FEW_RATES))
        for method in METHODS
    }
    changes = (
        f"{PAIRED} 90 runs were first made with uncommitted changes; they were repeated from a clean commit. All "
        "values are the same, except with soft-capping, where losses differ by up to 0.030."
    )
    hours = 2.4


HEADS = {"mhsa": "all", "ls": 1}
LENGTHS = (64, 128, 256, 512, 1024, 2048)


class Lengths(Grid):
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
        "grows-with-length": Comparison("paper", LOSS, less("ls-n2048", "mhsa-n2048"), less("ls-n64", "mhsa-n64")),
        "none-when-short": Comparison("paper", LOSS, "ls-n64", "mhsa-n64", equal=True),
        "logits-grow": Comparison("paper", DOUBLINGS, "mhsa-n64", "mhsa-n2048"),
        "beyond-rope": Comparison(
            "ours: only global heads can disperse, arXiv:2510.08341", BEYOND, "ls-rope", "mhsa-rope"
        ),
        "beyond-none": Comparison("ours: the same", BEYOND, "ls-none", "mhsa-none"),
    }
    hours = 1.0
    lines = (r"(.+)-n(\d+)", "tokens in a block, n")

    def measure(self, folder: Path) -> dict:
        """The loss in the second half of n, 2n and 4n tokens, for positions without an upper limit."""
        model = AutoModelForCausalLM.from_pretrained(folder)
        if model.config.position_embedding_type not in ("rope", "none"):
            return {}
        n = model.config.max_position_embeddings
        blocks = validation_blocks(folder, 16, 4 * n)
        return {"beyond": {str(x): mean_loss(model, blocks[:, : x * n], begin=x * n // 2) for x in (1, 2, 4)}}


def hide_keys(input_ids: torch.Tensor) -> torch.Tensor:
    """
    A causal mask for tokens `(B, n)` that also hides every earlier key of every query with a probability of one half:
    `(B, 1, n, n)` booleans, True where a query may attend. The random numbers of a row depend only on its tokens, so a
    run that resumes after an interruption sees the same masks as without one.
    """
    length = input_ids.shape[1]
    mask = torch.empty(len(input_ids), 1, length, length, dtype=torch.bool)
    for row, ids in zip(mask, input_ids):
        seed = zlib.crc32(ids.long().numpy().tobytes())
        row.bernoulli_(0.5, generator=torch.Generator().manual_seed(seed))
    return mask.tril(-1) | torch.eye(length, dtype=torch.bool)


def collate_with_hidden_keys(blocks: list[dict]) -> dict[str, torch.Tensor]:
    """Like `collate_blocks`, with the `attention_mask` of `hide_keys`."""
    batch = collate_blocks(blocks)
    return {**batch, "attention_mask": hide_keys(batch["input_ids"])}


class SparseDependencies(Grid):
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
        "mhsa": Comparison("paper", DOUBLINGS, "mhsa-hidden", "mhsa"),
        "ls": Comparison(
            "follows from the paper's explanation: local heads have few keys anyway",
            DOUBLINGS,
            less("mhsa-hidden", "mhsa"),
            less("ls-hidden", "ls"),
        ),
        "gain": Comparison("follows from it, too", LOSS, less("mhsa-hidden", "ls-hidden"), less("mhsa", "ls")),
    }
    hours = 0.7
    fields = {"max_steps": 600, "learning_rate": 3e-2}

    def change(self, trainer: LSGPTTrainer, arm: str):
        if arm.endswith("-hidden"):
            trainer.data_collator = collate_with_hidden_keys
