"""What the `sdpa` engine adds to PyTorch's `scaled_dot_product_attention`: a sliding window in linear time for local
heads, and on the CPU a backward pass on all cores for global ones.

Shapes: B batch, T queries, S keys, H query heads, H_kv key/value heads, D `head_dim`, W `sliding_window`, N blocks,
C queries in a block, P parts.
"""

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers.utils.import_utils import is_tracing


MIN_PART_LENGTH = 512
"""Queries in a part of `causal_attention_forward`, at least; shorter ones cost more than they gain."""


class _CutKeys(torch.autograd.Function):
    """
    Cuts keys or values into the spans that blocks of queries see: `(B, H_kv, S, D)` to `(B * N, H_kv, C + W - 1, D)`.

    The spans overlap. On the CPU those of a single sequence are views of one padded copy. PyTorch's own gradient of
    such views adds up element by element; here a span is taken apart into pieces of C keys or less, which are added
    for all blocks together.
    """

    @staticmethod
    def forward(ctx, keys, num_blocks: int, block_length: int, past: int, tail: int):
        missing = past + num_blocks * block_length - tail - keys.shape[2]
        ctx.sizes = num_blocks, block_length, missing, keys.shape
        keys = F.pad(keys.transpose(1, 2), (0, 0, 0, 0, missing, tail))
        spans = keys.unfold(1, past + block_length, block_length).transpose(3, 4).flatten(0, 1)
        # Only the CPU's kernels are known to take overlapping inputs.
        return spans if keys.device.type == "cpu" else spans.contiguous()

    @staticmethod
    def backward(ctx, gradient):
        num_blocks, block_length, missing, (batch_size, num_heads, length, head_dim) = ctx.sizes
        span, covered = gradient.shape[2], num_blocks * block_length
        gradient = gradient.transpose(1, 2).unflatten(0, (batch_size, num_blocks))
        result = gradient.new_zeros(batch_size, span - block_length + covered, num_heads, head_dim)
        for end in range(span, 0, -block_length):
            begin = max(end - block_length, 0)
            blocks = result[:, begin : begin + covered].unflatten(1, (num_blocks, block_length))
            blocks[:, :, : end - begin] += gradient[:, :, begin:end]
        return result[:, missing : missing + length].transpose(1, 2), None, None, None, None


def blocked_attention_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    blocked_mask: torch.Tensor,
    scaling: float,
    dropout: float = 0.0,
) -> torch.Tensor:
    """
    Sliding-window attention in O(T * W) time and memory, forward and backward, on every device.

    The queries are cut into N blocks of C. Block `i` can see C + W - 1 keys, its own and the W - 1 before, so one
    small `scaled_dot_product_attention` does it, whose batch are the blocks. The query heads that share a key/value
    head stand below each other in the block, and the keys are not repeated.

    Args:
        query (`(B, H, T, D)`), key (`(B, H_kv, S, D)`), value (`(B, H_kv, S, D)`): The last key belongs to the last
            query. Keys that no query's window reaches may be missing.
        blocked_mask (`(B or 1, N, 1, C, C + W - 1)`): True where a query may attend, see `create_attention_masks`.
        scaling: Factor of the dot products.
        dropout: Probability of dropping an attention weight.

    Returns:
        Outputs `(B, T, H, D)`.
    """
    batch_size, num_heads, q_length, head_dim = query.shape
    num_kv_heads = key.shape[1]
    groups = num_heads // num_kv_heads
    num_blocks, _, block_length, span = blocked_mask.shape[1:]
    past = span - block_length  # W - 1
    tail = num_blocks * block_length - q_length

    query = query.transpose(1, 2)
    if is_tracing(query) or tail:  # an exported program is for lengths with and without a tail
        query = F.pad(query, (0, 0, 0, 0, 0, tail))
    query = query.reshape(batch_size * num_blocks, block_length, num_kv_heads, groups, head_dim)
    query = query.permute(0, 2, 3, 1, 4).flatten(2, 3)
    keys, values = (
        _CutKeys.apply(x[:, :, -(past + q_length) :], num_blocks, block_length, past, tail) for x in (key, value)
    )
    mask = blocked_mask.expand(batch_size, -1, groups, -1, -1).flatten(2, 3).flatten(0, 1)[:, None]
    output = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, dropout_p=dropout, scale=scaling)
    output = output.unflatten(2, (groups, block_length)).permute(0, 3, 1, 2, 4)
    return output.reshape(batch_size, -1, num_heads, head_dim)[:, :q_length]


