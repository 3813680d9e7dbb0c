"""What a conversion preserves: perplexity and retrieval of causal language models with the same tokenizer.

`lsgpt bench quality SOURCE CHECKPOINT ... --text TEXT`. Give a text that nothing was trained, chosen or fitted on.

- Perplexity in blocks of 2,048 and of 8,192 tokens, at least 200,000 tokens each, with the loss by position.
- Retrieval from passages of 1,024 to 8,192 tokens, 100 of each length, see `lsgpt.conversion.retrieval`. An answer is
  right if all digits are. All passages together also give the answers by how far back the number is.
- Bytes of a real key/value cache after the longest passage.

Every block and passage is saved as soon as it is measured, in a `.jsonl` file beside the result, and is not measured
again when the command is repeated. The work is done in rounds, so that the result can be used before the command has
ended: each model is compared with the source on the blocks and passages that have been measured with both.
"""

import argparse
import hashlib
import math
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from scipy import stats
from torch.nn import functional as F
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from lsgpt import LSGPTConfig
from lsgpt.conversion import ask, cache_bytes, load_pretrained, make_passages
from lsgpt.conversion.pretrained import load_tokenizer
from lsgpt.conversion.retrieval import read
from lsgpt.modeling_lsgpt import CACHE
from lsgpt.training.callbacks import append_line, read_metrics
from lsgpt.training.data import load_documents
from lsgpt.utilities import has_learned_positions, load_complete, table

from .record import OUTPUT, at_least, begin_result, result_file, write_result


ROUNDS = 20
BINS = (0, 128, 256, 512, 1024, 2048, 4096, 8192)
"""First positions of the intervals for which the loss is listed."""
FAR = (1024, 2048)
"""Retrieval is also listed for numbers that are at least so many tokens before their question."""


def load(name: str) -> PreTrainedModel:
    """
    Loads an LSGPT checkpoint, or a model that could be converted into one, in evaluation mode and in float32, on the
    GPU if there is one.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if not name.endswith(".gguf") and AutoConfig.from_pretrained(name).model_type == LSGPTConfig.model_type:
        return load_complete(name, dtype=torch.float32).eval().to(device)
    model = load_pretrained(name).eval()
    if model.dtype != torch.float32:  # one from a GGUF file is, and its `float` raises an error
        model = model.float()
    return model.to(device)


def check_positions(name: str, length: int):
    """Raises `ValueError` if a model has learned positions, and fewer than `length`."""
    if name.endswith(".gguf"):
        return
    config = AutoConfig.from_pretrained(name)
    if has_learned_positions(config) and length > config.max_position_embeddings:
        raise ValueError(
            f"`--block_sizes` and `--lengths` must be at most the {config.max_position_embeddings} positions of "
            f"{name!r}; got {length}"
        )


def read_text(text: str, tokenizer: PreTrainedTokenizerBase, num_tokens: int) -> torch.Tensor:
    """
    Reads documents of all splits of a text until they have `num_tokens`, as token ids `(N,)`.

    Raises:
        ValueError: If it is shorter than `num_tokens`.
    """
    parts, count = [], 0
    documents = load_documents(text, validation_percentage=50)
    for split in documents.values():
        for document in split["text"]:
            parts.append(torch.tensor(tokenizer(document)["input_ids"], dtype=torch.long))
            count += len(parts[-1])
            if count >= num_tokens:
                return torch.cat(parts)
    raise ValueError(
        f"`--text` must have at least {num_tokens} tokens for so many blocks or passages; {text!r} has {count}"
    )


def list_tasks(options: argparse.Namespace) -> list[tuple[str, int, int]]:
    """Lists what is measured with each model: `(kind, tokens, index)`, in the order of the rounds."""
    counts = {("perplexity", size): -(-options.tokens // size) for size in options.block_sizes}
    counts |= {("retrieval", length): options.passages for length in options.lengths}
    return sorted(
        ((kind, size, i) for (kind, size), count in counts.items() for i in range(count)),
        key=lambda task: (task[2] * ROUNDS // counts[task[:2]], task),
    )


@torch.no_grad()
def measure_block(model: PreTrainedModel, ids: torch.Tensor) -> dict:
    """
    Measures the summed loss of a block of token ids `(n,)` in each interval of `BINS`. The first token is not
    predicted, and a token counts where it stands.
    """
    ids = ids.to(model.device)
    hidden = model.base_model(input_ids=ids[None], use_cache=False)[0][0, :-1]
    head, softcap = model.get_output_embeddings(), getattr(model.config, "final_logit_softcapping", None)

    def loss_of(states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = head(states).float()
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        return F.cross_entropy(logits, targets, reduction="none")

    chunks = zip(hidden.split(512), ids[1:].split(512))  # the logits of all tokens would be the largest tensor
    losses = torch.cat([loss_of(*chunk) for chunk in chunks]).double()
    ends = [*BINS[1:], len(ids)]
    sums = [losses[max(begin - 1, 0) : end - 1].sum().item() for begin, end in zip(BINS, ends) if begin < len(ids)]
    return {"losses": sums, "loss": losses.sum().item()}


@torch.no_grad()
def measure_passage(model: PreTrainedModel, passage, with_bytes: bool) -> dict:
    """Asks a passage's questions: is each digit of each answer right? `with_bytes` adds the size of a real cache."""
    found: dict[str, Any] = {"right": dict(zip([q.kind for q in passage.questions], ask(model, passage)))}
    found["distances"] = {question.kind: question.distance for question in passage.questions}
    if with_bytes:
        cache = read(model, passage.ids)
        # The memory of what left a window in the prompt is freed with the next token.
        model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), **{CACHE: cache})
        found |= {"bytes": cache_bytes(cache), "cached_tokens": len(passage.ids) + 1}
    return found


