import json
import logging
import math
import os
import signal
import threading
from types import SimpleNamespace

import pytest
import torch
from trainers import random_rows, trainer_of
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from lsgpt import LSGPTConfig, LSGPTForCausalLM
from lsgpt.modeling_lsgpt import attention_layers
from lsgpt.training import (
    LogitTelemetryCallback,
    LSGPTTrainer,
    MetricsFileCallback,
    SaveOnSignalCallback,
    StepTimerCallback,
    StopOnBadLossCallback,
)
from lsgpt.training.callbacks import read_metrics


def test_metrics_file_holds_the_log_history(tmp_path):
    config = LSGPTConfig(vocab_size=11, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, sliding_window=4)
    rows = [{"input_ids": [i, 2, 3, 4, 5], "labels": [i, 2, 3, 4, 5]} for i in range(6)]
    args = TrainingArguments(
        tmp_path, max_steps=3, logging_steps=1, eval_strategy="steps", save_strategy="no", dataloader_pin_memory=False
    )
    trainer = Trainer(
        LSGPTForCausalLM(config), args, train_dataset=rows, eval_dataset=rows, callbacks=[MetricsFileCallback()]
    )
    trainer.train()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == trainer.state.log_history
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3]


def test_metrics_file_of_a_run_that_resumes(tmp_path):
    """Lines after the step that it resumes from are dropped, and a line that a crash cut off; NaN stays NaN."""
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 2, "loss": 1.0}\n{"step": 4, "loss": 2.0}\n{"step": 6, "lo')
    callback, args, state = MetricsFileCallback(), TrainingArguments(tmp_path, use_cpu=True), TrainerState()
    callback.on_train_begin(args, state, None)
    assert "lo" in file.read_text().splitlines()[-1]  # a new run touches nothing
    state.global_step = 2
    callback.on_train_begin(args, state, None)
    callback.on_log(args, state, None, logs={"loss": float("nan"), "norm": float("inf"), "epoch": 1.0})
    for line in file.read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)
    assert repr(read_metrics(file)) == repr(
        [{"step": 2, "loss": 1.0}, {"step": 2, "loss": math.nan, "norm": math.inf, "epoch": 1.0}]
    )


def test_a_run_that_resumes_elsewhere_keeps_what_was_logged(tmp_path):
    (tmp_path / "run").mkdir()
    callback, state = MetricsFileCallback(), TrainerState(global_step=4)
    state.log_history = [{"loss": 2.0, "step": 2}, {"loss": math.nan, "step": 4}, {"loss": 1.0, "step": 6}]
    callback.on_train_begin(TrainingArguments(tmp_path / "more", use_cpu=True), state, None)
    assert repr(read_metrics(tmp_path / "more" / "metrics.jsonl")) == repr(state.log_history[:2])


def test_a_metrics_file_with_broken_lines_keeps_the_others(tmp_path, monkeypatch):
    """A crash cuts a line off, and a run that resumes writes behind it; a full disk may leave anything."""
    file = tmp_path / "metrics.jsonl"
    spoilt = b'{"step": 2, "lo\n\0\xff\n5\n\n'
    file.write_bytes(b'{"step": 1, "loss": 3.0}\n' + spoilt + b'{"step": 2, "loss": 2.0}\n{"step": 3, "lo')
    callback, args, state = MetricsFileCallback(), TrainingArguments(tmp_path, use_cpu=True), TrainerState()
    state.global_step = 3
    callback.on_log(args, state, None, logs={"loss": 1.0})
    kept = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}, {"step": 3, "loss": 1.0}]
    assert read_metrics(file) == kept
    callback.on_train_begin(args, state, None)
    assert [json.loads(line) for line in file.read_text().splitlines()] == read_metrics(file) == kept
    assert list(tmp_path.iterdir()) == [file]

    def crash(*paths):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", crash)
    state.global_step = 1
    with pytest.raises(KeyboardInterrupt):
        callback.on_train_begin(args, state, None)
    assert read_metrics(file) == kept


