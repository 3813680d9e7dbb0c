"""What PyTorch's `scaled_dot_product_attention` lacks: windows at linear cost, sinks, and a past without a mask.

Shapes: B batch, T queries, S keys, H query heads, H_kv key/value heads, D `head_dim`, W window, N blocks, C queries in
a block. `scaling` is the factor of the dot products, `dropout` the probability of dropping an attention weight.
"""

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right
from transformers.integrations.sdpa_attention import repeat_kv

from .visibility_lsgpt import Visibility


MIN_BLOCK_LENGTH = 64
"""
Minimum number of queries in a block of local heads. Shorter blocks process fewer masked keys; longer ones make fewer
copies of a key's gradient. On the CPU, 32 was a tenth faster in the forward and a tenth slower in the backward pass.
For wide windows, a block has a quarter of the window; with half of a window of 910, the CPU took a fifth more time.
"""

HAS_CPU_OPERATORS = hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")
"""Whether PyTorch still has the operators that return the log-sum-exp, which are not part of its public interface."""


def blocked_mask(visibility: Visibility) -> torch.Tensor:
    """
    The mask between blocks of C queries and the C + W - 1 keys that their windows reach, True where a query may
    attend: `(B or 1, N, 1, C, C + W - 1)`, for `blocked_attention_forward`.
    """
    window, q_offset, device = visibility.window, visibility.q_offset, visibility.device
    block_length = max(MIN_BLOCK_LENGTH, window // 4)
    num_blocks = (visibility.q_length + block_length - 1) // block_length  # ONNX would round a negative number up
    first_query = torch.arange(num_blocks, device=device)[None, :, None, None] * block_length + q_offset
    query = first_query + torch.arange(block_length, device=device)[:, None]
    key = first_query + torch.arange(block_length + window - 1, device=device) - (window - 1)
    end = q_offset + visibility.q_length
    batch = torch.arange(visibility.batch_size, device=device)[:, None, None, None]
    # Blocks extend beyond both ends of the sequence, so positions are clamped for looking up their tokens.
    inside = (key >= visibility.kv_offset) & (key < end)
    mask = visibility.sees(batch, 0, query.clamp(max=end - 1), key.clamp(min=visibility.kv_offset, max=end - 1))
    return (mask & inside)[:, :, None]


def blocked_attention_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float,
    dropout: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    Sliding-window attention in O(T * W) time and memory, forward and backward, on every device.

    The queries are cut into N blocks of C. A block can see C + W - 1 keys, its own and the W - 1 before, so one small
    `scaled_dot_product_attention` with the blocks as its batch is enough. Query heads that share a key/value head are
    stacked along the query axis of the block, so keys are not repeated.

    Args:
        query (`(B, H, T, D)`), key (`(B, H_kv, S, D)`), value (`(B, H_kv, S, D)`): The last key belongs to the last
            query. Keys that no query's window reaches may be missing.
        attention_mask (`(B or 1, N, 1, C, C + W - 1)`): From `blocked_mask`.
        sinks (`(H,)` or `(B or 1, H, T)`, *optional*): One extra logit per head in the softmax's denominator.

    Returns:
        Outputs `(B, T, H, D)`.
    """
    batch_size, num_heads, q_length, head_dim = query.shape
    num_kv_heads = key.shape[1]
    groups = num_heads // num_kv_heads
    num_blocks, _, block_length, span = attention_mask.shape[1:]
    past = span - block_length  # W - 1
    tail = num_blocks * block_length - q_length

    query = query.transpose(1, 2)
    if torch.compiler.is_compiling() or tail:  # an exported program must handle lengths with and without a tail
        query = F.pad(query, (0, 0, 0, 0, 0, tail))
    query = query.reshape(batch_size * num_blocks, block_length, num_kv_heads, groups, head_dim)
    query = query.permute(0, 2, 3, 1, 4).flatten(2, 3)
    keys, values = (
        _CutKeys.apply(x[:, :, -(past + q_length) :], num_blocks, block_length, past, tail) for x in (key, value)
    )
    mask = attention_mask.expand(batch_size, -1, groups, -1, -1).flatten(2, 3).flatten(0, 1)[:, None]
    if sinks is None:
        output = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, dropout_p=dropout, scale=scaling)
    else:
        if sinks.ndim == 3:
            sinks = F.pad(sinks, (0, tail)).unflatten(2, (num_blocks, block_length)).transpose(1, 2)
            sinks = sinks.expand(batch_size, -1, -1, -1).flatten(0, 1)
        sinks = _stack_sinks(sinks, num_kv_heads, block_length)
        output = _attend_with_sinks(query, keys, values, mask, sinks, scaling, dropout)
    output = output.unflatten(2, (groups, block_length)).permute(0, 3, 1, 2, 4).flatten(2, 3)
    output = output.unflatten(0, (batch_size, num_blocks))
    if torch.compiler.is_exporting():  # flattened and cut, the program would refuse some lengths
        token = torch.arange(q_length, device=output.device)
        return output[:, token // block_length, token % block_length]
    return output.flatten(1, 2)[:, :q_length]


class _CutKeys(torch.autograd.Function):
    """
    Cuts keys or values into the spans that blocks of queries see: `(B, H_kv, S, D)` to `(B * N, H_kv, C + W - 1, D)`.

    The spans overlap. On the CPU, the spans of a single sequence are views of one padded copy. PyTorch's own gradient
    of such views is summed element by element. Here, each span is split into pieces of at most C keys, and each piece
    is added for all blocks at once.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(keys, num_blocks: int, block_length: int, past: int, tail: int):
        missing = past + num_blocks * block_length - tail - keys.shape[2]
        keys = F.pad(keys.transpose(1, 2), (0, 0, 0, 0, missing, tail))
        spans = keys.unfold(1, past + block_length, block_length).transpose(3, 4).flatten(0, 1)
        # Only the CPU's kernels are known to accept overlapping inputs.
        return spans if keys.device.type == "cpu" else spans.contiguous()

    @staticmethod
    def setup_context(ctx, inputs, output):
        keys, *ctx.numbers = inputs
        ctx.shape = keys.shape

    @staticmethod
    def backward(ctx, gradient):
        (num_blocks, block_length, past, tail), (batch_size, num_heads, length, head_dim) = ctx.numbers, ctx.shape
        missing = past + num_blocks * block_length - tail - length
        span, covered = gradient.shape[2], num_blocks * block_length
        gradient = gradient.transpose(1, 2).unflatten(0, (batch_size, num_blocks))
        result = gradient.new_zeros(batch_size, span - block_length + covered, num_heads, head_dim)
        for end in range(span, 0, -block_length):
            begin = max(end - block_length, 0)
            blocks = result[:, begin : begin + covered].unflatten(1, (num_blocks, block_length))
            blocks[:, :, : end - begin].add_(gradient[:, :, begin:end])
        return result[:, missing : missing + length].transpose(1, 2), None, None, None, None


def sink_attention_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor,
    scaling: float,
    dropout: float = 0.0,
) -> torch.Tensor:
    """
    `scaled_dot_product_attention` with a sink in every head's softmax, which PyTorch's function does not support.

    Args:
        query (`(B, H, T, D)`), key (`(B, H_kv, S, D)`), value (`(B, H_kv, S, D)`): As for PyTorch's function.
        mask (`(B or 1, 1, T, S)`): Boolean, True where a query may attend, or additive; `None` if every query sees
            every key.
        sinks (`(H,)` or `(B or 1, H, T)`): One extra logit per head in the softmax's denominator.

    Returns:
        Outputs `(B, T, H, D)`.
    """
    num_kv_heads, q_length = key.shape[1], query.shape[2]
    groups = query.shape[1] // num_kv_heads
    # As in blocks, query heads that share a key/value head are stacked along the query axis.
    query = query.unflatten(1, (num_kv_heads, groups)).flatten(2, 3)
    sinks = _stack_sinks(sinks, num_kv_heads, q_length)
    if mask is not None and q_length > 1:
        mask = mask.repeat(1, 1, groups, 1)
    output = _attend_with_sinks(query, key, value, mask, sinks, scaling, dropout)
    return output.unflatten(2, (groups, q_length)).flatten(1, 2).transpose(1, 2)


