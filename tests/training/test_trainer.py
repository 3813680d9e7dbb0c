"""`LSGPTTrainer`, and what several processes need of any `Trainer`, seen in one process."""

import contextlib
import statistics
from types import SimpleNamespace

import pytest
import torch
from accelerate import ParallelismConfig
from accelerate.state import GradientState
from accelerate.utils import FullyShardedDataParallelPlugin
from reference import autograd_functions
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from lsgpt.training import LSGPTTrainer, StepTimerCallback
from lsgpt.training.context_parallel import (
    ContextParallelismConfig,
    evaluation_inputs,
    processes_per_row,
    replace_parallelism,
)
from lsgpt.training.train import train
from lsgpt.training.trainer import _ignore_sigterm


GOES_ON = pytest.raises(AttributeError, match="resume_from_checkpoint")  # which the arguments here lack
REFUSED = pytest.raises(ValueError, match=r"`fsdp_state_dict_type` must be FULL_STATE_DICT, .*; got SHARDED")


def trainer_of(kind, model, folder, **kwargs):
    smoothing = kwargs.pop("label_smoothing_factor", 0.0)
    args = TrainingArguments(folder, use_cpu=True, report_to="none", label_smoothing_factor=smoothing)
    return kind(model=model.train(), args=args, **kwargs)


def test_a_forward_without_labels_is_no_evaluation(tiny_model, monkeypatch):
    """But a teacher's, or one of a prediction."""
    loader = SimpleNamespace(remainder=1, total_batch_size=4, dataset=range(9))
    monkeypatch.setattr(GradientState, "active_dataloader", loader, raising=False)
    monkeypatch.setattr("lsgpt.training.context_parallel.split_sequences", lambda model, group: None)
    mesh = {"cp": SimpleNamespace(get_group=lambda: None)}
    monkeypatch.setattr(ContextParallelismConfig, "get_device_mesh", lambda config: mesh)
    model, ids = tiny_model(), torch.tensor([[1, 2]])
    expected = model(ids).logits
    ContextParallelismConfig(cp_size=2).split(model)
    assert torch.equal(model(ids).logits, expected)
    with pytest.raises(ValueError, match="the evaluation must have a multiple of 4 rows"):
        model(ids, labels=ids)
    with pytest.raises(ValueError, match="`labels` must be passed to the model if sequences are split"):
        model(ids, num_items_in_batch=2)  # as a stock `Trainer` does that computes the loss itself
    expected = model.train()(ids, labels=ids, num_items_in_batch=2).loss  # a training step with this loader
    # A callback's, and no evaluation.
    torch.testing.assert_close(model.eval()(ids, labels=ids, num_items_in_batch=2).loss, expected)


def test_reduced_precision_of_fsdp(tmp_path, monkeypatch):
    """Gradients are summed in float32, and the loss stays in it."""
    half = torch.bfloat16
    plugin = SimpleNamespace(fsdp_version=2, mixed_precision_policy=MixedPrecisionPolicy(half, half, half))
    accelerator = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin))
    make = lambda trainer: setattr(trainer, "accelerator", accelerator)  # noqa: E731
    monkeypatch.setattr(Trainer, "create_accelerator_and_postprocess", make)
    trainer = object.__new__(LSGPTTrainer)
    trainer.args = TrainingArguments(tmp_path, use_cpu=True)
    trainer.create_accelerator_and_postprocess()
    policy = plugin.mixed_precision_policy
    assert (policy.param_dtype, policy.reduce_dtype, policy.output_dtype) == (half, torch.float32, None)


def test_evaluations_have_all_rows(tiny_model, tmp_path):
    """Even with fewer than a batch, and `dataloader_drop_last` for the training."""
    rows = [{"input_ids": [i, 2, 3, 4], "labels": [i, 2, 3, 4]} for i in range(11)]
    args = TrainingArguments(tmp_path, use_cpu=True, report_to="none", dataloader_drop_last=True)
    trainer = LSGPTTrainer(tiny_model(), args, train_dataset=rows, eval_dataset=rows[:3])
    assert len(trainer.get_train_dataloader()) == 1 and len(trainer.get_eval_dataloader()) == 1
    assert trainer.evaluate()["eval_loss"] > 0
    assert len(trainer.predict(rows).predictions) == 11
    assert args.dataloader_drop_last