def interval(right: int, count: int) -> tuple[float, float]:
    """Wilson's interval of a share at 95%."""
    share, z = right / count, 1.96
    middle, width = share + z * z / (2 * count), z * math.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2)
    return max((middle - width) / (1 + z * z / count), 0.0), min((middle + width) / (1 + z * z / count), 1.0)


def summarize(models: list[str], found: dict[tuple, dict]) -> list[dict]:
    """
    Summarizes what was measured of all models, one row for each. Ratios are to the first model, on the blocks and
    passages that have been measured with both; their intervals, of 95%, are those of the mean over blocks (Student's
    t).
    """
    rows = []
    for model in models:
        row: dict[str, Any] = {"model": model, "perplexity": {}, "retrieval": {}}
        asked: list[tuple[dict, dict]] = []
        common = [key[1:] for key in found if key[0] == model and (models[0], *key[1:]) in found]
        for kind, size in sorted({task[:2] for task in common}):
            tasks = sorted(task for task in common if task[:2] == (kind, size))
            pairs = [(found[(model, *task)], found[(models[0], *task)]) for task in tasks]
            if kind == "perplexity":
                means = [[x["loss"] / (size - 1) for x in pair] for pair in pairs]
                differences = [ours - theirs for ours, theirs in means]
                mean = statistics.mean(differences)
                few = len(pairs) < 2
                error = math.inf if few else stats.t.ppf(0.975, len(pairs) - 1) * stats.sem(differences)
                begins = [begin for begin in BINS if begin < size]
                lengths = [min(end, size) - max(begin, 1) for begin, end in zip(begins, [*begins[1:], size])]
                row["perplexity"][str(size)] = {
                    "blocks": len(pairs),
                    "tokens": len(pairs) * size,
                    "value": math.exp(statistics.mean(ours for ours, _ in means)),
                    "ratio": math.exp(mean),
                    "interval": [math.exp(mean - error), math.exp(mean + error)],
                    "loss_by_position": {
                        str(begin): statistics.mean(x["losses"][i] for x, _ in pairs) / lengths[i]
                        for i, begin in enumerate(begins)
                    },
                }
            else:
                row["retrieval"][str(size)] = {"passages": len(pairs)} | _count(pairs)
                asked += pairs
                if all("bytes" in item for item in pairs[0]):
                    mine, of_source = (item["bytes"] for item in pairs[0])
                    tokens = pairs[0][0]["cached_tokens"]
                    row["cache"] = {"tokens": tokens, "bytes": mine, "ratio": mine / of_source}
        row["far"] = {str(distance): _count(asked, distance) for distance in FAR}
        rows.append(row)
    return rows


