"""The cache of global heads with room to grow: a new token is written into it, and what is there is not copied.

Transformers' `DynamicLayer` copies all its keys and values for every new token. Beside local heads, whose caches have
ended growing, that copy would be most of what a long context costs in decoding.

Shapes: B batch, H_kv key/value heads, T new tokens, S keys, D `head_dim`.
"""

import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer
from transformers.utils.import_utils import is_tracing


ROOM = 256
"""
A cache of S keys gets room for S / 256 more. Then a token copies 256 keys of each global head on average, few beside
what local heads move in their windows, and the memory stays within 0.4% of what is needed.
"""


class GrowingLayer(DynamicLayer):
    """`DynamicLayer` whose `keys` and `values` are the beginnings of tensors with room for more."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor):
        """As in `DynamicLayer`; nothing has room yet."""
        super().lazy_initialization(key_states, value_states)
        self.buffers = (self.keys, self.values)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds `(B, H_kv, T, D)`, and returns all keys and values, `(B, H_kv, S, D)`."""
        length = self.get_seq_length()
        needs_gradient = torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad)
        if length == 0 or needs_gradient or is_tracing(key_states):  # a prompt has the room that it needs
            return super().update(key_states, value_states, *args, **kwargs)
        end = length + key_states.shape[-2]
        # Beam search, a move to another device and the like have put other tensors in place of the views.
        pairs = zip(self.buffers, (self.keys, self.values))
        if not all(_begins_with(buffer, states, end) for buffer, states in pairs):
            self.buffers = tuple(_with_room(states, end + max(end // ROOM, 1)) for states in (self.keys, self.values))
        for buffer, new in zip(self.buffers, (key_states, value_states)):
            buffer[:, :, length:end] = new
        self.keys, self.values = (buffer[:, :, :end] for buffer in self.buffers)
        return self.keys, self.values

    def offload(self):
        """As in `DynamicLayer`; the room is given back."""
        super().offload()
        self.buffers = (self.keys, self.values)


def make_room(cache: Cache):
    """Lets the layers of a dynamic cache that is still empty grow in place."""
    for i, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer and not layer.is_initialized:
            cache.layers[i] = GrowingLayer()


def _begins_with(buffer: torch.Tensor, states: torch.Tensor, length: int) -> bool:
    """Whether `states` are a buffer's beginning, and `length` tokens fit, and may be written now."""
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
