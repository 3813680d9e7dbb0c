"""
The raw results of the studies, values computed from them, and verdicts on differences, for `check_claims.py`.

Like that module, it imports nothing from `lsgpt`. Values are kept by seed, since arms are compared seed by seed.
"""

import itertools
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path


ROOT = Path(__file__).parents[1]

QUANTILES = {2: 12.706205, 3: 4.302653, 5: 2.776445, 30: 2.045230}
"""The 97.5% quantiles of Student's t distribution, by the number of seeds (one more than the degrees of freedom)."""

MARGIN = 0.05
"""Nats per token within which two losses are called equal."""

VERDICTS = ("supported", "contradicted", f"equal within {MARGIN:g}", "inconclusive")

RATES = ("0.001", "0.003", "0.01", "0.03", "0.1")
"""The learning rates of the study learning-rates."""

LEARNING_RATES, CAP = ("0.001", "0.002", "0.004"), 6000
"""Of the study time-to-learn; runs that needed more steps than `CAP` were stopped."""

BY_SEED = Mapping[int, float]


# Results


@cache
def results(study: str) -> dict[str, dict[int, dict]]:
    """The values of each run of a study, by arm and seed."""
    arms: dict[str, dict[int, dict]] = {}
    for line in lines_of(study):
        arms.setdefault(line["arm"], {})[line["seed"]] = line["values"]
    return arms


@cache
def lines_of(study: str, name: str = "runs") -> list[dict]:
    """The lines of a study's file of runs."""
    return read_lines(f"studies/results/{study}/{name}.jsonl")


def read_lines(file: str) -> list[dict]:
    """The lines of a JSONL file in the project."""
    return [json.loads(line) for line in (ROOT / file).read_text(encoding="utf-8").splitlines()]


def column(study: str, arm: str, key: str | Callable[[dict], float | None] = "eval_loss") -> BY_SEED:
    """One value of each run of an arm, by seed. The loss of a run that diverged is infinite, and so is null."""
    values = {}
    for seed, run in results(study)[arm].items():
        value = run[key] if isinstance(key, str) else key(run)
        is_lost = value is None or (key == "eval_loss" and run["diverged"])
        values[seed] = math.inf if is_lost else value
    return values


def minus(first: BY_SEED, second: BY_SEED) -> BY_SEED:
    """The differences of the seeds that both have."""
    return {seed: first[seed] - second[seed] for seed in sorted(first.keys() & second.keys())}


def average(*columns: BY_SEED) -> BY_SEED:
    """The mean of several values of each seed."""
    return {seed: statistics.fmean(values[seed] for values in columns) for seed in columns[0]}


def difference(
    study: str, first: str, second: str, key: str | Callable[[dict], float | None] = "eval_loss"
) -> BY_SEED:
    """The difference between two arms, by seed."""
    return minus(column(study, first, key), column(study, second, key))


def doublings(study: str, first: str, second: str, key: str | Callable[[dict], float] = "max_logit") -> BY_SEED:
    """How often a logit of the second arm must double to reach that of the first, by seed."""
    return minus(*(log2(column(study, arm, key)) for arm in (first, second)))


def log2(values: BY_SEED) -> BY_SEED:
    """The base-2 logarithms of values."""
    return {seed: math.log2(value) for seed, value in values.items()}


def lowest(study: str, arms: Sequence[str]) -> str:
    """The arm with the lowest mean loss."""
    return min(arms, key=lambda arm: statistics.fmean(column(study, arm).values()))


def best_rate(study: str, name: str, rates: Sequence[str]) -> str:
    """The arm `name` at the learning rate with the lowest mean loss."""
    return lowest(study, [f"{name}-lr{rate}" for rate in rates])


# Verdicts


