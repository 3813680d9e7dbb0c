"""A key/value cache for global heads with spare room: new tokens are written in place instead of copying the cache.

Transformers' `DynamicLayer` copies all its keys and values for every new token. Since the caches of local heads stop
growing, this copy would account for most of what a long context costs in decoding.

Shapes: B batch, H_kv key/value heads, T new tokens, S keys, D `head_dim`.
"""

import math
from collections.abc import Callable
from functools import wraps

import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer, StaticLayer
from transformers.modeling_outputs import BaseModelOutputWithPast

from .configuration_lsgpt import LSGPTConfig


CACHE = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"
"""What Transformers calls the cache in arguments and outputs: `cache` from 5.24 on."""

ROOM = 256
"""
When a cache of S keys is reallocated, it gets room for S / 256 more, or for one. Each new token then copies 256 keys
per global head on average, few compared with what local heads move in their windows, and at most 0.4% of the memory is
spare in a cache of 256 keys or more.
"""


class Buffers:
    """
    Room for keys and values, which copies of a cache share: the first copy that appends a token keeps it, any other
    gets room of its own.
    """

    # In a `__dict__`, Transformers' exporters would find these tensors, which are not outputs.
    __slots__ = ("filled", "tensors")

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, room: int):
        length = keys.shape[2]
        self.tensors = tuple(x.new_empty(*x.shape[:2], length + room, x.shape[3]) for x in (keys, values))
        for buffer, states in zip(self.tensors, (keys, values)):
            buffer[:, :, :length] = states
        self.filled = length
        """Number of tokens written so far by any of the copies."""

    def begin_with(self, keys: torch.Tensor, values: torch.Tensor, end: int) -> bool:
        """
        Whether `keys` and `values` are views of everything that was written, with room up to `end`. Beam search, moves
        to another device and similar operations replace the views by other tensors; a shorter view would overwrite
        what another copy of the cache has written.
        """
        buffer, other = self.tensors
        return (
            self.filled == keys.shape[2]
            and end <= buffer.shape[2]
            and (buffer.data_ptr(), other.data_ptr()) == (keys.data_ptr(), values.data_ptr())
            and buffer.stride() == keys.stride() == values.stride()
            and buffer.shape[0] == keys.shape[0]
            and (not buffer.is_inference() or torch.is_inference_mode_enabled())
        )


