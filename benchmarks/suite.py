"""The benchmark suite, `lsgpt bench`: gates, times peers in turn, prints ratios and saves them as JSON and plots."""

import argparse
import gc
import json
import shlex
import statistics
from importlib import import_module
from pathlib import Path

import torch

from lsgpt.configuration import load_preset
from lsgpt.training.plots import plot_curves
from lsgpt.training.report import describe_environment
from lsgpt.utilities import suggest

from . import attention, decode, prefill, train
from .floor import floor_seconds, measure_rates
from .peers import ENGINES, Shape
from .targets import LENGTHS, TARGETS
from .timing import fastest, measure, ratio


BENCHMARKS = {
    "attention": attention.prepare,
    "prefill": prefill.prepare,
    "decode": decode.prepare,
    "train": train.prepare,
}

APART = ("memory", "telemetry", "long_context")
"""Modules with measurements of their own kind, and with options of their own."""

PAIRS = (
    ("lsgpt", "gpt2"),
    ("lsgpt", "gpt2-gelu"),
    ("lsgpt", "mhsa"),
    ("lsgpt", "limit"),
    ("limit", "gpt2"),
    ("limit", "mhsa"),
    ("telemetry", "lsgpt"),
)
"""Families whose times are compared, the fastest peer of each."""

FAMILIES = tuple(dict.fromkeys(family for pair in PAIRS for family in pair))

QUICK_LENGTHS = (512, 2048)

TRAIN_LIMIT = 8192
"""Longest training step that the suite runs on a CPU by itself: the logits of longer ones fill the memory."""

SHAPE_FIELDS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_global_heads",
    "sliding_window",
    "intermediate_size",
)
"""What the results say about the model."""

OUTPUT = Path("runs") / "bench"


def run(
    name: str,
    shape: Shape,
    budget: float,
    min_rounds: int = 3,
    judged: bool = False,
    rates: tuple[float, float] | None = None,
    families: tuple[str, ...] = FAMILIES,
) -> dict:
    """
    One benchmark at one shape.

    Args:
        name: One of `BENCHMARKS`.
        shape: What is benchmarked.
        budget, min_rounds: As of `measure`.
        judged: Whether the shape is the one that the targets are for.
        rates: Those of the device, for the floor.
        families: Those of `FAMILIES` to time; the gates are for all.

    Returns:
        The figures; what takes time is in seconds, for decoding per token.

    Raises:
        RuntimeError: A peer computes something wrong; nothing has been timed.
    """
    gc.collect()  # the models of the benchmark before
    torch.compiler.reset()
    # FlexAttention is compiled for each shape, and beyond a limit would run uncompiled, with no more than a warning.
    with torch._dynamo.config.patch(recompile_limit=64, fail_on_recompile_limit_hit=True):
        benchmark = BENCHMARKS[name](shape)
        for gate in benchmark.gates:
            gate()
        peers = {peer: make for peer, make in benchmark.peers.items() if peer.split(maxsplit=1)[0] in families}
        times = measure(peers, shape.device, budget, min_rounds)
    seconds = {peer: [x / benchmark.repeats for x in rounds] for peer, rounds in times.items()}
    row = {
        "benchmark": name,
        "length": shape.length,
        "batch_size": shape.batch_size,
        "gates": len(benchmark.gates),
        "seconds": seconds,
        "skipped": benchmark.skipped,
        "ratios": compare_peers(name, shape, seconds, benchmark.cache_bytes, judged),
    }
    if benchmark.cache_bytes:
        row["cache_bytes"] = benchmark.cache_bytes
    if rates is not None:
        configs = {"lsgpt": shape.config, "mhsa": shape.config.equal_mhsa()}
        row["floor_seconds"] = {x: floor_seconds(name, config, shape, rates) for x, config in configs.items()}
    return row


def compare_peers(
    name: str, shape: Shape, seconds: dict[str, list[float]], cache_bytes: dict[str, int], judged: bool
) -> list[dict]:
    """The ratios of `PAIRS`, and of the bytes of caches, with their targets where `judged`."""
    ratios = []

    def add(benchmark, pair, names, figures):
        target = TARGETS.get((shape.device, benchmark, *pair), {}).get(shape.length) if judged else None
        met = None if target is None else figures["median"] <= target
        ratios.append(
            {"benchmark": benchmark, "families": pair, "peers": names, **figures, "target": target, "met": met}
        )

    for pair in PAIRS:
        names = [fastest(seconds, family) for family in pair]
        if None not in names:
            add(name, pair, names, ratio(*(seconds[peer] for peer in names)))
    if cache_bytes:
        share = cache_bytes["lsgpt"] / cache_bytes["gpt2"]
        add("cache", ("lsgpt", "gpt2"), ["lsgpt", "gpt2"], {"median": share, "low": share, "high": share})
    return ratios


def print_row(row: dict):
    """Prints the times of all peers, and the ratios beside their targets."""
    print(f"  {row['gates']} gates passed, {len(next(iter(row['seconds'].values())))} rounds")
    times = {peer: statistics.median(seconds) for peer, seconds in row["seconds"].items()}
    times |= {f"floor of {family}": seconds for family, seconds in row.get("floor_seconds", {}).items()}
    for peer, seconds in times.items():
        print(f"  {peer:<26}{1000 * seconds:12.2f} ms")
    for peer, reason in row["skipped"].items():
        print(f"  {peer:<26}skipped: {reason}")
    print(f"  {'ratio':<48}{'median':>8}{'low to high':>20}  target")
    for x in row["ratios"]:
        what = " / ".join(x["peers"]) + (", bytes of cache" if x["benchmark"] == "cache" else "")
        verdict = "" if x["target"] is None else f"{x['target']:.3f} {'met' if x['met'] else 'MISSED'}"
        spread = f"{x['low']:.3f} to {x['high']:.3f}"
        print(f"  {what:<48}{x['median']:8.3f}{spread:>20}  {verdict}", flush=True)


