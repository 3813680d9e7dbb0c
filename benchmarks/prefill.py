"""Prefill: a prompt's forward pass that fills a cache and gives the logits of the last token."""

from functools import partial

import torch

from .gate import check_peer, llama_gates
from .peers import Benchmark, Peer, Shape, build_models


def prepare(shape: Shape) -> Benchmark:
    """Prepares the peers at one shape."""
    shape, peers = build_models(shape, "prefill")
    ids = shape.token_ids()

    @torch.no_grad()
    def run(peer: Peer):
        peer(input_ids=ids, use_cache=True, logits_to_keep=1)

    gates = [partial(check_peer, name, peer, shape, "prefill") for name, peer in peers.items() if is_ours(name)]
    gates += llama_gates(peers, shape, "prefill")
    return Benchmark({name: partial(partial, run, peer) for name, peer in peers.items()}, gates, peers.skipped)


def is_ours(name: str) -> bool:
    """Whether a peer must agree with the reference. Llama has its own gate, and GPT-2 has other weights."""
    return name.split(maxsplit=1)[0] in ("lsgpt", "mhsa")
