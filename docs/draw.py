"""
Draws the pictures of the front page and of docs/ from committed results: `python docs/draw.py`.

Each is an SVG file for light pages and one for dark pages. As in the plots of runs and studies, blue stands for global
heads and models without others, orange for local heads and LSGPT, and grey for everything else.
"""

import json
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from lsgpt.benchmarks.plots import plot_ratios
from lsgpt.configuration import load_preset
from lsgpt.modeling_lsgpt import GLOBAL as GLOBAL_HEADS
from lsgpt.modeling_lsgpt import LOCAL as LOCAL_HEADS
from lsgpt.modeling_lsgpt import LSGPTConfig, describe_visibility
from lsgpt.utilities.plots import BASELINE, GLOBAL, LOCAL, NUMBER


DOCS = Path(__file__).parent
ROOT = DOCS.parent
RESULTS = ROOT / "benchmarks" / "results"

INK = {"light": "#1f2328", "dark": "#e6edf3"}
GLOBALS = {"light": GLOBAL, "dark": "#4f9fe0"}
"""On dark pages, the blue of the plots is hard to see."""

LENGTHS = (2048, 8192, 32768)


def masks(figure: Figure, scheme: str):
    """Which keys the queries of each kind of head see."""
    length, window = 24, 6
    visibility = describe_visibility(LSGPTConfig(sliding_window=window), torch.empty(1, length, 0))
    figure.set_size_inches(7.5, 3.6)
    colors = {GLOBAL_HEADS: GLOBALS[scheme], LOCAL_HEADS: LOCAL}
    titles = {GLOBAL_HEADS: "a global head: everything so far", LOCAL_HEADS: f"a local head: the last {window} tokens"}
    for axes, kind in zip(figure.subplots(1, 2, sharey=True), titles):
        seen = visibility[kind].dense()[0, 0].numpy()
        picture = np.zeros((*seen.shape, 4))
        picture[seen] = matplotlib.colors.to_rgba(colors[kind])
        axes.imshow(picture)
        axes.set_title(titles[kind], color=colors[kind], fontsize=12)
        axes.set_xlabel("key")
        axes.set_xticks([])
        axes.set_yticks([])
    figure.axes[0].set_ylabel("query")


def cache_and_speed(figure: Figure, scheme: str):
    """The size of the cache over the length, and times relative to the same model with all heads global."""
    figure.set_size_inches(9, 3.6)
    left, right = figure.subplots(1, 2)
    config = load_preset("gpt2-small")
    lengths = [2**n for n in range(8, 17)]
    for label, shape, color, offset in (
        ("all heads global", config.equal_mhsa(), GLOBALS[scheme], (-12, 0)),
        ("1 of 12 global, W = 100", config, LOCAL, (4, -58)),
    ):
        sizes = [shape.kv_cache_bytes(length) / 2**20 for length in lengths]
        left.plot(lengths, sizes, color=color, linewidth=2)
        left.annotate(label, (lengths[-1], sizes[-1]), offset, textcoords="offset points", ha="right", color=color)
    left.set_xscale("log", base=2)
    left.set_yscale("log", base=2)
    left.yaxis.set_major_formatter(NUMBER)
    left.set_title("KV cache of one sequence, MiB")
    for name, label, offset, align in (
        ("attention", "attention alone", (7, 0), "left"),
        ("prefill", "reading a prompt", (-2, -15), "right"),
        ("decode", "generating a token", (7, 0), "left"),
    ):
        points = sorted(ratios(name).items())
        right.plot(*zip(*points), color=LOCAL, linewidth=2, marker="o", markersize=4)
        place = {"textcoords": "offset points", "ha": align, "va": "center"}
        right.annotate(label, points[-1], offset, color=LOCAL, **place)
    right.axhline(1, color=GLOBALS[scheme], linewidth=2)
    right.annotate("all heads global", (LENGTHS[0], 1), (0, 5), textcoords="offset points", color=GLOBALS[scheme])
    right.set_xscale("log", base=2)
    right.set_xlim(LENGTHS[0] * 0.85, LENGTHS[-1] * 8)
    right.set_ylim(0, 1.12)
    right.set_xticks(LENGTHS)
    right.set_title("time, relative to all heads global")
    for axes in (left, right):
        axes.xaxis.set_major_formatter(NUMBER)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("tokens")
        plain(axes)
    left.set_xticks([256, 2048, 16384, 65536])


