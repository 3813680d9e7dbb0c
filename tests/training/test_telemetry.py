"""Logit telemetry in real runs of the stock `Trainer`: the figures are the brute-force maxima, and they arrive."""

import json
import logging
import math

import pytest
import torch
from peft import LoraConfig, get_peft_model
from reference import visible_pairs
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from trainers import trainer_of
from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import TensorBoardCallback

from lsgpt import measure_max_logits
from lsgpt.modeling_lsgpt import attention_layers
from lsgpt.training import LogitTelemetryCallback, LSGPTTrainer, MetricsFileCallback, StopOnBadLossCallback, qk_clip
from lsgpt.training.telemetry import summarize_max_logits


def watch_by_brute_force(model, told=None):
    """Keeps, beside the model's own measurement, the maximum over each layer's full masked score matrix."""
    maxima = {}

    def record(layer, args, kwargs):
        config, (query, key, _) = model.config, layer.project(*args, kwargs["position_embeddings"])
        num_global_heads = config.num_global_heads_per_layer[layers.index(layer)]
        query, key = query.detach().float(), key.detach().float()
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        with torch.autocast("cpu", enabled=False):
            logits = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
        visible = visible_pairs(
            query.shape[1], num_global_heads, config.sliding_window, *logits.shape[2:], **(told or {})
        )
        if "padding_mask" in (told or {}):
            visible = visible & told["padding_mask"][:, None, :, None].bool()  # queries too
        new = (logits.abs() * visible).amax(dim=(0, 2, 3))
        maxima[layer] = torch.maximum(maxima.get(layer, new), new)

    layers = attention_layers(model)
    for layer in layers:
        layer.register_forward_pre_hook(record, with_kwargs=True)
    return maxima, lambda: torch.stack([maxima[layer] for layer in layers])


def scenario(name):
    input_ids = torch.randint(97, (3, 70))
    if name == "padding":
        mask = torch.ones_like(input_ids)
        mask[1, :20], mask[2, 50:] = 0, 0
        return {"input_ids": input_ids, "attention_mask": mask}, {"padding_mask": mask}
    if name == "packing":
        lengths = (1, 30, 7, 32)
        positions = torch.cat([torch.arange(n) for n in lengths]).expand(3, -1)
        documents = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths)).expand(3, -1)
        return {"input_ids": input_ids, "position_ids": positions}, {"documents": documents}
    return {"input_ids": input_ids}, {}


@pytest.mark.parametrize("engine", ["eager", "sdpa", "flex_attention"])
@pytest.mark.parametrize("name", ["plain", "padding", "packing"])
def test_measured_logits_are_the_brute_force_maxima(tiny_model, engine, name):
    values = {"num_key_value_heads": 3, "num_global_heads": [0, 4], "position_embedding_type": "rope", "qk_norm": True}
    model = tiny_model(engine=engine, head_dim=16, **values).requires_grad_(False)
    inputs, told = scenario(name)
    without = model(**inputs).logits
    _, brute_force = watch_by_brute_force(model, told)
    measured = measure_max_logits(model, **inputs)
    assert measured.shape == (2, 6) and measured.dtype == torch.float32
    torch.testing.assert_close(measured, brute_force(), rtol=1e-5, atol=0)
    assert torch.equal(model(**inputs).logits, without)
    if engine == "eager":
        assert torch.equal(measure_max_logits(model, output_attentions=True, **inputs), measured)


def test_measured_under_autocast(tiny_model):
    model = tiny_model()
    inputs, told = scenario("padding")
    _, brute_force = watch_by_brute_force(model, told)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        measured = measure_max_logits(model, **inputs)
        torch.testing.assert_close(measured, brute_force(), rtol=1e-5, atol=0)


def train(model, folder, *callbacks, **arguments):
    arguments = {"gradient_accumulation_steps": 4, "logging_steps": 2, **arguments}
    trainer = trainer_of(model, folder, *callbacks, MetricsFileCallback(), **arguments)
    trainer.train()
    return trainer


