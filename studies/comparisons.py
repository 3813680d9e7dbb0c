"""
Claims as data. The criterion is worded from the same data by which runs decide, so that they cannot differ.

Comparisons of two arms are paired over seeds: the effect is the mean of the differences, and its interval has the
quantiles of Student's t distribution.
"""

import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
from scipy import stats


SUPPORTED, CONTRADICTED, INCONCLUSIVE, OPEN = "supported", "contradicted", "inconclusive", "open"

CONFIDENCE = 0.95

Runs = Mapping[str, Sequence[dict]]
"""The values of the runs of each arm, with their `seed`."""


class Finding(NamedTuple):
    """What the runs say about a claim."""

    verdict: str
    """`supported`, `contradicted`, `equal within x`, `inconclusive`, or `open` if runs are missing."""
    figure: str = "too few runs so far"
    """The values behind the verdict, with their spread over seeds."""
    effect: float = math.nan
    low: float = math.nan
    high: float = math.nan
    """The mean difference, first less second, and the ends of its 95% interval."""
    num_seeds: int = 0


class Metric(NamedTuple):
    """A number that every run has."""

    words: str
    """What it is, as the subject of a sentence: "the final validation loss"."""
    read: str | Callable[[dict], float]
    """Key of the run's values, with dots between keys and indices of what is nested; or a function of the values."""
    digits: int = 3
    margin: float | None = None
    """The largest difference that counts as none."""

    def of(self, run: dict[str, Any]) -> float:
        """The value for a run; infinite where it is not a number."""
        value: Any = self.read(run) if callable(self.read) else run
        for key in () if callable(self.read) else self.read.split("."):
            value = value[int(key)] if isinstance(value, list) else value[key]
        return math.inf if math.isnan(value) else float(value)


LOSS = Metric(
    "the final validation loss",
    lambda run: math.inf if run["diverged"] else run["eval_loss"],  # what it had before it diverged does not count
    margin=0.05,
)
# These words are in criteria that are older than the runs, so they stay as they are.
LOGIT = Metric("the largest logit on the way", "max_logit", 1)
DOUBLINGS = Metric("the base-2 logarithm of the largest logit on the way", lambda run: math.log2(LOGIT.of(run)), 2)


class Best(NamedTuple):
    """The best of several arms, such as a model at its best rate: the one whose values have the lowest `score`."""

    name: str
    arms: tuple[str, ...]
    what: str = "at its best rate"
    score: Callable[[list[float]], Any] = statistics.fmean

    @property
    def words(self) -> str:
        return f"`{self.name}` {self.what}"

    def choose(self, metric: Metric, runs: Runs) -> str:
        """The name of the best arm. An arm that has not been run raises `KeyError`."""
        return min(self.arms, key=lambda arm: self.score([metric.of(run) for run in runs[arm]]))


class Across(NamedTuple):
    """A number from several arms with the same seed. In words, the difference of two is "`ls` less `mhsa`"."""

    words: str
    arms: tuple[str, ...]
    combine: Callable[[list[float]], float]


def less(first: str, second: str) -> Across:
    """The difference of two arms."""
    return Across(f"`{first}` less `{second}`", (first, second), lambda values: values[0] - values[1])


Side = str | Best | Across | float
"""An arm, the best of several, a number from several arms, or a number to which an arm is compared."""


@dataclass(frozen=True)
class Claim(ABC):
    """A claim that the runs of a study decide."""

    source: str
    """Who makes it."""
    _: KW_ONLY
    claim: str = ""
    """The claim in words, where `statement` does not say enough."""
    gate: "Claim | None" = None
    """Another claim that must be supported, or else nothing is said here."""

    @property
    def title(self) -> str:
        """The claim in words."""
        return self.claim or self.statement()

    def criterion(self) -> str:
        """When the claim counts as supported, and when as contradicted."""
        gate = f' Nothing is said unless this is supported: "{self.gate.title}".' if self.gate else ""
        return f"{self._criterion()}{gate}"

    def judge(self, runs: Runs) -> Finding:
        """What the runs say about the claim."""
        try:
            finding = self._judge(runs)
        except KeyError:  # an arm has not been run
            return Finding(OPEN)
        if self.gate is None or (verdict := self.gate.judge(runs).verdict) == SUPPORTED:
            return finding
        figure = f'{finding.figure}; "{self.gate.title}" is {verdict}'
        return finding._replace(verdict=OPEN if verdict == OPEN else INCONCLUSIVE, figure=figure)

    @abstractmethod
    def statement(self) -> str:
        """What is compared, in words."""

    @abstractmethod
    def _criterion(self) -> str: ...

    @abstractmethod
    def _judge(self, runs: Runs) -> Finding: ...


