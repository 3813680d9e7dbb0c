"""Averages of the weights: what they are, resuming, saving and evaluating them, and that they change nothing else."""

import logging
import math
import random
import shutil
from pathlib import Path

import fresh
import numpy as np
import pytest
import torch
from accelerate.utils.deepspeed import HfDeepSpeedConfig
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from trainers import random_rows, trainer_of
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback
from transformers.integrations import deepspeed
from trl import SFTConfig, SFTTrainer

from lsgpt import LSGPTConfig, LSGPTForCausalLM
from lsgpt.training import AVERAGES, AveragedWeightsCallback, LSGPTTrainer, averaging, parse_arguments
from lsgpt.training.averaging import check_averages, initial_share, read_averaging
from lsgpt.training.data import train_tokenizer
from lsgpt.training.folders import find_checkpoint


SETTINGS = [
    ("ema", {"decay": 0.7}),
    ("ema", {"decay": 0.7, "every_n_steps": 4}),
    ("ema-warmup", {"decay": 0.3, "every_n_steps": 2}),  # which (1 + n) / (10 + n) passes in the third update
    ("bema", {"every_n_steps": 1}),
    ("bema", {"every_n_steps": 4}),  # the last two of the six steps are not in it
    ("bema", {"every_n_steps": 2, "kappa": 0.3, "eta": 0.6, "rho": 2, "gamma": 3}),
]


def gpt2(seed=0, **values) -> GPT2LMHeadModel:
    """A small GPT-2 with dropout, so that random numbers count; its output matrix is its embedding."""
    torch.manual_seed(seed)
    return GPT2LMHeadModel(GPT2Config(vocab_size=97, n_positions=64, n_embd=32, n_layer=2, n_head=2, **values))


def test_the_documented_defaults_are_those_of_the_code():
    text = (Path(__file__).parents[2] / "docs" / "averaging-and-losses.md").read_text(encoding="utf-8")
    rows = {cells[1].strip("` "): cells[3] for line in text.splitlines() if len(cells := line.split("|")) == 5}
    for kind, defaults in AVERAGES.items():
        expected = {f"`{name}` {value:g}" for name, value in defaults.items()}
        assert set(rows[kind].strip().split(", ")) == expected


@pytest.mark.parametrize("loads_best", [True, False])
def test_the_saved_average_belongs_to_the_model_at_the_end(tmp_path, loads_best):
    """The lowest loss is not that of the last checkpoint."""
    callback = AveragedWeightsCallback("ema", decay=0.5)
    best = {
        "load_best_model_at_end": loads_best,
        "metric_for_best_model": "eval_averaged_loss",
        "greater_is_better": False,
    }
    steps = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    trainer = trainer_of(gpt2(), tmp_path, learning_rate=1e-2, eval_dataset=random_rows()[:8], **best, **steps)
    callback.attach(trainer)
    trainer.train()
    logs = {log["step"]: log["eval_averaged_loss"] for log in trainer.state.log_history if "eval_loss" in log}
    number = min(logs, key=logs.__getitem__)
    assert number < 6 and trainer.state.best_model_checkpoint.endswith(f"checkpoint-{number}")
    averages = load_file(tmp_path / f"checkpoint-{number if loads_best else 6}" / "averaged.safetensors")
    saved = load_file(tmp_path / "averaged" / "model.safetensors")
    assert saved and all(torch.equal(saved[name], averages[f"average.{name}"]) for name in saved)


def test_an_average_that_would_never_be_updated_is_refused(tmp_path):
    train(gpt2(), tmp_path / "six", AveragedWeightsCallback("bema", every_n_steps=6))
    assert (tmp_path / "six" / "averaged").exists()  # updated in the last step
    with pytest.raises(ValueError, match=r"`every_n_steps` of the average must be at most the 6 steps .* got 7"):
        train(gpt2(), tmp_path / "seven", AveragedWeightsCallback("bema", every_n_steps=7))
    assert not (tmp_path / "seven" / "averaged").exists()


