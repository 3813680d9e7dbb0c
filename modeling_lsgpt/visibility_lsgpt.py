"""Visibility: which keys each query may attend to, described once per forward pass for each kind of head.

Transformers' mask helpers have no head axis, so global and local heads each have their own `Visibility`. Code that
needs it (attention engines, the measurement of logits, calibration) asks a `Visibility`. The Triton kernels,
FlashAttention and `dense` (for additive masks) apply parts of the rules themselves; tests compare them with `sees`.

Shapes: B batch, T queries, S keys, P cached tokens, W `sliding_window`.
"""

from dataclasses import dataclass, replace

import torch
from transformers import Cache
from transformers.utils.import_utils import is_tracing

from .configuration_lsgpt import GLOBAL, LOCAL, LSGPTConfig


@dataclass
class Visibility:
    """
    Which keys the queries of one kind of head may attend to.

    Queries and keys have *positions* in their sequence, counted from 0 with padding and cached tokens included. The
    query at position `q` sees the key at position `k` if all of these hold:

    - `k <= q` (causality); with a custom `mask`, the mask decides instead;
    - `k > q - window`, for heads with a window;
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
    """W, the number of keys that a query of a local head sees, including its own; `None` if all heads are global."""
    num_global_heads: int = 0
    """With a window: number of leading heads without it; more than 0 if this describes both kinds of heads at once."""
    padding_mask: torch.Tensor | None = None
    """`(B, P + T)`, True for real tokens; `None` if there is no padding."""
    documents: torch.Tensor | None = None
    """`(B, P + T)`, each token's document number in a packed row; `None` if every row is a single document."""
    mask: torch.Tensor | None = None
    """`(B or 1, 1, T, S)`, a custom mask: boolean, True where a query may attend, or additive."""
    has_sinks: bool = False
    """Whether every query also sees a sink, which is not a key and takes no part in `sees`."""
    has_empty_slots: bool = False
    """Whether keys may follow the last query: the unused slots of a static cache."""
    batch_size: int = 1
    """Number of sequences, B."""
    device: torch.device | str = "cpu"
    """Device of the masks."""

    def sees(self, batch, head, query, key) -> torch.Tensor:
        """
        Whether each query sees each key, given indices that broadcast: of sequences, heads, and positions of queries
        and keys. This is what Transformers and FlexAttention call a mask function. It cannot express additive masks.
        """
        if self.mask is None:
            visible = key <= query
        else:
            visible = self.mask[batch, 0, query - self.q_offset, key - self.kv_offset]
        if self.window is not None:
            in_window = key > query - self.window
            visible = visible & (in_window | (head < self.num_global_heads) if self.num_global_heads else in_window)
        if self.padding_mask is not None:
            visible = visible & self.padding_mask[batch, key]
        if self.documents is not None:
            visible = visible & (self.documents[batch, query] == self.documents[batch, key])
        return visible

    @property
    def is_plain(self) -> bool:
        """Whether only causality and the window restrict what a query sees."""
        return self.padding_mask is None and self.documents is None and self.mask is None and not self.has_empty_slots

    @property
    def is_square(self) -> bool:
        """Whether nothing was cached, so that queries and keys belong to the same tokens."""
        return self.q_length == self.kv_length and not self.has_empty_slots

    @property
    def sees_everything(self) -> bool:
        """Whether there is a single query and it sees every key, except for padding and other documents."""
        is_inside = self.window is None or self.kv_length <= self.window
        return self.q_length == 1 and is_inside and self.mask is None and not self.has_empty_slots

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
        if self.mask is not None and self.window is None:
            return self.mask
        if self.mask is not None and self.mask.dtype != torch.bool:
            in_window = self.key_positions > self.query_positions[:, None] - self.window
            return self.mask.masked_fill(~in_window, torch.finfo(self.mask.dtype).min)
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
    Describes which keys each query may attend to in a forward pass: `{GLOBAL: ..., LOCAL: ...}`, with an entry for
    each kind of head that the model has.

    Args:
        config: The model's configuration.
        inputs_embeds (`(B, T, hidden_size)`): Read for shape and device only.
        attention_mask: `(B, P + T)`, 1 for real tokens and 0 for padding; or `(B or 1, 1, T, P + T)`, boolean (True
            where a query may attend) or additive, applied as it is in global heads and within the window in local
            heads; or a dictionary with such a mask for each kind of head, as `create_attention_masks` returns.
        past_key_values: The cache before this step's update.
        position_ids (`(B or 1, T)`): If given, a position that does not continue from the one before marks the start
            of another document packed into the same row (see `find_documents`), and attention does not cross from one
            document to another. With a cache, the position of the first new token tells how many cached tokens belong
            to its document. Ignored for a single token if a static cache is in use, because its length is not known
            without waiting for the device, and with a 4-D mask, which decides what each query sees.

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
    is_finished = isinstance(attention_mask, dict)
    if isinstance(attention_mask, dict):
        of_kind = attention_mask
        _check_dictionary(attention_mask, config.layer_types)
    else:
        of_kind = dict.fromkeys(config.layer_types, attention_mask)
    padding_mask = documents = None
    for mask in of_kind.values():
        if mask is not None:
            _check_mask(mask, batch_size, q_length, None if is_finished else past_length)
    if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2:
        of_kind = {}
        if not (_may_look_at(attention_mask, q_length) and attention_mask.all()):
            padding_mask = attention_mask.to(device=device, dtype=torch.bool)
    has_custom_mask = any(mask is not None for mask in of_kind.values())
    if position_ids is not None and isinstance(past_length, int) and not (has_custom_mask or is_finished):
        documents = find_documents(position_ids.expand(batch_size, -1), padding_mask, past_length)

    is_static = getattr(past_key_values, "is_compileable", False)
    result, layer_types = {}, config.layer_types
    for kind in dict.fromkeys(layer_types):
        layer_idx = layer_types.index(kind)
        q_offset, kv_length, kv_offset = 0, q_length, 0
        if past_key_values is not None:
            q_offset = past_key_values.get_query_offset(layer_idx)
            if isinstance(q_offset, torch.Tensor):
                q_offset = q_offset.clone()  # a static cache returns its own counter, which the update changes
            kv_length, kv_offset = past_key_values.get_mask_sizes(q_length, layer_idx)
        mask, end = of_kind.get(kind), kv_offset + kv_length
        if mask is not None:
            hidden = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
            mask = mask if is_finished else _lengthen(mask[..., kv_offset:end], kv_length, hidden)
        result[kind] = Visibility(
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            window=None if kind == GLOBAL or (mask is not None and is_finished) else config.sliding_window,
            # A static cache has slots beyond the tokens seen so far, which no query may attend to.
            padding_mask=_lengthen(padding_mask, end, False),
            documents=_lengthen(documents, end, -1),
            mask=None if mask is None else mask.to(device).expand(batch_size, -1, -1, -1),
            has_sinks=kind == LOCAL and config.attention_sinks,
            has_empty_slots=is_static,
            batch_size=batch_size,
            device=device,
        )
    return result


