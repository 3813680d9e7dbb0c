"""Chooses the global heads of a pretrained model on a user's text, measures the loss of quality, and reports both."""

import random
from collections.abc import Iterable, Sequence
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lsgpt.modeling_lsgpt import LSGPTConfig, LSGPTForCausalLM
from lsgpt.training.data import first_blocks, load_documents
from lsgpt.training.metrics import perplexity_of, total_loss
from lsgpt.utilities import compare_costs, table
from lsgpt.utilities.plots import heat_map

from .heads import HeadChanges, choose_global_heads, measure_changes, with_global_heads


MAX_BLOCK_SIZE = 2048
"""Largest number of tokens in a block of text, for models with more positions than this."""

PASSAGE_LENGTHS = (1024, 2048)
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Where a passage hides its pass key: 0 is the beginning, 1 the last position outside the window."""
NEEDLE = "\nThe pass key is {key}. Remember it: {key} is the pass key.\n"
QUESTION = "\nWhat is the pass key? The pass key is"
NUM_KEYS = {"choice": 2, "evaluation": 4}
"""How many keys are hidden at each depth."""

NAMES = {
    "source": "the source: all heads global",
    "chosen": "the choice: this checkpoint",
    "first": "the first heads: the same number",
    "random": "random heads: the same number",
}


class Passage(NamedTuple):
    """A text that hides a pass key, followed by the question for it and the answer."""

    ids: torch.Tensor
    """`(n,)` token ids."""
    answer_length: int
    """Number of tokens of the answer, at the end."""
    depth: float
    """One of `DEPTHS`."""


Recall = dict[tuple[int, float], float]
"""The share of correct answer tokens, by length and depth."""


class Calibration(NamedTuple):
    """The result of `calibrate`. Heads are numbered as in the original model."""

    changes: HeadChanges
    global_kv_heads: list[list[int]]
    """For each layer, the key/value heads that stay global."""
    window: int
    """Number of keys that a query of the other heads sees, including its own."""
    perplexities: dict[str, float]
    """Perplexity per token on held-out text, for the models in `NAMES`."""
    retrieval: dict[str, Recall]
    """Recall of the same models; empty if blocks are too short to hide a pass key outside the window."""
    num_tokens: tuple[int, int]
    """Number of tokens that heads were measured on, and number of held-out tokens."""


def calibrate(
    model: LSGPTForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    global_kv_heads: int | float,
    window: int,
    balance: str = "overall",
    max_blocks: int = 16,
) -> Calibration:
    """
    Chooses which heads of a model stay global, and compares the choice with others of the same size.

    Args:
        model: A model whose heads are all global.
        tokenizer: The model's tokenizer.
        text, max_blocks: See `read_blocks`. A block has `MAX_BLOCK_SIZE` tokens, or as many as the model has
            positions, if these are fewer.
        global_kv_heads: Number of key/value heads in the whole model that stay global, or their share (below 1).
        window: Number of keys that a query of a local head sees, including its own.
        balance: See `choose_global_heads`.

    Raises:
        ValueError: If the number leaves no choice, the window hides nothing, or the text is too short.
    """
    config = model.config
    block_size = min(config.max_position_embeddings, MAX_BLOCK_SIZE)
    count = count_global_heads(config, global_kv_heads, balance)
    if not 2 <= window < block_size:
        raise ValueError(
            f"`window` must be between 2 and {block_size - 1}, because heads are measured on blocks of "
            f"{block_size} tokens; got {window}"
        )
    layers, kv_heads = config.num_hidden_layers, config.num_key_value_heads
    scores = {
        "first": torch.arange(kv_heads, 0, -1).expand(layers, -1),
        "random": torch.rand(layers, kv_heads, generator=torch.Generator().manual_seed(0)),
    }
    choices = {name: choose_global_heads(score, count, balance) for name, score in scores.items()}
    blocks, held_out = read_blocks(text, tokenizer, block_size, max_blocks)
    # The pass keys for the choice differ from those for the evaluation, too.
    keys = random.Random(0).sample(range(10_000, 100_000), sum(NUM_KEYS.values()))
    lengths = [length for length in PASSAGE_LENGTHS if length <= block_size] or [block_size]
    split = NUM_KEYS["choice"]
    passages = make_passages(tokenizer, blocks, lengths[-1:], window, keys[:split])
    questions = make_passages(tokenizer, held_out, lengths, window, keys[split:])

    inputs = [(passage.ids, passage.answer_length) for passage in passages]
    changes = measure_changes(model, blocks, window, inputs)
    choices = {"chosen": choose_global_heads(changes.scores, count, balance)} | choices
    models = {"source": model}
    models |= {name: with_global_heads(model, heads, window, changes.sinks) for name, heads in choices.items()}
    perplexities = {name: perplexity(each, held_out, f"Perplexity: {name}") for name, each in models.items()}
    retrieval = {name: recall(each, questions, f"Retrieval: {name}") for name, each in models.items() if questions}
    num_tokens = len(blocks) * block_size, len(held_out) * block_size
    return Calibration(changes, choices["chosen"], window, perplexities, retrieval, num_tokens)


def count_global_heads(config: LSGPTConfig, global_kv_heads: int | float, balance: str) -> int:
    """
    Returns the number of key/value heads that stay global. A share is rounded, in each layer if `balance` is layer.

    Raises:
        ValueError: If none or all of the heads would stay global.
    """
    layers, kv_heads = config.num_hidden_layers, config.num_key_value_heads
    total = layers * kv_heads
    count = global_kv_heads
    if isinstance(global_kv_heads, float):
        count = round(global_kv_heads * kv_heads) * layers if balance == "layer" else round(global_kv_heads * total)
    if not 1 <= count < total:
        raise ValueError(
            f"`global_kv_heads` must be between 1 and {total - 1}, or a share below 1, because the model has {total} "
            f"key/value heads, {kv_heads} in each of {layers} layers; got {global_kv_heads}"
            + ("" if count == global_kv_heads else f", which is {count} heads")
        )
    return int(count)


def read_blocks(
    text: str, tokenizer: PreTrainedTokenizerBase, block_size: int, max_blocks: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """
    Splits a text into blocks to calibrate on and held-out blocks. Every second document is held out, or the second
    half of a single document. If the dataset has a validation split, that is held out instead.

    Args:
        text: A file or a folder of files, `"stdlib"`, or a dataset on the Hub; see `lsgpt.training.load_documents`.
        tokenizer: The model's tokenizer.
        block_size: Number of tokens in a block, n.
        max_blocks: Maximum number of blocks in each part; no more text is tokenized.

    Returns:
        The token ids `(n,)` of the blocks of both parts.

    Raises:
        ValueError: If there is no such text, or one of the parts is shorter than a block.
    """
    documents = load_documents(text, validation_percentage=50)
    parts = []
    for split in ("train", "validation"):
        parts.append(list(first_blocks(documents[split], tokenizer, block_size, max_blocks)))
    if not all(parts):
        raise ValueError(
            f"the calibration text must have a block of {block_size} tokens to measure heads on and another one for "
            f"the evaluation; {text!r} is shorter"
        )
    train, validation = parts
    return train, validation


def make_passages(
    tokenizer: PreTrainedTokenizerBase,
    blocks: Sequence[torch.Tensor],
    lengths: Iterable[int],
    window: int,
    keys: Iterable[int],
) -> list[Passage]:
    """
    Makes passages that hide a pass key: for each key, one passage of every length at each of the `DEPTHS`.

    At every depth, the key is outside the window of the queries that predict the answer.

    Args:
        tokenizer: The model's tokenizer.
        blocks: Token ids `(n,)` of the text around the key; the passages use them in turn.
        lengths: Numbers of tokens in a passage, at most n. Lengths without room for a key outside the window are
            skipped.
        window: Number of keys that a query of a local head sees, including its own.
        keys: The numbers to hide.
    """

    def encode(words: str) -> torch.Tensor:
        return torch.tensor(tokenizer(words, add_special_tokens=False)["input_ids"])

    fillers, passages, question = cycle(blocks), [], encode(QUESTION)
    for key in keys:
        needle, end = encode(NEEDLE.format(key=key)), encode(f"{QUESTION} {key}")
        shared = min(len(question), len(end))
        is_equal = question[:shared] == end[:shared]
        answer_length = len(end) - int(is_equal.cumprod(0).sum())
        for length in lengths:
            room = length - window - len(needle) - len(end)
            for depth in DEPTHS if room >= 0 else ():
                filler = next(fillers)[: length - len(needle) - len(end)]
                at = round(depth * room)
                ids = torch.cat([filler[:at], needle, filler[at:], end])
                passages.append(Passage(ids, answer_length, depth))
    return passages


def perplexity(model: PreTrainedModel, blocks: Iterable[torch.Tensor], description: str = "Perplexity") -> float:
    """
    Computes the perplexity per token of a causal language model on blocks of token ids `(n,)`, all of the same length.
    The first token of a block is not predicted.
    """
    rows = (block[None] for block in tqdm(blocks, desc=description, leave=False))
    return perplexity_of(*total_loss(model, ({"input_ids": ids, "labels": ids} for ids in rows)))


@torch.no_grad()
def recall(model: PreTrainedModel, passages: Sequence[Passage], description: str = "Retrieval") -> Recall:
    """
    Computes, for each length and depth of `passages`, the share of answer tokens that a causal language model predicts
    as the most likely ones, given the correct tokens before them.
    """
    shares: dict[tuple[int, float], list[float]] = {}
    for ids, answer_length, depth in tqdm(passages, desc=description, leave=False):
        inputs = ids[None, :-1].to(model.device)
        logits = model(input_ids=inputs, use_cache=False, logits_to_keep=answer_length).logits[0]
        right = logits.argmax(-1).cpu() == ids[-answer_length:]
        shares.setdefault((len(ids), depth), []).append(right.float().mean().item())
    return {place: sum(values) / len(values) for place, values in shares.items()}


def write_report(folder: str | Path, source: str, text: str, calibration: Calibration, config: LSGPTConfig) -> Path:
    """
    Writes `report.md` and the heat map beside it.

    Args:
        folder: The converted checkpoint's folder.
        source, text: Names of the source and of the calibration text, for the report.
        calibration: The result of `calibrate`.
        config: Configuration of the converted model.

    Returns:
        The path of the report.
    """
    changes, global_kv_heads, window, _, retrieval, num_tokens = calibration
    folder = Path(folder)
    scores = changes.scores
    plot_scores(folder / "heads.png", scores, global_kv_heads)
    layers, kv_heads = scores.shape
    num_global = sum(map(len, global_kv_heads))
    measured = f"{num_tokens[0]:,} tokens of {text}"
    if changes.retrieval is not None:
        measured += " and, with equal weight, at the answers in passages that hide a pass key in this text"
    heads = [
        [f"**{x:.2%}**" if head in chosen else f"{x:.2%}" for head, x in enumerate(row)]
        for row, chosen in zip(scores.tolist(), global_kv_heads)
    ]
    costs = []
    for length in _cost_lengths(config):
        for name, (ours, theirs, ratio) in compare_costs(config, length).items():
            costs.append([f"{length:,}", name, ours, theirs, ratio])
    report = f"""# {source}: choice of global heads