def num_causal_parts(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> int:
    """
    Number of parts P in which `causal_attention_forward` can keep more of the CPU's threads busy than there are heads;
    1 where it has nothing to offer: elsewhere, without gradients, or with heads enough.
    """
    q_length, kv_length = query.shape[2], key.shape[2]
    needs_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    if query.device.type != "cpu" or not needs_gradient or is_tracing(query) or torch.is_autocast_enabled("cpu"):
        return 1
    if q_length != kv_length or key.shape[1] != query.shape[1]:
        return 1
    return max(min(torch.get_num_threads() // (query.shape[0] * query.shape[1]), q_length // MIN_PART_LENGTH), 1)


def causal_attention_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, num_parts: int
) -> torch.Tensor:
    """
    `scaled_dot_product_attention` of a few causal heads on the CPU, with a backward pass in parallel.

    PyTorch's backward pass on the CPU takes one thread for each head of each sequence, so a single global head keeps
    one core busy. Here the queries are cut into P parts: those of a part and its own keys are P causal problems, and
    part `i` meets all keys before it in one more call, cut into P pieces. The log-sum-exp of the forward pass makes
    the gradients of all these pieces add up.

    Args:
        query, key, value (`(B, H, T, D)`): Each query sees the keys up to its own position.
        scaling: Factor of the dot products.
        num_parts: P.

    Returns:
        Outputs `(B, T, H, D)`.
    """
    return _CausalAttention.apply(query, key, value, scaling, num_parts).transpose(1, 2)


class _CausalAttention(torch.autograd.Function):
    """See `causal_attention_forward`. The operators are those that `scaled_dot_product_attention` itself calls."""

    @staticmethod
    def forward(ctx, query, key, value, scaling: float, num_parts: int):
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        output, lse = attend(query, key, value, 0.0, True, scale=scaling)
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.scaling, ctx.num_parts = scaling, num_parts
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        parts, length = ctx.num_parts, gradient.shape[2]
        # To equal pieces of equal parts, with queries whose gradients are zeros.
        missing = -length % parts**2
        query, key, value, output, lse = ctx.saved_tensors
        lse = F.pad(lse, (0, missing))
        gradient, query, key, value, output = (
            F.pad(x, (0, 0, 0, missing)) for x in (gradient, query, key, value, output)
        )

        def cut(x):  # (B, H, T, ...) to (B, H * P, T / P, ...)
            return x.unflatten(2, (parts, -1)).flatten(1, 2)

        def join(x):
            return x.unflatten(1, (-1, parts)).flatten(2, 3)

        def differentiate(rows, keys, values, is_causal):
            differentiate = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
            gradient, query, output, lse = rows
            return differentiate(gradient, query, keys, values, output, lse, 0.0, is_causal, scale=ctx.scaling)

        rows = gradient, query, output, lse
        results = [join(x) for x in differentiate([cut(x) for x in rows], cut(key), cut(value), True)]
        part_length = query.shape[2] // parts
        for begin in range(part_length, query.shape[2], part_length):
            part = slice(begin, begin + part_length)
            keys, values = (x[:, :, None, :begin].expand(-1, -1, parts, -1, -1).flatten(1, 2) for x in (key, value))
            pieces = differentiate([cut(x[:, :, part]) for x in rows], keys, values, False)
            results[0][:, :, part] += join(pieces[0])
            for result, piece in zip(results[1:], pieces[1:]):
                result[:, :, :begin] += piece.unflatten(1, (-1, parts)).sum(2)
        return *(x[:, :, :length] for x in results), None, None
