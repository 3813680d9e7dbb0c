"""
Fills tables of the documentation from the files in `benchmarks/results/`: `python docs/fill_measurements.py`.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`, and ends with the commands, commits and machines of
its figures. What no file holds is "not measured yet".
"""

import json
import re
import statistics
from pathlib import Path

from lsgpt.benchmarks.memory import FAMILIES, GROWTH
from lsgpt.benchmarks.suite import TRAIN_LIMIT
from lsgpt.benchmarks.targets import LENGTHS, SMOLLM2_TARGETS, TARGETS
from lsgpt.utilities import table


PAGES = [Path(__file__).parent / name for name in ("measurements.md", "pretrained.md")]
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"

MISSING = "not measured yet"

SPEED = {
    "attention alone, forward and backward": ("attention", "attention", "lsgpt"),
    "prefill": ("prefill", "prefill", "lsgpt"),
    "training step, logits on both sides": ("train", "train", "lsgpt"),
    "training step, LSGPT without logits": ("train", "train", "lsgpt-no-logits"),
    "decoded token": ("decode", "decode", "lsgpt"),
    "bytes of the cache": ("decode", "cache", "lsgpt"),
}
"""Rows of the table: folder of the file, benchmark as the ratios name it, and family."""

NAMES = {
    "lsgpt": "LSGPT",
    "lsgpt-no-logits": "LSGPT without logits",
    "mhsa": "MHSA",
    "gpt2": "GPT-2",
    "llama": "Llama",
    "limit": "bound",
}


def read(name: str) -> dict:
    """A file of results."""
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def read_ratios(folder: str) -> dict:
    """
    The ratios in a file of the suite, by benchmark, families and length, each with its number of `rounds`; none where
    there is no file.
    """
    ratios = {}
    if not (RESULTS / f"bench/{folder}/bench-cpu.json").exists():
        return ratios
    for row in read(f"bench/{folder}/bench-cpu.json")["rows"]:
        rounds = len(next(iter(row["seconds"].values())))
        for x in row["ratios"]:
            ratios[(x["benchmark"], *x["families"], row["length"])] = x | {"rounds": rounds}
    return ratios


def with_sources(header: str, rows: list[list], *files: str) -> str:
    """A Markdown table of `rows`, and a line for each of the `files` that it is made from."""
    head = [column.strip() for column in header.split("|")]
    return f"{table(rows, head)}\n\n" + "\n".join(describe_source(name) for name in files)


def describe_source(name: str) -> str:
    """Command, commit and machine of a file of results."""
    result = read(name)
    environment = result.get("environment", {})
    versions = ", ".join(f"{package} {environment[package]}" for package in ("torch", "transformers") if environment)
    parts = [
        f"`{result['command']}`" if "command" in result else "command not recorded",
        f"commit {environment.get('commit', 'not recorded')}",
        environment.get("hardware", "machine not recorded"),
        versions,
    ]
    return f"- [{name}](../benchmarks/results/{name}): {'; '.join(part for part in parts if part)}"


def with_spread(x: dict | None, digits: int = 2) -> str:
    """The median of a ratio, with lowest and highest where there are several rounds."""
    if x is None:
        return MISSING
    if x["rounds"] == 1 or x["benchmark"] == "cache":
        return f"{x['median']:.{digits}f}"
    return f"{x['median']:.{digits}f} ({x['low']:.{digits}f} to {x['high']:.{digits}f})"


def speed() -> str:
    """Times as shares of multi-head attention's and GPT-2's."""
    rows = []
    for title, (folder, benchmark, family) in SPEED.items():
        ratios = read_ratios(folder)
        for length in LENGTHS:
            if benchmark == "train" and length > TRAIN_LIMIT:
                continue
            pairs = [(family, "mhsa"), (family, "gpt2"), ("mhsa", "gpt2"), ("limit", "mhsa")]
            found = [ratios.get((benchmark, *pair, length)) for pair in pairs]
            cells = [with_spread(x) for x in found]
            if benchmark == "attention":  # MHSA is what GPT-2 calls
                cells[1] = cells[2] = "-"
            if benchmark == "cache":
                cells[2], cells[3] = "1.00", "-"
            rounds = max((x["rounds"] for x in found if x), default="-") if benchmark != "cache" else "-"
            rows.append([title, f"{length:,}", *cells, rounds])
    files = [f"bench/{folder}/bench-cpu.json" for folder in dict.fromkeys(folder for folder, *_ in SPEED.values())]
    return with_sources("| tokens | LSGPT / MHSA | LSGPT / GPT-2 | MHSA / GPT-2 | bound / MHSA | rounds", rows, *files)


def targets() -> str:
    """The targets for the CPU, and whether they are met."""
    rows = []
    for (device, benchmark, *pair), lengths in TARGETS.items():
        for length, target in lengths.items() if device == "cpu" else ():
            x = read_ratios("decode" if benchmark == "cache" else benchmark).get((benchmark, *pair, length))
            met = MISSING if x is None else "yes" if x["median"] <= target else "no"
            names = " / ".join(NAMES[family] for family in pair)
            rows.append([benchmark, f"{length:,}", names, with_spread(x, 3), target, met])
    return with_sources("benchmark | tokens | ratio | measured | target, at most | met", rows)


def smollm2() -> str:
    """A converted model as a share of Transformers' Llama."""
    ratios, rows = read_ratios("smollm2"), []
    for (_, benchmark, *pair), lengths in SMOLLM2_TARGETS.items():
        for length, target in lengths.items():
            x = ratios.get((benchmark, *pair, length))
            met = MISSING if x is None else "yes" if x["median"] <= target else "no"
            rows.append([benchmark, f"{length:,}", with_spread(x, 3), target, met])
    header = "benchmark | tokens | LSGPT / Llama | target, at most | met"
    return with_sources(header, rows, *["bench/smollm2/bench-cpu.json"] * bool(ratios))


