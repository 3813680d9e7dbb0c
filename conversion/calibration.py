"""The choice of a pretrained model's global heads on a user's text, what it costs in quality, the report on both."""

import math
import random
from collections.abc import Iterable, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lsgpt.modeling_lsgpt import LSGPTConfig, LSGPTForCausalLM
from lsgpt.training.data import load_documents, pack, tokenize
from lsgpt.utilities import compare_costs, table

from .heads import HeadChanges, choose_global_heads, measure_changes, with_global_heads


MAX_BLOCK_SIZE = 2048
"""Number of tokens in a block of text at most, for models with more positions."""

PASSAGE_LENGTHS = (1024, 2048)
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Where in a passage its pass key stands: 0 is the beginning, 1 the last place outside the window."""
NEEDLE = "\nThe pass key is {key}. Remember it: {key} is the pass key.\n"
QUESTION = "\nWhat is the pass key? The pass key is"
NUM_KEYS = {"choice": 2, "evaluation": 4}
"""How many keys are hidden at each depth."""

NAMES = {
    "source": "the source: all heads global",
    "chosen": "the choice: this checkpoint",
    "first": "as many first key/value heads",
    "random": "as many random key/value heads",
}


class Passage(NamedTuple):
    """A text in which a pass key is hidden, and at its end the question and the answer."""

    ids: torch.Tensor
    """`(n,)` token ids."""
    answer_length: int
    """Number of tokens at the end that are the answer."""
    depth: float
    """One of `DEPTHS`."""


Recall = dict[tuple[int, float], float]
"""For each length and depth the share of answer tokens that are right."""


class Calibration(NamedTuple):
    """What `calibrate` found. Heads are numbered as in the model that it was given."""

    changes: HeadChanges
    global_kv_heads: list[list[int]]
    """For each layer the key/value heads to stay global."""
    window: int
    """Number of keys that a query of the other heads shall see, its own included."""
    perplexities: dict[str, float]
    """Per token, on held-out text, of the models in `NAMES`."""
    retrieval: dict[str, Recall]
    """Of the same models; empty where blocks are too short to hide a pass key outside the window."""
    num_tokens: tuple[int, int]
    """Number of tokens of text that heads were measured on, and that were held out."""


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
    Chooses the heads of a model that stay global, and evaluates the choice beside others of the same size.

    Args:
        model: A model whose heads are all global.
        tokenizer: The model's.
        text, max_blocks: As of `read_blocks`; a block has `MAX_BLOCK_SIZE` tokens, or as many as there are positions.
        global_kv_heads: Number of key/value heads of the whole model that stay global, or a share of them below 1.
        window: Number of keys that a query of a local head sees, its own included.
        balance: As of `choose_global_heads`.

    Raises:
        ValueError: A number that leaves no choice, a window that hides nothing, or too little text.
    """
    config = model.config
    block_size = min(config.max_position_embeddings, MAX_BLOCK_SIZE)
    count = count_global_heads(config, global_kv_heads, balance)
    if not 2 <= window < block_size:
        raise ValueError(
            f"`window` must be between 2 and {block_size - 1}, because it is measured in blocks of {block_size} tokens"
            f"; got {window}"
        )
    layers, kv_heads = config.num_hidden_layers, config.num_key_value_heads
    scores = {
        "first": torch.arange(kv_heads, 0, -1).expand(layers, -1),
        "random": torch.rand(layers, kv_heads, generator=torch.Generator().manual_seed(0)),
    }
    choices = {name: choose_global_heads(score, count, balance) for name, score in scores.items()}
    blocks, held_out = read_blocks(text, tokenizer, block_size, max_blocks)
    # Even the keys that the choice is made with are others than those of the evaluation.
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
    The number of key/value heads that stay global; a share of them is rounded, in each layer where `balance` is layer.

    Raises:
        ValueError: A number or share that leaves none or all of them.
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
    Blocks of a text, one part to calibrate with and one held out: every second document, or the second half of the
    document where there is but one; or the data set's own validation split.

    Args:
        text: A file or a folder of files, `"stdlib"`, or a data set on the Hub, see `lsgpt.training.load_documents`.
        tokenizer: The model's.
        block_size: Number of tokens in a block, n.
        max_blocks: Number of blocks of each part at most; no more text is tokenized.

    Returns:
        The token ids `(n,)` of the blocks of both parts.

    Raises:
        ValueError: No such text, or less than a block of one of the parts.
    """
    documents = load_documents(text, validation_percentage=50)
    parts = []
    for split in ("train", "validation"):
        blocks = pack(tokenize(documents[split].to_iterable_dataset(), tokenizer), block_size)
        parts.append([torch.as_tensor(block["input_ids"]).long() for block in islice(blocks, max_blocks)])
    if not all(parts):
        raise ValueError(
            f"the text to calibrate with must have a block of {block_size} tokens to measure heads on and another one "
            f"to evaluate; {text!r} has less"
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
    Passages with a pass key, each key at every one of the `DEPTHS` in a passage of every length.

    The answer's queries cannot see the key through the window: it stands outside at every depth.

    Args:
        tokenizer: The model's.
        blocks: Token ids `(n,)` of the text around the key; passages take them in turn.
        lengths: Numbers of tokens in a passage, n at most. Those without room for a key outside the window are left
            out.
        window: Number of keys that a query of a local head sees, its own included.
        keys: Numbers to hide.
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


@torch.no_grad()
def perplexity(model: PreTrainedModel, blocks: Iterable[torch.Tensor], description: str = "Perplexity") -> float:
    """
    The perplexity per token of a causal language model on blocks of token ids, `(n,)` each, all of one length. The
    first token of a block is not predicted.
    """
    options = {"skip_logits": True} if isinstance(model, LSGPTForCausalLM) else {}
    losses = []
    for block in tqdm(blocks, desc=description, leave=False):
        ids = block[None].to(model.device)
        losses.append(model(input_ids=ids, labels=ids, use_cache=False, **options).loss.item())
    return math.exp(sum(losses) / len(losses))


@torch.no_grad()
def recall(model: PreTrainedModel, passages: Sequence[Passage], description: str = "Retrieval") -> Recall:
    """
    The share of answer tokens that are the likeliest of a causal language model, given the right ones before them, for
    each length and depth of `passages`.
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
        source, text: What was converted, and on which text, for reading.
        calibration: What `calibrate` returned.
        config: The converted model's.

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
        measured += " and at the answers to passages that hide a pass key in it, in equal parts"
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
{window} tokens and have sinks. Weights are the source's, nothing was trained: fine-tune before use.

