"""Do logits stay small when the short-range dependencies are made sparse?"""

import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer

from lsgpt.configuration import load_arms
from lsgpt.training.data import collate_blocks
from lsgpt.training.plots import plot_curves
from lsgpt.utilities import table

from .study import (
    EXCHANGED,
    Claim,
    Finding,
    Runs,
    Scale,
    TrainingStudy,
    below,
    differences,
    format_values,
    points,
    results_table,
    verdict_below,
)


class SparseDependencies(TrainingStudy):
    """The paper's test, in which half of the keys are hidden."""

    name = "sparse-dependencies"
    title = "Sparse dependencies"
    question = """\
The paper says that logits explode because almost every token depends on its near neighbours, more of them than
queries and keys can tell apart. Its test is to make these dependencies sparse: half of the keys are hidden, at
random for every query. Do the logits of multi-head attention stay small then?"""
    protocol = """\
In the arms with `-hidden`, every query sees each earlier key with a probability of one half, and its own key always;
what is hidden is the same for all heads and layers, in training and in evaluation, and follows from the tokens of
the block alone. The learning rate is one at which the logits of multi-head attention explode at this size (0.03 at
`micro`). Losses with and without hidden keys are of different tasks, and are not compared with each other."""
    claims = {
        "mhsa": Claim(
            "with half of the keys hidden, the logits of multi-head attention stay smaller",
            "paper",
            below("the largest logit on the way", "mhsa-hidden", "mhsa"),
            EXCHANGED,
        ),
        "ls": Claim(
            "hiding keys does less for the logits of LS-attention, whose local heads have few keys anyway",
            "follows from the paper's explanation",
            "the ratio of the largest logits with and without hidden keys, seed by seed, is nearer to 1 with `ls` "
            "than with `mhsa` by more than two standard errors",
            EXCHANGED,
        ),
        "gain": Claim(
            "hiding keys takes away what LS-attention gains in loss over multi-head attention",
            "follows from the paper's explanation",
            "the loss of `mhsa` less that of `ls`, seed by seed, is smaller with hidden keys than without by more "
            "than two standard errors",
            EXCHANGED,
        ),
    }
    scales = {
        "micro": Scale("micro", {"learning_rate": 3e-2, "max_steps": 600}, 3, 0.7),
        # The data loading workers make the masks, which have four million booleans for each block.
        "paper": Scale(
            "paper-v1",
            {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 16, "dataloader_num_workers": 8},
            3,
            600.0,
        ),
    }

    def arms(self, scale: str) -> Mapping[str, Any]:
        """`mhsa` and `ls`, each also with hidden keys."""
        shipped = load_arms()
        return {f"{name}{suffix}": shipped[name] for name in ("mhsa", "ls") for suffix in ("", "-hidden")}

    def change(self, trainer: Trainer, arm: str):
        """Gives the trainer the collator that hides keys."""
        if arm.endswith("-hidden"):
            trainer.data_collator = collate_with_hidden_keys

    def judge(self, runs: Runs) -> dict[str, Finding]:
        """Judges each of `claims`."""
        logits = {arm: runs.column(arm, "max_logit") for arm in self.arms(runs.scale)}
        losses = {arm: runs.column(arm, "eval_loss") for arm in logits}
        ratios = {
            name: [hidden / all_keys for hidden, all_keys in zip(logits[f"{name}-hidden"], logits[name])]
            for name in ("mhsa", "ls")
        }
        distances = {
            name: [math.inf if ratio == 0 else abs(math.log(ratio)) for ratio in of_name]
            for name, of_name in ratios.items()
        }
        gains = {suffix: differences(losses[f"mhsa{suffix}"], losses[f"ls{suffix}"]) for suffix in ("-hidden", "")}
        return {
            "mhsa": Finding(
                f"largest logit on the way {format_values(logits['mhsa-hidden'], 1)} for `mhsa-hidden`, "
                f"{format_values(logits['mhsa'], 1)} for `mhsa`",
                verdict_below(logits["mhsa-hidden"], logits["mhsa"]),
            ),
            "ls": Finding(
                f"ratio {format_values(ratios['ls'], 2)} with `ls`, {format_values(ratios['mhsa'], 2)} with `mhsa`",
                verdict_below(distances["ls"], distances["mhsa"]),
            ),
            "gain": Finding(
                f"`mhsa` less `ls` is {format_values(gains['-hidden'])} nats with hidden keys, "
                f"{format_values(gains[''])} without",
                verdict_below(gains["-hidden"], gains[""]),
            ),
        }

    def report(self, runs: Runs, folder: Path) -> str:
        """Final figures, and the largest logit over time and by kind of head."""
        by_kind = [
            [
                f"`{arm}`",
                *(
                    format_values((_largest(run, kind) for run in of_arm if f"max_logit_{kind}" in run["curves"]), 1)
                    for kind in ("global", "local")
                ),
            ]
            for arm, of_arm in runs.items()
        ]
        curves = {arm: [points(run["curves"]["max_logit"]) for run in of_arm] for arm, of_arm in runs.items()}
        plot_curves(folder / "max_logit.png", curves, "optimizer step", "largest |logit|", log_y=True)
        return f"""{results_table(runs)}

![Largest attention logit over the training](max_logit.png)

### Largest logit on the way, by kind of head

{table(by_kind, ["arm", "global heads", "local heads"])}"""


STUDY = SparseDependencies()


def _largest(run: dict, kind: str) -> float:
    """The largest logit of one kind of head during training; NaN if one is not finite."""
    values = [value for _, value in points(run["curves"][f"max_logit_{kind}"])]
    return math.nan if any(map(math.isnan, values)) else max(values)


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
