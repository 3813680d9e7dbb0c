"""Monitors the attention logits of a model during training and reacts when they explode."""

import math

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from transformers.utils import logging

from lsgpt.modeling_lsgpt import attention_layers, is_lsgpt
from lsgpt.telemetry import MaxLogits

from .callbacks import StoppingCallback


logger = logging.get_logger(__name__)


THRESHOLD = 100.0
"""A larger `|logit|` counts as an explosion: the threshold of QK-clip (arXiv:2507.20534)."""


class LogitTelemetryCallback(StoppingCallback):
    """
    Logs the largest attention logits of a step's batch every few optimizer steps, and reacts when they explode. It
    supports every decoder that `measure_max_logits` supports, and measures in the same way, over all micro-batches and
    processes of the step. The log of a measured step gets the figures of `summarize_max_logits`.

    A stock `Trainer` calls the trackers of `report_to` before the user's callbacks, which is too early for these
    figures. To send them to a tracker, use `LSGPTTrainer`, or list the tracker's callback after this one:

    ```python
    >>> args = TrainingArguments(..., report_to="none")
    >>> trainer = Trainer(model, args, callbacks=[LogitTelemetryCallback(), TensorBoardCallback()])
    ```
    """

    def __init__(
        self,
        every_n_steps: int = 50,
        threshold: float = THRESHOLD,
        on_explosion: str = "warn",
        log_every_n_steps: int | None = None,
    ):
        """
        Args:
            every_n_steps: Measures at optimizer steps that are multiples of this number.
            threshold: A larger `|logit|` counts as an explosion, and so do NaN and infinity.
            on_explosion: What to do on an explosion. `"warn"` logs a warning; `"stop"` saves a checkpoint and ends the
                training; `"clip"` (LSGPT only) scales the query and key weights of the head so that this batch would
                not exceed the threshold again (QK-clip).
            log_every_n_steps: Logs measured steps that are multiples of this number; all of them by default.

        Raises:
            ValueError: If an argument is invalid.
        """
        log_every_n_steps = every_n_steps if log_every_n_steps is None else log_every_n_steps
        for name, value in (("every_n_steps", every_n_steps), ("log_every_n_steps", log_every_n_steps)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"`{name}` must be a whole number of at least 1; got {value!r}")
        _check_threshold(threshold)
        if on_explosion not in ("warn", "stop", "clip"):
            raise ValueError(f"`on_explosion` must be one of warn, stop, clip; got {on_explosion!r}")
        super().__init__()
        self.every_n_steps, self.log_every_n_steps = every_n_steps, log_every_n_steps
        self.threshold, self.on_explosion = threshold, on_explosion
        self.stop_step: int | None = None
        """The step at which an explosion ended the training, with `on_explosion="stop"`."""
        self._max_logits: MaxLogits | None = None
        self._figures: dict[str, float] = {}
        self._has_warned = False

    def on_init_end(self, args, state, control, model=None, **kwargs):
        if self.on_explosion == "clip":
            _check_clip(args, model)

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        if hasattr(state, "has_logit_telemetry"):
            raise ValueError(
                "`callbacks` must contain at most one LogitTelemetryCallback; got two. To measure often but log "
                "rarely, set `log_every_n_steps`"
            )
        if args.n_gpu > 1:
            raise ValueError(
                f"the logits cannot be measured in one process with {args.n_gpu} GPUs, because nn.DataParallel runs "
                "copies of the model; use one process per GPU"
            )
        super().on_train_begin(args, state, control)
        state.has_logit_telemetry = True
        self.stop_step = None
        self.on_init_end(args, state, control, model=model)  # again, for callbacks that were added later
        self._max_logits = MaxLogits(model)
        self._cleanup.callback(self._max_logits.stop)

    def on_step_begin(self, args, state, control, **kwargs):
        if (state.global_step + 1) % self.every_n_steps == 0:
            self._max_logits.start()

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step % self.every_n_steps != 0:
            return
        try:
            maxima, layer_numbers = self._max_logits.read(), self._max_logits.layer_numbers()
        finally:
            self._max_logits.stop()
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            # Backends disagree on whether the maximum of a number and NaN is NaN, but not on infinity.
            maxima = maxima.masked_fill(maxima.isnan(), math.inf)
            torch.distributed.all_reduce(maxima, op=torch.distributed.ReduceOp.MAX)
        figures = summarize_max_logits(maxima, model.config, self.threshold, layer_numbers)
        is_logged = state.global_step % self.log_every_n_steps == 0
        if is_logged:
            self._figures = figures
            control.should_log = True
        if figures["heads_over_threshold"]:
            if is_logged or self.on_explosion == "stop":
                self._warn(maxima, layer_numbers, figures, state)
            if self.on_explosion == "stop":
                self.stop_step = state.global_step
                self.stop(args, state, control)
            elif self.on_explosion == "clip":
                qk_clip(model, maxima, self.threshold)

    def take_figures(self) -> dict[str, float]:
        """Returns the figures of the last measured step, and clears them. Overrides of `Trainer.log` may call it."""
        figures, self._figures = self._figures, {}
        return figures

    def on_log(self, args, state, control, logs=None, **kwargs):
        figures = self.take_figures()
        if not figures:
            return  # nothing was measured, or `LSGPTTrainer.log` has already taken them
        logs.update(figures)  # for the callbacks after this one
        state.log_history[-1].update(figures)  # a copy of `logs`, made before any callback was called
        if args.report_to and state.is_world_process_zero and not self._has_warned:
            self._has_warned = True
            logger.warning(
                f"the attention logits do not reach {', '.join(args.report_to)}, which a stock `Trainer` calls before "
                "its `callbacks`. Use `LSGPTTrainer`, or see LogitTelemetryCallback"
            )

    def _warn(self, maxima: torch.Tensor, layer_numbers: list[int], figures: dict, state):
        row, head = divmod(maxima.argmax().item(), maxima.shape[1])  # a NaN, if any, counts as the largest
        done = {"warn": "", "stop": "; saving and ending the training", "clip": "; clipping those that are finite"}
        logger.warning(
            f"step {state.global_step}: {int(figures['heads_over_threshold'])} head(s) with logits over "
            f"{self.threshold:g}, the largest {maxima.max().item():.4g} in head {head} of layer {layer_numbers[row]}"
            f"{done[self.on_explosion]}"
        )


