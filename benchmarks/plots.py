"""Plots of the suite's ratios over the length."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from lsgpt.utilities.plots import BASELINE, GLOBAL, LOCAL, OTHERS


COMPARED_WITH = {
    "mhsa": "multi-head attention in the same code",
    "gpt2": "Transformers' GPT-2",
    "llama": "Transformers' Llama",
}
"""Families that others are compared with, each in its own axes."""

TITLES = {
    "attention": "Attention alone, forward and backward",
    "prefill": "Prefill: a prompt's forward pass",
    "decode": "Decoding: a token after a prompt",
    "train": "A training step",
}
"""Titles of the benchmarks."""

CURVES = {
    "lsgpt": "LSGPT",
    "lsgpt-no-logits": "LSGPT without logits, as `lsgpt train` runs it",
    "mhsa": "multi-head attention in the same code",
    "limit": "bound: LSGPT with its local heads' attention left out",
    "cache": "LSGPT's cache, fraction of the bytes",
}
"""Legends of the families that are drawn."""

COLORS = {"lsgpt": LOCAL, "lsgpt-no-logits": OTHERS[0], "mhsa": GLOBAL, "limit": BASELINE, "cache": OTHERS[1]}
"""Their colours, those of the plots of runs and studies."""


def plot_ratios(path: Path, name: str, rows: list[dict]):
    """
    Draws the ratios of one benchmark over the length, and its targets, if there are any, as dotted lines.

    Args:
        path: The PNG file to write.
        name: The benchmark.
        rows: Its rows of results, one for each length.
    """
    points, targets = {}, {}
    for row in sorted(rows, key=lambda row: row["length"]):
        for x in row["ratios"]:
            family, baseline = x["families"]
            label = "cache" if x["benchmark"] == "cache" else family
            if baseline in COMPARED_WITH and label in CURVES:
                points.setdefault(baseline, {}).setdefault(label, []).append((row["length"], x["median"]))
                if x["target"] is not None:
                    targets.setdefault((baseline, label), []).append((row["length"], x["target"]))
    baselines = [baseline for baseline in COMPARED_WITH if baseline in points]
    lengths = sorted({row["length"] for row in rows})
    figure = Figure(figsize=(max(6, 4.4 * len(baselines)), 4.6), layout="constrained")
    handles = {}
    for axes, baseline in zip(figure.subplots(1, len(baselines), squeeze=False, sharey=True)[0], baselines):
        for label, legend in CURVES.items():
            if label in points[baseline]:
                (line,) = axes.plot(*zip(*points[baseline][label]), color=COLORS[label], marker="o", label=legend)
                handles.setdefault(legend, line)
            if (baseline, label) in targets:
                legend = f"target: {legend}, at most this"
                (line,) = axes.plot(*zip(*targets[baseline, label]), color=COLORS[label], linestyle=":", label=legend)
                handles.setdefault(legend, line)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_xscale("log")
        axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_ylim(bottom=0)
        axes.set_title(f"{COMPARED_WITH[baseline]} = 1", fontsize=10)
        axes.set_xlabel("tokens")
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("fraction of the time (less is better)")
    figure.suptitle(TITLES[name])
    where: Any = "outside lower center"
    figure.legend(handles=list(handles.values()), loc=where, ncols=len(baselines), fontsize=8)
    figure.savefig(path, dpi=150)
