"""Times peers in turn, and compares their times round by round."""

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch


def measure(
    peers: dict[str, Callable[[], Callable]], device: str, budget: float, min_rounds: int = 3, max_rounds: int = 50
) -> dict[str, list[float]]:
    """
    Times peers in turn, A B C A B C ..., so that a disturbance of the machine affects all of them.

    Args:
        peers: For each name, a function that does the untimed preparation and returns the function to time.
        device: `"cpu"` or `"cuda"`; on CUDA, the device is synchronized before the clock starts and stops.
        budget: Seconds that the rounds may take; `min_rounds` may exceed it. The warm-up comes before: one call of
            each peer, or three on CUDA. If one round is enough and the warm-up exceeds the budget, it is the round.
        min_rounds, max_rounds: Bounds on the number of rounds.

    Returns:
        For each peer, the seconds of each round.
    """
    for _ in range(3 if device == "cuda" else 1):
        warm_up = {name: _seconds(prepare, device) for name, prepare in peers.items()}
    if min_rounds == 1 and sum(warm_up.values()) > budget:
        return {name: [seconds] for name, seconds in warm_up.items()}
    seconds = {name: [] for name in peers}
    begin, rounds = time.perf_counter(), 0
    while rounds < min_rounds or (
        rounds < max_rounds and (time.perf_counter() - begin) * (rounds + 1) / rounds <= budget
    ):
        for name, prepare in peers.items():
            seconds[name].append(_seconds(prepare, device))
        rounds += 1
    return seconds


def unprepared(run: Callable, *arguments) -> Callable[[], Callable]:
    """A peer for `measure` that needs no preparation."""
    return lambda: partial(run, *arguments)


def _seconds(prepare: Callable[[], Callable], device: str) -> float:
    run = prepare()
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def ratio(numerators: list[float], denominators: list[float]) -> dict[str, float]:
    """
    Compares two peers' times: `median`, `low` and `high` of the ratios of the rounds.

    This is not the ratio of medians, because what slows down a round affects both peers and not their ratio.
    """
    ratios = [a / b for a, b in zip(numerators, denominators, strict=True)]
    return {"median": statistics.median(ratios), "low": min(ratios), "high": max(ratios)}


def family_of(name: str) -> str:
    """The first word of a peer's name."""
    return name.split(maxsplit=1)[0]


def fastest(seconds: dict[str, list[float]], family: str) -> str | None:
    """Returns the peer of a family with the smallest median, or `None`."""
    members = [name for name in seconds if family_of(name) == family]
    return min(members, key=lambda name: statistics.median(seconds[name]), default=None)
