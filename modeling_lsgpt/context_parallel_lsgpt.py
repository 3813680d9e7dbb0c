"""One sequence on several processes (context parallelism): each computes its own part of the tokens.

The parts are contiguous and equally long. A process exchanges keys and values with others, as many as each kind of
head needs: a local head sees the W - 1 tokens before its part, usually of one other process, and a global head all
tokens before. To the model, these tokens look like cached ones. So the split is a cache, and the model's code is the
same with and without it.

Shapes: B batch, n tokens of a row, R processes, T = n / R tokens of a part, S received and own tokens, H_kv key/value
heads, D `head_dim`, W `sliding_window`.
"""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers import Cache

from .configuration_lsgpt import LSGPTConfig
from .visibility_lsgpt import find_documents


def count_tokens_sent(sender: int, receiver: int, length: int, window: int | None) -> int:
    """
    How many of its last tokens a process sends to another one.

    Args:
        sender: Rank of the process that sends keys and values.
        receiver: Rank of the process that receives them.
        length: T, tokens of each process.
        window: W, the number of keys that a query sees, including its own; `None` for all.
    """
    if sender >= receiver:
        return 0
    between = (receiver - sender - 1) * length
    return length if window is None else min(max(window - 1 - between, 0), length)


class ReceiveEarlierTokens(torch.autograd.Function):
    """
    Puts the last tokens of the processes before this one in front of its own: keys or values `(B, H_kv, T, D)` to
    `(B, H_kv, S, D)`.

    Its output contains the process's own tokens, so the backward pass runs on every process, also where nothing is
    received. There, the gradients go back to the processes that the tokens came from and are summed in float32.
    """

    @staticmethod
    def forward(ctx, states: torch.Tensor, sent: list[int], received: list[int], group) -> torch.Tensor:
        """
        Args:
            ctx: The autograd context.
            states (`(B, H_kv, T, D)`): Keys or values of this process.
            sent: For each process of the group, how many of the last tokens it gets.
            received: How many tokens come from each process of the group.
            group: The processes that share the sequence, in the order of their parts.
        """
        ctx.exchange = sent, received, group
        own = states.movedim(2, 0)
        outgoing = torch.cat([own[len(own) - count :] for count in sent])
        result = own.new_empty(sum(received) + len(own), *own.shape[1:])
        result[sum(received) :] = own
        dist.all_to_all_single(result[: sum(received)], outgoing, received, sent, group=group)
        return result.movedim(0, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        """Returns the gradient `(B, H_kv, T, D)` of the process's own tokens, including what others computed."""
        sent, received, group = ctx.exchange
        gradient = gradient.movedim(2, 0)
        own = gradient[sum(received) :].to(torch.promote_types(gradient.dtype, torch.float32), copy=True)
        incoming = gradient.new_empty(sum(sent), *gradient.shape[1:])
        dist.all_to_all_single(incoming, gradient[: sum(received)].contiguous(), sent, received, group=group)
        for part in incoming.split(sent):
            own[len(own) - len(part) :] += part
        return own.to(gradient.dtype).movedim(0, 2), None, None, None


class ContextParallelCache(Cache):
    """The tokens before a process's part, which come from other processes whenever a layer asks for them."""

    def __init__(self, config: LSGPTConfig, length: int, group):
        """
        Args:
            config: The model's configuration.
            length: T, tokens of each process.
            group: The processes that share the sequence, in the order of their parts.
        """
        super().__init__(layers=[])
        self.windows = [config.window(kind) for kinds in config.head_groups for kind in kinds]
        self.length, self.group, self.rank = length, group, dist.get_rank(group)

    def received(self, layer_idx: int, rank: int | None = None) -> list[int]:
        """For each process, how many of its tokens a process (by default this one) receives for a cache layer."""
        ranks, receiver = range(dist.get_world_size(self.group)), self.rank if rank is None else rank
        return [count_tokens_sent(sender, receiver, self.length, self.windows[layer_idx]) for sender in ranks]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns earlier and own keys and values `(B, H_kv, S, D)`; every process of the group must call it."""
        ranks = range(dist.get_world_size(self.group))
        sent = [self.received(layer_idx, rank)[self.rank] for rank in ranks]
        exchange = sent, self.received(layer_idx), self.group
        keys = ReceiveEarlierTokens.apply(key_states, *exchange)
        return keys, ReceiveEarlierTokens.apply(value_states, *exchange)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Position of this process's first token."""
        return self.rank * self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Number of earlier and own tokens, and the position of the first of them."""
        num_earlier = sum(self.received(layer_idx))
        return num_earlier + query_length, self.get_seq_length() - num_earlier


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
        A function that ends this.

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
    is_first = True

    @wraps(whole)
    def forward(*args, **kwargs):
        nonlocal is_first
        if not model.training:
            return whole(*args, **kwargs)
        arguments = signature.bind(*args, **kwargs).arguments
        others = arguments.pop("kwargs", {})
        inputs = {**arguments, **others}
        if is_first:
            check_same_rows(inputs, group)
            is_first = False
        return whole(**take_part(model.config, inputs, group))

    def end():
        model.forward = whole
        for layer in layers:
            del layer._can_checkpoint_with_cache

    model.forward = forward
    for layer in layers:  # the exchange is repeated when checkpointing computes a layer again, on every process
        layer._can_checkpoint_with_cache = True
    return end


def take_part(config: LSGPTConfig, inputs: dict[str, Any], group) -> dict[str, Any]:
    """
    Returns a process's arguments of `LSGPTForCausalLM.forward`: those of its own tokens, and the cache that stands for
    the tokens before. Raises `ValueError` for what cannot be split.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    inputs = {name: value for name, value in inputs.items() if value is not None}
    length = check_inputs(config, inputs, size)
    begin, end = rank * length, (rank + 1) * length
    ignored = inputs.get("ignore_index", -100)
    targets = inputs.get("shift_labels")
    if targets is None:
        targets = F.pad(inputs["labels"], (0, 1), value=ignored)[:, 1:]
    part = {name: value for name, value in inputs.items() if name not in FLASH_ARGUMENTS}
    for name in ("input_ids", "inputs_embeds", "position_ids", "labels", "teacher_logits"):
        if name in inputs:
            part[name] = inputs[name][:, begin:end]
    if "attention_mask" in inputs:
        part["attention_mask"] = inputs["attention_mask"][:, :end]
    part["shift_labels"] = targets[:, begin:end].contiguous()
    part.setdefault("num_items_in_batch", (targets != ignored).sum() / size)
    cache = ContextParallelCache(config, length, group)
    return {**part, "past_key_values": cache, "use_cache": False}


FLASH_ARGUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""Where documents begin in a whole row, which `position_ids` also say."""


def check_inputs(config: LSGPTConfig, inputs: dict[str, Any], size: int) -> int:
    """Returns T, the tokens of each process. Raises `ValueError` for inputs that cannot be split over `size`."""
    mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
    refused = {
        "past_key_values": "leave it out: in training, sequences are computed as a whole",
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
        raise ValueError(
            "`labels` must be passed to the model if sequences are split over processes, because each process "
            "computes the loss of its own tokens. A `compute_loss_func` cannot be used, and "
            "`label_smoothing_factor` only with `LSGPTTrainer`, which leaves the smoothing to the model"
        )
    if positions is None and any(name in inputs for name in FLASH_ARGUMENTS):
        raise ValueError(
            "`cu_seq_lens_q` must come with `position_ids` if sequences are split over processes; use "
            "DataCollatorWithFlattening(return_position_ids=True)"
        )
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
    if positions is not None:
        check_documents(positions, None if mask is None else mask.bool())
    return shape[1] // size


def check_documents(positions: torch.Tensor, mask: torch.Tensor | None):
    """
    Raises `ValueError` if packed documents do not count their tokens from 0: a process knows from the position of its
    first token how many tokens before belong to the same document.
    """
    if mask is not None:
        positions = positions.expand(len(mask), -1)
    documents = find_documents(positions, mask)
    if documents is None:
        return
    is_real = torch.ones_like(positions, dtype=torch.bool) if mask is None else mask
    count = is_real.cumsum(-1)
    begins = documents.diff(prepend=documents.new_full((len(documents), 1), -1)) > 0
    before = (count - is_real.long()).where(begins, 0).cummax(-1).values
    if not (positions == count - 1 - before)[is_real].all():
        raise ValueError(
            "`position_ids` must count from 0 in each document of a packed row if sequences are split over processes; "
            "got documents that begin at other positions"
        )


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
            "only as many ranks as there are groups, as Accelerate does, and the same seed on every process"
        )
