"""Methods that shrink the key/value cache of a pretrained model, side by side: conversions to LSGPT, and kvpress.

`python -m lsgpt.benchmarks.cache_methods SOURCE --checkpoints CONVERTED ... --text TEXT`. kvpress 0.5.5 wants older
versions of Transformers and pandas, so it needs an environment of its own: a copy of this project's, with
`pip install --no-deps kvpress==0.5.5 cachetools fire`. Without kvpress, only the checkpoints are measured.

Every method reads a passage in one forward pass, and keeps what it keeps. Then it is asked the questions of the
passage (`lsgpt.conversion.retrieval`), and predicts text that follows it. What is compared is not equal in all
respects: the presses of kvpress compute the whole attention of the passage, keep everything that comes after it, and
those that drop other tokens in each head only mask them.
"""

import argparse
import copy
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch.nn import functional as F
from transformers import DynamicCache, PreTrainedModel

from lsgpt.conversion import Passage, cache_bytes, make_passages
from lsgpt.conversion.pretrained import load_tokenizer
from lsgpt.utilities import table

from .quality import interval, load, read_text
from .record import OUTPUT, begin_result, write_result


FOLLOWING = 128
"""How many tokens of text after a passage are predicted."""

PROPERTIES = {
    "LSGPT": ("yes", "yes", "Transformers; vLLM with sinks that every query sees", "none, or healing"),
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


def make_presses(shares: list[float], heads: list[list[int]] | None, window: int) -> dict[tuple[str, float], Callable]:
    """
    Makes the presses of kvpress, by method and share of the cache that they keep of a passage; none without kvpress.

    Args:
        shares: Shares of the cache.
        heads: The global key/value heads of each layer, for DuoAttention; `None` leaves it out.
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
            self.streaming_mask = torch.tensor(local)

    makers = {
        "StreamingLLM": lambda dropped: kvpress.StreamingLLMPress(dropped),
        "SnapKV": lambda dropped: kvpress.SnapKVPress(dropped),
        "ExpectedAttention": lambda dropped: kvpress.ExpectedAttentionPress(dropped),
        "AdaKV": lambda dropped: kvpress.AdaKVPress(kvpress.ExpectedAttentionPress(dropped)),
        "KeyDiff": lambda dropped: kvpress.KeyDiffPress(dropped),
        "TOVA": lambda dropped: kvpress.TOVAPress(dropped),
    }
    presses = {(name, share): make(1 - share) for name, make in makers.items() for share in shares}
    if heads is not None:
        presses["DuoAttention", float("nan")] = OurHeads(head_compression_ratio=1.0)
    return presses


@contextmanager
def with_cache_positions(model: PreTrainedModel) -> Iterator[None]:
    """Gives attention layers the argument `cache_position`, which Transformers has removed and kvpress reads."""

    def add(module, args, kwargs):
        begin = kwargs["past_key_values"].get_seq_length(module.layer_idx)
        length = kwargs["hidden_states"].shape[1]
        return args, {**kwargs, "cache_position": torch.arange(begin, begin + length)}

    hooks = [layer.self_attn.register_forward_pre_hook(add, with_kwargs=True) for layer in model.model.layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def measure(model: PreTrainedModel, passage: Passage, following: torch.Tensor, press: Callable | None = None) -> dict:
    """Reads a passage, with a press if there is one, then asks its questions and predicts the text that follows."""
    cache = DynamicCache(config=model.config)
    start = time.perf_counter()
    with with_cache_positions(model) if press is not None else nullcontext():
        with press(model) if press is not None else nullcontext():
            model(input_ids=passage.ids[None], past_key_values=cache, logits_to_keep=1)
        seconds, kept = time.perf_counter() - start, None

        def read_on(ids: torch.Tensor) -> torch.Tensor:
            nonlocal kept
            again = copy.deepcopy(cache)
            begin = len(passage.ids)
            positions = torch.arange(begin, begin + len(ids))[None]
            logits = model(input_ids=ids[None], position_ids=positions, past_key_values=again).logits[0]
            kept = cache_bytes(again)
            return logits

        right = {}
        for question in passage.questions:
            end, count = len(question.ids), question.answer_length
            predicted = read_on(question.ids).argmax(-1)[end - count - 1 : end - 1]
            right[question.kind] = (predicted == question.ids[end - count :]).tolist()
        loss = F.cross_entropy(read_on(following)[:-1], following[1:], reduction="mean").item()
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


def plot(path: Path, rows: list[dict]):
    """Draws perplexity and retrieval over the share of the cache, one line for each method."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, key, label in zip(
        figure.subplots(1, 2), ("perplexity_ratio", "exact"), ("perplexity / source's", "numbers found")
    ):
        for name in dict.fromkeys(row["method"] for row in rows):
            points = sorted((row["share"], row[key]) for row in rows if row["method"] == name)
            axes.plot(*zip(*points), marker="*" if name.startswith("LSGPT") else "o", label=name)
        axes.set_xlabel("share of the source's cache")
        axes.set_ylabel(label)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)


