"""Adds to the model's classes what training on several processes needs and the code in checkpoints does not have.

`import lsgpt` calls `prepare_for_training`, so that this also holds for the stock `Trainer`.
"""

import sys
from typing import Any

from torch import nn
from transformers import PreTrainedModel


def prepare_for_training(model_class: type[PreTrainedModel]):
    """Makes models of a base class keep their names when sharded, and split sequences if Accelerate is told to."""

    def keep_name(cls, **kwargs):
        super(model_class, cls).__init_subclass__(**kwargs)
        # FSDP2 creates a new class for a sharded model. With our class's name, Transformers finds the code to save
        # with a checkpoint and recognizes the kind of model.
        if cls.__module__.startswith("torch."):
            sharded = next(base for base in cls.__mro__ if not base.__module__.startswith("torch."))
            cls.__module__, cls.__name__, cls.__qualname__ = sharded.__module__, sharded.__name__, sharded.__qualname__

    def train(self, mode: bool = True) -> nn.Module:
        state, parallelism = sys.modules.get("accelerate.state"), None  # not imported: generating needs no Accelerate
        if state is not None and state.is_initialized():
            parallelism = getattr(state.AcceleratorState(), "parallelism_config", None)
        # Evaluations need it only for their figures, see `ContextParallelismConfig.split`, and other models need not.
        is_evaluated = hasattr(parallelism, "split") and hasattr(self, "lm_head")
        if self.base_model is not self and (mode or is_evaluated):
            follow(self, parallelism)
        return super(model_class, self).train(mode)

    model_class.__init_subclass__ = classmethod(keep_name)  # type: ignore[assignment]
    model_class.train = train


def follow(model: nn.Module, parallelism: Any):
    """
    Makes the training steps of a model split their sequences over processes, or stop doing it, as the configuration in
    the state of Accelerate says. Raises `ValueError` for configurations that do it in another way.
    """
    for field in ("cp_size", "sp_size"):
        if getattr(parallelism, field, 1) > 1 and not hasattr(parallelism, "split"):
            raise ValueError(
                f"`{field}` of Accelerate's `ParallelismConfig` must be 1; got {getattr(parallelism, field)}: it "
                "splits every sequence over processes, and local heads would lose their window at each border. Use "
                "`parallelism_config=lsgpt.training.ContextParallelismConfig(cp_size=...)` in `TrainingArguments`"
            )
    wanted = parallelism if getattr(parallelism, "cp_size", 1) > 1 else None
    current, end = vars(model).get("sequence_split", (None, None))
    if current is not wanted:
        if end is not None:
            end()
        model.sequence_split = wanted, None if wanted is None else wanted.split(model)