def _stack_sinks(sinks: torch.Tensor, num_kv_heads: int, q_length: int) -> torch.Tensor:
    """Sinks `(H,)` or `(B or 1, H, T)` in the order of stacked query heads: `(B or 1, H_kv, G * T)`."""
    if sinks.ndim == 1:
        sinks = sinks[None, :, None].expand(-1, -1, q_length)
    return sinks.unflatten(1, (num_kv_heads, -1)).flatten(2, 3)


def _autocast_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype in which kernels compute with a tensor: its own, without autocast."""
    device = x.device.type
    is_autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if is_autocast else x.dtype


def _attend_with_sinks(query, key, value, mask, sinks, scaling: float, dropout: float) -> torch.Tensor:
    """`sink_attention_forward` for as many query as key heads, `sinks` `(B or 1, H, T)`, outputs `(B, H, T, D)`."""
    is_on_cpu = query.device.type == "cpu" and not (torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"))
    if HAS_CPU_OPERATORS and is_on_cpu and not dropout and (mask is None or not mask.requires_grad):
        return _SinkAttention.apply(query, key, value, mask, sinks, scaling)[0]
    # The sink becomes one more key, with a value of 0. In an extra dimension, this key is 1, the others are 0, and the
    # queries hold the sink's logit. The width is a multiple of 8 because kernels need that.
    head_dim = query.shape[-1]
    width = 8 - head_dim % 8
    lowest = torch.finfo(_autocast_dtype(query)).min  # an infinity times the zeros of the other keys would be NaN
    sinks = (sinks / scaling).clamp(min=lowest).to(query.dtype)[..., None].expand(query.shape[0], -1, -1, 1)
    query = torch.cat([query, F.pad(sinks, (0, width - 1))], dim=-1)
    sink = torch.zeros_like(key[:, :, :1])
    key = torch.cat([F.pad(key, (0, width)), F.pad(F.pad(sink, (0, 1), value=1.0), (0, width - 1))], dim=2)
    value = F.pad(value, (0, width, 0, 1))
    if mask is not None:
        mask = F.pad(mask, (0, 1), value=mask.dtype == torch.bool)
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling)
    return output[..., :head_dim]


def _additive(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)


class _SinkAttention(torch.autograd.Function):
    """
    Attention with sinks, using the operators that `scaled_dot_product_attention` itself calls on the CPU.

    The forward operator also returns the log-sum-exp of each row of logits, which determines the share of weight that
    the sink leaves to the keys. Given the log-sum-exp with the sink, the backward operator uses the actual weights.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(query, key, value, mask, sinks, scaling: float):
        mask = _additive(mask, query.dtype)
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        output, lse = attend(query, key, value, 0.0, False, attn_mask=mask, scale=scaling)
        lse_with_sinks = torch.logaddexp(lse, sinks.to(lse.dtype))
        output = output * (lse - lse_with_sinks).exp()[..., None].to(output.dtype)
        return output, lse_with_sinks

    @staticmethod
    def setup_context(ctx, inputs, output):
        query, key, value, mask, sinks, ctx.scaling = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(query, key, value, *output, sinks, mask)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient, _):
        query, key, value, output, lse, sinks, mask = ctx.saved_tensors
        mask = _additive(mask, query.dtype)
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        gradients = backward(gradient, query, key, value, output, lse, 0.0, False, attn_mask=mask, scale=ctx.scaling)
        weights = (sinks - lse).exp()
        sinks_gradient = -(weights * (gradient * output).sum(-1)).sum_to_size(sinks.shape).to(sinks.dtype)
        return *gradients, None, sinks_gradient, None