def test_a_training_may_be_the_beginning_of_a_longer_schedule(tiny_model, tmp_path):
    rows = [{"input_ids": [i, 2, 3, 4, 5], "labels": [i, 2, 3, 4, 5]} for i in range(64)]
    schedule = {"lr_scheduler_type": "linear", "lr_scheduler_kwargs": {"num_training_steps": 8}}
    args = TrainingArguments(tmp_path, max_steps=4, logging_steps=1, use_cpu=True, **schedule)
    timer = StepTimerCallback()
    trainer = LSGPTTrainer(tiny_model().train(), args, train_dataset=rows, callbacks=[timer])
    trainer.train()
    rates = [log["learning_rate"] for log in trainer.state.log_history if "learning_rate" in log]
    assert rates == pytest.approx([5e-5 * (8 - i) / 8 for i in range(4)])
    assert args.lr_scheduler_kwargs == {"num_training_steps": 8}
    assert len(timer.seconds) == 4 and timer.tokens_per_second == timer.tokens[3] / timer.seconds[3] > 0


def test_what_is_between_steps_takes_no_time(monkeypatch):
    timer = StepTimerCallback()
    clock = SimpleNamespace(perf_counter=iter([5, 6, 10, 12]).__next__)
    monkeypatch.setattr("lsgpt.training.callbacks.time", clock)
    for _ in range(2):
        timer.on_step_begin(None, None, None)
        timer.on_step_end(None, None, None)
    assert timer.seconds == [1, 2]


def test_tokens_of_all_processes_count_and_those_of_shared_rows_once():
    timer, state = StepTimerCallback(), SimpleNamespace(global_step=0, num_input_tokens_seen=0)
    timer._step_tokens, sharing = 30, SimpleNamespace(cp_size=2)
    args = SimpleNamespace(world_size=4, parallelism_config=sharing, include_num_input_tokens_seen="no")
    timer.on_optimizer_step(args, state, None)
    assert timer.tokens == [60] and state.num_input_tokens_seen == 60


def test_sigterm_saves_the_step_and_gives_the_handler_back(tiny_model, tmp_path):
    rows = [{"input_ids": [i, 2, 3, 4, 5], "labels": [i, 2, 3, 4, 5]} for i in range(64)]
    args = TrainingArguments(tmp_path, max_steps=6, save_strategy="no", use_cpu=True)
    before = signal.getsignal(signal.SIGTERM)

    class Signal(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    callback = SaveOnSignalCallback()
    trainer = Trainer(tiny_model().train(), args, train_dataset=rows, callbacks=[callback, Signal()])
    trainer.train()
    assert callback.was_signalled
    assert trainer.state.global_step == 3
    assert (tmp_path / "checkpoint-3" / "optimizer.pt").is_file()
    assert [log["step"] for log in trainer.state.log_history if "loss" in log] == [3]  # the losses of all three steps
    assert signal.getsignal(signal.SIGTERM) == before


EVERY_STEP = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "metric_for_best_model": "eval_loss"}


@pytest.mark.parametrize("cause", ["signal", "explosion", "loss"])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"eval_strategy": "epoch", "save_strategy": "epoch"}, ([3], [], [3])),
        ({**EVERY_STEP, "save_strategy": "best", "greater_is_better": True}, ([1, 3], [1, 2], [1, 3])),
        (
            {**EVERY_STEP, "save_strategy": "steps", "greater_is_better": True, "save_total_limit": 1},
            ([1, 2, 3], [1, 2], [1, 3]),
        ),
        ({"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}, ([1, 2, 3], [], [3])),
    ],
    ids=["epoch", "best", "limit", "limit without a best"],
)
def test_a_stop_saves_the_last_step_once(tiny_model, tmp_path, monkeypatch, cause, options, expected):
    """The first checkpoint is the best one: losses fall, and the greatest counts as the best."""
    saved, evaluated, save, evaluate = [], [], Trainer._save_checkpoint, Trainer.evaluate
    monkeypatch.setattr(
        Trainer, "_save_checkpoint", lambda self, *x: saved.append(self.state.global_step) or save(self, *x)
    )
    monkeypatch.setattr(
        Trainer, "evaluate", lambda self, *x, **y: evaluated.append(self.state.global_step) or evaluate(self, *x, **y)
    )

    class Cause(TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **kwargs):
            if state.global_step == 2 and cause == "signal":
                os.kill(os.getpid(), signal.SIGTERM)
            elif state.global_step == 2 and cause == "loss":
                model.lm_head.weight.data.fill_(math.nan)

    callbacks = {"signal": SaveOnSignalCallback(), "loss": StopOnBadLossCallback()}
    callbacks["explosion"] = LogitTelemetryCallback(3, threshold=1e-9, on_explosion="stop")
    options = {**options, "learning_rate": 1e-2, "eval_dataset": random_rows()[:8]}
    trainer = trainer_of(tiny_model().train(), tmp_path, callbacks[cause], Cause(), **options)
    trainer.train()
    kept = sorted(int(file.parent.name[-1]) for file in tmp_path.glob("checkpoint-*/optimizer.pt"))
    assert (saved, evaluated, kept) == expected
    assert trainer.args.save_total_limit == options.get("save_total_limit")


