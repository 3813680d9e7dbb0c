"""The attention functions and mask functions that LSGPT has instead of, or besides, those of Transformers.

`ALL_ATTENTION_FUNCTIONS` and `ALL_MASK_ATTENTION_FUNCTIONS` are Transformers' tables of these names, with entries
of our own for what is faster with windows, needs sinks, or would silently ignore an argument. Whatever is registered
with `AttentionInterface` works here, too; without a mask function of its own, it gets dense boolean masks.

Shapes: B batch, T queries, S keys, H query heads, H_kv key/value heads, D `head_dim`.
"""

import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention
from transformers import AttentionInterface, AttentionMaskInterface, Cache
from transformers.integrations.flash_attention import get_target_dtype
from transformers.integrations.flex_attention import compile_friendly_flex_attention, flex_attention_forward
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.modeling_flash_attention_utils import lazy_import_flash_attention
from transformers.utils.import_utils import is_torchdynamo_exporting, is_tracing

from .cache_lsgpt import accept_cache
from .checks_lsgpt import may_look_at
from .configuration_lsgpt import LSGPTConfig
from .local_lsgpt import blocked_attention_forward, blocked_mask, past_attention_forward, sink_attention_forward
from .visibility_lsgpt import Visibility, describe_visibility


class _FlashLookup:
    """Looks up functions with "flash" in their name, such as kernels from the Hub, under `flash_attention_2`."""

    def __getitem__(self, name: str):
        is_flash = "flash" in name and name in AttentionInterface()
        return super().__getitem__("flash_attention_2" if is_flash else name)


class LSGPTAttentionInterface(_FlashLookup, AttentionInterface):
    """See `ALL_ATTENTION_FUNCTIONS`."""


class LSGPTMaskInterface(_FlashLookup, AttentionMaskInterface):
    """See `ALL_MASK_ATTENTION_FUNCTIONS`."""


ALL_ATTENTION_FUNCTIONS = LSGPTAttentionInterface()
"""Attention functions by `attn_implementation`."""

ALL_MASK_ATTENTION_FUNCTIONS = LSGPTMaskInterface()
"""
Mask functions by `attn_implementation`. They take the arguments of Transformers' own; `mask_function` is always a
`Visibility`.
"""

ALL_HEADS = "all_heads"
"""
Key of the mask with which one call computes all heads of a layer, whatever their kinds. A mask function may have an
attribute `of_all_heads`: a function that turns `{kind: Visibility}` into this mask, or returns `None` if each kind
needs a call of its own. The call gets the window of the kind that has one. If logits are measured, the attention
function has to measure them itself, as `triton_attention_forward` does.
"""

MASKED_PAIRS = 1 << 18
"""From this many query-key pairs on, `sdpa` computes new tokens after cached ones without a mask."""

BEGINNING_WINDOWS = 4
"""
In texts of at most so many windows, `sdpa` computes the first tokens, which see all before them, without a mask. In
longer ones, that saves no time on the CPU.
"""

NARROW_HEAD_DIM, PADDED_HEAD_DIM = 12, 16
"""
Heads of fewer than 12 dimensions are filled with zeros up to 16 on the CPU, where PyTorch's kernel is then faster
(`lsgpt.benchmarks.narrow_heads` measures how much).
"""

TAKE_EMPTY_ROWS = ("cpu",)
"""
Devices on which the gradients of PyTorch's kernels are finite where a query sees nothing, as padding on the left does.
With PyTorch 2.11 on an H200, they were NaN.
"""


@dataclass
class AttentionMasks:
    """What all layers share in a forward pass: for each kind of head, its mask, and which keys each query sees."""

    masks: dict[str, Any]
    """By kind of head, or under `ALL_HEADS`, in the form that the attention function takes."""
    visibility: dict[str, Visibility]
    """By kind of head."""
    sees_sink: dict[str, torch.Tensor | bool]
    """By kind of head: whether each query sees the sink of its head, `(B or 1, T)`, or one answer for all."""

    def to(self, device: torch.device | str, **kwargs) -> "AttentionMasks":
        """Returns the masks on another device; needed if a model is spread over several."""

        def move(x):
            if isinstance(x, tuple):
                return type(x)(*map(move, x))
            if isinstance(x, BlockMask):
                return _move_block_mask(x, device)
            return x.to(device, **kwargs) if isinstance(x, torch.Tensor | Visibility) else x

        return AttentionMasks(*({kind: move(x) for kind, x in each.items()} for each in vars(self).values()))


