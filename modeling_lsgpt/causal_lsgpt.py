"""Causal attention of a few global heads on the CPU, whose backward pass uses all cores.

It computes what PyTorch's `scaled_dot_product_attention` does. With one head of 64 dimensions, one sequence and two
cores, forward and backward took 0.46 of the time at 2,048 tokens and 0.26 at 8,192 (see docs/attention.md).

Shapes: B batch, T queries, S keys, H query heads, D `head_dim`, P parts.
"""

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


MIN_PART_LENGTH = 512
"""Minimum number of queries in a part of `causal_attention_forward`; shorter parts cost more than they gain."""


def num_causal_parts(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> int:
    """
    Number of parts P with which `causal_attention_forward` keeps more CPU threads busy than there are heads; 1 if it
    does not help: on other devices, without gradients, or with enough heads.
    """
    q_length, kv_length = query.shape[2], key.shape[2]
    needs_gradient = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    if query.device.type != "cpu" or not needs_gradient:
        return 1
    if torch.is_autocast_enabled("cpu") or q_length != kv_length or key.shape[1] != query.shape[1]:
        return 1
    return max(min(torch.get_num_threads() // (query.shape[0] * query.shape[1]), q_length // MIN_PART_LENGTH), 1)


def causal_attention_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, num_parts: int
) -> torch.Tensor:
    """
    `scaled_dot_product_attention` of a few causal heads on the CPU, with a parallel backward pass.

    PyTorch's backward pass on the CPU uses one thread for each head of each sequence, so a single global head keeps
    only one core busy. Here, each head is replaced by P heads, in P calls of the backward operator:

    - The T queries are cut into P parts. Attention of a part's queries to the keys of the same part is a causal
      problem of length T / P; the P parts are the heads of one call.
    - The queries of a part also see all keys of the parts before it, without a mask. Each of the P - 1 parts that have
      such keys takes one call, whose heads are P equal pieces of the part's queries.

    The pieces have T / P² queries, so T is padded to a multiple of P² with queries whose gradients are zero. The
    gradients of all calls add up, because all use the log-sum-exp of whole rows from the forward pass.

    Args:
        query, key, value (`(B, H, T, D)`): Each query sees the keys up to its own position.
        scaling: Factor of the dot products.
        num_parts: P.

    Returns:
        Outputs `(B, T, H, D)`.
    """
    return _CausalAttention.apply(query, key, value, scaling, num_parts)[0].transpose(1, 2)


class _CausalAttention(torch.autograd.Function):
    """See `causal_attention_forward`. Uses the operators that `scaled_dot_product_attention` itself calls."""

    @staticmethod
    def forward(query, key, value, scaling: float, num_parts: int):
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return attend(query, key, value, 0.0, True, scale=scaling)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.scaling, ctx.num_parts = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient, _):
        num_parts, length = ctx.num_parts, gradient.shape[2]
        missing = -length % num_parts**2
        query, key, value, output, lse = ctx.saved_tensors
        gradient, query, key, value, output = (
            F.pad(x, (0, 0, 0, missing)) for x in (gradient, query, key, value, output)
        )
        rows = (gradient, query, output, F.pad(lse, (0, missing)))

        own_rows = [_rows_to_heads(x, num_parts) for x in rows]
        own_keys, own_values = _rows_to_heads(key, num_parts), _rows_to_heads(value, num_parts)
        gradients = _differentiate(*own_rows, own_keys, own_values, True, ctx.scaling)
        q_gradient, k_gradient, v_gradient = (_heads_to_rows(x, num_parts) for x in gradients)

        part_length = query.shape[2] // num_parts
        for begin in range(part_length, query.shape[2], part_length):
            part = slice(begin, begin + part_length)
            pieces = [_rows_to_heads(x[:, :, part], num_parts) for x in rows]
            # Every piece attends to the same keys, those before the part.
            keys, values = (x[:, :, :begin].repeat_interleave(num_parts, dim=1) for x in (key, value))
            gradients = _differentiate(*pieces, keys, values, False, ctx.scaling)
            q_gradient[:, :, part] += _heads_to_rows(gradients[0], num_parts)
            k_gradient[:, :, :begin] += gradients[1].unflatten(1, (-1, num_parts)).sum(2)
            v_gradient[:, :, :begin] += gradients[2].unflatten(1, (-1, num_parts)).sum(2)
        return *(x[:, :, :length] for x in (q_gradient, k_gradient, v_gradient)), None, None


def _rows_to_heads(x: torch.Tensor, num_parts: int) -> torch.Tensor:
    """`(B, H, T, ...)` to `(B, H * P, T / P, ...)`."""
    return x.unflatten(2, (num_parts, -1)).flatten(1, 2)


def _heads_to_rows(x: torch.Tensor, num_parts: int) -> torch.Tensor:
    """`(B, H * P, T / P, ...)` to `(B, H, T, ...)`."""
    return x.unflatten(1, (-1, num_parts)).flatten(2, 3)


def _differentiate(gradient, query, output, lse, key, value, is_causal: bool, scaling: float):
    """Gradients of query, key and value."""
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return backward(gradient, query, key, value, output, lse, 0.0, is_causal, scale=scaling)
