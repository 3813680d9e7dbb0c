"""Plots of training runs, as PNG files."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from lsgpt.modeling_lsgpt import LSGPTConfig


def plot_curves(
    path: str | Path,
    curves: Mapping[str, Sequence[Sequence[tuple[float, float]]]],
    xlabel: str,
    ylabel: str,
    log_x: bool = False,
    log_y: bool = False,
    threshold: float | None = None,
):
    """
    Draws curves into one pair of axes.

    Args:
        path: The PNG file to write.
        curves: For each label a list of curves of points `(x, y)`. They share a colour and an entry of the legend, as
            the seeds of an experiment do.
        xlabel, ylabel: What the axes show, with units.
        log_x, log_y: Logarithmic axes.
        threshold: Height of a dashed line.
    """
    # A Figure of its own, without pyplot: no window, and the backend of the caller's plots stays as it is.
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for number, (label, lines) in enumerate(curves.items()):
        for i, line in enumerate(line for line in lines if line):
            style: dict[str, Any] = {"marker": "o", "markersize": 3} if len(line) < 20 else {}
            axes.plot(*zip(*line), color=f"C{number}", linewidth=1.2, label=None if i else label, **style)
    if threshold is not None:
        axes.axhline(threshold, color="black", linestyle="--", linewidth=1, label=f"threshold {threshold:g}")
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.set_xscale("log" if log_x else "linear")
    axes.set_yscale("log" if log_y else "linear")
    axes.grid(alpha=0.3, which="both")
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    figure.savefig(path, dpi=150)


def average_in_bins(loss_by_position: Sequence[float], num_bins: int = 40) -> list[tuple[float, float]]:
    """Means over bins of positions that widen geometrically: `(context length in tokens, loss)`."""
    losses = np.array(loss_by_position, dtype=float)
    edges = np.unique(np.geomspace(1, len(losses) + 1, num_bins + 1).round().astype(int))
    bins = [(np.arange(begin, end).mean(), losses[begin - 1 : end - 1]) for begin, end in pairwise(edges)]
    return [(float(x), float(np.nanmean(part))) for x, part in bins if np.isfinite(part).any()]


def plot_max_logits(maxima: torch.Tensor, path: str | Path, config: LSGPTConfig | None = None):
    """
    Draws the largest logit of every head as a heat map, layers by heads, on a logarithmic scale.

    Args:
        maxima (`(num_hidden_layers, num_attention_heads)`): What `lsgpt.measure_max_logits` returns.
        path: The PNG file to write.
        config: The model's configuration, for a line between global and local heads.

    ```python
    >>> plot_max_logits(lsgpt.measure_max_logits(model, input_ids=ids), "max_logits.png", model.config)
    ```
    """
    values = maxima.detach().float().cpu().numpy()
    layers, heads = values.shape
    figure = Figure(figsize=(max(4.0, 1.5 + 0.5 * heads), max(2.5, 1.2 + 0.4 * layers)), layout="constrained")
    axes = figure.subplots()
    positive = values[values > 0]
    low, high = (positive.min(), positive.max()) if positive.size else (0.1, 1.0)
    image = axes.imshow(np.maximum(values, low), aspect="auto", norm="log", vmin=low, vmax=max(high, low * 1.001))
    if layers * heads <= 200:
        for layer, row in enumerate(values):
            for head, value in enumerate(row):
                shade = np.log(max(value, low) / low) / max(np.log(high / low), 1e-9)
                color = "black" if shade > 0.6 else "white"
                axes.text(head, layer, f"{value:.3g}", ha="center", va="center", color=color, fontsize=7)
    if config is not None:
        for layer, count in enumerate(config.num_global_heads_per_layer):
            axes.plot([count - 0.5] * 2, [layer - 0.5, layer + 0.5], color="red", linewidth=2)
        axes.set_title("global heads | local heads", fontsize=9)
    axes.set_xticks(range(heads))
    axes.set_yticks(range(layers))
    axes.set_xlabel("head")
    axes.set_ylabel("layer")
    figure.colorbar(image, label="largest |logit|")
    figure.savefig(path, dpi=150)
