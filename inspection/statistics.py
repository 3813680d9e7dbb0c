"""
Statistics of where each head of a decoder looks.

Shapes: T tokens, H query heads, L layers with attention. Queries are rows `i`, keys are columns `j`, and `A` is the
matrix of a head's attention weights, as computed by the model's `eager` engine.
"""

import inspect
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from lsgpt.modeling_lsgpt import attention_layers, is_lsgpt
from lsgpt.modeling_lsgpt.configuration_lsgpt import LOCAL
from lsgpt.modeling_lsgpt.visibility_lsgpt import HIDDEN
from lsgpt.telemetry import causal_attention_layers


SINK = 0.3
"""A head with a larger share of its attention on the first token is a sink head (arXiv:2410.10781, section 3)."""

FAR = 128
"""Default for `far` in models without local heads, in tokens."""


class AttentionStatistics(NamedTuple):
    """
    Figures of every head, float64 `(L, H)` on the CPU, in the model's order of heads (in LSGPT, global heads first).

    Each is the mean over blocks of text, and over the queries of a block for which it is defined. It is NaN if there
    are no such queries, and in the places that remain empty if a layer has fewer heads than others.
    """

    layers: list[int]
    """The numbers of the layers, with gaps for layers without attention."""
    is_local: torch.Tensor
    """Whether the head has a window; bool."""
    far: int
    """Keys at a distance of `far` tokens or more are far. They are outside a window of `far` tokens."""
    distance: torch.Tensor
    """`sum A (i - j) / sum A`, in tokens (arXiv:1906.04284)."""
    entropy: torch.Tensor
    """
    `-sum_j p log p / log n_i` with `p = A / sum_j A` and `n_i` the number of keys that query `i` may see: 0 means that
    all attention is on one key, 1 that it is uniform. Only queries that see two or more keys count.
    """
    effective_rank: torch.Tensor
    """`exp(-sum_k s_k log s_k)`, `A`'s singular values `s_k` scaled to sum to 1: 1 to T (Roy and Vetterli 2007)."""
    first_token: torch.Tensor
    """`A` on the first token of the block (arXiv:2410.10781). In local heads, only the first queries see it."""
    learned_sink: torch.Tensor
    """`1 - sum_j A`: the share of a learned sink, which is not a key. Exactly 0 in layers without sinks."""
    far_mass: torch.Tensor
    """`sum A` over far keys, for queries that have any."""
    far_mass_without_first: torch.Tensor
    """The same without the first token, which may also attract attention when a head finds nothing to attend to."""
    far_entropy: torch.Tensor
    """`entropy` among far keys without the first token: attention to the far past is sparse at 0 and dense at 1."""

    @property
    def is_sink(self) -> torch.Tensor:
        """Heads with more than 0.3 of their attention on the first token; bool `(L, H)`."""
        return self.first_token > SINK

    def figures(self) -> dict[str, torch.Tensor]:
        """The figures by name, without `learned_sink` if the model has none."""
        names = [name for name in FIGURES if name != "learned_sink" or self.learned_sink.nan_to_num().any()]
        return {name: getattr(self, name) for name in names}


FIGURES = {
    "distance": ("distance", "mean distance of the keys from the query, in tokens, weighted by attention"),
    "entropy": ("entropy", "how evenly a query's attention is spread over the keys that it may see: 0 is all on one "
    "key, 1 the same on all"),
    "effective_rank": ("effective rank", "how many directions the attention matrix has: 1 where all queries look at "
    "the same, as many as there are tokens where each looks at a key of its own"),
    "first_token": ("first token", f"share of attention on the block's first token; above {SINK:.0%}, the head is a "
    "*sink head*"),
    "learned_sink": ("learned sink", "share of attention that goes to the head's learned sink, which is not a token: "
    "the weights of the keys sum to the rest"),
    "far_mass": ("far", "share of attention on far keys, of queries that have any"),
    "far_mass_without_first": ("far, not first", "the same without the first token"),
    "far_entropy": ("far entropy", "how evenly that is spread over the far keys: 0 is sparse, 1 is dense"),
}  # fmt: skip
"""Maps each figure to its displayed name and its definition."""

SHARES = {"first_token", "learned_sink", "far_mass", "far_mass_without_first"}
"""The figures that are shares of attention."""