def test_workers_of_evaluations_ignore_sigterm_as_others_do(tiny_model, tmp_path):
    rows = [{"input_ids": [i, 2, 3, 4], "labels": [i, 2, 3, 4]} for i in range(4)]
    options = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}
    args = TrainingArguments(tmp_path, use_cpu=True, report_to="none", **options)
    trainer = LSGPTTrainer(tiny_model(), args, train_dataset=rows, eval_dataset=rows)
    loader = trainer.get_eval_dataloader()
    start = loader.base_dataloader.worker_init_fn
    assert trainer.get_eval_dataloader() is loader and loader.base_dataloader.worker_init_fn is start
    for each in (loader, trainer.get_train_dataloader(), trainer.get_test_dataloader(rows)):
        assert each.base_dataloader.worker_init_fn.func is _ignore_sigterm


def test_a_stream_has_no_epochs_even_with_a_length(tiny_model, tmp_path):
    class Stream(torch.utils.data.IterableDataset):
        __len__, __iter__ = lambda self: 8, lambda self: iter(())

    args = TrainingArguments(tmp_path, use_cpu=True, report_to="none", num_train_epochs=1)
    with pytest.raises(ValueError, match="`max_steps` must be set for a stream, which is endless here; got -1"):
        LSGPTTrainer(tiny_model(), args, train_dataset=Stream()).train()


