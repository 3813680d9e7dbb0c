"""Plots of runs and studies, as PNG files: the mean over seeds with its 95% interval, labels at the lines."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import LogFormatter, LogLocator, MaxNLocator, NullLocator
from scipy import stats

from lsgpt.modeling_lsgpt import LSGPTConfig


GLOBAL, LOCAL, BASELINE = "#0060a8", "#d55e00", "#7f7f7f"
"""Colours of global heads, of local heads and of what they are compared with, in all plots of the project."""

OTHERS = ("#009e73", "#cc79a7", "#8c6d1f", "#56b4e9", "#5e3c99", "#a6761d", "#e7298a", "#1b1b1b")
"""Colours of everything else."""


NUMBER = "{x:,g}"
"""Format of the numbers on logarithmic axes: plain ones."""


STYLES = ("-", "--", ":", "-.")

Curve = Sequence[tuple[float, float]]


def looks_of(labels: Iterable[str]) -> dict[str, tuple[str, str]]:
    """
    The colour and line style of each label: multi-head attention has the colour of global heads, LS-attention that of
    local heads, models without global heads grey, whatever else stands in the label; styles tell them apart.
    """
    families = {"local-only": BASELINE, "mhsa": GLOBAL, "global": GLOBAL, "ls": LOCAL, "local": LOCAL}
    others = cycle(OTHERS)
    looks: dict[str, tuple[str, str]] = {}
    for label in labels:
        color = next((color for family, color in families.items() if label.startswith(family)), None) or next(others)
        num_alike = sum(color == other for other, _ in looks.values())
        looks[label] = (color, STYLES[num_alike % len(STYLES)])
    return looks


def of_runs(runs: Mapping[str, Sequence], curve: Callable[[Any], Curve]) -> dict[str, list[Curve]]:
    """A curve of every run, for `plot_curves`."""
    return {arm: [curve(run) for run in of_arm] for arm, of_arm in runs.items()}


def plot_curves(
    path: Path,
    curves: Mapping[str, Sequence[Curve]],
    xlabel: str,
    ylabel: str,
    log_x: bool = False,
    log_y: bool = False,
    threshold: float | None = None,
) -> str:
    """
    Draws curves, and the mean of the seeds of a label with its 95% interval, where all have a value; on a logarithmic
    y-axis, those of the logarithms. Points that cannot be drawn are marked with crosses at the upper edge.

    Args:
        path: The PNG file to write.
        curves: For each label, the curves of its seeds.
        xlabel, ylabel, log_x, log_y: What the axes show, with units, and whether they are logarithmic.
        threshold: Height of a dashed line.

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
    ends, bands, any_lost = [], [], False
    for label, (color, style) in looks_of(curves).items():
        seeds = []
        for curve in curves[label]:
            shown = {x: y for x, y in curve if math.isfinite(y) and (y > 0 or not log_y)}
            lost = [x for x, _ in curve if x not in shown]
            axes.plot(list(shown), list(shown.values()), style, color=color, linewidth=0.8, alpha=0.3)
            axes.plot(lost, [1.0] * len(lost), "x", color=color, transform=axes.get_xaxis_transform(), clip_on=False)
            seeds.append(shown)
            any_lost = any_lost or bool(lost)
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
    if threshold is not None:
        axes.axhline(threshold, color="black", linestyle="--", linewidth=1)
        ends.append((threshold, f"threshold {threshold:g}", "black"))
    if any_lost:
        axes.set_title("crosses: not finite", fontsize=8, loc="right")
    limits = axes.get_ylim()  # those of the runs: intervals of few seeds may reach far beyond them
    for x, low, high, color in bands:
        axes.fill_between(x, low, high, color=color, alpha=0.1, linewidth=0)
    axes.set_ylim(limits)
    if log_x:
        axes.set_xscale("log")
        axes.set_xticks(sorted({x for of_label in curves.values() for curve in of_label for x, _ in curve}))
        axes.xaxis.set_major_formatter(NUMBER)
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        axes.xaxis.set_major_locator(MaxNLocator(9, integer=True))
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


