"""Trains small models on examples that are generated from a seed, or kept in memory."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments, default_data_collator

from lsgpt.training import LSGPTTrainer, StopOnBadLossCallback
from lsgpt.training.report import points_of

from .study import NUM_POINTS


class Stream(IterableDataset):
    """An endless stream of rows, the same in every pass; for a single data loading process."""

    def __init__(self, make_row: Callable[[np.random.Generator], dict[str, np.ndarray]], seed: int):
        self.make_row, self.seed = make_row, seed

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        generator = np.random.default_rng(self.seed)
        while True:
            yield self.make_row(generator)


def train_small(
    model: PreTrainedModel,
    data: Any,
    seed: int,
    folder: Path,
    options: Mapping[str, Any],
    callbacks: Sequence[TrainerCallback] = (),
    trainer_class: type[Trainer] = LSGPTTrainer,
) -> dict[str, Any]:
    """
    Trains a model in place, with the optimizer and schedule of the recipe `micro` and without checkpoints, and puts it
    into evaluation mode.

    Args:
        model: A new model.
        data: A `Stream`, or a data set.
        seed: Seed for the order of the data.
        folder: Output folder. The Trainer writes nothing to it unless the loss becomes NaN or infinite; `callbacks`
            may write to it.
        options: Fields of `TrainingArguments`, including `max_steps`.
        callbacks: Further callbacks of the Trainer.
        trainer_class: The class of the Trainer.

    Returns:
        `diverged`, and the largest `max_logit` if a callback measures logits.
    """
    fields = {
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
        "weight_decay": 0.1,
        "adam_beta2": 0.95,
        "bf16": torch.cuda.is_available(),
        "logging_steps": max(1, options["max_steps"] // NUM_POINTS),
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    guard = StopOnBadLossCallback()
    trainer = trainer_class(
        model=model,
        args=TrainingArguments(output_dir=str(folder), seed=seed, **{**fields, **options}),
        train_dataset=data,
        data_collator=default_data_collator,
        callbacks=[guard, *callbacks],
    )
    trainer.train()
    model.eval()
    logits = [value for _, value in points_of(trainer.state.log_history, "max_logit")]
    largest = math.nan if any(map(math.isnan, logits)) else max(logits, default=math.nan)
    return {"diverged": guard.bad_step is not None, "max_logit": largest}
