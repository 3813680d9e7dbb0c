"""Averages of the weights during training, kept beside the trained weights, for any `Trainer` and any model."""

import contextlib
import copy
import functools
import hashlib
import math
import os
import random
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from accelerate.data_loader import get_sampler
from accelerate.utils import extract_model_from_parallel
from safetensors import safe_open
from safetensors.torch import load_file, save_file, save_model
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.utils import logging

from lsgpt.utilities import suggest

from .callbacks import local_part, name_without_wrappers


logger = logging.get_logger(__name__)

AVERAGES: dict[str, dict[str, float]] = {
    "ema": {"every_n_steps": 1, "decay": 0.999},
    "ema-warmup": {"every_n_steps": 1, "decay": 0.9999},
    "bema": {"every_n_steps": 400, "kappa": 0.5, "eta": 0.2, "rho": 10.0, "gamma": 1.0},
}
"""The settings of each kind of average with their defaults, of BEMA those of arXiv:2508.00180."""

_RANGES = {"decay": (0, 1), "kappa": (0, math.inf), "eta": (0, math.inf), "rho": (1, math.inf), "gamma": (0, math.inf)}
"""Settings must be at least the first number and below the second. A `rho` of 1 or more keeps the weight of a BEMA
update from exceeding 1."""


def read_averaging(value: str | dict | None) -> dict[str, Any] | None:
    """
    Returns all arguments of an `AveragedWeightsCallback`, given a kind of `AVERAGES` or a mapping such as
    `{"kind": "ema", "decay": 0.9999}`; `None` for `None`. Raises `ValueError` for unknown names and invalid values.
    """
    if value is None:
        return None
    given = {"kind": value} if isinstance(value, str) else value
    if not isinstance(given, dict) or "kind" not in given:
        raise ValueError(
            "`averaging` must be a kind, or a mapping of a kind and its settings, as in '{kind: ema, decay: 0.9999}'; "
            f"got {value!r}"
        )
    kind = given["kind"]
    if kind not in AVERAGES:
        known = ", ".join(AVERAGES)
        raise ValueError(f"the `kind` of average must be one of {known}; got {kind!r}{suggest(str(kind), AVERAGES)}")
    settings = {"kind": kind, **AVERAGES[kind]}
    for name, setting in given.items():
        if name not in settings:
            raise ValueError(f"the average {kind} has the settings {', '.join(AVERAGES[kind])}; got {name!r}")
        settings[name] = kind if name == "kind" else _read_setting(name, setting)
    return settings


def _read_setting(name: str, value: Any) -> float:
    if name == "every_n_steps":
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"`every_n_steps` must be a whole number of at least 1; got {value!r}")
        return value
    low, high = _RANGES[name]
    if not isinstance(value, int | float) or not low <= value < high:
        limit = "finite" if high == math.inf else f"below {high}"
        raise ValueError(f"`{name}` must be at least {low} and {limit}; got {value!r}")
    return float(value)