def create_attention_masks(
    config: LSGPTConfig,
    inputs_embeds: torch.Tensor,
    attention_mask: torch.Tensor | dict | None = None,
    past_key_values: Cache | None = None,
    position_ids: torch.Tensor | None = None,
    **kwargs,
) -> dict | torch.Tensor | None:
    """
    Creates the masks that `generate` prepares outside a compiled decoding step, `{GLOBAL: ..., LOCAL: ...}`, each
    `(B, 1, T, S)` and boolean, or additive if the user's own mask is. The arguments are as in `describe_visibility`.

    Only single-token steps need them. For a prompt, this returns `attention_mask` unchanged, and the model itself
    works out which keys each query may attend to.
    """
    if inputs_embeds.shape[1] > 1:
        return attention_mask
    visibility = describe_visibility(config, inputs_embeds, attention_mask, past_key_values, position_ids)
    return {kind: each.dense() for kind, each in visibility.items()}


def find_documents(
    position_ids: torch.Tensor, padding_mask: torch.Tensor | None = None, past_length: int = 0
) -> torch.Tensor | None:
    """
    Numbers the documents packed into each row, which start where positions do not continue.

    A real token continues its document if its position exceeds that of the previous real token by one, or by the
    distance between the two (some users count padding in positions, others do not). If the first new token is at
    position p, the last p real cached tokens belong to its document.

    Args:
        position_ids (`(B, T)`): Position of each new token in its document.
        padding_mask (`(B, P + T)`, *optional*): True for real tokens.
        past_length: P, the number of cached tokens.

    Returns:
        `(B, P + T)` document numbers, -1 for cached tokens of earlier documents; or `None` if every row holds one
        document. If values cannot be inspected, numbers are always returned, except for a single token while tracing.
    """
    length = position_ids.shape[-1]
    if length == 1 and (past_length == 0 or is_tracing(position_ids)):
        return None
    may_look = _may_look_at(position_ids, length)
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
    tokens_since = is_cached.flip(-1).cumsum(-1).flip(-1)
    is_earlier = is_cached & (tokens_since > first_position)
    return torch.cat([is_earlier.long().neg(), starts.cumsum(-1)], dim=-1)


