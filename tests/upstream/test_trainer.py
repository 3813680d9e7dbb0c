"""What we rely on in Transformers' `Trainer` and in Accelerate beyond what they promise, one test for each thing."""

import inspect
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
from accelerate import Accelerator, ParallelismConfig
from accelerate.data_loader import prepare_data_loader
from accelerate.state import GradientState
from torch import nn
from torch.utils.data import DataLoader
from transformers import PreTrainedConfig, Trainer

from lsgpt.training import ContextParallelismConfig


BATCH = {"input_ids": torch.tensor([[1, 2, 3, 4]]), "labels": torch.tensor([[1, 2, 3, 4]])}


def test_trainer_shifts_labels_for_smoothing_by_the_name_of_the_models_class(trainer, monkeypatch):
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: PLC0415

    trainer = trainer(label_smoothing_factor=0.1)
    losses = {}
    for known in (False, True):
        if known:
            monkeypatch.setitem(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "tiny", "TinyForCausalLM")
        losses[known] = trainer.compute_loss(trainer.model, dict(BATCH)).item()
        outputs = trainer.model(**BATCH)
        assert losses[known] == trainer.label_smoother(outputs, BATCH["labels"], shift_labels=known).item()
    assert losses[False] != losses[True]


def test_trainer_takes_the_labels_away_for_compute_loss_func_and_label_smoothing(trainer):
    for options in ({"label_smoothing_factor": 0.1}, {"compute_loss_func": lambda outputs, labels, **kwargs: 0.0}):
        instance = trainer(**options)
        instance.compute_loss(instance.model, dict(BATCH))
        assert instance.model.inputs == [{}]
    assert trainer().label_smoother is None and trainer().compute_loss_func is None


def test_trainer_writes_the_log_history_before_callbacks_are_asked(trainer):
    instance, seen = trainer(), []

    class Callback(type(instance.callback_handler.callbacks[0])):
        def on_log(self, args, state, control, logs=None, **kwargs):
            seen.append((state.log_history[-1], logs))

    instance.add_callback(Callback())
    instance.log({"loss": 1.0})
    ((last, logs),) = seen
    assert last["loss"] == logs["loss"] == 1.0 and last is not logs


def test_trainer_save_model_pushes_unless_it_is_an_internal_call(trainer, monkeypatch, tmp_path):
    instance, pushes = trainer(), []
    monkeypatch.setattr(instance, "push_to_hub", lambda **kwargs: pushes.append(kwargs))
    instance.args.push_to_hub = True
    instance.save_model(str(tmp_path), _internal_call=True)
    assert pushes == []
    instance.save_model(str(tmp_path))
    assert len(pushes) == 1


def test_trainer_names_the_description_and_the_prefix_for_its_evaluation_loop(trainer):
    instance, seen = trainer(), []
    loop = instance.evaluation_loop

    def evaluation_loop(dataloader, **options):
        seen.append((options["description"], options["metric_key_prefix"]))
        return loop(dataloader, **options)

    instance.evaluation_loop = evaluation_loop
    rows = [{"input_ids": [1, 2]}]
    instance.evaluate(rows, metric_key_prefix="mine")
    instance.evaluate({"first": rows})
    instance.predict(rows)
    assert seen == [("Evaluation", "mine"), ("Evaluation", "eval_first"), ("Prediction", "test")]


def test_trainer_asks_the_methods_that_are_overridden(trainer):
    seen = []

    class Asked(Trainer):
        def create_accelerator_and_postprocess(self):
            seen.append("create_accelerator_and_postprocess")
            super().create_accelerator_and_postprocess()

        def get_decay_parameter_names(self, model):
            seen.append("get_decay_parameter_names")
            return [*super().get_decay_parameter_names(model), "table"]

    instance = trainer()
    instance = Asked(instance.model, instance.args)
    assert seen == ["create_accelerator_and_postprocess"] and instance.optimizer is None
    decayed, others = instance.create_optimizer().param_groups
    assert seen[1:] == ["get_decay_parameter_names"] and instance.create_optimizer() is instance.optimizer
    assert decayed["params"] == [instance.model.table] and others["params"] == []


