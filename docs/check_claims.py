"""
Recomputes the findings that the documentation states, from the raw results of the studies: `python
docs/check_claims.py`.

It imports nothing of `lsgpt`, so that it can find mistakes in the code that writes the reports. Each check is a piece
of a page with its figures left out, and the figures as computed here. A figure that no check covers is a fault, too.
"""

import itertools
import math
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from raw_results import (
    BY_SEED,
    CAP,
    LEARNING_RATES,
    MARGIN,
    RATES,
    ROOT,
    VERDICTS,
    accuracy,
    best_rate,
    books,
    column,
    decimal,
    difference,
    distance,
    doublings,
    effect,
    fitted,
    gap_at,
    growth,
    interval,
    judge,
    legal,
    lines_of,
    log2,
    lowest,
    minus,
    p_value,
    passed,
    results,
    sensitivity,
    significant,
    steps_of,
    surplus,
)


CLAIMS = "docs/claims.md"
AVERAGING = "docs/averaging-and-losses.md"
SOFT = "docs/soft-grpo.md"
CHOOSING = "docs/choosing-heads.md"
README = "README.md"

REPEATED = "58f83aed19004e20fa5fa14292d1b64c9d77b8b9"
"""The commit of the runs that repeat those which were first made with uncommitted changes."""

UNCHECKED = {"2.3M", "0.05"}
"""Numbers with a decimal point that are not results: the size of a model, and the margin."""


class Check(NamedTuple):
    """A piece of a page, with `{}` and `<verdict>` for its figures, `*` for the rest of a cell, and those figures."""

    page: str
    text: str
    figures: Sequence[str]
    p_value: float | None = None
    """Of the difference that the row is about."""


class Fault(NamedTuple):
    """What is wrong in a line of a page."""

    page: str
    line: int
    problem: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.problem}"


# Checks


def row(
    start: str, differences: BY_SEED, sign: int, digits: int = 3, margin: float | None = None, page=CLAIMS
) -> Check:
    """A row of a table, which starts with a claim, from its effect to its verdict."""
    figures = [*effect(differences, digits), str(len(differences)), judge(differences, sign, margin)]
    return Check(page, f"|{start}*|{{}} ({{}} to {{}})|{{}}|<verdict>|", figures, p_value(differences))


def loss_row(start: str, differences: BY_SEED, sign: int = -1) -> Check:
    """A row on losses, which can be equal within the margin."""
    return row(start, differences, sign, margin=MARGIN)


def each_run(start: str, figures: Sequence[str], num_seeds: int, verdict: str) -> Check:
    """A row on a claim about every run, which has no interval."""
    return Check(
        CLAIMS,
        f"|{start}*|{', '.join('{}' for _ in figures)}|{{}}|<verdict>|",
        [*figures, str(num_seeds), verdict],
    )


def integers(values: BY_SEED) -> list[str]:
    """The values of all seeds in their order, rounded."""
    return [decimal(values[seed], 0) for seed in sorted(values)]


def explosion_row(start: str, study: str, mhsa: str, ls: str, above: int, below: int = 50) -> Check:
    """A row on the claim that the logits of one arm all exceed a bound, and those of another stay below one."""
    high, low = (column(study, arm, "max_logit") for arm in (mhsa, ls))
    holds = [high[seed] > above and low[seed] < below for seed in high]
    verdict = "supported" if all(holds) else "inconclusive" if any(holds) else "contradicted"
    return each_run(start, [*integers(high), *integers(low)], len(holds), verdict)


def closing_row(start: str, study: str, mhsa: str, ls: str) -> Check:
    """A row on the gap between the validation losses at step 5,000, less that at step 20,000."""
    gaps = [difference(study, mhsa, ls, lambda run, step=step: run["validation"][step]) for step in ("5000", "20000")]
    return row(start, minus(*gaps), 1)


def context_gain(study: str, arm: str) -> BY_SEED:
    """The loss with 64 tokens of context, less that with all."""
    return column(study, arm, lambda run: run["by_context"]["64"] - run["by_context"][max(run["by_context"], key=int)])


def largest_part(study: str, arm: str, part: str) -> BY_SEED:
    """The largest part of a logit that is due to `"position"` or `"content"`."""
    return column(study, arm, lambda run: max(itertools.chain(*run["parts"][f"max_{part}"])))


def prose(page: str, text: str, *figures: str | float) -> Check:
    """A piece of a sentence."""
    return Check(page, text, [x if isinstance(x, str) else f"{x:,}" for x in figures])


