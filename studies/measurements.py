"""
Measurements on checkpoints of trained models: the loss with a shorter context, the parts of the attention logits that
come from positions and from content, and where heads look.

Shapes: B batch, T tokens of a block, H heads, L layers.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel

import lsgpt  # noqa: F401 (registers LSGPT with the Auto classes)
from lsgpt.inspection import FIGURES, attention_statistics, head_figures
from lsgpt.modeling_lsgpt import Visibility, attention_layers
from lsgpt.training.metrics import total_loss


PARTS = 8
"""The loss with a context of `c` tokens is that of the last `c / PARTS` tokens of windows of `c` tokens."""


def validation_loss(model: PreTrainedModel, blocks: torch.Tensor, batch_size: int = 4) -> float:
    """The mean loss of `(N, T)` blocks, in nats per token; infinite if it is not a number."""
    total, count = total_loss(model, ({"input_ids": ids, "labels": ids} for ids in blocks.split(batch_size)))
    loss = total / count
    return loss if math.isfinite(loss) else math.inf


@torch.no_grad()
def losses_by_context(
    model: PreTrainedModel, blocks: torch.Tensor, contexts: Sequence[int], num_targets: int = 32_768
) -> dict[str, float]:
    """
    The mean loss of the same tokens with their context cut to different lengths.

    Args:
        model: The model.
        blocks: `(N, T)`, consecutive blocks of a text.
        contexts: Numbers of tokens, multiples of `PARTS` that divide the largest of them. The tokens in a window that
            are counted have at most this many tokens before them, and at least seven eighths as many.
        num_targets: About how many tokens to predict, spread evenly over the text.

    Returns:
        The loss for each of `contexts`, in nats per token.
    """
    text, longest = blocks.flatten(), max(contexts)
    chunk = longest // PARTS  # the tokens that one window of the longest context predicts
    places = (len(text) - longest - chunk) // chunk
    count = min(places, max(1, num_targets // chunk))
    starts = longest + chunk * torch.linspace(0, places, count).long().unique()
    losses = {}
    for context in contexts:
        size = context // PARTS
        begins = (starts[:, None] + torch.arange(0, chunk, size)).flatten()
        total = 0.0
        for part in begins.split(max(1, 2048 // context)):
            targets = torch.stack([text[begin : begin + size] for begin in part])
            inputs = torch.stack([text[begin + size - 1 - context : begin + size - 1] for begin in part])
            logits = model(inputs, use_cache=False).logits[:, -size:]
            total += F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum").item()
        losses[str(context)] = total / (len(begins) * size)
    return losses


@torch.no_grad()
def logits_of(model: PreTrainedModel, ids: torch.Tensor) -> Iterator[torch.Tensor]:
    """The attention logits of every layer, `(H, T, T)` without a mask, for one text `(T,)`."""
    logits = []

    def watching(layer):
        attend = layer.attend

        def multiply_and_attend(query, key, *args, **kwargs):  # after QK-norm and rotary embeddings
            keys = key.repeat_interleave(layer.num_key_value_groups, dim=1)
            logits.append((query @ keys.transpose(-1, -2))[0] * layer.scaling)
            return attend(query, key, *args, **kwargs)

        return multiply_and_attend

    layers = attention_layers(model)
    for layer in layers:
        layer.attend = watching(layer)
    try:
        model(ids[None], use_cache=False)
    finally:
        for layer in layers:
            del layer.attend
    yield from logits


def parts_of_logits(model: PreTrainedModel, blocks: torch.Tensor) -> dict[str, list[list[float]]]:
    """
    Divides the attention logits `z_ij` of every head into the mean over texts, which depends on the positions `i` and
    `j` alone, and the rest, which depends on the content.

    Args:
        model: The model.
        blocks: `(N, T)` texts, at least two.

    Returns:
        Lists `(L, H)`: `max_logit`, the largest |logit| of pairs that may attend; `max_position`, that of the mean
        over texts; `max_content`, that of the rest; and `position_share`, the share of the variance over pairs and
        texts that is between pairs, without the part that is due to the number of texts being finite.
    """
    config, (count, length) = model.config, blocks.shape
    every, near = (Visibility(length, length, window=window).dense()[0, 0] for window in (None, config.sliding_window))
    masks = [
        torch.stack([every if head < num_global else near for head in range(config.num_attention_heads)])
        for num_global in config.num_global_heads_per_layer
    ]
    means = [torch.zeros(mask.shape) for mask in masks]
    for ids in blocks:
        for mean, logits in zip(means, logits_of(model, ids)):
            mean += logits / count
    variances = [torch.zeros(mask.shape) for mask in masks]
    tops = torch.zeros(3, len(masks), config.num_attention_heads)
    for ids in blocks:
        for i, (mask, mean, logits) in enumerate(zip(masks, means, logits_of(model, ids))):
            content = (logits - mean) * mask
            variances[i] += content.square() / (count - 1)
            largest = [(part * mask).abs().amax((1, 2)) for part in (logits, mean, content)]
            tops[:, i] = torch.maximum(tops[:, i], torch.stack(largest))
    shares = []
    for mask, mean, variance in zip(masks, means, variances):
        pairs = mask.sum((1, 2))
        center = (mean * mask).sum((1, 2)) / pairs
        noise = variance.sum((1, 2)) / pairs
        between = ((mean - center[:, None, None]) * mask).square().sum((1, 2)) / pairs
        between = (between - noise / count).clamp(min=0.0)
        shares.append(between / (between + noise))
    names = ("max_logit", "max_position", "max_content", "position_share")
    return {name: _rounded(values) for name, values in zip(names, (*tops, torch.stack(shares)))}


def _rounded(values: torch.Tensor) -> list[list[float]]:
    return [[round(value, 4) for value in row] for row in values.tolist()]


def statistics_of(model: PreTrainedModel, blocks: torch.Tensor, far: int) -> dict[str, list]:
    """The figures of `lsgpt inspect` for every layer and head, and which heads are local."""
    statistics = attention_statistics(model, blocks, far)
    figures = {name: _rounded(getattr(statistics, name)) for name in FIGURES}
    return {"is_local": statistics.is_local.tolist(), **figures}


def uniform_figures(length: int, window: int, far: int) -> dict[str, float]:
    """The figures of a head that attends equally to the last `window` keys, in blocks of `length` tokens."""
    visible = Visibility(length, length, window=window).dense()[0, 0]
    return dict(zip(FIGURES, head_figures(visible / visible.sum(-1, keepdim=True), visible, far).tolist()))


def over_heads(looks: Mapping[str, list], name: str, local: bool) -> float:
    """The mean of a figure of `statistics_of` over the local heads or over the others; NaN if there are none."""
    heads = zip(chain.from_iterable(looks[name]), chain.from_iterable(looks["is_local"]))
    values = [value for value, is_local in heads if is_local == local and value is not None]
    return sum(values) / len(values) if values else math.nan


def load(folder: Path) -> PreTrainedModel:
    """Loads a checkpoint for measurements."""
    return AutoModelForCausalLM.from_pretrained(folder).eval()
