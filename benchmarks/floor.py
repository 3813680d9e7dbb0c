"""A lower bound on a benchmark's time on a device: its operations and bytes divided by the rates measured there."""

import statistics

import torch

from lsgpt.modeling_lsgpt import LSGPTConfig

from .peers import Shape
from .timing import measure


def measure_rates(device: str, dtype: torch.dtype, size: int = 8192) -> tuple[float, float]:
    """
    Measures the floating-point operations per second of a product of two `(size, size)` matrices, and the bytes read
    and written per second by a copy of `8 * size**2` bytes.
    """
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    source = torch.zeros(size, size, device=device, dtype=torch.float64)
    target = torch.empty_like(source)
    runs = {"product": lambda: lambda: a @ b, "copy": lambda: lambda: target.copy_(source)}
    seconds = measure(runs, device, budget=2.0)
    product, copy = (statistics.median(seconds[name]) for name in runs)
    return 2 * size**3 / product, 2 * source.nbytes / copy


def floor_seconds(benchmark: str, config: LSGPTConfig, shape: Shape, rates: tuple[float, float]) -> float:
    """
    Returns the seconds that the operations take at the first of `rates`, or the bytes at the second, if that is more.

    Operations are counted as in `LSGPTConfig.flops_per_token`. The backward pass has twice as many, or 2.5 times as
    many in the attention benchmark, because it computes the logits again. Bytes are the minimum that must be moved: in
    attention, the inputs, outputs and their gradients (12 tensors, half of them of key/value heads, counted each time
    they are needed); in prefill, the weights and the new cache; in decoding, per token, the weights and the cache; in
    training, the weights twice, their gradients twice, and AdamW's reads and writes of the weights and two moments, 10
    times the weights' size in total.
    """
    n, batch_size, itemsize = shape.length, shape.batch_size, shape.dtype.itemsize
    head = 2 * config.vocab_size * config.hidden_size
    width = config.num_attention_heads * config.head_dim
    kv_width = config.num_key_value_heads * config.head_dim
    # A single token sees one key in each head; the rest of its cost is that of the matrices.
    matrices = config.flops_per_token(1) - 4 * width * config.num_hidden_layers
    weights, cache = matrices / 2 * (1 if shape.int8 else itemsize), batch_size * config.kv_cache_bytes(n, itemsize)
    tokens, per_token = batch_size * n, config.flops_per_token(n)
    layer_attention = (per_token - matrices) / config.num_hidden_layers
    flops, moved = {
        "attention": (3.5 * tokens * layer_attention, 6 * tokens * (width + kv_width) * itemsize),
        "prefill": (tokens * (per_token - head) + batch_size * head, weights + cache),
        "train": (3 * tokens * per_token, 10 * weights),
        "decode": (batch_size * matrices, weights + cache),
    }[benchmark]
    return max(flops / rates[0], moved / rates[1])
