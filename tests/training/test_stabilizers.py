"""Every stabilizer changes what it should, and nothing else."""

from pathlib import Path

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from lsgpt import LSGPTForCausalLM, measure_max_logits
from lsgpt.modeling_lsgpt import ALL_ATTENTION_FUNCTIONS
from lsgpt.training import (
    STABILIZERS,
    LogitTelemetryCallback,
    LSGPTTrainer,
    adagc_optimizer,
    add_z_loss,
    attend_in_float32,
    build_trainer,
    parse_arguments,
    qk_clip,
)
from lsgpt.training.stabilizers import config_fields, read_stabilizers


INPUTS = torch.arange(80).view(2, 40) * 7 % 97

MODERN = {
    "norm_type": "rms_norm",
    "gated_mlp": True,
    "hidden_act": "silu",
    "position_embedding_type": "rope",
    "num_key_value_heads": 3,
    "use_bias": ["qkv_proj", "o_proj"],
    "attention_sinks": True,
    "tie_word_embeddings": True,
}
"""Blocks of today, with biases and sinks as converted models have them."""


def test_the_documented_defaults_are_those_of_the_code():
    """docs/training.md has a table of them, with their sources."""
    text = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
    rows = {cells[1].strip("` "): cells for line in text.splitlines() if len(cells := line.split("|")) > 4}
    for name, stabilizer in STABILIZERS.items():
        *_, default, source, _ = rows[name]
        assert default.strip().startswith("on") if stabilizer.default is True else float(default) == stabilizer.default
        assert stabilizer.source.split("arXiv:")[1] in source


def test_ways_to_name_them():
    wanted = {"z-loss": 1e-4, "qk-norm": True}
    for value in ("z-loss, qk-norm", ["z-loss", "qk-norm"], {"z-loss": True, "qk-norm": True, "adagc": False}):
        assert read_stabilizers(value) == wanted
    assert read_stabilizers({"z-loss": "1e-3"}) == {"z-loss": 1e-3}
    assert read_stabilizers(None) == {}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("z_loss", "`stabilizers` must be among qk-norm, .*; got 'z_loss'; did you mean 'z-loss'"),
        ({"z-loss": -1}, "`stabilizers` must have a positive number, true or false for z-loss; got -1"),
        ({"z-loss": "much"}, "got 'much'"),
        ({"softcap": float("inf")}, "got inf"),
        ({"qk-norm": 2}, "`stabilizers` must have true or false for qk-norm; got 2"),
    ],
)
def test_bad_values_are_named(value, message):
    with pytest.raises(ValueError, match=message):
        read_stabilizers(value)


def test_config_stabilizers_are_fields_of_the_model(tiny_config):
    assert config_fields(read_stabilizers("qk-norm,softcap")) == {"qk_norm": True, "attn_logit_softcapping": 50.0}
    assert config_fields(read_stabilizers("z-loss")) == {}
    # `qk_norm` adds two vectors per layer, and soft-capping no weight.
    size = LSGPTForCausalLM(tiny_config()).num_parameters()
    assert LSGPTForCausalLM(tiny_config(qk_norm=True)).num_parameters() == size + 2 * 2 * 12
    assert LSGPTForCausalLM(tiny_config(attn_logit_softcapping=50.0)).num_parameters() == size


@pytest.mark.parametrize("values", [{"num_global_heads": 0}, {}, {"num_global_heads": 6}, MODERN])
@pytest.mark.parametrize("num_items_in_batch", [None, 100])
def test_z_loss(tiny_model, values, num_items_in_batch):
    model = tiny_model(**values)
    labels = INPUTS.clone()
    labels[0, :10] = -100
    options = {"num_items_in_batch": num_items_in_batch} if num_items_in_batch else {}
    plain = model(INPUTS, labels=labels, **options)
    add_z_loss(model, 0.01)
    with_z_loss = model(INPUTS, labels=labels, **options)
    log_partition = plain.logits[:, :-1].exp().sum(-1).log()[labels[:, 1:] != -100]
    expected = 0.01 * (log_partition**2).sum() / (num_items_in_batch or len(log_partition))
    assert torch.equal(plain.logits, with_z_loss.logits)
    assert expected > 0.01
    torch.testing.assert_close(with_z_loss.loss - plain.loss, expected, rtol=1e-4, atol=1e-5)
    # It draws the log-partition to zero ...
    with_z_loss.loss.backward()
    gradient = model.lm_head.weight.grad.clone()
    model.zero_grad()
    (plain.loss + expected).backward()
    torch.testing.assert_close(gradient, model.lm_head.weight.grad)
    # ... and leaves evaluation alone.
    with torch.no_grad():
        assert torch.equal(model(INPUTS, labels=labels, **options).loss, plain.loss)


