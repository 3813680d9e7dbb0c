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
from functools import cache
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
from scipy import optimize, stats


SUPPORTED, CONTRADICTED, INCONCLUSIVE, OPEN = "supported", "contradicted", "inconclusive", "open"

CONFIDENCE = 0.95
POWER = 0.8

NEGLIGIBLE = 0.05
"""Margin of comparisons of losses, in nats per token, unless a study says otherwise."""


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


class Metric(NamedTuple):
    """A number that every run has."""

    words: str
    """What it is, as the subject of a sentence: "the final validation loss"."""
    read: str | Callable[[dict], float | None]
    """Key of the run's values, with dots between the keys of nested dictionaries; or a function of the values."""
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
                value = None if value is None else value[key]
        return math.inf if value is None or math.isnan(value) else float(value)


LOSS = Metric("the final validation loss", "eval_loss", 3, is_loss=True)
LOGIT = Metric("the largest logit on the way", "max_logit", 1)
DOUBLINGS = Metric(
    "the base-2 logarithm of the largest logit on the way",
    lambda run: math.inf if run["max_logit"] is None else math.log2(run["max_logit"]),
    2,
)


class Best(NamedTuple):
    """The best of several arms: the one with the lowest mean of `metric`, such as a model at its best rate."""

    name: str
    arms: tuple[str, ...]
    metric: Metric = LOSS
    sign: int = 1
    """-1 if the highest mean is the best."""
    what: str = "at its best rate"

    def choose(self, runs: Mapping[str, Sequence[dict]]) -> str:
        """The name of the best arm. An arm that has not been run raises `KeyError`."""
        means = {arm: self.sign * statistics.fmean(self.metric.of(run) for run in runs[arm]) for arm in self.arms}
        return min(means, key=means.__getitem__)


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

    claim: str
    source: str
    """Who makes the claim."""
    metric: Metric
    first: Side
    second: Side
    _: KW_ONLY
    second_metric: Metric | None = None
    """The metric of `second`, if it is another one."""
    equal: bool = False
    margin: float | None = None
    spread: float | None = None
    """Standard deviation of the differences in earlier runs, for the smallest effect that can be seen."""
    spread_from: str = ""
    gate: "Comparison | None" = None
    """A comparison that must be supported, or else nothing is said here."""

    def criterion(self) -> str:
        """When the claim counts as supported, and when as contradicted."""
        other = self.second_metric or self.metric
        of = "" if isinstance(self.first, float | int) else f"{self.metric.words} of "
        subject = f"{of}{name_of(self.first)}"
        against = name_of(self.second)
        if not isinstance(self.second, float | int):
            against = f"that of {against}" if other == self.metric and of else f"{other.words} of {against}"
        if isinstance(self.margin, float | int):
            margin = f"{self.margin:g}"
        pairs = "the difference, paired over seeds,"
        if self.equal:
            text = (
                f"Equal: {subject} is within {margin} of {against}: the 95% interval of {pairs} lies inside "
                f"±{margin}. Contradicted: the interval excludes 0 and does not lie inside."
            )
        else:
            text = (
                f"Supported: {subject} is below {against}: the 95% interval of {pairs} lies below 0. "
                "Contradicted: it lies above 0."
            )
            if self.margin is not None:
                text += f" Equal within {margin}: it includes 0 and lies inside ±{margin}."
        if self.gate is not None:
            text += f' Nothing is said unless this is supported: "{self.gate.claim}".'
        return text

    def power(self, num_seeds: int) -> str:
        """The smallest effect that `num_seeds` can be expected to show."""
        if self.spread is None:
            return f"No earlier run tells the spread; {_needed(num_seeds)}."
        num_seeds = max(num_seeds, 2)
        effect = smallest_effect(num_seeds, self.spread)
        return (
            f"With {num_seeds} seeds and a standard deviation of the differences of {self.spread:g} "
            f"({self.spread_from}), a difference of {effect:.2g} is found with a probability of {POWER:.0%}."
        )

    def judge(self, runs: Mapping[str, Sequence[dict]]) -> Finding:
        """Decides by the runs, `{arm: values of each run}` with a `seed` in each."""
        try:
            sides = [_values(side, metric, runs) for side, metric in self._sides()]
        except KeyError:
            return Finding(OPEN)
        seeds = sorted(set.intersection(*(set(values) for _, values in sides if values is not None)))
        if not seeds:
            return Finding(OPEN)
        by_seed = [[values[seed] if values is not None else side for seed in seeds] for side, values in sides]
        figures = [
            f"{format_values(values, metric.digits)} for {arm}{f', {metric.words}' if self.second_metric else ''}"
            for values, (_, metric), (arm, taken) in zip(by_seed, self._sides(), sides)
            if taken is not None
        ]
        finding = decide(by_seed[0], by_seed[1], self.equal, self.margin)._replace(figure=", ".join(figures))
        if self.gate is not None and (gate := self.gate.judge(runs)).verdict != SUPPORTED:
            figure = f'{finding.figure}; "{self.gate.claim}" is {gate.verdict}'
            return finding._replace(verdict=OPEN if gate.verdict == OPEN else INCONCLUSIVE, figure=figure)
        return finding

    def _sides(self) -> list[tuple[Side, Metric]]:
        return [(self.first, self.metric), (self.second, self.second_metric or self.metric)]


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

    claim: str
    source: str
    limits: tuple[Limit, ...]
    gate: Comparison | None = None

    def criterion(self) -> str:
        """When the claim counts as supported, and when as contradicted."""
        text = " and ".join(limit.criterion() for limit in self.limits)
        text = f"Supported: in all seeds, {text}. Contradicted: in no seed."
        return text if self.gate is None else f'{text} Nothing is said unless this is supported: "{self.gate.claim}".'

    def power(self, num_seeds: int) -> str:
        """What the criterion asks of the seeds."""
        return f"All of {num_seeds} seeds have to agree."

    def judge(self, runs: Mapping[str, Sequence[dict]]) -> Finding:
        """Decides by the runs."""
        if any(limit.arm not in runs for limit in self.limits):
            return Finding(OPEN)
        by_seed = [{run["seed"]: limit.holds(run) for run in runs[limit.arm]} for limit in self.limits]
        seeds = sorted(set.intersection(*(set(each) for each in by_seed)))
        figure = "; ".join(
            f"{limit.metric.words} of `{limit.arm}` "
            + format_values([limit.metric.of(run) for run in runs[limit.arm]], limit.metric.digits)
            for limit in self.limits
        )
        if not seeds:
            return Finding(OPEN)
        holds = [all(each[seed] for each in by_seed) for seed in seeds]
        verdict = INCONCLUSIVE
        if len(seeds) > 1:
            verdict = SUPPORTED if all(holds) else INCONCLUSIVE if any(holds) else CONTRADICTED
        if self.gate is not None and (gate := self.gate.judge(runs).verdict) != SUPPORTED:
            verdict, figure = INCONCLUSIVE, f'{figure}; "{self.gate.claim}" is {gate}'
        return Finding(verdict, figure, num_seeds=len(seeds))