def save(result: dict, folder: Path, stem: str):
    """Writes `STEM.json` and a plot of ratios over lengths for each benchmark, `STEM-BENCHMARK.png`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{stem}.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    for name in dict.fromkeys(row["benchmark"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["benchmark"] == name]
        baseline = "mhsa" if name == "attention" or result["settings"]["device"] == "cuda" else "gpt2"
        curves = {}
        for row in sorted(rows, key=lambda row: row["length"]):
            for x in row["ratios"]:
                family, other = x["families"]
                if other == baseline:
                    label = "cache" if x["benchmark"] == "cache" else family
                    curves.setdefault(label, []).append((row["length"], x["median"]))
                    if x["target"] is not None:
                        curves.setdefault(f"target of {label}", []).append((row["length"], x["target"]))
        plot_curves(
            folder / f"{stem}-{name}.png",
            {label: [curve] for label, curve in curves.items()},
            "tokens",
            f"{name}, ratio to {baseline}",
            log_x=True,
        )


def main(arguments: list[str]):
    """
    Runs what the command line asks for, and saves after every benchmark and length.

    Raises:
        ValueError: An unknown benchmark or preset, a length that is too short, no such device.
        RuntimeError: A peer computes something wrong.
    """
    if arguments and arguments[0] in APART:
        import_module(f"lsgpt.benchmarks.{arguments[0]}").main(arguments[1:])
        return
    parser = argparse.ArgumentParser(
        prog="lsgpt bench",
        description="Time LSGPT beside multi-head attention and GPT-2 of the same shape, after checking that it "
        "computes the right thing, and save the ratios.",
        epilog=f"{', '.join(APART)} have options of their own: lsgpt bench NAME --help.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(BENCHMARKS)}; default: all of them")
    parser.add_argument("--lengths", type=int, nargs="+", help="numbers of tokens; default: those of the targets")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument("--quick", action="store_true", help="a first look: one layer, short lengths, few rounds")
    parser.add_argument("--preset", default="gpt2-small", help="the model's shape; default: %(default)s")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, help="default: all; with --quick sdpa")
    parser.add_argument(
        "--budget",
        type=float,
        help="seconds for a benchmark at a length, beyond the least number of rounds; default: 120, with --quick 3",
    )
    parser.add_argument("--rounds", type=int, help="least number of rounds; default: 3, with --quick 2")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES, help="default: all")
    parser.add_argument("--output", type=Path, default=OUTPUT, metavar="FOLDER", help="default: %(default)s")
    options = parser.parse_args(arguments)
    for name in options.names:
        if name in APART:
            raise ValueError(f"{name!r} has options of its own and runs alone: lsgpt bench {name}")
        if name not in BENCHMARKS:
            raise ValueError(f"unknown benchmark {name!r}{suggest(name, [*BENCHMARKS, *APART])}")
    if min(options.lengths or [3]) < 3:
        raise ValueError(f"`--lengths` must be 3 or more; got {min(options.lengths)}")
    if options.rounds is not None and options.rounds < 1:
        raise ValueError(f"`--rounds` must be 1 or more; got {options.rounds}")
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("`--device cuda` needs a GPU that PyTorch can use; there is none")

    config = load_preset(options.preset)
    stem = f"bench-{device}"
    if options.quick:
        # One layer with its share of the output matrix: about the same ratios in a fraction of the time.
        layers = config.num_hidden_layers
        config = load_preset(options.preset, num_hidden_layers=1, vocab_size=config.vocab_size // layers)
        stem += "-quick"
        print(f"A first look, with 1 layer of {layers}: the ratios are about those of the whole model.")
    engines = options.engines or (("sdpa",) if options.quick else ENGINES)
    lengths = options.lengths or (QUICK_LENGTHS if options.quick else LENGTHS)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    budget = options.budget if options.budget is not None else 3.0 if options.quick else 120.0
    rates = measure_rates(device, dtype) if device == "cuda" else None
    result = {
        "command": shlex.join(["lsgpt", "bench", *arguments]),
        "machine": describe_environment(),
        "settings": {
            "preset": options.preset,
            "device": device,
            "dtype": str(dtype).removeprefix("torch."),
            "quick": options.quick,
            "budget_seconds": budget,
        },
        "model": {name: getattr(config, name) for name in SHAPE_FIELDS},
        "rates": rates,
        "rows": [],
    }
    for name in options.names or BENCHMARKS:
        for length in lengths:
            if not options.lengths and (device, name) == ("cpu", "train") and length > TRAIN_LIMIT:
                continue
            batch_size = 1 if device == "cpu" else 16 if name == "decode" else max(1, 16384 // length)
            shape = Shape(config, length, batch_size, device, dtype, tuple(dict.fromkeys(("sdpa", *engines))))
            judged = options.preset == "gpt2-small"
            print(f"\n{name}, {length:,} tokens, batch {batch_size}", flush=True)
            rounds = options.rounds or (2 if options.quick else 3)
            row = run(name, shape, budget, rounds, judged, rates, tuple(options.families))
            print_row(row)
            result["rows"].append(row)
            save(result, options.output, stem)

    verdicts = [x["met"] for row in result["rows"] for x in row["ratios"] if x["met"] is not None]
    print(f"\n{sum(verdicts)} of {len(verdicts)} targets met" if verdicts else "\nno targets for this shape")
    print(f"saved in {options.output / stem}.json, with plots beside it")
