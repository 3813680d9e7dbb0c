"""
Plots of studies: the mean over seeds, with its 95% interval unless there are many lines, the seeds faintly behind it,
and labels at the lines.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from lsgpt.utilities.plots import BASELINE, GLOBAL, LOCAL, OTHERS

from .comparisons import CONFIDENCE, t_quantile


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
    families = {"mhsa": GLOBAL, "ls": LOCAL, "local-only": BASELINE}
    others = iter(OTHERS * len(labels))
    used: dict[str, int] = {}
    looks = {}
    for label in labels:
        family = next((name for name in ("local-only", "mhsa", "ls") if label.split(" ")[0].startswith(name)), None)
        is_crowded = family and used.get(families[family]) and sum(x.startswith(family) for x in labels) > len(STYLES)
        color = next(others) if family is None or is_crowded else families[family]
        number = used.get(color, 0)
        used[color] = number + 1
        looks[label] = (color, STYLES[number % len(STYLES)])
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
    looks, ends = looks_of(list(curves)), []
    has_bands = len(curves) <= MOST_BANDS
    for label, lines in curves.items():
        color, style = looks[label]
        lines = [line for line in lines if line]
        for line in lines:
            shown = [(x, y) for x, y in line if _can_draw(y, log_y)]
            axes.plot(*_columns(shown), style, color=color, linewidth=0.8, alpha=0.3 if len(lines) > 1 else 1.0)
            lost = [x for x, y in line if not _can_draw(y, log_y)]
            axes.plot(lost, [1.0] * len(lost), "x", color=color, transform=axes.get_xaxis_transform(), clip_on=False)
        middle = _mean(lines, log_y)
        if len(lines) > 1 and middle:
            xs, means, lows, highs = (list(column) for column in zip(*middle))
            marker = "o" if len(xs) < 20 else None
            axes.plot(xs, means, style, color=color, linewidth=1.6, marker=marker, markersize=3)
            if has_bands:
                axes.fill_between(xs, lows, highs, color=color, alpha=0.12, linewidth=0)
        shown = [point for line in lines for point in line if _can_draw(point[1], log_y)]
        last = middle[-1] if middle else shown[-1] if shown else None
        if last:
            ends.append((last[0], last[1], label, color))
    if log_x:
        axes.set_xscale("log", base=2)
        places = sorted({x for lines in curves.values() for line in lines for x, _ in line})
        if len(places) <= 10:
            axes.set_xticks(places)
        axes.xaxis.set_major_formatter(NUMBER)
        axes.xaxis.set_minor_locator(NullLocator())
    if log_y and ends:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(NUMBER)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.grid(alpha=0.25)
    _limit(axes, curves, log_y)
    _label(figure, axes, ends)
    figure.savefig(path, dpi=150)


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _can_draw(y: float, log_y: bool) -> bool:
    return math.isfinite(y) and not (log_y and y <= 0)


def _mean(lines: Sequence[Sequence[tuple[float, float]]], log_y: bool) -> list[tuple[float, float, float, float]]:
    """The mean and the ends of its interval at every x that all seeds have; on a logarithmic axis, of logarithms."""
    by_seed = [{x: y for x, y in line if _can_draw(y, log_y)} for line in lines]
    if len(by_seed) < 2:
        return []
    points = []
    for x in sorted(set.intersection(*map(set, by_seed))):
        values = [math.log(values[x]) if log_y else values[x] for values in by_seed]
        degrees = len(values) - 1
        half = t_quantile(0.5 + CONFIDENCE / 2, degrees) * statistics.stdev(values) / math.sqrt(len(values))
        point = [statistics.fmean(values) + change for change in (0.0, -half, half)]
        mean, low, high = map(math.exp, point) if log_y else point
        points.append((x, mean, low, high))
    return points


def _limit(axes, curves: Curves, log_y: bool):
    """Shows all runs; intervals of two seeds may reach far beyond them."""
    heights = [y for lines in curves.values() for line in lines for _, y in line if _can_draw(y, log_y)]
    if heights:
        low, high = min(heights), max(heights)
        if log_y:
            axes.set_ylim(low / 1.2, high * 1.2)
        else:
            pad = 0.05 * (high - low) or 0.05 * abs(high) or 0.05
            axes.set_ylim(low - pad, high + pad)


def _label(figure: Figure, axes, ends: list):
    """Writes each label beside the end of its line, moved apart where they would overlap."""
    to_axes = axes.transAxes.inverted()
    places = [(to_axes.transform(axes.transData.transform((x, y)))[1], label, color) for x, y, label, color in ends]
    places.sort(key=lambda place: place[0])
    step = 0.052
    heights = [min(max(place[0], 0.0), 1.0) for place in places]
    for i in range(1, len(heights)):
        heights[i] = max(heights[i], heights[i - 1] + step)
    excess = max(0.0, heights[-1] - 1.0) if heights else 0.0
    for i in reversed(range(len(heights))):
        above = heights[i + 1] - step if i + 1 < len(heights) else 1.0
        heights[i] = min(heights[i], above) if excess else heights[i]
    for height, (_, label, color) in zip(np.array(heights), places):
        axes.text(1.01, height, label, color=color, transform=axes.transAxes, fontsize=8, va="center")
