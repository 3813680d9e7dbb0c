"""Who sees whom: which keys each query may attend to, described once per forward pass for each kind of head.

The mask functions of Transformers have no head axis, so each kind of head has a `Visibility` of its own, which is a
mask function itself. Masks, the measurement of logits and calibration all ask it. The Triton kernels, FlashAttention,
PyTorch's causal attention and `dense` (for additive masks) apply parts of the rules themselves; tests compare them.

Shapes: B batch, T queries, S keys, P cached tokens, W `sliding_window`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from transformers import Cache
from transformers.utils.import_utils import is_tracing

from .checks_lsgpt import check_dictionary, check_mask, check_shape, may_look_at
from .configuration_lsgpt import FULL_WINDOW, HEAD_KINDS, LSGPTConfig


HIDDEN = -1e4
"""An additive mask hides a pair with a lower value, usually -1e9 or the lowest of a dtype (float16: -65504)."""


@dataclass
class Visibility:
    """
    Which keys the queries of one kind of head may attend to.

    Queries and keys have *positions* in their sequence, counted from 0 with padding and cached tokens included. The
    query at position `q` sees the key at position `k` if all of these hold:

    - `k <= q` (causality); with a custom `mask`, the mask decides instead;
    - `k > q - window`, for heads with a window;
    - `overlay` agrees, for kinds of heads that have one;
    - `k` is not padding;
    - both are in the same document.
    """

    q_length: int
    """Number of queries, T."""
    kv_length: int
    """Number of keys, S."""
    q_offset: int | torch.Tensor = 0
    """Position of the first query; a tensor with a static cache."""
    kv_offset: int = 0
    """Position of the first key; a sliding-window cache has dropped the keys before it."""
    window: int | None = None
    """W, the number of keys that a query sees, including its own; `None` for all."""
    overlay: Callable | None = None
    """A further condition, from `HeadKind.overlay`."""
    padding_mask: torch.Tensor | None = None
    """`(B, P + T)`, True for real tokens; `None` if there is no padding."""
    documents: torch.Tensor | None = None
    """`(B, P + T)`, each token's document number in a packed row; `None` if every row is a single document."""
    first_key: torch.Tensor | None = None
    """
    `(B, T)`, the position at which each query's document begins: instead of `documents`, if the length of a static
    cache must not be read.
    """
    mask: torch.Tensor | None = None
    """`(B or 1, 1, T, S)`, a custom mask: boolean, True where a query may attend, or additive."""
    has_sinks: bool = False
    """Whether the heads have sinks, which are not keys and take no part in `sees`; `sees_sink` is their rule."""
    sink_window: int | None = None
    """W, if only queries that see W keys see their sink; `None` if all queries do."""
    has_empty_slots: bool = False
    """Whether keys may follow the last query: the unused slots of a static cache."""
    batch_size: int = 1
    """Number of sequences, B."""
    device: torch.device | str = "cpu"
    """Device of the masks."""

    def sees(self, batch, head, query, key) -> torch.Tensor:
        """
        Whether each query sees each key, given indices that broadcast: of sequences, heads, and positions of queries
        and keys. This is a mask function of Transformers and FlexAttention. It cannot express additive masks.
        """
        if self.mask is None:
            visible = key <= query
        else:
            visible = self.mask[batch, 0, query - self.q_offset, key - self.kv_offset]
        if self.window is not None:
            visible = visible & (key > query - self.window)
        if self.overlay is not None:
            visible = visible & self.overlay(batch, head, query, key)
        if self.padding_mask is not None:
            visible = visible & self.padding_mask[batch, key]
        if self.documents is not None:
            visible = visible & (self.documents[batch, query] == self.documents[batch, key])
        if self.first_key is not None:
            visible = visible & (key >= self.first_key[batch, query - self.q_offset])
        return visible

    __call__ = sees

    def sees_sink(self) -> torch.Tensor | bool:
        """
        Whether each query sees the sink of its head, `(B or 1, T)`, or one answer for all.

        With a `sink_window`, a query does if it sees the first key of its window, and so W tokens of its document. The
        document's first tokens, whose place a sink takes, are then about to leave the window.
        """
        if self.sink_window is None or not self.has_sinks:
            return self.has_sinks
        reach = self.sink_window - 1
        if self.is_plain and isinstance(self.q_offset, int) and self.q_offset >= reach:
            return True
        query = self.query_positions
        key = (query - reach).clamp(min=self.kv_offset)
        batch = torch.arange(self.batch_size, device=self.device)[:, None]
        if self.mask is not None and self.mask.dtype != torch.bool:
            visible = self.mask[batch, 0, query - self.q_offset, key - self.kv_offset] > HIDDEN
        else:
            visible = self.sees(batch, 0, query, key)
        return torch.atleast_2d(visible & (query >= reach))

    @property
    def has_other_limits(self) -> bool:
        """Whether more than causality, the window and empty slots restricts what a query sees."""
        limits = (self.padding_mask, self.documents, self.first_key, self.mask, self.overlay)
        return any(limit is not None for limit in limits)

    @property
    def is_plain(self) -> bool:
        """Whether only causality and the window restrict what a query sees."""
        return not (self.has_other_limits or self.has_empty_slots)

    @property
    def is_square(self) -> bool:
        """Whether nothing was cached, so that queries and keys belong to the same tokens."""
        return self.q_length == self.kv_length and not self.has_empty_slots

    @property
    def ends_with_queries(self) -> bool:
        """Whether the last key belongs to the last query, as far as this is known without reading a tensor."""
        return isinstance(self.q_offset, int) and self.q_offset + self.q_length == self.kv_offset + self.kv_length

    @property
    def sees_everything(self) -> bool:
        """Whether there is a single query and it sees every key, except for padding and other documents."""
        is_inside = self.window is None or self.kv_length <= self.window
        is_plain = self.mask is None and self.overlay is None and not self.has_empty_slots
        return self.q_length == 1 and is_inside and is_plain

    @property
    def query_positions(self) -> torch.Tensor:
        """Positions of the queries, `(T,)`."""
        return torch.arange(self.q_length, device=self.device) + self.q_offset

    @property
    def key_positions(self) -> torch.Tensor:
        """Positions of the keys, `(S,)`."""
        return torch.arange(self.kv_length, device=self.device) + self.kv_offset

    def dense(self) -> torch.Tensor:
        """The full mask `(B, 1, T, S)`: boolean, or additive if the custom mask is."""
        if self.mask is not None and self.window is None and self.overlay is None:
            return self.mask
        if self.mask is not None and self.mask.dtype != torch.bool:
            of_kind = Visibility(0, 0, window=self.window, overlay=self.overlay)
            visible = of_kind.sees(0, 0, self.query_positions[:, None], self.key_positions)
            visible = visible | (self.key_positions > self.query_positions[:, None])
            return self.mask.masked_fill(~visible, torch.finfo(self.mask.dtype).min)
        if self.sees_everything and self.padding_mask is not None and self.documents is None:
            return self.padding_mask[:, None, None, self.kv_offset : self.kv_offset + self.kv_length]
        batch = torch.arange(self.batch_size, device=self.device)[:, None, None, None]
        visible = self.sees(batch, 0, self.query_positions[:, None], self.key_positions)
        return visible.expand(self.batch_size, 1, -1, -1)

    def to(self, device: torch.device | str, **kwargs) -> "Visibility":
        """Returns a copy on another device."""
        tensors = {name: x for name, x in vars(self).items() if isinstance(x, torch.Tensor)}
        return replace(self, device=device, **{name: x.to(device, **kwargs) for name, x in tensors.items()})


