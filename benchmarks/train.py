"""Training: forward pass with labels, backward pass and AdamW step. Only `lsgpt-no-logits` computes no logits.

On CUDA, the family `telemetry` is timed, too: `lsgpt` on each engine, with every head's largest logit measured in each
step.
"""

from functools import partial

import torch

from lsgpt import MaxLogits

from .gate import check_model, model_gates
from .peers import Benchmark, Peer, Shape, build_models
from .timing import unprepared


def prepare(shape: Shape, telemetry: bool | None = None) -> Benchmark:
    """Prepares the peers at one shape. `telemetry`, the default on CUDA, adds `lsgpt` with its logits measured."""
    shape, peers = build_models(shape, "train")
    ids = shape.token_ids()
    # A learning rate of 0 costs the same and keeps the weights that the gates have checked. Peers with shared weights
    # share their optimizer, too.
    shared = torch.optim.AdamW(peers["lsgpt sdpa"].model.parameters(), lr=0.0, fused=True)
    optimizers = dict.fromkeys(peers, shared)
    if "gpt2 sdpa" in peers:
        own = torch.optim.AdamW(peers["gpt2 sdpa"].model.parameters(), lr=0.0, fused=True)
        optimizers |= {name: own for name in peers if name.startswith("gpt2")}

    def step(peer: Peer, optimizer: torch.optim.Optimizer):
        peer(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def measured_step(peer: Peer, optimizer: torch.optim.Optimizer):
        logits = MaxLogits(peer.model)
        logits.start()
        step(peer, optimizer)
        logits.read()
        logits.stop()

    gates = model_gates(peers, shape, "train")
    # Their attention is the same as in `lsgpt`, but their loss is computed in another way.
    gates += [
        partial(check_model, name, peer, shape, "train")
        for name, peer in peers.items()
        if name.startswith("lsgpt-no-logits ")
    ]
    runs = {name: unprepared(step, peer, optimizers[name]) for name, peer in peers.items()}
    if shape.device == "cuda" if telemetry is None else telemetry:
        for name, peer in peers.items():
            if name.startswith("lsgpt "):
                runs[name.replace("lsgpt", "telemetry")] = unprepared(measured_step, peer, shared)
    return Benchmark(runs, gates, peers.skipped)