def create_masks(config: LSGPTConfig, visibility: dict[str, Visibility]) -> AttentionMasks:
    """Creates the masks of a forward pass. Raises `ValueError` for what the attention function does not support."""
    name = config._attn_implementation
    needed = {"s_aux": "attention_sinks"} if any(v.has_sinks for v in visibility.values()) else {}
    needed |= {} if config.attn_logit_softcapping is None else {"softcap": "attn_logit_softcapping"}
    for argument, field in needed.items():
        if not _takes(name, argument):
            raise ValueError(
                f'`{field}` needs an attention function with an argument `{argument}`; "{name}" has none. Use '
                f'attn_implementation="{_suggest_engine(config.attn_logit_softcapping)}"'
            )
    if any(v.sink_window is not None for v in visibility.values()) and not _takes_sinks_of_queries(name):
        raise ValueError(
            f'`attention_sinks` must be True or False with "{name}", which shows a sink to all queries or to none; '
            f'got "{config.attention_sinks}". '
            f'Use attn_implementation="{_suggest_engine(config.attn_logit_softcapping)}"'
        )
    sees_sink = {kind: v.sees_sink() for kind, v in visibility.items()}
    create = ALL_MASK_ATTENTION_FUNCTIONS.get(name, dense_mask)
    if hasattr(create, "of_all_heads") and (mask := create.of_all_heads(visibility)) is not None:
        # The kernel gets the window and the sinks of the local heads, if there are any.
        local = next((kind for kind, v in visibility.items() if v.window is not None), next(iter(visibility)))
        visibility = {**visibility, ALL_HEADS: visibility[local]}
        return AttentionMasks({ALL_HEADS: mask}, visibility, {**sees_sink, ALL_HEADS: sees_sink[local]})
    masks = {}
    for kind, v in visibility.items():
        if v.mask is not None and v.mask.dtype != torch.bool and create not in _REFUSES_ADDITIVE_MASKS:
            masks[kind] = v.dense()  # as Transformers does: a mask function cannot express an additive mask
            continue
        masks[kind] = create(
            batch_size=v.batch_size,
            q_length=v.q_length,
            kv_length=v.kv_length,
            q_offset=v.q_offset,
            kv_offset=v.kv_offset,
            mask_function=v,
            attention_mask=v.padding_mask,
            local_size=v.window,
            allow_is_causal_skip=v.is_plain,
            device=v.device,
            config=config,
        )
    return AttentionMasks(masks, visibility, sees_sink)


@accept_cache
def create_masks_for_generate(
    config: LSGPTConfig,
    inputs_embeds: torch.Tensor,
    attention_mask: torch.Tensor | dict | None = None,
    past_key_values: Cache | None = None,
    position_ids: torch.Tensor | None = None,
    **kwargs,
) -> dict | torch.Tensor | None:
    """
    Creates the masks that `generate` prepares outside a compiled decoding step, one for each kind of head, each
    `(B, 1, T, S)` and boolean, or additive if the user's own mask is. The arguments are as in `describe_visibility`.

    Only single-token steps need them. For a prompt, this returns `attention_mask` unchanged, and the model itself
    works out which keys each query may attend to.
    """
    if inputs_embeds.shape[1] > 1:
        return attention_mask
    visibility = describe_visibility(config, inputs_embeds, attention_mask, past_key_values, position_ids)
    return {kind: each.dense() for kind, each in visibility.items()}


def dense_mask(mask_function: Visibility, **kwargs) -> torch.Tensor:
    """The dense mask `(B, 1, T, S)`. `eager` uses it, too: with Transformers' mask, padding would get weight."""
    return mask_function.dense()


@torch.compiler.assume_constant_result  # compilers cannot trace `inspect`
def _takes(name: str, argument: str) -> bool:
    # `eager` is not in the table. A function that takes any keyword may ignore this one.
    attend = ALL_ATTENTION_FUNCTIONS.get(name)
    return attend is None or argument in _parameters(attend)


@lru_cache
def _parameters(attend: Callable) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(attend).parameters


def _suggest_engine(softcap: float | None) -> str:
    return "sdpa" if softcap is None else "eager"


def _takes_sinks_of_queries(name: str) -> bool:
    # Whether `s_aux` may be `(B or 1, H, T)`, so that the queries with a full window alone see the sinks.
    attend = ALL_ATTENTION_FUNCTIONS.get(name)
    return attend is None or getattr(attend, "takes_sinks_of_queries", False)


class Past(NamedTuple):
    """Stands for the mask of new tokens that see each other causally, and everything that was cached before."""

    length: int
    """Number of cached tokens."""


