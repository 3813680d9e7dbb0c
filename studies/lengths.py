"""Does the advantage of LS-attention grow with the sequence length, and does it last beyond the trained length?"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import lsgpt  # noqa: F401 (registers LSGPT with the Auto classes)
from lsgpt.training.metrics import token_losses
from lsgpt.training.plots import plot_curves
from lsgpt.utilities import table

from .learning_rates import verdict_below
from .study import (
    Claim,
    Finding,
    Runs,
    Scale,
    TrainingStudy,
    below,
    curves_over,
    format_values,
    is_below,
    is_no_lower,
    mean,
    no_lower,
    number,
    results_table,
    validation_blocks,
)


LENGTHS = (64, 128, 256, 512, 1024, 2048)
BEYOND = 512
"""Training length of the models that are also evaluated at two and four times this length."""
KINDS = ("rope", "none")
NUM_BLOCKS = 16
"""Number of blocks of 4n tokens for the evaluation beyond the trained length."""


class Lengths(TrainingStudy):
    """Training runs at lengths from 64 to 2,048 tokens, and evaluations beyond the trained length."""

    name = "lengths"
    title = "Length of the sequences"
    question = """\
The paper says that multi-head attention lacks degrees of freedom where n is much larger than d, so that LS-attention
gains nothing on short sequences and more on longer ones. And does a model with local heads lose less when it reads
more tokens than it was trained on?"""
    protocol = f"""\
