"""How many requests vLLM holds, and whether it continues a text as Transformers does: `lsgpt bench serving`.

- Requests: what vLLM says at its start ("Maximum concurrency for 8,192 tokens per request"), of models of one shape
  or of the checkpoints that are named.
- With `--text`, a checkpoint also continues passages of the text, without sampling. The result counts how many tokens
  are the same as in Transformers until the first that differs.
"""

import argparse
import os
import tempfile
from importlib.metadata import packages_distributions, version
from itertools import product, takewhile
from operator import eq
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config

from lsgpt import LSGPTConfig

from .memory import in_own_process
from .record import OUTPUT, at_least, begin_result, result_file, write_result


TOKENS = 8192
"""Tokens of a request."""

PASSAGES = (20, 200, 600, 1000, 1400, 2000)
"""Tokens of the passages that are continued, which begin 2,048 tokens after one another."""

SHAPES = {
    "lsgpt": LSGPTConfig(max_position_embeddings=TOKENS, architectures=["LSGPTForCausalLM"]),
    "mhsa": LSGPTConfig(max_position_embeddings=TOKENS, num_global_heads=12, architectures=["LSGPTForCausalLM"]),
    "gpt2": GPT2Config(n_positions=TOKENS, architectures=["GPT2LMHeadModel"]),
}
"""Models of one shape, 12 layers of 12 heads: in `lsgpt`, 1 of them is global and W = 100."""


def run_engine(folder: str, prompts: list[list[int]], num_tokens: int, options: dict) -> tuple[float, list[list[int]]]:
    """
    Starts vLLM on a folder in this process, which must end afterwards.

    Args:
        folder: The checkpoint.
        prompts: What to continue, as token ids; may be empty.
        num_tokens: Number of tokens of each continuation.
        options: Of `LLM`, besides those that are the same for all.

    Returns:
        The number of requests of `TOKENS` tokens that its cache holds, and the continuations.
    """
    # The engine in this process; on a CPU, without binding its threads to cores.
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND="nobind")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM, SamplingParams  # noqa: PLC0415 (installed for serving only)

    llm = LLM(folder, max_model_len=TOKENS, skip_tokenizer_init=True, enforce_eager=True, **options)
    sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling) if prompts else []
    requests = llm.llm_engine.vllm_config.cache_config.kv_cache_max_concurrency
    return requests, [list(output.outputs[0].token_ids) for output in outputs]


@torch.no_grad()
def continue_prompts(folder: str, dtype: str, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Continues prompts without sampling in Transformers, one at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    model.generation_config.eos_token_id = None
    continuations = []
    for ids in prompts:
        input_ids = torch.tensor([ids])
        attention_mask = torch.ones_like(input_ids)
        output = model.generate(input_ids, attention_mask=attention_mask, max_new_tokens=num_tokens, do_sample=False)
        continuations.append(output[0, len(ids) :].tolist())
    return continuations


def main(arguments: list[str]):
    """Starts vLLM with every model and every setting, prints the figures and writes them to a JSON file."""
    parser = argparse.ArgumentParser(
        prog="lsgpt bench serving", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", metavar="FOLDER", help="default: LSGPT and GPT-2 of the same shape")
    parser.add_argument("--text", type=Path, help="a text file to continue passages of, by the models that are named")
    parser.add_argument(
        "--new_tokens", type=at_least(1), default=60, help="tokens of a continuation; default: %(default)s"
    )
    parser.add_argument("--dtype", default="bfloat16", help="default: %(default)s")
    parser.add_argument("--cache", type=at_least(1), default=2**30, help="bytes of vLLM's cache; default: %(default)s")
    parser.add_argument(
        "--block_sizes", type=at_least(1), nargs="+", default=[128, 32], help="tokens in a block; default: %(default)s"
    )
    parser.add_argument(
        "--batched_tokens",
        type=at_least(1),
        nargs="+",
        default=[256, 512, 1024, 2048],
        help="in a step; default: %(default)s",
    )
    parser.add_argument(
        "--output", type=result_file, metavar="FILE", default=OUTPUT / "serving.json", help="default: %(default)s"
    )
    options = parser.parse_args(arguments)
    installed = packages_distributions().get("vllm")  # the CPU build has a name of its own
    if installed is None:
        raise ValueError("`lsgpt bench serving` needs vLLM: pip install '.[serve]'")
    if options.text and not options.models:
        raise ValueError("`--text` needs models with weights: lsgpt bench serving FOLDER --text TEXT")

    result, rows = begin_result("serving", *arguments), []
    result["environment"][installed[0]] = version(installed[0])
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.models or SHAPES:
            folder, prompts, expected, more = name, [], [], {}
            if not options.models:
                folder, more = str(Path(scratch) / name), {"load_format": "dummy"}
                SHAPES[name].save_pretrained(folder)
            elif options.text:
                ids = AutoTokenizer.from_pretrained(name)(options.text.read_text(encoding="utf-8"))["input_ids"]
                prompts = [ids[2048 * index :][:size] for index, size in enumerate(PASSAGES)]
                if len(prompts[-1]) < PASSAGES[-1]:
                    needed = 2048 * (len(PASSAGES) - 1) + PASSAGES[-1]
                    raise ValueError(
                        f"`--text` must have at least {needed:,} tokens; {str(options.text)!r} has {len(ids)}"
                    )
                expected = continue_prompts(name, options.dtype, prompts, options.new_tokens)
            for block_size, batched_tokens in product(options.block_sizes, options.batched_tokens):
                settings = {"block_size": block_size, "max_num_batched_tokens": batched_tokens}
                engine = {"dtype": options.dtype, "kv_cache_memory_bytes": options.cache, **settings, **more}
                requests, found = in_own_process(run_engine, folder, prompts, options.new_tokens, engine)
                row = {"model": name, **settings, "requests": requests}
                # The number of tokens until the first that differs.
                equal = [sum(takewhile(bool, map(eq, *pair))) for pair in zip(found, expected, strict=True)]
                rows.append(row | ({"equal_tokens": equal} if prompts else {}))
                print(", ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
                write_result(options.output, {**result, "passages": PASSAGES, "rows": rows})
    print(f"saved in {options.output}")