class Beginning(NamedTuple):
    """Stands for the masks of a text from its first token on, for heads with a window W."""

    length: int
    """Number of first tokens that see all before them, and no sink: W - 1, or fewer in a shorter text."""
    rest: torch.Tensor | None
    """The mask of the other queries, blocked (5-D) or dense (4-D), if there are any."""


def sdpa_mask(mask_function: Visibility, **kwargs) -> torch.Tensor | Past | Beginning | None:
    """`None` for plain causality, a `Past`, a `Beginning`, a blocked mask (5-D), or a dense one (4-D)."""
    v = mask_function
    window = v.window or v.kv_length
    if torch.jit.is_tracing():  # would hard-code every decision below, whatever the length of later inputs
        return _fill_empty_rows(v.dense(), v)
    is_first = isinstance(v.q_offset, int) and v.q_offset == v.kv_offset == 0 and v.q_length > 1
    if is_first and v.is_plain and not is_tracing() and _can_begin_without_mask(v):
        return _beginning_mask(v)
    has_slots = v.has_empty_slots and not v.ends_with_queries
    if v.mask is None and v.q_length > 1 and v.kv_length > 2 * window and not has_slots:
        return _fill_empty_rows(blocked_mask(v), v)
    # Exporting would hard-code causal attention without a mask, even for single queries after a cache.
    if not is_torchdynamo_exporting():
        is_causal = is_first and v.q_length <= window and not v.has_sinks
        if not v.has_other_limits and (v.sees_everything or is_causal):
            return None
        is_large = v.q_length > 1 and v.q_length * v.kv_length >= MASKED_PAIRS
        is_past = v.is_plain and v.ends_with_queries and not v.has_sinks and not is_tracing()
        if is_past and is_large and v.kv_length <= window:
            return Past(v.kv_length - v.q_length)
    return _fill_empty_rows(v.dense(), v)


def _can_begin_without_mask(visibility: Visibility) -> bool:
    v = visibility
    if v.window is None or (v.has_sinks and v.sink_window is None):
        return False
    if v.kv_length < v.window:  # but not in training: DDP fails if a step leaves parameters, such as sinks, unused
        return v.sink_window is not None and not torch.is_grad_enabled()
    return v.window < v.kv_length <= BEGINNING_WINDOWS * v.window


def _beginning_mask(visibility: Visibility) -> Beginning:
    v = visibility
    length = min(v.window - 1, v.q_length)
    rest = replace(v, q_length=v.q_length - length, q_offset=length)
    if not rest.q_length:
        return Beginning(length, None)
    return Beginning(length, blocked_mask(rest) if rest.q_length > v.window // 4 else rest.dense())


def _fill_empty_rows(mask: torch.Tensor, visibility: Visibility) -> torch.Tensor:
    """Lets queries that see nothing see everything, where that is needed: their outputs are not used."""
    if torch.device(visibility.device).type in TAKE_EMPTY_ROWS or visibility.is_plain or mask.dtype != torch.bool:
        return mask
    return mask | ~mask.any(-1, keepdim=True)


def windowed_sdpa_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | Past | Beginning | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Transformers' `sdpa`, with windows at linear cost, with sinks, and without a mask for a past."""
    if isinstance(attention_mask, Past):
        return past_attention_forward(query, key, value, scaling, dropout), None
    if isinstance(attention_mask, Beginning):
        attend, length = partial(windowed_sdpa_attention_forward, module), attention_mask.length
        first = (x[:, :, :length] for x in (query, key, value))
        outputs = [attend(*first, None, dropout, scaling, **kwargs)[0]]
        if attention_mask.rest is not None:
            s_aux = s_aux if s_aux is None or s_aux.ndim == 1 else s_aux[:, :, length:]
            rest = attend(query[:, :, length:], key, value, attention_mask.rest, dropout, scaling, s_aux, **kwargs)
            outputs.append(rest[0])
        return torch.cat(outputs, dim=1), None
    if attention_mask is not None and attention_mask.ndim == 5:
        return blocked_attention_forward(query, key, value, attention_mask, scaling, dropout, s_aux), None
    if s_aux is not None:
        return sink_attention_forward(query, key, value, attention_mask, s_aux, scaling, dropout), None
    head_dim = query.shape[-1]
    is_narrow = head_dim < NARROW_HEAD_DIM and query.shape[2] > 1 and query.device.type == "cpu"
    if is_narrow and not torch.compiler.is_compiling():
        query, key, value = (nn.functional.pad(x, (0, PADDED_HEAD_DIM - head_dim)) for x in (query, key, value))
    output, _ = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
    )
    return output[..., :head_dim], None


