"""One sequence on several processes (context parallelism): each computes its own part of the tokens.

The parts are contiguous and equally long. A process exchanges keys and values with others, as many as each kind of
head needs: a local head sees the W - 1 tokens before its part, usually of one other process, and a global head all
tokens before. To a layer's attention, these tokens look like cached ones, and the model's code is the same with and
without a split.

The queries of later tokens see more keys in global heads. To have as many pairs of queries and keys as the others,
process r trades the queries of the second half of its part with process R - 1 - r and gets their outputs back.

Shapes: B batch, n tokens of a row, R processes, T = n / R tokens of a part, S received and own tokens, H_kv key/value
heads, D `head_dim`, W `sliding_window`.
"""

import inspect
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch import distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers import Cache
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from .attention_lsgpt import FLASH_ARGUMENTS, AttentionMasks
from .checks_lsgpt import check_ids, check_range
from .configuration_lsgpt import LSGPTConfig
from .modeling_lsgpt import attention_layers
from .visibility_lsgpt import Visibility, describe_visibility, resolve_positions


LOSS_OUTSIDE = (
    "`labels` must be passed to the model if sequences are split over processes, because each process computes the "
    "loss of its own tokens. A `compute_loss_func` cannot be used, and `label_smoothing_factor` only with "
    "`LSGPTTrainer`, which leaves the smoothing to the model"
)
"""What is said of losses that are computed outside the model."""


def count_tokens_sent(sender: int, receiver: int, processes: int, length: int, window: int | None) -> int:
    """
    How many of its last tokens a process sends to another one; all of them to itself.

    Args:
        sender: Rank of the process that sends keys and values.
        receiver: Rank of the process that receives them. Without a window, it also computes the second half of the
            queries of process `processes - 1 - receiver`.
        processes: R, how many processes share the sequence.
        length: T, tokens of each process.
        window: W, the number of keys that a query sees, including its own; `None` for all.
    """
    if sender == receiver or window is None:
        return length if sender <= max(receiver, processes - 1 - receiver) else 0
    before = (receiver - sender - 1) * length
    return min(max(window - 1 - before, 0), length) if sender < receiver else 0