@dataclass(frozen=True)
class Comparison(Claim):
    """
    A claim that one arm is below another in a metric, or, with `equal=True`, that they are equal within its margin.

    The difference is `first - second`, for every seed with which both have been run. That `first` is below is
    supported if the interval of the mean difference lies below 0, and contradicted if it lies above; they are equal if
    the interval lies inside the margin. Equality is contradicted if it excludes 0 and does not lie inside.
    """

    metric: Metric
    first: Side
    second: Side
    second_metric: Metric | None = None
    """The metric of `second`, if it is another one."""
    equal: bool = False

    def statement(self) -> str:
        first = "" if isinstance(self.first, float) else f"{self.metric.words} of "
        relation = f"within {self.metric.margin:g} of" if self.equal else "below"
        second = self.second_metric.words if self.second_metric else "that"
        return f"{first}{_words(self.first)} is {relation} {second} of {_words(self.second)}"

    def _criterion(self) -> str:
        start = f"{self.statement()}: the 95% interval of the difference, paired over seeds, lies"
        margin = self.metric.margin
        if self.equal:
            text = f"Equal: {start} inside ±{margin:g}. "
            return f"{text}Contradicted: the interval excludes 0 and does not lie inside."
        text = f"Supported: {start} below 0. Contradicted: it lies above 0."
        return (
            text if margin is None else f"{text} Equal within {margin:g}: it includes 0 and lies inside ±{margin:g}."
        )

    def _judge(self, runs: Runs) -> Finding:
        metrics = (self.metric, self.second_metric or self.metric)
        sides = [_values(side, metric, runs) for side, metric in zip((self.first, self.second), metrics)]
        seeds = sorted(set.intersection(*(set(values) for _, values in sides)))
        if not seeds:
            return Finding(OPEN)
        first, second = ([values[seed] for seed in seeds] for _, values in sides)
        figures = []
        for values, metric, (name, _) in zip((first, second), metrics, sides):
            what = f", {metric.words.rstrip(',')}" if self.second_metric else ""
            figures += [f"{format_values(values, metric.digits)} for {name}{what}"] if name else []
        finding = decide(first, second, self.equal, self.metric.margin)
        figure, digits = ", ".join(figures), max(2, self.metric.digits)
        if math.isfinite(finding.effect):
            figure += f"; effect {finding.effect:+.{digits}f}"
        if math.isfinite(finding.low):
            figure += f" (95% interval {finding.low:.{digits}f} to {finding.high:.{digits}f})"
        return finding._replace(figure=figure)


class Limit(NamedTuple):
    """A bound that every run of an arm keeps: either `above` or `below`."""

    arm: str
    metric: Metric
    above: float | None = None
    below: float | None = None

    @property
    def words(self) -> str:
        bound = f"below {self.below:g}" if self.above is None else f"above {self.above:g}"
        return f"{self.metric.words} of `{self.arm}` is {bound}"

    def holds(self, run: dict[str, Any]) -> bool:
        value = self.metric.of(run)
        return value < self.below if self.above is None else value > self.above


@dataclass(frozen=True)
class Bounds(Claim):
    """A claim with absolute criteria: supported if all limits hold in all seeds, contradicted if in none all do."""

    limits: tuple[Limit, ...]

    def statement(self) -> str:
        return " and ".join(limit.words for limit in self.limits)

    def _criterion(self) -> str:
        return f"Supported: in all seeds, {self.statement()}. Contradicted: in no seed."

    def _judge(self, runs: Runs) -> Finding:
        by_seed = [{run["seed"]: limit.holds(run) for run in runs[limit.arm]} for limit in self.limits]
        seeds = set.intersection(*map(set, by_seed))
        holds = [all(each[seed] for each in by_seed) for seed in seeds]
        if not holds:
            return Finding(OPEN)
        figures = []
        for arm, metric, *_ in self.limits:
            values = format_values([metric.of(run) for run in runs[arm] if run["seed"] in seeds], metric.digits)
            figures.append(f"{metric.words} of `{arm}` {values}")
        verdict = SUPPORTED if all(holds) else INCONCLUSIVE if any(holds) else CONTRADICTED
        return Finding(verdict if len(holds) > 1 else INCONCLUSIVE, "; ".join(figures), num_seeds=len(holds))


