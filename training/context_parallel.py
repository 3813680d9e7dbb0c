"""Sequences that are split over processes (`lsgpt.modeling_lsgpt.context_parallel_lsgpt`), with any `Trainer`."""

import os
from collections.abc import Callable
from functools import wraps
from typing import Any

from accelerate import Accelerator, ParallelismConfig
from accelerate.state import GradientState
from accelerate.utils import DistributedType
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader
from transformers import TrainingArguments

from lsgpt.modeling_lsgpt.context_parallel_lsgpt import LOSS_OUTSIDE, split_sequences


class ContextParallelismConfig(ParallelismConfig):
    """
    Accelerate's `ParallelismConfig`, whose `cp_size` is here the number of processes that share each sequence of an
    LSGPT model. It works with DDP and FSDP2, and with the stock `Trainer`, as the `parallelism_config` of its
    `TrainingArguments`. `cp_size` times `dp_shard_size` times `dp_replicate_size` is the number of all processes.
    Without arguments, the sizes are those of `accelerate launch`.
    """

    @property
    def cp_enabled(self) -> bool:
        """False, or Accelerate would replace the attention by its own, which does not support windows."""
        return False

    @property
    def dp_shard_enabled(self) -> bool:
        """Whether the mesh has this dimension; also with a single group, because FSDP2 needs it."""
        return self.cp_size > 1 or super().dp_shard_enabled

    @property
    def non_dp_dim_names(self) -> list[str]:
        """Dimensions of the mesh whose processes get the same rows."""
        return [*super().non_dp_dim_names, *self._cp]

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        """Dimensions of the mesh over which FSDP2 splits the weights."""
        return [*super().dp_shard_cp_dim_names, *self._cp]

    @property
    def dp_cp_dim_names(self) -> list[str]:
        """Dimensions of the mesh over which the loss is averaged."""
        return [*super().dp_cp_dim_names, *self._cp]

    @property
    def _cp(self) -> list[str]:
        return ["cp"] if self.cp_size > 1 else []

    def build_device_mesh(self, device_type: str) -> DeviceMesh | None:
        """As in Accelerate. Raises `ValueError` if the sizes do not fit the number of processes."""
        processes = dist.get_world_size() if dist.is_initialized() else 1
        if self.cp_size > 1 and self.total_size != processes:
            raise ValueError(
                f"`cp_size` x `dp_shard_size` x `dp_replicate_size` must be the number of processes, {processes}; got "
                f"{self.cp_size} x {self.dp_shard_size} x {self.dp_replicate_size}"
            )
        return super().build_device_mesh(device_type)

    def _validate_accelerator(self, accelerator: Accelerator):
        if self.cp_size > 1 and accelerator.distributed_type == DistributedType.DEEPSPEED:
            raise ValueError(
                f"`cp_size` must be 1 with DeepSpeed, which gives every process rows of its own; got {self.cp_size}. "
                "Use FSDP2"
            )
        if accelerator.distributed_type != DistributedType.MULTI_CPU:  # which Accelerate refuses, but DDP can do it
            super()._validate_accelerator(accelerator)

    def split(self, model: nn.Module) -> Callable[[], None]:
        """
        Splits the sequences of a model's training steps, see `split_sequences`, corrects a `Trainer`'s evaluations,
        see `evaluation_inputs`, and returns a function that ends this. The model's method `train` calls it if it finds
        this configuration in the state of Accelerate. Raises `ValueError` for other models.
        """
        end = split_sequences(model, self.get_device_mesh()["cp"].get_group())
        forward, training_loader = model.forward, None

        @wraps(forward)
        def forward_with_checks(*args, **kwargs):
            nonlocal training_loader
            loader = GradientState().active_dataloader
            has_labels = kwargs.get("labels") is not None
            if model.training:
                training_loader = loader
            elif has_labels and loader not in (None, training_loader):  # not those of a teacher
                kwargs = evaluation_inputs(kwargs, loader, self.cp_size)
            elif not (has_labels or kwargs.get("num_items_in_batch") is None or is_whole(loader)):
                raise ValueError(LOSS_OUTSIDE)  # a stock `Trainer` would divide by too few labels
            return forward(*args, **kwargs)

        model.forward = forward_with_checks
        return end


def is_whole(loader: DataLoader | None) -> bool:
    """Whether an `LSGPTTrainer` made the loader, which gives every process different rows."""
    return getattr(loader, "is_for_all_processes", False)


def evaluation_inputs(inputs: dict[str, Any], loader: DataLoader, size: int) -> dict[str, Any]:
    """
    Corrects the model's inputs in an evaluation by a stock `Trainer`, which divides the number of labels by that of
    the processes that share a row, although evaluations are not split. The `Trainer` gives these processes the same
    rows. Raises `ValueError` if it would count repeated rows of the last batch.
    """
    if not is_whole(loader) and loader.remainder > 0:
        raise ValueError(
            f"the evaluation must have a multiple of {loader.total_batch_size} rows if {size} processes share each "
            f"sequence, or a `Trainer` computes wrong figures; got {len(loader.dataset)}. Use `LSGPTTrainer`, or a "
            "`per_device_eval_batch_size` of 1"
        )
    count = inputs.get("num_items_in_batch")
    return inputs if count is None else {**inputs, "num_items_in_batch": count * size}


def replace_parallelism(args: TrainingArguments):
    """Replaces Accelerate's context parallelism in a run with ours. Raises `ValueError` for sequence parallelism."""
    config = args.parallelism_config
    if config is None and os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() == "true":
        config = ParallelismConfig()  # reads the other variables that `accelerate launch` sets
    if config is None:
        return
    if config.sp_size > 1:
        raise ValueError(
            f"`sp_size` of `parallelism_config` must be 1; got {config.sp_size}: sequence parallelism divides heads "
            "evenly over processes, and LSGPT has only a few global ones. Use `cp_size`"
        )
    if config.cp_size > 1 and not isinstance(config, ContextParallelismConfig):
        names = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size")
        args.parallelism_config = ContextParallelismConfig(**{name: getattr(config, name) for name in names})


def processes_per_row(args: TrainingArguments) -> int:
    """Number of processes that share each sequence in training."""
    return getattr(args.parallelism_config, "cp_size", 1)