def sooner_row(start: str, task: str, first: int, second: int) -> Check:
    """A row on a task with two numbers of global heads: medians, and the exact log-rank test."""
    groups = steps_of(task, first), steps_of(task, second)
    runs = [*groups[0], *groups[1]]
    observed, extreme, ways = surplus(*groups), 0, list(itertools.combinations(range(len(runs)), len(groups[0])))
    for chosen in ways:
        divided = [runs[i] for i in chosen], [runs[i] for i in range(len(runs)) if i not in chosen]
        extreme += abs(surplus(*divided)) >= abs(observed) - 1e-9
    p = extreme / len(ways)
    verdict = "inconclusive" if p >= 0.05 else "supported" if observed > 0 else "contradicted"
    medians = [f"{x:,.0f}" if x <= CAP else f">{CAP:,}" for x in map(statistics.median, groups)]
    figures = [*medians, f"{p:.2g}", str(len(groups[0])), verdict]
    return Check(CLAIMS, f"|{start}*|{{}}, {{}} steps, p = {{}}|{{}}|<verdict>|", figures)


def checks_of_logits() -> list[Check]:
    """Are attention logits kept small?"""
    ls, mhsa = (column("long-training", arm, "max_logit") for arm in ("ls", "mhsa"))
    diverged = [str(sum(run["diverged"] for run in results("long-training")[arm].values())) for arm in ("mhsa", "ls")]
    hot, cool = (column("learning-rates", f"mhsa-lr{rate}", "max_logit") for rate in ("0.03", "0.01"))
    assert min(hot.values()) > 100 > min(cool.values()), "0.03 must be the lowest rate at which `mhsa` passes 100"
    assert statistics.fmean(column("learning-rates", "ls-lr0.03", "max_logit").values()) > statistics.fmean(
        hot.values()
    )
    ratios = difference("long-training", "ls", "mhsa", lambda run: 2 ** growth(run))
    assert interval(ratios)[1] < 0 < interval(ratios)[2], "as a ratio, growth must be inconclusive"
    halved = {run["arm"]: run["values"] for run in lines_of("long-training", "half-initial-weights")}
    larger = [rate for rate in RATES if interval(doublings("learning-rates", f"ls-lr{rate}", f"mhsa-lr{rate}"))[1] > 0]
    return [
        explosion_row("[20,000 steps]*`mhsa` above 200, `ls` below 50 (paper)", "long-training", "mhsa", "ls", 200),
        each_run(
            "`mhsa` diverges, `ls` does not (paper: at 20,000 to 30,000)",
            diverged,
            2,
            "supported" if diverged == ["2", "0"] else "contradicted" if diverged[0] == "0" else "inconclusive",
        ),
        prose(
            CLAIMS,
            "half-initial-weights.jsonl) (one seed, later): `mhsa` {}, `ls` {}.",
            *(decimal(halved[arm]["max_logit"], 0) for arm in ("mhsa", "ls")),
        ),
        row("Growth from their second tenth", difference("long-training", "ls", "mhsa", growth), -1, 2),
        row(
            "[Rate 0.03]*passes 100 (paper)",
            doublings("learning-rates", "ls-lr0.03", "mhsa-lr0.03"),
            -1,
            2,
        ),
        prose(CLAIMS, "by first criteria, rate {} was contradicted", "0.03"),
        prose(CLAIMS, "at rates {}, {} and {}, LS-attention's are larger", *larger),
        row("[RoPE]*largest logit", doublings("positions", "ls-rope", "mhsa-rope"), -1, 2),
        row("No positions: largest logit", doublings("positions", "ls-none", "mhsa-none"), -1, 2),
        prose(
            README,
            "runs reach {} and {} with all heads global, {} and {} with LS-attention",
            *integers(mhsa),
            *integers(ls),
        ),
        row(
            "[2,048 tokens]*- 64 tokens, `mhsa`: grows with n/d (paper)",
            doublings("lengths", "mhsa-n2048", "mhsa-n64"),
            1,
            2,
        ),
        *checks_of_the_papers_size(),
    ]


