"""Prefill: a prompt's forward pass that fills a cache and gives the logits of the last token."""

import torch

from .gate import model_gates
from .peers import Benchmark, Peer, Shape, build_models
from .timing import unprepared


def prepare(shape: Shape) -> Benchmark:
    """Prepares the peers at one shape."""
    shape, peers = build_models(shape, "prefill")
    ids = shape.token_ids()

    @torch.no_grad()
    def run(peer: Peer):
        peer(input_ids=ids, use_cache=True, logits_to_keep=1)

    runs = {name: unprepared(run, peer) for name, peer in peers.items()}
    return Benchmark(runs, model_gates(peers, shape, "prefill"), peers.skipped)