def test_trainer_saves_optimizer_and_scheduler_before_its_state(trainer, tmp_path):
    class Asked(Trainer):
        def _save_optimizer_and_scheduler(self, output_dir):
            assert not list(Path(output_dir).glob("trainer_state.json"))
            super()._save_optimizer_and_scheduler(output_dir)
            (Path(output_dir) / "more").touch()

    instance = trainer(max_steps=2, save_steps=1)
    instance = Asked(instance.model, instance.args, train_dataset=[{"input_ids": [1, 2]}] * 2)
    instance.train()
    assert {file.parent.name for file in tmp_path.glob("*/more")} == {"checkpoint-1", "checkpoint-2"}


def test_trainer_has_a_collator_and_a_batch_size_and_counts_steps(trainer):
    instance = trainer(per_device_train_batch_size=3, num_train_epochs=2)
    collate = instance._get_collator_with_removed_columns(list, description="Training")
    assert collate([{"input_ids": [1], "unknown": 2}]) == [{"input_ids": [1]}]
    assert instance._train_batch_size == 3
    loader = DataLoader(range(12), batch_size=3)
    assert instance.set_initial_training_values(instance.args, loader)[-1] == 8


def test_trainer_run_epoch_is_asked_for_every_epoch_until_training_is_to_stop(trainer):
    class Asked(Trainer):
        epochs = 0

        def _run_epoch(self, *args, **kwargs):
            self.epochs += 1
            self.control.should_training_stop = self.epochs == 2

    instance = trainer()
    instance.args.num_train_epochs, instance.args.max_steps = 5, -1
    instance = Asked(instance.model, instance.args, train_dataset=[{"input_ids": [1, 2]}] * 2)
    instance.train()
    assert instance.epochs == 2 and instance.state.global_step == 0


def test_get_available_reporting_integrations():
    from transformers.integrations import get_available_reporting_integrations  # noqa: PLC0415

    assert "tensorboard" in get_available_reporting_integrations()


def test_accelerate_state_tells_whether_it_is_initialized_and_the_parallelism(trainer):
    from accelerate import state  # noqa: PLC0415

    trainer()
    assert state.is_initialized()
    assert state.AcceleratorState().parallelism_config is None


def test_environment_variables_that_accelerate_launch_sets():
    from accelerate.utils import launch  # noqa: PLC0415

    source = inspect.getsource(launch)
    assert 'current_env["ACCELERATE_USE_FSDP"] = "true"' in source
    assert '"ACCELERATE_USE_PARALLELISM_CONFIG"' in source


def test_unset_hf_deepspeed_config():
    from transformers.integrations import deepspeed  # noqa: PLC0415

    configuration = PreTrainedConfig()  # anything: only a weak reference is kept
    deepspeed.set_hf_deepspeed_config(configuration)
    assert deepspeed._hf_deepspeed_config_weak_ref() is configuration
    deepspeed.unset_hf_deepspeed_config()
    assert deepspeed._hf_deepspeed_config_weak_ref is None
    assert not deepspeed.is_deepspeed_zero3_enabled()


def test_fsdp_plugin_mixed_precision_policy_is_read_when_the_model_is_prepared():
    from accelerate import FullyShardedDataParallelPlugin  # noqa: PLC0415
    from accelerate.utils import fsdp_utils  # noqa: PLC0415

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, mixed_precision_policy="bf16")
    policy = replace(plugin.mixed_precision_policy, reduce_dtype=torch.float32, output_dtype=None)
    plugin.mixed_precision_policy = policy
    assert (policy.param_dtype, policy.reduce_dtype, policy.output_dtype) == (torch.bfloat16, torch.float32, None)
    assert "fsdp2_plugin.mixed_precision_policy" in inspect.getsource(fsdp_utils.fsdp2_prepare_model)


