"""Callbacks for any `transformers.Trainer`."""

import math
import os
import signal
import statistics
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainerCallback
from transformers.utils import logging

from lsgpt.utilities.strict_json import from_json, to_json

from .context_parallel import processes_per_row


logger = logging.get_logger(__name__)


class MetricsFileCallback(TrainerCallback):
    """
    Appends every log event of a `Trainer` to `metrics.jsonl` in its `output_dir` as it happens, one JSON object with
    its `step` per line; NaN and infinities are written as by `to_json`, and read by `read_metrics`. A resumed run
    first drops the lines after its step, or, in another `output_dir`, begins with those of its checkpoint; a new run
    keeps all lines, so give it another `output_dir`.
    """

    def on_train_begin(self, args, state, control, **kwargs):
        path = Path(args.output_dir) / "metrics.jsonl"
        if state.is_world_process_zero and state.global_step > 0:
            logs = read_metrics(path) if path.exists() else state.log_history
            kept = [log for log in logs if log["step"] <= state.global_step]
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_suffix(".unfinished")
            unfinished.write_text("".join(to_json(log) + "\n" for log in kept), encoding="utf-8")
            os.replace(unfinished, path)  # so that a run that is killed leaves all of the lines

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero:
            append_line(Path(args.output_dir) / "metrics.jsonl", {"step": state.global_step, **(logs or {})})


