"""Does the benefit of LS-attention depend on learned positions?"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .study import Claim, Finding, Runs, Scale, TrainingStudy, format_values, results_table, verdict_below


KINDS = ("learned", "sinusoidal", "rope", "none")


class Positions(TrainingStudy):
    """Multi-head and LS-attention with each kind of position embeddings."""

    name = "positions"
    title = "Positions"
    question = """\
The paper has learned absolute positions only. Reviewers asked whether its results are about them: do rotary positions,
which themselves favour near tokens, or none at all leave anything for LS-attention to improve?"""
    protocol = """\
Both models are trained with every kind of positions at the same learning rate, that of the recipe. The advantage is
the final loss of `mhsa` less that of `ls`, in nats per token, for each seed."""
    claims = {
        "any-positions": Claim(
            "LS-attention has the lower loss with any kind of positions",
            "reviewers",
            "with each of the four, the mean loss of `ls` is below that of `mhsa` by more than two standard errors",
            "with each of the four, it is above by more than two standard errors",
        ),
        "logits": Claim(
            "LS-attention has the smaller logits with any kind of positions",
            "reviewers",
            "with each of the four, the mean of the largest logits of `ls` is below that of `mhsa` by more than two "
            "standard errors",
            "with each of the four, it is above by more than two standard errors",
        ),
    }
    scales = {
        "micro": Scale("micro", {"max_steps": 600}, 3, 0.5),
        "paper": Scale("paper-v1", {}, 3, 2000.0),
    }

    def arms(self, scale: str) -> Mapping[str, Any]:
        """`ls` and `mhsa` with each kind of position embeddings."""
        return {
            f"{name}-{kind}": {"config_overrides": {"position_embedding_type": kind, **heads}}
            for kind in KINDS
            for name, heads in (("mhsa", {"num_global_heads": "all"}), ("ls", {}))
        }

    def judge(self, runs: Runs) -> dict[str, Finding]:
        """Judges each of `claims`."""
        return {
            claim: self._judge(runs, key, digits)
            for claim, key, digits in (("any-positions", "eval_loss", 3), ("logits", "max_logit", 1))
        }

    def _judge(self, runs: Runs, key: str, digits: int) -> Finding:
        verdicts, figures = set(), []
        for kind in KINDS:
            ours, theirs = runs.column(f"ls-{kind}", key), runs.column(f"mhsa-{kind}", key)
            verdicts.add(verdict_below(ours, theirs))
            figures.append(f"{kind} {format_values(ours, digits)} against {format_values(theirs, digits)}")
        what = {"eval_loss": "loss", "max_logit": "largest logit"}[key]
        verdict = verdicts.pop() if len(verdicts) == 1 else "not seen"
        return Finding(f"{what} of `ls` against `mhsa`: {'; '.join(figures)}", verdict)

    def report(self, runs: Runs, folder: Path) -> str:
        """A table of the final figures."""
        return results_table(runs)


STUDY = Positions()
