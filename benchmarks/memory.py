"""Peak memory of one training step on the CPU against the sequence length: `python -m lsgpt.benchmarks.memory`.

The model has local heads only, so memory must grow in proportion to the length. Each length runs in a process of its
own, because the operating system only remembers a process's highest peak.
"""

import argparse
import json
import multiprocessing
import platform
from pathlib import Path

import torch

from lsgpt import LSGPTForCausalLM
from lsgpt.configuration import load_preset
from lsgpt.training.report import peak_memory


RESULTS = Path(__file__).parent / "results" / "memory.json"


def peak_of_training_step(length: int, num_global_heads: int) -> float:
    """Bytes that one forward and backward pass over `length` tokens adds to the process, at its peak."""
    torch.manual_seed(0)
    config = load_preset("paper-v1")
    config.num_global_heads, config.max_position_embeddings, config.vocab_size = num_global_heads, length, 1000
    model = LSGPTForCausalLM(config).train()
    input_ids = torch.randint(config.vocab_size, (1, length))
    before = peak_memory()
    model(input_ids, labels=input_ids, use_cache=False).loss.backward()
    return peak_memory() - before


def main(arguments: list[str] | None = None):
    """Measures every length, prints a table and writes it to a JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384, 32768])
    parser.add_argument("--num_global_heads", type=int, default=0, help="0 (default): an all-local model")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)

    rows = []
    print(f"{'tokens':>8} {'peak':>12} {'per token':>12} {'growth':>8}")
    for length in options.lengths:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            peak = pool.apply(peak_of_training_step, (length, options.num_global_heads))
        growth = peak / rows[-1]["peak_bytes"] if rows else None
        rows.append({"tokens": length, "peak_bytes": peak, "bytes_per_token": peak / length, "growth": growth})
        shown = f"{growth:7.2f}x" if growth else ""
        print(f"{length:8d} {peak / 2**20:8.0f} MiB {peak / length / 2**10:8.1f} KiB {shown:>8}", flush=True)

    options.output.parent.mkdir(parents=True, exist_ok=True)
    machine = {"processor": platform.machine(), "threads": torch.get_num_threads(), "torch": torch.__version__}
    result = {"num_global_heads": options.num_global_heads, "machine": machine, "rows": rows}
    options.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
