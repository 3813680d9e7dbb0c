"""Comparisons: verdicts, the log-rank test, power, and that criteria are older than runs."""

import math
import statistics
import subprocess
from datetime import datetime
from pathlib import Path

import pytest

from lsgpt.studies import STUDIES, load_study, read_lines
from lsgpt.studies.comparisons import (
    LOSS,
    Best,
    Bounds,
    Comparison,
    Limit,
    Metric,
    Sooner,
    decide,
    less,
    log_rank,
)
from lsgpt.studies.long_runs import gap_closes, use_of_context


ROOT = Path(__file__).parents[2]


def runs_of(**losses):
    """Runs with these losses for seeds 42, 43, ..."""
    return {
        arm.replace("_", "-"): [
            {"seed": 42 + i, "eval_loss": loss, "diverged": False} for i, loss in enumerate(values)
        ]
        for arm, values in losses.items()
    }


@pytest.mark.parametrize(
    ("first", "equal", "margin", "verdict"),
    [
        ([1.0, 1.01, 1.02], False, None, "supported"),
        ([3.0, 3.01, 3.02], False, 0.05, "contradicted"),
        ([2.0, 2.03, 2.01], False, 0.05, "equal within 0.05"),
        ([2.0, 2.03, 2.01], False, None, "inconclusive"),
        ([1.7, 2.03, 2.3], False, 0.05, "inconclusive"),
        ([2.002, 2.012, 2.0225], False, 0.05, "contradicted"),  # however small
        ([2.0, 2.03, 2.01], True, 0.05, "equal within 0.05"),
        ([2.002, 2.012, 2.0225], True, 0.05, "equal within 0.05"),  # an interval without 0 may be inside
        ([1.0, 1.01, 1.02], True, 0.05, "contradicted"),
        ([3.0, 3.01, 3.02], True, 0.05, "contradicted"),
        ([1.7, 2.03, 2.3], True, 0.05, "inconclusive"),
    ],
)
def test_verdicts(first, equal, margin, verdict):
    comparison = Comparison("us", LOSS._replace(margin=margin), "a", "b", equal=equal)
    assert comparison.judge(runs_of(a=first, b=[2.0, 2.01, 2.02])).verdict == verdict


def test_the_interval_is_paired_over_common_seeds():
    runs = runs_of(a=[1.0, 2.0, 3.0], b=[1.1, 2.2, 3.3, 9.0])
    runs["b"].reverse()
    finding = Comparison("us", LOSS, "a", "b").judge(runs)
    assert finding.num_seeds == 3 and finding.effect == pytest.approx(-0.2)
    half = 4.302653 * statistics.stdev([0.1, 0.2, 0.3]) / math.sqrt(3)
    assert (finding.low, finding.high) == pytest.approx((-0.2 - half, -0.2 + half), abs=1e-5)
    assert "2.000 ± 1.000 for `a`" in finding.figure
    assert Comparison("us", LOSS, "a", "c").judge(runs).verdict == "open"
    runs["a"] = runs["a"][:1]
    one = Comparison("us", LOSS, "a", "b").judge(runs)
    assert one.verdict == "inconclusive" and math.isnan(one.low) and one.num_seeds == 1


def test_runs_that_diverged_decide_only_together():
    inf = math.inf
    assert decide([1.0, 1.1], [inf, inf], False, None).verdict == "supported"
    assert decide([inf, inf], [1.0, 1.1], False, None).verdict == "contradicted"
    assert decide([1.0, 1.1], [1.0, inf], False, None).verdict == "inconclusive"
    assert decide([inf, inf], [inf, inf], False, None).verdict == "inconclusive"
    assert decide([1.0], [inf], False, None).verdict == "inconclusive"
    assert decide([1.0, 1.1], [inf, inf], True, 0.05).verdict == "contradicted"
    runs = runs_of(a=[1.0, 1.1], b=[0.5, 0.6])
    for run in runs["b"]:
        run["diverged"] = True  # the last good weights have a loss, which does not count
    assert Comparison("us", LOSS, "a", "b").judge(runs).verdict == "supported"
    # What diverged is subtracted here: a gain over it is without bound, and a lead without bound is no gain.
    runs |= runs_of(c=[1.0, 1.1], d=[0.9, 1.1])
    gain, other = less("a", "b"), less("c", "d")
    assert Comparison("us", LOSS, gain, other).judge(runs).verdict == "supported"
    assert Comparison("us", LOSS, other, gain).judge(runs).verdict == "contradicted"


def test_a_gap_that_a_divergence_leaves_has_not_closed():
    falls = {"a": [(3.0, 2.0), (3.1, 2.0)], "b": [(3.0, math.nan), (3.1, math.nan)]}
    runs = {
        arm: [{"seed": seed, "validation": {"5000": x, "20000": y}} for seed, (x, y) in enumerate(losses)]
        for arm, losses in falls.items()
    }
    assert gap_closes("us", "a", "b").judge(runs).verdict == "contradicted"
    contexts = {"64": 2.0, "512": math.nan}
    diverged = {"a": [{"seed": seed, "by_context": contexts} for seed in (1, 2)]}
    assert use_of_context("a", 512).judge(diverged).verdict == "contradicted"


