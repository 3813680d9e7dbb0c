"""Makes heads of a pretrained model local: measures how much they would change, chooses some, and reorders them.

Shapes: L layers, H query heads, H_kv key/value heads, G query heads per key/value head, D `head_dim`, n tokens.
"""

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from tqdm.auto import tqdm

from lsgpt.modeling_lsgpt import (
    FULL_WINDOW,
    GLOBAL,
    LOCAL,
    LSGPTAttention,
    LSGPTConfig,
    LSGPTForCausalLM,
    Visibility,
    attention_layers,
)
from lsgpt.training.metrics import IGNORED_LABEL

from .weights import model_from_weights


BALANCES = ("overall", "layer")

QUERIES_AT_ONCE = 128
"""Number of queries of one layer whose attention weights are in memory at the same time."""

SINK_LOGITS = torch.arange(-8.0, 4.25, 0.25, dtype=torch.float64)
"""The sink logits to choose from, relative to the log-sum-exp of a head's logits in the window."""

ROUNDS = 20
"""Maximum number of times that values and logits of sinks are fitted to each other; a few are enough."""

TEXT_STRIDE = 8
"""
Distance between the tokens of a passage whose loss counts besides that of the answers. With more tokens, it would take
longer and hardly say more, because neighbours have similar losses.
"""


class Sinks(NamedTuple):
    """
    Replacements for the first tokens of a text, which a head no longer sees when it becomes local. The output of a
    query with a full window is then `(sum(exp(z) * v) + exp(logit) * value) / (sum(exp(z)) + exp(logit))`, with sums
    over the keys in its window. Other queries have the first tokens themselves, and no sink.
    """

    logits: torch.Tensor
    """`(L, H)`, in the softmax's denominator."""
    values: torch.Tensor
    """`(L, H_kv, D)`: the query heads of a key/value head share it, as they share the values of tokens."""


