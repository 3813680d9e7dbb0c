"""Pages state what the results of the studies say, and the check finds figures that were changed."""

import importlib
import math
import shutil
import sys
from copy import deepcopy
from functools import cache
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def check_claims():
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.syspath_prepend(ROOT / "docs")
        module = importlib.import_module("check_claims")
        checks = cache(module.checks_of_pages)  # the same for all copies of the pages
        monkeypatch.setattr(module, "checks_of_pages", lambda: list(checks()))
        yield module


@pytest.fixture
def raw_results(check_claims):
    return importlib.import_module("raw_results")


@pytest.fixture
def copy(check_claims, tmp_path):
    names = ("CLAIMS", "AVERAGING", "SOFT", "CHOOSING", "README")
    for page in (getattr(check_claims, name) for name in names):
        (tmp_path / page).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / page, tmp_path / page)
    return tmp_path


def test_pages_state_what_the_results_say(check_claims):
    assert "\n".join(map(str, check_claims.find_faults())) == ""


def test_the_check_needs_none_of_the_studies_code(check_claims):
    for name in ("check_claims", "raw_results"):
        lines = (ROOT / "docs" / f"{name}.py").read_text(encoding="utf-8").splitlines()
        imported = {line.split()[1].split(".")[0] for line in lines if line.startswith(("import ", "from "))}
        assert imported <= {*sys.stdlib_module_names, "raw_results"}


