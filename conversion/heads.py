"""Makes heads of a pretrained model local: measures how much they would change, chooses some, and reorders them.

Shapes: L layers, H query heads, H_kv key/value heads, G query heads per key/value head, D `head_dim`, n tokens.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from tqdm.auto import tqdm

from lsgpt.modeling_lsgpt import (
    GLOBAL,
    LOCAL,
    LSGPTAttention,
    LSGPTConfig,
    LSGPTForCausalLM,
    Visibility,
    attention_layers,
)

from .weights import model_from_weights


BALANCES = ("overall", "layer")

QUERIES_AT_ONCE = 128
"""Number of queries of one layer whose attention weights are in memory at the same time."""

SINK_LOGITS = torch.arange(-8.0, 4.25, 0.25, dtype=torch.float64)
"""The sink logits to choose from, relative to the log-sum-exp of a head's logits."""


class Sinks(NamedTuple):
    """
    Replacements for the tokens that a head no longer sees when it becomes local. Its output is then
    `sum(exp(z) * v) / (sum(exp(z)) + exp(logit)) + value`, with sums over the keys in its window.
    """

    logits: torch.Tensor
    """`(L, H)`, in the softmax's denominator."""
    values: torch.Tensor
    """`(L, H, D)`, added to the head's output, as part of the output projection's bias."""


class HeadChanges(NamedTuple):
    """The result of `measure_changes`, in float64 on the CPU."""

    text: torch.Tensor
    """
    `(L, H_kv)`, the squared change on text of the outputs of a key/value head's query heads, summed up and divided by
    the sum of squares of all outputs of the layer, because layers have different scales.
    """
    retrieval: torch.Tensor | None
    """`(L, H_kv)`, the same where a passage asks for something from far back; `None` without passages."""
    sinks: Sinks
    """The sinks that minimize the change on text."""

    @property
    def scores(self) -> torch.Tensor:
        """`(L, H_kv)`, each key/value head's share of the total change, averaged over both kinds; they sum to 1."""
        changes = [self.text] if self.retrieval is None else [self.text, self.retrieval]
        return sum(change / change.sum() for change in changes) / len(changes)


def with_global_heads(
    model: LSGPTForCausalLM, global_kv_heads: Sequence[Sequence[int]], window: int, sinks: Sinks | None = None
) -> LSGPTForCausalLM:
    """
    Returns the same model with some heads global, which come first, and all others local.

    Permuting the key/value heads of a layer together with the query heads that they serve (rows of the query, key and
    value projections, columns of the output projection) changes nothing. So the logits differ only by what the window
    hides and what the sinks put in its place.

    Args:
        model: A model whose layers have only global heads, or only local ones, which stay local. It is not changed,
            and the new model shares all tensors that are equal.
        global_kv_heads: For each layer, the key/value heads that stay global, with all query heads that they serve.
        window: Number of keys that a query of a local head sees, including its own.
        sinks: Sinks for all heads; only those of local heads are used. A model trained with local heads needs none.

    Raises:
        ValueError: If layers of the model have both kinds of heads, or lack some of the heads; if the window is below
            2, or is not that of the layers with local heads; if there are such layers, and sinks.
    """
    if set(model.config.num_global_heads_per_layer) != {0, model.config.num_attention_heads}:
        _check_all_global(model)
    config, weights = copy.deepcopy(model.config), model.state_dict()
    _check_windowed_layers(config, global_kv_heads, window, sinks)
    num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
    query_heads = torch.arange(num_heads).view(num_kv_heads, -1)  # `(H_kv, G)`
    for layer, chosen in enumerate(global_kv_heads):
        if len(set(chosen)) < len(chosen) or not set(chosen) <= set(range(num_kv_heads)):
            raise ValueError(
                f"`global_kv_heads` must be different key/value heads from 0 to {num_kv_heads - 1}; got "
                f"{list(chosen)} for layer {layer}"
            )
        others = [head for head in range(num_kv_heads) if head not in chosen]
        prefix = f"model.layers.{layer}.self_attn."
        if sinks is not None and any(len(heads) < num_kv_heads for heads in global_kv_heads):
            local, weight = query_heads[others].flatten(), weights[f"{prefix}o_proj.weight"]
            if others:
                weights[f"{prefix}sinks"] = sinks.logits[layer, local].to(weight)
            columns = weight.double().unflatten(1, (num_heads, -1))[:, local.to(weight.device)].flatten(1)
            bias = columns @ sinks.values[layer, local].flatten().to(columns)
            weights[f"{prefix}o_proj.bias"] = (bias + weights.get(f"{prefix}o_proj.bias", 0)).to(weight.dtype)
        kv_order = torch.tensor([*chosen, *others])
        q_order = query_heads[kv_order].flatten()
        # The output projection's bias does not belong to heads.
        orders = {"q": q_order, "k": kv_order, "v": kv_order}
        permuted = {f"{x}_proj.{kind}": (0, order) for x, order in orders.items() for kind in ("weight", "bias")}
        if config.qk_norm == "all_heads":  # otherwise these norms are shared by all heads
            permuted |= {"q_norm.weight": (0, q_order), "k_norm.weight": (0, kv_order)}
        for name, (dim, order) in {**permuted, "o_proj.weight": (1, q_order)}.items():
            if prefix + name in weights:
                heads = weights[prefix + name].unflatten(dim, (len(order), config.head_dim))
                weights[prefix + name] = heads.index_select(dim, order.to(heads.device)).flatten(dim, dim + 1)
    counts = [len(chosen) * query_heads.shape[1] for chosen in global_kv_heads]
    config.num_global_heads = counts[0] if counts == counts[:1] * config.num_hidden_layers else counts
    config.sliding_window = window
    # With all heads global, `attention_sinks` may be set, but there are no sinks that the local heads could take over.
    config.attention_sinks = sinks is not None and min(counts) < num_heads
    if config.attention_sinks and not config.has_bias("o_proj"):
        parts = config.use_bias if isinstance(config.use_bias, list) else []
        config.use_bias = [*parts, "o_proj"]
    config.validate_architecture()
    return model_from_weights(config, weights)


