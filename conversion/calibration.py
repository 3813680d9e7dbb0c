"""Chooses the global heads of a pretrained model on a user's text, measures the loss of quality, and reports both."""

import math
import time
from collections.abc import Iterable, Sequence
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
from lsgpt.utilities import compare_costs, format_duration, table
from lsgpt.utilities.environment import describe_environment
from lsgpt.utilities.plots import heat_map

from .heads import HeadChanges, choose_global_heads, measure_changes, with_global_heads
from .retrieval import KINDS, Passage, ask, exact_matches, make_passages


BLOCK_SIZE = 2048
"""Number of tokens in a block of text, rounded down to whole pieces, or one piece if a piece is longer."""

MEASURED_LENGTHS = 1024, 4096
"""
Least and largest number of tokens in a piece of text or a passage that heads are measured on; in between, a piece has
four windows. Windows above half of the largest number have pieces of two windows. (With two windows for all, the heads
that were chosen found less of what is farther back.)
"""

SHARE_LENGTH = 8192
"""Number of tokens at which a share of the cache is meant, or the model's positions, if these are fewer."""

SHARE_OF_GLOBAL_HEADS = 0.5
"""
Share of a cache that global heads get; the windows of the others get the rest. At a fifth of the cache, SmolLM2-135M
lost least in perplexity and in retrieval with a third to a half: then windows are wide. With more global heads and
windows of 112 to 630 tokens, it lost more.
"""

NAMES = {"source": "the source: all heads global", "chosen": "the choice: this checkpoint"}


class Calibration(NamedTuple):
    """The result of `calibrate`. Heads are numbered as in the original model."""

    changes: HeadChanges
    global_kv_heads: list[list[int]]
    """For each layer, the key/value heads that stay global."""
    window: int
    """Number of keys that a query of the other heads sees, including its own."""
    perplexities: dict[str, float]
    """Perplexity per token on held-out text, for the models in `NAMES`."""
    retrieval: dict[str, dict[str, float]]
    """
    The share of questions of each kind that the same models answer right, see `lsgpt.conversion.retrieval`; empty if
    texts are too short to hide a number outside the window.
    """
    num_tokens: tuple[int, int]
    """Number of tokens that heads were measured on, and number of held-out tokens."""
    num_passages: int
    """Number of held-out passages that hide numbers."""
    made_with: dict[str, str]
    """How long it took, and on what, see `describe_environment`."""