def checks_of_the_papers_size() -> list[Check]:
    """The paper's first experiment at its own size."""
    study = "paper-size"
    runs = results(study)
    assert {arm: len(of_arm) for arm, of_arm in runs.items()} == {"mhsa": 2, "ls": 2, "local-only": 1}
    assert not any(run["diverged"] for of_arm in runs.values() for run in of_arm.values())
    mhsa, ls = (column(study, arm, "max_logit") for arm in ("mhsa", "ls"))
    ((seed, local),) = runs["local-only"].items()
    gain = context_gain(study, "mhsa")
    gate = judge({seed: x - MARGIN for seed, x in gain.items()}, 1, None)
    assert gate == "inconclusive", "the page says nothing about global heads"
    entropy = column(study, "mhsa", lambda run: statistics.fmean(itertools.chain(*run["looks"]["far_entropy"])))
    attempts = [
        {run["arm"]: run["values"] for run in lines_of(study, name)} for name in ("no-weight-decay", "half-rate")
    ]
    assert max(runs["mhsa"]["max_logit"] for runs in attempts) < 400, "the page says that both miss it"
    return [
        explosion_row("Largest logit: `mhsa` above 400, `ls` below 50 (paper)", study, "mhsa", "ls", 400),
        each_run("Divergence likewise (paper)", ["0", "0"], 2, "contradicted"),
        loss_row("Loss, `ls` - `mhsa` (paper)", difference(study, "ls", "mhsa")),
        closing_row("Their gap closes from step 5,000", study, "mhsa", "ls"),
        Check(
            CLAIMS,
            "|Context beyond 64 tokens gives `mhsa` more than 0.05 (ours)|{} ({} to {})|2|<verdict>|",
            [*effect(gain), gate],
        ),
        each_run(
            "If so, its attention there is sparse: entropy below 0.5 (paper)",
            [decimal(x, 2) for x in entropy.values()],
            2,
            gate,
        ),
        prose(
            CLAIMS,
            "`local-only` (one seed) reaches {}, and a loss {} above `ls` (paper: 0.14 to 0.18).",
            decimal(local["max_logit"], 0),
            decimal(local["eval_loss"] - runs["ls"][seed]["eval_loss"], 3),
        ),
        prose(
            CLAIMS,
            "In `mhsa`, positions alone make {} and {}, content {} and {}.",
            *(x for part in ("position", "content") for x in integers(largest_part(study, "mhsa", part))),
        ),
        prose(
            CLAIMS,
            "`mhsa` reaches {}, [at half the rate](../studies/results/paper-size/half-rate.jsonl) {}; "
            "`ls` {} and {} (until step 14,500). Both miss the 400 set beforehand.",
            *(decimal(runs[arm]["max_logit"], 0) for arm in ("mhsa", "ls") for runs in attempts),
        ),
        prose(README, "at the paper's size, {} and {}, {} and {}. In short", *integers(mhsa), *integers(ls)),
    ]


def checks_of_rotary_positions() -> list[Check]:
    """Long runs with rotary positions."""
    study, mhsa, ls = "positions-long", "mhsa-rope", "ls-rope"
    norm = [f"{arm}-qknorm" for arm in (mhsa, ls)]
    assert all(len(of_arm) == 3 for of_arm in results(study).values()) and len(results(study)) == 5
    largest = [max(run["max_logit"] for run in of_arm.values()) for of_arm in results(study).values()]
    assert max(largest) < 120, "the page says that logits grow to about 100"
    gain = context_gain(study, mhsa)
    assert interval(gain)[2] < MARGIN, "claims about global heads must stay open"
    every_gain = [
        gain
        for study, arms in (("equal-time", ("mhsa", "ls")), ("paper-size", ("mhsa", "ls")), (study, (mhsa, ls, *norm)))
        for arm in arms
        for gain in context_gain(study, arm).values()
    ]
    return [
        explosion_row("Logits of `mhsa-rope` above 200, of `ls-rope` below 50 (paper)", study, mhsa, ls, 200),
        explosion_row("Likewise with QK-norm", study, *norm, 200),
        row("Largest logit, `ls-rope` - `mhsa-rope` (paper)", doublings(study, ls, mhsa), -1, 2),
        loss_row("Loss, `ls-rope` - `mhsa-rope` (paper)", difference(study, ls, mhsa)),
        loss_row("Loss, QK-norm", difference(study, *reversed(norm))),
        closing_row("Their gap closes likewise", study, mhsa, ls),
        prose(CLAIMS, "tokens gives `mhsa-rope` {} ({} to {}).", *effect(gain)),
        prose(
            CLAIMS, "beyond 64 tokens gains {} to {} nats", decimal(min(every_gain), 2), decimal(max(every_gain), 2)
        ),
        prose(
            README,
            "(rotary positions: {}, {}, {}; {}, {}, {})",
            *(f for arm in (mhsa, ls) for f in integers(column(study, arm, "max_logit"))),
        ),
    ]


