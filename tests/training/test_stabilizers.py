"""Every remedy changes what it should, and nothing else."""

import functools

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AttentionInterface,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from lsgpt import LSGPTForTokenClassification, measure_max_logits
from lsgpt.modeling_lsgpt import ALL_ATTENTION_FUNCTIONS
from lsgpt.studies.compare import resolve_arm
from lsgpt.studies.study import join_arm
from lsgpt.training import (
    LogitTelemetryCallback,
    LSGPTTrainer,
    adagc_optimizer,
    attend_in_float32,
    build_trainer,
    parse_arguments,
    qk_clip,
)


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


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_z_loss_survives_smoothing_and_accumulation(tiny_model, tmp_path, smoothing):
    """Two micro-batches with different numbers of labels make the gradients of one batch; evaluation is left alone."""
    labels = INPUTS.clone()
    labels[0, :10] = -100
    args = TrainingArguments(tmp_path, use_cpu=True, report_to="none", label_smoothing_factor=smoothing)
    trainer = LSGPTTrainer(tiny_model(**MODERN).train(), args, z_loss=0.01)
    model = trainer.model
    logits = model(INPUTS).logits[:, :-1]
    targets = (1 - smoothing) * torch.nn.functional.one_hot(INPUTS[:, 1:], 97) + smoothing / 97
    losses = -(targets * logits.log_softmax(-1)).sum(-1) + 0.01 * logits.exp().sum(-1).log() ** 2
    losses[labels[:, 1:] != -100].mean().backward()
    expected = model.lm_head.weight.grad.clone()
    model.zero_grad()
    for row in range(2):
        inputs = {"input_ids": INPUTS[row : row + 1], "labels": labels[row : row + 1]}
        trainer.compute_loss(model, inputs, num_items_in_batch=(labels[:, 1:] != -100).sum()).backward()
    torch.testing.assert_close(model.lm_head.weight.grad, expected, rtol=1e-4, atol=1e-6)
    model.eval()
    plain = LSGPTTrainer(model, args)
    batch = {"input_ids": INPUTS, "labels": labels}
    assert torch.equal(trainer.compute_loss(model, dict(batch)), plain.compute_loss(model, dict(batch)))


def test_what_another_loss_would_ignore_is_refused(tiny_model, tmp_path):
    args = TrainingArguments(tmp_path, use_cpu=True, report_to="none", label_smoothing_factor=0.1)
    model = tiny_model()
    for name, value in (("z_loss", 1e-4), ("teacher", model)):
        with pytest.raises(ValueError, match=f"`compute_loss_func` must be unset with `{name}`"):
            LSGPTTrainer(model, args, compute_loss_func=print, **{name: value})
        with pytest.raises(ValueError, match=f"`compute_loss_func` must be unset with `{name}`"):
            LSGPTTrainer(model, args, *[None] * 5, print, **{name: value})
    with pytest.raises(ValueError, match="`label_smoothing_factor` must be 0 with a `teacher`"):
        LSGPTTrainer(model, args, teacher=model)
    with pytest.raises(ValueError, match="`label_smoothing_factor` must be 0 with a `compute_loss_func`"):
        LSGPTTrainer(model, args, compute_loss_func=print)


@pytest.mark.parametrize("kind", ["another model", "classifier"])
def test_models_without_that_loss_have_the_stock_one(tiny_config, tmp_path, kind):
    if kind == "classifier":
        model = LSGPTForTokenClassification(tiny_config(classifier_dropout=0.0, num_labels=5)).train()
        batch = {"input_ids": INPUTS, "labels": INPUTS % 5}
    else:
        sizes = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        model, batch = LlamaForCausalLM(LlamaConfig(vocab_size=97, **sizes)).train(), {"input_ids": INPUTS}
        batch["labels"] = INPUTS
    args = TrainingArguments(tmp_path, use_cpu=True, report_to="none", label_smoothing_factor=0.5)
    losses = [cls(model, args).compute_loss(model, dict(batch)).item() for cls in (Trainer, LSGPTTrainer)]
    plain = TrainingArguments(tmp_path, use_cpu=True, report_to="none")
    assert losses[0] == losses[1] != Trainer(model, plain).compute_loss(model, dict(batch)).item()
    for name, value in (("z_loss", 1e-4), ("teacher", model)):
        with pytest.raises(ValueError, match=f"`{name}` must be unset for models other than LSGPTForCausalLM"):
            LSGPTTrainer(model, plain, **{name: value})


def test_a_model_in_adapters_has_its_own_loss(tiny_model, tmp_path):
    model = get_peft_model(tiny_model().train(), LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
    args = TrainingArguments(tmp_path, use_cpu=True, report_to="none")
    losses = [
        LSGPTTrainer(model, args, z_loss=weight).compute_loss(model, {"input_ids": INPUTS, "labels": INPUTS}).item()
        for weight in (0.0, 1.0)
    ]
    assert losses[1] > losses[0] + 1


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"num_global_heads": 6},
        {"num_global_heads": 0},
        {"num_key_value_heads": 3},
        MODERN,
        MODERN | {"attention_sinks": "full_window"},
    ],
)
def test_float32_attention(tiny_model, values, monkeypatch):
    """Under autocast the error of the attention is gone, that of the projections stays; without it nothing changes."""
    model = tiny_model(**values)
    plain = model(INPUTS).logits
    with torch.autocast("cpu", torch.bfloat16):
        low = model(INPUTS).logits
    attend_in_float32(model)
    assert torch.equal(model(INPUTS).logits, plain)
    found, forward = [], ALL_ATTENTION_FUNCTIONS["sdpa"]

    @functools.wraps(forward)
    def attend(module, *args, sliding_window=None, s_aux=None, **kwargs):
        assert (s_aux is not None) == bool(model.config.attention_sinks and sliding_window is not None)
        tensors = [x for x in (*args, s_aux) if isinstance(x, torch.Tensor) and x.is_floating_point()]
        found.extend((x.dtype, torch.is_autocast_enabled("cpu")) for x in tensors)
        return forward(module, *args, sliding_window=sliding_window, s_aux=s_aux, **kwargs)

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