def quality() -> str:
    """Cache, perplexity and retrieval of a source and of what was made of it."""
    if not (RESULTS / "quality" / "quality.json").exists():
        return MISSING
    results = read("quality/quality.json")["rows"]
    first, lines = results[0], []
    if "cache" in first:
        cells = [f"{row['cache']['ratio']:.3f}" for row in results]
        lines.append([f"cache after {first['cache']['tokens']:,} tokens, as a share of the source's", *cells])
    for size, x in first["perplexity"].items():
        cells = [
            f"{row['value']:.2f}" + (f": {row['ratio']:.3f} ({_range(row['interval'])}) of the source's" if i else "")
            for i, row in enumerate(row["perplexity"][size] for row in results)
        ]
        lines.append([f"perplexity, {x['tokens']:,} tokens in blocks of {int(size):,}", *cells])
    for size, of_source in first["retrieval"].items():
        for kind in [kind for kind in of_source if kind != "passages"]:
            found = [row["retrieval"][size][kind] for row in results]
            cells = [f"{x['exact']:.2f} ({_range(x['interval'])})" for x in found]
            lines.append([f"{kind}, {of_source['passages']} passages of {int(size):,} tokens", *cells])
    header = " | ".join(["", *(f"`{row['model']}`" for row in results)])
    return with_sources(header, lines, "quality/quality.json")


def _range(interval: list[float]) -> str:
    return f"{interval[0]:.3f} to {interval[1]:.3f}"


def growth() -> str:
    """Memory of a training step over the length."""
    found = {(row["model"], row["tokens"]): row for row in read("memory.json")["rows"]}
    lengths = sorted({length for name, length in found if name in GROWTH})
    rows = []
    for name in GROWTH:
        peaks = [found.get((name, length)) for length in lengths]
        cells = [
            f"{x['peak_bytes'] / 2**20:,.0f} MiB, {x['bytes_per_token'] / 2**10:.0f} KiB" if x else MISSING
            for x in peaks
        ]
        rows.append([name.replace("-", " heads "), *cells])
    return with_sources(
        "|".join(["peak, and per token ", *(f"{length:,} tokens" for length in lengths)]), rows, "memory.json"
    )


def memory() -> str:
    """Memory of a training step, in one shape."""
    found = {(row["model"], row["tokens"]): row["peak_bytes"] for row in read("memory.json")["rows"]}
    families = (*FAMILIES, "gpt2")
    lengths = sorted({length for name, length in found if name in families})
    rows = []
    for name in families:
        for length in lengths:
            peak = found.get((name, length))
            cells = [f"{peak / length / 2**10:,.0f} KiB" if peak else MISSING]
            for other in ("mhsa", "gpt2"):
                cells.append(f"{peak / found[other, length]:.2f}" if peak and (other, length) in found else MISSING)
            rows.append([NAMES[name], f"{length:,}", *cells])
    return with_sources("| tokens | peak per token | share of MHSA's | share of GPT-2's", rows, "memory.json")


def long_context() -> str:
    """Long prompts."""
    rows = [
        [
            row["model"],
            f"{row['tokens']:,}",
            "all" if row["chunk_length"] == row["tokens"] else f"{row['chunk_length']:,}",
            f"{row['seconds']:.0f} s",
            f"{row['peak_bytes'] / 2**20:,.0f} MiB",
            f"{row['cache_bytes'] / 2**20:,.1f} MiB",
        ]
        for row in read("long_context.json")["rows"]
    ]
    if not any("all heads global" in model for model, *_ in rows):
        rows.append(["paper-v1, all heads global", *[MISSING] * 5])
    return with_sources("model | tokens | at once | time | memory | cache at the end", rows, "long_context.json")


def telemetry() -> str:
    """What measuring logits costs."""
    result = read("telemetry.json")
    every = result["settings"]["every_n_steps"]
    rows = [
        ["a measured step, as a multiple of the others", f"{result['measured_step_ratio']:.3f}"],
        [f"which implies, with one step in {every} measured", f"{result['implied_ratio']:.4f}"],
        ["whole runs, with / without, each round", ", ".join(f"{ratio:.2f}" for ratio in result["ratios"])],
    ]
    return with_sources("| ratio of times", rows, "telemetry.json")


def books() -> str:
    """The comparison on books."""
    result = read("books/results.json")
    rows = []
    for arm, runs in result.get("arms", result).items():
        finished = [run for run in runs if run["status"] == "finished"]
        cells = []
        for key, digits in (("eval_perplexity", 2), ("eval_bits_per_byte", 4), ("max_logit", 1)):
            values = [run[key] for run in finished]
            cells.append(f"{statistics.mean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}")
        rows.append([f"`{arm}`", *cells, f"{len(runs) - len(finished)} of {len(runs)}"])
    header = "arm | validation perplexity | bits per byte | largest logit | diverged"
    return with_sources(header, rows, "books/results.json")


TABLES = (speed, targets, smollm2, quality, growth, memory, long_context, telemetry, books)


def fill(page: str) -> str:
    """The page with all tables made anew. Raises `KeyError` for a table that nothing makes."""
    makers = {maker.__name__: maker for maker in TABLES}

    def replace(match: re.Match) -> str:
        return f"<!-- table: {match[1]} -->\n{makers[match[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- table: (\w+) -->\n.*?<!-- end -->", replace, page, flags=re.DOTALL)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(fill(page.read_text(encoding="utf-8")), encoding="utf-8")