def checks_of_losses() -> list[Check]:
    """Is the loss lower, and for how long?"""
    study = "stabilizers"
    ls, mhsa = (best_rate("learning-rates", name, RATES) for name in ("ls", "mhsa"))
    with_norm, alone = (best_rate(study, name, RATES[1:4]) for name in ("mhsa-qknorm", "ls"))
    stabilized = [best_rate(study, f"mhsa-{x}", RATES[1:4]) for x in ("qknorm", "softcap", "zloss", "qkclip", "adagc")]
    assert with_norm == lowest(study, stabilized), "QK-norm must be the best stabilizer of `mhsa`"
    longest, shortest = (difference("lengths", f"ls-n{n}", f"mhsa-n{n}") for n in (2048, 64))
    steps = [step for step, _ in results("long-training")["ls"][42]["curves"]["loss"]]
    assert min(steps, key=lambda step: statistics.fmean(gap_at(step).values())) == 3006, "the lead must peak there"
    leads = [{seed: -gap for seed, gap in gap_at(step).items()} for step in (3006, 20000)]
    return [
        loss_row("[Best rate of each]", difference("learning-rates", ls, mhsa)),
        loss_row("[2.3M parameters]*1,200 steps", books("ls", "mhsa")),
        loss_row("[20,000 steps]*final validation loss", difference("long-training", "ls", "mhsa")),
        prose(
            CLAIMS,
            "peaks at {} nats ({} to {}) at step 3,006, and shrinks to {} ({} to {}) at 20,000.",
            *(figure for lead in leads for figure in effect(lead)),
        ),
        prose(
            README,
            "shrinks from {} to {} [nats](",
            *(decimal(statistics.fmean(lead.values()), 2) for lead in leads),
        ),
        loss_row("[RoPE]*one rate", difference("positions", "ls-rope", "mhsa-rope")),
        loss_row("No positions (reviewers)", difference("positions", "ls-none", "mhsa-none")),
        loss_row("Sinusoidal positions", difference("positions", "ls-sinusoidal", "mhsa-sinusoidal")),
        loss_row("[Gain is larger at 2,048 tokens]*than at 64", minus(longest, shortest)),
        loss_row("No gain at 64 tokens", difference("lengths", "ls-n64", "mhsa-n64"), 0),
        loss_row("[Against `mhsa` with QK-norm", difference(study, alone, with_norm)),
        row("Sensitivity: mean over five rates", minus(sensitivity("ls"), sensitivity("mhsa")), -1),
        *checks_of_equal_time(),
    ]


def checks_of_equal_time() -> list[Check]:
    """The losses after an hour of one core."""
    lines = lines_of("equal-time")
    runs = [line["values"] for line in lines]
    assert all(run["wall_seconds"] <= 1.05 * run["cpu_seconds"] for run in runs), "a run was disturbed"
    loss = {arm: column("equal-time", arm) for arm in ("mhsa", "ls", "layers", "local-only")}
    assert sum(map(len, loss.values())) == len(lines), "a seed was run twice"
    assert all(len(losses) == 3 for losses in loss.values()), "the page says that all have three seeds"

    def lead(start: int, stop: int) -> BY_SEED:
        """Of `ls` in training loss, between two numbers of minutes."""

        def loss_of(run: dict) -> float:
            return statistics.fmean(loss for seconds, loss in run["loss_over_seconds"] if start < seconds / 60 <= stop)

        return difference("equal-time", "mhsa", "ls", loss_of)

    def mean(values: BY_SEED, digits: int) -> str:
        return decimal(statistics.fmean(values.values()), digits)

    return [
        *(
            Check(
                CLAIMS,
                f"|`{arm}`{about}|{{}}|{{}}|",
                [mean(losses, 3), mean(column("equal-time", arm, "step"), 0)],
            )
            for (arm, losses), about in zip(loss.items(), ("", "", ": five local, one global", ""))
        ),
        prose(CLAIMS, "leads by {} after a third, by {} at the end.\n", mean(lead(15, 20), 2), mean(lead(55, 61), 2)),
        loss_row("[Equal time]", minus(loss["ls"], loss["mhsa"])),
        loss_row("None, [equal time]*(paper: also outside)", minus(loss["ls"], loss["local-only"])),
        loss_row("`ls` - `layers`, equal time", minus(loss["ls"], loss["layers"]), 0),
        prose(
            CHOOSING,
            "after an hour of one core, {} with none, {} with 1, {} with 6",
            *(mean(loss[arm], 2) for arm in ("local-only", "ls", "mhsa")),
        ),
        prose(
            README,
            "after one core-hour (one rate): {} (training: shrinking); {} more (perhaps 0) without global heads.",
            mean(minus(loss["mhsa"], loss["ls"]), 2),
            mean(minus(loss["ls"], loss["local-only"]), 2),
        ),
    ]