def _count(pairs: list[tuple[dict, dict]], distance: int = 0) -> dict[str, dict]:
    """
    Counts the correct answers to each kind of question whose number is at least `distance` tokens back. A pair holds
    what was measured with a model and with the source.
    """
    counts = {}
    for kind in pairs[0][0]["right"] if pairs else ():
        far = [[x["right"][kind] for x in pair] for pair in pairs if pair[0]["distances"][kind] >= distance]
        if far:
            right, of_source = (sum(map(all, answers)) for answers in zip(*far))
            counts[kind] = {
                "questions": len(far),
                "exact": right / len(far),
                "interval": interval(right, len(far)),
                "ratio": right / of_source if of_source else None,
                "digits": statistics.mean(statistics.mean(answer) for answer, _ in far),
            }
    return counts


def format_rows(rows: list[dict]) -> str:
    """Formats the summary as a table, with the ratios to the source in brackets, and `-` for what is not measured."""
    kinds = {question for row in rows for values in row["retrieval"].values() for question in values} - {"passages"}
    sizes, lengths = rows[0]["perplexity"], rows[0]["retrieval"]  # the source has all that others have
    lines = []
    for row in rows:
        name, cache = row["model"], row.get("cache")
        line = [name, f"{cache['ratio']:.3f}" if cache else ""]
        found = [row["perplexity"].get(size) for size in sizes]
        line.append(", ".join(f"{x['value']:.2f} ({x['ratio']:.3f})" if x else "-" for x in found))
        found = [row["retrieval"].get(length) for length in lengths]
        for kind in sorted(kinds):
            line.append(", ".join(f"{x[kind]['exact']:.2f}" if x else "-" for x in found))
        lines.append(line)
    at_lengths = [f"{kind} at {', '.join(lengths)}" for kind in sorted(kinds)]
    return table(lines, ["model", "cache", f"perplexity at {', '.join(sizes)}", *at_lengths])


def _read(path: Path, identity: str) -> dict[tuple, dict]:
    """What was measured before, by model, kind, tokens and index; a last line that was cut off is left out."""
    found = {}
    for item in read_metrics(path) if path.exists() else []:
        if item["identity"] != identity:
            raise ValueError(
                f"`--output` must be new for another text, `--tokens` or `--distance`; {str(path)!r} has measurements "
                "of others"
            )
        found[item["model"], item["kind"], item["size"], item["index"]] = item
    return found


def _missing(models: list[str], tasks: list, found: dict) -> Iterator[tuple[str, list]]:
    """The tasks that are left, by round and model."""
    size = max(len(tasks) // ROUNDS, 1)  # tasks in a round
    for start in range(0, len(tasks), size):
        for model in models:
            left = [task for task in tasks[start : start + size] if (model, *task) not in found]
            if left:
                yield model, left


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="lsgpt bench quality", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "models", nargs="+", help="the source and what was made from it: folders, names on the Hub or GGUF files"
    )
    parser.add_argument("--text", required=True, help="a file or a folder")
    parser.add_argument(
        "--block_sizes",
        type=at_least(2),
        nargs="*",
        default=[2048, 8192],
        help="tokens in a block; default: %(default)s",
    )
    parser.add_argument(
        "--tokens", type=at_least(1), default=200_000, help="tokens for each perplexity; default: %(default)s"
    )
    parser.add_argument(
        "--lengths",
        type=at_least(1),
        nargs="*",
        default=[1024, 2048, 4096, 8192],
        help="of passages; default: %(default)s",
    )
    parser.add_argument(
        "--passages", type=at_least(1), default=100, help="passages of each length; default: %(default)s"
    )
    parser.add_argument(
        "--distance",
        type=at_least(1),
        default=512,
        help="least number of tokens between a number and its question; default: %(default)s",
    )
    parser.add_argument("--minutes", type=float, help="stop after this time; repeat the command to go on")
    parser.add_argument(
        "--output", type=result_file, metavar="FILE", default=OUTPUT / "quality.json", help="default: %(default)s"
    )
    options = parser.parse_args(arguments)
    if not (options.block_sizes or options.lengths):
        parser.error("`--block_sizes` or `--lengths` must have a number")
    if options.minutes is not None and not options.minutes > 0:
        parser.error(f"`--minutes` must be above 0; got {options.minutes:g}")
    return options


