"""The attention implementation `triton`: all kinds of heads in one launch of a fused GPU kernel of ours.

It is registered with Transformers when `lsgpt` is imported, and does not travel with checkpoints.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from lsgpt.modeling_lsgpt import ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS, GLOBAL, Visibility


def triton_mask(mask_function: Callable, **kwargs) -> Any:
    """
    Padding and documents as `Spans`; the mask of `sdpa` for single tokens, custom masks and static caches. Raises
    `ValueError` for other models than LSGPT.
    """
    if not hasattr(mask_function, "documents"):
        raise ValueError('attn_implementation="triton" belongs to LSGPT; other models cannot use it')
    v: Any = mask_function
    if v.q_length == 1 or v.mask is not None or v.overlay is not None or v.has_empty_slots:
        return ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](mask_function=v, **kwargs)
    from .triton_kernels import make_spans  # noqa: PLC0415 (Triton is optional)

    return make_spans(v)


def spans_of_all_heads(visibility: dict[str, Visibility]) -> Any:
    """The `Spans` of all kinds of heads, which are the same if nothing was cached; `None` otherwise."""
    is_joint = all(v.is_square and v.q_length > 1 and v.mask is v.overlay is None for v in visibility.values())
    return triton_mask(next(iter(visibility.values()))) if is_joint else None


triton_mask.of_all_heads = spans_of_all_heads  # type: ignore[attr-defined]


def triton_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """
    Transformers' attention function for the kernels, for all heads of a layer or for those of one kind. With all
    heads, it also updates the layer's largest logits if they are measured. Raises `ValueError` for what the kernels do
    not support.
    """
    is_fused = isinstance(attention_mask, tuple)  # it is `Spans`
    if softcap is not None or (dropout and is_fused):
        what = "attention_dropout" if softcap is None else "attn_logit_softcapping"
        raise ValueError(
            f"`triton` does not support `{what}`, which is {softcap or dropout} here; use "
            f'attn_implementation="{"sdpa" if softcap is None else "eager"}", or disable it'
        )
    if not is_fused:
        return ALL_ATTENTION_FUNCTIONS["sdpa"](
            module, query, key, value, attention_mask, dropout, scaling, s_aux, **kwargs
        )
    from .triton_kernels import fused_attention_forward  # noqa: PLC0415

    num_global_heads = 0 if sliding_window else query.shape[1]
    has_all_heads = query.shape[1] == module.config.num_attention_heads
    if has_all_heads:
        num_global_heads = sum(heads.num_heads for heads in module.head_groups if heads.kind == GLOBAL)
    # After other tokens, there is a call for each kind of head, and the layer has measured already.
    is_measured = getattr(module, "max_logits", None) is not None
    measure = is_measured and has_all_heads and query.shape[2] == key.shape[2]
    query, key = query.to(value.dtype), key.to(value.dtype)  # under autocast, they may have a higher precision
    spans: Any = attention_mask
    output, maxima = fused_attention_forward(
        query, key, value, spans, num_global_heads, sliding_window or 0, scaling, s_aux, measure
    )
    if measure:
        module.max_logits = torch.maximum(module.max_logits.to(maxima.device), maxima.detach())
    return output, None


triton_attention_forward.takes_sinks_of_queries = True  # type: ignore[attr-defined]
AttentionInterface.register("triton", triton_attention_forward)
AttentionMaskInterface.register("triton", triton_mask)