def _check_clip(args, model: nn.Module):
    if not is_lsgpt(model):
        reason = f"for models other than LSGPT, because QK-clip cannot scale their weights; got {type(model).__name__}"
    elif args.deepspeed_plugin is not None:
        reason = "with DeepSpeed, which overwrites changes to weights"
    elif model.config.qk_norm:
        reason = "with `qk_norm`, because normalized queries ignore the scale of their weights"
    elif not all(p.weight.requires_grad for layer in attention_layers(model) for p in (layer.q_proj, layer.k_proj)):
        reason = "with frozen query or key weights, as with `trainable: lora`, because it scales them"
    else:
        return
    raise ValueError(f'`on_explosion` must be "warn" or "stop", not "clip", {reason}')


def _check_threshold(threshold: float):
    if not 0 < threshold < math.inf:
        raise ValueError(f"`threshold` must be positive and finite; got {threshold!r}")


def summarize_max_logits(
    maxima: torch.Tensor, config, threshold: float, layer_numbers: list[int] | None = None
) -> dict[str, float]:
    """
    Returns the figures to log for `maxima` `(layers, heads)`: `max_logit`, `max_logit/layer_N` of each layer, numbered
    from 0 or by `layer_numbers`, and `heads_over_threshold`, the number of heads over `threshold`, NaN or infinite.
    For LSGPT, there are also `max_logit_global` and `max_logit_local`, and `max_logit/layer_N/global` and
    `max_logit/layer_N/local` instead of `max_logit/layer_N`, except for kinds without heads. A maximum over values
    that include NaN is NaN.
    """
    rows = maxima.cpu()
    groups = {"max_logit": rows}
    has_kinds = hasattr(config, "num_global_heads_per_layer")
    if has_kinds:
        is_global = torch.arange(rows.shape[1]) < torch.tensor(config.num_global_heads_per_layer)[:, None]
        groups |= {"max_logit_global": rows[is_global], "max_logit_local": rows[~is_global]}
    for index, layer in enumerate(range(len(rows)) if layer_numbers is None else layer_numbers):
        name, row = f"max_logit/layer_{layer}", rows[index]
        if has_kinds:
            groups |= {f"{name}/global": row[is_global[index]], f"{name}/local": row[~is_global[index]]}
        else:
            groups[name] = row
    figures = {name: heads.max().item() for name, heads in groups.items() if heads.numel()}
    return {**figures, "heads_over_threshold": float((~(rows <= threshold)).sum().item())}


@torch.no_grad()
def qk_clip(model: nn.Module, maxima: torch.Tensor, threshold: float):
    """
    QK-clip (MuonClip, arXiv:2507.20534): if the largest logit `S` of a head exceeds `threshold`, multiplies both its
    query and its key weights by `sqrt(threshold / S)`. Query heads that share a key head are scaled together, by the
    largest `S` among them, unless that is NaN or infinite. Other weights and the sinks stay bitwise the same.

    Args:
        model: An LSGPT model without QK-norm.
        maxima: `(num_hidden_layers, num_attention_heads)`, what `measure_max_logits` returns.
        threshold: Largest allowed logit.

    Raises:
        ValueError: If the threshold is not positive and finite, or the model has QK-norm.
    """
    _check_threshold(threshold)
    for layer, row in zip(attention_layers(model), maxima):
        config = layer.config
        if config.qk_norm:
            raise ValueError("`model` must not have `qk_norm`: normalized queries ignore the scale of their weights")
        groups = row.view(config.num_key_value_heads, -1).amax(dim=1)
        factors = (threshold / groups.clamp(min=threshold)).sqrt().masked_fill(~groups.isfinite(), 1.0)
        for projection, heads in ((layer.q_proj, config.num_attention_heads), (layer.k_proj, len(factors))):
            scale = factors.repeat_interleave(heads // len(factors) * config.head_dim)
            _scale_rows(projection.weight, scale[:, None])
            if projection.bias is not None:
                _scale_rows(projection.bias, scale)


def _scale_rows(parameter: nn.Parameter, scale: torch.Tensor):
    """Scales the rows in place. If they are sharded over processes (FSDP2), each process scales its own rows."""
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        scale = DTensor.from_local(scale, mesh, [Replicate()] * mesh.ndim, run_check=False)
        scale = scale.redistribute(placements=parameter.placements).to_local()
        parameter = parameter.to_local()  # which may be offloaded to the CPU, unlike the mesh
    parameter.mul_(scale.to(parameter.device, parameter.dtype))