@pytest.mark.parametrize(
    "values", [{}, {"num_global_heads": 6}, {"num_global_heads": 0}, {"num_key_value_heads": 3}, MODERN]
)
def test_float32_attention(tiny_model, values, monkeypatch):
    """Under autocast the error of the attention is gone, that of the projections stays; without it nothing changes."""
    model = tiny_model(**values)
    plain = model(INPUTS).logits
    with torch.autocast("cpu", torch.bfloat16):
        low = model(INPUTS).logits
    attend_in_float32(model)
    assert torch.equal(model(INPUTS).logits, plain)
    found = []

    def attend(module, *args, sliding_window=None, s_aux=None, **kwargs):
        assert (s_aux is not None) == (model.config.attention_sinks and sliding_window is not None)
        tensors = [x for x in (*args, s_aux) if isinstance(x, torch.Tensor) and x.is_floating_point()]
        found.extend((x.dtype, torch.is_autocast_enabled("cpu")) for x in tensors)
        return forward(module, *args, sliding_window=sliding_window, s_aux=s_aux, **kwargs)

    forward = ALL_ATTENTION_FUNCTIONS["sdpa"]
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", attend)
    model.set_attn_implementation("sdpa")
    attend_in_float32(model)
    with torch.autocast("cpu", torch.bfloat16):
        high = model(INPUTS).logits
    assert set(found) == {(torch.float32, False)}
    assert not torch.equal(high, low)
    assert high.dtype == low.dtype
    half = tiny_model(dtype=torch.bfloat16, **values)
    attend_in_float32(half)
    assert half(INPUTS).logits.dtype == torch.bfloat16
    with pytest.raises(ValueError, match="must be an LSGPT model"):
        attend_in_float32(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("values", [{"num_global_heads": 0}, {}, {"num_global_heads": 6}, MODERN])
def test_adagc_clips_a_spike(tiny_model, tmp_path, values):
    """What one step with gradients a thousand times as large does to Adam's running mean of the gradients."""

    def growth(use_adagc):
        model = tiny_model(initializer_range=0.02, **values).train()
        moments = []

        class Spike(TrainerCallback):
            def on_pre_optimizer_step(self, *args, **kwargs):
                if len(moments) == 12:
                    for parameter in model.parameters():
                        parameter.grad *= 1000

            def on_step_end(self, *args, optimizer=None, **kwargs):
                moments.append(torch.stack([state["exp_avg"].norm() for state in optimizer.state.values()]).norm())

        args = TrainingArguments(tmp_path, max_steps=13, max_grad_norm=0, use_cpu=True, save_strategy="no")
        optimizer = None
        if use_adagc:
            optimizer_type, options = adagc_optimizer(args)
            optimizer = optimizer_type, {**options, "warmup_steps": 5}
        rows = [{"input_ids": row.tolist(), "labels": row.tolist()} for row in INPUTS.repeat(52, 1)]
        Trainer(model, args, train_dataset=rows, callbacks=[Spike()], optimizer_cls_and_kwargs=optimizer).train()
        return (moments[12] / moments[11]).item()

    assert growth(use_adagc=False) > 50
    assert growth(use_adagc=True) < 2


def test_adagc_takes_the_arguments_of_the_run(tmp_path):
    args = TrainingArguments(tmp_path, learning_rate=3e-4, adam_beta2=0.95, adam_epsilon=1e-7, use_cpu=True)
    _, kwargs = adagc_optimizer(args, 1.1)
    assert kwargs == {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-7, "lambda_rel": 1.1}


SMALL = "{hidden_size: 24, num_hidden_layers: 1, max_position_embeddings: 64, vocab_size: 300}"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "a.txt"
    file.write_text("".join(f"line {i} of {i * i}\n" for i in range(2000)))
    return str(file)


def build(text, folder, *options):
    overrides = ["--dataset_name", text, "--config_overrides", SMALL, "--block_size", "32", "--use_cpu", "true"]
    return build_trainer(parse_arguments("demo", [*overrides, "--output_dir", str(folder), *options]))


@pytest.mark.parametrize("name", [None, *STABILIZERS])
def test_recipe_switches(text, tmp_path, name):
    """What a run with one stabilizer has, and the others lack."""
    trainer = build(text, tmp_path, *(["--stabilizers", name] if name else []))
    config, model = trainer.model.config, trainer.model
    telemetry = [c for c in trainer.callback_handler.callbacks if isinstance(c, LogitTelemetryCallback)]
    found = {
        "qk-norm": config.qk_norm,
        "softcap": config.attn_logit_softcapping == 50.0 and config._attn_implementation == "eager",
        "z-loss": "add_z_loss" in model.loss_function.__qualname__,
        "qk-clip": (telemetry[0].on_explosion, telemetry[0].threshold, telemetry[0].every_n_steps)
        == ("clip", 100.0, 1),
        "adagc": trainer.optimizer_cls_and_kwargs is not None and trainer.args.max_grad_norm == 0.0,
        "fp32-attention": model.config._attn_implementation == "sdpa_in_float32",
    }
    assert {other for other, has in found.items() if has} == ({name} if name else set())
    assert (telemetry[0].threshold, telemetry[0].log_every_n_steps) == (100.0, 50)
    trainer.args.max_steps = 2
    assert trainer.train().global_step == 2


def test_soft_capping_bounds_what_the_heads_see_and_not_what_is_measured(tiny_model):
    plain, capped = tiny_model(engine="eager"), tiny_model(engine="eager", attn_logit_softcapping=1.0)
    assert measure_max_logits(plain, input_ids=INPUTS)[0].equal(measure_max_logits(capped, input_ids=INPUTS)[0])
    assert not torch.equal(plain(INPUTS).logits, capped(INPUTS).logits)


def test_clip_scales_the_logits_of_a_key_head_whatever_the_blocks(tiny_model):
    model = tiny_model(num_hidden_layers=1, **MODERN)
    for name, parameter in model.named_parameters():
        if name.endswith((".bias", ".sinks")):
            parameter.data.normal_()
    before = measure_max_logits(model, input_ids=INPUTS)
    sinks = model.model.layers[0].self_attn.sinks.clone()
    groups = before.view(3, 2).amax(dim=1)  # the query heads that share a key head
    threshold = groups.median().item()
    qk_clip(model, before, threshold)
    expected = before * (threshold / groups.clamp(min=threshold)).repeat_interleave(2)
    torch.testing.assert_close(measure_max_logits(model, input_ids=INPUTS), expected)
    assert torch.equal(model.model.layers[0].self_attn.sinks, sinks)
    with pytest.raises(ValueError, match="must not have `qk_norm`"):
        qk_clip(tiny_model(qk_norm=True), before.expand(2, -1), threshold)


@pytest.mark.parametrize("values", [{"use_bias": True}, {**MODERN, "qk_norm": True}])
def test_weight_decay_is_for_matrices(tiny_model, tmp_path, values):
    trainer = LSGPTTrainer(tiny_model(**values), TrainingArguments(tmp_path, weight_decay=0.1, use_cpu=True))
    groups = trainer.create_optimizer().param_groups
    decays = {id(parameter): group["weight_decay"] for group in groups for parameter in group["params"]}
    for name, parameter in trainer.model.named_parameters():
        assert decays[id(parameter)] == (0.1 if parameter.ndim == 2 else 0.0), name
    # The day when this fails, `LSGPTTrainer` need no longer do it.
    decayed_by_default = Trainer.get_decay_parameter_names(trainer, trainer.model)
    assert any(name.endswith(".sinks") for name in decayed_by_default) == trainer.model.config.attention_sinks
