"""Methods that shrink the key/value cache of a pretrained model, side by side: conversions to LSGPT, and kvpress.

`lsgpt bench cache_methods SOURCE --calibrate TEXT --text OTHER`. kvpress 0.5.5 wants older versions of
Transformers and pandas, so it needs an environment of its own: a copy of this project's, with `pip install
--no-deps kvpress==0.5.5 cachetools fire requests termcolor`. Without kvpress, its methods are left out.

Every method reads a passage in one forward pass, and keeps what it keeps. Then it is asked the questions of the
passage (`lsgpt.conversion.retrieval`), and predicts text that follows it. All may keep as many bytes of a passage as
LSGPT does. What is compared is not equal in all respects: the presses of kvpress compute the whole attention of the
passage, keep everything that comes after it, and those that drop other tokens in each head only mask them.
"""

import argparse
import copy
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch.nn import functional as F
from transformers import DynamicCache, PreTrainedModel

from lsgpt.conversion import Passage, cache_bytes, calibrate, convert_pretrained, make_passages, with_global_heads
from lsgpt.conversion.calibration import budget_heads
from lsgpt.conversion.pretrained import load_tokenizer
from lsgpt.modeling_lsgpt import CACHE
from lsgpt.training.folders import free_folder
from lsgpt.utilities import check_writable, table

from .quality import interval, load, read_text
from .record import OUTPUT, at_least, begin_result, result_file, write_result


FOLLOWING = 128
"""Number of tokens of text after a passage; all but the first are predicted."""

PROPERTIES = {
    "LSGPT": ("yes", "yes", "Transformers; vLLM with sinks that every query sees", "none, or healing"),
    "whole": ("yes", "yes", "as LSGPT", "none"),
    "StreamingLLM": ("yes", "no", "no", "none"),
    "SnapKV": ("yes", "no", "no", "none"),
    "ExpectedAttention": ("yes", "no", "no", "none"),
    "KeyDiff": ("yes", "no", "no", "none"),
    "TOVA": ("yes", "no", "no", "none"),
    "AdaKV": ("masks only", "no", "no", "none"),
    "DuoAttention": ("masks only", "no", "no", "none, with our choice of heads"),
}
"""
By method, as its documentation and code say: is memory freed, is the prefill cheaper, can it be served, does it need
training.
"""


def make_presses(share: float, heads: list[list[int]], window: int) -> dict[str, Callable]:
    """
    Makes the presses of kvpress, by the name of their method; none without kvpress.

    Args:
        share: The share of a passage's cache that they keep.
        heads: The global key/value heads of each layer, for DuoAttention.
        window: How many tokens its other heads keep, besides the first four.
    """
    try:
        import kvpress  # noqa: PLC0415 (in an environment of its own)
    except ImportError:
        return {}

    class OurHeads(kvpress.DuoAttentionPress):
        """DuoAttention with the heads of a conversion."""

        def post_init_from_model(self, model):
            """Sets the mask that would be downloaded."""
            local = [[head not in chosen for head in range(model.config.num_key_value_heads)] for chosen in heads]
            self.sink_size, self.recent_size = 4, window
            self.streaming_mask = torch.tensor(local, device=model.device)

    return {
        "StreamingLLM": kvpress.StreamingLLMPress(1 - share),
        "SnapKV": kvpress.SnapKVPress(1 - share),
        "ExpectedAttention": kvpress.ExpectedAttentionPress(1 - share),
        "AdaKV": kvpress.AdaKVPress(kvpress.ExpectedAttentionPress(1 - share)),
        "KeyDiff": kvpress.KeyDiffPress(1 - share),
        "TOVA": kvpress.TOVAPress(1 - share),
        "DuoAttention": OurHeads(head_compression_ratio=1.0),
    }