`mhsa-n64` to `ls-n2048` are trained on blocks of that many tokens, with windows of 12, heads of 8 dimensions and 2,048
tokens in each step, whatever the length. The advantage is the final loss of `mhsa` less that of `ls` for each seed.
`mhsa-rope`, `ls-rope`, `mhsa-none` and `ls-none`, with rotary positions and without any, are trained on {BEYOND}
tokens and evaluated on the first n, 2n and 4n tokens of the same {NUM_BLOCKS} blocks of validation text: the loss of
the tokens in the second half of each."""
    claims = {
        "grows-with-length": Claim(
            "the advantage of LS-attention grows with n / d",
            "paper",
            "the advantage at 2,048 tokens is above that at 64 by more than two standard errors",
            "it is below by more than two standard errors",
        ),
        "none-when-short": Claim(
            "on short sequences LS-attention has no advantage",
            "paper",
            "at 64 tokens, " + no_lower("`ls`", "`mhsa`"),
            "it is lower by more than two standard errors, and by no less than at 2,048 tokens",
        ),
        "logits-grow": Claim(
            "the logits of multi-head attention grow with n / d",
            "paper",
            "the largest logit of `mhsa` is larger at 2,048 tokens than at 64 by more than two standard errors",
            "it is smaller by more than two standard errors",
        ),
        "beyond": Claim(
            "beyond the trained length LS-attention loses less than multi-head attention",
            "ours: only global heads can disperse over more keys than they were trained on (arXiv:2510.08341)",
            below("with rotary positions, the loss at 4n less that at n", "ls", "mhsa"),
            "it is above by more than two standard errors",
        ),
    }
    scales = {
        "micro": Scale("micro", {"max_steps": 600}, 3, 1.0),
        "paper": Scale("paper-v1", {}, 3, 5000.0),
    }

    def arms(self, scale: str) -> Mapping[str, Any]:
        """At the scale `paper`, all lengths are four times as large."""
        factor, tokens = (1, 2048) if scale == "micro" else (4, 2**18)
        arms = {}
        for name, heads in (("mhsa", {"num_global_heads": "all"}), ("ls", {})):
            for length in LENGTHS:
                n = length * factor
                arms[f"{name}-n{length}"] = {
                    "block_size": n,
                    "per_device_train_batch_size": tokens // n,
                    "config_overrides": {"max_position_embeddings": n, **heads},
                }
            for kind in KINDS:
                n = BEYOND * factor
                overrides = {"position_embedding_type": kind, "max_position_embeddings": n, **heads}
                arms[f"{name}-{kind}"] = {
                    "block_size": n,
                    "per_device_train_batch_size": tokens // n,
                    "config_overrides": overrides,
                }
        return arms

    def measure(self, folder: Path) -> dict:
        """The loss in the second half of n, 2n and 4n tokens, for positions without an upper limit."""
        model = AutoModelForCausalLM.from_pretrained(folder)
        if model.config.position_embedding_type not in KINDS:
            return {}
        n = model.config.max_position_embeddings
        blocks = validation_blocks(folder, NUM_BLOCKS, 4 * n)
        return {"beyond": {str(factor): loss_in_second_half(model, blocks[:, : factor * n]) for factor in (1, 2, 4)}}

    def judge(self, runs: Runs) -> dict[str, Finding]:
        """Judges each of `claims`."""
        first, last = LENGTHS[0], LENGTHS[-1]
        gains = {n: self._advantage(runs, n) for n in (first, last)}
        ours, theirs = (runs.column(f"{name}-n{first}", "eval_loss") for name in ("ls", "mhsa"))
        short, long = (runs.column(f"mhsa-n{n}", "max_logit") for n in (first, last))
        none = "seen" if is_no_lower(ours, theirs) else "not seen"
        if is_below(ours, theirs) and mean(gains[first]) >= mean(gains[last]):
            none = "opposite"
        losses = {
            name: [number(run["beyond"]["4"]) - number(run["beyond"]["1"]) for run in runs.of(f"{name}-rope")]
            for name in ("ls", "mhsa")
        }
        figure = (
            f"advantage {format_values(gains[first])} nats at {first} tokens, {format_values(gains[last])} at {last:,}"
        )
        return {
            "grows-with-length": Finding(figure, verdict_below(gains[first], gains[last])),
            "none-when-short": Finding(
                f"loss at {first} tokens {format_values(ours)} with `ls`, {format_values(theirs)} with `mhsa`", none
            ),
            "logits-grow": Finding(
                f"largest logit of `mhsa` {format_values(short, 1)} at {first} tokens, {format_values(long, 1)} at "
                f"{last:,}",
                verdict_below(short, long),
            ),
            "beyond": Finding(
                f"loss at 4n less that at n, rotary positions: {format_values(losses['ls'])} with `ls`, "
                f"{format_values(losses['mhsa'])} with `mhsa`",
                verdict_below(losses["ls"], losses["mhsa"]),
            ),
        }

    def _advantage(self, runs: Runs, length: int) -> list[float]:
        pairs = zip(*(runs.column(f"{name}-n{length}", "eval_loss") for name in ("mhsa", "ls")))
        return [theirs - ours for theirs, ours in pairs]

    def report(self, runs: Runs, folder: Path) -> str:
        """Final figures, plots of loss and logits over the length, and losses beyond the trained length."""
        plots = []
        for file, key, label in (
            ("loss.png", "eval_loss", "final validation loss (nats per token)"),
            ("max_logit.png", "max_logit", "largest |logit| on the way"),
        ):
            curves = {name: curves_over(runs, [(n, f"{name}-n{n}") for n in LENGTHS], key) for name in ("mhsa", "ls")}
            plot_curves(folder / file, curves, "tokens in a block, n", label, log_x=True)
            plots.append(f"![{label} over the length]({file})")
        rows = [
            [f"`{arm}`", *(format_values(run["beyond"][factor] for run in runs[arm]) for factor in ("1", "2", "4"))]
            for arm in runs
            if arm.split("-")[1] in KINDS
        ]
        head = ["arm", "n tokens", "2n tokens", "4n tokens"]
        return "\n\n".join(
            [
                results_table(runs),
                *plots,
                "### Beyond the trained length",
                "Loss in nats per token.",
                table(rows, head),
            ]
        )


STUDY = Lengths()


@torch.no_grad()
def loss_in_second_half(model, blocks: torch.Tensor) -> float:
    """The mean loss of the tokens in the second half of blocks `(N, T)`, in nats."""
    halves = [token_losses(model(input_ids=ids[None]).logits, ids[None])[:, len(ids) // 2 :] for ids in blocks]
    return torch.cat(halves).mean().item()
