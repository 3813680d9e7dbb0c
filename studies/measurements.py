"""
Measurements on checkpoints of trained models: the loss with a shorter context, the parts of the attention logits that
come from positions and from content, and where heads look. Shapes: N texts of T tokens, L layers of H heads.
"""

from collections.abc import Mapping, Sequence

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel

from lsgpt.conversion.heads import replaced
from lsgpt.inspection import FIGURES, head_figures
from lsgpt.modeling_lsgpt import Visibility, attention_layers
from lsgpt.training.metrics import IGNORED_LABEL, total_loss


def mean_loss(model: PreTrainedModel, blocks: torch.Tensor, begin: int = 0) -> float:
    """The mean loss of the tokens of `(N, T)` blocks from the position `begin` on, in nats per token."""
    labels = blocks.clone()
    labels[:, :begin] = IGNORED_LABEL
    batches = zip(blocks.split(4), labels.split(4))
    total, count = total_loss(model, ({"input_ids": ids, "labels": targets} for ids, targets in batches))
    return total / count


@torch.no_grad()
def losses_by_context(
    model: PreTrainedModel, blocks: torch.Tensor, contexts: Sequence[int], num_targets: int = 32_768
) -> dict[str, float]:
    """
    The mean loss of the same tokens with their context cut to different lengths, in nats per token.

    Args:
        model, blocks: The model, and consecutive blocks of a text, `(N, T)`.
        contexts: Numbers of tokens, multiples of 8 that divide the largest of them. The last eighth of the tokens of a
            window is counted, so that they have at most this many tokens before them, and seven eighths at least.
        num_targets: About how many tokens to predict, spread evenly over the text.
    """
    text, longest = blocks.flatten(), max(contexts)
    chunk = longest // 8  # the tokens that one window of the longest context predicts
    places = (len(text) - longest - chunk) // chunk
    count = min(places, max(1, num_targets // chunk))
    starts = longest + chunk * torch.linspace(0, places, count).long().unique()
    losses = {}
    for context in contexts:
        size = context // 8
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
def logits_of(model: PreTrainedModel, ids: torch.Tensor) -> list[torch.Tensor]:
    """The attention logits of every layer, `(H, T, T)` without a mask, for one text `(T,)`."""
    logits = []

    def watching(layer, _):
        attend = layer.attend

        def watch(query, key, *args, **kwargs):  # after QK-norm and rotary embeddings
            keys = key.repeat_interleave(layer.num_key_value_groups, dim=1)
            logits.append((query @ keys.transpose(-1, -2))[0] * layer.scaling)
            return attend(query, key, *args, **kwargs)

        return watch

    with replaced(attention_layers(model), "attend", watching):
        model(ids[None], use_cache=False)
    return logits


def parts_of_logits(model: PreTrainedModel, blocks: torch.Tensor) -> dict[str, list[list[float]]]:
    """
    Divides the attention logits `z_ij` of every head, in two texts or more `(N, T)`, into the mean over texts, which
    depends on the positions `i` and `j` alone, and the rest, which depends on the content.

    Returns:
        Lists `(L, H)`: `max_logit`, the largest |logit| of pairs that may attend; `max_position`, that of the mean
        over texts; `max_content`, that of the rest; and `position_share`, the share of the variance over pairs and
        texts that is between pairs, without the part that is due to the number of texts being finite.
    """
    config, (count, length) = model.config, blocks.shape
    every, near = (visible_pairs(length, window) for window in (None, config.sliding_window))
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
    return {name: values.tolist() for name, values in zip(names, (*tops, torch.stack(shares)))}


def uniform_figures(length: int, window: int, far: int) -> dict[str, float]:
    """The figures of a head that attends equally to the last `window` keys, in blocks of `length` tokens."""
    visible = visible_pairs(length, window)
    return dict(zip(FIGURES, head_figures(visible / visible.sum(-1, keepdim=True), visible, far).tolist()))


def over_heads(looks: Mapping[str, list], local: bool) -> dict[str, float]:
    """The means of `FIGURES` over the heads that `is_local`, or over the others; NaN if there are none."""
    chosen = torch.tensor(looks["is_local"]) == local
    return {name: torch.tensor(looks[name], dtype=torch.double)[chosen].nanmean().item() for name in FIGURES}


def visible_pairs(length: int, window: int | None = None) -> torch.Tensor:
    """Pairs of queries and keys in a causal softmax, limited to the last `window` keys if given: `(T, T)` booleans."""
    return Visibility(length, length, window=window).dense()[0, 0]