@dataclass(frozen=True)
class Sooner:
    """
    A claim that `first` reaches a goal sooner than `second`, decided by the log-rank test, which takes runs that never
    reached it for what they are. The probabilities are exact: those of all ways to divide the runs into two arms.
    """

    claim: str
    source: str
    metric: Metric
    """The steps that were needed; more than `cap` stands for a run that was stopped before."""
    first: Best
    second: Best
    cap: float

    def criterion(self) -> str:
        """When the claim counts as supported, and when as contradicted."""
        return (
            f"Supported: {name_of(self.first)} needs fewer steps than {name_of(self.second)} by the log-rank test "
            f"over seeds (two-sided exact p < {1 - CONFIDENCE:.2g}; runs that have not got there after "
            f"{self.cap:,.0f} steps are censored). Contradicted: more steps by the same test."
        )

    def power(self, num_seeds: int) -> str:
        """How far apart the arms must be."""
        separate = 2 / math.comb(2 * num_seeds, num_seeds)
        return (
            f"If all {num_seeds} runs of one arm are sooner than all of the other, p is {separate:.2g}; the test "
            "needs arms that hardly overlap."
        )

    def judge(self, runs: Mapping[str, Sequence[dict]]) -> Finding:
        """Decides by the runs."""
        try:
            arms = [side.choose(runs) for side in (self.first, self.second)]
        except (KeyError, statistics.StatisticsError):
            return Finding(OPEN)
        steps = [[self.metric.of(run) for run in runs[arm]] for arm in arms]
        medians = [
            f"median {format_steps(statistics.median(values), self.cap)} for `{arm}`"
            for arm, values in zip(arms, steps)
        ]
        if min(map(len, steps)) < 2:
            return Finding(OPEN)
        statistic, p = log_rank(steps[0], steps[1], self.cap)
        verdict = INCONCLUSIVE
        if p < 1 - CONFIDENCE:
            verdict = SUPPORTED if statistic > 0 else CONTRADICTED
        return Finding(verdict, f"{', '.join(medians)}; p = {p:.2g}", num_seeds=min(map(len, steps)))