def describe_visibility(
    config: LSGPTConfig,
    inputs_embeds: torch.Tensor,
    attention_mask: torch.Tensor | dict | None = None,
    past_key_values: Cache | None = None,
    position_ids: torch.Tensor | None = None,
) -> dict[str, Visibility]:
    """
    Describes which keys each query may attend to in a forward pass, for each kind of head that the model has.

    Args:
        config: The model's configuration.
        inputs_embeds (`(B, T, hidden_size)`): Read for shape, dtype and device only.
        attention_mask: `(B, P + T)`, 1 for real tokens and 0 for padding; or `(B or 1, 1, T, P + T)`, boolean (True
            where a query may attend) or additive, applied as it is in global heads and within the window in local
            heads; or a dictionary with such a mask for each kind of head, as `create_masks_for_generate` returns.
        past_key_values: The cache before this step's update.
        position_ids (`(B or 1, T)`): If given, attention does not cross from one document packed into a row to
            another, which begins where positions do not continue (see `find_documents`). Ignored with a 4-D mask.

    Raises:
        ValueError: If the mask's shape or type does not fit.
    """
    batch_size, q_length = inputs_embeds.shape[:2]
    device = inputs_embeds.device
    past_length = past_key_values.get_seq_length() if past_key_values is not None else 0
    # A static cache in use has a tensor for its length. Reading it means waiting for the device: acceptable once for a
    # chunk of a prompt, but not for every decoded token.
    if isinstance(past_length, torch.Tensor) and q_length > 1 and not is_tracing(past_length):
        past_length = int(past_length)
    # If any layer has empty slots, all are treated so: a user may have built a cache from several kinds of layers.
    layers = past_key_values.layers if past_key_values is not None else ()
    has_empty_slots = any(getattr(layer, "is_compileable", False) for layer in layers)
    first_layers: dict[str, int] = {}
    for layer_idx, (kind, _) in enumerate(config.cache_layers):
        first_layers.setdefault(kind, layer_idx)

    masks: dict[str, torch.Tensor | None] = {}
    padding_mask = documents = first_key = None
    if is_finished := isinstance(attention_mask, dict):
        masks = attention_mask
        check_dictionary(masks, first_layers, batch_size, q_length)
    elif attention_mask is not None and not isinstance(attention_mask, torch.Tensor):
        got = type(attention_mask).__name__
        raise ValueError(f"`attention_mask` must be a tensor, such as a boolean mask of 4 dimensions; got a {got}")
    elif attention_mask is not None and attention_mask.ndim == 4:
        check_mask(attention_mask, batch_size, q_length, past_length, has_empty_slots)
        masks = dict.fromkeys(first_layers, attention_mask)
    elif attention_mask is not None:
        if attention_mask.ndim != 2 or isinstance(past_length, int):
            reason = "one entry for each cached and each new token, or 4 dimensions"
            length = past_length + q_length if isinstance(past_length, int) else "keys"
            check_shape("attention_mask", attention_mask, reason, (batch_size, length))
        if not (may_look_at(attention_mask, q_length) and attention_mask.all()):
            padding_mask = attention_mask.to(device=device, dtype=torch.bool)
    if not masks:
        if position_ids is not None and isinstance(past_length, torch.Tensor) and padding_mask is None:
            index = torch.arange(q_length, device=device)
            first_key = (past_length + index - position_ids).expand(batch_size, -1)
        elif position_ids is not None:
            documents = find_documents(position_ids.expand(batch_size, -1), padding_mask, past_length)

    result = {}
    for kind, layer_idx in first_layers.items():
        q_offset, kv_length, kv_offset = 0, q_length, 0
        if past_key_values is not None:
            q_offset = past_key_values.get_query_offset(layer_idx)
            if isinstance(q_offset, torch.Tensor):
                q_offset = q_offset.clone()  # a static cache returns its own counter, which the update changes
            kv_length, kv_offset = past_key_values.get_mask_sizes(q_length, layer_idx)
        mask, end = masks.get(kind), kv_offset + kv_length
        if mask is not None and not is_finished:
            hidden = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
            mask = _lengthen(mask[..., kv_offset:end], kv_length, hidden)
        if mask is not None and torch.float64 in (mask.dtype, inputs_embeds.dtype) and mask.is_floating_point():
            # PyTorch refuses other masks, or misinterprets them.
            lowest = max(torch.finfo(dtype).min for dtype in (mask.dtype, inputs_embeds.dtype))
            mask = mask.clamp(min=lowest).to(inputs_embeds.dtype)
        has_rules = mask is None or not is_finished
        overlay = HEAD_KINDS[kind].overlay
        result[kind] = Visibility(
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            window=config.window(kind) if has_rules else None,
            overlay=overlay(config) if has_rules and overlay is not None else None,
            # A static cache has slots beyond the tokens seen so far, which no query may attend to.
            padding_mask=_lengthen(padding_mask, end, False),
            documents=_lengthen(documents, end, -1),
            first_key=first_key,
            mask=None if mask is None else mask.to(device).expand(batch_size, -1, -1, -1),
            has_sinks=HEAD_KINDS[kind].has_sinks and bool(config.attention_sinks),
            sink_window=config.window(kind) if config.attention_sinks == FULL_WINDOW else None,
            has_empty_slots=has_empty_slots,
            batch_size=batch_size,
            device=device,
        )
    return result


