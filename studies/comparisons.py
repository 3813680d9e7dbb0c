"""
Comparisons as data: what is compared with what. One judge decides all of them, and the criterion is worded from the
same data, so that it cannot differ from what is decided.

Comparisons of two arms are paired over seeds: the effect is the mean of the differences, and its interval has the
quantiles of Student's t distribution.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
from scipy import optimize, stats


SUPPORTED, CONTRADICTED, INCONCLUSIVE, OPEN = "supported", "contradicted", "inconclusive", "open"

CONFIDENCE = 0.95
POWER = 0.8

NEGLIGIBLE = 0.05
"""Margin of comparisons of losses, in nats per token, unless a study says otherwise."""

Runs = Mapping[str, Sequence[dict]]
"""The values of the runs of each arm, with their `seed`."""


class Finding(NamedTuple):
    """What the runs say about a claim."""

    verdict: str
    """`supported`, `contradicted`, `equal within x`, `inconclusive`, or `open` if runs are missing."""
    figure: str = "too few runs so far"
    """The values behind the verdict, with their spread over seeds."""
    effect: float = math.nan
    """The mean difference, first less second."""
    low: float = math.nan
    high: float = math.nan
    """The ends of its 95% interval."""
    num_seeds: int = 0

    def format_effect(self, digits: int = 3) -> str:
        """The effect with its interval; empty where there is none."""
        if not math.isfinite(self.effect):
            return ""
        interval = f" (95% interval {self.low:.{digits}f} to {self.high:.{digits}f})"
        return f"{self.effect:+.{digits}f}" + (interval if math.isfinite(self.low) else "")


class Metric(NamedTuple):
    """A number that every run has."""

    words: str
    """What it is, as the subject of a sentence: "the final validation loss"."""
    read: str | Callable[[dict], float | None]
    """Key of the run's values, with dots between keys and indices of what is nested; or a function of the values."""
    digits: int = 3
    is_loss: bool = False
    """Whether a run that diverged has an infinite value, whatever was measured on its last weights."""

    def of(self, run: dict[str, Any]) -> float:
        """The value for a run; infinite where JSON has null, which stands for NaN and infinity."""
        if self.is_loss and run.get("diverged"):
            return math.inf
        if callable(self.read):
            value: Any = self.read(run)
        else:
            value = run
            for key in self.read.split("."):
                value = value[int(key)] if isinstance(value, list) else value and value[key]
        return math.inf if value is None or math.isnan(value) else float(value)


LOSS = Metric("the final validation loss", "eval_loss", 3, is_loss=True)
LOGIT = Metric("the largest logit on the way", "max_logit", 1)
DOUBLINGS = Metric("the base-2 logarithm of the largest logit on the way", lambda run: math.log2(LOGIT.of(run)), 2)


class Best(NamedTuple):
    """The best of several arms, such as a model at its best rate: the one whose values have the lowest `score`."""

    name: str
    arms: tuple[str, ...]
    metric: Metric = LOSS
    score: Callable[[list[float]], Any] = statistics.fmean
    what: str = "at its best rate"

    def choose(self, runs: Runs) -> str:
        """The name of the best arm. An arm that has not been run raises `KeyError`."""
        return min(self.arms, key=lambda arm: self.score([self.metric.of(run) for run in runs[arm]]))


class Across(NamedTuple):
    """A number from several arms with the same seed, such as the difference of two."""

    words: str
    """What it is, after "of": "`ls` less `mhsa`"."""
    arms: tuple[str, ...]
    combine: Callable[[list[float]], float]


def less(first: str, second: str) -> Across:
    """The difference of two arms."""
    return Across(f"`{first}` less `{second}`", (first, second), lambda values: values[0] - values[1])


Side = str | Best | Across | float
"""An arm, the best of several, a number from several arms, or a number."""


def name_of(side: Side) -> str:
    """A side in words."""
    if isinstance(side, Across):
        return side.words
    if isinstance(side, Best):
        return f"`{side.name}` {side.what}"
    return f"`{side}`" if isinstance(side, str) else f"{side:g}"