def main(arguments: list[str]):
    """Evaluates the models in rounds, prints their figures and writes them to a JSON file."""
    options = _parse(arguments)
    sizes = [*options.block_sizes, *options.lengths]
    result = begin_result("quality", *arguments)
    for name in options.models:
        check_positions(name, max(sizes))
    tokenizer = load_tokenizer(options.models[0])
    if tokenizer is None:
        raise ValueError(f"the first model must have a tokenizer to read a text with; {options.models[0]!r} has none")
    tasks = list_tasks(options)
    # The same text for some of the usual sizes as for all of them, and whole blocks of all sizes.
    needed = max(-(-options.tokens // size) * size for size in (max(*sizes, 8192), *options.block_sizes))
    text = read_text(options.text, tokenizer, needed)
    passages = {
        length: make_passages(tokenizer, text, length, options.passages, options.distance, seed=2)
        for length in options.lengths
    }
    # Starts in random order, so that a part of the blocks is a sample of the whole text.
    starts = {size: list(range(0, options.tokens, size)) for size in options.block_sizes}
    for size, of_blocks in starts.items():
        random.Random(size).shuffle(of_blocks)
    identity = f"{hashlib.sha256(text.numpy().tobytes()).hexdigest()[:12]}-{options.tokens}-{options.distance}"
    raw = options.output.with_suffix(".jsonl")
    found = _read(raw, identity)

    tokens_left = sum(size for _, part in _missing(options.models, tasks, found) for _, size, _ in part)
    begin, done = time.monotonic(), 0
    print(f"{tokens_left:,} tokens to read with {len(options.models)} models", flush=True)
    for name, part in _missing(options.models, tasks, found):
        model = load(name)
        # Nearly the same sum: a run may go on with another number of threads, or where there is no GPU.
        weights = sum(parameter.cpu().double().sum().item() for parameter in model.parameters())
        known = [item["weights"] for key, item in found.items() if key[0] == name]
        if not all(math.isclose(weights, each, rel_tol=1e-9, abs_tol=1e-6) for each in known):
            raise ValueError(
                f"`--output` must be new for a model whose weights have changed; {str(raw)!r} has measurements of "
                f"another {name!r}"
            )
        for kind, size, index in part:
            start = time.monotonic()
            if kind == "perplexity":
                at = starts[size][index]
                item = measure_block(model, text[at : at + size])
            else:
                item = measure_passage(model, passages[size][index], index == 0 and size == max(options.lengths))
            key = {
                "model": name,
                "kind": kind,
                "size": size,
                "index": index,
                "identity": identity,
                "weights": weights,
            }
            found[name, kind, size, index] = item = {**key, **item, "seconds": time.monotonic() - start}
            append_line(raw, item)
            done += size
            if options.minutes and time.monotonic() - begin > 60 * options.minutes:
                break
        rows = summarize(options.models, found)
        write_result(options.output, {**result, "text": identity, "rows": rows})
        spent = time.monotonic() - begin
        left = spent / done * (tokens_left - done) / 3600
        speed = f"{done / spent:.0f} a second; {left:.1f} h left"
        print(f"{name}: {done:,} of {tokens_left:,} tokens; {speed}", flush=True)
        if options.minutes and spent > 60 * options.minutes:
            break
    rows = summarize(options.models, found)
    write_result(options.output, {**result, "text": identity, "rows": rows})
    print(f"\n{format_rows(rows)}\n\nsaved in {options.output}")
