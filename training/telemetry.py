"""Watching the attention logits of a model in training, and what to do when they explode."""

import sys

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from transformers import TrainerCallback
from transformers.utils import logging

from lsgpt.modeling_lsgpt import MaxLogits


logger = logging.get_logger(__name__)


class LogitTelemetryCallback(TrainerCallback):
    """
    Logs the largest attention logits of a step's batch every few optimizer steps, and acts when they explode.

    Measured is the maximum over the step's micro-batches and over all processes, exactly as by `measure_max_logits`.
    The step's log then holds `max_logit`, `max_logit_global`, `max_logit_local`, `max_logit/layer_N/global`,
    `max_logit/layer_N/local` and `heads_over_threshold`, wherever a `Trainer` logs to. Other steps are untouched.

    ```python
    >>> trainer = Trainer(model, args, train_dataset=data, callbacks=[LogitTelemetryCallback(every_n_steps=50)])
    ```
    """

    def __init__(
        self,
        every_n_steps: int = 50,
        threshold: float = 100.0,
        on_explosion: str = "warn",
        log_every_n_steps: int | None = None,
    ):
        """
        Args:
            every_n_steps: Measures the optimizer steps that are multiples of this.
            threshold: A larger `|logit|` counts as an explosion; 100 is the threshold of QK-clip (arXiv:2507.20534).
            on_explosion: What to do then. `"warn"` says so; `"stop"` saves a checkpoint and ends the training;
                `"clip"` scales the query and key weights of the head so that this batch would not pass the threshold
                again (QK-clip).
            log_every_n_steps: Logs measured steps that are multiples of this; all of them by default. QK-clip as
                published acts on every step, which is more than a log should hold.

        Raises:
            ValueError: A value that cannot be.
        """
        log_every_n_steps = every_n_steps if log_every_n_steps is None else log_every_n_steps
        for name, value in (("every_n_steps", every_n_steps), ("log_every_n_steps", log_every_n_steps)):
            if value < 1:
                raise ValueError(f"`{name}` must be at least 1; got {value}")
        if threshold <= 0:
            raise ValueError(f"`threshold` must be positive; got {threshold}")
        if on_explosion not in ("warn", "stop", "clip"):
            raise ValueError(f"`on_explosion` must be one of warn, stop, clip; got {on_explosion!r}")
        self.every_n_steps = every_n_steps
        self.threshold = threshold
        self.on_explosion = on_explosion
        self.log_every_n_steps = log_every_n_steps
        self._max_logits: MaxLogits | None = None
        self._metrics: dict[str, float] = {}

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self._max_logits = MaxLogits(model)
        if self.on_explosion == "clip":
            self._check_clip(args, model)
        self._come_first()

    def on_step_begin(self, args, state, control, **kwargs):
        if (state.global_step + 1) % self.every_n_steps == 0:
            self._max_logits.start()

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step % self.every_n_steps != 0:
            return
        maxima = self._max_logits.read()
        self._max_logits.stop()
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(maxima, op=torch.distributed.ReduceOp.MAX)
        metrics = summarize_max_logits(maxima, model.config, self.threshold)
        is_logged = state.global_step % self.log_every_n_steps == 0
        if is_logged:
            self._metrics = metrics
            control.should_log = True
        if metrics["heads_over_threshold"]:
            if is_logged or self.on_explosion == "stop":
                self._warn(maxima, metrics, state)
            if self.on_explosion == "stop":
                control.should_save = control.should_training_stop = True
            elif self.on_explosion == "clip":
                qk_clip(model, maxima, self.threshold)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs is not None and self._metrics:
            logs.update(self._metrics)  # for the callbacks after this one
            state.log_history[-1].update(self._metrics)  # written before any callback was asked
            self._metrics = {}

    def on_train_end(self, args, state, control, **kwargs):
        self._max_logits.stop()

    def _check_clip(self, args, model):
        if args.deepspeed_plugin is not None:
            raise ValueError('`on_explosion` must not be "clip" with DeepSpeed: it overwrites changes to weights')
        if model.config.qk_norm:
            raise ValueError('`on_explosion` must not be "clip" with `qk_norm`: normalised queries ignore their scale')
        projections = [p for layer in self._max_logits.layers for p in (layer.q_proj, layer.k_proj)]
        if not all(projection.weight.requires_grad for projection in projections):
            raise ValueError(
                '`on_explosion` must not be "clip" with frozen query or key weights, such as LoRA\'s: it scales them'
            )

    def _warn(self, maxima: torch.Tensor, metrics: dict, state):
        layer, head = divmod(maxima.argmax().item(), maxima.shape[1])
        done = {"warn": "", "stop": "; saving and ending the training", "clip": "; clipping its weights"}
        logger.warning(
            f"step {state.global_step}: {int(metrics['heads_over_threshold'])} heads have logits over "
            f"{self.threshold:g}, the largest {maxima.max().item():.4g} in head {head} of layer {layer}"
            f"{done[self.on_explosion]}"
        )

    def _come_first(self):
        """
        Moves this callback before those that report to trackers. A `Trainer` puts its own first and hands nobody the
        list, but it is the handler that holds the list who is calling.
        """
        handler = sys._getframe(2).f_locals.get("self")
        callbacks = getattr(handler, "callbacks", [])
        if self in callbacks:
            callbacks.remove(self)
            callbacks.insert(0, self)
        else:
            logger.warning("LogitTelemetryCallback could not move to the front: trackers may miss its figures")