class HeadChanges(NamedTuple):
    """The result of `measure_changes`, in float64 on the CPU."""

    text: torch.Tensor
    """
    `(L, H_kv)`, the squared change on text of the outputs of a key/value head's query heads, summed up and divided by
    the sum of squares of all outputs of the layer, because layers have different scales.
    """
    retrieval: torch.Tensor | None
    """
    `(L, H_kv)`, how fast the loss rises as a key/value head becomes local, in nats, where a passage asks for something
    from far back, and in the rest of the passage; `None` without passages. It is negative if the loss falls.
    """
    sinks: Sinks
    """The sinks that minimize the change on text."""

    @property
    def scores(self) -> torch.Tensor:
        """`(L, H_kv)`, each key/value head's share of `retrieval`, or without passages of `text`."""
        changes = self.text if self.retrieval is None else self.retrieval
        return changes / changes.abs().sum()


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
            2, or is not that of the layers with local heads; if there are such layers, and sinks, given or its own.
    """
    if set(model.config.num_global_heads_per_layer) != {0, model.config.num_attention_heads}:
        _check_all_global(model)
    config, weights = copy.deepcopy(model.config), model.state_dict()
    if len(global_kv_heads) != config.num_hidden_layers:
        raise ValueError(
            f"`global_kv_heads` must have one list for each of the {config.num_hidden_layers} layers; got "
            f"{len(global_kv_heads)}"
        )
    _check_windowed_layers(config, global_kv_heads, window, sinks)
    num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
    query_heads = torch.arange(num_heads).view(num_kv_heads, -1)  # `(H_kv, G)`
    counts = [len(chosen) * query_heads.shape[1] for chosen in global_kv_heads]
    adds_sinks = sinks is not None and min(counts) < num_heads
    for layer, chosen in enumerate(global_kv_heads):
        if len(set(chosen)) < len(chosen) or not set(chosen) <= set(range(num_kv_heads)):
            raise ValueError(
                f"`global_kv_heads` must be different key/value heads from 0 to {num_kv_heads - 1}; got "
                f"{list(chosen)} for layer {layer}"
            )
        others = [head for head in range(num_kv_heads) if head not in chosen]
        prefix = f"model.layers.{layer}.self_attn."
        if adds_sinks:
            _add_sinks(weights, prefix, sinks.logits[layer], sinks.values[layer], query_heads, others)
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
    config.num_global_heads = counts[0] if counts == counts[:1] * config.num_hidden_layers else counts
    config.sliding_window = window
    # With all heads global, `attention_sinks` may be set, but there are no sinks that the local heads could take over.
    config.attention_sinks = FULL_WINDOW if adds_sinks else False
    if adds_sinks:
        parts = config.use_bias if isinstance(config.use_bias, list) else []
        added = [part for part in ("qkv_proj", "o_proj") if not config.has_bias(part)]
        config.use_bias = [*parts, *added] if added else config.use_bias
    config.validate_architecture()
    return model_from_weights(config, weights)


def _add_sinks(
    weights: dict[str, torch.Tensor],
    prefix: str,
    logits: torch.Tensor,
    values: torch.Tensor,
    query_heads: torch.Tensor,
    local_kv_heads: list[int],
):
    """
    Adds the sinks `(H,)` of a layer with their values `(H_kv, D)` to its weights. In the model, a sink has no value.
    So its value `c` is subtracted from the values of all tokens, in the bias of their projection, and added to the
    head's output, in the bias of the output projection: `sum(p * (v - c)) + c = sum(p * v) + (1 - sum(p)) * c`. For
    queries without the sink, the weights `p` sum to 1, and nothing changes.
    """
    local = query_heads[local_kv_heads].flatten()
    weight = weights[f"{prefix}o_proj.weight"]
    if local_kv_heads:
        weights[f"{prefix}sinks"] = logits[local].to(weight)
    values = values.to(weight.device, torch.float64, copy=True)
    values[[head for head in range(len(values)) if head not in local_kv_heads]] = 0.0
    of_queries = values.repeat_interleave(query_heads.shape[1], dim=0).flatten()
    added = {"v": -values.flatten(), "o": weight.double() @ of_queries, "k": torch.zeros(values.numel())}
    for name, bias in {**added, "q": torch.zeros(of_queries.numel())}.items():
        before = weights.get(f"{prefix}{name}_proj.bias")
        weights[f"{prefix}{name}_proj.bias"] = (bias if before is None else bias.to(before.device) + before).to(weight)


def measure_changes(
    model: LSGPTForCausalLM,
    blocks: Iterable[torch.Tensor],
    window: int,
    passages: Iterable[tuple[torch.Tensor, torch.Tensor]] = (),
) -> HeadChanges:
    """
    Measures how much the output of each head changes when it becomes local, with the sinks that change it least, and
    what this does to the loss.

    The outputs are those of the unchanged model. In addition, each layer's attention is computed over the window, for
    `QUERIES_AT_ONCE` queries at a time.

    Args:
        model: A model whose heads are all global.
        blocks: Token ids, `(n,)` each.
        window: Number of keys that a query of a local head sees, including its own.
        passages: Token ids and labels, `(n,)` each, see `Passage.with_questions`.

    Raises:
        ValueError: If the model has local heads, a block is shorter than the window, or a passage not longer.
    """
    _check_all_global(model)
    text = _measure_moments(model, blocks, window)
    fits = [moments.fit(model.config.num_key_value_heads) for moments in text]
    changes = [moments.change(values).gather(1, index[:, None]) for moments, (index, values) in zip(text, fits)]
    outputs = torch.tensor([moments.outputs for moments in text])
    shares = torch.stack(changes).view(len(text), model.config.num_key_value_heads, -1).sum(2) / outputs[:, None]
    logits = [moments.logits.gather(1, index[:, None])[:, 0] for moments, (index, _) in zip(text, fits)]
    sinks = Sinks(torch.stack(logits), torch.stack([values for _, values in fits]))
    return HeadChanges(shares, _measure_losses(model, passages, window, sinks), sinks)


class _Moments:
    """
    Sums over queries that determine how much the heads of a layer change, for any sinks.

    A head returns `f` over all keys, and `w` over its window alone. With a sink of logit `s` and value `c`, it returns
    `g * w + (1 - g) * c` with `g = sigmoid(lse - s)`, where `lse` is the log-sum-exp of the logits in the window. The
    change is `sum |f - g w - (1 - g) c|^2 = sum |f - g w|^2 - 2 c . sum (1 - g) (f - g w) + sum (1 - g)^2 |c|^2`.
    All sums are over queries, and are computed for every sink logit of a grid. Queries without a full window do not
    change.
    """

    def __init__(self):
        self.logits: torch.Tensor | None = None
        """`(H, K)`, the grid of sink logits; `None` until the first block shows the range of a head's logits."""
        self.outputs = 0.0
        """Sum of the squared outputs over all keys, of all queries."""
        self.squares = torch.zeros(1, 1, dtype=torch.float64)
        """`(H, K)` once there are queries, the sum of `|f - g w|^2`."""
        self.products = torch.zeros(1, 1, 1, dtype=torch.float64)
        """`(H, K, D)`, the sum of `(1 - g) (f - g w)`."""
        self.rests = torch.zeros(1, 1, dtype=torch.float64)
        """`(H, K)`, the sum of `(1 - g)^2`."""

    def add(self, full: torch.Tensor, local: torch.Tensor, lse: torch.Tensor):
        """
        Adds queries with a full window: their outputs over all keys and over the window, `(H, T, D)` each, and the
        log-sum-exp over the window, `(H, T)`.
        """
        gates = (lse[..., None] - self.logits[:, None].to(lse)).sigmoid()  # `(H, T, K)`
        crossed, squared = (full * local).sum(-1, keepdim=True), local.square().sum(-1, keepdim=True)
        squares = gates * (gates * squared - 2 * crossed) + full.square().sum(-1, keepdim=True)
        self.squares = self.squares + squares.sum(1).double().cpu()
        rests = 1 - gates
        self.rests = self.rests + rests.square().sum(1).double().cpu()
        products = rests.transpose(1, 2) @ full - (rests * gates).transpose(1, 2) @ local
        self.products = self.products + products.double().cpu()

    def fit(self, kv_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Finds sinks that change the heads little: indices into the grid, `(H,)`, and values, `(H_kv, D)`. In turn, the
        values are the best ones for the logits, and the logits for the values, until nothing improves.
        """
        tiny = torch.finfo(torch.float64).tiny
        index = (self.squares - self.products.square().sum(-1) / self.rests.clamp(min=tiny)).argmin(1)
        heads = torch.arange(len(index))
        for _ in range(ROUNDS):
            products = self.products[heads, index].unflatten(0, (kv_heads, -1)).sum(1)
            rests = self.rests[heads, index].unflatten(0, (kv_heads, -1)).sum(1)
            values = products / rests.clamp(min=tiny)[:, None]
            before, index = index, self.change(values).argmin(1)
            if torch.equal(index, before):
                break
        return index, values

    def change(self, values: torch.Tensor) -> torch.Tensor:
        """Computes the summed squared changes `(H, K)`, for values `(H_kv, D)` and all logits of the grid."""
        values = values.repeat_interleave(len(self.products) // len(values), dim=0)[:, None]
        shift = (self.rests[..., None] * values - 2 * self.products) * values
        return (self.squares + shift.sum(-1)).clamp(min=0)


@torch.no_grad()
def _measure_moments(model: LSGPTForCausalLM, blocks: Iterable[torch.Tensor], window: int) -> list[_Moments]:
    """Sums up over all queries of blocks of token ids `(n,)`, for each layer."""
    moments = [_Moments() for _ in range(model.config.num_hidden_layers)]

    def measuring(layer: LSGPTAttention, i: int) -> Callable:
        attend, of_layer = layer.attend, moments[i]

        def measure_and_attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args, **kwargs):
            result, length = attend(query, key, value, *args, **kwargs), key.shape[2]
            outputs = result[0][0].transpose(0, 1)  # `(H, n, D)`
            outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
            of_layer.outputs += outputs.double().square().sum().item()
            if of_layer.logits is None:
                _, lse = _attend(layer, query, key, value, max(length - QUERIES_AT_ONCE, 0), length, window)
                of_layer.logits = lse.double().mean(1, keepdim=True).cpu() + SINK_LOGITS
            for start, stop in _full_windows(length, window):
                local, lse = _attend(layer, query, key, value, start, stop, window)
                of_layer.add(outputs[:, start:stop], local, lse)
            return result

        return measure_and_attend

    with replaced(attention_layers(model), "attend", measuring):
        for ids in tqdm(blocks, desc="Measuring heads on text", leave=False):
            if len(ids) < window:
                raise ValueError(f"blocks must be at least as long as the window of {window} tokens; got {len(ids)}")
            model(input_ids=ids[None].to(model.device), use_cache=False, logits_to_keep=1)
    return moments


@torch.enable_grad()
def _measure_losses(
    model: LSGPTForCausalLM, passages: Iterable[tuple[torch.Tensor, torch.Tensor]], window: int, sinks: Sinks
) -> torch.Tensor | None:
    """
    Measures how fast the loss rises as a head becomes local, `(L, H_kv)`, or `None` without passages.

    All outputs are half those of a global head, half those of a local one with its sink. The rise is the derivative
    with respect to the local part, so that it includes what the head does together with all others. The loss is the
    mean over the labels of a passage plus the mean over every `TEXT_STRIDE`th token after the first window.
    """
    layers = attention_layers(model)
    local_parts = [torch.full((model.config.num_key_value_heads,), 0.5, requires_grad=True) for _ in layers]

    def mixing(layer: LSGPTAttention, i: int) -> Callable:
        attend = layer.attend
        groups = layer.num_key_value_groups

        def mix(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args, **kwargs):
            (outputs, weights), length = attend(query, key, value, *args, **kwargs), key.shape[2]
            full = outputs[0].transpose(0, 1)  # `(H, n, D)`
            full = full.to(torch.promote_types(full.dtype, torch.float32))
            logits = sinks.logits[i][:, None].to(full)
            values = sinks.values[i].repeat_interleave(groups, dim=0)[:, None].to(full)
            local_part = local_parts[i].repeat_interleave(groups)[:, None, None].to(full)
            parts = [full[:, : window - 1]]
            for start, stop in _full_windows(length, window):
                local, lse = _attend(layer, query, key, value, start, stop, window)
                local = torch.lerp(values, local, (lse - logits).sigmoid()[..., None])
                parts.append(torch.lerp(full[:, start:stop], local, local_part))
            return torch.cat(parts, dim=1).transpose(0, 1)[None].to(outputs), weights

        return mix

    def checkpointing(block: nn.Module, _) -> Callable:
        # The backward pass computes a block again, so that the intermediate results of one only are in memory.
        return partial(checkpoint, block.forward, use_reentrant=False)

    rises = []
    with replaced(layers, "attend", mixing), replaced(model.model.layers, "forward", checkpointing):
        for ids, labels in tqdm(passages, desc="Measuring heads on passages", leave=False):
            if len(ids) <= window:
                raise ValueError(f"passages must be longer than the window of {window} tokens; got {len(ids)} tokens")
            answers = (labels[1:] != IGNORED_LABEL).nonzero().flatten()  # each predicts the next token
            others = torch.arange(window - 1, len(ids) - 1, TEXT_STRIDE)
            queries = torch.cat([answers, others]).to(model.device)
            logits = model(input_ids=ids[None].to(model.device), use_cache=False, logits_to_keep=queries).logits[0]
            losses = F.cross_entropy(logits.float(), ids.to(model.device)[queries + 1], reduction="none")
            loss = losses[: len(answers)].mean() + losses[len(answers) :].mean()
            rises.append(torch.stack(torch.autograd.grad(loss, local_parts)).double())
    return torch.stack(rises).mean(0) if rises else None


@contextlib.contextmanager
def replaced(modules: Iterable[nn.Module], name: str, replace: Callable[[Any, int], Callable]) -> Iterator[None]:
    """Within this context, what `replace` returns for each module and its index stands in for the method `name`."""
    with contextlib.ExitStack() as undo:
        for i, module in enumerate(modules):
            new, own = replace(module, i), vars(module).get(name)  # its own: one with Accelerate's hooks, for example
            undo.callback(*((delattr, module, name) if own is None else (setattr, module, name, own)))
            setattr(module, name, new)
        yield


def _full_windows(length: int, window: int) -> Iterator[tuple[int, int]]:
    """Divides the queries with a full window into parts of `QUERIES_AT_ONCE`: where each begins and ends."""
    for start in range(window - 1, length, QUERIES_AT_ONCE):
        yield start, min(start + QUERIES_AT_ONCE, length)


def _attend(
    layer: LSGPTAttention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    start: int,
    stop: int,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Computes the attention of the queries from `start` to `stop` over the keys in a window. Returns the
    outputs `(H, T, D)` and the log-sum-exp of the logits `(H, T)`, in float32 or better.
    """
    begin = max(start - window + 1, 0)
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
    if any(is_windowed) and config.attention_sinks:
        raise ValueError("`attention_sinks` must be False for a model with layers that have a window")
    if any(is_windowed) and sinks is not None:
        raise ValueError("`sinks` must be None for a model with layers that have a window; they get no sinks")
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
    Chooses the key/value heads that stay global: those with the highest scores.

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