def test_fsdp2_puts_a_class_of_torchs_before_the_models_own():
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        model = fully_shard(nn.Linear(2, 2), mesh=mesh)
        first, second = type(model).__mro__[:2]
        assert first.__module__.startswith("torch.") and second.__module__.startswith("torch.distributed.")
        assert nn.Linear in type(model).__mro__
    finally:
        torch.distributed.destroy_process_group()


def test_fsdp2_keeps_the_outermost_module_whole_after_a_forward_until_it_reshards():
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415
    from torch.distributed.tensor import DTensor  # noqa: PLC0415

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        model, inputs = fully_shard(nn.Linear(2, 2, bias=False), mesh=mesh), torch.ones(1, 2)
        with torch.no_grad():
            assert model(inputs).any() and not isinstance(model.weight, DTensor)
            model.reshard()
            assert isinstance(model.weight, DTensor)
            model.weight.detach().to_local().zero_()
            assert not model(inputs).any()
    finally:
        torch.distributed.destroy_process_group()


def test_parallelism_config_mesh_follows_from_the_names_of_its_dimensions():
    config = ContextParallelismConfig(cp_size=2, dp_shard_size=3)
    assert config._get_mesh() == (("dp_shard", "cp"), (3, 2))
    assert config.fsdp_dim_names == ["dp_shard_cp"] and config.dp_shard_cp_dim_names == ["dp_shard", "cp"]
    assert config.total_size == 6 and config.dp_cp_dim_names == ["dp_shard", "cp"]
    stock = ParallelismConfig(cp_size=2)
    assert stock.cp_enabled and stock.non_dp_dim_names == stock.dp_shard_cp_dim_names == ["cp"]
    for name in ("build_device_mesh", "get_device_mesh", "_validate_accelerator"):
        assert callable(getattr(ParallelismConfig, name))
    assert "parallelism_config.cp_enabled" in inspect.getsource(Accelerator.prepare)


def test_prepare_data_loader_gives_processes_of_a_cp_dimension_the_same_rows():
    class Mesh:
        mesh_dim_names = ("dp_shard", "cp")

        def __getitem__(self, name):
            return SimpleNamespace(size=lambda: 2)

    for mesh, expected in ((Mesh(), ["02", "02", "13", "13"]), (None, ["0", "1", "2", "3"])):
        rows = []
        for index in range(4):
            loader = DataLoader(range(4), batch_size=1)
            options = {"num_processes": 4, "process_index": index, "put_on_device": False, "torch_device_mesh": mesh}
            rows.append("".join(str(batch.item()) for batch in prepare_data_loader(loader, **options)))
        assert rows == expected


def test_accelerator_state_device_mesh_is_what_data_loaders_get(trainer):
    accelerator = trainer().accelerator
    assert accelerator.state.device_mesh is None
    accelerator.state.device_mesh = mesh = object()
    assert accelerator._prepare_device_mesh() is mesh
    accelerator.state.device_mesh = None


def test_gradient_state_knows_the_data_loader_and_its_remainder():
    loader = prepare_data_loader(DataLoader(range(5), batch_size=2), put_on_device=False)
    assert GradientState().active_dataloader is None
    for _ in loader:
        assert GradientState().active_dataloader is loader and loader.remainder == 1 and loader.total_batch_size == 2


def test_trainer_divides_the_number_of_labels_by_the_processes_of_a_row_also_in_evaluations(trainer):
    instance = trainer()
    labels = {"labels": torch.tensor([[1, 2, 3, 4, 5]])}
    instance._loss_shifts_labels = True
    assert instance.model_accepts_loss_kwargs or instance.compute_loss_func is None
    instance.model_accepts_loss_kwargs = True
    instance.accelerator.state.parallelism_config = ParallelismConfig(cp_size=2)
    try:
        assert instance._get_num_items_in_batch([labels], torch.device("cpu")) == 2
        assert instance.get_total_train_batch_size(SimpleNamespace(world_size=4, gradient_accumulation_steps=1)) == 16
    finally:
        instance.accelerator.state.parallelism_config = None
    assert "_get_num_items_in_batch" in inspect.getsource(Trainer.prediction_step)
