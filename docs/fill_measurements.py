"""
Fills tables of the documentation from the files in `benchmarks/results/`: `python docs/fill_measurements.py`.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`, and names the files of its figures, which hold the
command, commit and machine. What no file holds is "not measured", and a row without any figure is left out.
"""

import json
import re
import statistics
from pathlib import Path

from lsgpt.benchmarks.cache_methods import PROPERTIES
from lsgpt.benchmarks.memory import FAMILIES, GROWTH
from lsgpt.benchmarks.suite import TRAIN_LIMIT
from lsgpt.benchmarks.targets import LENGTHS, TARGETS
from lsgpt.benchmarks.timing import fastest, ratio
from lsgpt.configuration import LSGPTConfig, load_preset
from lsgpt.utilities import table, with_unit


ROOT = Path(__file__).parents[1]
PAGES = [ROOT / name for name in ("docs/measurements.md", "docs/memory-and-time.md", "docs/serving.md", "README.md")]
RESULTS = ROOT / "benchmarks" / "results"

MISSING = "not measured"

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
    "mhsa": "`mhsa`",
    "gpt2": "GPT-2",
    "llama": "Llama",
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
    """A Markdown table of `rows`, and a line with the `files` that it is made from."""
    head = [column.strip() for column in header.split("|")]
    links = (f"[{name}](../benchmarks/results/{name})" for name in files)
    return f"{table(rows, head)}\n\nFrom {', '.join(links)}."


def with_spread(x: dict | None) -> str:
    """The median of a ratio, with lowest and highest where there are several rounds."""
    if x is None:
        return MISSING
    if x["rounds"] == 1 or x["benchmark"] == "cache":
        return f"{x['median']:.2f}"
    return f"{x['median']:.2f} ({x['low']:.2f} to {x['high']:.2f})"


def speed() -> str:
    """Times relative to those with all heads global, and to GPT-2's."""
    rows = []
    for title, (folder, benchmark, family) in SPEED.items():
        ratios = read_ratios(folder)
        for length in LENGTHS:
            if benchmark == "train" and length > TRAIN_LIMIT:
                continue
            found = [ratios.get((benchmark, *pair, length)) for pair in ((family, "mhsa"), (family, "gpt2"))]
            if not any(found):
                continue
            cells = [with_spread(x) for x in found]
            if benchmark == "attention":  # the same as with all heads global
                cells[1] = "-"
            rounds = max(x["rounds"] for x in found if x) if benchmark != "cache" else "-"
            rows.append([title, f"{length:,}", *cells, rounds])
    files = [f"bench/{folder}/bench-cpu.json" for folder in dict.fromkeys(folder for folder, *_ in SPEED.values())]
    return with_sources("| tokens | relative to `mhsa` | relative to GPT-2 | rounds", rows, *files)


def targets() -> str:
    """How many of the targets for the CPU are met, and the others with what was measured."""
    measured = {
        (f"{benchmark}, {family} / {other}, {length:,} tokens", target): x["median"]
        for (device, benchmark, family, other), lengths in TARGETS.items()
        for length, target in (lengths.items() if device == "cpu" else ())
        if (x := read_ratios("decode" if benchmark == "cache" else benchmark).get((benchmark, family, other, length)))
    }
    missed = [f"{name}: {x:.2f} ({target})" for (name, target), x in measured.items() if x > target]
    return (
        f"Of the project's [own targets](../benchmarks/targets.py) for CPUs, {len(measured)} have been measured, and "
        f"{len(measured) - len(missed)} of these are met. Missed (targets in brackets; `limit` is LSGPT without its "
        f"local attention): {'; '.join(missed)}."
    )


