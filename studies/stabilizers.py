"""How do known remedies for exploding logits compare with Long Short-attention, and do they add to it?"""

from .learning_rates import AT_BEST, LearningRates, compare_losses
from .study import EXCHANGED, Claim, Finding, Runs, Scale, below


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
            "at the best rate of each, no stabilizer lowers the mean loss of `ls` by more than two standard errors",
            "one of them does",
        ),
    }
    scales = {
        "micro": Scale("micro", {"max_steps": 600}, 3, 3.0),
        "paper": Scale("paper-v1", {"max_steps": 50_000, "stop_at_step": None}, 3, 4000.0),
    }
    rates = (3e-3, 1e-2, 3e-2)
    names = ("mhsa", "ls", *(f"{kind}-{method}" for kind in ("mhsa", "ls") for method in METHODS))

    def judge(self, runs: Runs) -> dict[str, Finding]:
        """Judges each of `claims`."""
        best, losses = self._best(runs)
        strongest = {
            kind: min((f"{kind}-{method}" for method in METHODS), key=lambda name: sum(losses[name]))
            for kind in ("mhsa", "ls")
        }
        added = compare_losses(losses, strongest["ls"], "ls", best)
        return {
            "instead": compare_losses(losses, "ls", strongest["mhsa"], best),
            "on-top": added._replace(verdict="opposite" if added.verdict == "seen" else "seen"),
        }


STUDY = Stabilizers()
