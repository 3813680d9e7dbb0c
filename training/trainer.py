"""The `Trainer` of all runs."""

import contextlib
import inspect
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import IterableDataset
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, Trainer

from lsgpt.modeling_lsgpt import LSGPTForCausalLM

from .averaging import AveragedWeightsCallback
from .context_parallel import processes_per_row, replace_parallelism
from .data import Passes
from .healing import next_token_logits, sink_parameters
from .telemetry import LogitTelemetryCallback


class LSGPTTrainer(Trainer):
    """
    The stock `Trainer` with a few changes: training steps skip the logits, sinks have no weight decay, a model may
    learn from a teacher, and `save_card` writes the model card of a push.
    """

    def __init__(
        self,
        *args,
        z_loss: float = 0.0,
        teacher: PreTrainedModel | None = None,
        sink_learning_rate: float | None = None,
        save_card: Callable[..., Any] | None = None,
        **kwargs,
    ):
        """
        Args:
            z_loss: Weight of the z-loss in the loss of training steps, see `causal_lm_loss`.
            teacher: A model with the same vocabulary. The training loss is then the Kullback-Leibler divergence of its
                next-token distributions instead of the cross-entropy. It is moved to the device of the training and
                put in evaluation mode.
            sink_learning_rate: Learning rate of the `sink_parameters`, if the model has any.
            save_card: Writes the model card, given the folder, the repository and the license:
                `lsgpt.model_cards.save_card`, which imports this package. Without it, Transformers writes the card.

        Raises:
            ValueError: If one option would make another ineffective; for sequence parallelism and FSDP1; or with
                `z_loss`, a `teacher` or context parallelism if the model is not an LSGPT language model, which
                computes these losses.
        """
        self.z_loss, self.teacher = z_loss, teacher
        self.adapters: Any = None
        """What `choose_trainable` has put into the model; `train` merges them at the end."""
        self.sink_learning_rate, self.save_card = sink_learning_rate, save_card
        super().__init__(*args, **kwargs)
        # By name, because code loaded from a checkpoint defines its own class; adapters may be around it.
        names = {type(module).__name__ for module in self.model.modules()}
        self.has_own_loss = LSGPTForCausalLM.__name__ in names
        if sink_learning_rate is not None and self.optimizer is not None:
            raise ValueError(
                "`sink_learning_rate` must be unset with an optimizer in `optimizers`, whose groups have their own "
                f"learning rates; got {sink_learning_rate}. Give it a group of `sink_parameters(model)`"
            )
        for name, value in (("z_loss", z_loss), ("teacher", teacher)):
            if value and self.compute_loss_func is not None:
                raise ValueError(f"`compute_loss_func` must be unset with `{name}`, which is part of the model's loss")
            if value and not self.has_own_loss:
                raise ValueError(
                    f"`{name}` must be unset for models other than LSGPTForCausalLM, whose losses do not have it; got "
                    f"{type(self.model).__name__}"
                )
        if processes_per_row(self.args) > 1 and not self.has_own_loss:
            raise ValueError(
                "`cp_size` must be 1 for models other than LSGPTForCausalLM, which need whole sequences; got "
                f"{type(self.model).__name__}"
            )
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, AveragedWeightsCallback):
                callback.attach(self)
        if self.compute_loss_func is not None and self.label_smoother is not None:
            raise ValueError(
                "`label_smoothing_factor` must be 0 with a `compute_loss_func`, which gets the labels as they are"
            )
        if teacher is not None and self.label_smoother is not None:
            raise ValueError("`label_smoothing_factor` must be 0 with a `teacher`, which leaves no labels to smooth")
        if teacher is not None:
            if teacher.device != self.args.device:
                teacher.to(self.args.device)
            teacher.eval()

    def create_accelerator_and_postprocess(self):
        """
        As in `Trainer`, but FSDP sums gradients and returns the loss in float32, not in bfloat16 with its two to three
        digits. For context and sequence parallelism, see `replace_parallelism`.
        """
        replace_parallelism(self.args)
        super().create_accelerator_and_postprocess()
        fsdp = getattr(self.accelerator.state, "fsdp_plugin", None)
        if fsdp is not None and fsdp.fsdp_version != 2:
            raise ValueError(
                f"`fsdp_version` must be 2; got {fsdp.fsdp_version}, as in old files of `accelerate config`"
            )
        if fsdp is not None and (policy := fsdp.mixed_precision_policy) is not None:
            fsdp.mixed_precision_policy = replace(policy, reduce_dtype=torch.float32, output_dtype=None)

    def get_train_dataloader(self) -> DataLoader:
        """As in `Trainer`, but a stream is one endless series of full batches, see `Passes`."""
        stream = self.train_dataset
        if not isinstance(stream, IterableDataset | torch.utils.data.IterableDataset):
            loader = super().get_train_dataloader()
            _keep_workers(loader)
            return loader
        args = self.args
        if args.max_steps <= 0:
            raise ValueError(f"`max_steps` must be set for a stream, which is endless here; got {args.max_steps}")
        collate = self._get_collator_with_removed_columns(self.data_collator, description="Training")
        options = {
            "num_workers": args.dataloader_num_workers,
            "persistent_workers": args.dataloader_persistent_workers,
            "multiprocessing_context": args.dataloader_multiprocessing_context,
            "prefetch_factor": args.dataloader_prefetch_factor,
            "worker_init_fn": partial(_ignore_sigterm, None),
        }
        # Each pass draws a seed for its workers. From the generator of the training, it would change the dropout, and
        # differently so in a run that resumes.
        generator = torch.Generator().manual_seed(args.seed if args.data_seed is None else args.data_seed)
        rows = DataLoader(stream, batch_size=None, collate_fn=_unchanged, generator=generator, **options)
        size = processes_per_row(args)
        passes = Passes(rows, self._train_batch_size, collate, args.process_index // size, args.world_size // size)
        return DataLoader(passes, batch_size=None, collate_fn=_unchanged, pin_memory=args.dataloader_pin_memory)

    def get_eval_dataloader(self, eval_dataset=None) -> DataLoader:
        """
        As in `Trainer`, but every row counts, also with `dataloader_drop_last`, and every process gets different rows,
        even those that share sequences in training.
        """
        with self._all_rows():
            return _for_evaluation(super().get_eval_dataloader(eval_dataset))

    def get_test_dataloader(self, test_dataset) -> DataLoader:
        """As in `Trainer`, with rows as in evaluations."""
        with self._all_rows():
            return _for_evaluation(super().get_test_dataloader(test_dataset))

    @contextlib.contextmanager
    def _all_rows(self):
        args, state = self.args, self.accelerator.state
        drop_last, args.dataloader_drop_last = args.dataloader_drop_last, False
        mesh, state.device_mesh = state.device_mesh, None  # which would give the same rows to those processes
        try:
            yield
        finally:
            args.dataloader_drop_last, state.device_mesh = drop_last, mesh

    def _get_num_items_in_batch(self, *args, **kwargs):
        """As in `Trainer`, but a number with FSDP, which would cast a tensor to the dtype of the mixed precision."""
        count = super()._get_num_items_in_batch(*args, **kwargs)
        return count.item() if self.is_fsdp_enabled and isinstance(count, torch.Tensor) else count

    def get_decay_parameter_names(self, model: torch.nn.Module) -> list[str]:
        """As in `Trainer`, which excludes norms and biases, but without sinks: decay would pull their logits to 0."""
        return [name for name in super().get_decay_parameter_names(model) if not name.endswith(".sinks")]

    def create_scheduler(self, num_training_steps: int, optimizer=None):
        """As in `Trainer`, but `lr_scheduler_kwargs` may have another `num_training_steps`, of a longer schedule."""
        given = self.args.lr_scheduler_kwargs
        kwargs = dict(given or {})
        self.args.lr_scheduler_kwargs, length = kwargs, int(kwargs.pop("num_training_steps", num_training_steps))
        try:
            return super().create_scheduler(length, optimizer)
        finally:
            self.args.lr_scheduler_kwargs = given

    def log(self, logs: dict[str, float], start_time: float | None = None):
        """As in `Trainer`, with the figures of a `LogitTelemetryCallback` in `logs`, so that trackers get them too."""
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, LogitTelemetryCallback):
                logs.update(callback.take_figures())
        super().log(logs, start_time)

    def _save_optimizer_and_scheduler(self, output_dir: str):
        """As in `Trainer`, but saves averages first: a checkpoint is complete once it has the state, saved last."""
        super()._save_optimizer_and_scheduler(output_dir)
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, AveragedWeightsCallback):
                callback.save(output_dir, self.args, self.model)
        self.accelerator.wait_for_everyone()  # every process saves its part of sharded averages

    def _run_epoch(self, *args, **kwargs):
        """As in `Trainer`, but takes no extra step after resuming from the last one."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*args, **kwargs)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """
        As in `Trainer`, but in training steps an `LSGPTForCausalLM` computes the whole loss, with smoothed labels,
        z-loss and teacher, without the logits of all tokens.
        """
        has_other_loss = self.label_smoother is not None or self.compute_loss_func is not None
        if not model.training and has_other_loss and num_items_in_batch is not None:
            # `Trainer` has divided the number by them, although evaluations are not split; see `evaluation_inputs`.
            num_items_in_batch = num_items_in_batch * processes_per_row(self.args)
        if not (self.has_own_loss and model.training) or self.compute_loss_func is not None or "labels" not in inputs:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        smoother, self.label_smoother = self.label_smoother, None
        settings = {"z_loss": self.z_loss, "label_smoothing": smoother.epsilon if smoother else 0.0}
        inputs = {**inputs, "skip_logits": True, **{name: value for name, value in settings.items() if value}}
        if self.teacher is not None:
            inputs["teacher_logits"] = next_token_logits(self.teacher, inputs)
        try:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        finally:
            self.label_smoother = smoother

    def create_optimizer(self, model=None) -> torch.optim.Optimizer:
        """As in `Trainer`, with another parameter group if there is a `sink_learning_rate`."""
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if is_new and self.sink_learning_rate is not None:
            chosen = {id(parameter) for parameter in sink_parameters(self.model if model is None else model)}
            if chosen and (self.args.optim.endswith("layerwise") or self.args.optim in ("lomo", "adalomo")):
                raise ValueError(
                    f"`sink_learning_rate` must be unset with `optim: {self.args.optim.value}`, which has one rate "
                    f"for all weights; got {self.sink_learning_rate}"
                )
            for group in list(optimizer.param_groups):
                moved = [parameter for parameter in group["params"] if id(parameter) in chosen]
                if moved:
                    group["params"] = [parameter for parameter in group["params"] if id(parameter) not in chosen]
                    optimizer.add_param_group({**group, "params": moved, "lr": self.sink_learning_rate})
        return optimizer

    def create_model_card(self, *args, **kwargs):
        """
        As in `Trainer`, but with `save_card`, if it is set, the card describes the run. Of the arguments, `language`,
        `license`, `tags`, `finetuned_from` and `dataset_tags` add to that or replace it.
        """
        if self.save_card is None:
            super().create_model_card(*args, **kwargs)
            return
        if not self.is_world_process_zero():
            return
        given = inspect.signature(super().create_model_card).bind(*args, **kwargs).arguments
        tags, datasets = ([x] if isinstance(x, str) else x or [] for x in map(given.get, ("tags", "dataset_tags")))
        options = {"language": given.get("language"), "tags": tags}
        card = self.save_card(self.args.output_dir, self.hub_model_id, given.get("license"), **options)
        card.data.base_model = given.get("finetuned_from") or card.data.base_model
        card.data.datasets = datasets or card.data.datasets
        card.save(Path(self.args.output_dir) / "README.md")


def _for_evaluation(loader: DataLoader) -> DataLoader:
    if not hasattr(loader, "is_for_all_processes"):  # `Trainer` returns loaders with persistent workers again
        loader.is_for_all_processes = True  # for `evaluation_inputs`
        _keep_workers(loader)
    return loader


def _keep_workers(loader: DataLoader):
    """Lets the workers of a loader ignore SIGTERM."""
    base = getattr(loader, "base_dataloader", loader)  # Accelerate's loaders start the workers of another one
    base.worker_init_fn = partial(_ignore_sigterm, base.worker_init_fn)


def _ignore_sigterm(start_worker: Callable | None, worker_id: int):
    """
    Starts a data-loader worker that SIGTERM does not end. A cluster sends it to all processes of a job, and without
    its workers, the main process could not finish the step. Workers end when the main process does.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if start_worker is not None:
        start_worker(worker_id)


def _unchanged(rows: Any) -> Any:
    return rows