@torch.no_grad()
def measure_changes(
    model: LSGPTForCausalLM,
    blocks: Iterable[torch.Tensor],
    window: int,
    passages: Iterable[tuple[torch.Tensor, int]] = (),
) -> HeadChanges:
    """
    Measures how much the output of each head changes when it becomes local, with the sinks that change it least.

    The forward passes are those of the unchanged model. In addition, each layer's attention is computed over all keys
    and over the window, for `QUERIES_AT_ONCE` queries at a time.

    Args:
        model: A model whose heads are all global.
        blocks: Token ids, `(n,)` each.
        window: Number of keys that a query of a local head sees, including its own.
        passages: Token ids `(n,)`, each with the number of tokens at the end whose prediction counts.

    Raises:
        ValueError: If the model has local heads.
    """
    _check_all_global(model)
    layers = attention_layers(model)
    # For the choice, all queries count the same. For the sinks, early queries count more, because the outputs of a
    # token's heads reach all later tokens. Otherwise, sinks change the first token, which gets much of a pretrained
    # model's attention, and ruin everything after it.
    text, fitted = ([_Moments() for _ in layers] for _ in range(2))
    rows = ((ids, torch.stack([1 / torch.arange(1, len(ids) + 1), torch.ones(len(ids))])) for ids in blocks)
    _collect(model, rows, window, list(zip(fitted, text)))
    fits = [moments.fit() for moments in fitted]
    retrieval = [_Moments(moments.logits) for moments in fitted]
    _collect(model, ((ids[:-1], torch.ones(1, length)) for ids, length in passages), window, list(zip(retrieval)))

    def share(moments: list[_Moments]) -> torch.Tensor:
        changes = [each.change(index, value) / each.outputs for each, (index, value) in zip(moments, fits)]
        return torch.stack(changes).unflatten(1, (model.config.num_key_value_heads, -1)).sum(2)

    logits = [moments.logits.gather(1, index[:, None])[:, 0] for moments, (index, _) in zip(fitted, fits)]
    sinks = Sinks(torch.stack(logits), torch.stack([value for _, value in fits]))
    return HeadChanges(share(text), share(retrieval) if retrieval[0].total else None, sinks)