def find_documents(
    position_ids: torch.Tensor, padding_mask: torch.Tensor | None = None, past_length: int | torch.Tensor = 0
) -> torch.Tensor | None:
    """
    Numbers the documents packed into each row, which start where positions do not continue.

    A real token continues its document if its position exceeds that of the previous real token by one, or by the
    distance between the two (some users count padding in positions, others do not). If the first new token is at
    position p, the last p real cached tokens belong to its document.

    Args:
        position_ids (`(B, T)`): Position of each new token in its document.
        padding_mask (`(B, P + T)`, *optional*): True for real tokens.
        past_length: P, the number of cached tokens; a tensor if it must not be read, as while tracing, which needs a
            `padding_mask`. Several new tokens are then taken to belong to the same document as all before.

    Returns:
        `(B, P + T)` document numbers, -1 for cached tokens of earlier documents; or `None` if every row holds one
        document. If values cannot be inspected, numbers are always returned, except for several tokens after a past of
        unknown length.
    """
    length = position_ids.shape[-1]
    if isinstance(past_length, torch.Tensor):
        if length > 1:
            return None
        index = torch.arange(padding_mask.shape[1], device=padding_mask.device)
        return _earlier_tokens(padding_mask & (index < past_length), position_ids)
    if length == 1 and past_length == 0:
        return None
    may_look = may_look_at(position_ids, length)
    index = torch.arange(length, device=position_ids.device)
    is_real = padding_mask[:, past_length:] if padding_mask is not None else torch.ones_like(position_ids).bool()
    last_real = torch.where(is_real, index, -1).cummax(-1).values
    previous = torch.nn.functional.pad(last_real[:, :-1], (1, 0), value=-1)
    step = position_ids - position_ids.gather(-1, previous.clamp(min=0))
    starts = is_real & (previous >= 0) & (step != 1) & (step != index - previous)
    is_one_document = length == 1 or (may_look and not starts.any())
    if past_length == 0:
        return None if is_one_document else starts.cumsum(-1)

    first_position = position_ids.gather(-1, is_real.int().argmax(-1, keepdim=True))
    num_cached = past_length if padding_mask is None else padding_mask[:, :past_length].sum(-1, keepdim=True)
    if may_look and is_one_document and (first_position >= num_cached).all():
        return None
    is_cached = torch.ones_like(first_position).bool().expand(-1, past_length)
    if padding_mask is not None:
        is_cached = padding_mask[:, :past_length]
    return torch.cat([_earlier_tokens(is_cached, first_position), starts.cumsum(-1)], dim=-1)