def append_line(path: Path, values: dict):
    """Appends a line for `read_metrics`, in the form of `to_json`; not to a last line that a crash has cut off."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        file.seek(max(file.tell() - 1, 0))
        is_cut_off = file.read() not in (b"", b"\n")
        file.write(b"\n" * is_cut_off + to_json(values).encode() + b"\n")


def read_metrics(path: str | Path) -> list[dict]:
    """Reads the lines of `append_line`, without those that a crash has cut off or spoilt."""
    logs = []
    for line in Path(path).read_bytes().splitlines():
        with suppress(ValueError):  # JSON's, and that of other bytes than text
            logs.append(from_json(line))
    return [log for log in logs if isinstance(log, dict)]


class StoppingCallback(TrainerCallback):
    """
    A callback that can end the training with a checkpoint of the last step, and with nothing else: `Trainer` itself
    would also do what is due at the end of an epoch, let an evaluation decide with `save_strategy: best`, and keep
    only the best checkpoint with `save_total_limit: 1`.
    """

    def __init__(self):
        self.is_stopping = False
        """Whether this callback has ended the training."""
        self._cleanup = ExitStack()

    def stop(self, args, state, control):
        """Ends the training after the checkpoint is saved."""
        self.is_stopping = True
        if args.save_total_limit == 1 and state.best_model_checkpoint is not None:
            self._cleanup.callback(setattr, args, "save_total_limit", 1)
            args.save_total_limit = 2  # the best one and this one
        control.should_save = control.should_training_stop = True
        control.should_evaluate = False

    def on_train_begin(self, args, state, control, **kwargs):
        self.is_stopping = False
        self._cleanup.close()  # after a run that an exception ended

    def on_step_end(self, args, state, control, **kwargs):
        if self.is_stopping:
            self.stop(args, state, control)

    def on_epoch_end(self, args, state, control, **kwargs):
        if self.is_stopping:
            control.should_save = control.should_evaluate = False

    def on_train_end(self, args, state, control, **kwargs):
        self._cleanup.close()


class SaveOnSignalCallback(StoppingCallback):
    """
    On SIGTERM, a cluster's notice that the job will end, finishes the step, saves a checkpoint and ends the training.

    `TrainingArguments.enable_jit_checkpoint` waits for 3 seconds and lets every process decide for itself. This
    callback acts immediately, and the processes agree on the step, so that sharded checkpoints are complete.
    """

    def __init__(self):
        super().__init__()
        self._is_pending = False

    @property
    def was_signalled(self) -> bool:
        """Whether a signal ended the training."""
        return self.is_stopping

    def on_train_begin(self, args, state, control, **kwargs):
        super().on_train_begin(args, state, control)
        self._is_pending = False
        if threading.current_thread() is not threading.main_thread():
            logger.warning("SIGTERM will not save a checkpoint: Python handles signals in the main thread only")
            return
        previous = signal.signal(signal.SIGTERM, self._remember) or signal.SIG_DFL
        self._cleanup.callback(signal.signal, signal.SIGTERM, previous)

    def on_step_end(self, args, state, control, **kwargs):
        (is_signalled,) = any_process([self._is_pending], args.device)
        if is_signalled:
            logger.warning(f"SIGTERM: saving step {state.global_step} and ending the training")
            self.stop(args, state, control)
            control.should_log = True  # because a checkpoint does not contain the losses since the last log

    def _remember(self, signal_number, frame):
        while frame is not None and not self._is_of(frame):
            frame = frame.f_back
        if frame is None:  # an exception has ended the training, and nobody will look
            self._cleanup.close()
            os.kill(os.getpid(), signal_number)
            return
        self._is_pending = True  # and no more: launchers pass a signal on, so that a process may get it twice

    def _is_of(self, frame) -> bool:
        """Whether a frame is `Trainer.train` of a Trainer with this callback."""
        is_training = frame.f_code is Trainer.train.__code__
        return is_training and self in frame.f_locals["self"].callback_handler.callbacks


class StepTimerCallback(TrainerCallback):
    """
    Times the optimizer steps, without waiting for data, evaluation, logging and saving, and counts their tokens. The
    tokens of all steps that were taken, on all processes, are added to the Trainer's `state.num_input_tokens_seen`.
    """

    def __init__(self):
        self.seconds: list[float] = []
        """Wall-clock time of each step so far."""
        self.tokens: list[int] = []
        """Number of tokens of each step so far, on all processes."""
        self._start, self._step_tokens = 0.0, 0
        self._cleanup = ExitStack()

    @property
    def tokens_per_second(self) -> float:
        """Median over the steps; the first three (warm-up) count only if there are no others."""
        speeds = [tokens / seconds for tokens, seconds in zip(self.tokens, self.seconds)]
        return statistics.median(speeds[3:] or speeds or [math.nan])

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.seconds, self.tokens = [], []  # a run may begin again with a smaller batch
        self._cleanup.close()  # after a run that an exception ended
        self._cleanup.enter_context(model.register_forward_pre_hook(self._count, with_kwargs=True))

    def on_train_end(self, args, state, control, **kwargs):
        self._cleanup.close()

    def on_step_begin(self, args, state, control, **kwargs):
        self._start, self._step_tokens = time.perf_counter(), 0

    def on_optimizer_step(self, args, state, control, **kwargs):
        self.tokens.append(self._step_tokens * args.world_size // processes_per_row(args))
        is_taken = getattr(state, "prevented_step", None) != state.global_step + 1  # see StopOnBadLossCallback
        if is_taken and args.include_num_input_tokens_seen == "no":
            state.num_input_tokens_seen += self.tokens[-1]

    def on_step_end(self, args, state, control, **kwargs):
        if torch.accelerator.is_available():  # whose work goes on after the call
            torch.accelerator.synchronize()
        self.seconds.append(time.perf_counter() - self._start)

    def _count(self, model: nn.Module, args: tuple, inputs: dict):
        ids = inputs.get("input_ids", args[0] if args else None)
        if model.training and isinstance(ids, torch.Tensor):
            self._step_tokens += ids.numel()


def any_process(values: list[bool], device: torch.device) -> list[bool]:
    """Which of `values` are true in any of the processes."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return values
    flags = torch.tensor(values, dtype=torch.float32, device=device)
    torch.distributed.all_reduce(flags, op=torch.distributed.ReduceOp.MAX)
    return (flags > 0).tolist()


