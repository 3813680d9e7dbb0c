"""Attention masks of LSGPT: one mask for each kind of head, built once per forward pass.

Transformers' mask helpers have no head axis, so the global and the local heads each get a mask of their own, from the
same mask functions of `(batch, head, query, key)` indices. The one shape that Transformers does not have is the
*blocked* mask of the `sdpa` engine, which evaluates the local heads' function on the band around the diagonal only.

Shapes: B batch, T queries, S keys, W `sliding_window`, N blocks, C queries in a block.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import Cache
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    and_masks,
    causal_mask_function,
    flex_attention_mask,
    packed_sequence_mask_function,
    padding_mask_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
)
from transformers.utils.import_utils import is_tracing

from .configuration_lsgpt import GLOBAL, LOCAL, LSGPTConfig


MIN_BLOCK_LENGTH = 64
"""
Queries in a block of local heads, at least. Shorter blocks see fewer keys in vain; longer ones make fewer copies of a
key's gradient. On the CPU, 32 was a tenth faster forward and a tenth slower backward.
"""


class Spans(NamedTuple):
    """
    The mask of the `triton` engine for one kind of head: causality and window are known to it, padding and packed
    documents are told as intervals. The last query stands at the last key, and positions count from the first key.

    Args:
        first (`(B, S)`, int32, *optional*): First key that the query at each position may see.
        last (`(B, S)`, int32, *optional*): Position of the last query that may see each key, -1 for padding.
    """

    first: torch.Tensor | None = None
    last: torch.Tensor | None = None


def create_attention_masks(
    config: LSGPTConfig,
    inputs_embeds: torch.Tensor,
    attention_mask: torch.Tensor | dict | None = None,
    past_key_values: Cache | None = None,
    position_ids: torch.Tensor | None = None,
    **kwargs,
) -> dict:
    """
    The mask of each kind of head that the model has, `{GLOBAL: ..., LOCAL: ...}`, in the form that the engine
    `config._attn_implementation` takes.

    Args:
        config: The model's configuration.
        inputs_embeds (`(B, T, hidden_size)`): Read for shape, dtype and device only.
        attention_mask: `(B, past + T)`, 1 for real tokens and 0 for padding; or `(B, 1, T, past + T)`, boolean (True
            may attend) or additive, for the global heads as it is and for the local heads inside their window; or
            the finished dictionary, returned as it is.
        past_key_values: The cache before this step's update.
        position_ids (`(B, T)`): Where given, positions that restart are taken for the start of another document
            packed into the same row, and attention does not cross into it. After a cache, the first new token's
            position says how many of the cached tokens its document has. Not read with a static cache in use, whose
            length is not known without waiting for the device.

    Returns:
        A dictionary of boolean masks, True where a query may attend: `(B, 1, T, S)`; `None` where causality is all and
        the engine knows it; `(B or 1, N, 1, C, C + W - 1)` for local heads in blocks; a `BlockMask` for
        `flex_attention`, one for both kinds where it has a head axis; for FlashAttention, which takes causality and
        window as arguments, `(B, S)` padding; and `Spans` for `triton`.
        Beside them stand what they were made of, for logit telemetry: `padding_mask` and `documents`, `(B, past + T)`
        or `None`.

    Raises:
        ValueError: The mask's shape does not fit the inputs, or the engine cannot do what the inputs ask for.
    """
    if isinstance(attention_mask, dict):
        return attention_mask
    batch_size, q_length = inputs_embeds.shape[:2]
    past_length = past_key_values.get_seq_length() if past_key_values is not None else 0
    _check_mask_shape(attention_mask, batch_size, q_length, past_length)

    custom_mask = padding_mask = documents = None
    if attention_mask is not None and attention_mask.ndim == 4:
        custom_mask = attention_mask.to(inputs_embeds.device)
    elif attention_mask is not None:
        padding_mask = attention_mask.to(device=inputs_embeds.device, dtype=torch.bool)
    # A tensor for a length comes from a static cache in use.
    if position_ids is not None and isinstance(past_length, int) and past_length + q_length > 1:
        documents = find_documents(position_ids.expand(batch_size, -1), padding_mask, past_length)
    if "flash" in config._attn_implementation:
        _check_flash_inputs(custom_mask, padding_mask, documents, past_length)
    is_static = getattr(past_key_values, "is_compileable", False)
    takes_spans = config._attn_implementation == "triton" and q_length > 1 and custom_mask is None and not is_static

    masks = {}
    is_first = not is_static and past_length == 0
    if custom_mask is None and is_first and _has_one_flex_mask(config, q_length):
        masks[GLOBAL] = masks[LOCAL] = _create_flex_mask(config, inputs_embeds, padding_mask, documents)
    for kind in (GLOBAL, LOCAL):
        if kind not in config.layer_types or kind in masks:
            continue
        layer_idx = config.layer_types.index(kind)
        q_offset, kv_length, kv_offset = 0, q_length, 0
        if past_key_values is not None:
            q_offset = past_key_values.get_query_offset(layer_idx)
            kv_length, kv_offset = past_key_values.get_mask_sizes(q_length, layer_idx)
        sizes = {"q_length": q_length, "kv_length": kv_length, "q_offset": q_offset, "kv_offset": kv_offset}
        if custom_mask is not None:
            masks[kind] = _restrict_custom_mask(custom_mask, config, kind, batch_size, **sizes)
        elif takes_spans:
            masks[kind] = _create_spans(padding_mask, documents, kv_length, kv_offset)
        else:
            # A decode step sees empty slots in a static cache, so it cannot do without a mask.
            needs_mask = q_length == 1 and is_static
            masks[kind] = _create_mask(config, kind, inputs_embeds, padding_mask, documents, needs_mask, **sizes)
    if not is_static:  # a compiled decode step has no use for growing tensors
        masks |= {"padding_mask": padding_mask, "documents": documents}
    return masks


def engine_of_step(config: LSGPTConfig, q_length: int) -> str:
    """
    The engine that attends in a step of `q_length` queries: the configured one, but plain attention for a single
    query on `flex_attention`, which has nothing to gain there (and on the CPU fails to compile, in PyTorch 2.13), and
    on `triton` wherever there are no `Spans`: for a single query, under a custom mask, and into a static cache.
    """
    engine = config._attn_implementation
    if engine == "triton":
        return "sdpa"
    if engine == "flex_attention" and q_length == 1:
        return "sdpa" if config.attn_logit_softcapping is None else "eager"
    return engine


def find_documents(
    position_ids: torch.Tensor, padding_mask: torch.Tensor | None = None, past_length: int = 0
) -> torch.Tensor | None:
    """
    Numbers the documents that are packed into one row, from the positions at which they restart.

    A real token continues its document when its position is one more than that of the real token before it, or more
    by as many tokens as lie between (padding counts in some users' positions and does not in others'). Of the cached
    tokens, the first new token's document has the last real ones, as many as its position says.

    Args:
        position_ids (`(B, T)`): Position of each new token in its document.
        padding_mask (`(B, past + T)`, *optional*): True for real tokens.
        past_length: Number of cached tokens.

    Returns:
        `(B, past + T)` document numbers, -1 for cached tokens of earlier documents; or `None` when every row holds one
        document (while tracing, where values cannot be looked at, numbers without a cache and `None` with one).
    """
    if past_length and is_tracing(position_ids):
        return None
    index = torch.arange(position_ids.shape[-1], device=position_ids.device)
    is_real = padding_mask[:, past_length:] if padding_mask is not None else torch.ones_like(position_ids).bool()
    last_real = torch.where(is_real, index, -1).cummax(-1).values
    previous = torch.nn.functional.pad(last_real[:, :-1], (1, 0), value=-1)
    step = position_ids - position_ids.gather(-1, previous.clamp(min=0))
    starts = is_real & (previous >= 0) & (step != 1) & (step != index - previous)
    is_one_document = position_ids.shape[-1] == 1 or (not is_tracing(starts) and not starts.any())
    if past_length == 0:
        return None if is_one_document else starts.cumsum(-1)

    first_position = position_ids.gather(-1, is_real.int().argmax(-1, keepdim=True))
    if is_one_document and (first_position >= past_length).all():
        return None
    is_cached = torch.ones_like(first_position).bool().expand(-1, past_length)
    if padding_mask is not None:
        is_cached = padding_mask[:, :past_length]
    tokens_since = is_cached.flip(-1).cumsum(-1).flip(-1)
    is_earlier = is_cached & (tokens_since > first_position)
    if is_one_document and not is_earlier.any():
        return None
    return torch.cat([is_earlier.long().neg(), starts.cumsum(-1)], dim=-1)


def _create_mask(
    config, kind, inputs_embeds, padding_mask, documents, needs_mask, q_length, kv_length, q_offset, kv_offset
):
    window = config.sliding_window if kind == LOCAL else None
    if window is not None and q_length == 1 and kv_length <= window and not needs_mask:
        window = None  # the cache has dropped what lies outside, so the one query needs no mask for it
    mask_function = causal_mask_function if window is None else sliding_window_causal_mask_function(window)
    if documents is not None:
        # A static cache has more keys than there are tokens yet: those belong to no document.
        spare = max(kv_offset + kv_length - documents.shape[-1], 0)
        documents = torch.nn.functional.pad(documents, (0, spare), value=-1)
        mask_function = and_masks(mask_function, packed_sequence_mask_function(documents))

    engine = engine_of_step(config, q_length)
    if engine == "sdpa" and window is not None and q_length > 1 and kv_length > 2 * window:
        if padding_mask is not None:
            mask_function = and_masks(mask_function, padding_mask_function(padding_mask))
        return blocked_mask(mask_function, window, inputs_embeds, q_length, q_offset, kv_offset)

    # Our eager attention takes boolean masks: they give rows without any key a weight of 0, as `sdpa` does.
    build = sdpa_mask if engine == "eager" else ALL_MASK_ATTENTION_FUNCTIONS._global_mapping.get(engine)
    if build is None:
        return None  # engines that bring their own masking, such as paged attention
    return build(
        batch_size=inputs_embeds.shape[0],
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=padding_mask,
        local_size=window,
        allow_is_causal_skip=engine != "eager" and documents is None and not needs_mask,
        dtype=inputs_embeds.dtype,
        device=inputs_embeds.device,
        config=config,
    )


def _has_one_flex_mask(config: LSGPTConfig, q_length: int) -> bool:
    """Whether one mask with a head axis is for all layers: all have the same heads of both kinds."""
    counts = set(config.num_global_heads_per_layer)
    is_mixed = len(counts) == 1 and counts.isdisjoint((0, config.num_attention_heads))
    return is_mixed and engine_of_step(config, q_length) == "flex_attention"


def _create_flex_mask(config, inputs_embeds, padding_mask, documents) -> BlockMask:
    """The mask of all heads, global ones first, for sequences without a cache."""
    sizes = (
        config.num_attention_heads,
        config.num_global_heads_per_layer[0],
        config.sliding_window,
        inputs_embeds.shape[1],
        inputs_embeds.device,
    )
    limits = [] if documents is None else [packed_sequence_mask_function(documents)]
    if padding_mask is not None and (is_tracing(padding_mask) or not padding_mask.all()):
        limits.append(padding_mask_function(padding_mask))
    if not limits and not is_tracing(inputs_embeds):
        return _plain_flex_mask(*sizes)
    return _flex_mask(*sizes, batch_size=inputs_embeds.shape[0], limits=limits)


def _flex_mask(num_heads, num_global_heads, window, length, device, batch_size=None, limits=()) -> BlockMask:
    def visible(batch, head, query, key):
        return (key <= query) & ((head < num_global_heads) | (key > query - window))

    visible = and_masks(visible, *limits)
    is_compiled = device.type == "cuda"  # on the CPU that takes longer than it saves
    return create_block_mask(visible, batch_size, num_heads, length, length, device=device, _compile=is_compiled)


_plain_flex_mask = lru_cache(maxsize=8)(_flex_mask)


def _create_spans(
    padding_mask: torch.Tensor | None, documents: torch.Tensor | None, kv_length: int, kv_offset: int
) -> Spans:
    """The `Spans` of the last `kv_length` keys, from `padding_mask` and `documents` `(B, kv_offset + kv_length)`."""
    if documents is None:
        if padding_mask is None or (not is_tracing(padding_mask) and padding_mask.all()):
            return Spans()
        documents = torch.zeros_like(padding_mask, dtype=torch.int)
    total = kv_offset + kv_length
    position = torch.arange(total, device=documents.device)
    changes = torch.nn.functional.pad(documents.diff(dim=-1) != 0, (1, 1), value=True)
    first = torch.where(changes[:, :-1], position, 0).cummax(-1).values
    last = torch.where(changes[:, 1:], position, total).flip(-1).cummin(-1).values.flip(-1)
    if padding_mask is not None:
        last = last.masked_fill(~padding_mask, -1)
    return Spans(*((x[:, kv_offset:] - kv_offset).int().contiguous() for x in (first, last)))


def blocked_mask(
    mask_function: Callable, window: int, inputs: torch.Tensor, q_length: int, q_offset: int, kv_offset: int
) -> torch.Tensor:
    """
    Evaluates a mask where blocks of C queries meet the C + W - 1 keys that they can see.

    Args:
        mask_function: Of `(batch, head, query, key)` indices that broadcast, True where a query may attend; no further
            back than the window.
        window: W.
        inputs (`(B, ...)`): Read for batch size and device only.
        q_length: Number of queries.
        q_offset, kv_offset: Position of the first query, and of the first key that there is.

    Returns:
        `(B or 1, N, 1, C, C + W - 1)`, for `blocked_attention_forward`.
    """
    device = inputs.device
    block_length = max(MIN_BLOCK_LENGTH, window // 2)
    num_blocks = -(-q_length // block_length)
    first_query = torch.arange(num_blocks, device=device)[None, :, None, None] * block_length + q_offset
    query = first_query + torch.arange(block_length, device=device)[:, None]
    key = first_query + torch.arange(block_length + window - 1, device=device) - (window - 1)
    end = q_offset + q_length
    batch = torch.arange(inputs.shape[0], device=device)[:, None, None, None]
    # Blocks reach beyond both ends of the sequence; mask functions look tokens up, so their indices are kept inside.
    inside = (key >= kv_offset) & (key < end)
    mask = mask_function(batch, 0, query.clamp(max=end - 1), key.clamp(min=0, max=end - 1)) & inside
    return mask[:, :, None]


def _restrict_custom_mask(mask, config, kind, batch_size, q_length, kv_length, q_offset, kv_offset):
    """A user's `(B, 1, T, S)` mask: as it is for global heads, inside the window for local ones."""
    mask = mask[..., kv_offset : kv_offset + kv_length]
    if kind == LOCAL:
        query = torch.arange(q_length, device=mask.device)[:, None] + q_offset
        key = torch.arange(mask.shape[-1], device=mask.device) + kv_offset
        in_window = key > query - config.sliding_window
        if mask.dtype == torch.bool:
            mask = mask & in_window
        else:
            mask = mask.masked_fill(~in_window, torch.finfo(mask.dtype).min)
    if engine_of_step(config, q_length) == "flex_attention":
        if mask.dtype != torch.bool:
            raise ValueError(
                f"`flex_attention` takes 4-D masks of booleans, True where a token may attend; got {mask.dtype}. "
                'Convert the mask, or use attn_implementation="sdpa" for additive ones'
            )
        mask = mask.expand(batch_size, -1, -1, -1)
        return flex_attention_mask(
            batch_size,
            q_length,
            mask.shape[-1],
            mask_function=lambda batch, head, query, key: mask[batch, 0, query, key],
            device=mask.device,
        )
    return mask


