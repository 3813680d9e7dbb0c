"""Trains small models on sequences that are generated from a seed during training and never stored."""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset
from transformers import PreTrainedModel, TrainerCallback, TrainingArguments, default_data_collator, set_seed

from lsgpt import LSGPTConfig, LSGPTForCausalLM
from lsgpt.training import LogitTelemetryCallback, LSGPTTrainer, StopOnBadLossCallback
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


def small_training(folder: Path, seed: int, options: dict[str, Any], **changes) -> TrainingArguments:
    """
    Training arguments with the optimizer and schedule of the recipe `micro`, without checkpoints.

    Args:
        folder: Output folder of the Trainer, which stays empty.
        seed: Seed for the order of the data.
        options: Fields of `TrainingArguments`, including `max_steps`.
        changes: Further fields, which take precedence.
    """
    fields = {
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
        "weight_decay": 0.1,
        "adam_beta2": 0.95,
        "bf16": torch.cuda.is_available(),
        "logging_steps": options["max_steps"],
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(output_dir=str(folder), seed=seed, **{**fields, **options, **changes})


def train_on_stream(
    config: LSGPTConfig,
    make_row: Callable[[np.random.Generator], dict[str, np.ndarray]],
    seed: int,
    folder: Path,
    options: dict[str, Any],
    callbacks: Sequence[TrainerCallback] = (),
) -> tuple[PreTrainedModel, dict]:
    """
    Trains a new model with the optimizer and schedule of the recipe `micro`.

    Args:
        config: Configuration of the model.
        make_row: Generates `input_ids` and `labels`, `(n,)` each.
        seed: Seed for the initial weights and the rows.
        folder: Output folder. The Trainer writes nothing to it unless the loss becomes NaN or infinite; `callbacks`
            may write to it.
        options: Fields of `TrainingArguments`, including `max_steps`.
        callbacks: Further callbacks of the Trainer.

    Returns:
        The trained model in evaluation mode, and a dictionary with `diverged`, `max_logit` (the largest during
        training) and `curves`.
    """
    set_seed(seed)
    model = LSGPTForCausalLM(config)
    every_n_steps = max(1, options["max_steps"] // NUM_POINTS)
    guard = StopOnBadLossCallback()
    trainer = LSGPTTrainer(
        model=model,
        args=small_training(folder, seed, options, logging_steps=every_n_steps),
        train_dataset=Stream(make_row, seed),
        data_collator=default_data_collator,
        callbacks=[guard, LogitTelemetryCallback(every_n_steps), *callbacks],
    )
    trainer.train()
    history = trainer.state.log_history
    curves = {key: points_of(history, key) for key in ("loss", "max_logit")}
    logits = [value for _, value in curves["max_logit"]]
    return model.eval(), {
        "diverged": guard.bad_step is not None,
        "max_logit": math.nan if any(map(math.isnan, logits)) else max(logits, default=math.nan),
        "curves": curves,
    }