def name_without_wrappers(name: str) -> str:
    """Returns the name of a module or parameter without what `torch.compile` and FSDP's checkpointing add to it."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this process holds, if it is sharded (FSDP2); otherwise the whole tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class StopOnBadLossCallback(StoppingCallback):
    """
    Ends the training when a loss or a gradient is NaN or infinite, before the optimizer takes the step.

    The weights stay those of the last good step, and are saved in a checkpoint. (With DeepSpeed, which takes the step
    in the backward pass, they are those after the bad step.) The error message names the step and, if it was the loss,
    the first layer with a NaN or an infinity in its output. The callback ignores a loss that a `Trainer` computes
    outside the model. With `fp16`, gradients are left to the gradient scaler, which skips such steps itself. The bad
    loss is logged as it is: `logging_nan_inf_filter`, which would log other numbers, is off during the training.
    """

    def __init__(self):
        super().__init__()
        self.bad_step: int | None = None
        """The step that was not taken because of a bad loss or gradient, if any."""
        self._batches: list[tuple[dict, torch.Tensor]] = []

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        super().on_train_begin(args, state, control)
        self.bad_step = None
        self._cleanup.enter_context(model.register_forward_hook(self._remember, with_kwargs=True))
        self._cleanup.callback(setattr, args, "logging_nan_inf_filter", args.logging_nan_inf_filter)
        args.logging_nan_inf_filter = False

    def on_train_end(self, args, state, control, **kwargs):
        super().on_train_end(args, state, control)
        self._batches.clear()

    def on_step_begin(self, args, state, control, **kwargs):
        self._batches.clear()

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        is_bad_loss = any(not loss.isfinite() for _, loss in self._batches)
        is_bad_gradient = args.mixed_precision != "fp16" and _has_bad_gradient(model)
        is_loss, is_gradient = any_process([is_bad_loss, is_bad_gradient], args.device)
        if not (is_loss or is_gradient):
            return
        self.bad_step = state.global_step + 1
        state.prevented_step = self.bad_step
        state.log_history.append({"step": self.bad_step, "bad_step": self.bad_step})  # for `check_stream`
        for parameter in model.parameters():
            parameter.grad = None  # optimizers skip parameters without a gradient
        self.stop(args, state, control)
        gradient = f"a gradient of step {self.bad_step} is not finite"
        logger.error(
            f"{self._blame(model, args.device) if is_loss else gradient}; saving the weights of step "
            f"{state.global_step} and ending the training"
        )

    def _blame(self, model: nn.Module, device: torch.device) -> str:
        is_bad = [not loss.isfinite().item() for _, loss in self._batches]
        # All processes run the same one again: they may share its rows, and a sharded model (FSDP2) gathers its
        # weights from all of them.
        first = any_process(is_bad, device).index(True)
        where = _first_bad_layer(model, self._batches[first][0])
        if not is_bad[first]:
            where = "a batch of another process"
        return f"the loss of step {self.bad_step} is not finite (first non-finite values: {where})"

    @torch.compiler.disable  # or it would be compiled again for each batch of a step
    def _remember(self, model: nn.Module, args: tuple, inputs: dict, output):
        loss = getattr(output, "loss", None)
        if model.training and loss is not None:
            # A teacher's logits are too large to keep until the step ends, and no layer uses them.
            inputs = {name: value for name, value in inputs.items() if name != "teacher_logits"}
            self._batches.append((inputs, loss.detach()))


@torch.no_grad()
def _has_bad_gradient(model: nn.Module) -> bool:
    """Whether a gradient has a NaN or an infinity; of a sharded model, in this process's part of it."""
    gradients = [local_part(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
    parts = [part for part in gradients if part.numel()]  # of a short parameter, not every process holds a part
    return not nn.utils.get_total_norm(parts, norm_type=math.inf).isfinite()


@torch.no_grad()
def _first_bad_layer(model: nn.Module, inputs: dict) -> str:
    """Runs the batch again and returns the first module, in order of execution, whose output is not finite."""
    names = {module: name for name, module in model.named_modules() if not list(module.children())}
    bad = []

    def check(module, args, output):
        tensors = output if isinstance(output, tuple) else (output,)
        if not bad and any(isinstance(x, torch.Tensor) and not x.isfinite().all() for x in tensors):
            bad.append(name_without_wrappers(names[module]))

    with ExitStack() as hooks:
        for module in names:
            hooks.enter_context(module.register_forward_hook(check))
        model(**inputs)
    return f"`{bad[0]}`" if bad else "the loss itself"
