"""The largest attention logits of each head, in LSGPT and in any other decoder of Transformers.

LSGPT's layers measure themselves while their `max_logits` is set. The layers of other models ask Transformers in every
forward pass for the function that computes their attention. While somebody measures, a wrapper stands in front of that
function: it computes the maxima of the queries and keys that pass by, and hands the call on as it is.

Shapes: B batch, T queries, S keys, H query heads, H_kv key/value heads, D `head_dim`.
"""

import inspect
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, PreTrainedModel

from lsgpt.modeling_lsgpt.telemetry_lsgpt import HIDDEN, attention_layers, max_logits
from lsgpt.modeling_lsgpt.visibility_lsgpt import Visibility, find_documents


class MaxLogits:
    """
    Switches the measurement on and off in every attention layer of a model, and reads it.

    While it is on, each forward pass raises a running maximum in every layer; the output stays the same.

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
            model: LSGPT, or a decoder whose layers call Transformers' attention interface; alone or wrapped (DDP,
                PEFT, `torch.compile`). Other models in the same process are not measured.

        Raises:
            ValueError: Another kind of model.
        """
        self.is_lsgpt = any(type(module).__name__ == "LSGPTAttention" for module in model.modules())
        self.layers = attention_layers(model) if self.is_lsgpt else causal_attention_layers(model)
        self._name = type(model).__name__
        self._step_aside: Callable = lambda: None

    def start(self):
        """Forgets earlier maxima and measures from now on."""
        self.stop()
        for layer in self.layers:
            # Of other models, the number of heads shows in the first call; a layer that is never called is left out.
            unmeasured = torch.tensor([-math.inf])
            layer.max_logits = torch.zeros(layer.config.num_attention_heads) if self.is_lsgpt else unmeasured
        if not self.is_lsgpt:
            StandIn.enter(self.layers)
            # Once, by `stop`, or when this object goes because an exception ended the training that it watched.
            self._step_aside = weakref.finalize(self, StandIn.leave, self.layers)

    def stop(self):
        """Measures no more, and forgets the maxima."""
        self._step_aside()
        for layer in self.layers:
            layer.max_logits = None

    def read(self) -> torch.Tensor:
        """
        The maxima since `start`, `(layers, heads)` in float32, on the model's device: in LSGPT global heads first, in
        other models in the order of query heads. The rows of layers with fewer heads than others end with zeros.

        Raises:
            ValueError: The model's layers have not called Transformers' attention interface since.
        """
        layers = self._measured_layers()
        if not layers:
            raise ValueError(
                "`model` must ask Transformers for its attention function (`ALL_ATTENTION_FUNCTIONS.get_interface`); "
                f"{self._name} did not. Some models compute attention themselves: always, or with "
                'attn_implementation="eager". With nn.DataParallel copies of it run: use one process for each GPU'
            )
        device = next(layers[0].parameters()).device
        return nn.utils.rnn.pad_sequence([layer.max_logits.to(device) for layer in layers], batch_first=True)

    def layer_numbers(self) -> list[int]:
        """The numbers of the layers that `read` returns. They may have gaps where layers do without attention."""
        numbers = [getattr(layer, "layer_idx", None) for layer in self._measured_layers()]
        # LSGPT does not number its attention; in a model of several decoders numbers would stand for several layers.
        is_unique = None not in numbers and len(set(numbers)) == len(numbers)
        return numbers if is_unique else list(range(len(numbers)))

    def _measured_layers(self) -> list[nn.Module]:
        return [layer for layer in self.layers if not layer.max_logits.isneginf().any()]