@dataclass(frozen=True)
class Comparison:
    """
    A claim that one arm is below another in a metric, or that they are equal within a margin.

    The difference is `first - second`, for every seed with which both have been run. With `equal=False`, the claim
    that `first` is below is supported if the interval of the mean difference lies below 0, and contradicted if it lies
    above; it is equal within `margin` if the interval lies inside `(-margin, margin)`; otherwise, it is inconclusive.
    With `equal=True`, the claim is equality, and contradicted if the interval excludes 0 and is not inside the margin.
    """

    source: str
    """Who makes the claim."""
    metric: Metric
    first: Side
    second: Side
    claim: str = ""
    """The claim in words, where those made from the comparison are not enough."""
    _: KW_ONLY
    second_metric: Metric | None = None
    """The metric of `second`, if it is another one."""
    equal: bool = False
    margin: float | None = None
    gate: "Comparison | None" = None
    """A comparison that must be supported, or else nothing is said here."""

    def statement(self) -> str:
        """What is compared, in words."""
        other = self.second_metric or self.metric
        of = "" if isinstance(self.first, float | int) else f"{self.metric.words} of "
        against = name_of(self.second)
        if not isinstance(self.second, float | int):
            against = f"that of {against}" if other == self.metric and of else f"{other.words} of {against}"
        relation = f"within {self.margin:g} of" if self.equal else "below"
        return f"{of}{name_of(self.first)} is {relation} {against}"

    def criterion(self) -> str:
        """When the claim counts as supported, and when as contradicted."""
        start = f"{self.statement()}: the 95% interval of the difference, paired over seeds, lies"
        if self.equal:
            text = f"Equal: {start} inside ±{self.margin:g}. "
            text += "Contradicted: the interval excludes 0 and does not lie inside."
        else:
            text = f"Supported: {start} below 0. Contradicted: it lies above 0."
            if self.margin is not None:
                text += f" Equal within {self.margin:g}: it includes 0 and lies inside ±{self.margin:g}."
        return text + _word_gate(self.gate)

    def judge(self, runs: Runs) -> Finding:
        """Decides by the runs."""
        metrics = (self.metric, self.second_metric or self.metric)
        try:
            sides = [_values(side, metric, runs) for side, metric in zip((self.first, self.second), metrics)]
        except KeyError:
            return Finding(OPEN)
        seeds = sorted(set.intersection(*(set(values) for _, values in sides if values is not None)))
        if not seeds:
            return Finding(OPEN)
        first, second = ([side if values is None else values[seed] for seed in seeds] for side, values in sides)
        figures = []
        for values, metric, (arm, by_seed) in zip((first, second), metrics, sides):
            if by_seed is not None:
                what = f", {metric.words.rstrip(',')}" if self.second_metric else ""
                figures.append(f"{format_values(values, metric.digits)} for {arm}{what}")
        finding = decide(first, second, self.equal, self.margin)._replace(figure=", ".join(figures))
        return _pass_gate(self.gate, runs, finding)


class Limit(NamedTuple):
    """A bound that every run of an arm keeps."""

    arm: str
    metric: Metric
    above: float | None = None
    below: float | None = None

    def criterion(self) -> str:
        """The bound in words."""
        named = (("above", self.above), ("below", self.below))
        bounds = [f"{word} {value:g}" for word, value in named if value is not None]
        return f"{self.metric.words} of `{self.arm}` is {' and '.join(bounds)}"

    def holds(self, run: dict[str, Any]) -> bool:
        """Whether a run keeps it."""
        value = self.metric.of(run)
        return (self.above is None or value > self.above) and (self.below is None or value < self.below)


