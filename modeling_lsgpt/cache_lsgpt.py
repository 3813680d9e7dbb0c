"""A key/value cache for global heads with spare room: new tokens are written in place instead of copying the cache.

Transformers' `DynamicLayer` copies all its keys and values for every new token. Since the caches of local heads stop
growing, this copy would account for most of what a long context costs in decoding.

Shapes: B batch, H_kv key/value heads, T new tokens, S keys, D `head_dim`.
"""

import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer
from transformers.utils.import_utils import is_tracing


ROOM = 256
"""
When a cache of S keys is reallocated, it gets room for S / 256 more, or for one. Each new token then copies 256 keys
per global head on average, few compared with what local heads move in their windows, and at most 0.4% of the memory is
spare in a cache of 256 keys or more.
"""


class GrowingLayer(DynamicLayer):
    """A `DynamicLayer` whose `keys` and `values` are views of the start of larger buffers."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor):
        """Initialises the layer like `DynamicLayer`, without spare room yet."""
        super().lazy_initialization(key_states, value_states)
        self.buffers = (self.keys, self.values)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends keys and values `(B, H_kv, T, D)` and returns all of them, `(B, H_kv, S, D)`."""
        length = self.get_seq_length()
        # A prompt needs no spare room, and a backward pass may need the cached keys and values as they are.
        if length == 0 or torch.is_grad_enabled() or is_tracing(key_states):
            return super().update(key_states, value_states, *args, **kwargs)
        end = length + key_states.shape[-2]
        # Beam search, moves to another device and similar operations replace the views by other tensors.
        pairs = zip(self.buffers, (self.keys, self.values))
        if not all(_begins_with(buffer, states, end) for buffer, states in pairs):
            self.buffers = tuple(_with_room(states, end + max(end // ROOM, 1)) for states in (self.keys, self.values))
        for buffer, new in zip(self.buffers, (key_states, value_states)):
            buffer[:, :, length:end] = new
        self.keys, self.values = (buffer[:, :, :end] for buffer in self.buffers)
        return self.keys, self.values

    def offload(self):
        """Offloads the layer like `DynamicLayer`, and frees the spare room."""
        super().offload()
        self.buffers = (self.keys, self.values)


def make_room(cache: Cache):
    """Replaces the empty layers of a dynamic cache by layers that grow in place."""
    for i, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer and not layer.is_initialized:
            cache.layers[i] = GrowingLayer()


def _begins_with(buffer: torch.Tensor, states: torch.Tensor, length: int) -> bool:
    """Whether `states` is a view of the start of `buffer`, which has room for `length` tokens and is writable."""
    return (
        buffer.data_ptr() == states.data_ptr()
        and buffer.stride() == states.stride()
        and buffer.shape[0] == states.shape[0]
        and buffer.shape[2] >= length
        and (not buffer.is_inference() or torch.is_inference_mode_enabled())
    )


def _with_room(states: torch.Tensor, capacity: int) -> torch.Tensor:
    batch_size, num_heads, length, head_dim = states.shape
    buffer = states.new_empty(batch_size, num_heads, capacity, head_dim)
    buffer[:, :, :length] = states
    return buffer
