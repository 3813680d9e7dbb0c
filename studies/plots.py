"""
Plots of studies: the mean over seeds, with its 95% interval unless there are many lines, the seeds faintly behind it,
and labels at the lines.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogFormatter, NullLocator

from lsgpt.utilities.plots import BASELINE, GLOBAL, LOCAL, OTHERS

from .comparisons import half_width


STYLES = ("-", "--", ":", "-.")
MOST_BANDS = 4
"""With more labels, intervals would cover each other; the seeds alone show the spread then."""

NUMBER = FuncFormatter(lambda value, _: f"{value:,g}")

Curves = Mapping[str, Sequence[Sequence[tuple[float, float]]]]
"""For each label, the curves of its seeds."""


def looks_of(labels: Sequence[str]) -> dict[str, tuple[str, str]]:
    """
    The colour and line style of each label: multi-head attention has the colour of global heads, LS-attention that of
    local heads, models without global heads grey, whatever else stands in the label; styles tell them apart. Of more
    than four variants of one kind, all but the first have colours of their own.
    """
    families = {"local-only": BASELINE, "mhsa": GLOBAL, "ls": LOCAL}
    others = iter(OTHERS * len(labels))
    used: dict[str, int] = {}
    looks = {}
    for label in labels:
        family = next((name for name in families if label.startswith(name)), None)
        is_crowded = family and used.get(families[family]) and sum(x.startswith(family) for x in labels) > len(STYLES)
        color = next(others) if family is None or is_crowded else families[family]
        looks[label] = (color, STYLES[used.get(color, 0) % len(STYLES)])
        used[color] = used.get(color, 0) + 1
    return looks


def plot(path: str | Path, curves: Curves, xlabel: str, ylabel: str, log_x: bool = False, log_y: bool = False):
    """
    Draws curves. Where all seeds of a label have the same x, their mean is drawn with its interval; points that cannot
    be drawn are marked with crosses at the upper edge.

    Args:
        path: The PNG file to write.
        curves: See `Curves`.
        xlabel, ylabel: What the axes show, with units.
        log_x, log_y: Whether the axes are logarithmic.
    """
    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.subplots()
    ends: list = []
    heights: list[float] = []
    places: set[float] = set()
    for label, (color, style) in looks_of(list(curves)).items():
        lines = [np.array(line, dtype=float).reshape(-1, 2) for line in curves[label] if line]
        shown = []
        for line in lines:
            can_draw = np.isfinite(line[:, 1]) & (line[:, 1] > (0 if log_y else -np.inf))
            shown.append(line[can_draw])
            axes.plot(*line[can_draw].T, style, color=color, linewidth=0.8, alpha=0.3 if len(lines) > 1 else 1.0)
            lost = line[~can_draw, 0]
            axes.plot(lost, np.ones(len(lost)), "x", color=color, transform=axes.get_xaxis_transform(), clip_on=False)
        middle = _mean(shown, log_y) if len(shown) > 1 else shown[0] if shown else np.empty((0, 2))
        if len(shown) > 1 and len(middle):
            marker = "o" if len(middle) < 20 else None
            axes.plot(*middle[:, :2].T, style, color=color, linewidth=1.6, marker=marker, markersize=3)
            if len(curves) <= MOST_BANDS:
                axes.fill_between(middle[:, 0], *middle[:, 2:].T, color=color, alpha=0.12, linewidth=0)
        if len(middle):
            ends.append((*middle[-1, :2], label, color))
        heights += [y for line in shown for y in line[:, 1]]
        places |= {x for line in lines for x in line[:, 0]}
    if log_x:
        axes.set_xscale("log", base=2)
        if len(places) <= 10:
            axes.set_xticks(sorted(places))
        axes.xaxis.set_major_formatter(NUMBER)
        axes.xaxis.set_minor_locator(NullLocator())
    if heights:  # limits show all runs; intervals of two seeds may reach far beyond them
        low, high = min(heights), max(heights)
        pad = 0.05 * (high - low or abs(high) or 1.0)
        axes.set_ylim(*((low / 1.2, high * 1.2) if log_y else (low - pad, high + pad)))
        if log_y:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(NUMBER)
            axes.yaxis.set_minor_formatter(LogFormatter())
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.grid(alpha=0.25)
    _label(axes, ends)
    figure.savefig(path, dpi=150)


def _mean(lines: Sequence[np.ndarray], log_y: bool) -> np.ndarray:
    """Rows of x, the mean and the ends of its interval (on a log axis, of logarithms), where all seeds have y."""
    by_seed = [dict(line.tolist()) for line in lines]
    rows = []
    for x in sorted(set.intersection(*map(set, by_seed))):
        values = [np.log(values[x]) if log_y else values[x] for values in by_seed]
        row = np.mean(values) + half_width(values) * np.array([0, -1, 1])
        rows.append([x, *(np.exp(row) if log_y else row)])
    return np.array(rows)


def _label(axes: Axes, ends: Sequence[tuple[float, float, str, str]]):
    """Writes each label beside the end of its line, moved apart where they would overlap."""
    to_axes = (axes.transData + axes.transAxes.inverted()).transform
    order = sorted(((to_axes((x, y))[1], label, color) for x, y, label, color in ends), key=lambda end: end[0])
    step = 0.052
    heights = np.clip([height for height, _, _ in order], 0.0, 1.0)
    for i in range(1, len(heights)):
        heights[i] = max(heights[i], heights[i - 1] + step)
    top = 1.0
    for i in reversed(range(len(heights))):
        heights[i] = min(heights[i], top)
        top = heights[i] - step
    for height, (_, label, color) in zip(heights, order):
        axes.text(1.01, height, label, color=color, transform=axes.transAxes, fontsize=8, va="center")
