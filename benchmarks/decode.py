"""Decoding: time per token after a prompt, with a cache; and the size of the cache in bytes.

The prompt is not run. Instead, the cache is filled with random keys and values, so that long prompts cost nothing. On
CUDA, the peers are also timed as `compiled`, with static caches and CUDA graphs.

In addition to the gate of the whole model at a shorter length, each peer's logits after the full prompt are compared
with those of the `eager` engine in float32, for the first sequence.
"""

import copy
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from transformers import Cache, DynamicCache, StaticCache

from lsgpt.modeling_lsgpt import CACHE

from .gate import check_peer, compare, is_ours, llama_gates, references
from .peers import SPARE_POSITIONS, Benchmark, Peer, Shape, build_models, stock_family
from .timing import family_of


TOKENS = 16
"""Number of tokens in one measurement."""


def prepare(shape: Shape, compiled: bool | None = None) -> Benchmark:
    """Prepares the peers at one shape. `compiled`, the default on CUDA, adds static caches and `torch.compile`."""
    left_out = {"flex_attention"}.intersection(shape.engines)
    shape = shape._replace(engines=tuple(engine for engine in shape.engines if engine not in left_out))
    shape, peers = build_models(shape, "decode")
    reason = "single tokens are computed by `sdpa`"
    peers.skipped |= {f"{family} {engine}": reason for family in ("lsgpt", "mhsa") for engine in left_out}
    stock = stock_family(shape.config)
    models = {family: peers[f"{family} sdpa"].model for family in ("lsgpt", "mhsa", stock)}
    dynamic = {family: fill(DynamicCache(config=model.config), model, shape) for family, model in models.items()}
    dynamic |= {"limit": dynamic["lsgpt"], "gpt2-gelu": dynamic[stock]}
    caches = {name: dynamic[family_of(name)] for name in peers}
    if shape.device == "cuda" if compiled is None else compiled:
        for family in ("lsgpt", "mhsa"):
            name = f"{family} compiled"
            model = models[family]
            caches[name] = StaticCache(model.config, max_cache_len=shape.length + SPARE_POSITIONS)
            fill(caches[name], model, shape)
            make = partial(Peer, torch.compile(model, mode="reduce-overhead"))
            peers.add(name, make, partial(decode, cache=caches[name], shape=shape, count=1))
            fill(caches[name], model, shape)  # restores it after the trial

    def run(name: str):
        cache = fresh(caches[name], shape)
        decode(peers[name], cache, shape, 1)  # drops the keys that local heads no longer see
        return partial(decode, peers[name], cache, shape, TOKENS)

    gates: list[Callable[[], None]] = []
    for name, peer in peers.items():
        if is_ours(name):
            family, engine = name.split()
            gates.append(partial(check_step, name, peer, caches[name], models[family], dynamic[family], shape))
            if engine != "compiled":
                gates.append(partial(check_peer, name, peer, shape, "decode"))
    if llama := llama_gates(peers, shape, "decode"):
        others = (caches["llama sdpa"], models["mhsa"], dynamic["mhsa"], shape)
        gates += [partial(check_step, "llama sdpa", peers["llama sdpa"], *others), *llama]
    sizes = {family: live_bytes(dynamic[family]) for family in models}
    return Benchmark({name: partial(run, name) for name in peers}, gates, peers.skipped, TOKENS, sizes)


@torch.no_grad()
def fill(cache: Cache, model: nn.Module, shape: Shape) -> Cache:
    """
    Fills a cache with `shape.length` tokens of `shape.batch_size` sequences. The first token is run through the model;
    the keys and values of the others are random, and the same each time.
    """
    if cache.is_compileable:
        cache.reset()
    first = torch.zeros(shape.batch_size, 1, dtype=torch.long, device=shape.device)
    model(input_ids=first, **{CACHE: cache}, use_cache=True)
    generator = torch.Generator(shape.device).manual_seed(0)
    for layer_idx, layer in enumerate(cache.layers):
        size = (*layer.keys.shape[:2], shape.length - 1, layer.keys.shape[3])
        for_both = [torch.randn(size, generator=generator, device=shape.device) for _ in range(2)]
        cache.update(*(x.to(layer.keys.dtype) for x in for_both), layer_idx)
        if not cache.is_compileable:  # the window of a local layer is a view of the whole tensor
            layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
    return cache


def fresh(cache: Cache, shape: Shape) -> Cache:
    """
    Returns a cache to continue from after the prompt. A dynamic cache is copied. A static one has a fixed place in
    memory, so it is reset to the prompt's length; its local windows keep the decoded tokens, which costs the same.
    """
    if not cache.is_compileable:
        return copy.deepcopy(cache)
    for layer in cache.layers:
        layer.cumulative_length.fill_(shape.length)
        if layer.is_sliding:
            layer.cumulative_length_int = shape.length
    return cache


@torch.no_grad()
def decode(peer: Peer, cache: Cache, shape: Shape, count: int) -> torch.Tensor:
    """Decodes `count` tokens, all 0 because the time does not depend on them; returns logits `(B, count, V)`."""
    token, logits = torch.zeros(shape.batch_size, 1, dtype=torch.long, device=shape.device), []
    for _ in range(count):
        options = {}
        if cache.is_compileable:
            # Made outside the compiled code, as `generate` does; inside, positions would be constants of the graph.
            position_ids = torch.zeros_like(token) + cache.get_seq_length()
            options = {
                "position_ids": position_ids,
                "attention_mask": peer.model.create_masks_for_generate(
                    config=peer.model.config,
                    inputs_embeds=torch.empty(shape.batch_size, 1, 0, dtype=shape.dtype, device=shape.device),
                    attention_mask=None,
                    **{CACHE: cache},
                    position_ids=position_ids,
                ),
            }
            torch.compiler.cudagraph_mark_step_begin()
        logits.append(peer(input_ids=token, **{CACHE: cache}, use_cache=True, **options).logits.clone())
    return torch.cat(logits, dim=1)


def check_step(name: str, peer: Peer, cache: Cache, model: nn.Module, dynamic: Cache, shape: Shape):
    """
    Compares the first sequence's logits of two tokens after the prompt with those of the `eager` engine in float32.

    Args:
        name: The peer's name, for the message.
        peer: The peer to check.
        cache: Its cache.
        model: The model that the peer was made from.
        dynamic: A dynamic cache with the same keys and values.
        shape: What is benchmarked.

    Raises:
        RuntimeError: If the logits differ by more than rounding.
    """

    def first_sequence(reference: Peer) -> torch.Tensor:
        cache = copy.deepcopy(dynamic)
        cache.batch_select_indices(torch.zeros(1, dtype=torch.long, device=shape.device))
        for layer in cache.layers:
            layer.keys, layer.values = (x.to(reference.model.dtype) for x in (layer.keys, layer.values))
        return decode(reference, cache, shape._replace(batch_size=1), 2)

    actual = decode(peer, fresh(cache, shape), shape, 2)[:1]
    exact, plain = references(model)
    compare(
        f"{name}, logits after {shape.length:,} tokens",
        actual,
        first_sequence(exact),
        None if plain is None else first_sequence(plain),
    )


def live_bytes(cache: Cache) -> int:
    """Returns the bytes of the keys and values that the next step sees, without memory that is only reserved."""
    return sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))
