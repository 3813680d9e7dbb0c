"""The benchmark suite, `lsgpt bench`: checks peers, times them in turn, and saves ratios as JSON and plots."""

import argparse
import gc
import statistics
from importlib import import_module
from pathlib import Path

import torch
from transformers.utils import is_torchao_available

from lsgpt.modeling_lsgpt import LSGPTConfig
from lsgpt.training.folders import free_folder
from lsgpt.utilities import suggest

from . import attention, decode, prefill, train
from .floor import floor_seconds, measure_rates
from .peers import BASELINES, ENGINES, FAMILIES, PAIRS, STOCK, Shape, load_shape, stock_family
from .plots import plot_ratios
from .record import OUTPUT, begin_result, write_result
from .targets import LENGTHS, find_targets
from .timing import family_of, fastest, measure, ratio


BENCHMARKS = {
    "attention": attention.prepare,
    "prefill": prefill.prepare,
    "decode": decode.prepare,
    "train": train.prepare,
}

APART = ("memory", "telemetry", "long_context", "quality", "cache_methods", "split", "serving")
"""Modules with other kinds of measurements, which have their own options."""

QUICK_LENGTHS = (2048,)

QUICK_FAMILIES = ("lsgpt", "lsgpt-no-logits", "mhsa", "gpt2", "llama")

TRAIN_LIMIT = 8192
"""Longest training step that the suite runs on a CPU by default; the logits of longer ones fill the memory."""

SHAPE_FIELDS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "num_global_heads",
    "sliding_window",
    "attention_sinks",
    "intermediate_size",
)
"""Fields of the configuration that are saved with the results."""


def run(
    name: str,
    shape: Shape,
    budget: float,
    min_rounds: int = 3,
    targets: dict | None = None,
    rates: tuple[float, float] | None = None,
    families: tuple[str, ...] = tuple(FAMILIES),
) -> dict:
    """
    Runs one benchmark at one shape.

    Args:
        name: One of `BENCHMARKS`.
        shape: What is benchmarked.
        budget, min_rounds: See `measure`.
        targets: The targets for the shape, as in `lsgpt.benchmarks.targets`.
        rates: The device's rates for `floor_seconds`.
        families: Which of `FAMILIES` to time besides `BASELINES`; all gates are run in any case.

    Returns:
        The figures; times are in seconds, for decoding per token.

    Raises:
        RuntimeError: If a peer computes something wrong; nothing has been timed then.
    """
    gc.collect()  # the models of the previous benchmark
    torch.compiler.reset()
    # FlexAttention is compiled for each shape. Beyond a limit, it would run uncompiled with only a warning.
    with torch._dynamo.config.patch(recompile_limit=64, fail_on_recompile_limit_hit=True):
        benchmark = BENCHMARKS[name](shape)
        for gate in benchmark.gates:
            gate()
        peers = {peer: make for peer, make in benchmark.peers.items() if family_of(peer) in (*BASELINES, *families)}
        times = measure(peers, shape.device, budget, min_rounds)
    seconds = {peer: [x / benchmark.repeats for x in rounds] for peer, rounds in times.items()}
    row = {
        "benchmark": name,
        "length": shape.length,
        "batch_size": shape.batch_size,
        "gates": len(benchmark.gates),
        "seconds": seconds,
        "skipped": benchmark.skipped,
        "ratios": compare_peers(name, shape, seconds, benchmark.cache_bytes, targets or {}),
    }
    if benchmark.cache_bytes:
        row["cache_bytes"] = benchmark.cache_bytes
    if rates is not None:
        configs = {"lsgpt": shape.config, "mhsa": shape.config.equal_mhsa()}
        row["floor_seconds"] = {x: floor_seconds(name, config, shape, rates) for x, config in configs.items()}
    return row