@dataclass(frozen=True)
class Bounds:
    """A claim with absolute criteria: supported if all limits hold in all seeds, contradicted if in none all do."""

    source: str
    limits: tuple[Limit, ...]
    claim: str = ""
    gate: Comparison | None = None

    def statement(self) -> str:
        """The bounds in words."""
        return " and ".join(limit.criterion() for limit in self.limits)

    def criterion(self) -> str:
        """When the claim counts as supported, and when as contradicted."""
        return f"Supported: in all seeds, {self.statement()}. Contradicted: in no seed.{_word_gate(self.gate)}"

    def judge(self, runs: Runs) -> Finding:
        """Decides by the runs."""
        if any(limit.arm not in runs for limit in self.limits):
            return Finding(OPEN)
        by_seed = [{run["seed"]: limit.holds(run) for run in runs[limit.arm]} for limit in self.limits]
        holds = [all(each[seed] for each in by_seed) for seed in set.intersection(*map(set, by_seed))]
        if not holds:
            return Finding(OPEN)
        figure = "; ".join(
            f"{limit.metric.words} of `{limit.arm}` "
            + format_values([limit.metric.of(run) for run in runs[limit.arm]], limit.metric.digits)
            for limit in self.limits
        )
        verdict = INCONCLUSIVE
        if len(holds) > 1:
            verdict = SUPPORTED if all(holds) else INCONCLUSIVE if any(holds) else CONTRADICTED
        return _pass_gate(self.gate, runs, Finding(verdict, figure, num_seeds=len(holds)))


def _word_gate(gate: Comparison | None) -> str:
    return "" if gate is None else f' Nothing is said unless this is supported: "{gate.claim}".'


def _pass_gate(gate: Comparison | None, runs: Runs, finding: Finding) -> Finding:
    """The finding if the gate is supported; otherwise, one that says nothing."""
    if gate is None or (verdict := gate.judge(runs).verdict) == SUPPORTED:
        return finding
    figure = f'{finding.figure}; "{gate.claim}" is {verdict}'
    return finding._replace(verdict=OPEN if verdict == OPEN else INCONCLUSIVE, figure=figure)


@dataclass(frozen=True)
class Sooner:
    """
    A claim that `first` reaches a goal sooner than `second`, decided by the log-rank test, which takes runs that never
    reached it for what they are. The probabilities are exact: those of all ways to divide the runs into two arms.
    """

    source: str
    metric: Metric
    """The steps that were needed; more than `cap` stands for a run that was stopped before."""
    first: Best
    second: Best
    cap: float
    claim: str = ""

    def statement(self) -> str:
        """What is compared, in words."""
        return f"{name_of(self.first)} needs fewer steps than {name_of(self.second)}"

    def criterion(self) -> str:
        """When the claim counts as supported, and when as contradicted."""
        return (
            f"Supported: {self.statement()} by the log-rank test over seeds (two-sided exact p < "
            f"{1 - CONFIDENCE:.2g}; runs that have not got there after {self.cap:,.0f} steps are censored). "
            "Contradicted: more steps by the same test."
        )

    def judge(self, runs: Runs) -> Finding:
        """Decides by the runs."""
        try:
            arms = [side.choose(runs) for side in (self.first, self.second)]
        except (KeyError, statistics.StatisticsError):
            return Finding(OPEN)
        first, second = ([self.metric.of(run) for run in runs[arm]] for arm in arms)
        num_seeds = min(len(first), len(second))
        if num_seeds < 2:
            return Finding(OPEN)
        statistic, p = log_rank(first, second, self.cap)
        decided = SUPPORTED if statistic > 0 else CONTRADICTED
        medians = [
            f"median {format_steps(statistics.median(steps), self.cap)} for `{arm}`"
            for arm, steps in zip(arms, (first, second))
        ]
        figure = f"{', '.join(medians)}; p = {p:.2g}"
        return Finding(decided if p < 1 - CONFIDENCE else INCONCLUSIVE, figure, num_seeds=num_seeds)


Claim = Comparison | Bounds | Sooner


def title_of(item: Claim) -> str:
    """A claim in words."""
    return item.claim or item.statement()


def format_steps(steps: float, cap: float) -> str:
    """Steps in words: runs that were stopped have needed more than `cap`."""
    return f"more than {cap:,.0f} steps" if steps > cap else f"{steps:,.0f} steps"