def checks_of_heads() -> list[Check]:
    """What do global heads do?"""
    local, one = (best_rate("learning-rates", name, RATES) for name in ("local-only", "ls"))
    grid, layers, tasks = "heads-and-windows", "heads-or-layers", "long-range"
    assert lowest(grid, [f"g{count}" for count in range(2, 7)]) == "g3", "three heads must be the best other number"
    assert lowest(grid, [f"w{window}" for window in (4, 8, 24, 48, 96, 256)]) == "w8", (
        "8 must be the best other window"
    )
    far = {arm: column(tasks, arm, "far_accuracy") for arm in results(tasks)}
    worst = min(min(far[f"{task}-1"].values()) for task in ("recall", "copy", "needle"))

    enough = [f"{math.floor(1000 * worst) / 10:g}%"]

    def loss_of(arm: str) -> float:
        return statistics.fmean(column(grid, arm).values())

    by_count = sorted(map(loss_of, ("g0", "w12", "g2", "g3", "g4", "g5", "g6")))
    narrow, wide = [[loss_of(f"w{window}") for window in windows] for windows in ((4, 8, 12, 24), (48, 96, 256))]
    assert by_count[:3] == sorted(map(loss_of, ("g0", "w12", "g3"))) and by_count[-1] == loss_of("g6")
    differences = [difference(grid, f"g{count}", "w12") for count in (0, *range(2, 7))]
    assert all(low < 0 < high for _, low, high in map(interval, differences)), "a number of heads differs from one"
    tuned = statistics.fmean(column("learning-rates", best_rate("learning-rates", "mhsa", RATES)).values())
    bounds = [decimal(x, 2) for x in (min(narrow), max(narrow), min(wide), max(wide))]

    def learned_recall(count: int) -> int:
        arms = [results("time-to-learn")[f"recall-{count}-lr{rate}"] for rate in LEARNING_RATES]
        assert all(len(arm) == 5 for arm in arms), "the page says that all have five runs"
        return sum(run["steps"] is not None for arm in arms for run in arm.values())

    learned = [str(learned_recall(count)) for count in (1, 2, 3, 6)]
    assert learned_recall(0) == learned_recall(6), "six and none are told together"
    none_global = [line["values"]["steps"] for line in lines_of("time-to-learn") if "-0-" in line["arm"]]
    assert set(none_global) == {None}, "the page says that none without global heads learns"
    lower_rate: dict[str, list[int | None]] = {"copy": [], "recall": []}
    for run in lines_of("time-to-learn", "lower-rate"):
        lower_rate[run["arm"].split("-")[0]].append(run["values"]["steps"])
    assert len(lower_rate["copy"]) == 5 and max(lower_rate["copy"]) <= CAP and lower_rate["recall"] == [None, None]
    without = minus(column("learning-rates", one), column("learning-rates", local))
    low, high = -0.18, -0.14  # 15 to 20% less perplexity

    def place(differences: BY_SEED) -> str:
        """Whether an interval lies outside what the paper says."""
        _, lowest, highest = interval(differences)
        return "outside" if highest < low or lowest > high else "inside"

    at_equal_time = minus(column("equal-time", "ls"), column("equal-time", "local-only"))
    where = place(without)
    assert place(at_equal_time) == "outside", "the page says so"
    none = max(statistics.fmean(far[f"{task}-0"].values()) for task in ("recall", "copy", "needle"))
    return [
        prose(
            CHOOSING,
            "lowest with 0, 1 or 3 ({} to {} nats per token) and highest with 6 ({}; {} at its best rate); no",
            *(decimal(loss, 2) for loss in (by_count[0], by_count[2], by_count[-1], tuned)),
        ),
        prose(CHOOSING, "windows of 4 to 24 tokens give {} to {}, 48 to 256 give {} to {} after", *bounds),
        prose(CHOOSING, "at least {} correct; none: at most {}%", *enough, decimal(math.ceil(100 * none), 0)),
        loss_row(f"[None]*(paper: {low} to {high} nats, {where})", without),
        loss_row("None, [2.3M parameters]", books("ls", "local-only")),
        loss_row("[Three instead of one]", difference(grid, "g3", "w12"), 0),
        loss_row("Three instead of one, [RoPE]", difference(layers, "half-spread", "ls"), 0),
        loss_row("Windows of 12 do as well as the best, 8", difference(grid, "w12", "w8"), 0),
        each_run("[Recall*above 50%", enough, 3, "supported" if worst > 0.5 else "contradicted"),
        prose(CLAIMS, "without global heads, none of {} runs learns", str(len(none_global))),
        sooner_row("[Copying]", "copy", 1, 6),
        prose(CLAIMS, "(later), copying with six took {}, recall", f"{statistics.median(lower_rate['copy']):,.0f}"),
        sooner_row("Recall likewise", "recall", 1, 6),
        prose(
            CHOOSING,
            "three rates, was learned with one in {} of 15 runs, two {}, three {}, six or none {} |",
            *learned,
        ),
        sooner_row("Copying: two", "copy", 2, 1),
        sooner_row("Recall: two", "recall", 2, 1),
    ]