class ExchangeTokens(torch.autograd.Function):
    """
    Exchanges the last tokens of processes: maps this one's queries, keys, values or outputs `(B, H, T, D)` to those
    from all processes, in order, `(B, H, S, D)`.

    In the backward pass, the gradients go back to the processes that the tokens came from and are summed in float32.
    """

    @staticmethod
    def forward(ctx, states: torch.Tensor, sent: list[int], received: list[int], group) -> torch.Tensor:
        """
        Args:
            ctx: The autograd context.
            states (`(B, H, T, D)`): What this process has.
            sent: For each process of the group, how many of the last tokens it gets.
            received: How many tokens come from each process of the group.
            group: The processes that share the sequence, in the order of their parts.
        """
        rank, own = dist.get_rank(group), states.movedim(2, 0)
        kept, before = sent[rank], sum(received[:rank])
        others = [[0 if i == rank else count for i, count in enumerate(counts)] for counts in (sent, received)]
        ctx.exchange = *others, group, len(own), kept, before
        outgoing = torch.cat([own[len(own) - count :] for count in others[0]])
        incoming = own.new_empty(sum(others[1]), *own.shape[1:])
        dist.all_to_all_single(incoming, outgoing, *reversed(others), group=group)
        return torch.cat([incoming[:before], own[len(own) - kept :], incoming[before:]]).movedim(0, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        """Returns the gradient `(B, H, T, D)` of the process's own tokens, summed over all that received them."""
        sent, received, group, length, kept, before = ctx.exchange
        gradient = gradient.movedim(2, 0)
        outgoing = torch.cat([gradient[:before], gradient[before + kept :]])
        incoming = outgoing.new_empty(sum(sent), *outgoing.shape[1:])
        dist.all_to_all_single(incoming, outgoing, sent, received, group=group)
        own = incoming.new_zeros(length, *incoming.shape[1:], dtype=torch.promote_types(incoming.dtype, torch.float32))
        for part in (gradient[before : before + kept], *incoming.split(sent)):
            own[length - len(part) :] += part
        return own.to(gradient.dtype).movedim(0, 2), None, None, None


class ContextParallelCache(Cache):
    """
    What the attention of a process needs from the others. It takes the cache's place, and to the model it looks like
    an empty cache.
    """

    def __init__(
        self, visibility: dict[str, Visibility], create_masks: Callable[[dict[str, Visibility]], AttentionMasks], group
    ):
        """
        Args:
            visibility: For each kind of head, which keys the queries of whole rows may attend to.
            create_masks: Creates the model's masks.
            group: The processes that share the sequence, in the order of their parts.
        """
        super().__init__(layers=[])
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        self.windows = {kind: v.window for kind, v in visibility.items()}
        self.length = next(iter(visibility.values())).q_length // self.size
        half = self.length // 2 if None in self.windows.values() else 0
        self.spans = [self.length - half, half] if half else [self.length]
        self.masks = [
            create_masks({kind: self.cut(v, index) for kind, v in visibility.items()})
            for index in range(len(self.spans))
        ]

    def cut(self, visibility: Visibility, index: int) -> Visibility:
        """The part of `visibility` for the queries of this process's first or second span."""
        window = visibility.window
        owner = self.size - 1 - self.rank if index and window is None else self.rank
        begin = owner * self.length + sum(self.spans[:index])
        end = begin + self.spans[index]
        first_key = 0 if window is None else max(self.rank * self.length - (window - 1), 0)
        return replace(
            visibility,
            q_length=end - begin,
            q_offset=begin,
            kv_length=end - first_key,
            kv_offset=first_key,
            padding_mask=None if visibility.padding_mask is None else visibility.padding_mask[:, :end],
            documents=None if visibility.documents is None else visibility.documents[:, :end],
        )

    def gather(self, states: torch.Tensor, kind: str) -> torch.Tensor:
        """Maps a process's keys or values `(B, H_kv, T, D)` to those that its queries see, `(B, H_kv, S, D)`."""
        sizes = self.size, self.length, self.windows[kind]
        sent = [count_tokens_sent(self.rank, other, *sizes) for other in range(self.size)]
        received = [count_tokens_sent(other, self.rank, *sizes) for other in range(self.size)]
        return ExchangeTokens.apply(states, sent, received, self.group)

    def trade(self, states: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        """
        Exchanges queries or outputs `(B, H, T / 2, D)` of the second half of a part with process R - 1 - r, in heads
        without a window.
        """
        partner = self.size - 1 - self.rank
        tokens = [states.shape[2] if other == partner else 0 for other in range(self.size)]
        parts = [
            part if self.windows[heads.kind] else ExchangeTokens.apply(part, tokens, tokens, self.group)
            for heads, part in zip(layer.head_groups, states.split(layer.num_heads_by_kind, dim=1))
        ]
        return torch.cat(parts, dim=1)


class SeenTokens(NamedTuple):
    """What a layer's attention takes for a cache: keys and values that one span of queries sees, exchanged before."""

    states: dict[int, tuple[torch.Tensor, torch.Tensor]]
    """By index of the cache layer: keys and values `(B, H_kv, S or more, D)`."""
    lengths: dict[int, int]
    """By index of the cache layer: S."""

    def update(self, key: torch.Tensor, value: torch.Tensor, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys and values `(B, H_kv, S, D)`."""
        keys, values = self.states[layer_idx]
        return keys[:, :, : self.lengths[layer_idx]], values[:, :, : self.lengths[layer_idx]]


def attend_in_spans(layer: nn.Module) -> Callable:
    """Returns a method `attend` for an `LSGPTAttention` that attends as a `ContextParallelCache` prescribes."""
    attend = layer.attend

    @wraps(attend)
    def attend_split(query_states, key_states, value_states, attention_mask, past_key_values=None, **kwargs):
        cache, states = past_key_values, (query_states, key_states, value_states)
        if not isinstance(cache, ContextParallelCache):
            return attend(*states, attention_mask, cache, **kwargs)
        keys, values = (x.split(layer.num_key_value_heads_by_kind, dim=1) for x in (key_states, value_states))
        gathered = {
            heads.cache_layer: (cache.gather(key, heads.kind), cache.gather(value, heads.kind))
            for heads, key, value in zip(layer.head_groups, keys, values)
        }
        own, *second = query_states.split(cache.spans, dim=2)
        if second:  # a copy, because a view would keep all queries in memory, and `trade` copies the second half
            own = own.contiguous()
        outputs = []
        for query, masks in zip((own, *(cache.trade(query, layer) for query in second)), cache.masks):
            lengths = {heads.cache_layer: masks.visibility[heads.kind].kv_length for heads in layer.head_groups}
            seen = SeenTokens(gathered, lengths)
            outputs.append(attend(query, key_states, value_states, masks, seen, **kwargs)[0])
        outputs[1:] = [cache.trade(output.transpose(1, 2), layer).transpose(1, 2) for output in outputs[1:]]
        return torch.cat(outputs, dim=1), None

    return attend_split


def split_sequences(model: nn.Module, group) -> Callable[[], None]:
    """
    Splits the sequences of a model's training steps over processes. Every process of the group passes the same whole
    rows, computes its own part of the tokens, and gets the logits of this part and its share of the loss.

    The mean of the losses over the group is the loss of one process with all tokens, and the mean of the gradients its
    gradient, as DDP and FSDP2 compute them. With `num_items_in_batch`, it is the sum instead. In evaluation mode,
    nothing is split.

    Args:
        model: An `LSGPTForCausalLM`.
        group: The processes that share each sequence, in the order of its parts: a `ProcessGroup` of
            `torch.distributed`.

    Returns:
        A function that undoes this.

    Raises:
        ValueError: If the model is of another kind. In training steps: if the inputs contain something that cannot be
            split, rows cannot be divided into equal parts, or the processes have different rows.
    """
    if not hasattr(model, "lm_head"):
        raise ValueError(
            f"`model` must be an LSGPTForCausalLM to split its sequences over processes; got {type(model).__name__}, "
            "which needs whole sequences. Split the batch instead"
        )
    whole, signature = model.forward, inspect.signature(model.forward)
    layers = [module for module in model.modules() if hasattr(module, "_can_checkpoint_with_cache")]
    attentions = attention_layers(model)
    # From the model's own module, because code from a checkpoint does not know the classes of this package.
    create_masks = partial(sys.modules[type(attentions[0]).__module__].create_masks, model.config)
    ropes = [module for module in model.modules() if isinstance(module, LlamaRotaryEmbedding)]
    is_first, last_position = True, None

    def rotate(own, x, position_ids):
        # The frequencies of some types (`dynamic`, `longrope`) depend on the largest position, here of whole rows.
        if not model.training:
            return own(x, position_ids)
        last = last_position.expand(len(position_ids), 1)
        return tuple(each[:, :-1] for each in own(x, torch.cat([position_ids, last], dim=1)))

    @wraps(whole)
    def forward(*args, **kwargs):
        nonlocal is_first, last_position
        if not model.training:
            return whole(*args, **kwargs)
        arguments = signature.bind(*args, **kwargs).arguments
        others = arguments.pop("kwargs", {})
        inputs = {**arguments, **others}
        if is_first:
            check_same_rows(inputs, group)
            is_first = False
        part, visibility = take_part(model.config, inputs, group)
        last_position = part.pop("last_position")
        return whole(**part, past_key_values=ContextParallelCache(visibility, create_masks, group), use_cache=False)

    undo = ExitStack()

    def put(module, name, value):
        own = vars(module).get(name)  # a `forward` with Accelerate's hooks, for example
        undo.callback(*((delattr, module, name) if own is None else (setattr, module, name, own)))
        setattr(module, name, value)

    put(model, "forward", forward)
    for rope in ropes:
        put(rope, "forward", partial(rotate, rope.forward))
    for attention in attentions:
        put(attention, "attend", attend_in_spans(attention))
    for layer in layers:  # the exchange is repeated when checkpointing computes a layer again, on every process
        put(layer, "_can_checkpoint_with_cache", True)
    return undo.close


def take_part(config: LSGPTConfig, inputs: dict[str, Any], group) -> tuple[dict[str, Any], dict[str, Visibility]]:
    """
    Returns a process's arguments of `LSGPTForCausalLM.forward`, those of its own tokens, with `last_position`, the
    largest position of whole rows; and for each kind of head, which keys the queries of whole rows may attend to.
    Raises `ValueError` for what cannot be split.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    inputs = {name: value for name, value in inputs.items() if value is not None}
    length = check_inputs(config, inputs, size)
    begin, end = rank * length, (rank + 1) * length
    ignored = inputs.get("ignore_index", -100)
    targets = inputs.get("shift_labels")
    if targets is None:
        targets = F.pad(inputs["labels"], (0, 1), value=ignored)[:, 1:]
    tokens = next(inputs[name] for name in ("input_ids", "inputs_embeds") if name in inputs)
    position_ids = resolve_positions(tokens, **inputs)
    visibility = describe_visibility(config, tokens, inputs.get("attention_mask"), position_ids=position_ids)
    has_limit = config.position_embedding_type == "learned"
    if position_ids is None:
        position_ids = torch.arange(tokens.shape[1], device=tokens.device)[None]
        if has_limit:  # without a look at values, which is for the CPU only
            check_range(config, "position_ids", 0, tokens.shape[1] - 1, "max_position_embeddings")
    # Whole rows are checked, so that every process has the error, and none waits for one that has it.
    if has_limit:
        check_ids(config, "position_ids", position_ids, "max_position_embeddings")
    if "input_ids" in inputs:
        check_ids(config, "input_ids", tokens, "vocab_size")
    check_ids(config, "labels", inputs["labels"], "vocab_size", ignored)
    part = {name: value for name, value in inputs.items() if name not in FLASH_ARGUMENTS}
    part |= {"position_ids": position_ids, "last_position": position_ids.max()}
    for name in ("input_ids", "inputs_embeds", "position_ids", "labels", "teacher_logits"):
        if name in part:
            part[name] = part[name][:, begin:end]
    part["attention_mask"] = dict.fromkeys(visibility)  # nothing to look for: the cache has the masks
    part["shift_labels"] = targets[:, begin:end].contiguous()
    part.setdefault("num_items_in_batch", (targets != ignored).sum() / size)
    return {name: value for name, value in part.items() if name != "use_cache"}, visibility


def check_inputs(config: LSGPTConfig, inputs: dict[str, Any], size: int) -> int:
    """Returns T, the tokens of each process. Raises `ValueError` for inputs that cannot be split over `size`."""
    mask = inputs.get("attention_mask")
    refused = {
        **dict.fromkeys(("past_key_values", "cache"), "leave it out: in training, sequences are computed as a whole"),
        "logits_to_keep": "leave it out: every process returns the logits of its own tokens",
        "output_attentions": "leave it out, or measure attention in evaluation mode, which is not split",
    }
    for name, remedy in refused.items():
        value = inputs.get(name, config.output_attentions if name == "output_attentions" else None)
        if value is not None and not (isinstance(value, int) and value == 0):
            raise ValueError(f"`{name}` must be unset if sequences are split over processes; {remedy}")
    if mask is not None and (isinstance(mask, dict) or mask.ndim != 2):
        raise ValueError(
            "`attention_mask` must have 2 dimensions (batch, tokens) if sequences are split over processes; for "
            "packed documents, pass `position_ids` that begin at 0 in each of them"
        )
    if "labels" not in inputs:
        raise ValueError(LOSS_OUTSIDE)
    shape = next(inputs[name] for name in ("input_ids", "inputs_embeds") if name in inputs).shape[:2]
    for name in ("labels", "shift_labels", "attention_mask", "position_ids", "teacher_logits"):
        if name in inputs and inputs[name].shape[:2] not in (shape, (1, shape[1])):
            raise ValueError(
                f"`{name}` must have shape {tuple(shape)}, like the inputs; got {tuple(inputs[name].shape)}"
            )
    if shape[1] % size:
        raise ValueError(
            f"rows must have a multiple of {size} tokens, one part for each of {size} processes; got {shape[1]}. Pad "
            f"them, for example with `pad_to_multiple_of={size}` of a data collator"
        )
    return shape[1] // size


def check_same_rows(inputs: dict[str, Any], group):
    """Raises `ValueError`, on every process of the group, if the inputs are not the same on all of them."""
    tensors = [x for _, x in sorted(inputs.items()) if isinstance(x, torch.Tensor) and not x.is_floating_point()]
    device = next((x.device for x in inputs.values() if isinstance(x, torch.Tensor)), None)
    checksum = torch.zeros(2, dtype=torch.int64, device=device)
    for x in tensors:
        weights = torch.arange(1, x.numel() + 1, device=x.device)
        checksum[0] = checksum[0] * 31 + sum(x.shape)
        checksum[1] = checksum[1] * 31 + (x.flatten() * weights).sum()
    all_checksums = [torch.empty_like(checksum) for _ in range(dist.get_world_size(group))]
    dist.all_gather(all_checksums, checksum, group=group)
    if any(not torch.equal(other, checksum) for other in all_checksums):
        raise ValueError(
            "the processes that share a sequence must have the same rows; got different ones. Give the data loader "
            "only as many ranks as there are groups, and the same seed on every process. Accelerate does so, but with "
            "an iterable dataset only with `accelerator_config={'dispatch_batches': False}` or `LSGPTTrainer`"
        )
