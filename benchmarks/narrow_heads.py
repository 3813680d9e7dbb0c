"""What filling narrow heads with zeros gains on the CPU: `python -m lsgpt.benchmarks.narrow_heads`.

A training step of attention, forward and backward, in PyTorch's causal kernel as it is, and as `sdpa` calls it.
"""

import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from lsgpt.modeling_lsgpt.attention_lsgpt import NARROW_HEAD_DIM, windowed_sdpa_attention_forward

from .timing import measure, ratio


def compare(head_dim: int, length: int, budget: float = 5.0) -> dict[str, float]:
    """Returns the ratio of both times for 6 heads of `head_dim` and a row of `length` tokens, filled to not filled."""
    module = nn.Module()
    module.is_causal = True
    states = [torch.randn(1, 6, length, head_dim, requires_grad=True) for _ in range(3)]

    def step(attend):
        torch.autograd.grad(attend(module, *states, None)[0].sum(), states)

    functions = {"filled": windowed_sdpa_attention_forward, "not filled": sdpa_attention_forward}
    seconds = measure({name: lambda f=f: lambda: step(f) for name, f in functions.items()}, "cpu", budget)
    return ratio(seconds["filled"], seconds["not filled"])


if __name__ == "__main__":
    print(f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}")
    for head_dim in (4, 8, NARROW_HEAD_DIM - 2):
        for length in (512, 2048):
            time = compare(head_dim, length)["median"]
            print(f"heads of {head_dim} dimensions, {length} tokens: {time:.2f} of the time")
