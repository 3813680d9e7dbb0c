"""Averages of the weights over a training, beside the weights that are trained, for any `Trainer` and any model."""

import contextlib
import functools
import hashlib
import math
import os
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import PartialState
from safetensors import safe_open
from safetensors.torch import save_file, save_model
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn
from transformers import Trainer, TrainerCallback
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from lsgpt.utilities import suggest


class Average(NamedTuple):
    """The settings of a kind of average with their defaults, and how many copies of the weights it keeps."""

    defaults: dict[str, float]
    copies: int


AVERAGES = {
    "ema": Average({"every_n_steps": 1, "decay": 0.999}, 1),
    "ema-warmup": Average({"every_n_steps": 1, "decay": 0.9999}, 1),
    "bema": Average({"every_n_steps": 400, "kappa": 0.5, "eta": 0.2, "rho": 10.0, "gamma": 1.0}, 3),
}
"""The kinds, see `AveragedWeightsCallback`; the defaults of BEMA are those of arXiv:2508.00180."""

_RANGES = {"decay": (0, 1), "kappa": (0, math.inf), "eta": (0, math.inf), "rho": (1, math.inf), "gamma": (0, math.inf)}
"""At least the first number and below the second. With a `rho` of 1 or more, no update of BEMA weighs over 1."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Types of as many bytes as an element has."""


def read_averaging(value: str | dict | None) -> dict[str, Any] | None:
    """
    What a recipe's `averaging` amounts to: a kind of `AVERAGES`, or a mapping of its `kind` and its settings, such as
    `{"kind": "ema", "decay": 0.9999}`. These are arguments of `AveragedWeightsCallback`.

    Returns:
        The kind with all of its settings; `None` for `None`.

    Raises:
        ValueError: An unknown kind or setting, or a value that cannot be.
    """
    if value is None:
        return None
    value = {"kind": value} if isinstance(value, str) else value
    if not isinstance(value, dict) or "kind" not in value:
        raise ValueError(
            "`averaging` must be a kind, or a mapping of a kind and its settings, as in '{kind: ema, decay: 0.9999}'; "
            f"got {value!r}"
        )
    kind = value["kind"]
    if kind not in AVERAGES:
        known = ", ".join(AVERAGES)
        raise ValueError(f"`kind` of average must be one of {known}; got {kind!r}{suggest(str(kind), AVERAGES)}")
    settings = dict(AVERAGES[kind].defaults)
    for name, setting in value.items():
        if name == "kind":
            continue
        if name not in settings:
            raise ValueError(f"the average {kind} has the settings {', '.join(settings)}; got {name!r}")
        settings[name] = _read_setting(name, setting)
    return {"kind": kind, **settings}


def _read_setting(name: str, value: Any) -> float:
    if name == "every_n_steps":
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"`every_n_steps` must be a whole number of at least 1; got {value!r}")
        return value
    low, high = _RANGES[name]
    try:
        number = float(value)  # YAML reads 1e-3 as a string
    except (TypeError, ValueError):
        number = math.nan
    if not low <= number < high:
        limit = "finite" if high == math.inf else f"below {high}"
        raise ValueError(f"`{name}` must be at least {low} and {limit}; got {value!r}")
    return number