def _earlier_tokens(is_cached: torch.Tensor, first_position: torch.Tensor) -> torch.Tensor:
    """-1 for cached tokens of earlier documents, 0 for others, if the next token has `first_position` `(B, 1)`."""
    tokens_since = is_cached.flip(-1).cumsum(-1).flip(-1)
    return (is_cached & (tokens_since > first_position)).long().neg()


def resolve_positions(
    inputs: torch.Tensor,
    position_ids: torch.Tensor | None = None,
    past_length: int | torch.Tensor = 0,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    **kwargs,
) -> torch.Tensor | None:
    """
    The positions `(B or 1, T)` of `inputs` `(B, T, ...)` that are given as such or as `cu_seq_lens_q`, or `None`.
    Raises `ValueError` if packed documents are given in other ways only; see also `positions_in_documents`.
    """
    if position_ids is None and cu_seq_lens_q is not None:
        return positions_in_documents(cu_seq_lens_q, inputs, past_length)
    if position_ids is None and not (cu_seq_lens_k is None and seq_idx is None):
        raise ValueError(
            "`position_ids`, which begin at 0 in every document, or `cu_seq_lens_q` must come with "
            "`cu_seq_lens_k` or `seq_idx`, which LSGPT does not use"
        )
    return position_ids


def positions_in_documents(
    cu_seq_lens: torch.Tensor, inputs: torch.Tensor, past_length: int | torch.Tensor = 0
) -> torch.Tensor:
    """
    The positions `(1, T)` of `inputs` `(1, T, ...)` in documents that begin at `cu_seq_lens` `(documents + 1,)`, 0
    first and T last, as `DataCollatorWithFlattening` counts them. Raises `ValueError` if there are several rows, or
    cached tokens.
    """
    batch_size, length = inputs.shape[:2]
    if batch_size > 1 or not (isinstance(past_length, int) and past_length == 0):
        raise ValueError(
            "`cu_seq_lens_q` must come with a single row and without cached tokens; pass `position_ids` instead, "
            "which begin at 0 in every document"
        )
    index = torch.arange(length, device=cu_seq_lens.device)
    return (index - cu_seq_lens[torch.bucketize(index, cu_seq_lens[1:], right=True)])[None]


def _lengthen(x: torch.Tensor | None, length: int, value) -> torch.Tensor | None:
    if x is None or x.shape[-1] >= length:
        return x
    return torch.nn.functional.pad(x, (0, length - x.shape[-1]), value=value)
