"""The largest attention logit of each head, exactly, and without a matrix of all logits.

Growing logits announce diverging training (arXiv:2505.15548), but no attention kernel that is fast reports them:
FlashAttention's log-sum-exp is not the maximum and cannot be turned into it.

Shapes: B batch, T queries, S keys, H query heads, H_kv key/value heads, D `head_dim`.
"""

from collections.abc import Iterator

import torch
from torch import nn


LOGITS_AT_ONCE = 1 << 22
"""Number of logits that are computed together, 16 MiB in float32."""

LOCAL_ROWS = 128
"""Number of queries of local heads that are taken together: more of them would meet more keys that none can see."""


@torch.no_grad()
def max_logits(
    query: torch.Tensor,
    key: torch.Tensor,
    scaling: float,
    window: int | None = None,
    mask: torch.Tensor | None = None,
    padding_mask: torch.Tensor | None = None,
    documents: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    The largest `|q . k * scaling|` of each head over the pairs that may attend, in float32, before soft-capping.

    Takes rows of queries in turn, and for local heads only the keys inside their window.

    Args:
        query (`(B, H, T, D)`), key (`(B, H_kv, S, D)`): As the engine gets them; the last query is at the last
            key.
        scaling: Factor of the dot products.
        window: Number of keys that a query sees, its own included; `None` for all before it.
        mask (`(B or 1, 1, T, S)`, *optional*): Says by itself which pairs may attend, as booleans or as additive
            numbers; the arguments below are then ignored, and so is causality.
        padding_mask (`(B, S)`, *optional*): True for real tokens.
        documents (`(B, S)`, *optional*): Numbers of packed documents; attention stays inside one.

    Returns:
        `(H,)` maxima; 0 for a head without any pair.
    """
    batch_size, num_heads, q_length, head_dim = query.shape
    num_kv_heads, kv_length = key.shape[1:3]
    first = kv_length - q_length
    query = query.view(batch_size, num_kv_heads, -1, q_length, head_dim)
    is_local = window is not None and mask is None
    reach = window if is_local else kv_length
    rows = LOGITS_AT_ONCE // (batch_size * num_heads * min(kv_length, reach + LOCAL_ROWS))
    rows = max(1, min(rows, q_length, LOCAL_ROWS if is_local else q_length))
    position = torch.arange(kv_length, device=query.device)
    result = torch.zeros(num_kv_heads, num_heads // num_kv_heads, device=query.device)
    for start in range(0, q_length, rows):
        stop = min(start + rows, q_length)
        begin, end = (0, kv_length) if mask is not None else (max(first + start - reach + 1, 0), first + stop)
        q, k = query[:, :, :, start:stop].float(), key[:, :, None, begin:end].float()
        with torch.autocast(query.device.type, enabled=False):  # it would multiply in half precision
            logits = q @ k.transpose(-1, -2) * scaling
        q, k = position[first + start : first + stop, None], position[begin:end]
        if mask is not None:
            visible = mask[:, 0, start:stop]
            visible = visible if mask.dtype == torch.bool else visible > torch.finfo(mask.dtype).min
        else:
            visible = (k <= q) & (k > q - reach)
            if padding_mask is not None:
                visible = visible & padding_mask[:, None, begin:end]
            if documents is not None:
                visible = visible & (documents[:, first + start : first + stop, None] == documents[:, None, begin:end])
            visible = visible.expand(batch_size, -1, -1)
        logits = logits.masked_fill(~visible[:, None, None], 0.0).abs()
        result = torch.maximum(result, logits.amax(dim=(0, 3, 4)))
    return result.flatten()


def attention_layers(model: nn.Module) -> list[nn.Module]:
    """The `LSGPTAttention`s of an LSGPT model, alone or wrapped, in order. Raises `ValueError` for other models."""
    # By name, because a checkpoint's own code has classes of its own.
    layers = [module for module in model.modules() if type(module).__name__ == "LSGPTAttention"]
    if not layers:
        raise ValueError(f"`model` must be an LSGPT model; got {type(model).__name__}")
    return layers


class MaxLogits:
    """
    Switches the measurement on and off in every attention layer of a model, and reads it.

    While it is on, each forward pass raises a running maximum in every `HeadGroup`; the output stays the same.
    """

    def __init__(self, model: nn.Module):
        """Takes an LSGPT model, on its own or wrapped (DDP, PEFT, `torch.compile`). Raises `ValueError` for others."""
        self.layers = attention_layers(model)

    def start(self):
        """Forgets earlier maxima and measures from now on."""
        for group in self._groups():
            group.max_logit = torch.zeros(group.num_heads)

    def stop(self):
        """Measures no more, and forgets the maxima."""
        for group in self._groups():
            group.max_logit = None

    def read(self) -> torch.Tensor:
        """The maxima since `start`, `(num_hidden_layers, num_attention_heads)` in float32, global heads first."""
        device = self.layers[0].q_proj.weight.device
        rows = [torch.cat([group.max_logit.to(device) for group in layer.head_groups]) for layer in self.layers]
        return torch.stack(rows)

    def _groups(self) -> Iterator[nn.Module]:
        for layer in self.layers:
            yield from layer.head_groups


@torch.no_grad()
def measure_max_logits(model: nn.Module, **inputs) -> torch.Tensor:
    """
    The largest attention logit of every head in one forward pass.

    It is the maximum of `|q . k * scaling|` after QK-norm and rotary embedding and before soft-capping, over all pairs
    that may attend, computed exactly in float32 whatever engine runs the model.

    Args:
        model: An LSGPT model.
        **inputs: What its `forward` takes, such as `input_ids` and `attention_mask`.

    Returns:
        `(num_hidden_layers, num_attention_heads)` in float32 on the model's device, global heads first.

    ```python
    >>> from lsgpt import measure_max_logits
    >>> measure_max_logits(model, **tokenizer("def", return_tensors="pt")).max()
    ```
    """
    recorder = MaxLogits(model)
    recorder.start()
    try:
        model(**{"use_cache": False, **inputs})
        return recorder.read()
    finally:
        recorder.stop()