def checks_of_lengths() -> list[Check]:
    """Does it read more than it was trained on?"""

    def loss_beyond(run: dict) -> float:
        return run["beyond"]["4"] - run["beyond"]["1"]

    lost = [minus(legal(f"{kind}-whole"), legal(f"{kind}-30")) for kind in ("ls", "mhsa")]
    kept = {kind: column("lengths", f"{kind}-rope", loss_beyond) for kind in ("ls", "mhsa")}
    return [
        loss_row("[Text, RoPE]*four times the length", minus(kept["ls"], kept["mhsa"])),
        loss_row("Text, no positions", difference("lengths", "ls-none", "mhsa-none", loss_beyond)),
        row("[Set complement]", minus(distance("ls"), distance("mhsa")), -1),
        row("[Othello]", minus(*lost), -1),
        prose(
            README,
            "with rotary positions, LS-attention loses {} nats less from 512 to 2,048 tokens;",
            decimal(statistics.fmean(minus(kept["mhsa"], kept["ls"]).values()), 2),
        ),
    ]


def checks_of_explanation() -> list[Check]:
    """Is the paper's explanation right?"""
    study, hidden = "degrees-of-freedom", "sparse-dependencies"
    dense, windowed, sparse = "dense-local-causal", "dense-local-windowed", "sparse-causal"

    def growth_of(key: str, arm: str = dense) -> BY_SEED:
        return minus(*(log2(column(study, arm, fitted(key, length))) for length in (-1, 0)))

    close, final, divergence = (fitted(key, -1) for key in ("max_logit_at_close_fit", "max_logit", "divergence"))
    return [
        prose(CLAIMS, "*at equal fit*, to {} nats.", "0.1"),  # `max_logit_at_close_fit` of the study
        row("[Dense local attention]*needs more as n/d grows (", growth_of("max_logit"), 1, 2),
        row("Dense, at equal fit", growth_of("max_logit_at_close_fit"), 1, 2),
        row("Sparse needs no more, at equal fit", growth_of("max_logit_at_close_fit", sparse), -1, 2),
        row("Sparse needs less than dense", doublings(study, sparse, dense, final), -1, 2),
        row("Sparse - dense, at equal fit", doublings(study, sparse, dense, close), -1, 2),
        row("Sparse needs less than mixed", doublings(study, sparse, "mixed-causal", final), -1, 2),
        row("A window needs less", doublings(study, windowed, dense, final), -1, 2),
        row("It fits better", difference(study, windowed, dense, divergence), -1, 4),
        row("[Half of the keys hidden]", doublings(hidden, "mhsa-hidden", "mhsa"), -1, 2),
    ]