class GrowingLayer(DynamicLayer):
    """A `DynamicLayer` whose `keys` and `values` are views of the start of larger buffers."""

    buffers: Buffers | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends keys and values `(B, H_kv, T, D)` and returns all of them, `(B, H_kv, S, D)`."""
        # A prompt needs no spare room, and a backward pass may need the cached keys and values as they are.
        is_plain = type(key_states) is torch.Tensor and not torch.compiler.is_compiling()
        is_plain = is_plain and not torch._C._functorch.is_functorch_wrapped_tensor(key_states)
        length = self.keys.shape[2] if self.is_initialized and self.keys.numel() else 0
        if length == 0 or torch.is_grad_enabled() or not is_plain or torch.jit.is_tracing():
            return super().update(key_states, value_states, *args, **kwargs)
        for old, new in ((self.keys, key_states), (self.values, value_states)):
            if old.dtype != new.dtype and torch.promote_types(old.dtype, new.dtype) != old.dtype:
                self.buffers = None  # they were filled under autocast, and cannot hold these
                return super().update(key_states, value_states, *args, **kwargs)
        end = length + key_states.shape[2]
        if self.buffers is None or not self.buffers.begin_with(self.keys, self.values, end):
            self.buffers = Buffers(self.keys, self.values, end - length + max(end // ROOM, 1))
        keys, values = self.buffers.tensors
        keys[:, :, length:end], values[:, :, length:end] = key_states, value_states
        self.buffers.filled = end
        self.keys, self.values = keys[:, :, :end], values[:, :, :end]
        return self.keys, self.values

    def reorder_cache(self, beam_idx: torch.LongTensor):
        """Reorders the layer like `DynamicLayer`, and frees the buffers, which have the old order."""
        super().reorder_cache(beam_idx)
        self.buffers = None

    def batch_repeat_interleave(self, repeats: int):
        """Repeats the rows of the layer like `DynamicLayer`, and frees the buffers, which have fewer."""
        super().batch_repeat_interleave(repeats)
        self.buffers = None

    def batch_select_indices(self, indices: torch.Tensor):
        """Selects rows of the layer like `DynamicLayer`, and frees the buffers, which have the old ones."""
        super().batch_select_indices(indices)
        self.buffers = None

    def offload(self):
        """Offloads the layer like `DynamicLayer`, and frees the spare room."""
        super().offload()
        self.buffers = None

    def reset(self):
        """Empties the layer like `DynamicLayer`, and frees its memory."""
        super().reset()
        self.buffers = None


def accept_cache(function: Callable) -> Callable:
    """Lets a function take its argument `past_key_values` as `cache`, too."""

    @wraps(function)
    def accepting(*args, cache: Cache | None = None, **kwargs):
        if cache is not None:
            if kwargs.get("past_key_values") is not None:
                raise ValueError("pass only one of `cache` and `past_key_values`, two names for the same thing")
            kwargs["past_key_values"] = cache
        return function(*args, **kwargs)

    return accepting


def prepare_cache(config: LSGPTConfig, cache: Cache, q_length: int):
    """
    Makes filled layers of a dynamic cache grow in place. Raises `ValueError` if it is not a cache, belongs to another
    model, or has a window that is too small for the cached tokens and `q_length` new ones.
    """
    if not isinstance(cache, Cache):
        got = type(cache).__name__
        raise ValueError(f"`past_key_values` must be a cache, such as `DynamicCache(config=model.config)`; got {got}")
    # No layer of a static cache has more slots than the whole cache. A cache with windows only does not know its size;
    # there, a window smaller than the model's is refused once it would drop tokens.
    static = [layer for layer in cache.layers if isinstance(layer, StaticLayer)]
    length = max([layer.max_cache_len for layer in static if not layer.is_sliding], default=math.inf)
    if static and length == math.inf:
        length = 0 if torch.compiler.is_compiling() else cache.get_seq_length() + q_length
    groups = config.num_attention_heads // config.num_key_value_heads
    for layer_idx, ((kind, num_heads), layer) in enumerate(zip(config.cache_layers, cache.layers)):
        if getattr(layer, "is_sliding", False):
            window = config.window(kind)
            kept = layer.max_cache_len if isinstance(layer, StaticLayer) else layer.sliding_window
            if window is None or kept < min(window, length):
                raise ValueError(
                    f"`past_key_values` must keep {window or 'all'} tokens in layer {layer_idx}, as the model's "
                    f"configuration says; the layer keeps {kept}. Create the cache with `config=model.config`, and a "
                    "static one with a `max_cache_len` of all tokens"
                )
        if layer.is_initialized and layer.keys.ndim == 4 and layer.keys.shape[1] != num_heads // groups:
            raise ValueError(
                "`past_key_values` must be filled by this model, whose cache layers have different numbers of "
                f"key/value heads; layer {layer_idx} has {layer.keys.shape[1]} instead of {num_heads // groups}. "
                "(PEFT's prefix tuning fills all layers in the same way; use prompt tuning or LoRA)"
            )
        # Only now that there is a past, because Transformers' exporters take none but its own types of layers.
        if type(layer) is DynamicLayer and layer.is_initialized and not torch.compiler.is_compiling():
            cache.layers[layer_idx] = growing = GrowingLayer()
            vars(growing).update(vars(layer))
    if cache.layer_class_to_replicate is None and 0 < len(cache.layers) < len(config.cache_layers):
        raise ValueError(
            f"`past_key_values` must have {len(config.cache_layers)} layers, one for each kind of head in each layer "
            f"of the model; got {len(cache.layers)}. Create the cache anew: `DynamicCache(config=model.config)`"
        )
