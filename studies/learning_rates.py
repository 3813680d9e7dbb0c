"""Do Long Short-attention's losses and logits depend less on the learning rate?"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lsgpt.configuration import load_arms
from lsgpt.training.plots import plot_curves
from lsgpt.utilities import table

from .study import (
    EXCHANGED,
    Claim,
    Finding,
    NotRunError,
    Runs,
    Scale,
    TrainingStudy,
    below,
    compare_losses,
    curves_over,
    format_values,
    mean,
    number,
    verdict_below,
)


AT_BEST = "at the best rate of each, the mean loss"


class LearningRates(TrainingStudy):
    """Final loss and largest logit over learning rates, after the protocol of arXiv:2309.14322."""

    name = "learning-rates"
    title = "Learning rates"
    question = """\
The paper trains at one learning rate. Instabilities of large models show in small ones, too, at higher
rates (arXiv:2309.14322). How do the final loss and the largest attention logit depend on the rate?"""
    protocol = """\
Every arm is trained at every rate: `mhsa` has global heads only (six in each layer at `micro`), `ls` one global
head and the rest local, `ls-sinks` the same with a learned sink for each local head, `local-only` no global head.
The sensitivity of an arm is the mean over rates of the final loss (at most the one before training) less the arm's
best, in nats. A run has diverged when its loss became not finite or ended above where it began. The spike score is
the share of steps whose loss is more than six standard deviations above the mean of the 128 steps before."""
    claims = {
        "lower-loss": Claim(
            "LS-attention reaches a lower loss than multi-head attention",
            "paper",
            below(AT_BEST, "ls", "mhsa"),
            EXCHANGED,
        ),
        "smaller-logits": Claim(
            "LS-attention keeps the attention logits small where those of multi-head attention explode",
            "paper",
            "at the lowest rate at which a logit of `mhsa` passes 100 in all seeds, the largest logit of `ls` stays "
            "below 100 in all seeds",
            "at that rate the mean of the largest logits of `ls` is above that of `mhsa`",
        ),
        "less-sensitive": Claim(
            "LS-attention is less sensitive to the learning rate",
            "paper: it trains where multi-head attention diverges",
            below("the sensitivity", "ls", "mhsa"),
            EXCHANGED,
        ),
        "global-head": Claim(
            "without a global head the loss is higher",
            "paper: 15 to 20% of perplexity",
            below(AT_BEST, "ls", "local-only"),
            EXCHANGED,
        ),
        "sinks": Claim(
            "learned sinks for local heads lower the loss of LS-attention",
            "ours",
            below(AT_BEST, "ls-sinks", "ls"),
            EXCHANGED,
        ),
    }
    scales = {
        "micro": Scale("micro", {"max_steps": 600}, 3, 1.3),
        "paper": Scale("paper-v1", {"max_steps": 50_000, "stop_at_step": None}, 3, 2400.0),
    }
    rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
    names: tuple[str, ...] = ("mhsa", "ls", "ls-sinks", "local-only")

    def arms(self, scale: str) -> Mapping[str, Any]:
        """Recipe fields of every arm at every rate."""
        shipped = load_arms()
        rates = self.rates if scale == "micro" else tuple(rate / 10 for rate in self.rates)
        return {
            arm_at(name, rate): {**shipped[name], "learning_rate": rate, **_floor(rate, scale)}
            for rate in rates
            for name in self.names
        }

    def judge(self, runs: Runs) -> dict[str, Finding]:
        """Judges each of `claims`."""
        best, losses = self._best(runs)
        findings = {
            claim: compare_losses(losses, first, second, best)
            for claim, first, second in (
                ("lower-loss", "ls", "mhsa"),
                ("global-head", "ls", "local-only"),
                ("sinks", "ls-sinks", "ls"),
            )
        }
        findings["smaller-logits"] = self._judge_logits(runs)
        ours, theirs = (sensitivity(runs, name, self._rates_of(runs)) for name in ("ls", "mhsa"))
        figure = f"sensitivity {format_values(ours)} for `ls`, {format_values(theirs)} for `mhsa`"
        findings["less-sensitive"] = Finding(figure, verdict_below(ours, theirs))
        return findings

    def _best(self, runs: Runs) -> tuple[dict[str, float], dict[str, list[float]]]:
        """The best rate of each name, and the final losses at that rate."""
        rates = self._rates_of(runs)
        if len(rates) < len(self.rates):
            raise NotRunError("some of the rates")
        best = {name: best_rate(runs, name, rates) for name in self.names}
        return best, {name: runs.column(arm_at(name, best[name]), "eval_loss") for name in self.names}

    def _judge_logits(self, runs: Runs) -> Finding:
        for rate in self._rates_of(runs):
            theirs, ours = (runs.column(arm_at(name, rate), "max_logit") for name in ("mhsa", "ls"))
            if min(theirs) > 100:
                figure = (
                    f"at rate {rate:g}, the largest logit on the way is {format_values(ours, 0)} with `ls` and "
                    f"{format_values(theirs, 0)} with `mhsa`"
                )
                verdict = "opposite" if sum(ours) > sum(theirs) else "not seen"
                return Finding(figure, "seen" if max(ours) < 100 else verdict)
        return Finding("no logit of `mhsa` passed 100 in all seeds at any rate", "open")

    def _rates_of(self, runs: Runs) -> list[float]:
        return sorted({float(arm.split("-lr")[1]) for arm in runs})

    def report(self, runs: Runs, folder: Path) -> str:
        """Tables of losses, logits and spike scores, arms by rates, and plots of the first two."""
        rates = self._rates_of(runs)
        names = [name for name in self.names if any(arm_at(name, rate) in runs for rate in rates)]
        sections = [
            f"## {title}\n\n{self._table(runs, names, rates, key, digits)}"
            for title, key, digits in (
                ("Final validation loss (nats per token)", "eval_loss", 3),
                ("Largest logit on the way", "max_logit", 0),
                ("Spike score (share of steps)", "spike_score", 4),
            )
        ]
        for file, key, label in (
            ("loss.png", "eval_loss", "final validation loss (nats per token)"),
            ("max_logit.png", "max_logit", "largest |logit| on the way"),
        ):
            curves = {name: curves_over(runs, [(rate, arm_at(name, rate)) for rate in rates], key) for name in names}
            log_y = key == "max_logit"
            plot_curves(folder / file, curves, "learning rate", label, log_x=True, log_y=log_y, log_base=10)
            sections.append(f"![{label} over the learning rate]({file})")
        return "\n\n".join(section.replace("## ", "### ", 1) for section in sections)

    def _table(self, runs: Runs, names: list[str], rates: list[float], key: str, digits: int) -> str:
        rows = []
        for name in names:
            cells = []
            for rate in rates:
                of_arm = runs.get(arm_at(name, rate), [])
                diverged = sum(run["diverged"] for run in of_arm)
                note = f", {diverged} of {len(of_arm)} diverged" if diverged else ""
                cells.append(format_values((run[key] for run in of_arm), digits) + note)
            rows.append([f"`{name}`", *cells])
        return table(rows, ["arm", *(f"{rate:g}" for rate in rates)])


STUDY = LearningRates()


def arm_at(name: str, rate: float) -> str:
    """The name of an arm at a learning rate."""
    return f"{name}-lr{rate:g}"


def _floor(rate: float, scale: str) -> dict:
    """The end of the cosine, a tenth of the rate, for the recipe that sets it as an absolute value."""
    return {} if scale == "micro" else {"lr_scheduler_kwargs": {"min_lr": rate / 10}}


def best_rate(runs: Runs, name: str, rates: list[float]) -> float:
    """The rate with the lowest mean final loss, which is infinite at rates at which a seed diverged."""
    sums = {rate: sum(runs.column(arm_at(name, rate), "eval_loss")) for rate in rates}
    return min(sums, key=sums.__getitem__)


def sensitivity(runs: Runs, name: str, rates: list[float]) -> list[float]:
    """
    The sensitivity for each seed: the mean final loss over rates, each capped at the loss before training, minus the
    lowest of them (arXiv:2309.14322).
    """
    by_rate = [runs.of(arm_at(name, rate)) for rate in rates]
    values = []
    for of_seed in zip(*by_rate):
        losses = [min(number(run["eval_loss"]), run["first_loss"]) for run in of_seed]
        values.append(mean(losses) - min(losses))
    return values
