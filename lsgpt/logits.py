"""The exact largest attention logit of each head, computed without a matrix of all logits.

Growing logits are an early sign of diverging training (arXiv:2505.15548), but of the fast attention kernels only our
Triton kernel reports them: FlashAttention's log-sum-exp is not the maximum and cannot be converted into it.

Shapes: B batch, T queries, S keys, H query heads, H_kv key/value heads, D `head_dim`.
"""

import torch

from lsgpt.modeling_lsgpt.visibility_lsgpt import HIDDEN, Visibility


LOGITS_AT_ONCE = 1 << 22
"""Number of logits to compute at once, 16 MiB in float32."""

LOCAL_ROWS = 128
"""Number of queries to process at once in local heads; more would waste work on keys outside their windows."""


@torch.no_grad()
def max_logits(query: torch.Tensor, key: torch.Tensor, scaling: float, visibility: Visibility) -> torch.Tensor:
    """
    The largest `|q . k * scaling|` of each head over the pairs that attend, in float32, before soft-capping.

    Processes the queries in chunks, and for local heads only the keys that their windows reach. Queries at padding do
    not count. With an additive mask, a pair counts if the softmax gives it some weight.

    Args:
        query (`(B, H, T, D)`), key (`(B, H_kv, S, D)`): As passed to the attention function.
        scaling: Factor of the dot products.
        visibility: Which keys each query may attend to.

    Returns:
        `(H,)` maxima; 0 for a head without any pair, NaN where a logit is NaN.
    """
    v = visibility
    batch_size, num_heads, q_length, head_dim = query.shape
    num_kv_heads, kv_length = key.shape[1:3]
    query = query.view(batch_size, num_kv_heads, -1, q_length, head_dim)
    is_banded = v.mask is None and not v.has_empty_slots  # then the last query and key have the same position
    reach = v.window if v.window is not None and is_banded else kv_length
    rows = LOGITS_AT_ONCE // (batch_size * num_heads * min(kv_length, reach + LOCAL_ROWS))
    rows = max(1, min(rows, q_length, LOCAL_ROWS if reach < kv_length else q_length))
    batch = torch.arange(batch_size, device=query.device)[:, None, None]
    result = torch.zeros(num_kv_heads, num_heads // num_kv_heads, device=query.device)
    additive = v.dense()[:, :, None] if v.mask is not None and v.mask.dtype != torch.bool else None
    for start in range(0, q_length, rows):
        stop = min(start + rows, q_length)
        begin, end = 0, kv_length
        if is_banded:
            begin, end = max(kv_length - q_length + start - reach + 1, 0), kv_length - q_length + stop
        q, k = query[:, :, :, start:stop].float(), key[:, :, None, begin:end].float()
        with torch.autocast(query.device.type, enabled=False):  # autocast would multiply in half precision
            logits = q @ k.transpose(-1, -2) * scaling
        positions = v.query_positions[start:stop, None]
        if additive is not None:
            mask = additive[:, :, :, start:stop]
            visible = ((logits + mask).softmax(-1) > 0) & (mask > HIDDEN)
        else:
            visible = v.sees(batch, 0, positions, v.key_positions[begin:end])
            visible = visible.expand(batch_size, -1, -1)[:, None, None]
        if v.padding_mask is not None:
            visible = visible & v.padding_mask[batch, positions][:, None, None]
        result = torch.maximum(result, logits.masked_fill(~visible, 0.0).abs().amax(dim=(0, 3, 4)))
    return result.flatten()
