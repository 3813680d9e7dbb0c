"""The choice of a pretrained model's global heads on a user's text, its price in perplexity, the report on both."""

import math
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch.nn import functional as F
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lsgpt.modeling_lsgpt import LSGPTForCausalLM
from lsgpt.training.data import load_documents, pack, tokenize
from lsgpt.utilities import table

from .heads import choose_global_heads, measure_locality, with_global_heads


NUM_RANDOM_CHOICES = 3


class Calibration(NamedTuple):
    """What `calibrate` found. Heads are numbered as in the model that it was given."""

    locality: torch.Tensor
    """`(L, H)`, what `measure_locality` returns."""
    global_heads: list[list[int]]
    """For each layer the heads to stay global."""
    window: int
    """Number of keys that a query of the other heads shall see, its own included."""
    perplexities: dict[str, float]
    """Per token, on held-out text: of the `source`, with `all` heads global, with the `chosen` ones, with as many
    `first` ones, and with `random 1`, `random 2`, ..."""
    num_tokens: tuple[int, int]
    """Number of tokens that heads were measured on, and that were held out."""


def calibrate(
    model: LSGPTForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    count: int,
    window: int,
    balance: str = "layer",
    max_blocks: int = 32,
    source: PreTrainedModel | None = None,
) -> Calibration:
    """
    Chooses the heads of a model that stay global, and evaluates the choice beside others of the same size.

    Args:
        model: A model whose heads are all global, each with keys of its own.
        tokenizer: The model's.
        text, max_blocks: As of `read_blocks`.
        count, balance: As of `choose_global_heads`.
        window: Number of keys that a query of a local head sees, its own included.
        source: What the model was converted from, to evaluate it too.

    Raises:
        ValueError: A count that leaves no choice, a window that hides nothing, or too little text.
    """
    heads, positions = model.config.num_attention_heads, model.config.max_position_embeddings
    if not 1 <= count < heads:
        raise ValueError(
            f"`global_heads` must be between 1 and {heads - 1}, because the model has {heads} heads in a layer; "
            f"got {count}"
        )
    if not 2 <= window < positions:
        raise ValueError(
            f"`window` must be between 2 and {positions - 1}, because the model has {positions} positions; "
            f"got {window}"
        )
    blocks, held_out = read_blocks(text, tokenizer, positions, max_blocks)
    models = {"all": model} if source is None else {"source": source, "all": model}
    perplexities = {name: perplexity(m, held_out, f"Evaluating: {name}") for name, m in models.items()}

    locality = measure_locality(model, blocks, window)
    generator = torch.Generator().manual_seed(0)
    scores = {"chosen": locality, "first": torch.arange(heads).expand_as(locality)}
    for draw in range(NUM_RANDOM_CHOICES):
        scores[f"random {draw + 1}"] = torch.rand(locality.shape, generator=generator)
    choices = {name: choose_global_heads(score, count, balance) for name, score in scores.items()}
    for name, global_heads in choices.items():
        variant = with_global_heads(model, global_heads, window)
        perplexities[name] = perplexity(variant, held_out, f"Evaluating: {name}")
    num_tokens = len(blocks) * positions, len(held_out) * positions
    return Calibration(locality, choices["chosen"], window, perplexities, num_tokens)


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


@torch.no_grad()
def perplexity(model: PreTrainedModel, blocks: Iterable[torch.Tensor], description: str = "Evaluating") -> float:
    """
    The perplexity per token of a causal language model on blocks of token ids, `(n,)` each, all of one length. The
    first token of a block is not predicted.
    """
    losses = []
    for block in tqdm(blocks, desc=description, leave=False):
        ids = block.to(model.device)
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
        losses.append(F.cross_entropy(logits[:-1].float(), ids[1:]).item())
    return math.exp(sum(losses) / len(losses))


def write_report(folder: str | Path, source: str, text: str, calibration: Calibration) -> Path:
    """
    Writes `report.md` and the heat map beside it.

    Args:
        folder: The converted checkpoint's folder.
        source, text: What was converted, and on which text, for reading.
        calibration: What `calibrate` returned.

    Returns:
        The path of the report.
    """
    locality, global_heads, window, _, num_tokens = calibration
    folder = Path(folder)
    plot_locality(folder / "locality.png", locality, global_heads)
    num_layers, num_heads = locality.shape
    num_global = sum(map(len, global_heads))
    rows = "\n".join(
        f"| {layer} | "
        + " | ".join(f"**{x:.3f}**" if head in chosen else f"{x:.3f}" for head, x in enumerate(row.tolist()))
        + " |"
        for layer, (row, chosen) in enumerate(zip(locality, global_heads))
    )
    report = f"""# {source}: choice of global heads

{num_global} of {num_layers * num_heads} heads stay global, the others see {window} tokens. Weights are the source's;
only the window is new to them, so fine-tune before use.

## Perplexity

Per token, on {num_tokens[1]:,} tokens of {text} that the choice was not made on.

{table(format_perplexities(calibration))}

## Where heads attend

The share of its attention that a head spends on the last {window} tokens, its own included: the mean over the queries
from which the window hides something, in {num_tokens[0]:,} tokens of {text}. Bold: the heads that stay global. Heads
are numbered as in the source; in this checkpoint the global heads of a layer come first.

| layer | {" | ".join(f"head {head}" for head in range(num_heads))} |
|{"---|" * (num_heads + 1)}
{rows}

![Share of attention inside the window, layers by heads; frames around the heads that stay global](locality.png)
"""
    path = folder / "report.md"
    path.write_text(report, encoding="utf-8")
    return path


def format_perplexities(calibration: Calibration) -> dict[str, str]:
    """Perplexities for reading, each with what it is of."""
    values = calibration.perplexities
    names = {
        "source": "the source",
        "all": "all heads global",
        "chosen": "the least local heads global: this checkpoint",
        "first": "as many first heads of each layer global",
    }
    rows = {text: f"{values[name]:.3f}" for name, text in names.items() if name in values}
    random = [value for name, value in values.items() if name.startswith("random")]
    mean = sum(random) / len(random)
    name = f"as many random heads global, mean of {len(random)} draws"
    rows[name] = f"{mean:.3f} ({min(random):.3f} to {max(random):.3f})"
    return rows


def plot_locality(path: str | Path, locality: torch.Tensor, global_heads: list[list[int]]):
    """
    Draws the locality of every head as a heat map, layers by heads, with frames around those that stay global.

    Args:
        path: The PNG file to write.
        locality (`(L, H)`): What `measure_locality` returns.
        global_heads: For each layer the heads that stay global.
    """
    num_layers, num_heads = locality.shape
    size = max(4.0, 1.5 + 0.5 * num_heads), max(2.5, 1.2 + 0.4 * num_layers)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(locality.numpy(), aspect="auto", vmin=0, vmax=1)
    for layer, chosen in enumerate(global_heads):
        for head in chosen:
            frame = Rectangle((head - 0.5, layer - 0.5), 1, 1, fill=False, edgecolor="red", linewidth=2, zorder=3)
            axes.add_patch(frame)
    axes.set_xticks(range(num_heads))
    axes.set_yticks(range(num_layers))
    axes.set_xlabel("head")
    axes.set_ylabel("layer")
    figure.colorbar(image, label="share of attention inside the window")
    figure.savefig(path, dpi=150)