def main(arguments: list[str] | None = None):
    """Measures all methods on the same passages, one passage after the other, and writes a table and a plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", help="a Llama: its folder, name on the Hub, or GGUF file")
    parser.add_argument("--checkpoints", nargs="*", default=[], help="converted from it")
    parser.add_argument("--text", required=True, help="as for `lsgpt bench quality`")
    parser.add_argument("--length", type=int, default=2048, help="tokens in a passage; default: %(default)s")
    parser.add_argument("--passages", type=int, default=20, help="default: %(default)s")
    parser.add_argument("--shares", type=float, nargs="*", default=[0.1, 0.2, 0.35, 0.5], help="default: %(default)s")
    parser.add_argument(
        "--heads", type=Path, help="JSON file with the global key/value heads of each layer, for DuoAttention"
    )
    parser.add_argument("--window", type=int, default=910, help="window of DuoAttention; default: %(default)s")
    parser.add_argument("--output", type=Path, default=OUTPUT / "cache_methods.json", help="default: %(default)s")
    options = parser.parse_args(arguments)

    result = begin_result("cache_methods", *(arguments or []))
    tokenizer = load_tokenizer(options.source)
    text = read_text(options.text, tokenizer, 204_800)
    passages = make_passages(tokenizer, text[:-FOLLOWING], options.length, options.passages, 512, seed=3)
    heads = json.loads(options.heads.read_text()) if options.heads else None
    source = load(options.source)
    methods: dict[tuple[str, float], tuple] = {("source", 1.0): (source, None)}
    for name in options.checkpoints:
        methods[f"LSGPT {Path(name).name}", math.nan] = (load(name), None)
    presses = make_presses(options.shares, heads, options.window)
    methods |= {key: (source, press) for key, press in presses.items()}
    items: dict[tuple[str, float], list[dict]] = {key: [] for key in methods}
    for number, passage in enumerate(passages):
        following = text[passage.end : passage.end + FOLLOWING]
        for key, (model, press) in methods.items():
            items[key].append(measure(model, passage, following, press))
        rows = []
        for (name, share), found in items.items():
            row = {"method": name, **summarize(found, items["source", 1.0])}
            rows.append({**row, "share": row["cache_ratio"] if math.isnan(share) else share})
        write_result(options.output, {**result, "length": options.length, "rows": rows, "items": list(items.values())})
        print(f"{number + 1} of {len(passages)} passages", flush=True)
    plot(options.output.with_suffix(".png"), rows)
    lines = []
    for row in rows:
        facts = PROPERTIES.get(row["method"].split()[0], ("",) * 4)
        figures = [f"{row[key]:.3f}" for key in ("share", "perplexity_ratio", "exact", "cache_ratio", "prefill_ratio")]
        lines.append([row["method"], *figures, *facts])
    header = ["method", "share kept", "perplexity ratio", "numbers found", "bytes ratio", "prefill ratio"]
    print(table(lines, [*header, "memory freed", "prefill cheaper", "served", "training"]))


if __name__ == "__main__":
    main()
