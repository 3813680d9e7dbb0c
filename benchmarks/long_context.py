"""Prefill of very long prompts on the CPU, in bounded memory: `lsgpt bench long_context`.

A model with global heads processes its prompt at once. A model without global heads processes it in chunks, with a
cache that holds only a window. For comparison, the same model runs with all heads global, at a shorter length because
it takes so long. All have the shape of the preset `paper-v1` and sinusoidal positions, which have no maximum length.
"""

import argparse
import time

import torch
from transformers import DynamicCache

from lsgpt import LSGPTForCausalLM
from lsgpt.configuration import load_preset
from lsgpt.utilities.environment import peak_memory, reset_peak_memory

from .decode import live_bytes
from .memory import in_own_process
from .record import OUTPUT, at_least, begin_result, result_file, write_result


def prefill(length: int, chunk_length: int, num_global_heads: int | str | None) -> dict[str, float]:
    """
    Runs a prompt of random tokens through a model that fills a cache.

    Args:
        length: Number of tokens in the prompt.
        chunk_length: Number of tokens in one forward pass.
        num_global_heads: `None` keeps the preset's value; `"all"` makes it plain multi-head attention.

    Returns:
        `seconds`; `peak_bytes`, the peak memory beyond the model's own; and `cache_bytes`, the cache's final size.
    """
    fields = {} if num_global_heads is None else {"num_global_heads": num_global_heads}
    config = load_preset("paper-v1", position_embedding_type="sinusoidal", **fields)
    model = LSGPTForCausalLM(config).eval()
    input_ids = torch.randint(config.vocab_size, (1, length))
    cache = DynamicCache(config=config)
    reset_peak_memory()
    memory, begin = peak_memory(), time.perf_counter()
    with torch.no_grad():
        for chunk in input_ids.split(chunk_length, dim=1):
            logits = model(chunk, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    if not logits.isfinite().all():
        raise RuntimeError(f"logits after {length:,} tokens are not finite")
    return {
        "seconds": time.perf_counter() - begin,
        "peak_bytes": peak_memory() - memory,
        "cache_bytes": live_bytes(cache),
    }


def main(arguments: list[str]):
    """Runs the prompts, prints their time and memory, and writes them to a JSON file."""
    parser = argparse.ArgumentParser(prog="lsgpt bench long_context", description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=at_least(1), default=2**17, help="tokens of the prompt; default: %(default)s")
    parser.add_argument(
        "--local_length", type=at_least(1), default=2**20, help="tokens, local heads only; default: %(default)s"
    )
    parser.add_argument(
        "--chunk_length", type=at_least(1), default=2**13, help="tokens per chunk of that; default: %(default)s"
    )
    parser.add_argument(
        "--mhsa_length", type=at_least(1), default=2**15, help="tokens of the comparison; default: %(default)s"
    )
    parser.add_argument(
        "--output", type=result_file, metavar="FILE", default=OUTPUT / "long_context.json", help="default: %(default)s"
    )
    options = parser.parse_args(arguments)

    result = begin_result("long_context", *arguments) | {"rows": []}
    for model, *sizes in (
        ("paper-v1, all heads global", options.mhsa_length, options.mhsa_length, "all"),
        ("paper-v1", options.mhsa_length, options.mhsa_length, None),
        ("paper-v1", options.length, options.length, None),
        ("paper-v1, local heads only", options.local_length, options.chunk_length, 0),
    ):
        row = in_own_process(prefill, *sizes)
        result["rows"].append({"model": model, "tokens": sizes[0], "chunk_length": sizes[1], **row})
        print(
            f"{model}: {sizes[0]:,} tokens, {sizes[1]:,} at once: {row['seconds']:.0f} s, at most "
            f"{row['peak_bytes'] / 2**20:,.0f} MiB beyond the model; the cache ends at "
            f"{row['cache_bytes'] / 2**20:,.1f} MiB",
            flush=True,
        )
        write_result(options.output, result)
    print(f"saved in {options.output}")