def test_float32_does_not_hide_that_a_function_ignores_sinks(tiny_model, monkeypatch):
    """A function of one's own, without masks of its own, works in float32, but not if it would ignore sinks."""

    def attend(module, query, key, value, attention_mask, **kwargs):
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=kwargs["scaling"])

    functions = {**AttentionInterface._global_mapping, "without_sinks": attend}
    monkeypatch.setattr(AttentionInterface, "_global_mapping", functions)
    model = tiny_model(**MODERN)
    model.set_attn_implementation("without_sinks")
    for name in ("without_sinks", "without_sinks_in_float32"):
        with pytest.raises(ValueError, match=f'`attention_sinks` needs .* `s_aux`; "{name}" has none'):
            model(INPUTS)
        if name == "without_sinks":
            attend_in_float32(model)
    plain, model = tiny_model(), tiny_model()
    model.set_attn_implementation("without_sinks")
    attend_in_float32(model)
    torch.testing.assert_close(model(INPUTS).logits, plain(INPUTS).logits, rtol=1e-5, atol=1e-5)


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
    values = {"learning_rate": 3e-4, "adam_beta2": 0.95, "adam_epsilon": 1e-7, "max_grad_norm": 0}
    args = TrainingArguments(tmp_path, use_cpu=True, optim_args="beta=0.9, lambda_abs=2", **values)
    optimizer_type, kwargs = adagc_optimizer(args)
    assert kwargs == {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-7, "beta": 0.9, "lambda_abs": 2.0}
    settings = optimizer_type([torch.nn.Parameter(torch.ones(2))], **kwargs).defaults
    assert (settings["lambda_rel"], settings["warmup_steps"]) == (1.05, 100)  # as the docstring says


@pytest.mark.parametrize(
    "given", ["lambda_rel", "beta=high", "lambda=1.1", "beta=1=2", "beta=2", "maximize=1", "weight_decay=0.01"]
)
def test_what_adagc_cannot_take_is_named(tmp_path, given):
    args = TrainingArguments(tmp_path, use_cpu=True, optim_args=given, max_grad_norm=0)
    with pytest.raises(ValueError, match=f"`optim_args` must be settings of AdaGC, .*; got '{given}'"):
        adagc_optimizer(args)


@pytest.mark.parametrize("how", ["true", "1", "--fsdp", "DeepSpeed"])
def test_adagc_with_sharded_gradients_is_refused(tmp_path, monkeypatch, how):
    args = TrainingArguments(tmp_path, use_cpu=True, max_grad_norm=0, fsdp=True if how == "--fsdp" else None)
    if how in ("true", "1"):
        monkeypatch.setenv("ACCELERATE_USE_FSDP", how)
    elif how == "DeepSpeed":
        args.deepspeed_plugin = object()  # DeepSpeed itself may not be installed
    with pytest.raises(ValueError, match="AdaGC must not be combined with FSDP or DeepSpeed"):
        adagc_optimizer(args)


SMALL = "{hidden_size: 24, num_hidden_layers: 1, max_position_embeddings: 64, vocab_size: 300}"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "a.txt"
    file.write_text("".join(f"line {i} of {i * i}\n" for i in range(2000)))
    return str(file)


METHODS = ("qknorm", "softcap", "zloss", "qkclip", "adagc", "fp32")


@pytest.mark.parametrize("name", [None, *METHODS])
def test_arms_switch_on_one_method_and_off_again(text, tmp_path, name):
    """What a run with one of them has, and the others lack."""
    fields = ["--dataset_name", text, "--config_overrides", SMALL, "--block_size", "32", "--use_cpu", "true"]
    base = parse_arguments("demo", fields).recipe
    arguments = resolve_arm(base, f"ls-{name}" if name else "ls")
    arguments.training.output_dir = str(tmp_path)
    trainer = build_trainer(arguments)
    config, model = trainer.model.config, trainer.model
    telemetry = [c for c in trainer.callback_handler.callbacks if isinstance(c, LogitTelemetryCallback)]
    found = {
        "qknorm": config.qk_norm,
        "softcap": config.attn_logit_softcapping == 50.0 and config._attn_implementation == "eager",
        "zloss": trainer.z_loss == 1e-4,
        "qkclip": (telemetry[0].on_explosion, telemetry[0].threshold, telemetry[0].every_n_steps)
        == ("clip", 100.0, 1),
        "adagc": trainer.optimizer_cls_and_kwargs is not None and trainer.args.max_grad_norm == 0.0,
        "fp32": model.config._attn_implementation == "sdpa_in_float32",
    }
    assert {other for other, has in found.items() if has} == ({name} if name else set())
    assert (telemetry[0].threshold, telemetry[0].log_every_n_steps) == (100.0, 50)
    trainer.args.max_steps = 2
    assert trainer.train().global_step == 2
    off = {"z_loss": 0, "on_explosion": "warn", "optim": "adamw_torch", "max_grad_norm": 1.0}
    off["attn_implementation"] = None
    off["config_overrides"] = {"qk_norm": False, "attn_logit_softcapping": None}
    again = join_arm(arguments.recipe, "off", off)
    without = join_arm(base, "off", off)
    assert again[:3] == without[:3] and again.build_config().to_dict() == without.build_config().to_dict()
    assert not again.uses_adagc and again.training.max_grad_norm == 1.0


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
