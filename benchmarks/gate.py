"""Correctness gates: a peer that computes something wrong is not timed.

- `check_attention` compares one layer's attention at the benchmarked shape with dense attention in float32, written
  here from the definition. Dense attention over a long sequence does not fit into memory, so the reference uses a
  sample of the queries, and the gradients are those of a loss on this sample; they reach every key and value.
- `check_model` compares the whole model with the `eager` engine in float32, at a shorter length.

Errors are root mean squares. Each may be up to 1e-4 of the reference's size, which is far more than the rounding error
in float32 and far less than the error from one extra key in a window. In half precision, three times the error of the
plain dense computation is added to this limit; there, an extra key causes ten times as much.
"""

import copy
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from lsgpt.modeling_lsgpt import CACHE, FULL_WINDOW

from .peers import Peer, Shape, attention_function, example_sinks, twin
from .timing import family_of


CHECKED_LENGTH = 1024
"""Largest number of tokens in a comparison of whole models."""

ROWS = 64
"""Number of queries in each of the three samples: the first ones, the last ones, and random ones."""


def compare(what: str, actual: torch.Tensor, exact: torch.Tensor, plain: torch.Tensor | None = None):
    """
    Raises `RuntimeError` with the name `what` unless `actual` equals `exact` up to rounding. `plain`, the result of
    the plain computation in the same precision, shows how much rounding to expect.
    """
    exact = exact.float()
    error, allowed = _size(actual.float() - exact), 1e-4 * _size(exact)
    if plain is not None:
        allowed += 3 * _size(plain.float() - exact)
    if not error <= allowed:  # written so that NaN fails
        raise RuntimeError(f"{what}: wrong by {error:.2e}, more than the {allowed:.2e} of rounding; it is not timed")


def _size(x: torch.Tensor) -> float:
    return x.detach().pow(2).mean().sqrt().item()


def attention_inputs(shape: Shape) -> list[torch.Tensor]:
    """Makes a random query `(B, H, T, D)`, key and value `(B, H_kv, T, D)`, with the same strides as in a model."""
    config = shape.config
    kv_heads = config.num_key_value_heads
    return [
        torch.randn(shape.batch_size, shape.length, heads, config.head_dim, device=shape.device, dtype=shape.dtype)
        .transpose(1, 2)
        .requires_grad_()
        for heads in (config.num_attention_heads, kv_heads, kv_heads)
    ]


