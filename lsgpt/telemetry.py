"""Measures the largest attention logit of each head, in LSGPT and in other decoders of Transformers.

In LSGPT's layers, the method `split_heads` is replaced during a measurement. The layers of other models look up their
attention function in Transformers in every forward pass; there, this function is wrapped. Both compute the maxima from
the queries and keys, and then make the original call unchanged. `max_logits` of a measured layer holds the maxima.

Shapes: B batch, T queries, S keys, H query heads, H_kv key/value heads, D `head_dim`.
"""

import inspect
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, PreTrainedModel

from lsgpt.modeling_lsgpt import attention_layers, is_lsgpt
from lsgpt.modeling_lsgpt.attention_lsgpt import ALL_HEADS, AttentionMasks
from lsgpt.modeling_lsgpt.visibility_lsgpt import HIDDEN, Visibility, find_documents

from .logits import max_logits


class MaxLogits:
    """
    Starts, stops and reads the measurement in every attention layer of a model.

    During the measurement, each forward pass updates a running maximum in every layer. The output is unchanged.

    ```python
    >>> maxima = MaxLogits(model)
    >>> maxima.start()
    >>> loss = model(**batch).loss
    >>> maxima.read()
    >>> maxima.stop()
    ```
    """

    def __init__(self, model: nn.Module):
        """
        Args:
            model: LSGPT, or a decoder whose layers call Transformers' attention interface; bare or wrapped (DDP, PEFT,
                `torch.compile`). Other models in the same process are not measured.

        Raises:
            ValueError: If `model` is another kind of model.
        """
        self.is_lsgpt = is_lsgpt(model)
        self.layers = attention_layers(model) if self.is_lsgpt else causal_attention_layers(model)
        self._name = type(model).__name__
        self._step_aside: Callable = lambda: None

    def start(self):
        """Starts to measure, discarding earlier maxima."""
        self.stop()
        for layer in self.layers:
            if self.is_lsgpt:
                layer.max_logits = torch.zeros(layer.config.num_attention_heads)
                layer.split_heads = MethodType(split_and_measure, layer)
            else:  # the first call shows the number of heads; a layer that is never called is left out
                layer.max_logits = torch.tensor([-math.inf])
        if not self.is_lsgpt:
            StandIn.enter(self.layers)
            # Runs once: in `stop`, or when this object is garbage-collected because an exception ended the training.
            self._step_aside = weakref.finalize(self, StandIn.leave, self.layers)

    def stop(self):
        """Stops measuring and discards the maxima."""
        self._step_aside()
        for layer in self.layers:
            layer.max_logits = None
            vars(layer).pop("split_heads", None)

    def read(self) -> torch.Tensor:
        """
        The maxima since `start`, `(layers, heads)` in float32, on the model's device. LSGPT's global heads come first;
        other models keep the order of their query heads. Rows of layers with fewer heads are padded with zeros.

        Raises:
            ValueError: If nothing is measured, or the model's layers have not called Transformers' attention interface
                since `start`.
        """
        layers = self._measured_layers()
        if not layers:
            raise ValueError(
                "`model` must ask Transformers for its attention function (`ALL_ATTENTION_FUNCTIONS.get_interface`); "
                f"{self._name} did not. Some models compute attention themselves, always or with "
                'attn_implementation="eager". nn.DataParallel runs copies of the model; use one process per GPU'
            )
        device = next(layers[0].parameters()).device
        if device.type == "meta":  # the weights are offloaded
            device = layers[0].max_logits.device
        return nn.utils.rnn.pad_sequence([layer.max_logits.to(device) for layer in layers], batch_first=True)

    def layer_numbers(self) -> list[int]:
        """The indices of the layers that `read` returns, with gaps where layers have no attention."""
        numbers = [getattr(layer, "layer_idx", None) for layer in self._measured_layers()]
        # LSGPT does not number its attention layers; in a model with several decoders, numbers are not unique.
        is_unique = None not in numbers and len(set(numbers)) == len(numbers)
        return numbers if is_unique else list(range(len(numbers)))

    def _measured_layers(self) -> list[nn.Module]:
        if any(getattr(layer, "max_logits", None) is None for layer in self.layers):
            raise ValueError("`start` must be called before the maxima are read, and `stop` after")
        return [layer for layer in self.layers if not layer.max_logits.isneginf().any()]