class StopAfter(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == self.step


@pytest.mark.parametrize("early", ["stopped", "best"])
def test_a_model_from_before_the_first_update_has_no_average(tmp_path, caplog, monkeypatch, early):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    monkeypatch.setattr(logging.getLogger("lsgpt"), "propagate", True)
    options, callback = {}, AveragedWeightsCallback("ema", every_n_steps=4)
    if early == "best":
        options = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": False}
        options |= {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    trainer = trainer_of(gpt2(), tmp_path, learning_rate=1e-2, eval_dataset=random_rows()[:8], **options)
    callback.attach(trainer)
    if early == "stopped":
        trainer.add_callback(StopAfter(3))
    trainer.train()
    assert trainer.state.best_model_checkpoint is None or trainer.state.best_model_checkpoint.endswith("-2")
    assert "no averaged model is saved" in caplog.text and not (tmp_path / "averaged").exists()
    assert "eval_averaged_loss" not in trainer.evaluate()


class Remember(TrainerCallback):
    """The trained weights at the start, as those of step 0, and after every step."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.weights = [copies(model)]

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.weights.append(copies(model))


def copies(model):
    return {name: weight.detach().clone() for name, weight in model.named_parameters() if weight.requires_grad}


def train(model, folder, *callbacks, resume=None, **arguments):
    trainer = trainer_of(model, folder, *callbacks, **{"learning_rate": 1e-2, **arguments})
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def plain_average(steps, kind, every_n_steps=None, decay=None, kappa=0.5, eta=0.2, rho=10, gamma=1):
    """The average of weights by the published formulas, in float64."""
    every_n_steps = every_n_steps or (400 if kind == "bema" else 1)
    start = average = ema = steps[0].double()
    updates = 0
    for t, weight in enumerate(steps):
        if t == 0 or t % every_n_steps:
            continue
        updates += 1
        if kind == "bema":
            b = (rho + gamma * t) ** -kappa
            a = (rho + gamma * t) ** -eta
            ema = (1 - b) * ema + b * weight.double()
            average = ema + a * (weight.double() - start)
        else:
            d = min(decay, (1 + updates) / (10 + updates)) if kind == "ema-warmup" else decay
            average = d * average + (1 - d) * weight.double()
    return average


@pytest.mark.parametrize(("kind", "settings"), SETTINGS)
def test_how_much_of_the_initial_weights_is_left(kind, settings):
    steps = [torch.ones(()), *torch.zeros(9)]
    share = initial_share(read_averaging({"kind": kind, **settings}), 9)
    assert share == pytest.approx(plain_average(steps, kind, **settings).item(), abs=1e-12)
    assert abs(share) > 1e-4


def assert_averages(callback, remembered, kind, **settings):
    """Those of a plain loop: an update rounds its terms to float32, by 6e-8 of their size, and there are six."""
    assert callback.averages.keys() == remembered.weights[0].keys()
    for name, average in callback.averages.items():
        expected = plain_average([weights[name] for weights in remembered.weights], kind, **settings)
        largest = max(weights[name].abs().max().item() for weights in remembered.weights)
        assert average.dtype == torch.float32
        torch.testing.assert_close(average.double(), expected, rtol=0, atol=1e-6 * largest)


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize(("kind", "settings"), SETTINGS)
def test_averages_are_those_of_a_plain_loop_and_are_saved_as_a_model(tmp_path, kind, settings):
    callback, remembered, model = AveragedWeightsCallback(kind, **settings), Remember(), gpt2()
    train(model, tmp_path, callback, remembered)
    assert_averages(callback, remembered, kind, **settings)
    distance = max((callback.averages[name] - weight).abs().max() for name, weight in copies(model).items())
    assert distance > 1e-3  # or else it would not have been tried
    assert_equal(copies(model), remembered.weights[-1])  # the raw weights are in place
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "averaged")
    assert saved.lm_head.weight is saved.transformer.wte.weight
    assert_equal(copies(saved), callback.averages)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of six steps with a checkpoint of the third, between two updates, and its model and averages."""
    folder, model = tmp_path_factory.mktemp("whole"), gpt2()
    callback = AveragedWeightsCallback("bema", every_n_steps=2)
    train(model, folder, callback, save_strategy="steps", save_steps=3)
    return folder, model, callback


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_a_training_that_resumes_has_the_same_weights_and_averages(whole, tmp_path, is_elsewhere):
    """In the folder of the run, and in another one, with the checkpoint named in the arguments."""
    folder, wanted_model, wanted = whole
    checkpoint = shutil.copytree(folder / "checkpoint-3", tmp_path / "checkpoint-3")
    callback, model = AveragedWeightsCallback("bema", every_n_steps=2), gpt2(seed=1)
    arguments = {"resume_from_checkpoint": str(checkpoint)} if is_elsewhere else {}
    train(model, tmp_path / "new" if is_elsewhere else tmp_path, callback, resume=str(checkpoint), **arguments)
    assert_equal(callback.averages, wanted.averages)
    assert_equal(copies(model), copies(wanted_model))


@pytest.mark.parametrize("fault", ["missing", "of another step", "of another kind", "without the argument"])
def test_a_checkpoint_without_its_averages_is_an_error(whole, tmp_path, fault):
    folder, _, _ = whole
    checkpoint = shutil.copytree(folder / "checkpoint-3", tmp_path / "checkpoint-3")
    file = checkpoint / "averaged.safetensors"
    message = rf"there are none for these weights of step 3: looked for {file}\. If the checkpoint is in another"
    output = tmp_path
    if fault == "missing":
        file.unlink()
    elif fault == "of another step":
        shutil.copy(folder / "checkpoint-6" / "averaged.safetensors", file)
    elif fault == "of another kind":
        message = rf"`kind` of average must be bema, as in the checkpoint {checkpoint}; got ema-warmup"
    else:
        output = tmp_path / "new"
        message = rf"looked for {output / 'checkpoint-3' / 'averaged.safetensors'}\. If the checkpoint is in another"
    kind = "ema-warmup" if fault == "of another kind" else "bema"
    with pytest.raises(ValueError, match=message):
        train(gpt2(), output, AveragedWeightsCallback(kind, every_n_steps=2), resume=str(checkpoint))


def test_a_checkpoint_is_whole_or_absent(whole, tmp_path, monkeypatch):
    """Nothing is left of the file that was written first, and of a run that is killed meanwhile nothing else."""
    folder, _, callback = whole
    assert not list(folder.glob("**/*.unfinished"))
    tensors = load_file(folder / "checkpoint-6" / "averaged.safetensors")
    assert {name.partition(".")[0] for name in tensors} == {"average", "ema", "start"}
    assert all(torch.equal(tensors[f"average.{name}"], value) for name, value in callback.averages.items())

    def fail(tensors, file, metadata):
        Path(file).write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr("lsgpt.training.averaging.save_file", fail)
    with pytest.raises(OSError, match="no space left"):
        train(gpt2(), tmp_path, AveragedWeightsCallback(), save_strategy="steps", save_steps=3)
    assert [file.name for file in tmp_path.glob("checkpoint-3/averaged*")] == ["averaged.unfinished"]


KILLED = """
import os, sys
from test_averaging import train_and_save
from lsgpt.training import averaging

save_file, calls = averaging.save_file, []

def save_or_die(*args):
    calls.append(args)
    if len(calls) == 2:
        os._exit(9)
    save_file(*args)

averaging.save_file = save_or_die
train_and_save(sys.argv[1])
"""


def train_and_save(folder, resume=None):
    """Six steps of an LSGPT, with one checkpoint at a time."""
    torch.manual_seed(0)
    config = LSGPTConfig(vocab_size=97, hidden_size=24, num_hidden_layers=1, num_attention_heads=2, num_global_heads=1)
    options = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1, "trainer_type": LSGPTTrainer}
    train(LSGPTForCausalLM(config), folder, AveragedWeightsCallback("ema", decay=0.7), resume=resume, **options)


def test_a_run_that_is_killed_while_it_saves_averages_can_be_resumed(tmp_path):
    """The only checkpoint that is kept stays until the next one is complete."""
    here = Path(__file__).parent
    code = f"import sys; sys.path.append({str(here.parent)!r})\n{KILLED}"  # for the modules of tests
    killed = fresh.Program("-c", code, tmp_path / "killed", cwd=here)
    assert killed.wait() == 9, killed.errors
    checkpoint = find_checkpoint(tmp_path / "killed")
    assert checkpoint.name == "checkpoint-2"
    check_averages(checkpoint, "ema")
    train_and_save(tmp_path / "killed", str(checkpoint))
    train_and_save(tmp_path / "whole")
    for file in ("averaged/model.safetensors", "checkpoint-6/averaged.safetensors"):
        assert_equal(load_file(tmp_path / "killed" / file), load_file(tmp_path / "whole" / file))


@pytest.mark.parametrize("trainer_type", [Trainer, LSGPTTrainer])
def test_averages_are_saved_once_in_each_checkpoint(tiny_model, tmp_path, monkeypatch, trainer_type):
    """Also in those without an optimizer, and in a second training whose steps have the same numbers."""
    saved = []
    monkeypatch.setattr(averaging, "save_file", lambda *args: saved.append(args[1].parent.name) or save_file(*args))
    model, callback = tiny_model().train(), AveragedWeightsCallback()
    for save_only_model in (False, True):
        options = {"save_strategy": "steps", "save_steps": 3, "save_only_model": save_only_model}
        train(model, tmp_path, callback, trainer_type=trainer_type, **options)
    assert saved == 2 * ["checkpoint-3", "checkpoint-6"]


def test_a_checkpoint_that_lacks_averages_is_not_the_only_one(tmp_path):
    with pytest.raises(ValueError, match="which has no averaged weights to continue; or resume from an earlier"):
        check_averages(tmp_path, "ema")


def test_each_training_begins_a_new_average(tmp_path):
    callback, remembered = AveragedWeightsCallback("ema", decay=0.7), Remember()
    trainer = train(gpt2(), tmp_path, callback, remembered)
    first = copies(trainer.model)
    trainer.train()
    assert_equal(remembered.weights[0], first)
    assert_averages(callback, remembered, "ema", decay=0.7)


def test_averages_belong_to_the_model_that_was_trained_last(tmp_path):
    """Not to the model of an earlier Trainer with the same callback, whose parameters have the same names."""
    callback = AveragedWeightsCallback("ema", decay=0.7)
    options = {"max_steps": 1, "eval_dataset": random_rows()[:4]}
    first, last = (trainer_of(gpt2(), tmp_path, callback, **options) for _ in range(2))
    for trainer in (first, last):
        callback.attach(trainer)
        trainer.train()
        assert "eval_averaged_loss" in trainer.evaluate()
    assert "eval_averaged_loss" not in first.evaluate()
    with pytest.raises(ValueError, match="`model` must be the one that was trained last"):
        callback.save_pretrained(first.model, tmp_path / "x")
    first.train()
    callback.save_pretrained(first.model, tmp_path / "x")


def test_frozen_parameters_and_buffers_are_the_models_own(tmp_path):
    model = gpt2()
    model.register_buffer("num_batches", torch.zeros(()))

    def count(module, *_):
        module.num_batches += 1

    model.register_forward_hook(count)
    model.transformer.wte.requires_grad_(False)
    model.transformer.h[0].requires_grad_(False)
    callback, remembered = AveragedWeightsCallback("ema", decay=0.7), Remember()
    train(model, tmp_path, callback, remembered)
    assert_averages(callback, remembered, "ema", decay=0.7)
    saved = load_file(tmp_path / "averaged" / "model.safetensors")
    assert saved["num_batches"] == 12
    for name, weight in model.named_parameters():
        assert torch.equal(saved[name], callback.averages[name] if weight.requires_grad else weight)
    assert {name for name in callback.averages if "wte" in name or ".h.0." in name} == set()


def test_lora(tmp_path):
    """The adapters alone are averaged, saved, and there again when a training resumes."""

    def model(seed):
        base = gpt2()
        torch.manual_seed(seed)
        return get_peft_model(base, LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.1))

    callback, remembered, adapted = AveragedWeightsCallback("ema", decay=0.7), Remember(), model(1)
    train(adapted, tmp_path, callback, remembered, save_strategy="steps", save_steps=3)
    assert_averages(callback, remembered, "ema", decay=0.7)
    assert all("lora_" in name for name in callback.averages)
    loaded = PeftModel.from_pretrained(gpt2(), tmp_path / "averaged", is_trainable=True)
    assert_equal(copies(loaded), callback.averages)
    resumed, again = AveragedWeightsCallback("ema", decay=0.7), model(2)
    train(again, tmp_path, resumed, resume=str(tmp_path / "checkpoint-3"))
    assert_equal(resumed.averages, callback.averages)
    assert_equal(copies(again), copies(adapted))


