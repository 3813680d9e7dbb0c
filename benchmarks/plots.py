"""Plots of the suite's ratios over the length."""

from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator


COMPARED_WITH = {"mhsa": "multi-head attention in the same code", "gpt2": "Transformers' GPT-2"}
"""Families that others are compared with, one pair of axes each."""

CURVES = {
    "lsgpt": "LSGPT",
    "lsgpt-no-logits": "LSGPT without logits, as `lsgpt train`",
    "mhsa": "multi-head attention in the same code",
    "limit": "bound: LSGPT without its local heads' attention",
    "cache": "LSGPT, bytes of the cache",
}
"""Legends of the families that are drawn."""


def plot_ratios(path: Path, name: str, rows: list[dict]):
    """
    Draws the ratios of one benchmark over the length, and where there are targets, these as dashed lines.

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
    figure = Figure(figsize=(5.2 * len(baselines), 4.6), layout="constrained")
    for axes, baseline in zip(figure.subplots(1, len(baselines), squeeze=False, sharey=True)[0], baselines):
        for number, (label, legend) in enumerate(CURVES.items()):
            style = {"color": f"C{number}", "linewidth": 1.2, "marker": "o", "markersize": 3}
            if label in points[baseline]:
                axes.plot(*zip(*points[baseline][label]), label=legend, **style)
            if (baseline, label) in targets:
                axes.plot(*zip(*targets[baseline, label]), label=f"target: {legend}, at most", linestyle="--", **style)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_xscale("log")
        axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_ylim(bottom=0)
        axes.set_xlabel("tokens")
        axes.set_ylabel(f"share of {COMPARED_WITH[baseline]} (= 1)")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.15), frameon=False)
    figure.suptitle(f"{name}: time, median of rounds; below 1 is faster", fontsize=11)
    figure.savefig(path, dpi=150)