class AveragedWeightsCallback(TrainerCallback):
    """
    Keeps an average of the weights during training. The training itself stays bitwise the same.

    At the end, the averaged model (with `load_best_model_at_end`, that of the best checkpoint) is saved in the folder
    `averaged` of the `output_dir`, for `from_pretrained`. A resumed training continues its average.

    ```python
    >>> trainer = Trainer(model, args, train_dataset=data, callbacks=[AveragedWeightsCallback("ema", decay=0.999)])
    ```

    To evaluate the average as well, whenever the Trainer evaluates, `attach` the callback. With the weights `w_t` of
    step `t`, the updates are:

    - `ema`: `average = decay * average + (1 - decay) * w_t`;
    - `ema-warmup`: the same with `min(decay, (1 + n) / (10 + n))` in the n-th update;
    - `bema`: `ema = (1 - b) * ema + b * w_t` and `average = ema + a * (w_t - w_0)`, where
      `a = (rho + gamma * t) ** -eta` and `b = (rho + gamma * t) ** -kappa`.

    A training that does not resume starts with the average `w_0`. Averages are in float32, whatever the dtype of the
    weights, and on the same device. The averaged model has the dtype of the weights; its buffers and frozen parameters
    are those that the model has at that time. With FSDP2, every process averages its own shards, and only as many
    processes can resume. DeepSpeed's ZeRO-3 and FSDP1 are not supported. Callbacks that change weights, such as a
    `LogitTelemetryCallback` with `on_explosion="clip"`, must come before this one.

    Attributes:
        averages: The average of every trained parameter, by name; with FSDP2, of this process's shards. Empty before
            the first training.
    """

    def __init__(self, kind: str = "ema", *, name: str = "averaged", **settings: float):
        """
        Args:
            kind: `ema`, `ema-warmup` or `bema`.
            name: The folder of the averaged model, and a part of its metrics' names. Two callbacks for one Trainer
                need different names.
            settings: Settings of the kind, with the defaults in `AVERAGES`. Updates are at optimizer steps that are
                multiples of `every_n_steps`. `decay` is at least 0 and below 1, `rho` at least 1, others at least 0.

        Raises:
            ValueError: If a value is invalid, or a setting belongs to another kind.
        """
        self.settings = read_averaging({"kind": kind, **settings})
        self.kind = self.settings.pop("kind")
        if not re.fullmatch(r"[\w-]+", name):
            raise ValueError(f"`name` must consist of letters, digits, _ and -, to name a folder; got {name!r}")
        self.name = name
        self.averages: dict[str, torch.Tensor] = {}
        # All tensors that an update needs: for BEMA, also the plain average and the weights at the start.
        self._parts: dict[str, dict[str, torch.Tensor]] = {"average": self.averages}
        if self.kind == "bema":
            self._parts |= {"ema": {}, "start": {}}
        self._trainer: Trainer | None = None
        self._model: nn.Module | None = None  # whose averages these are
        self._saved: Path | None = None  # the checkpoint that has its averages before `on_save`

    def attach(self, trainer: Trainer):
        """
        Makes a Trainer evaluate the averaged weights as well, with the metrics `eval_averaged_loss` and so on, and
        adds the callback to it if needed. An `LSGPTTrainer` does this with all that it is given. Raises `ValueError`
        if the Trainer has another one of the same name.
        """
        others = [c for c in trainer.callback_handler.callbacks if isinstance(c, AveragedWeightsCallback)]
        if any(other is not self and other.name == self.name for other in others):
            raise ValueError(
                f"two AveragedWeightsCallbacks of one Trainer must have different names; got {self.name!r} twice"
            )
        if self not in others:
            trainer.add_callback(self)
        if self._trainer is not trainer:
            self._trainer = trainer
            trainer.evaluation_loop = functools.partial(self._evaluation_loop, trainer, trainer.evaluation_loop)

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        if is_deepspeed_zero3_enabled():
            raise ValueError("averages of the weights must not be combined with DeepSpeed's ZeRO-3; use DDP or FSDP2")
        if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
            raise ValueError("`fsdp_version` must be 2 for averages of the weights; got 1, which flattens them")
        if state.is_hyper_param_search:  # all trials would save theirs in the same folder
            raise ValueError("averages of the weights must not be combined with `hyperparameter_search`")
        weights = _trained_weights(model)
        if not weights:
            raise ValueError("`model` must have a trainable parameter; got one with only frozen parameters")
        self._model = _unwrap(model)
        if state.global_step > 0:
            self._load(args, state, model)
            return
        check_updates(self.settings, state.max_steps)
        for part in self._parts.values():
            part.clear()
            part.update({name: weight.to(torch.float32, copy=True) for name, weight in weights.items()})

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step % self.settings["every_n_steps"] == 0:
            self._update(self._same_weights(model), state.global_step)

    def on_save(self, args, state, control, model=None, **kwargs):
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if self._saved != folder:
            self.save(folder, args, model)
        self._saved = None

    def save(self, checkpoint: str | Path, args: TrainingArguments, model: nn.Module):
        """
        Saves the averages in the folder of a checkpoint. A Trainer calls `on_save` only when the checkpoint seems
        complete and earlier ones are deleted, so a run that is killed then cannot resume. `LSGPTTrainer` calls this
        before. With FSDP2, all processes must call it.
        """
        self._saved = Path(checkpoint)
        if not (_is_sharded(model) or args.should_save):
            return
        self._saved.mkdir(parents=True, exist_ok=True)
        file = self._saved / self._file_name(args, model)
        tensors = {f"{part}.{name}": x.contiguous() for part, xs in self._parts.items() for name, x in xs.items()}
        metadata = {"kind": self.kind, "raw_weights": _fingerprint(self._same_weights(model))}
        unfinished = file.with_suffix(".unfinished")
        save_file(tensors, unfinished, metadata)
        os.replace(unfinished, file)  # so that a run that is killed leaves a complete file or none

    def on_train_end(self, args, state, control, model=None, processing_class=None, **kwargs):
        best = state.best_model_checkpoint if args.load_best_model_at_end else None
        if best is not None and (file := Path(best) / self._file_name(args, model)).is_file():
            self._read(file, _trained_weights(model))  # the model has the weights of this checkpoint, too
        step = state.global_step if best is None else int(Path(best).name.rpartition("-")[2])
        if step < self.settings["every_n_steps"]:
            logger.warning(
                f"no averaged model is saved: the model is that of step {step}, before the first update of its "
                f"average in step {self.settings['every_n_steps']}"
            )
            self.averages.clear()  # which are the untrained weights
            return
        self.save_pretrained(model, Path(args.output_dir) / self.name, processing_class)

    @contextlib.contextmanager
    def averaged_weights(self, model: nn.Module) -> Iterator[None]:
        """
        Inside the `with` statement, the model of the training, `trainer.model`, has the averaged weights; afterwards,
        it has exactly its own again. With several processes, all must call it. Raises `ValueError` if there is no
        average yet, or it belongs to another model.
        """
        weights = self._same_weights(model)
        raw = {name: weight.clone() for name, weight in weights.items()}
        # In place, so that references to the weights stay valid: in an optimizer, DDP or a compiled model.
        try:
            for name, weight in weights.items():
                weight.copy_(self.averages[name])
            yield
        finally:
            for name, weight in _trained_weights(model, raw).items():
                weight.copy_(raw[name])

    def save_pretrained(self, model: nn.Module, folder: str | Path, processing_class: Any = None):
        """
        Saves the averaged model as `model.save_pretrained` would, or else its weights as `model.safetensors`, and
        `processing_class`, such as a tokenizer. Processes and errors are as in `averaged_weights`.
        """
        with self.averaged_weights(model):
            is_main, whole = PartialState().is_main_process, None
            # A model that `from_pretrained` has sharded gathers its weights itself, on all processes.
            gathers = getattr(model, "is_distributed_loading_by_transformers", False)
            if _is_sharded(model) and not gathers:
                options = StateDictOptions(full_state_dict=True, cpu_offload=True)
                whole = get_model_state_dict(model, options=options)
            if not is_main and not gathers:
                return
            Path(folder).mkdir(parents=True, exist_ok=True)
            if hasattr(model, "save_pretrained"):
                model.save_pretrained(folder, is_main_process=is_main, state_dict=whole)
            else:
                save_model(model, str(Path(folder) / "model.safetensors"))
            if processing_class is not None and is_main:
                processing_class.save_pretrained(folder)

    def _same_weights(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Returns the trained weights, in the order of the averages."""
        if not self.averages:
            raise ValueError("there is no average yet: it starts with `Trainer.train`")
        if _unwrap(model) is not self._model:
            raise ValueError("`model` must be the one that was trained last; got another, which has no average here")
        weights = _trained_weights(model)
        if different := sorted(weights.keys() ^ self.averages.keys()):
            raise ValueError(
                "the trainable parameters must be those that were trainable at the start of the training; "
                f"{len(different)} are not, such as {different[0]!r}"
            )
        return {name: weights[name] for name in self.averages}

    @torch.no_grad()
    def _update(self, weights: dict[str, torch.Tensor], step: int):
        current = [weight.float() for weight in weights.values()]
        if self.kind == "bema":
            age = self.settings["rho"] + self.settings["gamma"] * step
            emas, starts = self._parts["ema"].values(), self._parts["start"].values()
            get_ema_multi_avg_fn(1 - age ** -self.settings["kappa"])(list(emas), current, None)
            correction = age ** -self.settings["eta"]
            for average, ema, weight, start in zip(self.averages.values(), emas, current, starts):
                torch.add(ema, weight - start, alpha=correction, out=average)
            return
        decay = self.settings["decay"]
        if self.kind == "ema-warmup":
            updates = step // self.settings["every_n_steps"]
            decay = min(decay, (1 + updates) / (10 + updates))
        get_ema_multi_avg_fn(decay)(list(self.averages.values()), current, None)

    def _evaluation_loop(self, trainer, raw_loop, dataloader, *args, **kwargs):
        """
        Replaces the `evaluation_loop` of an attached Trainer, `raw_loop`. The raw weights are evaluated last, with the
        same random numbers as without averages, so that the training and metrics with a state continue as without.
        """
        is_another = _unwrap(trainer.model) is not self._model  # one callback can serve one Trainer after another
        if not self.averages or is_another or kwargs.get("description") != "Evaluation":
            return raw_loop(dataloader, *args, **kwargs)
        named = {**kwargs, "metric_key_prefix": f"{kwargs.get('metric_key_prefix', 'eval')}_{self.name}"}
        with self.averaged_weights(trainer.model), _keep_state(trainer, dataloader):
            # The class's own method, because `raw_loop` may belong to another such callback.
            averaged = type(trainer).evaluation_loop(trainer, dataloader, *args, **named)
        output = raw_loop(dataloader, *args, **kwargs)
        output.metrics.update(averaged.metrics)
        return output

    def _file_name(self, args, model: nn.Module) -> str:
        if _is_sharded(model):
            return f"{self.name}-{args.process_index + 1:05d}-of-{args.world_size:05d}.safetensors"
        return f"{self.name}.safetensors"

    def _read(self, file: Path, weights: dict[str, torch.Tensor]):
        tensors = load_file(file)
        for part, values in self._parts.items():
            values.clear()
            values.update({name: tensors[f"{part}.{name}"].to(weight.device) for name, weight in weights.items()})

    def _load(self, args, state, model: nn.Module):
        """
        Loads the averages of the checkpoint that the Trainer has loaded. The Trainer does not tell a callback which
        one: it is the one whose averages were saved together with the weights that the model has now.
        """
        weights = _trained_weights(model)
        folders = [Path(args.output_dir) / f"checkpoint-{state.global_step}"]
        if isinstance(args.resume_from_checkpoint, str | os.PathLike):
            folders.insert(0, Path(args.resume_from_checkpoint))
        files = [folder / self._file_name(args, model) for folder in dict.fromkeys(folders)]
        fingerprint = _fingerprint(weights)
        for file in filter(Path.is_file, files):
            if _read_metadata(file)["raw_weights"] == fingerprint:
                _check_kind(file, self.kind)
                self._read(file, weights)
                return
        places = " and ".join(map(str, files))
        raise ValueError(
            "a run that resumes from a checkpoint must continue its averages; there are none for these weights "
            f"of step {state.global_step}: looked for {places}. If the checkpoint is in another folder, set "
            "`resume_from_checkpoint` of the TrainingArguments to it. Otherwise, resume from an earlier one"
        )


def check_updates(settings: dict[str, Any], max_steps: int):
    """Raises `ValueError` if a run is too short for a single update of its average."""
    if max_steps < settings["every_n_steps"]:
        raise ValueError(
            f"`every_n_steps` of the average must be at most the {max_steps} steps of the training, or the average "
            f"stays the untrained model; got {settings['every_n_steps']}"
        )


def initial_share(averaging: dict[str, Any], max_steps: int) -> float:
    """The weight of the initial weights in the average of `max_steps` steps, given what `read_averaging` returns."""
    steps = range(averaging["every_n_steps"], max_steps + 1, averaging["every_n_steps"])
    if averaging["kind"] == "bema":
        ages = [averaging["rho"] + averaging["gamma"] * step for step in steps]
        return math.prod(1 - age ** -averaging["kappa"] for age in ages) - ages[-1] ** -averaging["eta"]
    if averaging["kind"] == "ema":
        return averaging["decay"] ** len(steps)
    return math.prod(min(averaging["decay"], (1 + n) / (10 + n)) for n in range(1, len(steps) + 1))


def check_averages(checkpoint: str | Path, kind: str):
    """Raises `ValueError` if a checkpoint has no averages, or those of another kind, for a run to continue."""
    files = sorted(Path(checkpoint).glob("averaged*.safetensors"))
    if not files:
        raise ValueError(
            f"`averaging` must be unset to resume from {str(checkpoint)!r}, which has no averaged weights to "
            "continue; or resume from an earlier checkpoint"
        )
    _check_kind(files[0], kind)


def _check_kind(file: Path, kind: str):
    if (found := _read_metadata(file)["kind"]) != kind:
        raise ValueError(f"the `kind` of average must be {found}, as in the checkpoint {file.parent}; got {kind}")


def _read_metadata(file: Path) -> dict[str, str]:
    with safe_open(file, framework="pt") as tensors:
        return tensors.metadata()


def _unwrap(model: nn.Module) -> nn.Module:
    return extract_model_from_parallel(model, keep_torch_compile=False)


def _trained_weights(model: nn.Module, names: Collection[str] | None = None) -> dict[str, torch.Tensor]:
    """
    Returns every trained parameter, or those of these names, once, by name; with FSDP2, the part of it that this
    process holds.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # An evaluation leaves the last layers unsharded, and the next step would not gather them again.
            module.reshard()
    parameters = {name_without_wrappers(name): parameter for name, parameter in model.named_parameters()}
    return {
        name: local_part(parameter.detach())
        for name, parameter in parameters.items()
        if (parameter.requires_grad if names is None else name in names)
    }


def _is_sharded(model: nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def _fingerprint(weights: dict[str, torch.Tensor]) -> str:
    """
    Returns a string that is, in practice, equal only for equal names and bitwise equal weights. It sums the bits as
    integers, because such sums do not depend on the order.
    """
    sums = []
    for name, weight in sorted(weights.items()):
        bits = weight.contiguous().view(getattr(torch, f"int{8 * weight.element_size()}"))
        sums.append((name, bits.sum(dtype=torch.int64).item()))
    return hashlib.sha256(repr(sums).encode()).hexdigest()


@contextlib.contextmanager
def _keep_state(trainer: Trainer, dataloader: DataLoader) -> Iterator[None]:
    """
    Restores what an evaluation changes afterwards: the states of the random number generators of Python, NumPy,
    PyTorch and the sampler, and the metrics that the trainers of TRL collect.
    """
    device, python_state, numpy_state = trainer.args.device, random.getstate(), np.random.get_state()
    generator = getattr(get_sampler(dataloader), "generator", None)
    sampler_state = None if generator is None else generator.get_state()
    metrics = copy.deepcopy(getattr(trainer, "_metrics", None))
    try:
        with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        if generator is not None:
            generator.set_state(sampler_state)
        if metrics is not None:
            trainer._metrics = metrics