def checks_of_tools() -> list[Check]:
    """The pages on averages, losses and soft thinking, and the table of tools on the front page."""
    checks = []
    for name, title in (("attention-only", "single layer"), ("mhsa", "`mhsa`"), ("ls", "`ls`")):
        plain = distance(name)
        for weights in ("ema", "bema"):
            gain = minus(distance(name, weights=weights), plain)
            checks.append(row(f"{weights.upper()}, {title}", gain, -1, page=AVERAGING))
        for remedy, label in (("dropout", "Dropout"), ("post-norm", "Post-norm")):
            checks.append(row(f"{label}, {title}", minus(distance(name, remedy), plain), -1, page=AVERAGING))
    for weights in ("ema", "bema"):
        for where, moves in (("beyond", "31 to 60"), ("within", "2 to 30")):
            for name in ("mhsa", "ls"):
                gain = minus(legal(f"{name}-30", weights, where), legal(f"{name}-30", "raw", where))
                checks.append(row(f"{weights.upper()}, {moves}, `{name}`", gain, 1, page=AVERAGING))

    wrong = (0.2, 0.4, 0.6)
    for exponent in ("0.9", "0.7", "0.5"):
        gain = minus(accuracy(f"e{exponent}", *wrong), accuracy("e1", *wrong))
        checks.append(row(f"Wrong labels, `e = {exponent}`", gain, 1, page=AVERAGING))
    for fraction, start in ((0.0, "No"), (0.2, "20%"), (0.6, "60%")):
        gain = minus(accuracy("e0.5", fraction), accuracy("e1", fraction))
        checks.append(row(f"{start} wrong labels, `e = 0.5`", gain, 1, page=AVERAGING))
    for arm, title in (("gce", "generalized"), ("sce", "symmetric")):
        checks.append(
            row(
                f"Wrong labels, {title}*`e = 0.5`",
                minus(accuracy("e0.5", *wrong), accuracy(arm, *wrong)),
                1,
                page=AVERAGING,
            )
        )

    def compare(start: str, first: tuple[str, str], second: tuple[str, str], attempts: int) -> Check:
        return row(start, minus(passed(*first, attempts), passed(*second, attempts)), 1, page=SOFT)

    none, soft, grpo, soft_grpo = ("none", "discrete"), ("none", "soft"), ("grpo", "discrete"), ("soft-grpo", "soft")
    for attempts in (1, 32):
        checks += [
            compare(f"SofT-GRPO above GRPO, pass@{attempts}", soft_grpo, grpo, attempts),
            compare(f"SofT-GRPO above no training, pass@{attempts}", soft_grpo, none, attempts),
            compare(f"GRPO above no training, pass@{attempts}", grpo, none, attempts),
        ]
    checks.append(compare("Soft thinking above discrete thinking, no training, pass@1", soft, none, 1))

    def percent(values: BY_SEED) -> str:
        return decimal(100 * statistics.fmean(values.values()), 0)

    at_first = [percent(passed(*method, 1)) for method in (soft_grpo, none, grpo)]
    raw = [decimal(statistics.fmean(distance(name).values()), 3) for name in ("attention-only", "mhsa", "ls")]
    trained = [distance("attention-only", weights=weights, where="trained") for weights in ("bema", "raw")]
    finer = [decimal(100 * statistics.fmean(accuracy(arm, 0.2).values()), 1) for arm in ("e0.5", "e1", "gce", "sce")]
    reached = (
        "reaches {}% test accuracy, with cross-entropy {}%, with generalized cross-entropy {}%, and with symmetric"
    )
    checks.append(prose(AVERAGING, "{} for the single layer, {} for `mhsa` and {} for `ls`", *raw))
    checks.append(prose(AVERAGING, "({} instead of {})", *(decimal(statistics.fmean(x.values()), 3) for x in trained)))
    checks.append(prose(AVERAGING, f"{reached} cross-entropy {{}}%", *finer))
    checks.append(prose(SOFT, "it answers {}% of them correctly", percent(passed(*none, 1))))
    checks.append(prose(SOFT, "to {}%, and TRL's GRPO to {}%", at_first[0], at_first[2]))
    return checks


def identity(line: dict) -> tuple:
    """What identifies a run, also where several studies contain it."""
    values = line["values"]
    copied = (values.get("eval_loss"), values.get("train_seconds"))
    return (line["seed"], *(copied if None not in copied else (line["arm"], line["seconds"])))


def checks_of_pages() -> list[Check]:
    """All checks of the three pages."""
    pages = "".join((ROOT / page).read_text(encoding="utf-8") for page in (CLAIMS, AVERAGING, SOFT))
    studies = set(re.findall(r"studies/results/([\w-]+)/report\.md", pages))
    runs = {identity(line): line for study in sorted(studies) for line in lines_of(study)}
    assert not any(line["environment"]["commit"].endswith("-dirty") for line in runs.values()), "uncommitted changes"
    repeated = sum(line["environment"]["commit"] == REPEATED for line in runs.values())
    return [
        *checks_of_logits(),
        *checks_of_rotary_positions(),
        *checks_of_losses(),
        *checks_of_heads(),
        *checks_of_lengths(),
        *checks_of_explanation(),
        *checks_of_tools(),
        prose(CLAIMS, "{} of {} runs had uncommitted changes and were repeated", repeated, len(runs)),
    ]


# Pages


SECTIONS = {CLAIMS: None, README: ("What we found",)}
"""Where every number with a decimal point must be checked: on the whole page, or in some of its sections."""

ROW = re.compile(rf"^\|([^|\n]*)\|.*\| *({'|'.join(VERDICTS)}) *\|$", re.MULTILINE)
"""A row of a table that ends with a verdict."""


