"""Short trainings on the CPU."""

import torch
from transformers import Trainer, TrainingArguments


def random_rows(with_mask: bool = False) -> list[dict]:
    """Rows of 40 random tokens, for models of 97 tokens, of which the first three have a meaning for some."""
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(3, 97, (64, 40)).tolist()]
    return [{**row, "attention_mask": [1] * 40} for row in rows] if with_mask else rows


def trainer_of(
    model, folder, *callbacks, trainer_type=Trainer, with_mask=False, eval_dataset=None, **arguments
) -> Trainer:
    """A quiet `Trainer` of six steps of two micro-batches, on the same random rows each time."""
    arguments = {
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        **arguments,
    }
    torch.manual_seed(0)
    args = TrainingArguments(folder, **arguments)
    rows = random_rows(with_mask)
    return trainer_type(model, args, train_dataset=rows, eval_dataset=eval_dataset, callbacks=list(callbacks))