def smollm2() -> str:
    """A converted model, the same with all heads global, and Transformers' Llama, relative to one another."""
    folders, rows = {"": "smollm2", ", bfloat16": "smollm2-bfloat16"}, []
    folders |= {", int8": "smollm2-int8", ", bfloat16 and int8": "smollm2-int8-bfloat16"}
    for suffix, folder in folders.items():
        ratios = read_ratios(folder)
        for benchmark in ("prefill", "decode", *([] if suffix else ["cache"])):
            pairs = (("lsgpt", "llama"), ("mhsa", "llama"), ("lsgpt", "mhsa"))
            found = [ratios.get((benchmark, *pair, 8192)) for pair in pairs]
            if any(found):
                cells = [with_spread(x) if x else "-" for x in found]
                rows.append([benchmark + suffix, "8,192", *cells])
    files = [f"bench/{folder}/bench-cpu.json" for folder in folders.values()]
    return with_sources("| tokens | LSGPT / Llama | all heads global / Llama | LSGPT / all heads global", rows, *files)


def gpu() -> str:
    """The time of a converted model on a GPU, by attention implementation."""
    file, rows = "bench/h200/bench-cuda.json", []
    for row in read(file)["rows"]:
        seconds = row["seconds"]
        for engine in ("triton", "sdpa"):
            name = f"lsgpt {engine}"
            found = [ratio(seconds[name], seconds[fastest(seconds, family)]) for family in ("mhsa", "llama")]
            cells = [with_spread(x | {"rounds": len(seconds[name]), "benchmark": row["benchmark"]}) for x in found]
            rows.append([f"{row['benchmark']}, `{engine}`", f"{row['length']:,}", *cells])
    return with_sources("| tokens | relative to `mhsa` | relative to Llama", rows, file)


def quality() -> str:
    """What converted models preserve of their source, each on the blocks and passages measured with both."""
    if not (RESULTS / "quality" / "quality.json").exists():
        return MISSING
    with_fewer_passages = ("smollm2-ls-healed", "smollm2-ls-35-healed", "smollm2-ls-healed-longer")
    rows = [row for row in read("quality/quality.json")["rows"] if row["model"] not in with_fewer_passages]
    (first, *others), lines = rows, []
    if "cache" in first:
        cells = [f"{row['cache']['ratio']:.3f}" for row in rows]
        lines.append([f"cache after {first['cache']['tokens']:,} tokens, as a fraction of the source's", *cells])
    for size, of_source in first["perplexity"].items():
        found = [row["perplexity"][size] for row in others]
        cells = [f"{x['ratio']:.3f} ({_range(x['interval'])}), {x['blocks']} blocks" for x in found]
        title = f"perplexity in blocks of {int(size):,} tokens, as a ratio to the source's"
        lines.append([title, f"{of_source['value']:.2f}, {of_source['blocks']} blocks", *cells])
    for key, title in (("retrieval", "in {:,} tokens"), ("far", "at least {:,} tokens back")):
        for size, of_source in first[key].items():
            for kind in [kind for kind in of_source if kind != "passages"]:
                found = [row[key][size] for row in rows]
                counts = [x["passages"] if "passages" in x else x[kind]["questions"] for x in found]
                cells = [
                    f"{round(x[kind]['exact'] * count)} of {count} ({_range(x[kind]['interval'], 2)})"
                    for x, count in zip(found, counts)
                ]
                lines.append([f"{kind}, {title.format(int(size))}", *cells])
    return with_sources(" | ".join(["", *(f"`{row['model']}`" for row in rows)]), lines, "quality/quality.json")


def cache_methods() -> str:
    """Converted models beside other methods with the same bytes, for several sizes of the cache."""

    def figures(row: dict | None) -> list[str]:
        if row is None:
            return [MISSING] * 3
        found = f"{row['exact']:.2f} ({_range(row['interval'])})"
        return [f"{row['perplexity_ratio']:.3f}", found, f"{row['cache_ratio']:.2f}"]

    shares = (10, 35, 50)
    files = ["quality/cache_methods.json", *(f"quality/cache_methods-{share}.json" for share in shares)]
    rows, *others = ({row["method"]: row for row in read(file)["rows"]} for file in files)
    lines = []
    for method, row in rows.items():
        time = MISSING if row["prefill_ratio"] is None else f"{row['prefill_ratio']:.2f}"
        properties = PROPERTIES.get(method.split()[0], ("",) * 4)[:3]
        of_others = (cell for each in others for cell in figures(each.get(method)))
        lines.append([method, *figures(row), *of_others, time, *properties])
    columns = "perplexity | numbers found | bytes held"
    header = " | ".join(["method", f"20%: {columns}", *(f"{share}%: {columns}" for share in shares)])
    return with_sources(f"{header} | 20%: prefill time | memory freed | cheaper prefill (20%) | served", lines, *files)