def interval(differences: BY_SEED) -> tuple[float, float, float]:
    """The mean of differences, and its 95% confidence interval (Student's t)."""
    values = list(differences.values())
    mean = statistics.fmean(values)
    half = QUANTILES[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def p_value(differences: BY_SEED) -> float | None:
    """Student's t test of two or three differences, where its distribution has a simple form; of others, nothing."""
    values = list(differences.values())
    if len(values) > 3 or not all(map(math.isfinite, values)) or len(set(values)) == 1:
        return None
    t = abs(statistics.fmean(values)) * math.sqrt(len(values)) / statistics.stdev(values)
    return 1 - 2 / math.pi * math.atan(t) if len(values) == 2 else 1 - t / math.sqrt(2 + t * t)


def significant(p_values: Sequence[float]) -> list[str]:
    """The number of p-values, and of small ones: uncorrected, by Benjamini and Hochberg (1995), and by Holm (1979)."""
    ordered, total, level = sorted(p_values), len(p_values), 0.05
    false_discovery = [i for i, p in enumerate(ordered, 1) if p <= level * i / total]
    familywise = itertools.takewhile(lambda item: item[1] <= level / (total - item[0]), enumerate(ordered))
    counts = sum(p < level for p in ordered), max(false_discovery, default=0), len(list(familywise))
    return [str(total), *map(str, counts)]


def judge(differences: BY_SEED, sign: int, margin: float | None) -> str:
    """The verdict on the claim that differences are below 0 (`sign` -1), above 0 (1) or within the margin (0)."""
    values = set(differences.values())
    if not all(map(math.isfinite, values)):  # runs diverged: decided only if all of one arm and none of the other did
        if values not in ({math.inf}, {-math.inf}):
            return "inconclusive"
        return "supported" if sign * min(values) > 0 else "contradicted"
    _, low, high = interval(differences)
    is_equal = margin is not None and -margin < low and high < margin
    if sign == 0:
        return f"equal within {margin:g}" if is_equal else "contradicted" if low > 0 or high < 0 else "inconclusive"
    if low > 0 or high < 0:
        return "supported" if (low > 0) == (sign > 0) else "contradicted"
    return f"equal within {margin:g}" if is_equal else "inconclusive"


def decimal(value: float, digits: int) -> str:
    """A number with this many digits after the point, and never `-0`."""
    return f"{round(value, digits) + 0.0:,.{digits}f}"


def effect(differences: BY_SEED, digits: int = 3) -> list[str]:
    """A mean and the ends of its interval."""
    return [decimal(x, digits) for x in interval(differences)]


# Values that are not simply stored


def gap_at(step: int) -> BY_SEED:
    """Training loss of `ls` less that of `mhsa` around a step of the long runs."""
    return difference("long-training", "ls", "mhsa", lambda run: dict(run["curves"]["loss"])[step])


def growth(run: dict) -> float:
    """How often the largest logit doubled from the second tenth of the steps to the last."""
    curve, steps = run["curves"]["max_logit"], run["step"]
    last = max(logit for step, logit in curve if step > 0.9 * steps)
    return math.log2(last / max(logit for step, logit in curve if 0.1 * steps < step <= 0.2 * steps))


def sensitivity(name: str) -> BY_SEED:
    """The mean loss over rates, each at most the loss before training, less the lowest (arXiv:2309.14322)."""
    arms = [f"{name}-lr{rate}" for rate in RATES]
    capped = [
        {seed: min(loss, results("learning-rates")[arm][seed]["first_loss"]) for seed, loss in of_arm.items()}
        for arm, of_arm in ((arm, column("learning-rates", arm)) for arm in arms)
    ]
    best = {seed: min(losses[seed] for losses in capped) for seed in capped[0]}
    return minus(average(*capped), best)


def fitted(key: str, length: int) -> Callable[[dict], float | None]:
    """A value of the fit at one of the lengths in degrees-of-freedom: 0 is the shortest, -1 the longest."""
    return lambda run: run["fits"][length][key]


def books(first: str, second: str) -> BY_SEED:
    """The difference in loss between two arms of the comparison of 2.3M parameters, by seed."""
    lines = read_lines("benchmarks/results/books/runs.jsonl")
    return minus(*({x["seed"]: x["values"]["eval_loss"] for x in lines if x["arm"] == arm} for arm in (first, second)))


def distance(arm: str, remedy: str = "plain", weights: str = "raw", where: str = "beyond") -> BY_SEED:
    """The distance from the correct distribution in set complement."""
    return column("set-complement", arm, lambda run: run["trainings"][remedy][weights][f"{where}_distance"])


def legal(arm: str, weights: str = "raw", where: str = "beyond") -> BY_SEED:
    """The fraction of legal first choices in Othello."""
    return column("othello", arm, lambda run: run["weights"][weights][f"legal_{where}"])


def accuracy(arm: str, *fractions: float) -> BY_SEED:
    """The test accuracy of a loss, averaged over fractions of wrong labels."""

    def of_run(run: dict) -> float:
        return statistics.fmean(x["accuracy"] for x in run["by_share"] if x["share"] in fractions)

    return column("noisy-labels", arm, of_run)


def passed(arm: str, thinking: str, attempts: int) -> BY_SEED:
    """pass@k of a model in soft-thinking."""
    return column("soft-thinking", arm, lambda run: run[thinking][str(attempts)])


def steps_of(task: str, count: int) -> list[float]:
    """How many steps a task took with so many global heads at the rate with the smallest median, over seeds."""
    columns = [
        [math.inf if run["steps"] is None else run["steps"] for run in results("time-to-learn")[arm].values()]
        for arm in (f"{task}-{count}-lr{rate}" for rate in LEARNING_RATES)
    ]
    assert all(len(column) == 5 for column in columns), f"{task} with {count} global heads has not got all its runs"
    return min(columns, key=lambda steps: (statistics.median(steps), sum(min(x, 2 * CAP) for x in steps)))


def surplus(first: Sequence[float], second: Sequence[float]) -> float:
    """How many more runs of the first group have learned than if both were equal, summed up over the steps."""
    total = 0.0
    for step in sorted({x for x in (*first, *second) if x <= CAP}):
        at_risk = [sum(x >= step for x in group) for group in (first, second)]
        learned = [group.count(step) for group in (first, second)]
        total += learned[0] - sum(learned) * at_risk[0] / sum(at_risk)
    return total