def test_averages_of_bfloat16_weights_are_in_float32(tmp_path):
    """What is smaller than a weight's last digit adds up in the average; the averaged model has the weights' type."""
    callback, remembered, model = AveragedWeightsCallback("ema", decay=0.9), Remember(), gpt2().bfloat16()
    train(model, tmp_path, callback, remembered)
    assert_averages(callback, remembered, "ema", decay=0.9)
    raw, rounded = copies(model), {name: average.bfloat16() for name, average in callback.averages.items()}
    with callback.averaged_weights(model):
        assert_equal(copies(model), rounded)
        model.requires_grad_(False)
    assert_equal(copies(model.requires_grad_()), raw)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "averaged", dtype="auto")
    assert_equal(copies(saved), rounded)


def test_the_raw_weights_come_back_after_an_error(tmp_path):
    callback, model = AveragedWeightsCallback("ema", decay=0.7), gpt2()
    train(model, tmp_path, callback)
    raw = copies(model)
    with pytest.raises(KeyError), callback.averaged_weights(model):
        raise KeyError("anything")
    assert_equal(copies(model), raw)


EVALUATION = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4}


def logs_of(trainer, key):
    return [log[key] for log in trainer.state.log_history if key in log]


def test_evaluating_averages_leaves_the_training_alone(tmp_path):
    """Weights, losses and raw metrics are those of a run without averages, to the bit."""
    held_out = random_rows()[:8]

    def run(has_average):
        trainer = trainer_of(gpt2(), tmp_path, eval_dataset=held_out, learning_rate=1e-2, **EVALUATION)
        if has_average:
            callback = AveragedWeightsCallback("ema", decay=0.7)
            callback.attach(trainer)
            callback.attach(trainer)  # once more is nothing more
            trainer.args.metric_for_best_model, trainer.args.greater_is_better = "averaged_loss", False
        trainer.train()
        return trainer

    plain, both = run(False), run(True)
    for key in ("eval_loss", "loss", "grad_norm"):
        assert logs_of(both, key) == logs_of(plain, key) != []
    assert_equal(copies(both.model), copies(plain.model))
    assert len(logs_of(both, "eval_averaged_loss")) == len(logs_of(both, "eval_runtime")) == 3
    assert both.state.best_metric == min(logs_of(both, "eval_averaged_loss"))

    # The figure is that of the averaged model, and not of the raw one.
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "averaged")
    expected = trainer_of(saved, tmp_path, eval_dataset=held_out, **EVALUATION).evaluate()["eval_loss"]
    assert logs_of(both, "eval_averaged_loss")[-1] == expected != logs_of(both, "eval_loss")[-1]

    # After the training, by name, and of other data.
    metrics = both.evaluate({"first": held_out[:4], "last": held_out[4:]})
    assert {"eval_first_loss", "eval_first_averaged_loss", "eval_last_averaged_loss"} <= metrics.keys()
    mean = (metrics["eval_first_averaged_loss"] + metrics["eval_last_averaged_loss"]) / 2
    assert mean == pytest.approx(expected, rel=1e-6)
    assert [name for name in both.predict(held_out).metrics if "averaged" in name] == []