class _Moments:
    """
    Sums over queries that determine how much the heads of a layer change, for any sinks.

    A head returns `f` over all keys, and `w` over its window alone. With a sink of logit `s` and value `c`, it returns
    `g * w + c` with `g = sigmoid(lse - s)`, where `lse` is the log-sum-exp of the logits in the window. The change is
    `sum |f - g w - c|^2 = sum |f|^2 - 2 sum g f.w + sum g^2 |w|^2 - 2 c . sum (f - g w) + total * |c|^2`.
    All sums are over queries, which may have weights. Those with `g` are computed for every sink logit of a grid.
    """

    def __init__(self, logits: torch.Tensor | None = None):
        self.logits = logits
        """`(H, K)`, the grid of sink logits; `None` until the first block shows the range of a head's logits."""
        self.total = 0.0
        """Sum of the queries' weights."""
        self.outputs = 0.0
        """Sum of the squared outputs over all keys."""
        self.squares = torch.zeros(1, 1, dtype=torch.float64)  # `(H, K)` once there are queries
        self.sums = torch.zeros(1, 1, 1, dtype=torch.float64)  # `(H, K, D)`

    def add(self, full: torch.Tensor, local: torch.Tensor, lse: torch.Tensor, weights: torch.Tensor):
        """
        Adds queries: their outputs over all keys and over the window, `(H, T, D)` each, the log-sum-exp over the
        window, `(H, T)`, and their weights, `(T,)`.
        """
        self.total += weights.sum().item()
        self.outputs += torch.einsum("htd,t->", full.double().square(), weights).item()
        gates = (lse[..., None] - self.logits[:, None].to(lse)).sigmoid()  # `(H, T, K)`
        crossed, squared = (full * local).sum(-1, keepdim=True), local.square().sum(-1, keepdim=True)
        squares = gates * (gates * squared - 2 * crossed) + full.square().sum(-1, keepdim=True)
        self.squares = self.squares + torch.einsum("htk,t->hk", squares.double(), weights).cpu()
        weights = weights[:, None].to(full)
        sums = (full * weights).sum(1)[:, None] - (gates * weights).transpose(1, 2) @ local
        self.sums = self.sums + sums.double().cpu()

    def fit(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Finds the sinks that change the heads least: indices into the grid, `(H,)`, and values, `(H, D)`."""
        values = self.sums / self.total
        index = (self.squares - self.total * values.square().sum(-1)).argmin(1)
        return index, values[torch.arange(len(index)), index]

    def change(self, index: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Computes the summed squared changes `(H,)`, with sinks as returned by `fit`."""
        heads = torch.arange(len(index))
        shift = value * (self.total * value - 2 * self.sums[heads, index])
        return (self.squares[heads, index] + shift.sum(-1)).clamp(min=0)


def _collect(
    model: LSGPTForCausalLM,
    inputs: Iterable[tuple[torch.Tensor, torch.Tensor]],
    window: int,
    moments: list[tuple[_Moments, ...]],
):
    """
    Adds the last queries of each input to the moments of each layer. An input consists of token ids `(n,)` and weights
    for as many queries as are added, with one row for each of the layer's moments.
    """
    weights = torch.empty(0, 0)

    def measuring(layer: LSGPTAttention, of_layer: tuple[_Moments, ...]) -> Callable:
        attend = layer.attend

        def measure_and_attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args, **kwargs):
            length = key.shape[2]
            if of_layer[0].logits is None:
                _, lse = _attend(layer, query, key, value, max(length - QUERIES_AT_ONCE, 0), length)
                for each in of_layer:
                    each.logits = lse.double().mean(1, keepdim=True).cpu() + SINK_LOGITS
            start = length - weights.shape[1]
            for part in weights.to(key.device, torch.float64).split(QUERIES_AT_ONCE, dim=1):
                stop = start + part.shape[1]
                full, _ = _attend(layer, query, key, value, start, stop)
                local, lse = _attend(layer, query, key, value, start, stop, window)
                for each, row in zip(of_layer, part):
                    each.add(full, local, lse, row)
                start = stop
            return attend(query, key, value, *args, **kwargs)

        return measure_and_attend

    layers = attention_layers(model)
    for layer, of_layer in zip(layers, moments):
        layer.attend = measuring(layer, of_layer)
    try:
        for ids, weights in tqdm(inputs, desc="Measuring heads", leave=False):  # noqa: B007 (`measuring` reads it)
            model(input_ids=ids[None].to(model.device), use_cache=False, logits_to_keep=1)
    finally:
        for layer in layers:
            del layer.attend


