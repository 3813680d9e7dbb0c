"""Callbacks for any `transformers.Trainer`."""

import json
from pathlib import Path

import torch
from torch import nn
from transformers import TrainerCallback
from transformers.utils import logging


logger = logging.get_logger(__name__)


class MetricsFileCallback(TrainerCallback):
    """
    Appends every log event of a `Trainer` to a file as it happens, one JSON object with its `step` per line.

    ```python
    >>> trainer = Trainer(model, args, callbacks=[MetricsFileCallback()])
    ```
    """

    def __init__(self, file_name: str = "metrics.jsonl"):
        """Writes to `file_name` inside the Trainer's `output_dir`."""
        self.file_name = file_name

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero:
            return
        path = Path(args.output_dir) / self.file_name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": state.global_step, **(logs or {})}) + "\n")


class StopOnBadLossCallback(TrainerCallback):
    """
    Ends the training when a loss is NaN or infinite, before the optimizer takes the step.

    The weights stay those of the last good step, and a checkpoint of them is saved. The message names the step and the
    first layer with a NaN or an infinity in its output. The loss watched is the one that the model returns for its
    labels; a `Trainer` that computes another one outside the model is left alone.

    ```python
    >>> trainer = Trainer(model, args, train_dataset=data, callbacks=[StopOnBadLossCallback()])
    ```
    """

    def __init__(self):
        self._batches: list[tuple[dict, torch.Tensor]] = []
        self._hook = None

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self._hook = model.register_forward_hook(self._remember, with_kwargs=True)

    def on_train_end(self, args, state, control, **kwargs):
        self._hook.remove()
        self._batches.clear()

    def on_step_begin(self, args, state, control, **kwargs):
        self._batches.clear()

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        is_bad = torch.tensor(any(not loss.isfinite() for _, loss in self._batches), device=args.device)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            flag = is_bad.float()
            torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
            is_bad = flag > 0
        if not is_bad:
            return
        for parameter in model.parameters():
            parameter.grad = None  # optimizers pass over parameters without a gradient
        control.should_save = control.should_training_stop = True
        bad_batch = next((inputs for inputs, loss in self._batches if not loss.isfinite()), None)
        where = "a batch of another process" if bad_batch is None else _first_bad_layer(model, bad_batch)
        logger.error(
            f"the loss of step {state.global_step + 1} is not finite, the first bad numbers come from {where}; "
            f"saving the weights of step {state.global_step} and ending the training"
        )

    def _remember(self, model: nn.Module, args: tuple, inputs: dict, output):
        loss = getattr(output, "loss", None)
        if model.training and loss is not None:
            self._batches.append((inputs, loss.detach()))


@torch.no_grad()
def _first_bad_layer(model: nn.Module, inputs: dict) -> str:
    """Runs the batch again and names the first module, in order of execution, whose output is not finite."""
    bad = []

    def check(name):
        def hook(module, args, output):
            tensors = output if isinstance(output, tuple) else (output,)
            if not bad and any(isinstance(x, torch.Tensor) and not x.isfinite().all() for x in tensors):
                bad.append(name)

        return hook

    leaves = [(name, module) for name, module in model.named_modules() if not list(module.children())]
    hooks = [module.register_forward_hook(check(name)) for name, module in leaves]
    try:
        model(**inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return f"`{bad[0]}`" if bad else "the loss itself"