## Quality

Perplexity per token, on {num_tokens[1]:,} tokens of {text} that the choice was not made on, and the mean of the next
table. Sinks of the first and the random heads were measured in the same way.

{table(format_quality(calibration), ["global heads", "perplexity", *(["retrieval"] if retrieval else [])])}

## Retrieval of a pass key

{_retrieval_section(retrieval)}

## Cost

Beside the source, all of whose heads are global.

{table(costs, ["tokens", "", "this checkpoint", "the source", "ratio"])}

## Which heads change as local ones

When a key/value head becomes local, the outputs of its query heads change: they see {window} tokens and a sink in
place of everything. Its score is the squared change, relative to its layer's outputs, as a share of that of all heads;
measured on {measured}. Bold: the heads that stay global. Heads are numbered as in the source;
in this checkpoint the global heads of a layer come first.

{table(([i, *row] for i, row in enumerate(heads)), ["layer", *(f"head {head}" for head in range(kv_heads))])}

![Scores, layers by key/value heads; frames around the heads that stay global](heads.png)
"""
    path = folder / "report.md"
    path.write_text(report, encoding="utf-8")
    return path


def format_quality(calibration: Calibration) -> list[list[str]]:
    """For each model its name, its perplexity and, where it was measured, its retrieval, for reading."""
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
    return f"""A number of five digits is hidden in text, and asked for at its end. The share of its tokens that are
the likeliest, given those before them, of {num_keys} numbers at each depth; 100% is the last place outside the window.
Some tokens, such as a space, can be guessed.

{table(rows, ["tokens", "depth", *names])}"""


def _cost_lengths(config: LSGPTConfig) -> list[int]:
    """Powers of 2 from 1,024 to the model's last position, and that itself."""
    end = config.max_position_embeddings
    return sorted({end, *(2**power for power in range(10, end.bit_length()) if 2**power <= end)})


def plot_scores(path: str | Path, scores: torch.Tensor, global_kv_heads: list[list[int]]):
    """
    Draws the score of every key/value head as a heat map, layers by heads, with frames around those that stay global.

    Args:
        path: The PNG file to write.
        scores (`(L, H_kv)`): Such as `HeadChanges.scores`.
        global_kv_heads: For each layer the heads that stay global.
    """
    num_layers, num_heads = scores.shape
    size = max(4.0, 1.5 + 0.5 * num_heads), max(2.5, 1.2 + 0.4 * num_layers)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(100 * scores.numpy(), aspect="auto", vmin=0)
    for layer, chosen in enumerate(global_kv_heads):
        for head in chosen:
            frame = Rectangle((head - 0.5, layer - 0.5), 1, 1, fill=False, edgecolor="red", linewidth=2, zorder=3)
            axes.add_patch(frame)
    axes.set_xticks(range(num_heads))
    axes.set_yticks(range(num_layers))
    axes.set_xlabel("key/value head")
    axes.set_ylabel("layer")
    figure.colorbar(image, label="share of the change, %")
    figure.savefig(path, dpi=150)
