"""CPU optimisations. Everything here computes the same as a plain PyTorch function, but divides the work differently:
the backward pass of a few global heads on all cores, narrow heads padded with zeros, the product of a matrix with a
single row on all cores. You can understand the model without this file.

Shapes: B batch, T queries, S keys, H query heads, D `head_dim`, P parts.
"""

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers.utils.import_utils import is_tracing


MIN_PART_LENGTH = 512
"""Minimum number of queries in a part of `causal_attention_forward`; shorter parts cost more than they gain."""

MIN_HEAD_DIM = 16
"""Width to which heads narrower than 12 are padded; PyTorch's kernel is then faster (at 8, by a third with AVX2)."""


def head_dim_to_compute(query: torch.Tensor) -> int:
    """The width at which `scaled_dot_product_attention` is fastest for queries `(B, H, T, D)`: D, or a little more."""
    head_dim = query.shape[-1]
    is_worth_a_copy = query.device.type == "cpu" and not is_tracing(query) and query.shape[2] > 1
    return MIN_HEAD_DIM if is_worth_a_copy and head_dim < 12 else head_dim


def num_causal_parts(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> int:
    """
    Number of parts P with which `causal_attention_forward` keeps more CPU threads busy than there are heads; 1 if it
    does not help: on other devices, without gradients, or with enough heads.
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
    return _CausalAttention.apply(query, key, value, scaling, num_parts).transpose(1, 2)


class _CausalAttention(torch.autograd.Function):
    """See `causal_attention_forward`. Uses the operators that `scaled_dot_product_attention` itself calls."""

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


class Linear(nn.Linear):
    """
    `nn.Linear` that uses all CPU threads for a single input row in float32.

    Decoding reads every weight once for each token. PyTorch multiplies a matrix by a single row on one core. A batch
    of products, one for each thread with its share of the weight's rows, uses all cores.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Maps `(..., in_features)` to `(..., out_features)`."""
        if is_tracing(input) or not self._takes_parts(input):
            return super().forward(input)
        parts = torch.get_num_threads()
        rows = self.weight.shape[0] // parts
        weights = self.weight[: parts * rows].unflatten(0, (parts, rows)).transpose(1, 2)
        output = torch.bmm(input.reshape(1, 1, -1).expand(parts, -1, -1), weights).flatten()
        if parts * rows < self.weight.shape[0]:
            output = torch.cat((output, torch.mv(self.weight[parts * rows :], input.flatten())))
        if self.bias is not None:
            output = output + self.bias
        return output.view(*input.shape[:-1], -1)

    def _takes_parts(self, input: torch.Tensor) -> bool:
        is_single_row = input.numel() == input.shape[-1] and input.device.type == "cpu"
        # Quantised and sharded weights are of other types.
        is_plain = type(self.weight) is nn.Parameter and self.weight.dtype == input.dtype == torch.float32
        is_inference = not (torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"))
        return is_single_row and is_plain and is_inference and torch.get_num_threads() > 1