FLASH_ARGUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""Arguments of Transformers' FlashAttention that say where documents begin in a row."""


class Documents(NamedTuple):
    """The packed documents of a single row, in the form that FlashAttention takes."""

    cu_seq_lens: torch.Tensor
    """`(documents + 1,)`, int32: where documents begin, and the number of tokens."""
    max_length: int
    """Tokens in the longest document."""


def flash_mask(mask_function: Visibility, **kwargs) -> torch.Tensor | Documents | None:
    """Padding mask `(B, S)`, the documents of a packed row, or `None` if there is neither."""
    v = mask_function
    refused = {
        "a static cache": v.has_empty_slots,
        "a 4-D `attention_mask`": v.mask is not None,
        "this kind of head": v.overlay is not None,
    }
    if what := next((name for name, is_given in refused.items() if is_given), None):
        raise ValueError(f'FlashAttention does not support {what}; use attn_implementation="sdpa"')
    if v.documents is not None:
        if v.batch_size > 1 or v.padding_mask is not None or not v.is_square:
            raise ValueError(
                "FlashAttention supports packed documents only in a single row without padding and without a cache; "
                'pass a batch of 1 in one forward pass, or use attn_implementation="sdpa"'
            )
        # Transformers has another rule for where documents begin, so it must not look at the positions itself.
        lengths = v.documents.unique_consecutive(return_counts=True)[1]
        cu_seq_lens = nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        return Documents(cu_seq_lens, int(lengths.max()))
    if v.padding_mask is None:
        return None
    mask = v.padding_mask[:, v.kv_offset : v.kv_offset + v.kv_length]
    if v.window is not None and v.kv_length > v.window and may_look_at(mask):
        begins = mask[:, 1:] & ~mask[:, :-1]
        if (begins.sum(-1) + mask[:, 0] > 1).any():
            raise ValueError(
                "FlashAttention counts the tokens of a window without padding, so it must be at the ends of a row and "
                'not between its tokens; use attn_implementation="sdpa"'
            )
    return mask


def checked_flash_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | Documents | None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Transformers' FlashAttention. Raises `ValueError` for precisions, sinks and dropout that it does not support."""
    name = module.config._attn_implementation
    if get_target_dtype(query, module) == torch.float32:  # PEFT makes the queries of quantized models float32
        raise ValueError(
            f"FlashAttention computes in float16 or bfloat16; got {query.dtype}. Load the model with "
            'dtype=torch.bfloat16, or use attn_implementation="sdpa"'
        )
    if s_aux is not None and not _flash_takes(name, "s_aux", "learnable_sink"):
        raise ValueError(
            f"`attention_sinks` need a FlashAttention whose functions take `s_aux` or `learnable_sink`; those of "
            f'"{name}" do not. Use attn_implementation="flash_attention_4", "triton" or "sdpa"'
        )
    if dropout and not _flash_takes(name, "dropout_p"):
        raise ValueError(
            f'"{name}" does not support `attention_dropout`, which is {dropout} here; use '
            'attn_implementation="sdpa", or set it to 0'
        )
    # `flash_mask` has already found the documents.
    kwargs = {name: value for name, value in kwargs.items() if name not in FLASH_ARGUMENTS}
    if isinstance(attention_mask, Documents):
        for side in ("q", "k"):
            kwargs[f"cu_seq_lens_{side}"], kwargs[f"max_length_{side}"] = attention_mask
        attention_mask = None
    attend = AttentionInterface()[name]  # that of Transformers
    options = {"dropout": dropout, "softcap": softcap, "s_aux": s_aux}
    return attend(module, query, key, value, attention_mask, **options, **kwargs)


@lru_cache
def _flash_takes(name: str, *arguments: str) -> bool:
    """Whether the functions of a FlashAttention have one of the arguments."""
    _, varlen_function, *_ = lazy_import_flash_attention(name)[0]
    return not inspect.signature(varlen_function).parameters.keys().isdisjoint(arguments)


def flex_mask(mask_function: Visibility, config: LSGPTConfig, **kwargs) -> BlockMask | torch.Tensor | None:
    """A `BlockMask`; for single tokens, where FlexAttention gains nothing, the mask of `sdpa`."""
    v = mask_function
    if v.q_length == 1 and config.attn_logit_softcapping is None:
        return sdpa_mask(v)
    if v.mask is not None and v.mask.dtype != torch.bool:
        raise ValueError(
            "`flex_attention` needs a boolean 4-D mask, True where a token may attend; got "
            f'{v.mask.dtype}. Convert the mask, or use attn_implementation="sdpa" for an additive one'
        )
    if v.is_plain and v.is_square and not is_tracing():
        return _plain_block_mask(v.q_length, v.window, v.device)
    return _block_mask(v)