@dataclass(frozen=True)
class Sooner(Claim):
    """
    A claim that `first` reaches a goal sooner than `second`, decided by the log-rank test, which takes into account
    that some runs never reached it. The probabilities are exact: those of all ways to divide the runs into two arms.
    """

    metric: Metric
    """The steps that were needed; more than `cap` stands for a run that was stopped before."""
    first: Best
    second: Best
    cap: float

    def statement(self) -> str:
        return f"{self.first.words} needs fewer steps than {self.second.words}"

    def _criterion(self) -> str:
        return (
            f"Supported: {self.statement()} by the log-rank test over seeds (two-sided exact p < "
            f"{1 - CONFIDENCE:.2g}; runs that have not got there after {self.cap:,.0f} steps are censored). "
            "Contradicted: more steps by the same test."
        )

    def _judge(self, runs: Runs) -> Finding:
        arms = [side.choose(self.metric, runs) for side in (self.first, self.second)]
        first, second = ([self.metric.of(run) for run in runs[arm]] for arm in arms)
        num_seeds = min(len(first), len(second))
        if num_seeds < 2:
            return Finding(OPEN)
        statistic, p = log_rank(first, second, self.cap)
        decided = SUPPORTED if statistic > 0 else CONTRADICTED
        medians = [format_steps(statistics.median(steps), self.cap) for steps in (first, second)]
        figure = ", ".join(f"median {median} for `{arm}`" for median, arm in zip(medians, arms))
        verdict = decided if p < 1 - CONFIDENCE else INCONCLUSIVE
        return Finding(verdict, f"{figure}; p = {p:.2g}", num_seeds=num_seeds)


def format_steps(steps: float, cap: float) -> str:
    """Steps in words: runs that were stopped have needed more than `cap`."""
    return f"more than {cap:,.0f} steps" if steps > cap else f"{steps:,.0f} steps"


def log_rank(first: Sequence[float], second: Sequence[float], cap: float) -> tuple[float, float]:
    """
    The log-rank test of two groups of times, of which those above `cap` are censored. (SciPy's has no exact p-value.)

    Returns:
        The observed events of the first group less those expected if both are equal, positive if it is sooner; and the
        exact two-sided p-value, the share of all divisions of the times into such groups with at least as large a one.
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
    differences = [a - b for a, b in zip(first, second)]
    if not all(map(math.isfinite, differences)):
        verdict = INCONCLUSIVE  # one run that diverged decides nothing
        if num_seeds > 1 and set(differences) in ({math.inf}, {-math.inf}):
            verdict = SUPPORTED if differences[0] < 0 and not equal else CONTRADICTED
        return Finding(verdict, num_seeds=num_seeds)
    effect = statistics.fmean(differences)
    if num_seeds < 2:
        return Finding(INCONCLUSIVE, effect=effect, num_seeds=num_seeds)
    half = float(stats.t.ppf(0.5 + CONFIDENCE / 2, num_seeds - 1) * stats.sem(differences))
    low, high = effect - half, effect + half
    is_inside = margin is not None and -margin < low and high < margin
    undecided = f"equal within {margin:g}" if is_inside else INCONCLUSIVE
    if equal:
        verdict = undecided if is_inside or low <= 0 <= high else CONTRADICTED
    else:
        verdict = SUPPORTED if high < 0 else CONTRADICTED if low > 0 else undecided
    return Finding(verdict, effect=effect, low=low, high=high, num_seeds=num_seeds)


def _words(side: Side) -> str:
    if isinstance(side, float):
        return f"{side:g}"
    return f"`{side}`" if isinstance(side, str) else side.words


def _values(side: Side, metric: Metric, runs: Runs) -> tuple[str, dict[int, float]]:
    """The name of what is compared, empty for a number, and its values by seed."""
    if isinstance(side, float):
        return "", {run["seed"]: side for of_arm in runs.values() for run in of_arm}
    if isinstance(side, Across):
        by_arm = [{run["seed"]: metric.of(run) for run in runs[arm]} for arm in side.arms]
        seeds = set.intersection(*map(set, by_arm))
        return side.words, {seed: side.combine([values[seed] for values in by_arm]) for seed in seeds}
    arm = side.choose(metric, runs) if isinstance(side, Best) else side
    return f"`{arm}`", {run["seed"]: metric.of(run) for run in runs[arm]}


def format_values(values: Sequence[float], digits: int = 3) -> str:
    """Formats the mean ± sample standard deviation of the finite values, and the number of values that are not."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return "not finite" if values else "-"
    spread = f" ± {statistics.stdev(finite):,.{digits}f}" if len(finite) > 1 else ""
    lost = f" ({len(values) - len(finite)} not finite)" if len(finite) < len(values) else ""
    return f"{statistics.fmean(finite):,.{digits}f}{spread}{lost}"