def ruler() -> str:
    """Scores in RULER's tasks, of a pretrained model and of what was made from it."""
    rows = read("quality/ruler.json")["rows"]
    scores = {(row["task"], row["model"]): f"{row['score']:.2f}" for row in rows}
    tasks, models = (list(dict.fromkeys(names)) for names in zip(*scores))
    lines = [[f"`{task}`", *(scores.get((task, model), MISSING) for model in models)] for task in tasks]
    return with_sources(" | ".join(["task", *(f"`{model}`" for model in models)]), lines, "quality/ruler.json")


def _range(interval: list[float], digits: int = 3) -> str:
    return f"{interval[0]:.{digits}f} to {interval[1]:.{digits}f}"


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
        if any(peaks):
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
            if peak := found.get((name, length)):
                to_gpt2 = f"{peak / found['gpt2', length]:.2f}" if ("gpt2", length) in found else MISSING
                rows.append([NAMES[name], f"{length:,}", f"{peak / length / 2**10:,.0f} KiB", to_gpt2])
    return with_sources("| tokens | peak per token | relative to GPT-2", rows, "memory.json")


def requests() -> str:
    """Requests in vLLM's cache, relative to GPT-2's."""
    found = {
        (row["model"], row["block_size"], row["max_num_batched_tokens"]): row["requests"]
        for row in read("serving.json")["rows"]
    }
    steps = sorted({tokens for *_, tokens in found})
    rows = [
        [f"{NAMES[model]}, blocks of {size} tokens"]
        + [f"{found[model, size, tokens] / found['gpt2', size, tokens]:.2f}" for tokens in steps]
        for model in ("lsgpt", "mhsa")
        for size in sorted({size for _, size, _ in found}, reverse=True)
    ]
    return with_sources("|".join(["", *(f"{tokens:,} in a step" for tokens in steps)]), rows, "serving.json")


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
    return with_sources("model | tokens | at once | time | memory | cache at the end", rows, "long_context.json")


def split() -> str:
    """Sequences that are shared by processes."""
    result = read("split.json")
    alone = {row["model"]: row for row in result["rows"] if row["processes"] == 1}
    rows = []
    for row in result["rows"]:
        first = alone[row["model"]]
        rows.append(
            [
                {"lsgpt": "paper-v1", "mhsa": "paper-v1, all heads global"}[row["model"]],
                f"{row['tokens']:,}",
                row["processes"],
                f"{row['peak_bytes'] / 2**20:,.0f} MiB",
                f"{first['peak_bytes'] / row['peak_bytes']:.2f}",
                f"{row['received_bytes'] / 1e6:.1f} MB",
                f"{row['seconds'] / first['seconds']:.2f}",
            ]
        )
    header = "model | tokens | processes | memory | reduction factor | received | relative time"
    return with_sources(header, rows, "split.json")


def telemetry() -> str:
    """What measuring logits costs."""
    result = read("telemetry.json")
    every = result["settings"]["every_n_steps"]
    rows = [
        ["a measured step, as a multiple of the others", f"{result['measured_step_ratio']:.3f}"],
        [f"which implies, with one step in {every} measured", f"{result['implied_ratio']:.4f}"],
        ["whole runs, with / without, each round", ", ".join(f"{x:.2f}" for x in result["ratios"])],
    ]
    return with_sources("| ratio of times", rows, "telemetry.json")