def test_evaluating_averages_draws_no_random_numbers(tmp_path):
    """A metric of sampled texts, say, draws the same numbers for the raw weights as without averages."""
    drawn = []

    def sample(prediction):
        drawn.append((random.random(), np.random.rand(), torch.rand(()).item()))
        return {}

    trainer = trainer_of(gpt2(), tmp_path, eval_dataset=random_rows()[:8], **EVALUATION)
    trainer.compute_metrics = sample
    AveragedWeightsCallback("ema", decay=0.7).attach(trainer)
    trainer.train()
    assert len(drawn) == 6 and drawn[::2] == drawn[1::2] and len(set(drawn)) == 3


def test_metrics_that_trl_collects_are_of_the_raw_weights(tiny_model, tmp_path):
    tokenizer, logs = train_tokenizer(["a few words to train on"], 300), []
    rows = Dataset.from_list([{"text": f"{'a few words ' * n}to train on"} for n in range(1, 9)])
    for attached in (False, True):
        options = {
            "eval_strategy": "steps",
            "eval_steps": 2,
            "logging_steps": 2,
            "learning_rate": 1e-2,
            "max_steps": 4,
        }
        args = SFTConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none", save_strategy="no", **options)
        trainer = SFTTrainer(
            tiny_model(vocab_size=300), args, train_dataset=rows, eval_dataset=rows, processing_class=tokenizer
        )
        if attached:
            AveragedWeightsCallback("ema", decay=0.9).attach(trainer)
        trainer.train()
        logs.append([log for log in trainer.state.log_history if "eval_loss" in log])
    for plain, averaged in zip(*logs, strict=True):
        assert averaged["eval_averaged_loss"] != plain["eval_loss"]
        for name in ("eval_loss", "eval_entropy", "eval_mean_token_accuracy"):
            assert averaged[name] == plain[name]