def test_a_number_the_best_of_several_and_a_gate():
    runs = runs_of(a_1=[3.0, 3.1], a_2=[2.0, 2.1], b=[2.5, 2.6], c=[2.5, 2.61])
    best = Best("a", ("a-1", "a-2"))
    comparison = Comparison("us", LOSS, best, "b")
    assert comparison.judge(runs).verdict == "supported" and "`a-2`" in comparison.judge(runs).figure
    assert "of `a` at its best rate is below that of `b`" in comparison.criterion()
    gain = Comparison("us", LOSS, 2.0, "b", LOSS, claim="there is a gain")
    assert gain.judge(runs).verdict == "inconclusive"  # 0.55 with an interval of 0.64
    assert "2 is below the final validation loss of `b`" in gain.criterion()
    assert Comparison("us", LOSS, best, "b", gate=gain).judge(runs).verdict == "inconclusive"
    runs["b"] += [{"seed": 44, "eval_loss": 2.55, "diverged": False}]
    assert gain.judge(runs).verdict == "supported"
    assert Comparison("us", LOSS, best, "b", gate=gain).judge(runs).verdict == "supported"
    without_words = Comparison("us", LOSS, best, "b", gate=Comparison("us", LOSS, 2.0, "b"))
    assert 'unless this is supported: "2 is below' in without_words.criterion()


def test_bounds_need_all_seeds():
    bounds = Bounds("us", (Limit("a", LOSS, above=4), Limit("b", LOSS, below=2)))
    assert bounds.judge(runs_of(a=[5.0, 6.0], b=[1.0, 1.5])).verdict == "supported"
    assert bounds.judge(runs_of(a=[5.0, 6.0], b=[1.0, 2.5])).verdict == "inconclusive"
    assert bounds.judge(runs_of(a=[5.0, 3.0], b=[3.0, 1.5])).verdict == "contradicted"
    for at_bound in ({"a": [4.0] * 2, "b": [1.0] * 2}, {"a": [5.0] * 2, "b": [2.0] * 2}):
        assert bounds.judge(runs_of(**at_bound)).verdict == "contradicted"
    assert bounds.judge(runs_of(a=[5.0], b=[1.0])).verdict == "inconclusive"
    assert bounds.judge(runs_of(a=[5.0])).verdict == "open"
    of_common_seeds = bounds.judge(runs_of(a=[5.0, 6.0, 3.0], b=[1.0, 1.5]))
    assert (of_common_seeds.verdict, of_common_seeds.num_seeds) == ("supported", 2)
    assert "of `a` 5.500 ± 0.707;" in of_common_seeds.figure  # of the seeds that decide


def test_log_rank():
    # The same as by hand: at 1, 2 and 3, a third, a half and one of those at risk are of the first group.
    statistic, p = log_rank([1, 9], [2, 3], cap=5)
    assert statistic == pytest.approx(1 - (2 / 4 + 1 / 3 + 1 / 2))
    assert p == 1.0 or 0 < p < 1
    statistic, p = log_rank([1, 2, 3, 4, 5], [60, 70, 80, math.inf, math.inf], cap=50)
    assert statistic > 0 and p == pytest.approx(2 / 252)
    assert log_rank([9, 9, 9], [9, 9, 9], cap=5) == (0.0, 1.0)  # nobody got there
    assert log_rank([8, 7, 6, 9], [1, 2, 3, 4], cap=5)[0] < 0
    assert log_rank([5, 5], [6, 6], cap=5)[0] > 0  # the last step counts


def test_what_is_learned_sooner():
    steps = {"a": [10, 20, 30, 40, 50], "b": [60, 70, math.inf, math.inf, math.inf]}
    runs = {arm: [{"seed": seed, "steps": x} for seed, x in enumerate(of_arm)] for arm, of_arm in steps.items()}
    a, b = (Best(name, (name,)) for name in steps)
    first, second = (Sooner("us", Metric("the steps", "steps"), *sides, cap=50) for sides in ((a, b), (b, a)))
    assert first.judge(runs)[:2] == (
        "supported",
        "median 30 steps for `a`, median more than 50 steps for `b`; p = 0.0079",
    )
    assert second.judge(runs).verdict == "contradicted"
    assert first.judge({**runs, "b": runs["b"][:1]}).verdict == "open"
    assert first.judge({**runs, "a": runs["a"][-1:] * 2}).figure.startswith("median 50 steps for `a`")


@pytest.mark.parametrize("name", STUDIES)
def test_criteria_are_worded_from_the_comparisons(name):
    study = load_study(name)
    for item in study.comparisons.values():
        assert item.criterion().startswith(("Supported: ", "Equal: "))
        assert item.title and item.source
        if isinstance(item, Bounds):
            assert {limit.arm for limit in item.limits} <= set(study.arms)
        else:
            for side in (item.first, item.second):
                assert isinstance(side, float | int) or set(getattr(side, "arms", (side,))) <= set(study.arms)
        assert item.judge({}).verdict == "open"


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("equal-time", "94d3d861f956994b"),
        ("paper-size", "9862ccb01ff04b37"),
        ("positions-long", "9ec0abfd20e4ef2a"),
        ("time-to-learn", "823b8a39d9cf756d"),
    ],
)
def test_criteria_stay_as_they_were_when_the_runs_began(name, digest):
    assert load_study(name).digest() == digest


@pytest.mark.parametrize("name", STUDIES)
def test_criteria_are_older_than_the_runs(name):
    """Every run records a clean commit, older than its end, and the criteria of that commit."""
    study, dates = load_study(name), {}
    for line in read_lines(ROOT / "studies" / "results" / name):
        if "criteria" not in line:  # runs from before criteria were data; the reports tell what was changed
            assert study.changes
            continue
        commit = line["environment"]["commit"]
        assert len(commit) == 40 and set(commit) <= set("0123456789abcdef")
        assert line["criteria"] == study.digest()
        if commit not in dates:
            command = ["git", "-C", str(ROOT), "log", "-1", "--format=%cI", commit]
            answer = subprocess.run(command, capture_output=True, text=True, check=False)
            dates[commit] = answer.stdout.strip() if answer.returncode == 0 else None
        if dates[commit]:  # a shallow clone does not have it
            assert datetime.fromisoformat(dates[commit]) < datetime.fromisoformat(line["ended"])