def dense_attention(
    query,
    key,
    value,
    rows: torch.Tensor,
    num_global_heads: int,
    window: int,
    sinks: torch.Tensor | None = None,
    first_with_sink: int = 0,
) -> torch.Tensor:
    """
    Computes Long Short-attention by definition, for the queries at the positions `rows` `(R,)`: `(B, R, H, D)`.

    A global head sees the keys `k <= q`, a local one those with `q - window < k <= q`; global heads come first.
    The exponentials of `sinks` `(H,)` are added to the denominators of the softmax of queries at `first_with_sink` and
    later positions.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    distance = rows[:, None] - torch.arange(key.shape[2], device=key.device)
    is_global = torch.arange(query.shape[1], device=key.device)[:, None, None] < num_global_heads
    visible = (distance >= 0) & (is_global | (distance < window))
    logits = query[:, :, rows] @ key.mT * query.shape[-1] ** -0.5
    logits = logits.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        sinks = sinks[:, None].masked_fill(rows < first_with_sink, float("-inf"))
        logits = torch.cat([logits, sinks[..., None].expand(*logits.shape[:3], 1)], dim=-1)
    weights = logits.softmax(-1)[..., : key.shape[2]]
    return (weights @ value).transpose(1, 2)


def check_attention(name: str, attend, shape: Shape, num_global_heads: int, gradients: bool):
    """
    Compares an attention function with the definition, separately for global and local heads.

    Args:
        name: The peer's name, for the message.
        attend: Maps query, key and value, as made by `attention_inputs`, to outputs `(B, T, H, D)`.
        shape: What is benchmarked.
        num_global_heads: Number of heads that see the whole past; they come first.
        gradients: Whether to compare gradients, too.

    Raises:
        RuntimeError: If something differs by more than rounding; the message says what.
    """
    torch.manual_seed(0)
    inputs = attention_inputs(shape)
    some = torch.randperm(shape.length)[:ROWS]
    ends = torch.arange(shape.length)
    rows = torch.cat((some, ends[:ROWS], ends[-ROWS:])).unique().to(shape.device)
    upstream = torch.randn_like(inputs[0][:, :, : len(rows)]).transpose(1, 2)

    def results(function, inputs):
        with torch.set_grad_enabled(gradients):
            output = function(*inputs)
        found = torch.autograd.grad(output, inputs, upstream.to(output.dtype)) if gradients else ()
        return [output.detach().transpose(1, 2), *found]

    def reference(*inputs):
        config = shape.config
        sinks = example_sinks(config, num_global_heads, inputs[0])
        first = config.sliding_window - 1 if config.attention_sinks == FULL_WINDOW else 0
        return dense_attention(*inputs, rows, num_global_heads, config.sliding_window, sinks, first)

    if not gradients:
        inputs = [x.detach() for x in inputs]
    actual = results(lambda *inputs: attend(*inputs)[:, rows], inputs)
    exact = results(reference, [x.detach().float().requires_grad_() for x in inputs])
    plain = [None] * len(actual) if shape.dtype == torch.float32 else results(reference, inputs)
    whats = ("outputs", "gradients of queries", "gradients of keys", "gradients of values")
    for what, *tensors in zip(whats, actual, exact, plain):
        heads = tensors[0].shape[1]
        split = num_global_heads * heads // shape.config.num_attention_heads
        for kind, begin, end in (("global", 0, split), ("local", split, heads)):
            if begin < end:
                parts = [None if x is None else x[:, begin:end] for x in tensors]
                compare(f"{name}, attention at {shape.length:,} tokens, {what} of {kind} heads", *parts)


def check_peer(name: str, peer: Peer, shape: Shape, task: str):
    """
    Runs the gates of a model: its attention at the benchmarked shape, except in decoding, and the whole model at a
    shorter length.

    Args:
        name: The peer's name, for the message.
        peer: A model of the family `lsgpt` or `mhsa`.
        shape: What is benchmarked.
        task: `"prefill"`, `"train"` or `"decode"`.

    Raises:
        RuntimeError: If something differs by more than rounding; the message says what.
    """
    config = peer.model.config
    counts = config.num_global_heads_per_layer
    for count in sorted(set(counts)) if task != "decode" else ():
        attend = attention_function(config, config._attn_implementation, peer.backend, counts.index(count))
        check_attention(name, attend, shape, count, gradients=task == "train")
    check_model(name, peer, shape, task)


def is_ours(name: str) -> bool:
    """Whether a peer must agree with the reference. Llama has its own gate, and GPT-2 has other weights."""
    return family_of(name) in ("lsgpt", "mhsa")


def model_gates(peers: dict[str, Peer], shape: Shape, task: str) -> list[Callable[[], None]]:
    """Returns the gates of our peers and of Llama."""
    ours = [partial(check_peer, name, peer, shape, task) for name, peer in peers.items() if is_ours(name)]
    return ours + llama_gates(peers, shape, task)


def llama_gates(peers: dict[str, Peer], shape: Shape, task: str) -> list[Callable[[], None]]:
    """
    Returns the gate of Transformers' Llama, if it is timed and can hold all the weights: it must compute the same as
    the family `mhsa`, whose biases are 0 here.
    """
    config = shape.config
    is_llama = config.position_embedding_type == "rope" and not config.qk_norm
    if "llama sdpa" not in peers or not is_llama or config.attn_logit_softcapping is not None:
        return []
    return [partial(check_model, "llama sdpa", peers["llama sdpa"], shape, task, peers["mhsa sdpa"].model)]


def check_model(name: str, peer: Peer, shape: Shape, task: str, model: nn.Module | None = None):
    """
    Compares a model with its twin on the `eager` engine in float32, on one sequence of at most `CHECKED_LENGTH`
    tokens. In training, loss and gradients are compared, otherwise the last three logits: in prefill from one pass
    that fills a cache, in decoding from a prompt and two single tokens. The reference has no cache. It is made from
    `model`, if that is given.

    Raises:
        RuntimeError: If something differs by more than rounding; the message says what.
    """
    torch.manual_seed(0)
    ids = shape._replace(batch_size=1, length=min(shape.length, CHECKED_LENGTH)).token_ids()
    exact, plain = references(peer.model if model is None else model)

    with torch.set_grad_enabled(task == "train"):
        actual = {"prefill": _prefill, "train": _train, "decode": _decode}[task](peer, ids)
        run = partial(_train if task == "train" else _without_cache, ids=ids)
        expected, rounded = run(exact), {} if plain is None else run(plain)
    for what in actual:
        compare(f"{name}, {what} of {ids.shape[1]:,} tokens", actual[what], expected[what], rounded.get(what))


def references(model: nn.Module) -> tuple[Peer, Peer | None]:
    """Twins of `model` on the `eager` engine, in float32 and, if that differs, in the model's own precision."""
    plain = Peer(twin(model, "eager"))
    return (plain, None) if model.dtype == torch.float32 else (Peer(copy.deepcopy(plain.model).float()), plain)


def _train(peer: Peer, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    output = peer(input_ids=ids, labels=ids, use_cache=False)
    # Only matrices and sinks, because the gradient of the keys' bias is nothing but rounding.
    parameters = peer.model.named_parameters()
    weights = {name: weight for name, weight in parameters if weight.ndim == 2 or name.endswith(".sinks")}
    gradients = torch.autograd.grad(output.loss, list(weights.values()))
    return {"loss": output.loss, **{f"gradient of {name}": gradient for name, gradient in zip(weights, gradients)}}


def _without_cache(peer: Peer, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"logits": peer(input_ids=ids, use_cache=False, logits_to_keep=3).logits}


def _prefill(peer: Peer, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"logits": peer(input_ids=ids, use_cache=True, logits_to_keep=3).logits}


def _decode(peer: Peer, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    output = peer(input_ids=ids[:, :-2], use_cache=True, logits_to_keep=1)
    logits = [output.logits]
    for token in ids[:, -2:].split(1, dim=1):
        output = peer(input_ids=token, **{CACHE: output[CACHE]}, use_cache=True)
        logits.append(output.logits)
    return {"logits": torch.cat(logits, dim=1)}
