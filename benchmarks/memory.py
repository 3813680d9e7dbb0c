"""Peak memory of one training step on the CPU: `lsgpt bench memory`.

It is measured in two ways: how it grows with the length, with local heads only and with global heads only; and how a
model compares with plain multi-head attention in the same code and with GPT-2 or Llama, both with logits on both sides
and as `lsgpt train` runs it. Each figure comes from its own process, because the operating system remembers only the
highest peak of a process.
"""

import argparse
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from lsgpt.utilities.environment import peak_memory, reset_peak_memory

from .peers import PAIRS, STOCK, gpt2_config, llama_config, load_shape, stock_family
from .record import OUTPUT, at_least, begin_result, result_file, write_result


GROWTH = {
    "local-only": {"num_global_heads": 0, "vocab_size": 1000},
    "global-only": {"num_global_heads": "all", "vocab_size": 1000},
}
"""Models whose memory is measured over the length, as overrides of the preset `paper-v1`."""

FAMILIES = ("lsgpt", "lsgpt-no-logits", "mhsa")
"""Models of the same shape that are compared with each other and with Transformers' own."""


def build_model(name: str, length: int, preset: str) -> PreTrainedModel:
    """
    Builds a model to measure.

    Args:
        name: One of `GROWTH` or `FAMILIES`, or `"gpt2"` or `"llama"`.
        length: Number of positions.
        preset: The shape, see `load_shape`; not used for `GROWTH`.
    """
    fields = GROWTH.get(name, {"num_global_heads": "all"} if name == "mhsa" else {})
    config = load_shape("paper-v1" if name in GROWTH else preset, max_position_embeddings=length, **fields)
    if name in STOCK:
        config = (llama_config if name == "llama" else gpt2_config)(config)
    model = AutoModelForCausalLM.from_config(config).train()
    model.loss_type = "ForCausalLM"  # GPT-2 uses this one anyway, after a warning
    return model


def peak_of_training_step(name: str, length: int, preset: str) -> float:
    """
    Returns the peak memory, in bytes, that one forward and backward pass over `length` tokens adds. For the arguments,
    see `build_model`.
    """
    torch.manual_seed(0)
    model = build_model(name, length, preset)
    options = {"skip_logits": True} if name == "lsgpt-no-logits" else {}

    def step(input_ids):
        model(input_ids, labels=input_ids, use_cache=False, **options).loss.backward()

    input_ids = torch.randint(model.config.vocab_size, (1, length))
    step(input_ids[:, :2])  # allocates the gradients of the weights
    reset_peak_memory()  # making the model may have taken more than it holds now
    before = peak_memory()
    step(input_ids)
    return peak_memory() - before


def start_method(module: str) -> str:
    """
    How to start processes that run functions of a module: if possible, a server that has imported it, and so PyTorch,
    forks them, because importing takes seconds.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return "spawn"
    multiprocessing.set_forkserver_preload([module])
    return "forkserver"


def in_own_process(function: Callable, *arguments):
    """
    Calls a function in a new process and returns its result, because peak memory is measured per process. Raises
    `ChildProcessError` if the process is killed.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(start_method(__name__))) as pool:
        try:
            return pool.submit(function, *arguments).result()
        except BrokenProcessPool as error:
            raise ChildProcessError("a measurement was killed, probably for want of memory; choose less") from error


def main(arguments: list[str]):
    """Measures every model and length, prints the peaks and their ratios and writes them to a JSON file."""
    parser = argparse.ArgumentParser(prog="lsgpt bench memory", description=__doc__.splitlines()[0])
    parser.add_argument("--growth_lengths", type=at_least(1), nargs="*", default=[4096, 8192, 16384, 32768])
    parser.add_argument(
        "--lengths", type=at_least(1), nargs="*", default=[2048, 8192], help="lengths of the comparison"
    )
    parser.add_argument(
        "--preset",
        default="gpt2-small",
        metavar="PRESET_OR_FOLDER",
        help="shape of the comparison; default: %(default)s",
    )
    parser.add_argument(
        "--output", type=result_file, metavar="FILE", default=OUTPUT / "memory.json", help="default: %(default)s"
    )
    options = parser.parse_args(arguments)

    result, peaks = begin_result("memory", *arguments) | {"rows": [], "ratios": []}, {}
    families = (*FAMILIES, stock_family(load_shape(options.preset)))
    for name in (*GROWTH, *families):
        for length in options.growth_lengths if name in GROWTH else options.lengths:
            peak = in_own_process(peak_of_training_step, name, length, options.preset)
            peaks[name, length] = peak
            result["rows"].append(
                {"model": name, "tokens": length, "peak_bytes": peak, "bytes_per_token": peak / length}
            )
            per_token = peak / length / 2**10
            print(f"{name:<20}{length:8d} tokens {peak / 2**20:8.0f} MiB {per_token:8.1f} KiB a token", flush=True)
            write_result(options.output, result)

    for length in options.lengths:
        for pair in (pair for pair in PAIRS if set(pair) <= set(families)):
            share = peaks[pair[0], length] / peaks[pair[1], length]
            result["ratios"].append({"tokens": length, "families": pair, "share": share})
            print(f"{' / '.join(pair):<28}{length:8d} tokens {share:8.2f}")
    write_result(options.output, result)
    print(f"saved in {options.output}")