def _attend(
    layer: LSGPTAttention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    start: int,
    stop: int,
    window: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Computes the attention of the queries from `start` to `stop` over all keys or over those in a window. Returns the
    outputs `(H, T, D)` and the log-sum-exp of the logits `(H, T)`, in float32 or better.
    """
    begin = 0 if window is None else max(start - window + 1, 0)
    dtype = torch.promote_types(query.dtype, torch.float32)
    query = query[0, :, start:stop].unflatten(0, (-1, layer.num_key_value_groups)).to(dtype)
    key, value = (x[0, :, None, begin:stop].to(dtype) for x in (key, value))
    logits = query @ key.transpose(-1, -2) * layer.scaling  # `(H_kv, G, T, S)`
    if layer.softcap is not None:
        logits = layer.softcap * torch.tanh(logits / layer.softcap)
    visibility = Visibility(stop - start, stop - begin, start, begin, window, device=logits.device)
    logits = logits.masked_fill(~visibility.dense(), -torch.inf)
    lse = logits.logsumexp(-1, keepdim=True)
    return ((logits - lse).exp() @ value).flatten(0, 1), lse[..., 0].flatten(0, 1)


def _check_windowed_layers(
    config: LSGPTConfig, global_kv_heads: Sequence[Sequence[int]], window: int, sinks: Sinks | None
):
    """Raises `ValueError` for what cannot be done to a model some of whose layers have a window already."""
    is_windowed = [count == 0 for count in config.num_global_heads_per_layer]
    if any(is_windowed) and window != config.sliding_window:
        raise ValueError(
            f"`window` must be {config.sliding_window}, as in the layers of the model that have a window; got {window}"
        )
    if any(is_windowed) and sinks is not None:
        raise ValueError("`sinks` must be None for a model with layers that have a window, which are to get none")
    for layer, (stays_local, chosen) in enumerate(zip(is_windowed, global_kv_heads)):
        if stays_local and chosen:
            raise ValueError(
                f"`global_kv_heads` must be empty for layer {layer}, whose heads have a window; got {list(chosen)}"
            )
        if not (stays_local or chosen) and LOCAL in (config.rope_parameters or {}):
            raise ValueError(
                f"`global_kv_heads` must have at least one head for layer {layer}, because the layers without global "
                "heads have another rotary embedding; got none"
            )


def _check_all_global(model: LSGPTForCausalLM):
    config = model.config
    if config.layer_types != [GLOBAL] * config.num_hidden_layers:
        raise ValueError(
            f"`model` must have {config.num_attention_heads} global heads in each layer; got `num_global_heads` "
            f"{config.num_global_heads}"
        )


def choose_global_heads(scores: torch.Tensor, count: int, balance: str = "overall") -> list[list[int]]:
    """
    Chooses the key/value heads that stay global: those that would change most if they became local.

    Args:
        scores (`(L, H_kv)`): Such as `HeadChanges.scores`.
        count: Number of key/value heads in the whole model that stay global.
        balance: `"overall"` takes the heads with the highest scores in the whole model, so their number may differ
            between layers; `"layer"` takes the same number in each layer.

    Returns:
        For each layer, the chosen heads in ascending order.

    Raises:
        ValueError: If there is no such balance, or the count cannot be divided evenly among the layers.
    """
    if balance not in BALANCES:
        raise ValueError(f"`balance` must be one of {', '.join(BALANCES)}; got {balance!r}")
    num_layers = len(scores)
    if balance == "layer":
        if count % num_layers:
            raise ValueError(
                f"`global_kv_heads` must be a multiple of the {num_layers} layers if `balance` is layer; got {count}. "
                "Choose another number, or set `balance` to overall"
            )
        order = scores.argsort(dim=1, descending=True, stable=True)
        return order[:, : count // num_layers].sort(dim=1).values.tolist()
    chosen = torch.zeros(scores.numel(), dtype=torch.bool)
    chosen[scores.flatten().argsort(descending=True, stable=True)[:count]] = True
    return [row.nonzero().flatten().tolist() for row in chosen.view_as(scores)]