@pytest.mark.parametrize(
    ("page", "text", "change"),
    [
        ("docs/claims.md", "-0.161 (-0.217", "-0.171 (-0.217"),
        ("docs/claims.md", "-0.105)|3|supported", "-0.105)|4|supported"),
        ("docs/claims.md", "(0.036 to 0.083)|3|contradicted", "(0.036 to 0.083)|3|inconclusive"),
        ("docs/claims.md", "301, 471, 39, 32", "301, 471, 39, 31"),
        ("docs/claims.md", "14 are supported, 6", "13 are supported, 6"),
        ("docs/claims.md", "0.059 (-0.038", "0.069 (-0.038"),
        ("docs/claims.md", "465, 538, 35, 49", "465, 538, 35, 59"),
        ("docs/claims.md", "`mhsa` above 400", "`mhsa` above 500"),
        ("docs/claims.md", "`mhsa` reaches 379", "`mhsa` reaches 479"),
        ("docs/claims.md", "257; `ls` 44 and 36", "257; `ls` 44 and 46"),
        ("docs/claims.md", "`mhsa` 491, `ls` 44", "`mhsa` 491, `ls` 54"),
        ("docs/claims.md", "0.422 (0.006", "0.422 (-0.006"),
        ("docs/claims.md", "(0.044 to 0.145)|2|inconclusive", "(0.044 to 0.145)|2|supported"),
        ("docs/claims.md", "0.67, 0.68|2|inconclusive", "0.67, 0.68|2|contradicted"),
        ("docs/claims.md", "250, >6,000 steps", "250, 6,000 steps"),
        ("docs/claims.md", "a loss 0.032 above", "a loss 0.132 above"),
        ("docs/claims.md", "128 of 667 runs", "12 of 588 runs"),
        ("docs/claims.md", "94, 87, 116, 35, 35, 36|3|contradicted", "94, 87, 116, 35, 35, 36|3|inconclusive"),
        ("docs/claims.md", "55, 58, 56, 37", "55, 58, 56, 27"),
        ("docs/claims.md", "-0.062 (-0.078", "-0.062 (-0.088"),
        ("docs/claims.md", "0.028 (-0.018 to 0.075)|3|inconclusive", "0.028 (-0.018 to 0.075)|3|contradicted"),
        ("docs/claims.md", "0.004 (-0.002 to", "0.014 (-0.002 to"),
        ("README.md", "94, 87, 116; 35, 35, 36", "94, 87, 116; 35, 35, 46"),
        ("docs/claims.md", "(14 with", "(10 with"),
        ("docs/claims.md", "4 with Holm", "5 with Holm"),
        ("docs/claims.md", "30,000)|0, 0|2|contradicted", "30,000)|0, 0|2|inconclusive"),
        ("docs/claims.md", "rate 0.03 was", "rate 0.01 was"),
        ("docs/claims.md", "alone make 336 and 435", "alone make 336 and 335"),
        ("docs/claims.md", "content 120 and", "content 20 and"),
        ("docs/claims.md", "0.00 to 0.13 nats", "0.00 to 0.23 nats"),
        ("docs/claims.md", "leads by 0.48 after", "leads by 0.38 after"),
        ("docs/claims.md", "by 0.33 at the end", "by 0.48 at the end"),
        ("docs/claims.md", "|3.225|", "|3.125|"),
        ("docs/claims.md", "|10,539|", "|10,639|"),
        ("docs/claims.md", "|13,242|", "|13,342|"),
        ("docs/claims.md", "-0.211)|3|supported", "-0.211)|2|supported"),
        ("docs/claims.md", "(-0.035 to 0.026)|3|equal within 0.05", "(-0.035 to 0.026)|3|inconclusive"),
        ("docs/claims.md", "0.026 (-0.003 to 0.055)", "0.026 (0.003 to 0.055)"),
        ("docs/claims.md", "to 0.1 nats.", "to 0.1 nats, so 0.713 more."),
        ("docs/claims.md", "to the last (paper)", "to the last 500 steps (paper)"),
        ("README.md", "tasks, more.", "tasks, 0.713 more."),
        ("docs/claims.md", "-0.18 to -0.14 nats, outside", "-0.88 to -0.54 nats, outside"),
        ("docs/claims.md", "-0.14 nats, outside", "-0.14 nats, inside"),
        ("docs/claims.md", "`ls` below 50 (paper)|301", "`ls` below 20 (paper)|301"),
        ("docs/claims.md", "four times the length", "eight times the length"),
        ("docs/claims.md", "1,200 steps (paper", "2,200 steps (paper"),
        ("docs/averaging-and-losses.md", "| 20% wrong labels", "| 30% wrong labels"),
        ("README.md", "2 find no", "3 find no"),
        ("docs/claims.md", "|Sinusoidal", "|A new claim (ours)|1.3|3|supported|\n|Sinusoidal"),
        ("docs/averaging-and-losses.md", "0.331 for `mhsa`", "0.131 for `mhsa`"),
        ("docs/averaging-and-losses.md", "(-0.028 to -0.003)", "(-0.028 to 0.003)"),
        ("docs/soft-grpo.md", "to 83%", "to 84%"),
        ("README.md", "0.39 nats less", "0.29 nats less"),
        ("README.md", "301 and 471", "301 and 571"),
        ("README.md", "465 and 538", "465 and 548"),
        ("docs/choosing-heads.md", "highest with 6 (4.68;", "highest with 6 (4.58;"),
        ("docs/choosing-heads.md", "4.55 at its best rate", "4.65 at its best rate"),
        ("docs/choosing-heads.md", "in 12 of 15 runs", "in 13 of 15 runs"),
        ("docs/choosing-heads.md", "two 10, three 8", "two 10, three 9"),
        ("docs/claims.md", "p = 0.72|5|inconclusive", "p = 0.072|5|inconclusive"),
        ("docs/choosing-heads.md", "3.20 with none", "3.02 with none"),
        ("README.md", "(one rate): 0.30", "(one rate): 0.40"),
        ("README.md", "shrinking); 0.03", "shrinking); 0.13"),
    ],
)
def test_a_figure_that_was_changed_is_found(check_claims, copy, page, text, change):
    path = copy / page
    before = path.read_text(encoding="utf-8")
    assert before.count(text) == 1
    path.write_text(before.replace(text, change), encoding="utf-8")
    lines = [(fault.page, fault.line) for fault in check_claims.find_faults(copy)]
    where = before[: before.index(text)].count("\n") + 1
    # A new verdict also changes the scoreboard, and a piece of a sentence may begin on the line before.
    assert any(found == page and where - 1 <= line <= where + 1 for found, line in lines)


def test_a_sentence_that_is_gone_is_found(check_claims, copy):
    path = copy / "docs/claims.md"
    path.write_text(path.read_text(encoding="utf-8").replace("|Sinusoidal", "|Sinus"), encoding="utf-8")
    assert any("'|Sinusoidal" in fault.problem for fault in check_claims.find_faults(copy))


def test_quantiles_are_those_of_students_t(raw_results):
    for num_seeds, quantile in raw_results.QUANTILES.items():
        freedom, steps = num_seeds - 1, 20_000
        scale = math.gamma((freedom + 1) / 2) / math.sqrt(freedom * math.pi) / math.gamma(freedom / 2)
        width = quantile / steps
        density = [scale * (1 + (width * (i + 0.5)) ** 2 / freedom) ** (-(freedom + 1) / 2) for i in range(steps)]
        assert 0.5 + width * sum(density) == pytest.approx(0.975, abs=1e-6)