def compare_peers(
    name: str, shape: Shape, seconds: dict[str, list[float]], cache_bytes: dict[str, int], targets: dict
) -> list[dict]:
    """Returns the ratios of times in `PAIRS` and of cache sizes, with their targets."""
    ratios = []

    def add(benchmark, pair, names, figures):
        target = targets.get((shape.device, benchmark, *pair), {}).get(shape.length)
        met = None if target is None else figures["median"] <= target
        ratios.append(
            {"benchmark": benchmark, "families": pair, "peers": names, **figures, "target": target, "met": met}
        )

    for pair in PAIRS:
        names = [fastest(seconds, family) for family in pair]
        if None not in names:
            add(name, pair, names, ratio(*(seconds[peer] for peer in names)))
    for other in (family for family in cache_bytes if family != "lsgpt"):
        share = cache_bytes["lsgpt"] / cache_bytes[other]
        add("cache", ("lsgpt", other), ["lsgpt", other], {"median": share, "low": share, "high": share})
    return ratios


def print_row(row: dict):
    """Prints the times of all peers, and the ratios with their targets."""
    rounds = len(next(iter(row["seconds"].values())))
    print(f"  {row['gates']} checks against a dense reference passed; {rounds} round{'s' if rounds > 1 else ''}")
    times = {peer: statistics.median(seconds) for peer, seconds in row["seconds"].items()}
    times |= {f"floor of {family}": seconds for family, seconds in row.get("floor_seconds", {}).items()}
    for peer, seconds in times.items():
        print(f"  {peer:<26}{1000 * seconds:12.2f} ms")
    for peer, reason in row["skipped"].items():
        print(f"  {peer:<26}skipped: {reason}")
    judged = any(x["target"] is not None for x in row["ratios"])
    print(f"  {'ratio of times':<48}{'median':>8}{'low to high':>20}{'  target (at most)' if judged else ''}")
    for x in row["ratios"]:
        what = " / ".join(x["peers"]) + (", bytes of cache" if x["benchmark"] == "cache" else "")
        verdict = "" if x["target"] is None else f"{x['target']:.3f} {'met' if x['met'] else 'MISSED'}"
        spread = f"{x['low']:.3f} to {x['high']:.3f}"
        print(f"  {what:<48}{x['median']:8.3f}{spread:>20}  {verdict}", flush=True)


def print_summary(rows: list[dict]):
    """Prints what LSGPT takes as a share of the baselines, one line per benchmark and length."""
    columns = {"mhsa": "multi-head attention", "gpt2": "GPT-2", "llama": "Llama"}
    timed = {family for row in rows for x in row["ratios"] for family in x["families"]}
    columns = {family: title for family, title in columns.items() if family in timed}
    print("\nLSGPT as a share of the others: 0.5 means half; below 1, LSGPT is better.")
    print(f"  {'':<36}{'tokens':>8}{'':4}" + "".join(f"{title:<24}" for title in columns.values()))
    for row in rows:
        shares = {(x["benchmark"], *x["families"]): f"{x['median']:.2f}" for x in row["ratios"]}
        lines = {row["benchmark"]: (row["benchmark"], "lsgpt")}
        if row["benchmark"] == "train":
            lines = {"train, logits on both sides": ("train", "lsgpt")}
            lines["train, LSGPT without logits"] = ("train", "lsgpt-no-logits")
        if "cache_bytes" in row:
            lines["bytes of the cache"] = ("cache", "lsgpt")
        for title, key in lines.items():
            found = [shares.get((*key, baseline), "-") for baseline in columns]
            if set(found) != {"-"}:  # the family was timed
                print(f"  {title:<36}{row['length']:>8,}{'':4}" + "".join(f"{share:<24}" for share in found))