def test_two_averages_of_one_training(tmp_path):
    held_out, remembered = random_rows()[:8], Remember()
    trainer = trainer_of(gpt2(), tmp_path, remembered, eval_dataset=held_out, **EVALUATION)
    ema = AveragedWeightsCallback("ema", decay=0.7, name="ema")
    bema = AveragedWeightsCallback("bema", every_n_steps=2, name="bema")
    for callback in (ema, bema):
        callback.attach(trainer)
    trainer.train()
    assert_averages(ema, remembered, "ema", decay=0.7)
    assert_averages(bema, remembered, "bema", every_n_steps=2)
    for callback in (ema, bema):
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / callback.name)
        expected = trainer_of(saved, tmp_path, eval_dataset=held_out, **EVALUATION).evaluate()["eval_loss"]
        assert logs_of(trainer, f"eval_{callback.name}_loss")[-1] == expected
    assert {name for log in trainer.state.log_history for name in log if name.endswith("_loss")} == {
        "eval_loss",
        "eval_ema_loss",
        "eval_bema_loss",
        "train_loss",
    }
    with pytest.raises(ValueError, match="two AveragedWeightsCallbacks of one Trainer must have different names"):
        AveragedWeightsCallback(name="ema").attach(trainer)


def test_a_compiled_model(tmp_path, fresh_compiler):
    callback, remembered = AveragedWeightsCallback("ema", decay=0.7), Remember()
    trainer = trainer_of(
        gpt2(),
        tmp_path,
        remembered,
        eval_dataset=random_rows()[:8],
        torch_compile=True,
        torch_compile_backend="eager",
        **EVALUATION,
    )
    callback.attach(trainer)
    trainer.train()
    assert type(trainer.model_wrapped).__name__ == "OptimizedModule"
    assert_averages(callback, remembered, "ema", decay=0.7)
    assert_equal(copies(AutoModelForCausalLM.from_pretrained(tmp_path / "averaged")), callback.averages)
    compiled = torch.compile(trainer.model, backend="eager")  # has a prefix before its names
    with callback.averaged_weights(compiled):
        assert_equal(copies(trainer.model), callback.averages)
    averages = copies(AutoModelForCausalLM.from_pretrained(tmp_path / "averaged"))
    # So does a model whose activations FSDP computes again.
    apply_activation_checkpointing(trainer.model, check_fn=lambda module: isinstance(module, nn.LayerNorm))
    assert any("_checkpoint_wrapped_module" in name for name, _ in trainer.model.named_parameters())
    with callback.averaged_weights(trainer.model):
        names = {name: name.replace("_checkpoint_wrapped_module.", "") for name in copies(trainer.model)}
        assert_equal({names[name]: weight for name, weight in copies(trainer.model).items()}, averages)