def pattern(text: str) -> re.Pattern:
    """A piece of a page as a regular expression, in which any white space is a space, and `*` the rest of a cell."""
    parts = re.escape(text).replace(r"\*", r"[^|\n\d]*?").replace("<verdict>", r"([^|\n]+?)")
    parts = parts.replace(r"\{\}", r"([^\s|()]+?)").replace(r"\ ", r"\s+").replace(r"\|", r" *\| *")
    return re.compile(parts, re.MULTILINE)


def find_faults(folder: Path = ROOT) -> list[Fault]:
    """Compares the pages in a copy of the documentation with the results. Returns what does not agree."""
    checks = checks_of_pages()
    pages = {
        page: (folder / page).read_text(encoding="utf-8") for page in dict.fromkeys(check.page for check in checks)
    }
    total, supported, contradicted, equal, inconclusive = count_verdicts(pages[CLAIMS])
    later = str(sum("(paper, later" in claim for claim, _ in ROW.findall(pages[CLAIMS])))
    checks.append(Check(CLAIMS, SCOREBOARD, [total, later, supported, contradicted, equal, inconclusive]))
    p_values = [
        check.p_value
        for check in checks
        if check.p_value is not None and "(paper" in "".join(m[0] for m in pattern(check.text).finditer(pages[CLAIMS]))
    ]
    checks.append(Check(CLAIMS, CORRECTED, significant(p_values)))
    checks.append(Check(README, SHORT_SCOREBOARD, [total, supported, contradicted, equal, inconclusive]))
    faults, covered = [], {page: [] for page in pages}
    for page, text, figures, _ in checks:
        matches = list(pattern(text).finditer(pages[page]))
        if len(matches) != 1:
            faults.append(Fault(page, 1, f"{len(matches)} places, instead of one, read {text!r}; figures: {figures}"))
            continue
        covered[page].append(matches[0].span())
        if list(matches[0].groups()) != list(figures):
            says, line = ", ".join(matches[0].groups()), line_of(pages[page], matches[0].start())
            faults.append(Fault(page, line, f"the page says {says}; the results say {', '.join(figures)} ({text!r})"))
    for page, text in pages.items():
        for start, what in figures_of(page, text):
            if not any(first <= start < last for first, last in covered[page]):
                faults.append(Fault(page, line_of(text, start), f"no check covers {what!r}"))
    return faults


SCOREBOARD = (
    "Of {} comparisons testing claims of the [paper](https://arxiv.org/abs/2505.15548), {} added later, {} are "
    "supported, {} contradicted, {} equal within 0.05 and {} inconclusive, as are about half of the reports' others."
)
CORRECTED = "Of the paper's {} intervals, {} exclude 0 ({} with Benjamini and Hochberg's correction, {} with Holm's)"
SHORT_SCOREBOARD = "of {} comparisons, {} support them, {} contradict them, {} find no difference, {} are inconclusive"


def count_verdicts(page: str) -> list[str]:
    """The number of rows on claims of the paper, and how many of them have each verdict."""
    found = [verdict for claim, verdict in ROW.findall(page) if "(paper" in claim]
    return [str(len(found)), *(str(found.count(verdict)) for verdict in VERDICTS)]


def figures_of(page: str, text: str) -> list[tuple[int, str]]:
    """What must be checked on a page, with its position: rows with a verdict, and numbers with a decimal point."""
    found = [(match.start(), match[1].strip()) for match in ROW.finditer(text)]
    if page in SECTIONS:
        without_links = re.sub(
            r"\]\([^)]*\)|`[^`]*`|```.*?```", lambda match: " " * len(match[0]), text, flags=re.DOTALL
        )
        spans = [section(text, title) for title in SECTIONS[page] or (None,)]
        for match in re.finditer(r"\d[\d,]*\.\d+\w*", without_links):
            if any(start <= match.start() < end for start, end in spans) and match[0] not in UNCHECKED:
                found.append((match.start(), match[0]))
    return found


def section(text: str, title: str | None) -> tuple[int, int]:
    """Where a section begins and ends; without a title, the whole page."""
    if title is None:
        return 0, len(text)
    start = text.index(f"\n## {title}\n")
    end = text.find("\n## ", start + 1)
    return start, len(text) if end < 0 else end


def line_of(text: str, position: int) -> int:
    """The number of the line at a position, from 1."""
    return text.count("\n", 0, position) + 1


if __name__ == "__main__":
    faults = find_faults()
    print("\n".join(map(str, faults)) or "All figures agree with the results.")
    sys.exit(bool(faults))