@torch.no_grad()
def measure_max_logits(model: nn.Module, **inputs) -> torch.Tensor:
    """
    The largest attention logit of every head in one forward pass.

    It is the maximum of `|q . k * scaling|` after QK-norm and rotary embedding and before soft-capping, over all pairs
    that may attend, computed exactly in float32 whatever engine runs the model. Attention sinks do not count: they are
    no logits of pairs.

    Args:
        model: LSGPT, or a decoder whose layers call Transformers' attention interface, such as Llama, Qwen3, Gemma 3,
            GPT-2 or gpt-oss; alone or wrapped (DDP, PEFT, `torch.compile`).
        **inputs: What its `forward` takes, such as `input_ids` and `attention_mask`.

    Returns:
        `(layers, heads)` in float32 on the model's device: in LSGPT global heads first, in other models in the order
        of query heads. The rows of layers with fewer heads than others end with zeros.

    Raises:
        ValueError: The model is no decoder, or does not call the interface.

    ```python
    >>> from lsgpt import measure_max_logits
    >>> measure_max_logits(model, **tokenizer("def", return_tensors="pt")).max()
    ```
    """
    recorder = MaxLogits(model)
    recorder.start()
    try:
        model(**{"use_cache": False, **inputs})
        return recorder.read()
    finally:
        recorder.stop()


def causal_attention_layers(model: nn.Module) -> list[nn.Module]:
    """
    The modules of a decoder of Transformers, alone or wrapped, that may call the attention interface, in order.

    Raises:
        ValueError: No model of Transformers, one with an encoder, or one without causal attention.
    """
    name = type(model).__name__
    decoder = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    if decoder is None:
        raise ValueError(f"`model` must be a decoder of Transformers, alone or wrapped; got {name}")
    if decoder.config.is_encoder_decoder:
        raise ValueError(f"`model` must be a decoder alone; got {name}, which has an encoder")
    # Encoders for images or sound, and cross-attention, say `is_causal = False` and are not looked at.
    layers = [m for m in model.modules() if hasattr(m, "layer_idx") and getattr(m, "is_causal", None) is True]
    if not layers:
        raise ValueError(
            f"`model` must have causal attention, in modules with a `layer_idx` and `is_causal = True`; got {name}"
        )
    return layers


class StandIn(AttentionInterface):
    """
    Stands in for Transformers' `ALL_ATTENTION_FUNCTIONS` in the files of the measured layers, as long as somebody
    measures them.

    It hands out the same attention functions, also `eager` ones, which each model has for itself, with the measurement
    in front. A compiled model notices that another object stands there, and compiles measured steps for themselves.
    """

    def __init__(self, interface: AttentionInterface):
        super().__init__()
        self.interface = interface
        self.users = 0

    def get_interface(self, attn_implementation, *args, **kwargs):
        """As `AttentionInterface.get_interface`; the function that it returns also measures."""
        return measuring(attn_implementation, self.interface.get_interface(attn_implementation, *args, **kwargs))

    def __getitem__(self, key):
        return measuring(key, self.interface[key])

    @staticmethod
    def enter(layers: list[nn.Module]):
        """Steps in where the layers' files look for attention functions."""
        for namespace, name in places_of_interfaces(layers):
            if not isinstance(namespace[name], StandIn):
                namespace[name] = StandIn(namespace[name])
            namespace[name].users += 1

    @staticmethod
    def leave(layers: list[nn.Module]):
        """Undoes `enter`, unless somebody else measures layers of the same file."""
        for namespace, name in places_of_interfaces(layers):
            namespace[name].users -= 1
            if namespace[name].users == 0:
                namespace[name] = namespace[name].interface


def places_of_interfaces(layers: list[nn.Module]) -> list[tuple[dict, str]]:
    """The global variables of the layers' files that hold an `AttentionInterface`: namespaces and names."""
    namespaces = [inspect.unwrap(type(layer).forward).__globals__ for layer in layers]
    distinct = {id(namespace): namespace for namespace in namespaces}.values()
    return [(space, name) for space in distinct for name, x in space.items() if isinstance(x, AttentionInterface)]


def measuring(attn_implementation: str, attend: Callable) -> Callable:
    """An attention function that measures the layers whose `max_logits` is set."""

    @wraps(attend)
    def measure_and_attend(module, *args, **kwargs):
        if getattr(module, "max_logits", None) is not None:
            measure_call(attn_implementation, module, *args, **kwargs)
        return attend(module, *args, **kwargs)

    return measure_and_attend