def attention_statistics(model: nn.Module, input_ids: torch.Tensor, far: int | None = None) -> AttentionStatistics:
    """
    Measures where the heads of a decoder look.

    Only the weights of one layer and one block are in memory at a time. The model runs in evaluation mode with its
    `eager` engine; its previous mode and engine are restored afterwards.

    Args:
        model: LSGPT, or a Transformers decoder with causal attention; possibly wrapped (DDP, PEFT).
        input_ids (`(N, T)`): Blocks of text without padding.
        far: See `AttentionStatistics.far`; by default the window of LSGPT's local heads, or 128 without local heads,
            but at most half of a block.

    Raises:
        ValueError: There are no blocks of two or more tokens, no keys are far, or the model is not a decoder or does
            not return finite attention weights.

    ```python
    >>> statistics = attention_statistics(model, blocks)
    >>> statistics.distance[~statistics.is_local].mean()  # of global heads
    ```
    """
    if input_ids.ndim != 2 or not len(input_ids) or input_ids.shape[1] < 2:
        raise ValueError(
            "`input_ids` must have shape (blocks, tokens) with at least one block of at least two tokens; got "
            f"{tuple(input_ids.shape)}"
        )
    length = input_ids.shape[1]
    far = min(_window(model) or FAR, length // 2) if far is None else far
    if not 1 <= far < length:
        raise ValueError(f"`far` must be between 1 and {length - 1}, because blocks have {length} tokens; got {far}")
    blocks = []
    for ids in tqdm(input_ids, desc="Attention", unit="block", leave=False):
        layers: list[LayerAttention] = []
        figures: list[torch.Tensor] = []

        def measure(layer, layers=layers, figures=figures):
            pairs = layer.visible.expand_as(layer.weights)
            heads = zip(layer.weights, pairs, layer.has_sink.tolist())
            figures.append(torch.stack([head_figures(w, visible, far, sink) for w, visible, sink in heads]).cpu())
            layers.append(layer._replace(weights=None, visible=None))

        visit_layers(model, ids, measure)
        blocks.append(nn.utils.rnn.pad_sequence(figures, batch_first=True, padding_value=math.nan))
    is_local = nn.utils.rnn.pad_sequence([layer.is_local for layer in layers], batch_first=True)
    means = torch.stack(blocks).nanmean(0)
    return AttentionStatistics([layer.number for layer in layers], is_local, far, *means.unbind(-1))


def head_figures(weights: torch.Tensor, visible: torch.Tensor, far: int, has_sink: bool = False) -> torch.Tensor:
    """
    The figures of one head on one block.

    Args:
        weights (`(T, T)`): Its attention weights, queries by keys.
        visible (`(T, T)`): Which keys a query may see; bool.
        far: See `AttentionStatistics`.
        has_sink: Whether the head has a learned sink, which takes the rest if a query's weights sum to less than 1.

    Returns:
        The figures in the order of `FIGURES`, float64.
    """
    weights = weights.double()
    positions = torch.arange(len(weights), device=weights.device)
    distances = positions[:, None] - positions
    is_far = distances >= far
    far_weights = (weights * is_far)[far:]  # earlier queries have no far keys
    singular = torch.linalg.svdvals(weights)
    return torch.stack(
        [
            (weights * distances).sum() / weights.sum(),
            mean_entropy(weights, visible),
            torch.special.entr(singular / singular.sum()).sum().exp(),
            weights[:, 0].mean(),
            1 - weights.sum(-1).mean() if has_sink else weights.new_zeros(()),
            far_weights.sum(-1).mean(),
            far_weights[:, 1:].sum(-1).mean(),
            mean_entropy(weights, visible & is_far & (positions > 0)),
        ]
    )


def mean_entropy(weights: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    """
    The mean normalized entropy of attention among `pairs`.

    A query's weights on its keys in `pairs` are scaled to sum to 1, and their entropy is divided by the logarithm of
    the number of these keys. Queries with fewer than two such keys, or without any weight on them, do not count.
    """
    weights = weights * pairs
    counts, totals = pairs.sum(-1), weights.sum(-1)
    entropies = torch.special.entr(weights / totals[:, None]).sum(-1) / counts.double().log()
    return entropies[(counts > 1) & (totals > 0)].mean()


class LayerAttention(NamedTuple):
    """The attention of one layer on one text."""

    number: int
    """The layer's number."""
    weights: torch.Tensor
    """`(H, T, T)`, in the model's precision."""
    visible: torch.Tensor
    """`(1 or H, T, T)`: which keys a query may see; bool."""
    is_local: torch.Tensor
    """`(H,)`: LSGPT's local heads; in other models, heads whose window is shorter than this text. On the CPU."""
    has_sink: torch.Tensor
    """`(H,)`: whether a head has a learned sink, which takes the rest if weights sum to less than 1. On the CPU."""


@torch.no_grad()
def visit_layers(model: nn.Module, input_ids: torch.Tensor, visit: Callable[[LayerAttention], None]):
    """
    Runs a model on one text, and calls `visit` with the attention of each layer in turn.

    Unless `visit` keeps the weights, their memory is freed before the attention of the next layer.

    Args:
        model: See `attention_statistics`.
        input_ids (`(T,)`): The text.
        visit: Called once for each layer.

    Raises:
        ValueError: The model is not a decoder, or does not return finite attention weights.
    """
    layers = attention_layers(model) if is_lsgpt(model) else causal_attention_layers(model)
    decoder = next(module for module in model.modules() if isinstance(module, PreTrainedModel))
    shape, visited = (len(input_ids), len(input_ids)), []

    def ask(layer, args, kwargs):
        return args, {**kwargs, "output_attentions": True}

    def show(layer, args, kwargs, output):
        weights = output[1] if isinstance(output, tuple) and len(output) > 1 else None
        arguments = inspect.signature(layer.forward).bind(*args, **kwargs).arguments
        mask = arguments.get("attention_mask")
        of_kinds = getattr(mask, "visibility", None)  # LSGPT has masks of several kinds
        has_mask = isinstance(mask, torch.Tensor) and mask.shape[-2:] == shape
        if not isinstance(weights, torch.Tensor) or weights.shape[-2:] != shape or not (of_kinds or has_mask):
            raise ValueError(
                "`model` must have layers that return attention weights and take an attention mask with "
                f'attn_implementation="eager"; {type(layer).__name__} does not'
            )
        number = getattr(layer, "layer_idx", len(visited))
        visited.append(number)
        if not weights.isfinite().all():
            raise ValueError(f"`model` must have finite attention weights; those of layer {number} are not")
        if of_kinds:
            groups = [group for group in layer.head_groups for _ in range(group.num_heads)]
            visible = torch.cat([of_kinds[group.kind].dense()[0] for group in groups])
            is_local = torch.tensor([group.kind == LOCAL for group in groups])
        else:
            visible = mask[0] if mask.dtype == torch.bool else mask[0] > HIDDEN
            is_local = ~visible[:, -1, 0].cpu().expand(weights.shape[1])
        visible = visible.to(weights.device)
        if (weights[0] * ~visible).any():
            raise ValueError(
                f'`model` must be causal with "eager" attention; {type(layer).__name__} gives weight to tokens that a '
                'query may not see. Load the model with attn_implementation="eager"'
            )
        has_sink = torch.full_like(is_local, getattr(layer, "sinks", None) is not None)
        has_sink = has_sink & is_local if of_kinds else has_sink  # in LSGPT, local heads only
        visit(LayerAttention(number, weights[0], visible, is_local, has_sink))
        return (output[0], None, *output[2:])

    engine, was_training = decoder.config._attn_implementation, decoder.training
    handles = [layer.register_forward_pre_hook(ask, with_kwargs=True) for layer in layers]
    handles += [layer.register_forward_hook(show, with_kwargs=True) for layer in layers]
    try:
        decoder.set_attn_implementation("eager")
        decoder.eval().base_model(input_ids=input_ids[None].to(decoder.device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
        decoder.train(was_training)
        decoder.set_attn_implementation(engine)
    if not visited:
        raise ValueError(f"`model` must have attention; {type(decoder).__name__} never called its attention layers")


def _window(model: nn.Module) -> int | None:
    """The window of an LSGPT's local heads; `None` if there are none, and for other models."""
    layers = attention_layers(model) if is_lsgpt(model) else []
    windows = (layer.config.sliding_window for layer in layers for group in layer.head_groups if group.kind == LOCAL)
    return next(windows, None)