def flex_attention_forward_with_sinks(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: BlockMask | torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Transformers' FlexAttention, with sinks in half precision, too, and not compiled on the CPU."""
    if not isinstance(attention_mask, BlockMask):
        return windowed_sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, s_aux, **kwargs
        )
    if dropout:
        raise ValueError(
            f"FlexAttention does not support `attention_dropout`, which is {dropout} here; use "
            f'attn_implementation="{_suggest_engine(softcap)}", or set it to 0'
        )
    if query.device.type == "cpu" and query.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "PyTorch's FlexAttention has no backward pass on the CPU; train with "
            f'attn_implementation="{_suggest_engine(softcap)}", or run the model under torch.no_grad()'
        )
    is_compiled = query.device.type != "cpu" or is_tracing(query)
    if is_compiled and s_aux is None:
        output, _ = flex_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, softcap=softcap, **kwargs
        )
        return output, None

    def cap(logit, *indices):
        return logit if softcap is None else softcap * torch.tanh(logit / softcap)

    # Not Transformers' function: in half precision it rounds the log-sum-exp, which is needed for the sinks.
    attend = partial(compile_friendly_flex_attention, training=module.training) if is_compiled else _flex_uncompiled
    if is_compiled:
        key, value = (repeat_kv(x, module.num_key_value_groups) for x in (key, value))
    options = {"score_mod": cap, "block_mask": attention_mask, "scale": scaling, "enable_gqa": True}
    output, aux = attend(query, key, value, **options, return_aux=AuxRequest(lse=True))
    if s_aux is not None:
        sinks = s_aux if s_aux.ndim == 3 else s_aux[:, None]
        output = output * torch.sigmoid(aux.lse - sinks)[..., None].to(output.dtype)
    return output.transpose(1, 2), None


def _flex_uncompiled(*args, **kwargs):
    # On CPUs without AVX-512, PyTorch 2.13 compiles kernels that are wrong for heads of 8 and 16 dimensions.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the warning that it is not compiled
        return flex_attention(*args, **kwargs)


def _mask_mod(visibility: Visibility):
    """`Visibility.sees` for indices that count from the first query and the first key, as FlexAttention needs it."""

    def sees(batch, head, query, key):
        return visibility.sees(batch, head, query + visibility.q_offset, key + visibility.kv_offset)

    sees.visibility = visibility  # for `_move_block_mask`
    return sees


def _move_block_mask(mask: BlockMask, device: torch.device | str) -> BlockMask:
    """`BlockMask.to` leaves behind the tensors that the mask function reads."""
    moved = mask.to(device)
    moved.mask_mod = _mask_mod(mask.mask_mod.visibility.to(device))
    return moved


def _block_mask(visibility: Visibility) -> BlockMask:
    v = visibility
    batch_size = None if v.is_plain else v.batch_size
    is_compiled = torch.device(v.device).type == "cuda"  # on the CPU, compiling takes longer than it saves
    return create_block_mask(
        _mask_mod(v), batch_size, None, v.q_length, v.kv_length, device=v.device, _compile=is_compiled
    )


@lru_cache(maxsize=8)
def _plain_block_mask(length: int, window: int | None, device: torch.device | str) -> BlockMask:
    """The mask without a cache, padding or documents, kept because every training step uses the same one."""
    with torch.inference_mode(False):  # or training steps could not use a mask that an evaluation made
        return _block_mask(Visibility(length, length, window=window, device=device))


ALL_MASK_ATTENTION_FUNCTIONS["eager"] = dense_mask
ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] = sdpa_mask
ALL_MASK_ATTENTION_FUNCTIONS["flex_attention"] = flex_mask
ALL_ATTENTION_FUNCTIONS["sdpa"] = windowed_sdpa_attention_forward
ALL_ATTENTION_FUNCTIONS["flex_attention"] = flex_attention_forward_with_sinks
ALL_MASK_ATTENTION_FUNCTIONS["flash_attention_2"] = flash_mask
ALL_ATTENTION_FUNCTIONS["flash_attention_2"] = checked_flash_attention_forward
windowed_sdpa_attention_forward.takes_sinks_of_queries = True
flex_attention_forward_with_sinks.takes_sinks_of_queries = True
_REFUSES_ADDITIVE_MASKS = (flash_mask, flex_mask)  # with an error that says so