def save(result: dict, folder: Path, stem: str):
    """
    Writes `STEM.json` and, for each benchmark with more than one length, a plot of ratios over lengths,
    `STEM-BENCHMARK.png`.
    """
    write_result(folder / f"{stem}.json", result)
    for name in dict.fromkeys(row["benchmark"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["benchmark"] == name]
        if len(rows) > 1:
            plot_ratios(folder / f"{stem}-{name}.png", name, rows)


def main(arguments: list[str]):
    """
    Runs what the command line asks for, and saves the results after every benchmark and length.

    Raises:
        ValueError: If a benchmark or preset is unknown, a length is too short, or the device does not exist.
        RuntimeError: If a peer computes something wrong.
    """
    if arguments and arguments[0] in APART:
        import_module(f"lsgpt.benchmarks.{arguments[0]}").main(arguments[1:])
        return
    options = _parse(arguments)
    config = load_shape(options.preset)
    families = _families_of(config, options)
    default = "bfloat16" if options.device == "cuda" else "float32"
    has_targets = not (options.quick or options.int8) and options.dtype in (None, default)
    targets = find_targets(options.preset, config) if has_targets else {}
    stem = f"bench-{options.device}"
    if options.quick:
        # One layer with its share of the output matrix: about the same ratios in a fraction of the time.
        layers = config.num_hidden_layers
        fields = {"num_hidden_layers": 1, "num_global_heads": config.num_global_heads_per_layer[0]}
        config = load_shape(options.preset, **fields, vocab_size=config.vocab_size // layers)
        stem += "-quick"
        print(f"A first impression, with 1 of {layers} layers: the ratios only approximate those of the whole model.")
    output = options.output or free_folder(OUTPUT)
    if (file := output / f"{stem}.json").exists():
        raise ValueError(f"`--output` must be a folder without earlier results; {file} exists. Name another one")
    output.mkdir(parents=True, exist_ok=True)
    dtype = getattr(torch, options.dtype or default)
    engines = options.engines or (("sdpa",) if options.quick else ENGINES)
    rates = measure_rates(options.device, dtype) if options.device == "cuda" else None
    result = begin_result(*arguments) | {
        "settings": {
            "preset": options.preset,
            "device": options.device,
            "dtype": str(dtype).removeprefix("torch."),
            "int8": options.int8,
            "quick": options.quick,
            "budget_seconds": options.budget,
        },
        "model": {name: getattr(config, name) for name in SHAPE_FIELDS},
        "rates": rates,
        "rows": [],
    }
    explain(families, options.device)
    for name in options.names or BENCHMARKS:
        for length in options.lengths or (QUICK_LENGTHS if options.quick else LENGTHS):
            if not options.lengths and (options.device, name) == ("cpu", "train") and length > TRAIN_LIMIT:
                continue
            batch_size = 1 if options.device == "cpu" else 16 if name == "decode" else max(1, 16384 // length)
            timed = tuple(dict.fromkeys(("sdpa", *engines)))
            shape = Shape(config, length, batch_size, options.device, dtype, timed, options.int8)
            print(f"\n{name}, {length:,} tokens, batch {batch_size}", flush=True)
            row = run(name, shape, options.budget, options.rounds, targets, rates, families)
            print_row(row)
            result["rows"].append(row)
            save(result, output, stem)

    print_summary(result["rows"])
    verdicts = [x["met"] for row in result["rows"] for x in row["ratios"] if x["met"] is not None]
    if verdicts:
        machine = "an H200" if options.device == "cuda" else "2 CPU cores"
        print(
            f"\n{sum(verdicts)} of {len(verdicts)} targets met (they are for {machine}; other machines may miss some)"
        )
    print(f"\nsaved in {file}, with plots beside it if there are several lengths")


def _parse(arguments: list[str]) -> argparse.Namespace:
    """Parses the command line of the suite. Raises `ValueError` for what cannot be run here."""
    parser = argparse.ArgumentParser(
        prog="lsgpt bench",
        description="Time LSGPT against multi-head attention and against GPT-2 or Llama of the same shape, whichever "
        "has the same blocks, and save the ratios. Before that, check that LSGPT computes the right thing.",
        epilog=f"{', '.join(APART)} have their own options: lsgpt bench NAME --help.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(BENCHMARKS)}; default: all of them")
    parser.add_argument("--lengths", type=int, nargs="+", help="numbers of tokens; default: those of the targets")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if available")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a first impression in about a minute: one layer, 2,048 tokens, few rounds",
    )
    parser.add_argument(
        "--preset",
        default="gpt2-small",
        metavar="PRESET_OR_FOLDER",
        help="the model's shape: that of a preset or of the checkpoint in a folder; default: %(default)s",
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="default: bfloat16 on CUDA, otherwise float32"
    )
    parser.add_argument(
        "--int8", action="store_true", help="weights of linear layers in 8 bits by torchao, for prefill and decode"
    )
    parser.add_argument("--engines", nargs="+", choices=ENGINES, help="default: all; with --quick, sdpa")
    parser.add_argument(
        "--budget",
        type=float,
        help="seconds per benchmark and length, unless --rounds takes longer; default: 120; with --quick, 3",
    )
    parser.add_argument("--rounds", type=int, help="minimum number of rounds; default: 3; with --quick, 2")
    parser.add_argument(
        "--families",
        nargs="+",
        choices=FAMILIES,
        help=f"what to time; {' and '.join(BASELINES)} always are; default: all; with --quick, "
        f"{', '.join(QUICK_FAMILIES)}",
    )
    parser.add_argument(
        "--output", type=Path, metavar="FOLDER", help=f"default: {OUTPUT}, or {OUTPUT}-2 and so on if it is not empty"
    )
    options = parser.parse_args(arguments)
    for name in options.names:
        if name in APART:
            raise ValueError(f"{name!r} has its own options and must run alone: lsgpt bench {name}")
        if name not in BENCHMARKS:
            known = [*BENCHMARKS, *APART]
            raise ValueError(f"the benchmark must be one of {', '.join(known)}; got {name!r}{suggest(name, known)}")
    if min(options.lengths or [3]) < 3:
        raise ValueError(f"`--lengths` must be 3 or more; got {min(options.lengths)}")
    if options.rounds is not None and options.rounds < 1:
        raise ValueError(f"`--rounds` must be 1 or more; got {options.rounds}")
    if options.int8 and not (options.names and {*options.names} <= {"prefill", "decode"}):
        raise ValueError("`--int8` is for models that are not trained: lsgpt bench prefill decode --int8")
    if options.int8 and not is_torchao_available():
        raise ValueError("`--int8` needs torchao: pip install torchao")
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("`--device cuda` needs a GPU that PyTorch can use; there is none")
    if options.rounds is None:
        options.rounds = 2 if options.quick else 3
    if options.budget is None:
        options.budget = 3.0 if options.quick else 120.0
    return options


def _families_of(config: LSGPTConfig, options: argparse.Namespace) -> tuple[str, ...]:
    """Chooses the families to time. Raises `ValueError` if the options do not fit the model."""
    times_one_layer = options.quick or "attention" in (options.names or BENCHMARKS)
    if times_one_layer and len(set(config.num_global_heads_per_layer)) > 1:
        raise ValueError(
            "`attention` and `--quick` time a single layer, but the layers of this model differ in their number of "
            "global heads; name other benchmarks: lsgpt bench prefill decode train"
        )
    stock = stock_family(config)
    others = {family for family in STOCK if not family.startswith(stock)}
    if found := others.intersection(options.families or ()):
        raise ValueError(
            f"`--families` must fit the model's blocks, which are those of {stock}; got {', '.join(found)}"
        )
    if "telemetry" in (options.families or ()) and options.device != "cuda":
        raise ValueError("`--families telemetry` needs a GPU; on a CPU, `lsgpt bench telemetry` measures it")
    families = options.families or (QUICK_FAMILIES if options.quick else FAMILIES)
    return tuple(family for family in families if family not in others)


def explain(families: tuple[str, ...], device: str):
    """Prints what the names and numbers mean."""
    print("\nWhat is timed, each on its engines:")
    for family, description in FAMILIES.items():
        if family in (*BASELINES, *families) and (family != "telemetry" or device == "cuda"):
            print(f"  {family:<16}{description}")
    print(
        "LSGPT is first checked against a dense reference. Then all are timed in turn, round by round. `a / b` is\n"
        "the time of a as a share of the time of b: the median over the rounds, the lowest and the highest.",
        flush=True,
    )
