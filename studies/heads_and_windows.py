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
    curves_over,
    format_values,
    is_below,
    is_no_lower,
    no_lower,
    results_table,
)


HEADS = (0, 1, 2, 3, 4, 5, 6)
WINDOWS = (4, 8, 12, 24, 48, 96, 256)
SHORT_WINDOWS = (4, 8, 12, 24, 48)
SHORT = 128
"""Block size, in tokens, of the second series of windows."""


class HeadsAndWindows(TrainingStudy):
    """One training run for each number of global heads, and one for each window."""

    name = "heads-and-windows"
    title = "Number of global heads, and window"
    question = """\
The paper has one global head among 6 or 12 and windows of 50 to 100 tokens, and leaves open how to choose them.
Reviewers asked for both ablations. Is there a rule in the length n and the dimension d of a head?"""
    protocol = f"""\
All models have six heads in each layer. `g0` to `g6` have that number of global heads, and windows of 12 tokens; `w4`
to `w256` have one global head, and windows of that many tokens. `n{SHORT}-w4` to `n{SHORT}-w48` are the same on blocks
of {SHORT} tokens, with as many tokens in a step: if the best window follows n, it is shorter there."""
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
            no_lower("every other window", "`w12`"),
            "windows at both ends, `w4` and `w256`, have a lower mean loss by more than two standard errors",
        ),
        "window-follows-length": Claim(
            "the best window grows with the length",
            "open question of the paper",
            f"the window with the lowest mean loss is longer at 512 tokens than at {SHORT}, and at 512 tokens it is "
            f"better than the best one of {SHORT} by more than two standard errors",
            f"it is longer at {SHORT} tokens",
        ),
    }
    scales = {
        "micro": Scale("micro", {"max_steps": 600}, 3, 0.9),
        "paper": Scale("paper-v1", {}, 3, 4000.0),
    }

    def arms(self, scale: str) -> Mapping[str, Any]:
        """The scale `paper` has the same numbers of heads, but windows and blocks that are four times as long."""
        factor = 1 if scale == "micro" else 4
        arms = {f"g{count}": {"config_overrides": {"num_global_heads": count}} for count in HEADS if count != 1}
        arms |= {f"w{window}": {"config_overrides": {"sliding_window": window * factor}} for window in WINDOWS}
        short: dict[str, Any] = {"block_size": SHORT * factor}
        short["per_device_train_batch_size"] = 16 if scale == "micro" else 512
        for window in SHORT_WINDOWS:
            arms[f"n{SHORT}-w{window}"] = {"config_overrides": {"sliding_window": window * factor}, **short}
        return arms

    def judge(self, runs: Runs) -> dict[str, Finding]:
        """Judges each of `claims`."""
        heads = {count: runs.column("w12" if count == 1 else f"g{count}", "eval_loss") for count in HEADS}
        windows = {window: runs.column(f"w{window}", "eval_loss") for window in WINDOWS}
        short = {window: runs.column(f"n{SHORT}-w{window}", "eval_loss") for window in SHORT_WINDOWS}
        better_heads = [count for count in HEADS if is_below(heads[count], heads[1])]
        better_windows = [window for window in WINDOWS if is_below(windows[window], windows[12])]
        best, best_short = _best(windows), _best(short)
        if best > best_short:
            follows = "seen" if is_below(windows[best], windows.get(best_short, [])) else "not seen"
        else:
            follows = "opposite" if best < best_short else "not seen"
        one_is_enough = all(is_no_lower(heads[count], heads[1]) for count in HEADS if count != 1)
        paper_is_good = all(is_no_lower(windows[window], windows[12]) for window in WINDOWS if window != 12)
        return {
            "one-global-head": Finding(
                "loss by number of global heads: " + _list(heads),
                "opposite" if max(better_heads, default=0) > 1 else "seen" if one_is_enough else "not seen",
            ),
            "paper-window": Finding(
                "loss by window: " + _list(windows),
                "opposite" if {4, 256} <= set(better_windows) else "seen" if paper_is_good else "not seen",
            ),
            "window-follows-length": Finding(
                f"best window {best} of 512 tokens, {best_short} of {SHORT} tokens ({_list(short)})", follows
            ),
        }

    def report(self, runs: Runs, folder: Path) -> str:
        """Final figures, and plots of the loss over heads and windows."""
        heads = [(count, "w12" if count == 1 else f"g{count}") for count in HEADS]
        rows = {
            "n = 512": [(window, f"w{window}") for window in WINDOWS],
            f"n = {SHORT}": [(window, f"n{SHORT}-w{window}") for window in SHORT_WINDOWS],
        }
        label = "final validation loss (nats per token)"
        plot_curves(
            folder / "heads.png", {"n = 512": curves_over(runs, heads, "eval_loss")}, "global heads of 6", label
        )
        curves = {name: curves_over(runs, places, "eval_loss") for name, places in rows.items()}
        plot_curves(folder / "windows.png", curves, "window (tokens)", label, log_x=True)
        return f"""\
{results_table(runs)}

`g1` is `w12`.

![Loss over the number of global heads](heads.png)

![Loss over the window](windows.png)"""


STUDY = HeadsAndWindows()


def _best(losses: Mapping[int, list[float]]) -> int:
    return min(losses, key=lambda window: sum(losses[window]))  # infinite where a run diverged


def _list(losses: Mapping[int, list[float]]) -> str:
    return ", ".join(f"{number}: {format_values(values)}" for number, values in losses.items())