@torch.compiler.disable  # it looks at the values of masks
def measure_call(engine: str, module: nn.Module, *args, **kwargs):
    """Raises the running maximum of a layer to that of one call of its attention function."""
    new = max_logits_of_call(engine, module, *args, **kwargs)
    module.max_logits = torch.maximum(module.max_logits.to(new.device), new)


@torch.no_grad()
def max_logits_of_call(
    engine: str,
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
    The maxima of the heads in one call of an attention function.

    Args:
        engine: The `attn_implementation`.
        module: The attention module that calls.
        query (`(B, H, T, D)`), key (`(B, H_kv, S, D)`): What it passes, and so on with the other arguments, which are
            those that Transformers' attention functions take.

    Returns:
        `(H,)` in float32.

    Raises:
        ValueError: The attention is not causal, or who sees whom cannot be told.
    """
    num_heads, q_length, head_dim = query.shape[1:]
    scaling = head_dim**-0.5 if scaling is None else scaling
    name = type(module).__name__
    if cache is not None:
        raise ValueError(f"logits cannot be measured with a paged cache, whose keys {name} does not have yet")
    is_unmasked = engine == "eager" and attention_mask is None and q_length > 1
    if is_causal is False or is_unmasked or key.shape[2] < q_length:
        raise ValueError(f"logits are measured in causal attention only; that of {name} is not")
    if attention_mask is None and engine == "sdpa" and q_length > 1:
        key = key[:, :, :q_length]  # as `sdpa` does: what follows are the empty slots of a static cache
    if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2:
        key = key[:, :, : attention_mask.shape[1]]  # the same with FlashAttention
    if attention_mask is None or len(attention_mask.shape) == 2:
        visibility = describe_without_mask(engine, query, key, attention_mask, **kwargs)
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
    engine: str,
    query: torch.Tensor,
    key: torch.Tensor,
    padding_mask: torch.Tensor | None = None,
    sliding_window: int | None = None,
    position_ids: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    **kwargs,
) -> Visibility:
    """
    Who sees whom where the engine knows causality and the window, and at most padding `(B, S)` comes as a mask.

    FlashAttention, which has no masks, finds packed documents in `cu_seq_lens_q`, the numbers of tokens before each
    document and before the end, or in the positions of a single row. Others get a mask for them.
    """
    batch_size, q_length, kv_length = query.shape[0], query.shape[2], key.shape[2]
    documents = None
    if "flash" in engine and padding_mask is None and q_length == kv_length:
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
    Who sees whom where a mask says everything: `(B or 1, 1 or H, T, S)`, boolean or added to the logits, or a
    FlexAttention mask. `head` says whose mask it is, where heads have their own.

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
            # Transformers' own. As a boolean one it also shows pairs to which a softmax would give a weight of 0.
            if (is_hidden | (mask == 0)).all():
                mask = ~is_hidden
        visibility = Visibility(**sizes, mask=mask, device=query.device)
        sees_itself = mask[:, 0, :, past_length:].diagonal(dim1=-2, dim2=-1)
        sees_itself = sees_itself if mask.dtype == torch.bool else sees_itself > HIDDEN
    # No query sees its key where the keys' end with the empty slots of a static cache: there, all queries count.
    if sees_itself.any() and not sees_itself.all():
        visibility.padding_mask = nn.functional.pad(sees_itself, (past_length, 0), value=True)
    return visibility


@dataclass
class FunctionVisibility(Visibility):
    """Who sees whom as a function says, whose indices count from the first query and the first key of a call."""

    function: Callable | None = None
    """Takes indices of sequence, query and key, and need not broadcast them."""

    def sees(self, batch, head, query, key) -> torch.Tensor:
        """As `Visibility.sees`, for indices `(B, 1, 1)`, query positions `(T, 1)` and key positions `(S,)`."""
        function = self.function
        for dims in ((None, None, 0), (None, 0, None), (0, None, None)):
            function = torch.vmap(function, dims)
        return function(batch.flatten(), query.flatten() - self.q_offset, key.flatten())
