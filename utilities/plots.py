"""Plots of training runs, as PNG files."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from lsgpt.modeling_lsgpt import LSGPTConfig


GLOBAL, LOCAL, BASELINE = "#0060a8", "#d55e00", "#7f7f7f"
"""Colours of global heads, of local heads and of what they are compared with, in all plots of the project."""

OTHERS = ("#009e73", "#cc79a7", "#8c6d1f", "#56b4e9", "#5e3c99", "#a6761d", "#e7298a", "#1b1b1b")
"""Colours of everything else."""


def plot_curves(
    path: str | Path,
    curves: Mapping[str, Sequence[tuple[float, float]]],
    xlabel: str,
    ylabel: str,
    log_x: bool = False,
    log_y: bool = False,
    threshold: float | None = None,
):
    """
    Draws curves in one plot. Points that cannot be drawn (NaN, infinity, and values that are not positive on a
    logarithmic y-axis) are marked with crosses at the upper edge.

    Args:
        path: The PNG file to write.
        curves: For each label, the points `(x, y)`.
        xlabel, ylabel: What the axes show, with units.
        log_x, log_y: Whether the axes are logarithmic. The ticks of a logarithmic x-axis are powers of 2, those of a
            linear one are integers.
        threshold: Height of a dashed line.
    """
    # A Figure without pyplot opens no window and does not change the caller's backend.
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    heights, missing = [threshold] if threshold is not None else [], False
    for number, (label, line) in enumerate(curves.items()):
        shown = [(x, y) for x, y in line if math.isfinite(y) and not (log_y and y <= 0)]
        lost = [x for x, y in line if not math.isfinite(y) or (log_y and y <= 0)]
        style: dict[str, Any] = {"marker": "o", "markersize": 3} if len(shown) < 20 else {}
        x, y = zip(*shown) if shown else ((), ())
        axes.plot(x, y, color=f"C{number}", linewidth=1.2, label=label if line else None, **style)
        upper_edge: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "clip_on": False}
        axes.plot(lost, [1.0] * len(lost), "x", color=f"C{number}", markersize=6, **upper_edge)
        heights, missing = [*heights, *y], missing or bool(lost)
    if threshold is not None:
        axes.axhline(threshold, color="black", linestyle="--", linewidth=1, label=f"threshold {threshold:g}")
    if missing:
        axes.plot([], [], "x", color="black", markersize=6, linestyle="none", label="not finite")
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    if log_x:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(NUMBER)
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        axes.xaxis.set_major_locator(MaxNLocator(9, integer=True))
    if log_y and heights:
        axes.set_yscale("log")
        _set_log_ticks(axes.yaxis, heights)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    figure.savefig(path, dpi=150)


NUMBER = "{x:,g}"
"""Format of the numbers on logarithmic axes: plain ones."""


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