def summarize_max_logits(maxima: torch.Tensor, config, threshold: float) -> dict[str, float]:
    """
    The figures to log of `maxima` `(num_hidden_layers, num_attention_heads)`: the maximum overall, of each kind of
    head, of each kind in each layer, and the number of heads over `threshold`. A kind that has no head is left out.
    """
    rows = maxima.cpu()
    kinds = {"global": [], "local": []}
    metrics = {"max_logit": rows.max().item()}
    layers = {}
    for layer, (row, count) in enumerate(zip(rows, config.num_global_heads_per_layer)):
        for kind, heads in (("global", row[:count]), ("local", row[count:])):
            if len(heads):
                layers[f"max_logit/layer_{layer}/{kind}"] = heads.max().item()
                kinds[kind].append(heads.max().item())
    metrics |= {f"max_logit_{kind}": max(values) for kind, values in kinds.items() if values}
    return metrics | layers | {"heads_over_threshold": float((rows > threshold).sum().item())}


@torch.no_grad()
def qk_clip(model: nn.Module, maxima: torch.Tensor, threshold: float):
    """
    QK-clip (MuonClip, arXiv:2507.20534): multiplies the query and key weights of a head whose largest logit `S` is
    over `threshold` by `sqrt(threshold / S)` each. Query heads that share a key head are scaled together, by the
    largest `S` among them. Weights of other heads stay as they are, to the bit.

    Args:
        model: An LSGPT model without QK-norm.
        maxima (`(num_hidden_layers, num_attention_heads)`): What `measure_max_logits` returns.
        threshold: Largest logit to allow.
    """
    for layer, row in zip(MaxLogits(model).layers, maxima):
        config = layer.config
        groups = row.view(config.num_key_value_heads, -1).amax(dim=1)
        factors = (threshold / groups.clamp(min=threshold)).sqrt()
        for projection, heads in (
            (layer.q_proj, config.num_attention_heads),
            (layer.k_proj, config.num_key_value_heads),
        ):
            scale = factors.repeat_interleave(heads // len(factors)).repeat_interleave(config.head_dim)
            _scale_rows(projection.weight, scale[:, None])
            if projection.bias is not None:
                _scale_rows(projection.bias, scale)


def _scale_rows(parameter: nn.Parameter, scale: torch.Tensor):
    """Multiplies in place; where the rows are spread over processes (FSDP2), each multiplies its own."""
    scale = scale.to(parameter.device, parameter.dtype)
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        scale = DTensor.from_local(scale, mesh, [Replicate()] * mesh.ndim, run_check=False)
    parameter.mul_(scale)