class Bigrams(nn.Module):
    """A model that is none of Transformers'."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(97, 97)

    def forward(self, input_ids, labels=None):
        logits = self.table(input_ids)
        return {"loss": nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:]), "logits": logits}


def test_any_module(tmp_path):
    callback, remembered = AveragedWeightsCallback("ema", decay=0.7), Remember()
    train(Bigrams(), tmp_path, callback, remembered)
    assert_averages(callback, remembered, "ema", decay=0.7)
    assert_equal(load_file(tmp_path / "averaged" / "model.safetensors"), callback.averages)


def test_the_averaged_model_has_the_tokenizer(tmp_path):
    trainer = trainer_of(gpt2(), tmp_path, AveragedWeightsCallback("ema"))
    tokenizer = train_tokenizer([], 258)
    trainer.processing_class = tokenizer
    trainer.callback_handler.processing_class = tokenizer
    trainer.train()
    text = "any text"
    assert AutoTokenizer.from_pretrained(tmp_path / "averaged")(text).input_ids == tokenizer(text).input_ids


def test_an_lsgpt_with_the_code_and_whenever_asked(tiny_model, tmp_path):
    """The folder is a checkpoint like others; a model can be saved in the middle of the training, too."""
    callback, remembered, model = AveragedWeightsCallback("bema", every_n_steps=1), Remember(), tiny_model().train()

    class Save(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                callback.save_pretrained(model, tmp_path / "after-2")

    train(model, tmp_path, remembered, callback, Save())
    assert_averages(callback, remembered, "bema", every_n_steps=1)
    assert (tmp_path / "averaged" / "modeling_lsgpt.py").is_file()
    assert_equal(copies(AutoModelForCausalLM.from_pretrained(tmp_path / "averaged")), callback.averages)
    early = copies(AutoModelForCausalLM.from_pretrained(tmp_path / "after-2"))
    for name, weight in early.items():
        expected = plain_average([weights[name] for weights in remembered.weights[:3]], "bema", every_n_steps=1)
        torch.testing.assert_close(weight.double(), expected, rtol=0, atol=1e-6 * weight.abs().max().item())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "emma"}, "`kind` of average must be one of ema, ema-warmup, bema; got 'emma'; did you mean 'ema'"),
        ({"decay": 1.0}, "`decay` must be at least 0 and below 1; got 1.0"),
        ({"decay": math.nan}, "`decay` must be at least 0 and below 1; got nan"),
        ({"kind": "bema", "decay": 0.9}, "the average bema has the settings every_n_steps, kappa, .*; got 'decay'"),
        ({"kappa": 0.5}, "the average ema has the settings every_n_steps, decay; got 'kappa'"),
        ({"kind": "bema", "rho": 0.5}, "`rho` must be at least 1 and finite; got 0.5"),
        ({"kind": "bema", "eta": math.inf}, "`eta` must be at least 0 and finite; got inf"),
        ({"every_n_steps": 0}, "`every_n_steps` must be a whole number of at least 1; got 0"),
        ({"every_n_steps": 2.5}, "`every_n_steps` must be a whole number of at least 1; got 2.5"),
        ({"name": "a/b"}, "`name` must consist of letters, digits, _ and -, .*; got 'a/b'"),
    ],
)
def test_values_that_cannot_be(values, message):
    with pytest.raises(ValueError, match=message):
        AveragedWeightsCallback(**values)


def test_models_that_do_not_fit(tmp_path):
    callback, model = AveragedWeightsCallback(), gpt2()
    with pytest.raises(ValueError, match="there is no average yet: it starts with"):
        callback.save_pretrained(model, tmp_path / "x")
    train(model, tmp_path, callback)
    model.transformer.ln_f.requires_grad_(False)
    with pytest.raises(ValueError, match=r"2 are not, such as 'transformer\.ln_f\.bias'"):
        callback.save_pretrained(model, tmp_path / "x")
    model.requires_grad_(False)
    trainer = trainer_of(model, tmp_path, callback)
    trainer.state.global_step = 0
    with pytest.raises(ValueError, match="`model` must have a trainable parameter"):
        callback.on_train_begin(trainer.args, trainer.state, trainer.control, model=model)


def test_zero3_is_refused(tmp_path):
    """Here Transformers only believes that it is used: DeepSpeed itself may not be installed."""
    trainer = trainer_of(gpt2(), tmp_path)
    config = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})
    deepspeed.set_hf_deepspeed_config(config)
    try:
        with pytest.raises(ValueError, match="must not be combined with DeepSpeed's ZeRO-3"):
            AveragedWeightsCallback().on_train_begin(trainer.args, trainer.state, trainer.control, model=trainer.model)
    finally:
        deepspeed.unset_hf_deepspeed_config()


def test_fsdp1_is_refused(tmp_path, monkeypatch):
    """A model that passes for one, because FSDP1 wraps only where there are several processes."""
    trainer = trainer_of(gpt2(), tmp_path)
    monkeypatch.setattr(averaging, "FullyShardedDataParallel", nn.Embedding)
    with pytest.raises(ValueError, match="`fsdp_version` must be 2 for averages of the weights; got 1"):
        AveragedWeightsCallback().on_train_begin(trainer.args, trainer.state, trainer.control, model=trainer.model)


def test_hyperparameter_search_is_refused(tmp_path):
    trainer = trainer_of(gpt2(), tmp_path)
    trainer.state.is_hyper_param_search = True
    with pytest.raises(ValueError, match="must not be combined with `hyperparameter_search`"):
        AveragedWeightsCallback().on_train_begin(trainer.args, trainer.state, trainer.control, model=trainer.model)


def test_recipes_refuse_it_with_adapters_that_are_merged(tiny_model, tmp_path):
    tiny_model(max_position_embeddings=512).save_pretrained(tmp_path / "checkpoint")
    options = ["--model_name_or_path", str(tmp_path / "checkpoint"), "--use_cpu", "true", "--averaging", "ema"]
    assert parse_arguments("finetune", options).run.averaging == {"kind": "ema", "every_n_steps": 1, "decay": 0.999}
    with pytest.raises(ValueError, match="`averaging` must not be combined with `trainable: lora`"):
        parse_arguments("finetune", [*options, "--trainable", "lora"])