def _may_look_at(x: torch.Tensor, q_length: int) -> bool:
    """Whether to inspect values: not while tracing; for a single token on the CPU only, to avoid a synchronisation."""
    return not is_tracing(x) and (q_length > 1 or x.device.type == "cpu")


def _lengthen(x: torch.Tensor | None, length: int, value) -> torch.Tensor | None:
    if x is None or x.shape[-1] >= length:
        return x
    return torch.nn.functional.pad(x, (0, length - x.shape[-1]), value=value)


def _check_dictionary(masks: dict, layer_types: list[str]):
    if masks.keys() != set(layer_types) or any(mask is not None and mask.ndim != 4 for mask in masks.values()):
        got = {kind: mask if mask is None else tuple(mask.shape) for kind, mask in masks.items()}
        raise ValueError(
            "an `attention_mask` dictionary must hold a 4-D mask, or None, for each of "
            f"{', '.join(map(repr, dict.fromkeys(layer_types)))}, as `create_attention_masks` returns it; got {got}"
        )


def _check_mask(mask: torch.Tensor, batch_size: int, q_length: int, past_length: int | torch.Tensor | None):
    got, total = tuple(mask.shape), past_length + q_length if isinstance(past_length, int) else None
    if mask.ndim not in (2, 4):
        raise ValueError(f"`attention_mask` must have 2 dimensions (batch, tokens) or 4; got shape {got}")
    if mask.ndim == 2 and total is not None and got != (batch_size, total):
        raise ValueError(
            f"`attention_mask` must have shape ({batch_size}, {total}), one entry for each of the {past_length} "
            f"cached and {q_length} new tokens; got {got}"
        )
    if mask.ndim == 2:
        return
    if not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise ValueError(
            "a 4-D `attention_mask` must be boolean, True where a token may attend, or floating point, to be added to "
            f"the logits; got {mask.dtype}. Convert it with `mask.bool()` if it holds zeros and ones"
        )
    if got[1] != 1:
        raise ValueError(
            f"a 4-D `attention_mask` must be the same for all heads, of shape ({batch_size}, 1, {q_length}, keys); "
            f"got {got}. `num_global_heads` and `sliding_window` define what the heads of each kind see"
        )
    if got[0] not in (1, batch_size) or got[2] != q_length or got[3] < (total or 0):
        raise ValueError(
            f"a 4-D `attention_mask` must have shape ({batch_size}, 1, {q_length}, {total or 'keys'}): batch, head, "
            f"new tokens, cached and new tokens; got {got}"
        )
