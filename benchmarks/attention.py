"""Attention alone, forward and backward: Long Short-attention against causal attention in all heads.

The families `lsgpt` and `mhsa` are those of `peers`; `mhsa sdpa` is `scaled_dot_product_attention` itself, which is
what Transformers' GPT-2 calls. The limit is the `sdpa` engine with global heads only. On CUDA, `lsgpt-varlen` is
also timed, another way to compute the same attention. It is a family of its own because the model has no such engine.
"""

import copy
import inspect
from functools import partial

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from lsgpt.modeling_lsgpt import LSGPTConfig

from .gate import attention_inputs, check_attention
from .peers import Benchmark, Peers, Shape, attention_function, only
from .timing import unprepared


def prepare(shape: Shape) -> Benchmark:
    """Prepares the peers at one shape."""
    config = shape.config
    heads, num_global_heads = config.num_attention_heads, config.num_global_heads_per_layer[0]
    torch.manual_seed(0)
    inputs = attention_inputs(shape)
    upstream = torch.randn_like(inputs[0].transpose(1, 2))

    def step(attend, inputs, upstream):
        torch.autograd.grad(attend(*inputs), inputs, upstream)

    def make(config, engine, backend):
        if engine == "sdpa" and config.num_global_heads == heads:
            return partial(causal_attention, backend=backend)
        return attention_function(config, engine, backend)

    def try_out(attend):
        length = min(shape.length, 2 * config.sliding_window + 1)
        step(attend, [x[:, :, :length] for x in inputs], upstream[:, :length])

    groups = heads // config.num_key_value_heads
    global_only = copy.deepcopy(config)
    global_only.num_attention_heads = global_only.num_global_heads = num_global_heads
    global_only.num_key_value_heads = kv_heads = num_global_heads // groups
    # Of no heads, the sum is as empty as their outputs, and all inputs are used.
    attend_globally = attention_function(global_only, "sdpa") if kv_heads else lambda *xs: sum(xs).transpose(1, 2)

    def limit(query, key, value):
        output = attend_globally(query[:, :num_global_heads], key[:, :kv_heads], value[:, :kv_heads])
        return torch.cat((output, value[:, kv_heads:].repeat_interleave(groups, dim=1).transpose(1, 2)), dim=2)

    peers = Peers()
    peers.add_engines(shape, shape.length, 1, make, try_out)
    if shape.device == "cuda":
        peers.add("mhsa varlen_attn", lambda: variable_length_attention, try_out)
        if not config.attention_sinks:  # `varlen_attn` does not support them
            peers.add("lsgpt-varlen varlen_attn", lambda: partial(two_kernels, config=config), try_out)
    gates = [
        partial(check_attention, name, attend, shape, num_global_heads if name.startswith("lsgpt") else heads, True)
        for name, attend in peers.items()
    ]
    peers["limit sdpa"] = limit
    runs = {name: unprepared(step, attend, inputs, upstream) for name, attend in peers.items()}
    return Benchmark(runs, gates, peers.skipped)


def causal_attention(query, key, value, backend: SDPBackend | None = None) -> torch.Tensor:
    """Causal `scaled_dot_product_attention` on one of its kernels, from `(B, H, T, D)` to `(B, T, H, D)`."""
    options = {"is_causal": True, "enable_gqa": key.shape[1] != query.shape[1]}
    with only(backend):
        return F.scaled_dot_product_attention(query, key, value, **options).transpose(1, 2)


def variable_length_attention(query, key, value, window: int | None = None) -> torch.Tensor:
    """
    PyTorch's `varlen_attn` on CUDA, from `(B, H, T, D)` to `(B, T, H, D)`.

    All heads are causal. If `window` is given, queries see that many keys, including their own. Raises `ImportError`
    if PyTorch lacks the function or the options that are used here.
    """
    from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415 (older versions lack it)

    if not {"window_size", "enable_gqa"} <= inspect.signature(varlen_attn).parameters.keys():
        raise ImportError("this PyTorch's `varlen_attn` has no windows or no grouped queries")
    batch_size, num_heads, length, _ = query.shape
    rows = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]
    ends = torch.arange(0, (batch_size + 1) * length, length, dtype=torch.int32, device=query.device)
    past = -1 if window is None else window - 1
    grouped = key.shape[1] != num_heads
    output = varlen_attn(*rows, ends, ends, length, length, window_size=(past, 0), enable_gqa=grouped)
    return output.unflatten(0, (batch_size, length))


def two_kernels(query, key, value, config: LSGPTConfig) -> torch.Tensor:
    """Computes global heads with `scaled_dot_product_attention`, local ones with `varlen_attn`: `(B, T, H, D)`."""
    split = config.num_global_heads_per_layer[0]
    kv_split = split * config.num_key_value_heads // config.num_attention_heads
    parts = [
        causal_attention(query[:, :split], key[:, :kv_split], value[:, :kv_split]),
        variable_length_attention(query[:, split:], key[:, kv_split:], value[:, kv_split:], config.sliding_window),
    ]
    return torch.cat(parts, dim=2)