def ratios(benchmark: str) -> dict[int, float]:
    """The median time of LSGPT relative to that with all heads global, by length."""
    result = json.loads((RESULTS / "bench" / benchmark / "bench-cpu.json").read_text(encoding="utf-8"))
    return {
        row["length"]: x["median"]
        for row in result["rows"]
        for x in row["ratios"]
        if x["benchmark"] == benchmark and x["families"] == ["lsgpt", "mhsa"]
    }


def label_ends(axes: Axes, x: float, ends: Mapping[str, tuple[float, str]]):
    """Writes the names of lines beside their right ends, in their colors, one below the other."""
    place = math.inf
    for name, (end, color) in sorted(ends.items(), key=lambda item: -item[1][0]):
        place = min(place - 0.06, end)
        axes.annotate(name, (x, place), (7, 0), textcoords="offset points", color=color, va="center")


def conversion(figure: Figure, scheme: str):
    """What a pretrained model with less cache still finds: beside other methods, and in texts of several lengths."""
    figure.set_size_inches(9, 4)
    left, right = figure.subplots(1, 2, width_ratios=[1.2, 1])
    files = sorted((RESULTS / "quality").glob("cache_methods*.json"))
    results = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    lines: dict[str, list[tuple[float, float]]] = {}
    for result in results:
        rows = {row["method"]: row for row in result["rows"]}
        for name, row in rows.items():
            lines.setdefault(name, []).append((rows["LSGPT"]["cache_ratio"], row["exact"]))
    others, ends = [], {}
    for name, points in lines.items():
        color = GLOBALS[scheme] if name == "source" else LOCAL if name.startswith("LSGPT") else BASELINE
        is_healed = name.endswith("healed")
        left.plot(*zip(*sorted(points)), "o--" if is_healed else "o-", color=color, linewidth=2, markersize=4)
        if is_healed:
            # Beside the first point or below the second, where no line passes.
            index, offset, side = (0, (-6, 0), "right") if name.startswith("LSGPT") else (1, (3, -16), "left")
            place = {"textcoords": "offset points", "ha": side, "va": "center", "fontsize": 7, "linespacing": 1}
            left.annotate(name.replace(" ", "\n"), sorted(points)[index], offset, color=color, **place)
        elif name in ("source", "LSGPT", "whole layers", "DuoAttention"):
            ends[name] = max(points)[1], color
        else:
            others.append((max(points)[1], name))
    label_ends(left, max(lines["LSGPT"])[0], ends)
    names = ",\n".join(name for _, name in sorted(others, reverse=True))
    left.annotate(names, (max(lines["LSGPT"])[0], 0), (7, 0), textcoords="offset points", color=BASELINE, fontsize=7)
    left.set_title(f"numbers found in {results[0]['length']:,} tokens")
    left.set_xlabel("bytes that LSGPT keeps, as a fraction of the source's")
    left.set_xlim(0, 1.5 * max(lines["LSGPT"])[0])
    left.set_ylim(-0.02, 1)
    styles = {
        "smollm2.gguf": ("source", GLOBALS[scheme], "-"),
        "smollm2-ls": ("converted", LOCAL, "-"),
        "smollm2-ls-35": ("converted, 35%", LOCAL, ":"),
        "smollm2-ls-healed-cpu": ("healed", LOCAL, "--"),
    }
    rows = json.loads((RESULTS / "quality" / "quality.json").read_text(encoding="utf-8"))["rows"]
    lengths, ends = sorted(map(int, rows[0]["retrieval"])), {}
    for row in rows:
        if row["model"] not in styles:
            continue
        name, color, style = styles[row["model"]]
        found = [
            fmean(row["retrieval"][str(n)][kind]["exact"] for kind in ("literal", "paraphrased")) for n in lengths
        ]
        right.plot(lengths, found, style, color=color, marker="o", markersize=4, linewidth=2)
        ends[name] = found[-1], color
    label_ends(right, lengths[-1], ends)
    right.set_title("by length, with 20% or 35% of the cache")
    right.set_xscale("log", base=2)
    right.set_xlim(right=lengths[-1] * 3.6)
    right.set_ylim(0, 1.03)
    right.set_xticks(lengths)
    right.xaxis.set_major_formatter(NUMBER)
    right.xaxis.set_minor_locator(NullLocator())
    right.set_xlabel("tokens")
    for axes in (left, right):
        plain(axes)