class AveragedWeightsCallback(TrainerCallback):
    """
    Keeps an average of the weights over the training, and leaves the training itself as it is, to the bit.

    At the end of the training, the averaged model is saved in the folder `averaged` of the `output_dir`, from which
    `from_pretrained` loads it. Every checkpoint holds the average, and a training that resumes goes on with it.

    ```python
    >>> trainer = Trainer(model, args, train_dataset=data, callbacks=[AveragedWeightsCallback("ema", decay=0.999)])
    ```

    A callback does not know its `Trainer`, which it needs for evaluations. To evaluate the average as well, whenever
    the Trainer evaluates, attach it. The metrics are then named `eval_loss` and `eval_averaged_loss`, and so on:

    ```python
    >>> trainer = Trainer(model, args, train_dataset=data, eval_dataset=held_out)
    >>> AveragedWeightsCallback("ema", decay=0.999).attach(trainer)
    ```

    With the weights `w_t` of step `t`, an update is

    - `ema`: `average = decay * average + (1 - decay) * w_t`;
    - `ema-warmup`: the same with `min(decay, (1 + n) / (10 + n))` in the n-th update;
    - `bema`: `ema = (1 - b) * ema + b * w_t` and `average = ema + a * (w_t - w_0)`, where
      `a = (rho + gamma * t) ** -eta` and `b = (rho + gamma * t) ** -kappa`.

    The average begins with the weights `w_0` at the start of `Trainer.train`. Each call of `train` begins a new one,
    unless it resumes from a checkpoint.

    Averages are in float32, whatever the type of the weights, and on their device: 4 bytes for each trained parameter,
    of BEMA 12. The averaged model is of the weights' type. Frozen parameters and buffers are those of the model at the
    time, and so is the part of a LoRA model that is not trained. With FSDP2 every process averages its own shards, and
    saves them in every checkpoint; such a training resumes with as many processes only. DeepSpeed's ZeRO-3 and FSDP1
    are refused.

    Attributes:
        averages: The average of every trained parameter by its name; with FSDP2 of this process's shards. Empty before
            the first training.
    """

    def __init__(
        self,
        kind: str = "ema",
        *,
        every_n_steps: int | None = None,
        decay: float | None = None,
        kappa: float | None = None,
        eta: float | None = None,
        rho: float | None = None,
        gamma: float | None = None,
        evaluate: str = "both",
        name: str = "averaged",
    ):
        """
        Args:
            kind: `ema`, `ema-warmup` or `bema`.
            every_n_steps: Updates the average at optimizer steps that are multiples of this: 1, of BEMA 400.
            decay: Of `ema` (0.999) and `ema-warmup` (0.9999): at least 0 and below 1.
            kappa: Of `bema` (0.5): the exponent of the weight of an update.
            eta: Of `bema` (0.2): the exponent of the correction.
            rho: Of `bema` (10): the age at the start, at least 1.
            gamma: Of `bema` (1): how much older a step makes.
            evaluate: What an attached Trainer evaluates: the `raw` weights, the `averaged` ones, or `both`.
            name: The folder of the averaged model, and the part of the metrics' names that tells them apart. Two
                callbacks for one Trainer need two names.

        Raises:
            ValueError: A value that cannot be, or a setting of another kind.
        """
        settings = {"decay": decay, "kappa": kappa, "eta": eta, "rho": rho, "gamma": gamma}
        settings["every_n_steps"] = every_n_steps
        given = {setting: value for setting, value in settings.items() if value is not None}
        self.settings = read_averaging({"kind": kind, **given})
        self.kind = self.settings.pop("kind")
        if evaluate not in ("raw", "averaged", "both"):
            raise ValueError(f"`evaluate` must be one of raw, averaged, both; got {evaluate!r}")
        if not re.fullmatch(r"[\w-]+", name):
            raise ValueError(f"`name` must be of letters, digits, _ and -, for it names a folder; got {name!r}")
        self.evaluate = evaluate
        self.name = name
        self.averages: dict[str, torch.Tensor] = {}
        self._emas: dict[str, torch.Tensor] = {}
        self._starts: dict[str, torch.Tensor] = {}
        self._trainer: Trainer | None = None

    def attach(self, trainer: Trainer):
        """
        Lets a Trainer evaluate the averaged weights, too, as `evaluate` says. A Trainer that does not have the
        callback yet gets it.

        Args:
            trainer: Any Trainer.

        Raises:
            ValueError: A Trainer with another such callback, if both have the same name, or if one of them replaces
                the evaluation of the raw weights.
        """
        others = [c for c in trainer.callback_handler.callbacks if isinstance(c, AveragedWeightsCallback)]
        for other in others:
            if other is not self and (other.name == self.name or "averaged" in (other.evaluate, self.evaluate)):
                raise ValueError(
                    "two AveragedWeightsCallbacks of one Trainer must have two names, and neither of them may have "
                    f'`evaluate="averaged"`; got the names {other.name!r} and {self.name!r}, and for `evaluate` '
                    f"{other.evaluate!r} and {self.evaluate!r}"
                )
        if self not in others:
            trainer.add_callback(self)
        if self._trainer is not trainer:
            self._trainer = trainer
            trainer.evaluation_loop = functools.partial(self._evaluation_loop, trainer, trainer.evaluation_loop)

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        _check_run(state, model)
        weights = _trained_weights(model)
        if not weights:
            raise ValueError("`model` must have a parameter that is trained; got one with frozen parameters only")
        if state.global_step > 0:
            self._load(args, state, model)
            return
        for part in self._parts().values():
            part.clear()
            part.update({name: weight.to(torch.float32, copy=True) for name, weight in weights.items()})

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step % self.settings["every_n_steps"] == 0:
            self._update(self._same_weights(model), state.global_step)

    def on_save(self, args, state, control, model=None, **kwargs):
        if not (_is_sharded(model) or args.should_save):
            return
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / self._file_name(args, model)
        parts = self._parts().items()
        tensors = {f"{part}.{name}": x.contiguous() for part, values in parts for name, x in values.items()}
        metadata = {"kind": self.kind, "raw_weights": _fingerprint(self._same_weights(model))}
        unfinished = file.with_suffix(".unfinished")
        save_file(tensors, unfinished, metadata)
        os.replace(unfinished, file)  # so that a run that is killed leaves the whole file or none

    def on_train_end(self, args, state, control, model=None, processing_class=None, **kwargs):
        self.save_pretrained(model, Path(args.output_dir) / self.name, processing_class)

    @contextlib.contextmanager
    def averaged_weights(self, model: nn.Module) -> Iterator[None]:
        """
        Inside the `with` statement, the model has the averaged weights; then it has its own again, to the bit.

        ```python
        >>> with callback.averaged_weights(trainer.model):
        ...     text = trainer.model.generate(**inputs)
        ```

        Meanwhile its own are kept aside, on their device. With several processes, all must call it.

        Args:
            model: The model of the training, `trainer.model`.

        Raises:
            ValueError: There is no average yet, or it is that of another model.
        """
        weights = self._same_weights(model)
        raw = {name: weight.clone() for name, weight in weights.items()}
        try:
            _copy(self.averages, weights)
            yield
        finally:
            _copy(raw, _trained_weights(model))

    def save_pretrained(self, model: nn.Module, folder: str | Path, processing_class: Any = None):
        """
        Saves the averaged model as `model.save_pretrained` would; of a model without that method, the weights as
        `model.safetensors`. With several processes, all must call it.

        Args:
            model: The model of the training, `trainer.model`.
            folder: Where to.
            processing_class: What else to save, such as a tokenizer.

        Raises:
            ValueError: As `averaged_weights`.
        """
        with self.averaged_weights(model):
            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            whole = get_model_state_dict(model, options=options) if _is_sharded(model) else None
            if not PartialState().is_main_process:
                return
            Path(folder).mkdir(parents=True, exist_ok=True)
            if hasattr(model, "save_pretrained"):
                model.save_pretrained(folder, state_dict=whole)
            else:
                save_model(model, str(Path(folder) / "model.safetensors"))
            if processing_class is not None:
                processing_class.save_pretrained(folder)

    def _parts(self) -> dict[str, dict[str, torch.Tensor]]:
        """All tensors that the next update needs."""
        parts = {"average": self.averages}
        return {**parts, "ema": self._emas, "start": self._starts} if self.kind == "bema" else parts

    def _same_weights(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """The trained weights, in the order of the averages."""
        if not self.averages:
            raise ValueError("there is no average yet: it begins with `Trainer.train`")
        weights = _trained_weights(model)
        if different := sorted(weights.keys() ^ self.averages.keys()):
            raise ValueError(
                "the parameters that are trained must be those at the start of the training, which are averaged; "
                f"{len(different)} are not, such as {different[0]!r}"
            )
        return {name: weights[name] for name in self.averages}

    @torch.no_grad()
    def _update(self, weights: dict[str, torch.Tensor], step: int):
        current = [weight.float() for weight in weights.values()]
        if self.kind == "bema":
            age = self.settings["rho"] + self.settings["gamma"] * step
            get_ema_multi_avg_fn(1 - age ** -self.settings["kappa"])(list(self._emas.values()), current, None)
            correction = age ** -self.settings["eta"]
            parts = (self.averages.values(), self._emas.values(), current, self._starts.values())
            for average, ema, weight, start in zip(*parts):
                torch.add(ema, weight - start, alpha=correction, out=average)
            return
        decay = self.settings["decay"]
        if self.kind == "ema-warmup":
            updates = step // self.settings["every_n_steps"]
            decay = min(decay, (1 + updates) / (10 + updates))
        get_ema_multi_avg_fn(decay)(list(self.averages.values()), current, None)

    def _evaluation_loop(self, trainer, raw_loop, *args, **kwargs):
        """
        What an attached Trainer calls for its `evaluation_loop`; `raw_loop` is what it called before.

        The raw weights are evaluated last and with the random numbers that they would have had otherwise: the training
        goes on with those that are left, and metrics that remember something remember the raw weights.
        """
        if self.evaluate == "raw" or not self.averages or kwargs.get("description") != "Evaluation":
            return raw_loop(*args, **kwargs)
        named = {**kwargs, "metric_key_prefix": f"{kwargs.get('metric_key_prefix', 'eval')}_{self.name}"}
        if self.evaluate == "averaged":
            with self.averaged_weights(trainer.model):
                return raw_loop(*args, **named)
        with self.averaged_weights(trainer.model), _keep_random_state(trainer.args.device):
            # The class's own: `raw_loop` may be that of another such callback.
            averaged = type(trainer).evaluation_loop(trainer, *args, **named)
        output = raw_loop(*args, **kwargs)
        output.metrics.update(averaged.metrics)
        return output

    def _file_name(self, args, model: nn.Module) -> str:
        if _is_sharded(model):
            return f"{self.name}-{args.process_index + 1:05d}-of-{args.world_size:05d}.safetensors"
        return f"{self.name}.safetensors"

    def _load(self, args, state, model: nn.Module):
        """
        Goes on with the averages of the checkpoint that the Trainer has loaded.

        A Trainer does not tell a callback which one that is. It is the one whose averages were saved beside the
        weights that the model has now.
        """
        file_name, weights = self._file_name(args, model), _trained_weights(model)
        folders = [Path(args.output_dir) / f"checkpoint-{state.global_step}"]
        if isinstance(args.resume_from_checkpoint, str | os.PathLike):
            folders.insert(0, Path(args.resume_from_checkpoint))
        fingerprint = _fingerprint(weights)
        for folder in folders:
            if not (folder / file_name).is_file():
                continue
            with safe_open(folder / file_name, framework="pt") as file:
                metadata = file.metadata()
                if metadata["raw_weights"] != fingerprint:
                    continue
                if metadata["kind"] != self.kind:
                    raise ValueError(
                        f"`kind` of average must be {metadata['kind']}, that of the checkpoint {folder}, to resume "
                        f"from it; got {self.kind}"
                    )
                for part, values in self._parts().items():
                    values.clear()
                    for name, weight in weights.items():
                        values[name] = file.get_tensor(f"{part}.{name}").to(weight.device)
            return
        places = " and ".join(str(folder / file_name) for folder in dict.fromkeys(folders))
        raise ValueError(
            "a training that resumes from a checkpoint must go on with its averages; there are none for these weights "
            f"of step {state.global_step}: looked for {places}. If the checkpoint is in another folder, set "
            "`resume_from_checkpoint` of the TrainingArguments to it. If it has no averages, because they were not "
            "switched on or the run was killed while it saved them, resume from an earlier one, or train without "
            "averages"
        )


def _check_run(state, model: nn.Module):
    if is_deepspeed_zero3_enabled():
        raise ValueError(
            "averages of the weights must not be combined with DeepSpeed's ZeRO-3, which keeps the weights apart from "
            "the model between its steps; use DDP or FSDP2"
        )
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise ValueError("`fsdp_version` must be 2 for averages of the weights; got 1, which flattens them")
    if state.is_hyper_param_search:
        raise ValueError(
            "averages of the weights must not be combined with `hyperparameter_search`, whose trials would all save "
            "them in the same folder"
        )


def _trained_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every trained parameter once, by its name; with FSDP2 the part of it that this process holds."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # An evaluation leaves the last layers whole, and the next step would not gather them again.
            module.reshard()
    return {
        name.replace("_orig_mod.", ""): _local(parameter.detach())  # without the prefix of torch.compile
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _is_sharded(model: nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def _copy(source: dict[str, torch.Tensor], target: dict[str, torch.Tensor]):
    """Copies in place, so that nothing that refers to the weights notices: an optimizer, DDP, a compiled model."""
    for name, tensor in target.items():
        tensor.copy_(source[name])


def _fingerprint(weights: dict[str, torch.Tensor]) -> str:
    """
    The same for the same names and the same bits only, as good as.

    Sums of bits as integers, which do not depend on the order, as those of numbers do.
    """
    sums = [
        (name, weight.contiguous().view(_INTEGERS[weight.element_size()]).sum(dtype=torch.int64).item())
        for name, weight in sorted(weights.items())
    ]
    return hashlib.sha256(repr(sums).encode()).hexdigest()


@contextlib.contextmanager
def _keep_random_state(device: torch.device) -> Iterator[None]:
    """Leaves the generators of random numbers as they were: those of Python, NumPy and PyTorch."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([] if device.type == "cpu" else [device]):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