def _check_mask_shape(attention_mask, batch_size, q_length, past_length):
    if attention_mask is None or not isinstance(past_length, int):
        return
    total = past_length + q_length
    got = tuple(attention_mask.shape)
    if attention_mask.ndim == 2 and got != (batch_size, total):
        raise ValueError(
            f"`attention_mask` must have shape ({batch_size}, {total}), one entry for each of the {past_length} "
            f"cached and {q_length} new tokens; got {got}"
        )
    if attention_mask.ndim == 4 and (got[0] not in (1, batch_size) or got[2] != q_length or got[3] < total):
        raise ValueError(
            f"a 4-D `attention_mask` must have shape ({batch_size}, 1, {q_length}, {total}): batch, head, new tokens, "
            f"cached and new tokens; got {got}"
        )
    if attention_mask.ndim not in (2, 4):
        raise ValueError(f"`attention_mask` must have 2 dimensions (batch, tokens) or 4; got shape {got}")


def _check_flash_inputs(custom_mask, padding_mask, documents, past_length):
    if custom_mask is not None:
        raise ValueError('FlashAttention takes no 4-D `attention_mask`; use attn_implementation="sdpa" for it')
    is_padded = padding_mask is not None and not padding_mask.all()
    if documents is not None and (documents.shape[0] > 1 or is_padded or past_length):
        raise ValueError(
            "FlashAttention takes packed documents in one row without padding and without a cache before it; pass a "
            'batch of 1 at once, or use attn_implementation="sdpa"'
        )