def books() -> str:
    """The comparison on books."""
    lines = [json.loads(line) for line in (RESULTS / "books" / "runs.jsonl").read_text(encoding="utf-8").splitlines()]
    rows = []
    for arm in dict.fromkeys(line["arm"] for line in lines):
        runs = [line["values"] for line in lines if line["arm"] == arm]
        finished = [run for run in runs if not run["diverged"]]
        cells = []
        for key, digits in (("eval_perplexity", 2), ("eval_bits_per_byte", 4), ("max_logit", 1)):
            values = [run[key] for run in finished]
            cells.append(f"{statistics.mean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}")
        rows.append([f"`{arm}`", *cells, f"{len(runs) - len(finished)} of {len(runs)}"])
    header = "arm | validation perplexity | bits per byte | largest logit | diverged"
    return with_sources(header, rows, "books/runs.jsonl")


def front_page() -> str:
    """The rows of the front page: LSGPT relative to the same model with all heads global."""
    rows = []
    for title, folder, benchmark, family, length in FRONT_PAGE:
        median = read_ratios(folder)[(benchmark, family, "mhsa", length)]["median"]
        rows.append([title, f"{length:,}", f"{median:.2f}"])
    return table(rows, ["time or memory, relative to all heads global", "tokens", "ratio"])


def costs() -> str:
    """What models of several sizes need, from their configurations alone."""
    rows = []
    for name, config in {**{f"`{name}`": load_preset(name) for name in COSTS}, **LLAMAS}.items():
        mhsa, cells = config.equal_mhsa(), []
        for length in (8192, 32768):
            sizes = [with_unit(shape.kv_cache_bytes(length), "B") for shape in (config, mhsa)]
            cells.append(" / ".join(sizes))
        saved = config.flops_per_token(32768) / mhsa.flops_per_token(32768)
        rows.append([name, with_unit(config.num_parameters()), *cells, f"{saved:.2f}"])
    header = (
        "shape | parameters | cache at 8,192 tokens | at 32,768 tokens | operations at 32,768, relative to all global"
    )
    return table(rows, [column.strip() for column in header.split("|")])


COSTS = ("gpt2-small", "smollm2-135m", "paper-36l")
"""Presets in the table of costs."""

LLAMAS = {
    name: LSGPTConfig(
        vocab_size=128256,
        num_attention_heads=32,
        num_key_value_heads=8,
        num_global_heads=4,
        sliding_window=128,
        norm_type="rms_norm",
        gated_mlp=True,
        hidden_act="silu",
        position_embedding_type="rope",
        max_position_embeddings=131072,
        **fields,
    )
    for name, fields in {
        "Llama 3.2 1B": {
            "hidden_size": 2048,
            "num_hidden_layers": 16,
            "intermediate_size": 8192,
            "tie_word_embeddings": True,
        },
        "Llama 3.1 8B": {"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336},
    }.items()
}
"""The shapes of two Llamas, with one of eight key/value heads global."""

FRONT_PAGE = (
    ("KV cache", "decode", "cache", "lsgpt", 8192),
    ("generating a token", "decode", "decode", "lsgpt", 32768),
    ("reading a prompt (*prefill*)", "prefill", "prefill", "lsgpt", 8192),
    ("attention alone, forward and backward", "attention", "attention", "lsgpt", 8192),
    ("a training step", "train", "train", "lsgpt", 2048),
)

TABLES = (
    *(speed, targets, smollm2, gpu, quality, cache_methods, ruler, growth, memory),
    *(requests, long_context, split, telemetry, books, costs, front_page),
)


def fill(page: str) -> str:
    """The page with all tables made anew. Raises `KeyError` for a table that nothing makes."""
    makers = {maker.__name__: maker for maker in TABLES}

    def replace(match: re.Match) -> str:
        return f"<!-- table: {match[1]} -->\n{makers[match[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- table: (\w+) -->\n.*?<!-- end -->", replace, page, flags=re.DOTALL)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(fill(page.read_text(encoding="utf-8")), encoding="utf-8")
