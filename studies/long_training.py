"""Do the logits of multi-head attention keep growing in a long training run, and those of LS-attention not?"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM

import lsgpt
from lsgpt.configuration import load_arms
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
    compare_losses,
    format_values,
    number,
    points,
    results_table,
    validation_blocks,
    verdict_below,
)


class LongTraining(TrainingStudy):
    """20,000 steps with the paper's schedule."""

    name = "long-training"
    title = "Long training"
    question = """\
The paper reports that the attention logits of multi-head attention grow to several hundreds, and that
its training diverges after 20,000 to 30,000 steps, while LS-attention stays below 50. Does a small model that
is trained for as many steps show it?"""
    protocol = """\
The schedule is the paper's: a warm-up, then a cosine of which only the beginning is used, so that
the learning rate hardly falls. The paper's rate of 6e-4 is multiplied by the ratio of the hidden sizes (192 / 48),
because smaller models are trained at higher rates. Growth is the largest logit in the last tenth of the steps
over the largest in the second tenth. In the runs at `micro`, `mhsa` with seed 42 was interrupted once, and resumed
from step 12,000."""
    claims = {
        "no-explosion": Claim(
            "in a long training the logits of multi-head attention explode, and those of LS-attention do not",
            "paper: above 200 and below 50",
            "in all seeds, the largest logit on the way is above 200 with `mhsa` and below 50 with `ls`",
            "in all seeds it is larger with `ls` than with `mhsa`, and above 50",
        ),
        "no-growth": Claim(
            "the logits of multi-head attention keep growing, and those of LS-attention do not",
            "paper",
            below("the growth", "ls", "mhsa"),
            EXCHANGED,
        ),
        "divergence": Claim(
            "multi-head attention diverges in a long training, and LS-attention does not",
            "paper: after 20,000 to 30,000 steps",
            "all runs of `mhsa` diverge and none of `ls`",
            "all runs of `ls` diverge and none of `mhsa`",
        ),
        "lower-loss": Claim(
            "after a long training LS-attention has the lower loss",
            "paper",
            below("the mean loss", "ls", "mhsa"),
            EXCHANGED,
        ),
    }
    scales = {
        "micro": Scale(
            "micro",
            {
                "learning_rate": 2.4e-3,
                "max_steps": 240_000,
                "stop_at_step": 20_000,
                "warmup_steps": 800,
                "save_steps": 2000,
                "save_total_limit": None,
                "max_logit_every_n_steps": 20,
            },
            2,
            2.2,
        ),
        "paper": Scale("paper-v1", {"max_logit_every_n_steps": 20}, 2, 640.0),
    }

    def arms(self, scale: str) -> Mapping[str, Any]:
        """`mhsa` and `ls`."""
        shipped = load_arms()
        return {name: shipped[name] for name in ("mhsa", "ls")}

    def measure(self, folder: Path) -> dict:
        """The largest logit of every layer and head in a block of validation text, at every checkpoint."""
        by_head, ids = {}, validation_blocks(folder, 1, 512)
        for checkpoint in sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1])):
            model = AutoModelForCausalLM.from_pretrained(checkpoint)
            maxima = lsgpt.measure_max_logits(model, input_ids=ids)
            by_head[checkpoint.name.split("-")[1]] = [[round(x, 2) for x in row] for row in maxima.tolist()]
        return {"max_logits_by_head": by_head}

    def judge(self, runs: Runs) -> dict[str, Finding]:
        """Judges each of `claims`."""
        ours, theirs = (runs.column(name, "max_logit") for name in ("ls", "mhsa"))
        verdict = "not seen"
        if min(theirs) > 200 and max(ours) < 50:
            verdict = "seen"
        elif min(ours) > max(*theirs, 50):
            verdict = "opposite"
        logits = f"largest logit on the way {format_values(ours, 1)} with `ls`, {format_values(theirs, 1)} with `mhsa`"
        growth = {name: [_growth(run["curves"]["max_logit"]) for run in runs.of(name)] for name in ("ls", "mhsa")}
        diverged = {name: sum(runs.column(name, "diverged")) for name in ("ls", "mhsa")}
        total = {name: len(runs.of(name)) for name in ("ls", "mhsa")}
        divergence = "not seen"
        if (diverged["ls"], diverged["mhsa"]) in ((0, total["mhsa"]), (total["ls"], 0)):
            divergence = "seen" if diverged["mhsa"] else "opposite"
        return {
            "no-explosion": Finding(logits, verdict),
            "no-growth": Finding(
                f"growth {format_values(growth['ls'], 2)} with `ls`, {format_values(growth['mhsa'], 2)} with `mhsa`",
                verdict_below(growth["ls"], growth["mhsa"]),
            ),
            "divergence": Finding(
                " and ".join(f"{diverged[name]} of {total[name]} runs of `{name}`" for name in total) + " diverged",
                divergence,
            ),
            "lower-loss": compare_losses({name: runs.column(name, "eval_loss") for name in total}, "ls", "mhsa"),
        }

    def report(self, runs: Runs, folder: Path) -> str:
        """Final figures, loss and logits over time, and the largest logit of each head."""
        curves = {}
        for name, of_arm in runs.items():
            for kind in ("global", "local"):
                lines = [run["curves"][f"max_logit_{kind}"] for run in of_arm if f"max_logit_{kind}" in run["curves"]]
                if lines:
                    curves[f"{name}, {kind} heads"] = [points(line) for line in lines]
        plot_curves(folder / "max_logit.png", curves, "optimizer step", "largest |logit|", log_y=True)
        losses = {name: [points(run["curves"]["loss"]) for run in of_arm] for name, of_arm in runs.items()}
        plot_curves(folder / "loss.png", losses, "optimizer step", "training loss (nats per token)")
        by_head = [
            [f"`{name}`, seed {run['seed']}", str(layer), " ".join(f"{x:.1f}" for x in row)]
            for name, of_arm in runs.items()
            for run in of_arm
            for layer, row in enumerate(list(run["max_logits_by_head"].values())[-1])
        ]
        return f"""{results_table(runs)}

![Largest attention logit over the training](max_logit.png)

![Training loss](loss.png)

### By layer and head

The largest logit of each head at the last checkpoint, on a block of validation text; global heads first.

{table(by_head, ["run", "layer", "heads"])}"""


STUDY = LongTraining()


def _growth(curve: list) -> float:
    """The largest value of the last tenth divided by that of the second; infinite if training diverged after that."""
    tenth = max(1, len(curve) // 10)
    early, late = (max(number(value) for _, value in part) for part in (curve[tenth : 2 * tenth], curve[-tenth:]))
    return late / early