{num_global} of {layers * kv_heads} key/value heads stay global, with the query heads that they serve; the others see
{window} tokens and have sinks. No weights were trained: heal the model before use (`lsgpt train heal`).

## Quality

Perplexity per token on {num_tokens[1]:,} tokens of {text} that were not used for the choice, and the mean of the next
table. The sinks of the first and the random heads were measured in the same way.

{table(format_quality(calibration), ["global heads", "perplexity", *(["retrieval"] if retrieval else [])])}

## Retrieval of a pass key

{_retrieval_section(retrieval)}

## Cost

Compared with the source, in which all heads are global.

{table(costs, ["tokens", "", "this checkpoint", "the source", "ratio"])}

## Which heads change when they become local

When a key/value head becomes local, its query heads see {window} tokens and a sink instead of everything, and their
outputs change. The score of a head is this squared change, relative to the outputs of its layer, as a share of the
total over all heads. It was measured on {measured}.
The heads in bold stay global. Heads are numbered as in the source; in this checkpoint, the global heads of a layer
come first.

{table(([i, *row] for i, row in enumerate(heads)), ["layer", *(f"head {head}" for head in range(kv_heads))])}

![Scores by layer and key/value head, with frames around the heads that stay global](heads.png)
"""
    path = folder / "report.md"
    path.write_text(report, encoding="utf-8")
    return path


def format_quality(calibration: Calibration) -> list[list[str]]:
    """Formats the name of each model, its perplexity and, if it was measured, its mean retrieval."""
    rows = []
    for name, value in calibration.perplexities.items():
        shares = calibration.retrieval.get(name, {}).values()
        rows.append([NAMES[name], f"{value:.3f}", *([f"{sum(shares) / len(shares):.3f}"] if shares else [])])
    return rows


def _retrieval_section(retrieval: dict[str, Recall]) -> str:
    if not retrieval:
        return "Not measured: blocks of the text have no room to hide a pass key outside the window."
    rows = [
        [f"{length:,}", f"{depth:.0%}", *(f"{shares[length, depth]:.2f}" for shares in retrieval.values())]
        for length, depth in sorted(retrieval["source"])
    ]
    names = [NAMES[name].split(":")[0] for name in retrieval]
    num_keys = NUM_KEYS["evaluation"]
    return f"""A five-digit number is hidden in a text that asks for it at the end. The table shows the share of its