class BruteForce(LogitTelemetryCallback):
    """Keeps what it is to log."""

    def __init__(self, model, **arguments):
        super().__init__(**arguments)
        self.maxima, self.rows = watch_by_brute_force(model)
        self.expected = {}

    def on_step_begin(self, args, state, control, **kwargs):
        super().on_step_begin(args, state, control, **kwargs)
        self.maxima.clear()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % self.every_n_steps == 0:
            self.expected[state.global_step] = self.rows()
        super().on_step_end(args, state, control, **kwargs)


@pytest.mark.parametrize("how", ["stock Trainer", "gradient checkpointing", "compiled"])
def test_figures_arrive_everywhere_and_cover_all_micro_batches(tiny_model, fresh_compiler, tmp_path, monkeypatch, how):
    """In the history, in the metrics file behind the callback, on the progress bar, and at the tracker."""
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    settings = {"every_n_steps": 3, "threshold": 1e-3}
    model = tiny_model().train()
    callback = BruteForce(model, **settings)
    if how == "stock Trainer":
        trainer = train(model, tmp_path, callback, TensorBoardCallback())
    else:
        options = {"report_to": "tensorboard", "trainer_type": LSGPTTrainer}
        if how == "gradient checkpointing":
            trainer = train(model, tmp_path, callback, activation_checkpointing=True, **options)
        else:  # what a hook would see is compiled away: the same run without a compiler tells what is expected
            train(model, tmp_path / "expected", callback)
            model = tiny_model().train()
            options |= {"torch_compile": True, "torch_compile_backend": "aot_eager"}
            trainer = train(model, tmp_path, LogitTelemetryCallback(**settings), **options)

    history = {log["step"]: log for log in trainer.state.log_history if "max_logit" in log}
    assert list(history) == list(callback.expected) == [3, 6]
    for step, rows in callback.expected.items():
        wanted = {"max_logit": rows.max(), "max_logit_global": rows[:, :2].max(), "max_logit_local": rows[:, 2:].max()}
        for layer in range(2):
            wanted[f"max_logit/layer_{layer}/global"] = rows[layer, :2].max()
            wanted[f"max_logit/layer_{layer}/local"] = rows[layer, 2:].max()
        wanted["heads_over_threshold"] = 12.0
        for name, value in wanted.items():
            assert history[step][name] == pytest.approx(float(value), rel=1e-5), name
    file = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in file] == trainer.state.log_history
    events = EventAccumulator(str(tmp_path / "events")).Reload()
    for name, tag in (("max_logit", "train/max_logit"), ("max_logit/layer_1/local", "train/max_logit/layer_1/local")):
        scalars = {event.step: event.value for event in events.Scalars(tag)}
        assert scalars == {step: pytest.approx(log[name]) for step, log in history.items()}
    assert all(layer.max_logits is None for layer in attention_layers(model))