@torch.no_grad()
def measure_max_logits(model: nn.Module, **inputs) -> torch.Tensor:
    """
    Runs one forward pass and returns the largest attention logit of every head.

    This is the maximum of `|q . k * scaling|` after QK-norm and rotary embedding and before soft-capping, over all
    pairs that may attend. It is computed exactly in float32, with any attention implementation. Attention sinks do not
    count, because they are not logits of pairs.

    Args:
        model: LSGPT, or a decoder whose layers call Transformers' attention interface, such as Llama, Qwen3, Gemma 3,
            GPT-2 or gpt-oss; bare or wrapped (DDP, PEFT, `torch.compile`).
        **inputs: Arguments of its `forward`, such as `input_ids` and `attention_mask`.

    Returns:
        `(layers, heads)` in float32 on the model's device. LSGPT's global heads come first; other models keep the
        order of their query heads. Rows of layers with fewer heads are padded with zeros.

    Raises:
        ValueError: If the model is not a decoder or does not call the interface.

    ```python
    >>> from lsgpt import measure_max_logits
    >>> measure_max_logits(model, **tokenizer("def", return_tensors="pt")).max()
    ```
    """
    recorder = MaxLogits(model)
    # A measurement that has begun, such as that of a training step, goes on afterwards.
    begun = [{name: vars(layer).get(name) for name in ("max_logits", "split_heads")} for layer in recorder.layers]
    recorder.start()
    try:
        model(**{"use_cache": False, **inputs})
        return recorder.read()
    finally:
        recorder.stop()
        for layer, values in zip(recorder.layers, begun):
            vars(layer).update({name: value for name, value in values.items() if value is not None})


def split_and_measure(layer: Any, query, key, value, attention_mask: AttentionMasks, *args) -> list[tuple]:
    """`LSGPTAttention.split_heads`, which also updates `max_logits`. A fused kernel does it itself, on the way."""
    calls = type(layer).split_heads(layer, query, key, value, attention_mask, *args)
    if ALL_HEADS not in attention_mask.masks:
        seen = attention_mask.visibility
        maxima = torch.cat([max_logits(query, key, layer.scaling, seen[heads.kind]) for heads, query, key, _ in calls])
        layer.max_logits = torch.maximum(layer.max_logits.to(maxima.device), maxima)
    return calls


def causal_attention_layers(model: nn.Module) -> list[nn.Module]:
    """
    The modules of a Transformers decoder, bare or wrapped, that may call the attention interface, in order.

    Raises:
        ValueError: If `model` is not a Transformers model, has an encoder, or has no causal attention.
    """
    name = type(model).__name__
    decoder = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    if decoder is None:
        raise ValueError(f"`model` must be a decoder of Transformers, alone or wrapped; got {name}")
    if decoder.config.is_encoder_decoder:
        raise ValueError(f"`model` must be a decoder alone; got {name}, which has an encoder")
    # Encoders for images or sound, and cross-attention, have `is_causal = False` and are skipped.
    layers = [m for m in model.modules() if hasattr(m, "layer_idx") and getattr(m, "is_causal", None) is True]
    if not layers:
        raise ValueError(
            f"`model` must have causal attention, in modules with a `layer_idx` and `is_causal = True`; got {name}"
        )
    return layers


class StandIn(AttentionInterface):
    """
    Replaces Transformers' `ALL_ATTENTION_FUNCTIONS` in the modules that define the measured layers, while they are
    measured.

    It returns the same attention functions, including each model's own `eager` function, wrapped with the measurement.
    A compiled model notices that the object has changed, and compiles measured steps separately.
    """

    def __init__(self, interface: AttentionInterface):
        super().__init__()
        self.interface = interface
        self.users = 0

    def get_interface(self, attn_implementation, *args, **kwargs):
        """Like `AttentionInterface.get_interface`, but the returned function also measures."""
        return measuring(attn_implementation, self.interface.get_interface(attn_implementation, *args, **kwargs))

    def __getitem__(self, key):
        return measuring(key, self.interface[key])

    @staticmethod
    def enter(layers: list[nn.Module]):
        """Replaces the interfaces in which the layers look up attention functions."""
        for namespace, name in places_of_interfaces(layers):
            if not isinstance(namespace[name], StandIn):
                namespace[name] = StandIn(namespace[name])
            namespace[name].users += 1

    @staticmethod
    def leave(layers: list[nn.Module]):
        """Undoes `enter`, unless layers of the same file are still being measured."""
        for namespace, name in places_of_interfaces(layers):
            namespace[name].users -= 1
            if namespace[name].users == 0:
                namespace[name] = namespace[name].interface