@pytest.mark.parametrize(("kind", "outcome"), [("FULL_STATE_DICT", GOES_ON), (None, REFUSED)])
def test_a_sharded_model_would_not_be_saved(kind, outcome):
    """By default, FSDP2 shards what it saves."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind)
    accelerator = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin))
    trainer = SimpleNamespace(is_fsdp_enabled=True, accelerator=accelerator, is_world_process_zero=lambda: False)
    trainer.args = SimpleNamespace(output_dir="run")
    with outcome:
        train(trainer, arguments=None)


def test_a_teacher_is_put_where_it_is_needed(tiny_model, tmp_path):
    teacher, moved = tiny_model().train(), []
    args = TrainingArguments(tmp_path, use_cpu=True, report_to="none")
    LSGPTTrainer(tiny_model(), args, teacher=teacher)
    assert not teacher.training
    elsewhere = SimpleNamespace(device=torch.device("meta"), to=moved.append, eval=lambda: None)
    LSGPTTrainer(tiny_model(), args, teacher=elsewhere)
    assert moved == [args.device]


@pytest.mark.parametrize("kind", [Trainer, LSGPTTrainer])
def test_smoothed_labels_in_an_evaluation_of_shared_rows(tiny_model, tmp_path, monkeypatch, kind):
    """Their number is that of all labels divided by the processes that share a row, although evaluations are whole."""
    trainer, ids = trainer_of(kind, tiny_model(), tmp_path, label_smoothing_factor=0.1), torch.randint(97, (2, 12))
    model = trainer.model.eval()
    inputs, count = {"input_ids": ids, "labels": ids}, torch.tensor(22)
    expected = trainer.compute_loss(model, dict(inputs), num_items_in_batch=count)
    loader = SimpleNamespace(remainder=0, is_for_all_processes=kind is LSGPTTrainer)
    monkeypatch.setattr(GradientState, "active_dataloader", loader, raising=False)
    monkeypatch.setattr("lsgpt.training.context_parallel.split_sequences", lambda model, group: None)
    mesh = {"cp": SimpleNamespace(get_group=lambda: None)}
    monkeypatch.setattr(ContextParallelismConfig, "get_device_mesh", lambda config: mesh)
    monkeypatch.setattr("lsgpt.training.trainer.processes_per_row", lambda args: 2)
    ContextParallelismConfig(cp_size=2).split(model)
    refused = pytest.raises(ValueError, match="`label_smoothing_factor` only with `LSGPTTrainer`")
    with refused if kind is Trainer else contextlib.nullcontext():
        found = trainer.compute_loss(model, dict(inputs), num_items_in_batch=count / 2)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ({}, [40, 40, 40, 20] * 2),  # the last step of a pass has what is left of the seven rows
        ({"dataloader_drop_last": True}, [40] * 6),
        ({"gradient_accumulation_steps": 3}, [120, 20] * 2),
        ({"include_num_input_tokens_seen": "all"}, [40, 40, 40, 20] * 2),  # counted by the Trainer
        ({"auto_find_batch_size": True, "per_device_train_batch_size": 6}, [60, 60, 20] * 2),
    ],
)
def test_tokens_are_those_that_were_trained_on(tiny_model, tmp_path, options, tokens):
    model, seen = tiny_model().train(), []

    def remember(model, args, inputs):
        if len(inputs["input_ids"]) > 3:
            raise RuntimeError("CUDA out of memory.")
        seen.append(inputs["input_ids"].numel())

    model.register_forward_pre_hook(remember, with_kwargs=True)
    rows = [{"input_ids": [i] * 20, "labels": [i] * 20} for i in range(7)]
    timer = StepTimerCallback()
    settings = {"per_device_train_batch_size": 2, "num_train_epochs": 2, "save_strategy": "no", **options}
    args = TrainingArguments(tmp_path, use_cpu=True, report_to="none", **settings)
    trainer = Trainer(model, args, train_dataset=rows, callbacks=[timer])
    trainer.train()
    assert timer.tokens == tokens or "auto_find_batch_size" in options
    assert trainer.state.num_input_tokens_seen == sum(timer.tokens) == sum(seen)
    timer.seconds = [1.0] * len(timer.tokens)
    assert timer.tokens_per_second == statistics.median(timer.tokens[3:] or timer.tokens)


def test_context_parallelism_is_ours_and_sequence_parallelism_refused(tmp_path, monkeypatch):
    config = ParallelismConfig(cp_size=2, dp_shard_size=3, dp_replicate_size=4)
    args = TrainingArguments(tmp_path, use_cpu=True, parallelism_config=config)
    replace_parallelism(args)
    assert isinstance(args.parallelism_config, ContextParallelismConfig) and not args.parallelism_config.cp_enabled
    assert (args.parallelism_config.cp_size, args.parallelism_config.dp_shard_size) == (2, 3)
    assert args.parallelism_config.dp_replicate_size == 4
    # As `accelerate launch` tells it.
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "4")
    args = TrainingArguments(tmp_path, use_cpu=True)
    replace_parallelism(args)
    assert args.parallelism_config.cp_size == processes_per_row(args) == 4
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "1")
    monkeypatch.setenv("PARALLELISM_CONFIG_SP_SIZE", "2")
    with pytest.raises(ValueError, match=r"`sp_size` of `parallelism_config` must be 1; got 2.* Use `cp_size`"):
        replace_parallelism(TrainingArguments(tmp_path, use_cpu=True))


def test_the_number_of_processes_must_be_the_product_of_the_sizes(tiny_model, tmp_path):
    config = ContextParallelismConfig(cp_size=2, dp_shard_size=3)
    args = TrainingArguments(tmp_path, use_cpu=True, parallelism_config=config)
    with pytest.raises(ValueError, match="must be the number of processes, 1; got 2 x 3 x 1"):
        LSGPTTrainer(tiny_model(), args)


def test_sequences_of_other_models_are_not_split(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr("lsgpt.training.trainer.processes_per_row", lambda args: 2)
    args = TrainingArguments(tmp_path, use_cpu=True)
    LSGPTTrainer(tiny_model(), args)
    llama = LlamaForCausalLM(LlamaConfig(hidden_size=64, num_hidden_layers=1, vocab_size=9))
    with pytest.raises(ValueError, match=r"`cp_size` must be 1 for models other than LSGPTForCausalLM.* got LlamaFor"):
        LSGPTTrainer(llama, args)


def test_fsdp_does_not_round_the_number_of_labels(tiny_model, tmp_path):
    """It casts tensors that a model gets to the dtype of its mixed precision, bfloat16, which has no 257."""
    trainer = trainer_of(LSGPTTrainer, tiny_model(), tmp_path)
    trainer.is_fsdp_enabled = True
    count = trainer._get_num_items_in_batch([{"labels": torch.ones(1, 258, dtype=torch.int64)}], "cpu")
    assert type(count) is not torch.Tensor and count == 257


def test_fsdp1_is_refused(tiny_model, tmp_path, monkeypatch):
    def create(trainer):
        trainer.accelerator = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=SimpleNamespace(fsdp_version=1)))

    monkeypatch.setattr(Trainer, "create_accelerator_and_postprocess", create)
    with pytest.raises(ValueError, match=r"`fsdp_version` must be 2; got 1, as in old files of `accelerate config`"):
        trainer_of(LSGPTTrainer, tiny_model(), tmp_path)


def test_context_parallelism_with_deepspeed_is_refused():
    accelerator = SimpleNamespace(distributed_type="DEEPSPEED", num_processes=2)
    with pytest.raises(ValueError, match=r"`cp_size` must be 1 with DeepSpeed.* got 2. Use FSDP2"):
        ContextParallelismConfig(cp_size=2)._validate_accelerator(accelerator)


@pytest.mark.parametrize("remainder", [0, 1])
def test_the_stock_trainers_evaluation_of_repeated_rows_is_exact_or_refused(remainder):
    loader = SimpleNamespace(remainder=remainder, total_batch_size=4, dataset=range(8 + remainder))
    inputs = {"num_items_in_batch": 3}
    if remainder:
        with pytest.raises(ValueError, match=r"must have a multiple of 4 rows if 2 processes share .* got 9"):
            evaluation_inputs(inputs, loader, 2)
        loader.is_for_all_processes = True
    assert evaluation_inputs(inputs, loader, 2) == {"num_items_in_batch": 6} and evaluation_inputs({}, loader, 2) == {}


def test_training_steps_do_without_logits(tiny_model, tmp_path):
    """By the fused loss; evaluations have logits, and so has a loss function of the user."""
    trainer = trainer_of(LSGPTTrainer, tiny_model(), tmp_path)
    input_ids = torch.randint(97, (2, 12))
    batch = {"input_ids": input_ids, "labels": input_ids}
    loss, output = trainer.compute_loss(trainer.model, dict(batch), return_outputs=True, num_items_in_batch=22)
    assert "logits" not in output
    assert "LinearCrossEntropyBackward" in autograd_functions(loss)
    usual_loss, usual_output = trainer.compute_loss(trainer.model.eval(), dict(batch), return_outputs=True)
    assert "logits" in usual_output
    torch.testing.assert_close(loss, usual_loss)

    def mean_logit(outputs, labels, num_items_in_batch=None):
        assert torch.equal(labels, input_ids)
        return outputs.logits.mean()

    own = trainer_of(LSGPTTrainer, tiny_model(), tmp_path, compute_loss_func=mean_logit)
    expected = own.model(input_ids).logits.mean()
    torch.testing.assert_close(own.compute_loss(own.model, dict(batch)), expected)
    with pytest.raises(ValueError, match="did not return a loss"):
        trainer.compute_loss(trainer.model.train(), {"input_ids": input_ids})


@pytest.mark.parametrize("kind", [Trainer, LSGPTTrainer])
def test_smoothed_labels_are_shifted(tiny_model, tmp_path, kind):
    """A share of the target goes to all tokens alike; the target is the next token, as without smoothing."""
    trainer = trainer_of(kind, tiny_model(), tmp_path, label_smoothing_factor=0.1)
    input_ids = torch.randint(97, (2, 12))
    labels = input_ids.clone()
    labels[0, :4] = -100
    loss = trainer.compute_loss(trainer.model, {"input_ids": input_ids, "labels": labels.clone()})
    log_probabilities = trainer.model(input_ids).logits[:, :-1].log_softmax(dim=-1)
    losses = [
        -0.9 * log_probabilities[row, position, target] - 0.1 * log_probabilities[row, position].mean()
        for (row, position), target in zip(torch.cartesian_prod(*map(torch.arange, (2, 11))), labels[:, 1:].flatten())
        if target != -100
    ]
    assert len(losses) == 19
    torch.testing.assert_close(loss, torch.stack(losses).mean())