def paper_size(figure: Figure, scheme: str):
    """The largest logits and the losses of the paper's first experiment over its steps, a line for every run."""
    figure.set_size_inches(9, 3.6)
    arms = {  # with the places of their names
        "mhsa": ("all heads global", GLOBALS[scheme], ((11_500, 240), (8_500, 4.15))),
        "local-only": ("none global", BASELINE, ((11_500, 60), (3_300, 3.1))),
        "ls": ("1 of 6 global", LOCAL, ((11_500, 21), (11_000, 2.85))),
    }
    runs = (ROOT / "studies" / "results" / "paper-size" / "runs.jsonl").read_text(encoding="utf-8").splitlines()
    titles = {"max_logit": "largest logit", "loss": "training loss, nats per token"}
    for i, (axes, key) in enumerate(zip(figure.subplots(1, 2), titles)):
        for run in map(json.loads, runs):
            axes.plot(*zip(*run["values"]["curves"][key]), color=arms[run["arm"]][1], linewidth=1.4)
        for label, color, places in arms.values():
            axes.annotate(label, places[i], color=color)
        axes.set_title(titles[key])
        axes.set_xlabel("steps")
        axes.set_xticks(range(0, 20_001, 5000))
        axes.xaxis.set_major_formatter(NUMBER)
        plain(axes)
    figure.axes[0].set_yscale("log")
    figure.axes[0].yaxis.set_major_formatter(NUMBER)
    figure.axes[1].set_ylim(bottom=2.7)


def plain(axes: Axes):
    """Leaves out the frame, except for the axes."""
    axes.spines[["top", "right"]].set_visible(False)


PICTURES: dict[str, Callable[[Figure, str], None]] = {
    "masks": masks,
    "cache-and-speed": cache_and_speed,
    "conversion": conversion,
    "paper-size": paper_size,
}


def draw(name: str, folder: Path):
    """Draws one picture in both schemes, `NAME-light.svg` and `NAME-dark.svg`."""
    for scheme, ink in INK.items():
        look = {
            "svg.hashsalt": name,  # the same file for the same picture
            "font.size": 10,
            "axes.titlesize": 11,
            **{f"{part}.color": ink for part in ("text", "xtick", "ytick")},
            "axes.labelcolor": ink,
            "axes.titlecolor": ink,
            "axes.edgecolor": ink,
            "axes.facecolor": "none",
        }
        with matplotlib.rc_context(look):
            figure = Figure(layout="constrained")
            PICTURES[name](figure, scheme)
            figure.savefig(folder / f"{name}-{scheme}.svg", transparent=True, metadata={"Date": None})


def draw_benchmarks():
    """Draws the plots of the committed benchmarks again."""
    for folder in ("attention", "prefill", "decode"):
        file = RESULTS / "bench" / folder / "bench-cpu.json"
        rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
        plot_ratios(
            file.with_name(f"bench-cpu-{folder}.png"), folder, [row for row in rows if row["benchmark"] == folder]
        )


if __name__ == "__main__":
    for name in sys.argv[1:] or PICTURES:
        draw(name, DOCS / "pictures")
    if not sys.argv[1:]:
        draw_benchmarks()