def test_a_stock_trainer_that_asks_its_tracker_too_early_says_so(tiny_model, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    trainer = train(tiny_model().train(), tmp_path, LogitTelemetryCallback(2), report_to="tensorboard", max_steps=4)
    assert [log["step"] for log in trainer.state.log_history if "max_logit" in log] == [2, 4]
    (warning,) = (record.message for record in caplog.records if "do not reach tensorboard" in record.message)
    assert "Use `LSGPTTrainer`" in warning
    assert "train/max_logit" not in EventAccumulator(str(tmp_path / "events")).Reload().Tags()["scalars"]


def test_one_callback_for_a_training(tiny_model, tmp_path):
    """The same one may watch several trainings, also of the same model."""
    model, callback = tiny_model().train(), LogitTelemetryCallback(1)
    for _ in range(2):
        train(model, tmp_path, callback, max_steps=1)
    with pytest.raises(ValueError, match="must contain at most one LogitTelemetryCallback; got two"):
        train(model, tmp_path, LogitTelemetryCallback(1), LogitTelemetryCallback(50))


def test_telemetry_changes_nothing_in_the_training(tiny_model, tmp_path):
    weights = []
    for every_n_steps in (1, 1000):
        model = tiny_model().train()
        torch.manual_seed(3)
        train(model, tmp_path / str(every_n_steps), LogitTelemetryCallback(every_n_steps))
        weights.append(model.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(weights[0].values(), weights[1].values()))


def exploding(tiny_model, **values):
    """The heads of the first layer have logits many times those of the second."""
    model = tiny_model(**values)
    model.model.layers[0].self_attn.q_proj.weight.data *= 30
    return model


def test_one_process_with_several_gpus_is_refused(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(TrainingArguments, "n_gpu", 2)
    monkeypatch.setattr(Trainer, "_wrap_model", lambda self, model, *args, **kwargs: model)
    with pytest.raises(ValueError, match=r"cannot be measured in one process with 2 GPUs.* use one process per GPU"):
        train(tiny_model().train(), tmp_path, LogitTelemetryCallback())


def test_stop_saves_and_ends(tiny_model, tmp_path):
    callback = LogitTelemetryCallback(every_n_steps=2, threshold=20, on_explosion="stop")
    trainer = train(exploding(tiny_model).train(), tmp_path, callback)
    assert trainer.state.global_step == callback.stop_step == 2
    assert (tmp_path / "checkpoint-2" / "model.safetensors").is_file()
    callback.threshold = math.inf
    trainer.train()  # a search over hyperparameters has the same callback in all its trainings
    assert callback.stop_step is None


def test_explosions_are_warned_of_by_default(tiny_model, tmp_path, caplog, monkeypatch):
    """Not those that are measured and not logged."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    callback = LogitTelemetryCallback(every_n_steps=1, threshold=20, log_every_n_steps=2)
    train(exploding(tiny_model).train(), tmp_path, callback, max_steps=2)
    (warning,) = (record.message for record in caplog.records if "with logits over 20" in record.message)
    assert warning.startswith("step 2: ") and warning.endswith(" of layer 0")


@pytest.mark.parametrize("values", [{}, {"num_key_value_heads": 3}, {"use_bias": True}])
def test_clip_keeps_the_maximum_at_the_threshold_and_other_heads_as_they_are(tiny_model, values):
    model = exploding(tiny_model, **values)
    inputs = {"input_ids": torch.randint(97, (2, 60))}
    before = measure_max_logits(model, **inputs)
    threshold = float(before[1].max()) * 1.01  # the second layer stays under it
    untouched = {name: p.clone() for name, p in model.named_parameters() if "layers.0.self_attn" not in name}
    qk_clip(model, before, threshold)
    assert before[0].max() > threshold
    assert measure_max_logits(model, **inputs)[0].max() <= threshold * (1 + 1e-5)
    assert all(torch.equal(p, dict(model.named_parameters())[name]) for name, p in untouched.items())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_count_as_explosions(tiny_model, tiny_config, bad):
    maxima = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0, bad], [300.0, 2.0, 3.0, 4.0, 5.0, 6.0]])
    figures = summarize_max_logits(maxima, tiny_config(), threshold=100.0)
    assert figures["heads_over_threshold"] == 2
    at_the_largest = summarize_max_logits(maxima, tiny_config(), threshold=300.0)
    assert at_the_largest["heads_over_threshold"] == 1  # which is not over it
    assert figures["max_logit_global"] == 300
    for name in ("max_logit", "max_logit_local", "max_logit/layer_0/local"):
        assert figures[name] == pytest.approx(bad, nan_ok=True)

    # Clipped is what can be: the first head of the second layer. Heads 4 and 5 share a key head here.
    model = tiny_model(num_key_value_heads=3)
    before = {name: p.clone() for name, p in model.named_parameters()}
    qk_clip(model, maxima, threshold=100.0)
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {f"model.layers.1.self_attn.{x}_proj.weight" for x in "qk"}
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("threshold", [0.0, -20.0, math.nan, math.inf])
def test_clip_refuses_a_threshold_that_would_spoil_weights(tiny_model, threshold):
    with pytest.raises(ValueError, match=f"`threshold` must be positive and finite; got {threshold}"):
        qk_clip(tiny_model(), torch.full((2, 6), 50.0), threshold)


def test_nan_logits_stop_a_training(tiny_model, tmp_path, caplog, monkeypatch):
    """... whose loss is not finite is logged as that, not as 0, which Transformers makes of it by default."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    model = tiny_model().train()
    model.model.layers[1].self_attn.q_proj.weight.data[-1] = math.nan  # the last head
    callbacks = LogitTelemetryCallback(1, on_explosion="stop"), StopOnBadLossCallback()
    trainer = train(model, tmp_path, *callbacks)
    assert trainer.state.global_step == 1
    (log,) = (log for log in trainer.state.log_history if "loss" in log)
    assert log["heads_over_threshold"] == 1 and math.isnan(log["max_logit"]) and math.isnan(log["loss"])
    assert "the largest nan in head 5 of layer 1; saving" in caplog.text
    assert trainer.args.logging_nan_inf_filter  # given back


def test_clip_during_training(tiny_model, tmp_path):
    callback = LogitTelemetryCallback(every_n_steps=1, threshold=20, on_explosion="clip")
    model = exploding(tiny_model).train()
    inputs = {"input_ids": torch.randint(97, (2, 40))}
    assert measure_max_logits(model, **inputs).max() > 100
    trainer = train(model, tmp_path, callback, learning_rate=0.0, max_steps=12)
    maxima = [log["max_logit"] for log in trainer.state.log_history if "max_logit" in log]
    assert maxima[0] > 100 and maxima[-1] < 25  # other batches than those that were clipped may pass a little
    with pytest.raises(ValueError, match="qk_norm"):
        train(tiny_model(qk_norm=True), tmp_path, callback)
    adapted = get_peft_model(tiny_model(), LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="frozen"):
        train(adapted, tmp_path, callback)


def test_clip_with_deepspeed_is_refused(tiny_model, tmp_path):
    args = TrainingArguments(tmp_path, use_cpu=True)
    args.deepspeed_plugin = object()  # DeepSpeed itself may not be installed
    callback = LogitTelemetryCallback(1, on_explosion="clip")
    with pytest.raises(ValueError, match='not "clip", with DeepSpeed, which overwrites changes to weights'):
        callback.on_init_end(args, TrainerState(), TrainerControl(), model=tiny_model())


def test_a_callback_that_is_added_later_is_checked(tiny_model, tmp_path):
    trainer = trainer_of(tiny_model(qk_norm=True).train(), tmp_path)
    trainer.add_callback(LogitTelemetryCallback(1, on_explosion="clip"))
    with pytest.raises(ValueError, match='not "clip", with `qk_norm`'):
        trainer.train()


def test_a_stop_between_logged_steps_is_explained(tiny_model, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    callback = LogitTelemetryCallback(1, threshold=1e-9, on_explosion="stop", log_every_n_steps=50)
    train(tiny_model().train(), tmp_path, callback)
    assert callback.stop_step == 1 and "saving and ending the training" in caplog.text


def test_measuring_more_often_than_logging(tiny_model, tmp_path):
    """As QK-clip wants it: every step is clipped, few are logged."""
    callback = LogitTelemetryCallback(every_n_steps=1, threshold=20, on_explosion="clip", log_every_n_steps=3)
    model = exploding(tiny_model).train()
    trainer = train(model, tmp_path, callback, learning_rate=0.0)
    maxima = {log["step"]: log["max_logit"] for log in trainer.state.log_history if "max_logit" in log}
    assert list(maxima) == [3, 6]
    assert all(value < 25 for value in maxima.values())  # the first two steps were clipped, and not logged


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every_n_steps": 0}, "`every_n_steps` must be a whole number of at least 1; got 0"),
        ({"every_n_steps": 1.5}, "`every_n_steps` must be a whole number of at least 1; got 1.5"),
        ({"log_every_n_steps": 0}, "`log_every_n_steps` must be a whole number of at least 1; got 0"),
        ({"threshold": -1.0}, "`threshold` must be positive and finite; got -1.0"),
        ({"threshold": math.nan}, "`threshold` must be positive and finite; got nan"),
        ({"on_explosion": "panic"}, "`on_explosion` must be one of warn, stop, clip; got 'panic'"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match="must be") as error:
        LogitTelemetryCallback(**arguments)
    assert message in str(error.value)