def test_sigterm_after_an_exception_or_in_a_thread(tiny_model, tmp_path, caplog, monkeypatch):
    """Nobody would look at it: it goes to the handler of before, at once. A thread cannot handle it, and says so."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    rows = [{"input_ids": [i, 2, 3, 4, 5], "labels": [i, 2, 3, 4, 5]} for i in range(8)]
    args = TrainingArguments(tmp_path, max_steps=1, save_strategy="no", use_cpu=True, report_to="none")

    class Fail(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            raise RuntimeError("in the middle")

    received = []
    before = signal.signal(signal.SIGTERM, lambda *_: received.append(1))
    try:
        with pytest.raises(RuntimeError, match="in the middle"):
            callbacks = [SaveOnSignalCallback(), Fail()]
            Trainer(tiny_model().train(), args, train_dataset=rows, callbacks=callbacks).train()
        os.kill(os.getpid(), signal.SIGTERM)
        assert received == [1]

        class Kill(TrainerCallback):
            def on_step_begin(self, args, state, control, **kwargs):
                os.kill(os.getpid(), signal.SIGTERM)

        # Another training, whose signals are none of the callback of the one before.
        callbacks = [SaveOnSignalCallback(), Fail()]
        with pytest.raises(RuntimeError, match="in the middle"):
            Trainer(tiny_model().train(), args, train_dataset=rows, callbacks=callbacks).train()
        Trainer(tiny_model().train(), args, train_dataset=rows, callbacks=[Kill()]).train()
        assert received == [1, 1]
        trainer = Trainer(tiny_model().train(), args, train_dataset=rows, callbacks=[SaveOnSignalCallback()])
        thread = threading.Thread(target=trainer.train)
        thread.start()
        thread.join()
        assert trainer.state.global_step == 1
        assert "SIGTERM will not save a checkpoint" in caplog.text
        os.kill(os.getpid(), signal.SIGTERM)
        assert received == [1, 1, 1]
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(("accumulation", "micro_batch"), [(1, 0), (4, 0), (4, 2), (4, 3)])
def test_a_bad_loss_ends_the_run_with_the_last_good_weights(
    tiny_model, tmp_path, caplog, monkeypatch, accumulation, micro_batch
):
    """A fault in one micro-batch of the third step: an infinity out of one projection."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    model = tiny_model().train()
    rows = [{"input_ids": [i, 2, 3, 4, 5], "labels": [i, 2, 3, 4, 5]} for i in range(64)]
    args = TrainingArguments(
        tmp_path,
        max_steps=6,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=accumulation,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
    )
    after_step, batches = {}, []
    callback = StopOnBadLossCallback()

    class Remember(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            after_step[state.global_step] = {name: p.clone() for name, p in model.state_dict().items()}
            again = state.global_step == 3  # the bad one, to find the layer
            assert len(callback._batches) == accumulation + again  # those of the step, and no others

    trainer = Trainer(model, args, train_dataset=rows, callbacks=[callback, Remember()])

    def begin(model, args, inputs):
        batches.append(inputs["input_ids"].tolist())

    def fault(module, inputs, output):
        bad = 2 * accumulation + micro_batch
        return output * float("inf") if len(batches) > bad and batches[-1] == batches[bad] else output

    model.register_forward_pre_hook(begin, with_kwargs=True)
    model.model.layers[1].mlp.down_proj.register_forward_hook(fault)
    trainer.train()
    assert trainer.state.global_step == 3
    assert "the loss of step 3 is not finite" in caplog.text
    assert "`model.layers.1.mlp.down_proj`" in caplog.text
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    assert len(losses) == 3 and all(loss > 1 for loss in losses[:2]) and not math.isfinite(losses[2])
    saved = LSGPTForCausalLM.from_pretrained(tmp_path / "checkpoint-3").state_dict()
    assert all(torch.equal(saved[name], weight) for name, weight in after_step[2].items())
    assert not model.model.layers[0].self_attn._forward_hooks  # it cleans up behind itself


@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_a_bad_gradient_ends_the_run_with_the_last_good_weights(
    tiny_model, tmp_path, caplog, monkeypatch, max_grad_norm
):
    """The loss of the third step is finite, and one of its gradients is not, which clipping would spread to all."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    model = tiny_model().train()
    rows = [{"input_ids": [i, 2, 3, 4, 5], "labels": [i, 2, 3, 4, 5]} for i in range(64)]
    args = TrainingArguments(
        tmp_path, max_steps=6, max_grad_norm=max_grad_norm, use_cpu=True, report_to="none", save_strategy="no"
    )
    trainer = Trainer(model, args, train_dataset=rows, callbacks=[StopOnBadLossCallback()])
    weights = {}

    def fault(gradient):
        if trainer.state.global_step == 2:
            weights.update({name: weight.clone() for name, weight in model.state_dict().items()})
            gradient = gradient.clone()
            gradient[0, 0] = float("inf")
        return gradient

    model.model.layers[0].mlp.down_proj.weight.register_hook(fault)
    trainer.train()
    assert trainer.state.global_step == 3
    assert "a gradient of step 3 is not finite; saving the weights of step 2" in caplog.text
    saved = LSGPTForCausalLM.from_pretrained(tmp_path / "checkpoint-3").state_dict()
    assert all(torch.equal(saved[name], weight) for name, weight in weights.items())


def test_bad_gradients_are_left_to_the_scaler_of_float16(tiny_model):
    model = tiny_model()
    model.lm_head.weight.grad = torch.full_like(model.lm_head.weight, float("inf"))
    for precision in ("fp16", "bf16"):  # also as `accelerate launch` sets it
        args = SimpleNamespace(mixed_precision=precision, device=torch.device("cpu"), save_total_limit=None)
        control, stops = TrainerControl(), precision != "fp16"
        StopOnBadLossCallback().on_pre_optimizer_step(args, TrainerState(global_step=2), control, model=model)
        assert control.should_training_stop == stops and (model.lm_head.weight.grad is None) == stops


def test_gradients_of_parameters_of_which_another_process_holds_all(tiny_model):
    """As FSDP2 leaves them if there are fewer rows than processes."""
    model = tiny_model()
    model.empty = torch.nn.Parameter(torch.empty(0, 3))
    args = SimpleNamespace(mixed_precision="no", device=torch.device("cpu"), save_total_limit=None)
    for value in (1.0, float("nan")):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, value)
        control = TrainerControl()
        StopOnBadLossCallback().on_pre_optimizer_step(args, TrainerState(global_step=2), control, model=model)
        assert control.should_training_stop == (value != 1.0)


def test_a_training_that_an_exception_ended_leaves_nothing_to_the_next(tiny_model, tmp_path):
    model, callback, args = tiny_model(), StopOnBadLossCallback(), TrainingArguments(tmp_path, use_cpu=True)
    for _ in range(2):  # `on_train_end` is not called
        callback.on_train_begin(args, TrainerState(), None, model=model)
    assert len(model._forward_hooks) == 1
    callback.on_train_end(args, TrainerState(), None)
    assert not model._forward_hooks

    telemetry = LogitTelemetryCallback(every_n_steps=1)
    telemetry.on_train_begin(args, TrainerState(), None, model=model)
    telemetry.on_step_begin(args, TrainerState(), None)
    assert any(layer.max_logits is not None for layer in attention_layers(model))
    telemetry.on_train_begin(args, TrainerState(), None, model=model)
    assert all(layer.max_logits is None for layer in attention_layers(model))


def test_all_processes_run_the_same_batch_again(tiny_model, tmp_path, monkeypatch, caplog):
    """The first that is bad anywhere: they may share its rows."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    monkeypatch.setattr("lsgpt.training.callbacks.any_process", lambda values, device: [True, *values[1:]])
    model, callback = tiny_model().train(), StopOnBadLossCallback()
    args, ids = TrainingArguments(tmp_path, use_cpu=True), torch.randint(97, (3, 1, 9))
    callback.on_train_begin(args, TrainerState(), None, model=model)
    for batch in ids:
        model(input_ids=batch, labels=batch)
    seen = []
    model.register_forward_pre_hook(lambda model, args, inputs: seen.append(inputs["input_ids"]), with_kwargs=True)
    callback.on_pre_optimizer_step(args, TrainerState(), TrainerControl(), model=model)
    assert torch.equal(seen[0], ids[0]) and "values: a batch of another process" in caplog.text


def test_a_training_after_one_that_was_stopped(tiny_model, tmp_path):
    guard, timer = StopOnBadLossCallback(), StepTimerCallback()
    trainer = trainer_of(tiny_model().train(), tmp_path, guard, timer)
    weight = trainer.model.lm_head.weight.data
    good = weight.clone()
    weight.fill_(math.nan)
    trainer.train()
    assert guard.bad_step == 1 and guard.is_stopping
    assert [log["bad_step"] for log in trainer.state.log_history if "bad_step" in log] == [1]
    weight.copy_(good)
    trainer.train()
    assert guard.bad_step is None and not guard.is_stopping
    assert trainer.state.global_step == len(timer.seconds) == len(timer.tokens) == trainer.args.max_steps


def test_a_training_after_a_signal(tiny_model, tmp_path):
    class Once(TrainerCallback):
        is_sent = False

        def on_step_begin(self, *args, **kwargs):
            if not self.is_sent:
                self.is_sent = True
                os.kill(os.getpid(), signal.SIGTERM)

    callback = SaveOnSignalCallback()
    trainer = trainer_of(tiny_model().train(), tmp_path, callback, Once())
    trainer.train()
    assert callback.was_signalled and trainer.state.global_step == 1
    trainer.train()
    assert not callback.was_signalled and trainer.state.global_step == trainer.args.max_steps


def test_the_batches_of_a_compiled_step_are_kept_without_compiling_again(tiny_model, fresh_compiler, tmp_path):
    model, callback, ids = tiny_model().train(), StopOnBadLossCallback(), torch.randint(97, (1, 9))
    callback.on_train_begin(TrainingArguments(tmp_path, use_cpu=True), TrainerState(), None, model=model)
    compiled = torch.compile(model, backend="eager")
    counts = []
    for _ in range(4):
        compiled(input_ids=ids, labels=ids, skip_logits=True)
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert len(callback._batches) == 4 and counts[0] == counts[-1] > 0


def test_batches_of_an_evaluation_are_not_kept(tiny_model, tmp_path):
    callback, model, ids = StopOnBadLossCallback(), tiny_model().eval(), torch.randint(97, (1, 9))
    callback.on_train_begin(TrainingArguments(tmp_path, use_cpu=True), TrainerState(), None, model=model)
    model(input_ids=ids, labels=ids)
    assert callback._batches == []


def test_one_process_writes_the_metrics(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 9}\n')
    state = TrainerState(global_step=2, is_world_process_zero=False)
    MetricsFileCallback().on_train_begin(TrainingArguments(tmp_path, use_cpu=True), state, None)
    assert file.read_text() == '{"step": 9}\n'


def test_the_logits_of_a_teacher_are_not_kept(tiny_model, tmp_path):
    model, callback, ids = tiny_model().train(), StopOnBadLossCallback(), torch.randint(97, (1, 9))
    callback.on_train_begin(TrainingArguments(tmp_path, use_cpu=True), TrainerState(), None, model=model)
    model(input_ids=ids, labels=ids, skip_logits=True, teacher_logits=torch.randn(1, 9, 97))
    ((inputs, _),) = callback._batches
    assert inputs.keys() == {"input_ids", "labels", "skip_logits"}


def test_a_loss_from_outside_the_model_is_left_alone(tiny_model, tmp_path):
    rows = [{"input_ids": [i, 2, 3, 4, 5], "labels": [i, 2, 3, 4, 5]} for i in range(8)]
    args = TrainingArguments(tmp_path, max_steps=2, label_smoothing_factor=0.1, use_cpu=True, report_to="none")
    trainer = Trainer(tiny_model().train(), args, train_dataset=rows, callbacks=[StopOnBadLossCallback()])
    trainer.train()
    assert trainer.state.global_step == 2