Claim = Comparison | Bounds | Sooner


def format_steps(steps: float, cap: float) -> str:
    """Steps in words: runs that were stopped have needed more than `cap`."""
    return f"more than {cap:,.0f} steps" if steps > cap else f"{steps:,.0f} steps"


def log_rank(first: Sequence[float], second: Sequence[float], cap: float) -> tuple[float, float]:
    """
    The log-rank test of two groups of times; those above `cap` are censored there.

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
    half = t_quantile(0.5 + CONFIDENCE / 2, num_seeds - 1) * statistics.stdev(differences) / math.sqrt(num_seeds)
    low, high = effect - half, effect + half
    is_inside = margin is not None and -margin < low and high < margin
    if equal:
        verdict = f"equal within {margin:g}" if is_inside else INCONCLUSIVE if low <= 0 <= high else CONTRADICTED
    else:
        undecided = f"equal within {margin:g}" if is_inside else INCONCLUSIVE
        verdict = SUPPORTED if high < 0 else CONTRADICTED if low > 0 else undecided
    return Finding(verdict, effect=effect, low=low, high=high, num_seeds=num_seeds)


def _values(side: Side, metric: Metric, runs: Mapping[str, Sequence[dict]]) -> tuple[Any, dict[int, float] | None]:
    """The arm of a side and its values by seed, or the number that it is."""
    if isinstance(side, float | int):
        return float(side), None
    if isinstance(side, Across):
        by_arm = [{run["seed"]: metric.of(run) for run in runs[arm]} for arm in side.arms]
        seeds = set.intersection(*map(set, by_arm))
        return side.words, {seed: side.combine([values[seed] for values in by_arm]) for seed in seeds}
    arm = side.choose(runs) if isinstance(side, Best) else side
    return f"`{arm}`", {run["seed"]: metric.of(run) for run in runs[arm]}


def _needed(num_seeds: int) -> str:
    return (
        f"with {num_seeds} seeds, a difference is found with a probability of {POWER:.0%} if it is "
        f"{smallest_effect(num_seeds, 1.0):.2g} times the standard deviation of the differences"
        if num_seeds > 1
        else "one seed is no verdict"
    )


def format_values(values: Sequence[float | None], digits: int = 3) -> str:
    """Formats the mean ± sample standard deviation of the finite values, and the number of values that are not."""
    values = [math.nan if value is None else value for value in values]
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return "not finite" if values else "-"
    spread = f" ± {statistics.stdev(finite):,.{digits}f}" if len(finite) > 1 else ""
    lost = f" ({len(values) - len(finite)} not finite)" if len(finite) < len(values) else ""
    return f"{statistics.fmean(finite):,.{digits}f}{spread}{lost}"


def t_quantile(probability: float, degrees: int) -> float:
    """The quantile of Student's t distribution."""
    return float(stats.t.ppf(probability, degrees))


def power_of(effect: float, num_seeds: int) -> float:
    """
    The probability that the interval of `num_seeds` differences excludes 0 on the right side, if their mean is
    `effect` times their standard deviation.
    """
    limit = t_quantile(0.5 + CONFIDENCE / 2, num_seeds - 1)
    return float(stats.nct.sf(limit, num_seeds - 1, effect * math.sqrt(num_seeds)))


@cache
def smallest_effect(num_seeds: int, spread: float) -> float:
    """The mean difference that is found with the probability `POWER`; infinite with fewer than two seeds."""
    if num_seeds < 2:
        return math.inf
    return spread * optimize.brentq(lambda effect: power_of(effect, num_seeds) - POWER, 0.01, 100.0)
