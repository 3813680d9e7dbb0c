"""Checks of a model's inputs: each error names what is wrong and how to fix it.

Shapes: B batch, T new tokens.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import nn
from transformers.utils.import_utils import is_tracing

from .configuration_lsgpt import LSGPTConfig


REMEDIES = {
    "vocab_size": "does the tokenizer belong to this model?",
    "max_position_embeddings": "learned positions end there: shorten the input, or train a model with more of them or "
    'with position_embedding_type="rope"',
}
"""What to do about ids that are too large, by the field of the configuration that limits them."""


def check_inputs(
    config: LSGPTConfig,
    input_ids: torch.Tensor | None,
    inputs_embeds: torch.Tensor | None,
    position_ids: torch.Tensor | None,
):
    """Raises `ValueError` unless there are either ids or embeddings, of the right shape, and positions that fit."""
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("pass exactly one of `input_ids` and `inputs_embeds`")
    name, inputs = ("input_ids", input_ids) if inputs_embeds is None else ("inputs_embeds", inputs_embeds)
    width = () if inputs_embeds is None else (config.hidden_size,)
    if inputs.ndim != 2 + len(width) or inputs.shape[1] == 0 or inputs.shape[2:] != width:
        shape = ", ".join(("batch", "tokens", *map(str, width)))
        raise ValueError(f"`{name}` must have shape ({shape}) with at least one token; got {tuple(inputs.shape)}")
    if input_ids is not None:
        check_ids(config, "input_ids", input_ids, "vocab_size")
    check_shape("position_ids", position_ids, "like the inputs", inputs.shape[:2], (1, inputs.shape[1]))


def check_ids(config: LSGPTConfig, name: str, ids: torch.Tensor, limit: str, ignored: int | None = None):
    """
    Raises `ValueError` unless ids, except `ignored` ones, are integers from 0 to `config.<limit> - 1`. Values are
    checked on the CPU only, because reading them on another device would force a synchronization.
    """
    if ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"`{name}` must be integers, torch.int64 or torch.int32; got {ids.dtype}; convert them")
    if ids.device.type != "cpu" or not may_look_at(ids):
        return
    ids = ids if ignored is None else ids[ids != ignored]
    if ids.numel():
        low, high = ids.aminmax()
        check_range(config, name, low, high, limit, ignored)


def check_range(
    config: LSGPTConfig,
    name: str,
    low: int | torch.Tensor,
    high: int | torch.Tensor,
    limit: str,
    ignored: int | None = None,
):
    """Raises `ValueError` unless `low` and `high`, the extremes of some ids, are from 0 to `config.<limit> - 1`."""
    size = getattr(config, limit)
    if low < 0 or high >= size:
        rule = f"between 0 and {size - 1} (`{limit}` is {size})"
        rule += "" if ignored is None else f", or {ignored} to be ignored"
        raise ValueError(f"`{name}` must be {rule}; got {low if low < 0 else high}; {REMEDIES[limit]}")


def check_dictionary(masks: dict, kinds: dict, batch_size: int, q_length: int):
    """Raises `ValueError` unless a dictionary of masks has one, or `None`, for each kind of head."""
    if masks.keys() != kinds.keys() or any(mask is not None and mask.ndim != 4 for mask in masks.values()):
        got = {kind: mask if mask is None else tuple(mask.shape) for kind, mask in masks.items()}
        raise ValueError(
            "an `attention_mask` dictionary must hold a 4-D mask, or None, for each of "
            f"{', '.join(map(repr, kinds))}, as `create_masks_for_generate` returns it; got {got}"
        )
    for mask in masks.values():
        if mask is not None:
            check_mask(mask, batch_size, q_length)


def check_mask(
    mask: torch.Tensor,
    batch_size: int,
    q_length: int,
    past_length: int | torch.Tensor | None = None,
    has_empty_slots: bool = True,
):
    """
    Raises `ValueError` unless a mask is boolean or floating point, with the shape `(B or 1, 1, T, keys)`: with the
    keys up to the last new token, where the length of the past is known, and further ones only for empty slots.
    """
    got, total = tuple(mask.shape), past_length + q_length if isinstance(past_length, int) else None
    if not (mask.dtype == torch.bool or mask.is_floating_point()):
        raise ValueError(
            "a 4-D `attention_mask` must be boolean, True where a token may attend, or floating point, to be added to "
            f"the logits; got {mask.dtype}. Convert it with `mask.bool()` if it holds zeros and ones"
        )
    if got[:3] not in ((1, 1, q_length), (batch_size, 1, q_length)) or not (
        total is None or got[3] == total or (got[3] > total and has_empty_slots)
    ):
        raise ValueError(
            f"a 4-D `attention_mask` must have shape ({batch_size}, 1, {q_length}, {total or 'keys'}): batch, all "
            "heads (`num_global_heads` and `sliding_window` define what those of each kind see), new tokens, cached "
            f"and new tokens; got {got}"
        )


def check_layers(layers: Iterable[nn.Module]):
    """Raises `ValueError` if a layer was removed, repeated or moved, because each has cache layers of its own."""
    numbers = [heads.cache_layer for layer in layers for heads in layer.self_attn.head_groups]
    if numbers != list(range(len(numbers))):
        raise ValueError(
            "`past_key_values` needs the layers that the model was built with; after changes of `model.layers`, "
            "save and load the model, or pass use_cache=False"
        )


def check_shape(name: str, x: torch.Tensor | None, reason: str, *shapes: Sequence[int | str]):
    """Raises `ValueError` if a tensor is given and has none of the shapes; the message names the first one."""
    if x is not None and tuple(x.shape) not in map(tuple, shapes):
        raise ValueError(f"`{name}` must have shape {tuple(shapes[0])}, {reason}; got {tuple(x.shape)}")


def may_look_at(x: torch.Tensor, q_length: int = 2) -> bool:
    """
    Whether to inspect values: not while tracing, nor in `torch.func.vmap`; for a single token on the CPU only, to
    avoid a synchronization.
    """
    if x.device.type == "cpu" and type(x) is torch.Tensor:  # not a fake tensor, so two cheap checks are enough
        is_traced = torch.compiler.is_compiling() or torch.jit.is_tracing()
    else:
        is_traced = q_length == 1 or is_tracing(x)
    return not (is_traced or torch._C._functorch.is_functorch_wrapped_tensor(x))