def places_of_interfaces(layers: list[nn.Module]) -> list[tuple[dict, str]]:
    """The global variables in the layers' files that hold an `AttentionInterface`, as namespaces and names."""
    namespaces = [inspect.unwrap(type(layer).forward).__globals__ for layer in layers]
    distinct = {id(namespace): namespace for namespace in namespaces}.values()
    return [(space, name) for space in distinct for name, x in space.items() if isinstance(x, AttentionInterface)]


def measuring(attn_implementation: str, attend: Callable) -> Callable:
    """Wraps an attention function to also measure the layers whose `max_logits` is set."""

    @wraps(attend)
    def measure_and_attend(module, *args, **kwargs):
        if getattr(module, "max_logits", None) is not None:
            measure_call(attn_implementation, module, *args, **kwargs)
        return attend(module, *args, **kwargs)

    return measure_and_attend


@torch.compiler.disable  # it inspects the values of masks
def measure_call(attn_implementation: str, module: nn.Module, *args, **kwargs):
    """Updates the running maximum of a layer with one call of its attention function."""
    new = max_logits_of_call(attn_implementation, module, *args, **kwargs)
    module.max_logits = torch.maximum(module.max_logits.to(new.device), new)


@torch.no_grad()
def max_logits_of_call(
    attn_implementation: str,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | BlockMask | None = None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    cache=None,
    **kwargs,
) -> torch.Tensor:
    """
    The largest logit of each head in one call of an attention function.

    Args:
        attn_implementation: Its name.
        module: The attention module that makes the call.
        query (`(B, H, T, D)`), key (`(B, H_kv, S, D)`): As passed by the module, like the other arguments, which are
            those of Transformers' attention functions.

    Returns:
        `(H,)` in float32.

    Raises:
        ValueError: If the attention is not causal, or it cannot be determined which keys each query may attend to.
    """
    num_heads, q_length, head_dim = query.shape[1:]
    scaling = head_dim**-0.5 if scaling is None else scaling
    name = type(module).__name__
    if cache is not None:
        raise ValueError(f"logits cannot be measured with a paged cache, because {name} does not have its keys yet")
    is_unmasked = attn_implementation == "eager" and attention_mask is None and q_length > 1
    if is_causal is False or is_unmasked or key.shape[2] < q_length:
        raise ValueError(f"logits are measured in causal attention only; that of {name} is not causal")
    if attention_mask is None and attn_implementation == "sdpa" and q_length > 1:
        key = key[:, :, :q_length]  # like `sdpa`: the rest are empty slots of a static cache
    if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2:
        key = key[:, :, : attention_mask.shape[1]]  # likewise with FlashAttention
    if attention_mask is None or len(attention_mask.shape) == 2:
        visibility = describe_without_mask(attn_implementation, query, key, attention_mask, **kwargs)
        return max_logits(query, key, scaling, visibility)
    if len(attention_mask.shape) != 4 or attention_mask.shape[1] not in (1, num_heads):
        raise ValueError(
            f"the attention mask of {name} must have shape (batch, 1 or {num_heads} heads, queries, keys) for its "
            f"logits to be measured; got {tuple(attention_mask.shape)}"
        )
    if attention_mask.shape[1] == 1:
        return max_logits(query, key, scaling, describe_mask(query, key, attention_mask))
    maxima = []
    for head in range(num_heads):
        kv_head = head * key.shape[1] // num_heads
        q, k = query[:, head : head + 1], key[:, kv_head : kv_head + 1]
        maxima.append(max_logits(q, k, scaling, describe_mask(q, k, attention_mask, head)))
    return torch.cat(maxima)


