"""How many global heads, and which window?"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lsgpt.training.plots import plot_curves

from .study import (
    Claim,
    Finding,
    Runs,
    Scale,
    TrainingStudy,
    blocks_of,
    curves_over,
    format_values,
    is_below,
    is_no_lower,
    no_lower,
    results_table,
)


HEADS = (0, 1, 2, 3, 4, 5, 6)
WINDOWS = {"micro": (4, 8, 12, 24, 48, 96, 256), "paper": (16, 32, 50, 96, 192, 384, 1024)}
PAPERS_WINDOW = {"micro": 12, "paper": 50}
LENGTH = {"micro": 512, "paper": 2048}
"""Block size in tokens."""

SHORT_WINDOWS = {"micro": (4, 8, 12, 24, 48), "paper": (16, 32, 50, 96, 192)}
SHORT = {"micro": 128, "paper": 512}
"""Windows and block size of a second series."""


class HeadsAndWindows(TrainingStudy):
    """One training run for each number of global heads, and one for each window."""

    name = "heads-and-windows"
    title = "Number of global heads, and window"
    question = """\
The paper has one global head among 6 or 12 and windows of 50 to 100 tokens, and leaves open how to choose them.
Reviewers asked for both ablations. Is there a rule in the length n and the dimension d of a head?"""
    protocol = """\
All models have six heads in each layer. `g0` to `g6` have that number of global heads, and the paper's window (12
tokens at `micro`). `w...` have one global head, and windows of that many tokens. `n...-w...` are the same on blocks of
a quarter of the length (128 tokens at `micro`), with as many tokens in a step and the same text in the evaluation: if
the best window follows the length, it is shorter there."""
    claims = {
        "one-global-head": Claim(
            "one global head in a layer is enough",
            "paper",
            no_lower("every other number", "`g1`"),
            "two or more global heads have a lower mean loss by more than two standard errors",
        ),
        "paper-window": Claim(
            "a window of a fortieth of the length (50 of 2,048 tokens) is a good choice",
            "paper",
            no_lower("every other window", "this one"),
            "the shortest and the longest window have a lower mean loss by more than two standard errors",
        ),
        "window-follows-length": Claim(
            "the best window grows with the length",
            "open question of the paper",
            "the window with the lowest mean loss is longer on long blocks than on short ones, and on long blocks it "
            "is better than the best one of short blocks by more than two standard errors",
            "it is longer on short blocks",
        ),
    }
    scales = {
        "micro": Scale("micro", {"max_steps": 600}, 3, 0.9),
        "paper": Scale("paper-v1", {}, 3, 4000.0),
    }

    def arms(self, scale: str) -> Mapping[str, Any]:
        """The number of global heads, or the window and the length of the blocks."""
        arms: dict[str, Any] = {}
        for count, arm in _heads(scale).items():
            arms[arm] = {"config_overrides": {"num_global_heads": count}}
        for window, arm in _windows(scale).items():
            arms[arm] = {"config_overrides": {"sliding_window": window}}
        for window, arm in _short_windows(scale).items():
            arms[arm] = {"config_overrides": {"sliding_window": window}, **blocks_of(SHORT[scale], scale)}
        return arms

    def judge(self, runs: Runs) -> dict[str, Finding]:
        """Judges each of `claims`."""
        heads, windows, short = (
            {number: runs.column(arm, "eval_loss") for number, arm in arms_of(runs.scale).items()}
            for arms_of in (_heads, _windows, _short_windows)
        )
        usual = PAPERS_WINDOW[runs.scale]
        better_heads = [count for count in HEADS if is_below(heads[count], heads[1])]
        better_windows = [window for window in windows if is_below(windows[window], windows[usual])]
        best, best_short = _best(windows), _best(short)
        if best > best_short:
            follows = "seen" if is_below(windows[best], windows.get(best_short, [])) else "not seen"
        else:
            follows = "opposite" if best < best_short else "not seen"
        one_is_enough = all(is_no_lower(heads[count], heads[1]) for count in HEADS if count != 1)
        paper_is_good = all(is_no_lower(windows[window], windows[usual]) for window in windows if window != usual)
        ends_are_better = {min(windows), max(windows)} <= set(better_windows)
        return {
            "one-global-head": Finding(
                "loss by number of global heads: " + _list(heads),
                "opposite" if max(better_heads, default=0) > 1 else "seen" if one_is_enough else "not seen",
            ),
            "paper-window": Finding(
                "loss by window: " + _list(windows),
                "opposite" if ends_are_better else "seen" if paper_is_good else "not seen",
            ),
            "window-follows-length": Finding(
                f"best window {best} of {LENGTH[runs.scale]:,} tokens, {best_short} of {SHORT[runs.scale]} tokens "
                f"({_list(short)})",
                follows,
            ),
        }

    def report(self, runs: Runs, folder: Path) -> str:
        """Final figures, and plots of the loss over heads and windows."""
        long, short = f"n = {LENGTH[runs.scale]:,}", f"n = {SHORT[runs.scale]}"
        label = "final validation loss (nats per token)"
        for file, series, what, log_x in (
            ("heads.png", {long: _heads}, "global heads of 6", False),
            ("windows.png", {long: _windows, short: _short_windows}, "window (tokens)", True),
        ):
            curves = {
                name: curves_over(runs, arms_of(runs.scale).items(), "eval_loss") for name, arms_of in series.items()
            }
            plot_curves(folder / file, curves, what, label, log_x=log_x)
        return f"""\
{results_table(runs)}

`g1` is `w{PAPERS_WINDOW[runs.scale]}`.

![Loss over the number of global heads](heads.png)

![Loss over the window](windows.png)"""


STUDY = HeadsAndWindows()


def _heads(scale: str) -> dict[int, str]:
    """The arm of each number of global heads."""
    return {count: f"w{PAPERS_WINDOW[scale]}" if count == 1 else f"g{count}" for count in HEADS}


def _windows(scale: str) -> dict[int, str]:
    """The arm of each window."""
    return {window: f"w{window}" for window in WINDOWS[scale]}


def _short_windows(scale: str) -> dict[int, str]:
    """The arm of each window on short blocks."""
    return {window: f"n{SHORT[scale]}-w{window}" for window in SHORT_WINDOWS[scale]}


def _best(losses: Mapping[int, list[float]]) -> int:
    return min(losses, key=lambda window: sum(losses[window]))  # infinite where a run diverged


def _list(losses: Mapping[int, list[float]]) -> str:
    return ", ".join(f"{number}: {format_values(values)}" for number, values in losses.items())