tokens that the model predicts as the most likely ones, given those before them, for {num_keys} numbers at each depth;
100% is the last position outside the window. Some tokens, such as a space, can be guessed.

{table(rows, ["tokens", "depth", *names])}"""


def _cost_lengths(config: LSGPTConfig) -> list[int]:
    """Powers of 2 from 1,024 to the model's number of positions, and that number itself."""
    end = config.max_position_embeddings
    return sorted({end, *(2**power for power in range(10, end.bit_length()) if 2**power <= end)})


def plot_scores(path: str | Path, scores: torch.Tensor, global_kv_heads: list[list[int]]):
    """
    Draws the score of every key/value head as a heat map, layers by heads, with frames around those that stay global.

    Args:
        path: The PNG file to write.
        scores (`(L, H_kv)`): Such as `HeadChanges.scores`.
        global_kv_heads: For each layer, the heads that stay global.
    """
    num_layers, num_heads = scores.shape
    size = max(4.0, 1.5 + 0.5 * num_heads), max(2.5, 1.2 + 0.4 * num_layers)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    image = heat_map(axes, 100 * scores.numpy(), vmin=0)
    for layer, chosen in enumerate(global_kv_heads):
        for head in chosen:
            frame = Rectangle((head - 0.5, layer - 0.5), 1, 1, fill=False, edgecolor="red", linewidth=2, zorder=3)
            axes.add_patch(frame)
    axes.set_xlabel("key/value head")
    figure.colorbar(image, label="share of the change, %")
    figure.savefig(path, dpi=150)
