"""Logit telemetry in real runs of the stock `Trainer`: the figures are the brute-force maxima, and they arrive."""

import json

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from reference import visible_pairs
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from lsgpt import measure_max_logits
from lsgpt.modeling_lsgpt import LOCAL, HeadGroup
from lsgpt.training import LogitTelemetryCallback, MetricsFileCallback, qk_clip


def watch_by_brute_force(model, told=None):
    """Keeps, beside the model's own measurement, the maximum over each group's full masked score matrix."""
    maxima = {}

    def record(group, args):
        query, key = (x.detach().float() for x in args[:2])
        key = key.repeat_interleave(group.num_key_value_groups, dim=1)
        with torch.autocast("cpu", enabled=False):
            logits = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
        num_global_heads = 0 if group.kind == LOCAL else group.num_heads
        length = query.shape[2]
        visible = visible_pairs(
            group.num_heads, num_global_heads, model.config.sliding_window, length, length, **(told or {})
        )
        new = (logits.abs() * visible).amax(dim=(0, 2, 3))
        maxima[group.layer_idx] = torch.maximum(maxima.get(group.layer_idx, new), new)

    for module in model.modules():
        if isinstance(module, HeadGroup):
            module.register_forward_pre_hook(record)

    def rows():
        layers, first = [], 0
        for groups in model.config.head_groups:
            layers.append(torch.cat([maxima[first + i] for i in range(len(groups))]))
            first += len(groups)
        return torch.stack(layers)

    return maxima, rows


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
    measure_max_logits(model, output_attentions=engine == "eager", **inputs)


def test_measured_under_autocast(tiny_model):
    model = tiny_model()
    inputs, told = scenario("padding")
    _, brute_force = watch_by_brute_force(model, told)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        measured = measure_max_logits(model, **inputs)
        torch.testing.assert_close(measured, brute_force(), rtol=1e-5, atol=0)


def test_other_models_are_refused():
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    )
    with pytest.raises(ValueError, match="`model` must be an LSGPT model"):
        measure_max_logits(model, input_ids=torch.ones(1, 2).long())


def blocks(rows=64, length=40):
    ids = torch.randint(97, (rows, length)).tolist()
    return Dataset.from_dict({"input_ids": ids, "labels": ids})


def train(model, folder, callback, **arguments):
    arguments = {
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "logging_steps": 2,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        **arguments,
    }
    trainer = Trainer(
        model,
        TrainingArguments(folder, **arguments),
        train_dataset=blocks(),
        callbacks=[callback, MetricsFileCallback()],
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize("how", ["plain", "gradient checkpointing", "compiled"])
def test_figures_arrive_everywhere_and_cover_all_micro_batches(tiny_model, fresh_compiler, tmp_path, monkeypatch, how):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    model = tiny_model().train()
    arguments = {
        "plain": {},
        "gradient checkpointing": {"gradient_checkpointing": True},
        "compiled": {"torch_compile": True, "torch_compile_backend": "aot_eager"},
    }[how]
    if how != "compiled":
        maxima, brute_force = watch_by_brute_force(model)
    expected = {}

    class BruteForce(LogitTelemetryCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            super().on_step_begin(args, state, control, **kwargs)
            if how != "compiled":
                maxima.clear()

        def on_step_end(self, args, state, control, **kwargs):
            if how != "compiled" and state.global_step % self.every_n_steps == 0:
                expected[state.global_step] = brute_force()
            super().on_step_end(args, state, control, **kwargs)

    trainer = train(model, tmp_path, BruteForce(every_n_steps=3, threshold=1e-3), report_to="tensorboard", **arguments)

    history = {log["step"]: log for log in trainer.state.log_history if "max_logit" in log}
    assert list(history) == [3, 6]
    for step, rows in expected.items():
        wanted = {"max_logit": rows.max(), "max_logit_global": rows[:, :2].max(), "max_logit_local": rows[:, 2:].max()}
        for layer in range(2):
            wanted[f"max_logit/layer_{layer}/global"] = rows[layer, :2].max()
            wanted[f"max_logit/layer_{layer}/local"] = rows[layer, 2:].max()
        wanted["heads_over_threshold"] = 12.0
        for name, value in wanted.items():
            assert history[step][name] == pytest.approx(float(value), rel=1e-5), name
    file = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert {log["step"]: log for log in map(json.loads, file) if "max_logit" in log} == history
    events = EventAccumulator(str(tmp_path / "events")).Reload()
    for name, tag in (("max_logit", "train/max_logit"), ("max_logit/layer_1/local", "train/max_logit/layer_1/local")):
        scalars = {event.step: event.value for event in events.Scalars(tag)}
        assert scalars == {step: pytest.approx(log[name]) for step, log in history.items()}
    assert all(module.max_logit is None for module in model.modules() if isinstance(module, HeadGroup))


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


def test_stop_saves_and_ends(tiny_model, tmp_path):
    callback = LogitTelemetryCallback(every_n_steps=2, threshold=20, on_explosion="stop")
    trainer = train(exploding(tiny_model).train(), tmp_path, callback)
    assert trainer.state.global_step == 2
    assert (tmp_path / "checkpoint-2" / "model.safetensors").is_file()


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
        ({"every_n_steps": 0}, "`every_n_steps` must be at least 1; got 0"),
        ({"threshold": -1.0}, "`threshold` must be positive; got -1.0"),
        ({"on_explosion": "panic"}, "`on_explosion` must be one of warn, stop, clip; got 'panic'"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match="must be") as error:
        LogitTelemetryCallback(**arguments)
    assert message in str(error.value)