def _set_log_ticks(axis: Axis, values: Sequence[float]):
    """Labels a logarithmic axis with about five plain numbers, however wide or narrow the range of `values` is."""
    ratio = max(values) / min(values)
    steps = (1, 2, 5) if ratio < 1e3 else (1,)
    axis.set_major_locator(MaxNLocator(6) if ratio < 10 else LogLocator(subs=steps, numticks=10))
    axis.set_major_formatter(NUMBER)
    axis.set_minor_locator(NullLocator())


CONTEXT_LABEL = "tokens of context (means over 1, 2 to 3, 4 to 7, 8 to 15, ...)"
"""Axis label that describes the bins of `average_in_bins`."""


def average_in_bins(loss_by_position: Sequence[float]) -> list[tuple[float, float]]:
    """
    Returns the means over positions 1, 2 to 3, 4 to 7, ... as `(context length in tokens, loss)`. A single position
    averages over few tokens, and its noise would hide the effect of more context. NaNs are left out.
    """
    losses = np.array(loss_by_position, dtype=float)
    edges = [*(2**i for i in range(len(losses).bit_length())), len(losses) + 1]
    bins = [(np.arange(begin, end).mean(), losses[begin - 1 : end - 1]) for begin, end in pairwise(edges)]
    return [(float(x), float(np.nanmean(part))) for x, part in bins if not np.isnan(part).all()]


def heat_map(axes: Axes, values: np.ndarray, num_global: Sequence[int] = (), **options: Any) -> AxesImage:
    """
    Draws a map of layers by heads. Heads whose value is not finite are grey. `num_global`, the number of global heads
    of each layer, draws a red line between the kinds of heads where a layer has both. `options` are those of `imshow`.
    """
    colors = colormaps["viridis"].with_extremes(bad="lightgrey")
    image = axes.imshow(np.ma.masked_invalid(values), aspect="auto", cmap=colors, **options)
    for layer, count in enumerate(num_global):
        if 0 < count < values.shape[1]:
            axes.plot([count - 0.5] * 2, [layer - 0.5, layer + 0.5], color="red", linewidth=2)
    axes.set_xlabel("head")
    axes.set_ylabel("layer")
    axes.xaxis.set_major_locator(MaxNLocator(24, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(24, integer=True))
    return image


def plot_max_logits(maxima: torch.Tensor, path: str | Path, config: LSGPTConfig | None = None):
    """
    Draws the largest logit of every head as a heat map of layers by heads, on a logarithmic scale. Heads whose logits
    are NaN or infinite are grey.

    Args:
        maxima (`(num_hidden_layers, num_attention_heads)`): What `lsgpt.measure_max_logits` returns.
        path: The PNG file to write.
        config: The model's configuration, for a line between global and local heads.

    ```python
    >>> plot_max_logits(lsgpt.measure_max_logits(model, input_ids=ids), "max_logits.png", model.config)
    ```
    """
    values = maxima.detach().double().cpu().numpy()
    values = values if values.size else np.full((1, 1), math.nan)
    layers, heads = values.shape
    figure = Figure(figsize=(max(7.0, 2.0 + 0.6 * heads), max(3.0, 1.6 + 0.5 * layers)), layout="constrained")
    axes = figure.subplots()
    shown = values[np.isfinite(values) & (values > 0)]
    low, high = (shown.min(), shown.max()) if shown.size else (0.1, 1.0)
    high = max(high, low * 1.001)
    num_global = config.num_global_heads_per_layer if config is not None else ()
    image = heat_map(axes, np.maximum(values, low), num_global, norm="log", vmin=low, vmax=high)
    if layers * heads <= 200:
        for (layer, head), value in np.ndenumerate(values):
            shade = math.log(max(value, low) / low) / math.log(high / low) if math.isfinite(value) else 1.0
            color = "black" if shade > 0.6 else "white"
            axes.text(head, layer, f"{value:.3g}", ha="center", va="center", color=color, fontsize=9)
    if any(0 < count < heads for count in num_global):
        axes.set_title("left of the red line: global heads; right of it: local heads", fontsize=10)
    bar = figure.colorbar(image, label="largest |logit|")
    _set_log_ticks(bar.ax.yaxis, [low, high])
    figure.savefig(path, dpi=150)
