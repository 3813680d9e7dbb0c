"""Plots of studies: the mean over seeds with its 95% interval, the seeds faintly behind it, labels at the lines."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, NullLocator
from scipy import stats

from lsgpt.utilities.plots import BASELINE, GLOBAL, LOCAL, NUMBER, OTHERS


STYLES = ("-", "--", ":", "-.")

Curve = Sequence[tuple[float, float]]


def looks_of(labels: Iterable[str]) -> dict[str, tuple[str, str]]:
    """
    The colour and line style of each label: multi-head attention has the colour of global heads, LS-attention that of
    local heads, models without global heads grey, whatever else stands in the label; styles tell them apart.
    """
    families, others = {"local-only": BASELINE, "mhsa": GLOBAL, "ls": LOCAL}, cycle(OTHERS)
    looks: dict[str, tuple[str, str]] = {}
    for label in labels:
        color = next((color for family, color in families.items() if label.startswith(family)), None) or next(others)
        num_alike = sum(color == other for other, _ in looks.values())
        looks[label] = (color, STYLES[num_alike % len(STYLES)])
    return looks


def of_runs(runs: Mapping[str, Sequence], curve: Callable[[Any], Curve]) -> dict[str, list[Curve]]:
    """A curve of every run, for `plot`."""
    return {arm: [curve(run) for run in of_arm] for arm, of_arm in runs.items()}


def plot(
    path: Path,
    curves: Mapping[str, Sequence[Curve]],
    xlabel: str,
    ylabel: str,
    log_x: bool = False,
    log_y: bool = False,
) -> str:
    """
    Draws curves, and the mean of the seeds of a label with its 95% interval, where all have a value; on a logarithmic
    y-axis, those of the logarithms. Points that cannot be drawn are marked with crosses at the upper edge.

    Args:
        path: The PNG file to write.
        curves: For each label, the curves of its seeds.
        xlabel, ylabel, log_x, log_y: What the axes show, with units, and whether they are logarithmic.

    Returns:
        The Markdown that shows the plot.
    """
    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.subplots()
    to_scale, from_scale = (np.log, np.exp) if log_y else (np.asarray, np.asarray)
    if log_y:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(NUMBER)
        axes.yaxis.set_minor_formatter(LogFormatter())
    ends, bands = [], []
    for label, (color, style) in looks_of(curves).items():
        seeds = []
        for curve in curves[label]:
            shown = {x: y for x, y in curve if math.isfinite(y) and (y > 0 or not log_y)}
            lost = [x for x, _ in curve if x not in shown]
            axes.plot(list(shown), list(shown.values()), style, color=color, linewidth=0.8, alpha=0.3)
            axes.plot(lost, [1.0] * len(lost), "x", color=color, transform=axes.get_xaxis_transform(), clip_on=False)
            seeds.append(shown)
        common = sorted(set.intersection(*map(set, seeds))) if seeds else []
        if not common:
            continue
        values = to_scale([[shown[x] for x in common] for shown in seeds])
        means, marker = values.mean(0), "o" if len(common) < 20 else None
        axes.plot(common, from_scale(means), style, color=color, linewidth=1.6, marker=marker, markersize=3)
        ends.append((float(from_scale(means[-1])), label, color))
        if len(seeds) > 2:  # that of two would hide everything
            half = stats.t.ppf(0.975, len(seeds) - 1) * stats.sem(values)
            bands.append((common, from_scale(means - half), from_scale(means + half), color))
    limits = axes.get_ylim()  # those of the runs: intervals of few seeds may reach far beyond them
    for x, low, high, color in bands:
        axes.fill_between(x, low, high, color=color, alpha=0.1, linewidth=0)
    axes.set_ylim(limits)
    if log_x:
        axes.set_xscale("log")
        axes.set_xticks(sorted({x for of_label in curves.values() for curve in of_label for x, _ in curve}))
        axes.xaxis.set_major_formatter(NUMBER)
        axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.grid(alpha=0.25)
    # Labels stand beside the ends of their lines, moved apart where they would overlap.
    ends.sort()
    to_axes = (axes.transData + axes.transAxes.inverted()).transform
    places = np.array([to_axes((0.0, y))[1] for y, _, _ in ends])
    offsets = 0.05 * np.arange(len(ends))
    places = np.minimum(np.maximum.accumulate(places - offsets) + offsets, 1.0 - offsets[::-1])
    for place, (_, label, color) in zip(places, ends):
        axes.text(1.01, place, label, color=color, transform=axes.transAxes, fontsize=8, va="center")
    figure.savefig(path, dpi=150)
    return f"![{ylabel} over {xlabel}]({path.name})"
