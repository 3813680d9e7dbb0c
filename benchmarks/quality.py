"""What a conversion preserves: perplexity and pass-key retrieval of causal language models with the same tokenizer.

`lsgpt bench quality SOURCE CHECKPOINT ... --text TEXT`. The text is the held-out part that `lsgpt convert --calibrate
TEXT` evaluates on. The keys differ from those that heads are chosen with.
"""

import argparse
import random
import statistics
from pathlib import Path

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from lsgpt import LSGPTConfig
from lsgpt.conversion import load_pretrained, make_passages, perplexity, read_blocks, recall
from lsgpt.conversion.pretrained import load_tokenizer

from .record import OUTPUT, begin_result, write_result


def load(name: str) -> PreTrainedModel:
    """Loads an LSGPT checkpoint, or a model that could be converted into one, in evaluation mode."""
    if not name.endswith(".gguf") and AutoConfig.from_pretrained(name).model_type == LSGPTConfig.model_type:
        return AutoModelForCausalLM.from_pretrained(name).eval()
    return load_pretrained(name).eval()


def main(arguments: list[str]):
    """Evaluates the models one after the other, prints their figures and writes them to a JSON file."""
    parser = argparse.ArgumentParser(prog="lsgpt bench quality", description=__doc__.splitlines()[0])
    parser.add_argument(
        "models", nargs="+", help="folders, names on the Hub or GGUF files; the first one's tokenizer is used"
    )
    parser.add_argument("--text", required=True, help="the same as for `lsgpt convert --calibrate`")
    parser.add_argument("--window", type=int, default=128, help="window of the local heads; default: %(default)s")
    parser.add_argument("--block_size", type=int, default=2048, help="tokens in a block; default: %(default)s")
    parser.add_argument("--max_blocks", type=int, default=10, help="blocks for the perplexity; default: %(default)s")
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[1024, 2048], help="tokens in a passage; default: %(default)s"
    )
    parser.add_argument("--keys", type=int, default=4, help="pass keys at each depth and length; default: %(default)s")
    parser.add_argument("--output", type=Path, default=OUTPUT / "quality.json", help="default: %(default)s")
    options = parser.parse_args(arguments)
    if max(options.lengths) > options.block_size:
        raise ValueError(f"`--lengths` must be at most `--block_size` ({options.block_size}); got {options.lengths}")

    result = begin_result("quality", *arguments)
    tokenizer = load_tokenizer(options.models[0])
    if tokenizer is None:
        raise ValueError(f"the first model must have a tokenizer to read a text with; {options.models[0]!r} has none")
    _, blocks = read_blocks(options.text, tokenizer, options.block_size, options.max_blocks)
    keys = random.Random(1).sample(range(10_000, 100_000), options.keys)
    passages = make_passages(tokenizer, blocks, options.lengths, options.window, keys)
    if {len(passage.ids) for passage in passages} != set(options.lengths):
        raise ValueError(f"`--lengths` must leave room for a key outside the window; got {options.lengths}")
    result |= {"num_tokens": len(blocks) * options.block_size, "num_passages": len(passages), "rows": []}
    for name in options.models:
        model = load(name)
        found = recall(model, passages)
        row = {"model": name, "perplexity": perplexity(model, blocks), "retrieval": {}}
        for length in options.lengths:
            by_depth = {str(depth): share for (of, depth), share in found.items() if of == length}
            row["retrieval"][str(length)] = {"mean": statistics.mean(by_depth.values()), "by_depth": by_depth}
        result["rows"].append(row)
        shares = ", ".join(f"{x['mean']:.3f} at {length} tokens" for length, x in row["retrieval"].items())
        print(f"{name}: perplexity {row['perplexity']:.3f}; retrieval {shares}", flush=True)
        write_result(options.output, result)
    print(f"saved in {options.output}")