def whole_layers(scores: torch.Tensor, count: int) -> list[list[int]]:
    """
    The choice with whole layers instead of heads: the layers of the highest `scores` (`(L, H_kv)`), see
    `HeadChanges.scores`, with `count` key/value heads or a few less.
    """
    num_heads = scores.shape[1]
    chosen = scores.sum(1).topk(count // num_heads).indices.tolist()
    return [list(range(num_heads)) if layer in chosen else [] for layer in range(len(scores))]


@contextmanager
def with_cache_positions(model: PreTrainedModel) -> Iterator[None]:
    """Gives attention layers the argument `cache_position`, which Transformers has removed and kvpress reads."""

    def add(module, args, kwargs):
        begin = kwargs[CACHE].get_seq_length(module.layer_idx)
        hidden = kwargs["hidden_states"]
        positions = torch.arange(begin, begin + hidden.shape[1], device=hidden.device)
        return args, {**kwargs, "cache_position": positions}

    hooks = [layer.self_attn.register_forward_pre_hook(add, with_kwargs=True) for layer in model.model.layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def measure(model: PreTrainedModel, passage: Passage, following: torch.Tensor, press: Callable | None = None) -> dict:
    """Reads a passage, with a press if there is one, then asks its questions and predicts the text that follows."""
    cache, device = DynamicCache(config=model.config), model.device
    start = time.perf_counter()
    with with_cache_positions(model) if press is not None else nullcontext():
        with press(model) if press is not None else nullcontext():
            last = model(input_ids=passage.ids[None].to(device), **{CACHE: cache}, logits_to_keep=1).logits
            last.cpu()  # the clock waits for the GPU
        seconds = time.perf_counter() - start

        def read_on(ids: torch.Tensor) -> tuple[torch.Tensor, int]:
            again = copy.deepcopy(cache)
            begin = len(passage.ids)
            positions = torch.arange(begin, begin + len(ids), device=device)[None]
            logits = model(input_ids=ids[None].to(device), position_ids=positions, **{CACHE: again}).logits[0]
            return logits.cpu(), cache_bytes(again)

        right = {}
        for question in passage.questions:
            end, count = len(question.ids), question.answer_length
            predicted = read_on(question.ids)[0].argmax(-1)[end - count - 1 : end - 1]
            right[question.kind] = (predicted == question.ids[end - count :]).tolist()
        loss = F.cross_entropy(read_on(following)[0][:-1], following[1:]).item()
        _, kept = read_on(following[:1])  # Transformers keeps a passage until the first token after it
    return {"right": right, "loss": loss, "seconds": seconds, "bytes": kept}


def summarize(items: list[dict], source: list[dict]) -> dict:
    """The figures of one method: ratios are to the source, on the same passages."""
    answers = [answer for item in items for answer in item["right"].values()]
    theirs = [answer for item in source[: len(items)] for answer in item["right"].values()]
    right, of_source = (sum(map(all, each)) for each in (answers, theirs))
    differences = [ours["loss"] - other["loss"] for ours, other in zip(items, source)]
    return {
        "passages": len(items),
        "perplexity_ratio": math.exp(statistics.mean(differences)),
        "exact": right / len(answers),
        "interval": interval(right, len(answers)),
        "exact_ratio": right / of_source if of_source else None,
        "bytes": items[-1]["bytes"],
        "cache_ratio": items[-1]["bytes"] / source[len(items) - 1]["bytes"],
        "prefill_ratio": statistics.median(ours["seconds"] / other["seconds"] for ours, other in zip(items, source)),
    }


def main(arguments: list[str]):
    """Measures all methods on the same passages, one passage after the other, and prints a table."""
    parser = argparse.ArgumentParser(prog="lsgpt bench cache_methods", description=__doc__.splitlines()[0])
    parser.add_argument("source", help="a Llama: its folder, name on the Hub, or GGUF file")
    parser.add_argument(
        "--calibrate",
        help="text to choose heads on, as for `lsgpt convert`; without it, only source and --checkpoints are measured",
    )
    parser.add_argument("--text", required=True, help="text to measure on, as for `lsgpt bench quality`")
    parser.add_argument("--checkpoints", nargs="*", default=[], help="others that were converted from the source")
    parser.add_argument("--save-whole", type=Path, metavar="FOLDER", help="keep the one with whole layers, to heal it")
    parser.add_argument("--length", type=at_least(1), default=4096, help="tokens in a passage; default: %(default)s")
    parser.add_argument("--passages", type=at_least(1), default=20, help="default: %(default)s")
    parser.add_argument("--cache-share", type=float, default=0.2, help="as for `lsgpt convert`; default: %(default)s")
    parser.add_argument(
        "--max-blocks",
        type=at_least(1),
        default=4,
        help="of --calibrate, as for `lsgpt convert`; default: %(default)s",
    )
    parser.add_argument(
        "--output",
        type=result_file,
        metavar="FILE",
        default=OUTPUT / "cache_methods.json",
        help="default: %(default)s",
    )
    options = parser.parse_args(arguments)
    if options.calibrate is None and (options.save_whole is not None or not options.checkpoints):
        parser.error("--calibrate is missing; without it, there must be --checkpoints, and no --save-whole")

    if (folder := options.save_whole) is not None:
        if free_folder(folder) != folder:
            parser.error(f"--save-whole must be a new or empty folder; got {str(folder)!r}, which is not")
        check_writable(folder)

    result = begin_result("cache_methods", *arguments)
    tokenizer, source = load_tokenizer(options.source), load(options.source)
    if tokenizer is None:
        raise ValueError(f"the source must have a tokenizer, to read a text with; {options.source!r} has none")
    whole = convert_pretrained(source)
    count, window = budget_heads(whole.config, options.cache_share)
    text = read_text(options.text, tokenizer, options.length * options.passages + FOLLOWING)
    passages = make_passages(tokenizer, text[:-FOLLOWING], options.length, options.passages, window, seed=3)
    methods: dict[str, tuple] = {"source": (source, None)}
    methods |= {f"LSGPT {name}": (load(name), None) for name in options.checkpoints}
    if options.calibrate is not None:
        choice = calibrate(whole, tokenizer, options.calibrate, count, window, max_blocks=options.max_blocks)
        layers, sinks = whole_layers(choice.changes.scores, count), choice.changes.sinks
        converted = with_global_heads(whole, choice.global_kv_heads, window, sinks)
        share = converted.config.kv_cache_bytes(options.length) / whole.config.kv_cache_bytes(options.length)
        methods["LSGPT"] = converted, None
        methods["whole layers"] = with_global_heads(whole, layers, window, sinks), None
        presses = make_presses(share, choice.global_kv_heads, window)
        methods |= {name: (source, press) for name, press in presses.items()}
    if options.save_whole is not None:
        for each in (methods["whole layers"][0], tokenizer):
            each.save_pretrained(options.save_whole)
    items: dict[str, list[dict]] = {name: [] for name in methods}
    for number, passage in enumerate(passages):
        following = text[passage.end : passage.end + FOLLOWING]
        for name, (model, press) in methods.items():
            items[name].append(measure(model, passage, following, press))
        rows = [{"method": name, **summarize(found, items["source"])} for name, found in items.items()]
        write_result(options.output, {**result, "length": options.length, "rows": rows, "items": items})
        print(f"{number + 1} of {len(passages)} passages", flush=True)
    lines = []
    for row in rows:
        figures = [f"{row[key]:.3f}" for key in ("perplexity_ratio", "exact", "cache_ratio", "prefill_ratio")]
        lines.append([row["method"], *figures, *PROPERTIES.get(row["method"].split()[0], ("",) * 4)])
    header = ["method", "perplexity ratio", "numbers found", "bytes ratio", "prefill ratio"]
    print(table(lines, [*header, "memory freed", "prefill cheaper", "served", "training"]))