def calibrate(
    model: LSGPTForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    global_kv_heads: int | float,
    window: int,
    balance: str = "overall",
    max_blocks: int = 4,
) -> Calibration:
    """
    Chooses which heads of a model stay global, and measures what the choice costs. Prints how long this will take.

    Args:
        model: A model whose heads are all global.
        tokenizer: The model's tokenizer.
        text, max_blocks: See `read_blocks`. A block has up to `BLOCK_SIZE` tokens, or four windows if these are more
            (see `MEASURED_LENGTHS`), and never more than the model has positions. As many passages hide numbers to
            measure heads on, and twice as many for the evaluation.
        global_kv_heads: Number of key/value heads in the whole model that stay global, or their share (below 1).
        window: Number of keys that a query of a local head sees, including its own.
        balance: See `choose_global_heads`.

    Raises:
        ValueError: If the number leaves no choice or does not fit the balance, the window hides nothing, or the text
            is too short.
    """
    start, environment = time.perf_counter(), describe_environment()
    least, most = MEASURED_LENGTHS
    length = min(model.config.max_position_embeddings, max(least, min(4 * window, most), 2 * window))
    block_size = length * max(min(BLOCK_SIZE, model.config.max_position_embeddings) // length, 1)
    count = count_global_heads(model.config, global_kv_heads, balance)
    # Measuring takes long, so a count that cannot be balanced has its error now.
    choose_global_heads(torch.zeros(model.config.num_hidden_layers, model.config.num_key_value_heads), count, balance)
    if not 2 <= window < block_size:
        raise ValueError(
            f"`window` must be between 2 and {block_size - 1}, because heads are measured on blocks of "
            f"{block_size} tokens; got {window}"
        )
    blocks, held_out = read_blocks(text, tokenizer, block_size, max_blocks)
    pieces = [piece for block in blocks for piece in block.split(length)]
    try:  # the numbers and texts of the choice differ from those of the evaluation
        passages = make_passages(tokenizer, torch.cat(blocks), length, len(blocks), window, seed=0)
        questions = make_passages(tokenizer, torch.cat(held_out), length, 2 * len(held_out), window, seed=1)
    except ValueError:  # there is no room for a number outside the window
        passages, questions = [], []

    begin = time.perf_counter()
    perplexity(model, pieces[:1])
    # Measuring computes the attention of windows again, without a fast kernel, and on passages also gradients.
    passes = 1.5 * len(pieces) + 5.5 * len(passages) + 2 * (len(held_out) * block_size / length + len(questions))
    print(f"Calibration takes about {math.ceil((time.perf_counter() - begin) * passes / 60)} min", flush=True)

    changes = measure_changes(model, pieces, window, [passage.with_questions() for passage in passages])
    if not changes.scores.isfinite().all():
        raise ValueError(
            f"the model's outputs on the text must be finite to measure its heads; in {model.dtype} they are not. "
            "Convert a copy of the source in float32 or bfloat16"
        )
    chosen = choose_global_heads(changes.scores, count, balance)
    models = {"source": model, "chosen": with_global_heads(model, chosen, window, changes.sinks)}
    perplexities = {name: perplexity(each, held_out, f"Perplexity: {name}") for name, each in models.items()}
    retrieval = {name: recall(each, questions, f"Retrieval: {name}") for name, each in models.items() if questions}
    num_tokens = len(blocks) * block_size, len(held_out) * block_size
    made_with = {"time": format_duration(time.perf_counter() - start), **environment}
    return Calibration(changes, chosen, window, perplexities, retrieval, num_tokens, len(questions), made_with)


def budget_heads(config: LSGPTConfig, cache_share: float, balance: str = "overall") -> tuple[int, int]:
    """
    Divides a share of the source's cache at `SHARE_LENGTH` tokens between global heads and windows: global key/value
    heads get `SHARE_OF_GLOBAL_HEADS` of it, but at least one head, or one in each layer if `balance` is layer, and the
    windows of the others what remains.

    Returns:
        The number of global key/value heads in the whole model, and the window.

    Raises:
        ValueError: If the share leaves no windows, or no local head.
    """
    total = config.num_hidden_layers * config.num_key_value_heads
    length = min(SHARE_LENGTH, config.max_position_embeddings)
    least = config.num_hidden_layers if balance == "layer" else 1  # and the number is a multiple of it
    window = 0
    if 0 < cache_share < 1 and least < total:
        count = max(math.floor(total * cache_share * SHARE_OF_GLOBAL_HEADS / least + 1e-9), 1) * least
        window = math.floor(length * (cache_share * total - count) / (total - count) + 1e-9)
    if window < 2:
        if least == total:
            raise ValueError("`balance` must be overall if each layer has one key/value head; got layer")
        low = math.ceil(1000 * (least * length + (total - least) * 2) / (total * length)) / 1000
        raise ValueError(
            f"`cache_share` must be below 1, and at least {low:.3f} with `balance` {balance}: global key/value heads, "
            f"{least} of {total}, and windows of 2 tokens; got {cache_share}"
        )
    return count, min(window, length - 1)


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
    Splits a text into blocks to calibrate on and held-out blocks. About half of the documents are held out, chosen by
    a digest of their text, or the second half of each if there are too few. If the dataset has a validation split,
    that is held out instead.

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
    splits = (documents[split] for split in ("train", "validation"))
    blocks, held_out = (list(first_blocks(texts, tokenizer, block_size, max_blocks)) for texts in splits)
    if not (blocks and held_out):
        raise ValueError(
            f"the calibration text must have a block of {block_size} tokens to measure heads on and another one for "
            f"the evaluation; {text!r} is shorter"
        )
    return blocks, held_out


def perplexity(model: PreTrainedModel, blocks: Iterable[torch.Tensor], description: str = "Perplexity") -> float:
    """
    Computes the perplexity per token of a causal language model on blocks of token ids `(n,)`, all of the same length.
    The first token of a block is not predicted.
    """
    rows = (block[None] for block in tqdm(blocks, desc=description, leave=False))
    return perplexity_of(*total_loss(model, ({"input_ids": ids, "labels": ids} for ids in rows)))


def recall(model: PreTrainedModel, passages: Sequence[Passage], description: str = "Retrieval") -> dict[str, float]:
    """Computes the share of questions of each kind to which a causal language model answers with the right number."""
    answers = [ask(model, passage) for passage in tqdm(passages, desc=description, leave=False)]
    return exact_matches(answers, [passage.questions for passage in passages])


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
    changes, global_kv_heads, window, _, retrieval, num_tokens, _, made_with = calibration
    folder = Path(folder)
    scores = changes.scores
    plot_scores(folder / "heads.png", scores, global_kv_heads)
    layers, kv_heads = scores.shape
    num_global = sum(map(len, global_kv_heads))
    if changes.retrieval is None:
        measured = f"""The score of a head is the squared change of its
outputs, relative to the outputs of its layer, as a share of the total over all heads. It was measured on
{num_tokens[0]:,} tokens of {text}."""
    else:
        measured = f"""The score of a head is how fast the loss
rises as the head becomes local, with every head half local, as a share of the total over all heads. It is the
loss at the answers in passages that hide numbers in {text}, plus the loss in the text around them."""
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
{window} tokens and have sinks. No weights were trained; `lsgpt train heal` trains them with the source as teacher.

## Quality

Perplexity per token on {num_tokens[1]:,} tokens of {text} that were not used for the choice{_describe(calibration)}.

{table(format_quality(calibration), ["global heads", "perplexity", *next(iter(retrieval.values()), {})])}

## Cost

Compared with the source, in which all heads are global.

{table(costs, ["tokens", "", "this checkpoint", "the source", "ratio"])}

## Which heads change when they become local

When a key/value head becomes local, its query heads see {window} tokens and a sink instead of everything. {measured}
The heads in bold stay global. Heads are numbered as in the source; in this checkpoint, the global heads of a layer
come first.

{table(([i, *row] for i, row in enumerate(heads)), ["layer", *(f"head {head}" for head in range(kv_heads))])}

![Scores by layer and key/value head, with frames around the heads that stay global](heads.png)

## Made with

{table(made_with.items())}
"""
    path = folder / "report.md"
    path.write_text(report, encoding="utf-8")
    return path


def format_quality(calibration: Calibration) -> list[list[str]]:
    """Formats the name of each model, its perplexity and, if it was measured, its share of right answers by kind."""
    rows = []
    for name, value in calibration.perplexities.items():
        shares = calibration.retrieval.get(name, {}).values()
        rows.append([NAMES[name], f"{value:.3f}", *(f"{share:.2f}" for share in shares)])
    return rows


def _describe(calibration: Calibration) -> str:
    if not calibration.retrieval:
        return "; blocks of the text have no room to hide numbers outside the window and ask for them"
    return f""". And the share of
right answers to questions about five-digit numbers that are hidden in {calibration.num_passages} passages of this
text, outside the window. An answer is right if all digits are. Kinds of questions: {", ".join(KINDS)}"""


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
