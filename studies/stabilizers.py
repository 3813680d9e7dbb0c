"""How do known remedies for exploding logits compare with Long Short-attention, and do they add to it?"""

from .learning_rates import AT_BEST, LearningRates
from .study import (
    EXCHANGED,
    Claim,
    Finding,
    Runs,
    Scale,
    below,
    compare_losses,
    format_values,
    is_below,
    is_no_lower,
    no_lower,
)


METHODS = ("qknorm", "softcap", "zloss", "qkclip", "adagc")


class Stabilizers(LearningRates):
    """`LearningRates` for both kinds of attention, without stabilizers and with each of them."""

    name = "stabilizers"
    title = "Stabilizers beside LS-attention"
    question = """\
Reviewers asked how LS-attention compares with the usual remedies for exploding logits and loss spikes:
QK-norm, soft-capping, z-loss, QK-clip and AdaGC. Is it an alternative to them, and do they add to it?"""
    protocol = f"""\
{LearningRates.protocol}

Stabilizers have their published defaults, see docs/training.md. The logits are those before soft-capping."""
    claims = {
        "instead": Claim(
            "LS-attention alone does what stabilizers do for multi-head attention",
            "paper and reviewers",
            below(AT_BEST, "ls", "mhsa with the best stabilizer"),
            EXCHANGED,
        ),
        "on-top": Claim(
            "stabilizers add nothing to LS-attention",
            "reviewers",
            "at the best rate of each, " + no_lower("`ls` with any of the stabilizers", "`ls`"),
            "at the best rate of each, one of them lowers the mean loss of `ls` by more than two standard errors",
        ),
    }
    scales = {
        "micro": Scale("micro", {"max_steps": 600}, 3, 2.4),
        "paper": Scale("paper-v1", {"max_steps": 50_000, "stop_at_step": None}, 3, 4000.0),
    }
    rates = (3e-3, 1e-2, 3e-2)
    names = ("mhsa", "ls", *(f"{kind}-{method}" for kind in ("mhsa", "ls") for method in METHODS))

    def judge(self, runs: Runs) -> dict[str, Finding]:
        """Judges each of `claims`."""
        best, losses = self._best(runs)
        strongest = min((f"mhsa-{method}" for method in METHODS), key=lambda name: sum(losses[name]))
        with_stabilizers = [losses[f"ls-{method}"] for method in METHODS]
        verdict = "not seen"
        if any(is_below(values, losses["ls"]) for values in with_stabilizers):
            verdict = "opposite"
        elif all(is_no_lower(values, losses["ls"]) for values in with_stabilizers):
            verdict = "seen"
        names = ("ls", *(f"ls-{method}" for method in METHODS))
        figure = "loss " + ", ".join(f"{format_values(losses[x])} for `{x}` (rate {best[x]:g})" for x in names)
        return {
            "instead": compare_losses(losses, "ls", strongest, best),
            "on-top": Finding(figure, verdict),
        }


STUDY = Stabilizers()