@pytest.mark.parametrize(
    ("differences", "sign", "margin", "verdict"),
    [
        ([-0.2, -0.3, -0.25], -1, None, "supported"),
        ([-0.2, -0.3, -0.25], 1, None, "contradicted"),
        ([-0.02, 0.01, 0.0], -1, 0.05, "equal within 0.05"),
        ([-0.02, 0.01, 0.0], -1, None, "inconclusive"),
        ([0.02, 0.021, 0.022], 0, 0.05, "equal within 0.05"),
        ([0.2, 0.21, 0.22], 0, 0.05, "contradicted"),
        ([-0.2, 0.21, 0.0], 0, 0.05, "inconclusive"),
        ([-0.2, -math.inf, -0.2], -1, 0.05, "inconclusive"),
        ([-math.inf, -math.inf, math.nan], -1, 0.05, "inconclusive"),  # the third diverged in both arms
        ([-math.inf, -math.inf, -math.inf], -1, 0.05, "supported"),
        ([math.inf, math.inf, math.inf], -1, 0.05, "contradicted"),
        ([-math.inf, -math.inf, -math.inf], 0, 0.05, "contradicted"),
    ],
)
def test_verdicts(raw_results, differences, sign, margin, verdict):
    assert raw_results.judge(dict(enumerate(differences)), sign, margin) == verdict


def test_p_values_and_their_corrections(raw_results):
    differences = [1.0, 2.0], [1.0, 2.0, 3.0], [1.0, 1.0], 4 * [1.0], [1.0, math.inf]
    p_values = [raw_results.p_value(dict(enumerate(x))) for x in differences]
    assert p_values == [pytest.approx(0.2048328), pytest.approx(0.0741799), None, None, None]
    # Benjamini and Hochberg's limits are 0.0125, 0.025, 0.0375 and 0.05, Holm's 0.0125, 0.0167, 0.025 and 0.05.
    assert raw_results.significant([0.04, 0.001, 0.2, 0.02]) == ["4", "3", "2", "1"]


def test_numbers_are_written_without_a_negative_zero(raw_results):
    assert [raw_results.decimal(x, 3) for x in (-0.0004, -0.0006, 1234.5)] == ["0.000", "-0.001", "1,234.500"]


def test_runs_that_diverged_have_an_infinite_loss(raw_results, monkeypatch):
    losses = {1: (2.0, False), 2: (2.0, True), 3: (None, False)}
    runs = {seed: {"eval_loss": x, "max_logit": 9.0, "diverged": lost} for seed, (x, lost) in losses.items()}
    monkeypatch.setattr(raw_results, "results", lambda study: {"ls": runs})
    assert raw_results.column("a study", "ls") == {1: 2.0, 2: math.inf, 3: math.inf}
    assert raw_results.column("a study", "ls", "max_logit") == dict.fromkeys(losses, 9.0)


def test_a_run_that_diverged_changes_the_verdict(check_claims, monkeypatch):
    """The page says that no run at the paper's size did."""
    runs = deepcopy(check_claims.results("paper-size"))
    runs["ls"][min(runs["ls"])]["diverged"] = True
    monkeypatch.setattr(check_claims, "results", lambda study: runs)
    with pytest.raises(AssertionError):
        check_claims.checks_of_the_papers_size()


def test_what_is_learned_sooner(check_claims, raw_results, monkeypatch):
    """At the rate with the smallest median or, of equal ones, with the smallest sum."""
    steps = {"0.001": 5 * [None], "0.002": [100, 200, None, None, None], "0.004": [300, 400, None, None, None]}
    runs = {f"copy-1-lr{rate}": {i: {"steps": x} for i, x in enumerate(of_rate)} for rate, of_rate in steps.items()}
    monkeypatch.setattr(raw_results, "results", lambda study: runs)
    assert raw_results.steps_of("copy", 1) == [100, 200, math.inf, math.inf, math.inf]
    groups = {1: [100, 200, 300, 400, 500], 6: [5000, 5100, 5200, math.inf, math.inf]}
    monkeypatch.setattr(check_claims, "steps_of", lambda task, count: groups[count])
    figures = [list(check_claims.sooner_row("", "copy", *counts).figures) for counts in ((1, 6), (6, 1))]
    assert figures[0] == ["300", "5,200", "0.0079", "5", "supported"]
    assert figures[1] == ["5,200", "300", "0.0079", "5", "contradicted"]


def test_findings_are_short(check_claims):
    assert len((ROOT / "docs" / "claims.md").read_text(encoding="utf-8").split()) <= 1200
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    start, end = check_claims.section(readme, "What we found")
    assert len(readme[start:end].split()) <= 120