def describe_without_mask(
    attn_implementation: str,
    query: torch.Tensor,
    key: torch.Tensor,
    padding_mask: torch.Tensor | None = None,
    sliding_window: int | None = None,
    position_ids: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    **kwargs,
) -> Visibility:
    """
    The visibility if the attention function itself applies causality and the window, and gets at most a padding mask
    `(B, S)`.

    FlashAttention has no masks: it finds packed documents from `cu_seq_lens_q`, the cumulative lengths of documents
    starting at 0, or from the positions of a single row. Other functions get a mask for them.
    """
    batch_size, q_length, kv_length = query.shape[0], query.shape[2], key.shape[2]
    documents = None
    if "flash" in attn_implementation and padding_mask is None and q_length == kv_length:
        if cu_seq_lens_q is not None:
            tokens = torch.arange(batch_size * q_length, device=query.device)
            documents = torch.bucketize(tokens, cu_seq_lens_q[1:], right=True).view(batch_size, -1)
        elif position_ids is not None and batch_size == 1:
            documents = find_documents(position_ids)
    return Visibility(
        q_length=q_length,
        kv_length=kv_length,
        q_offset=kv_length - q_length,
        window=sliding_window,
        padding_mask=None if padding_mask is None else padding_mask.bool(),
        documents=documents,
        batch_size=batch_size,
        device=query.device,
    )


def describe_mask(
    query: torch.Tensor, key: torch.Tensor, attention_mask: torch.Tensor | BlockMask, head: int = 0
) -> Visibility:
    """
    The visibility if a mask determines everything: `(B or 1, 1 or H, T, S)`, boolean or additive, or a FlexAttention
    mask. `head` selects the mask of one head if heads have different ones.

    A query that does not see its own key is padding, and does not count.
    """
    batch_size, q_length, kv_length = query.shape[0], query.shape[2], key.shape[2]
    past_length = kv_length - q_length
    sizes = {"q_length": q_length, "kv_length": kv_length, "q_offset": past_length, "batch_size": batch_size}
    visibility: Visibility
    if isinstance(attention_mask, BlockMask):

        def sees(batch, query, key):
            return attention_mask.mask_mod(batch, torch.tensor(head, device=batch.device), query, key)

        visibility = FunctionVisibility(**sizes, has_empty_slots=True, device=query.device, function=sees)
        index = torch.arange(q_length, device=query.device)
        batch = torch.arange(batch_size, device=query.device)
        sees_itself = torch.vmap(torch.vmap(sees, (None, 0, 0)), (0, None, None))(batch, index, index + past_length)
    else:
        mask = attention_mask[:, head : head + 1, :, :kv_length].expand(batch_size, -1, q_length, -1)
        if mask.dtype != torch.bool:
            is_hidden = mask <= HIDDEN
            # A mask made by Transformers. As a boolean mask it also keeps pairs whose softmax weight would be 0.
            if (is_hidden | (mask == 0)).all():
                mask = ~is_hidden
        visibility = Visibility(**sizes, mask=mask, device=query.device)
        sees_itself = mask[:, 0, :, past_length:].diagonal(dim1=-2, dim2=-1)
        sees_itself = sees_itself if mask.dtype == torch.bool else sees_itself > HIDDEN
    # If the keys end with empty slots of a static cache, no query sees its key here: then all queries count.
    if sees_itself.any() and not sees_itself.all():
        visibility.padding_mask = nn.functional.pad(sees_itself, (past_length, 0), value=True)
    return visibility


@dataclass
class FunctionVisibility(Visibility):
    """Visibility determined by a function, whose indices count from the first query and the first key of a call."""

    function: Callable | None = None
    """Takes indices of sequence, query and key; it need not support broadcasting."""

    def sees(self, batch, head, query, key) -> torch.Tensor:
        """Like `Visibility.sees`, for indices `(B, 1, 1)`, query positions `(T, 1)` and key positions `(S,)`."""
        function = self.function
        for dims in ((None, None, 0), (None, 0, None), (0, None, None)):
            function = torch.vmap(function, dims)
        return function(batch.flatten(), query.flatten() - self.q_offset, key.flatten())
