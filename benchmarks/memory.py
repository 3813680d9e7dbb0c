"""Peak memory of one training step on the CPU: `lsgpt bench memory`.

Two questions: whether it grows in proportion to the length when all heads are local, and whether a model with global
heads takes more per token than GPT-2. Each figure comes from a process of its own, because the operating system only
remembers a process's highest peak.
"""

import argparse
import json
import multiprocessing
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from lsgpt.configuration import load_preset
from lsgpt.training.report import describe_environment, peak_memory

from .peers import gpt2_config


RESULTS = Path(__file__).parent / "results" / "memory.json"

MODELS = {
    "local-only": ("paper-v1", {"num_global_heads": 0, "vocab_size": 1000}, {}),
    "lsgpt": ("gpt2-small", {}, {"skip_logits": True}),
    "lsgpt with logits": ("gpt2-small", {}, {}),
    "gpt2": ("gpt2-small", {}, {}),
}
"""Preset, fields to replace, and arguments of the forward pass."""


def peak_of_training_step(name: str, length: int) -> float:
    """Bytes that one forward and backward pass of a model of `MODELS` over `length` tokens adds, at its peak."""
    torch.manual_seed(0)
    preset, fields, options = MODELS[name]
    config = load_preset(preset, max_position_embeddings=length, **fields)
    if name == "gpt2":
        config = gpt2_config(config)
    model = AutoModelForCausalLM.from_config(config).train()
    model.loss_type = "ForCausalLM"  # the one that GPT-2 takes anyway, after a warning

    def step(input_ids):
        model(input_ids, labels=input_ids, use_cache=False, **options).loss.backward()

    input_ids = torch.randint(config.vocab_size, (1, length))
    step(input_ids[:, :2])  # the gradients of the weights have their memory now
    before = peak_memory()
    step(input_ids)
    return peak_memory() - before


def main(arguments: list[str] | None = None):
    """Measures every model and length, prints a table and writes it to a JSON file."""
    parser = argparse.ArgumentParser(prog="lsgpt bench memory", description=__doc__.splitlines()[0])
    parser.add_argument("--growth_lengths", type=int, nargs="*", default=[4096, 8192, 16384, 32768])
    parser.add_argument("--lengths", type=int, nargs="*", default=[2048, 8192], help="of the comparison with GPT-2")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)

    rows = []
    for name in MODELS:
        for length in options.growth_lengths if name == "local-only" else options.lengths:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                peak = pool.apply(peak_of_training_step, (name, length))
            rows.append({"model": name, "tokens": length, "peak_bytes": peak, "bytes_per_token": peak / length})
            per_token = peak / length / 2**10
            print(f"{name:<20}{length:8d} tokens {peak / 2**20:8.0f} MiB {per_token:8.1f} KiB a token", flush=True)

    options.output.parent.mkdir(parents=True, exist_ok=True)
    result = {"machine": describe_environment(), "rows": rows}
    options.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