def past_attention_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, dropout: float = 0.0
) -> torch.Tensor:
    """
    Causal attention of a part of a sequence over its past and itself, in memory O(T + S).

    PyTorch's kernels for GPUs can do it. On the CPU, they would need a mask of T x S. There are two calls instead, for
    the past, of which every query sees everything, and for the part itself, which is causal; each query's shares of
    the two are known from the log-sum-exp of its logits. With dropout, the mask is made after all.

    Args:
        query (`(B, H, T, D)`), key (`(B, H_kv, S, D)`), value (`(B, H_kv, S, D)`): The last key belongs to the last
            query, and S > T.

    Returns:
        Outputs `(B, T, H, D)`.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    query, key, value = (x.to(_autocast_dtype(x)) for x in (query, key, value))
    if HAS_CPU_OPERATORS and query.device.type == "cpu" and not dropout:
        return _PastAttention.apply(query, key, value, scaling)[0].transpose(1, 2)
    mask = causal_lower_right(query.shape[2], key.shape[2])
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling)
    return output.transpose(1, 2)


class _PastAttention(torch.autograd.Function):
    """
    `past_attention_forward` for equally many query and key heads, with the operators that
    `scaled_dot_product_attention` itself calls on the CPU. Given the joint outputs and log-sum-exp, the backward
    operator uses the actual weights, so the gradients of the two calls only need to be added.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(query, key, value, scaling: float):
        attend, past = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, key.shape[2] - query.shape[2]
        before = attend(query, key[:, :, :past], value[:, :, :past], 0.0, False, scale=scaling)
        own = attend(query, key[:, :, past:], value[:, :, past:], 0.0, True, scale=scaling)
        lse = torch.logaddexp(before[1], own[1])
        output = sum(part * (part_lse - lse).exp()[..., None] for part, part_lse in (before, own))
        return output.to(query.dtype), lse

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.scaling = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient, _):
        query, key, value, output, lse = ctx.saved_tensors
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        past, results = key.shape[2] - query.shape[2], []
        for part, is_causal in ((slice(past), False), (slice(past, None), True)):
            tensors = gradient, query, key[:, :, part], value[:, :, part], output, lse
            results.append(backward(*tensors, 0.0, is_causal, scale=ctx.scaling))
        (before, *past_gradients), (own, *own_gradients) = results
        sums = (torch.cat(parts, dim=2) for parts in zip(past_gradients, own_gradients))
        return (before.to(lse.dtype) + own).to(query.dtype), *sums, None
