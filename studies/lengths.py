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

from .study import (
    Claim,
    Finding,
    Runs,
    Scale,
    TrainingStudy,
    below,
    blocks_of,
    curves_over,
    format_values,
    is_below,
    is_no_lower,
    mean,
    no_lower,
    number,
    results_table,
    validation_blocks,
    verdict_below,
)


LENGTHS = {"micro": (64, 128, 256, 512, 1024, 2048), "paper": (256, 512, 1024, 2048, 4096, 8192)}
BEYOND = {"micro": 512, "paper": 2048}
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
`mhsa-n...` and `ls-n...` are trained on blocks of that many tokens, with the same windows, number of tokens in a step
and text in the evaluation, whatever the length. At `micro`, windows are of 12 tokens, heads of 8 dimensions and steps
of 2,048 tokens, and the validation text is of 51,200 tokens. The advantage is the final loss of `mhsa` less that of
`ls` for each seed. `mhsa-rope`, `ls-rope`, `mhsa-none` and `ls-none`, with rotary positions and without any, are
trained on {BEYOND["micro"]} tokens ({BEYOND["paper"]:,} at `paper`) and evaluated on the first n, 2n and 4n tokens of
the same {NUM_BLOCKS} blocks of validation text: the loss of the tokens in the second half of each."""
    claims = {
        "grows-with-length": Claim(
            "the advantage of LS-attention grows with n / d",
            "paper",
            "the advantage at the longest length is above that at the shortest by more than two standard errors",
            "it is below by more than two standard errors",
        ),
        "none-when-short": Claim(
            "on short sequences LS-attention has no advantage",
            "paper",
            "at the shortest length, " + no_lower("`ls`", "`mhsa`"),
            "it is lower by more than two standard errors, and by no less than at the longest",
        ),
        "logits-grow": Claim(
            "the logits of multi-head attention grow with n / d",
            "paper",
            "the largest logit of `mhsa` is larger at the longest length than at the shortest by more than two "
            "standard errors",
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
        """The length of the blocks, and either learned positions or others."""
        arms = {}
        for name, heads in (("mhsa", {"num_global_heads": "all"}), ("ls", {})):
            for n in LENGTHS[scale]:
                overrides = {"max_position_embeddings": n, **heads}
                arms[f"{name}-n{n}"] = {"config_overrides": overrides, **blocks_of(n, scale)}
            for kind in KINDS:
                n = BEYOND[scale]
                overrides = {"position_embedding_type": kind, "max_position_embeddings": n, **heads}
                arms[f"{name}-{kind}"] = {"config_overrides": overrides, **blocks_of(n, scale)}
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
        first, *_, last = LENGTHS[runs.scale]
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
            f"advantage {format_values(gains[first])} nats at {first:,} tokens, "
            f"{format_values(gains[last])} at {last:,}"
        )
        return {
            "grows-with-length": Finding(figure, verdict_below(gains[first], gains[last])),
            "none-when-short": Finding(
                f"loss at {first:,} tokens {format_values(ours)} with `ls`, {format_values(theirs)} with `mhsa`", none
            ),
            "logits-grow": Finding(
                f"largest logit of `mhsa` {format_values(short, 1)} at {first:,} tokens, {format_values(long, 1)} at "
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
        plots, lengths = [], LENGTHS[runs.scale]
        for file, key, label in (
            ("loss.png", "eval_loss", "final validation loss (nats per token)"),
            ("max_logit.png", "max_logit", "largest |logit| on the way"),
        ):
            curves = {name: curves_over(runs, [(n, f"{name}-n{n}") for n in lengths], key) for name in ("mhsa", "ls")}
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