def log_rank(first: Sequence[float], second: Sequence[float], cap: float) -> tuple[float, float]:
    """
    The log-rank test of two groups of times; those above `cap` are censored there. (SciPy's has no exact p-value.)

    Returns:
        The observed events less those expected in the first group if both are equal: positive if the first group is
        sooner; and the exact two-sided p-value, the share of all divisions of the times into groups of these sizes
        whose statistic is at least as large.
    """
    times = np.array([*first, *second], dtype=float)
    events = np.unique(times[times <= cap])
    at_risk, happens = times >= events[:, None], times == events[:, None]
    hazard = happens.sum(1) / at_risk.sum(1)
    scores = happens.sum(0) - (hazard[:, None] * at_risk).sum(0)  # of each run; they add up to 0
    observed = scores[: len(first)].sum()
    sums = np.array([scores[list(chosen)].sum() for chosen in combinations(range(len(times)), len(first))])
    return float(observed), float((np.abs(sums) >= abs(observed) - 1e-9).mean())


def decide(first: Sequence[float], second: Sequence[float], equal: bool, margin: float | None) -> Finding:
    """The verdict on differences `first - second` of the same seeds; see `Comparison`."""
    num_seeds = len(first)
    if not all(map(math.isfinite, (*first, *second))):
        ends = [{math.isfinite(value) for value in values} for values in (first, second)]
        verdict = INCONCLUSIVE  # one run that diverged decides nothing
        if num_seeds > 1 and ends in ([{True}, {False}], [{False}, {True}]):
            verdict = CONTRADICTED if equal or ends[0] == {False} else SUPPORTED
        return Finding(verdict, num_seeds=num_seeds)
    differences = [a - b for a, b in zip(first, second)]
    effect = statistics.fmean(differences)
    if num_seeds < 2:
        return Finding(INCONCLUSIVE, effect=effect, num_seeds=num_seeds)
    half = half_width(differences)
    low, high = effect - half, effect + half
    undecided = INCONCLUSIVE
    is_inside = margin is not None and -margin < low and high < margin
    if is_inside:
        undecided = f"equal within {margin:g}"
    if equal:
        verdict = undecided if is_inside or low <= 0 <= high else CONTRADICTED
    else:
        verdict = SUPPORTED if high < 0 else CONTRADICTED if low > 0 else undecided
    return Finding(verdict, effect=effect, low=low, high=high, num_seeds=num_seeds)


def _values(side: Side, metric: Metric, runs: Runs) -> tuple[Any, dict[int, float] | None]:
    """The arm of a side and its values by seed, or the number that it is."""
    if isinstance(side, float | int):
        return float(side), None
    if isinstance(side, Across):
        by_arm = [{run["seed"]: metric.of(run) for run in runs[arm]} for arm in side.arms]
        seeds = set.intersection(*map(set, by_arm))
        return side.words, {seed: side.combine([values[seed] for values in by_arm]) for seed in seeds}
    arm = side.choose(runs) if isinstance(side, Best) else side
    return f"`{arm}`", {run["seed"]: metric.of(run) for run in runs[arm]}


def format_values(values: Sequence[float | None], digits: int = 3) -> str:
    """Formats the mean ± sample standard deviation of the finite values, and the number of values that are not."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    if not finite:
        return "not finite" if values else "-"
    spread = f" ± {statistics.stdev(finite):,.{digits}f}" if len(finite) > 1 else ""
    lost = f" ({len(values) - len(finite)} not finite)" if len(finite) < len(values) else ""
    return f"{statistics.fmean(finite):,.{digits}f}{spread}{lost}"


def half_width(values: Sequence[float]) -> float:
    """Half of the width of the 95% interval of the mean (Student's t) of at least two values."""
    quantile = stats.t.ppf(0.5 + CONFIDENCE / 2, len(values) - 1)
    return float(quantile) * statistics.stdev(values) / math.sqrt(len(values))


def smallest_effect(num_seeds: int) -> float:
    """
    The mean difference, in standard deviations of the differences, whose interval excludes 0 on the right side with
    the probability `POWER`, for at least two seeds.
    """
    freedom = num_seeds - 1
    limit = stats.t.ppf(0.5 + CONFIDENCE / 2, freedom)

    def excess(effect: float) -> float:
        return stats.nct.sf(limit, freedom, effect * math.sqrt(num_seeds)) - POWER

    return optimize.brentq(excess, 0.01, 100.0)
