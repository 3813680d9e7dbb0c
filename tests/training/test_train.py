"""Whole runs through the `lsgpt train` command. Those that are killed have processes of their own."""

import json
import logging
import math
import re
import shutil
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import fresh
import psutil
import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainerState

import lsgpt_cli
from lsgpt.training import RunResult, build_trainer, count_bytes, parse_arguments
from lsgpt.training.callbacks import read_metrics
from lsgpt.training.data import _is_held_out
from lsgpt.training.folders import check_checkpoint
from lsgpt.training.resuming import check_model, check_optimizer, check_stream
from lsgpt.training.train import run
from lsgpt.training.train import train as train_run


RECIPE = {
    "config_overrides": {
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "max_position_embeddings": 64,
        "vocab_size": 300,
        "resid_dropout": 0.1,  # so that the random state counts
        "sliding_window": 8,
    },
    "block_size": 32,
    "max_steps": 16,
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 16,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "cosine",
    "logging_steps": 1,
    "eval_strategy": "steps",
    "eval_steps": 8,
    "save_steps": 4,
    "max_logit_every_n_steps": 3,
    "use_cpu": True,
}
NO_DROPOUT = yaml.safe_dump({**RECIPE["config_overrides"], "resid_dropout": 0.0}, default_flow_style=True)
LONG_TEXT = "".join(f"line {i} of {i * i}\n" for i in range(400))


@pytest.fixture
def recipe(tmp_path):
    """Writes a recipe: `recipe(field=value)`."""
    (tmp_path / "text.txt").write_text(LONG_TEXT, encoding="utf-8")

    def write(**fields):
        file = tmp_path / "recipe.yaml"
        file.write_text(yaml.safe_dump({**RECIPE, "dataset_name": str(tmp_path / "text.txt"), **fields}))
        return file

    return write


@pytest.fixture
def train(capsys):
    """Runs the command in this process, because starting another takes longest, and returns what it prints."""

    def run(*arguments):
        capsys.readouterr()
        status = lsgpt_cli.main(["train", *map(str, arguments)])
        output = capsys.readouterr()
        assert status == 0, output.err
        return output.out

    return run


def logged(folder):
    """What was logged, without times."""
    names = ("step", "loss", "grad_norm", "learning_rate", "epoch", "max_logit", "eval_loss", "eval_perplexity")
    return [{name: log[name] for name in names if name in log} for log in read_metrics(folder / "metrics.jsonl")]


def assert_equal_weights(first, second):
    first, second = load_file(first / "model.safetensors"), load_file(second / "model.safetensors")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


KILLED = """
import os, sys
import lsgpt_cli
from lsgpt.training import callbacks

append_line = callbacks.append_line

def append_or_die(path, values):
    if values["step"] == 9:
        os._exit(9)
    append_line(path, values)

callbacks.append_line = append_or_die
lsgpt_cli.main(["train", *sys.argv[1:]])
"""


def test_a_killed_run_goes_on_as_if_nothing_had_been(train, recipe, tmp_path):
    """Killed without warning: losses, logits and weights are those of a run that was left alone, to the bit."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    output = train(recipe(), "--output_dir", whole)
    assert "perplexity" in output

    program = fresh.Program("-c", KILLED, recipe(), "--output_dir", killed)
    assert program.wait() == 9, program.errors
    assert (killed / "checkpoint-8").exists() and not (killed / "results.json").exists()
    # What a kill in the middle of saving leaves.
    (killed / "checkpoint-9999").mkdir()
    (killed / "checkpoint-9999" / "trainer_state.json").write_text('{"global_')
    with (killed / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9998, "loss": 1.0}\n{"step": 9999, "lo')

    train("--resume_from_checkpoint", killed)
    assert logged(killed) == logged(whole)
    assert_equal_weights(killed, whole)
    results, wanted = (json.loads((folder / "results.json").read_text()) for folder in (killed, whole))
    for name in ("status", "eval_perplexity", "eval_bits_per_byte", "max_logit", "step", "loss_by_position"):
        assert results[name] == wanted[name], name


def test_a_run_that_has_taken_its_last_step_takes_no_other(train, recipe, tmp_path, monkeypatch):
    """Killed after the last checkpoint, with the evaluation and the report still missing. It has its tokenizer."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    train(recipe(), "--output_dir", whole)
    shutil.copytree(whole / "checkpoint-16", killed / "checkpoint-16")
    for file in ("recipe.yaml", "metrics.jsonl"):
        shutil.copy(whole / file, killed)
    monkeypatch.setattr("lsgpt.training.train.train_tokenizer", None)
    train("--resume_from_checkpoint", killed)
    assert_equal_weights(killed, whole)
    results, wanted = (json.loads((folder / "results.json").read_text()) for folder in (killed, whole))
    for name in ("status", "eval_perplexity", "max_logit", "step", "tokens", "loss_by_position"):
        assert results[name] == wanted[name], name
    assert "tokens per second" in (killed / "report.md").read_text(encoding="utf-8")


class Halving(torch.optim.SGD):
    """Trains other weights than it evaluates, as schedule-free optimizers do: here, twice as large ones."""

    factor = 1

    def train(self):
        self._scale(2)

    def eval(self):
        self._scale(1)

    @torch.no_grad()
    def _scale(self, factor):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter *= factor / self.factor
        self.factor = factor


def test_the_weights_that_are_saved_are_those_that_are_evaluated(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(Trainer, "get_optimizer_cls_and_kwargs", staticmethod(lambda *_: (Halving, {"lr": 1e-3})))
    arguments = parse_arguments(recipe(eval_strategy="no"), ["--output_dir", str(tmp_path / "run"), "--max_steps=2"])
    trainer = run(arguments)
    assert trainer.optimizer.optimizer.factor == 1
    saved = load_file(tmp_path / "run" / "model.safetensors")
    assert all(torch.equal(weight, trainer.model.state_dict()[name]) for name, weight in saved.items())


def test_layerwise_optimizers_are_made_once(recipe, tmp_path, monkeypatch):
    """To make one attaches its steps to the backward pass."""
    made = []
    monkeypatch.setattr(Trainer, "get_optimizer_cls_and_kwargs", staticmethod(lambda *_: made.append(1)))
    options = ["--output_dir", str(tmp_path / "run"), "--optim", "galore_adamw_layerwise"]
    build_trainer(parse_arguments(recipe(optim_target_modules="all-linear"), options))
    assert not made


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_goes_on_where_it_was(train, recipe, tmp_path, workers):
    """Shuffled, with passes that end within steps: the weights are those of a run that was left alone, to the bit."""
    fields = {"streaming": True, "gradient_accumulation_steps": 3, "max_steps": 12, "save_steps": 9, "eval_steps": 12}
    fields["dataloader_num_workers"] = workers
    (tmp_path / "data").mkdir()
    for number in range(2):
        texts = [f"document {i} has {i * i} in it.\n" * 2 for i in range(number, 33, 2)]
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (tmp_path / "data" / f"{number}.jsonl").write_text(lines)
    (tmp_path / "data" / "validation.jsonl").write_text(lines)
    file = recipe(**fields, dataset_name=str(tmp_path / "data"))
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    output = train(file, "--output_dir", whole)
    assert f"(files or other shards: 2; data-loader workers: {workers}, 0 idle) of 32 tokens" in output
    assert "Reading the validation text to its end; `max_eval_blocks` limits it" in output
    results = json.loads((whole / "results.json").read_text())
    assert results["tokens"] == 12 * 3 * 2 * 32
    shutil.copytree(whole / "checkpoint-9", killed / "checkpoint-9")
    for name in ("recipe.yaml", "metrics.jsonl"):
        shutil.copy(whole / name, killed)
    train("--resume_from_checkpoint", killed)
    assert_equal_weights(killed, whole)

    tokens = []  # of one pass: of two equal streams, and two with another seed
    for seed in ("--seed=1", "--seed=1", "--data_seed=0", "--seed=0"):
        arguments = parse_arguments(file, ["--output_dir", str(tmp_path / "other"), seed])
        trainer = build_trainer(arguments)
        tokens.append([row["input_ids"] for row in trainer.train_dataset])
    assert tokens[0] == tokens[1] != tokens[2] and sorted(tokens[0]) == sorted(tokens[2])
    assert tokens[2] == tokens[3]
    assert 2 * len(tokens[0]) < 9 * 6 and len(tokens[0]) % 6  # or else no pass would end within a step

    for option, message in (
        ("--dataloader_num_workers=1", f"`dataloader_num_workers` must be {workers}, as before; got 1"),
        ("--seed=1", r"`seed` must be \d+, as before; got 1\. Otherwise, the stream"),
        ("--respect_boundaries=true", "`respect_boundaries` must be False, as before; got True"),
        ("--streaming=false", "`streaming` must be True, as before; got False"),
        ("--per_device_train_batch_size=1", r"as many tokens as before \(1,728 in 9 steps\); got 96\. Otherwise"),
    ):
        resume = ["--resume_from_checkpoint", str(whole / "checkpoint-9"), "--output_dir", str(tmp_path / "more")]
        arguments = parse_arguments(None, [*resume, option])
        with pytest.raises(ValueError, match=message):
            build_trainer(arguments)
        build_trainer(arguments._replace(training=replace(arguments.training, ignore_data_skip=True)))


@pytest.mark.parametrize("name", ["dataset_name", "dataset_config_name", "text_column", "block_size", "data_seed"])
def test_a_stream_does_not_go_on_as_another(tmp_path, name):
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({name: "old"}), encoding="utf-8")
    with pytest.raises(ValueError, match=f"`{name}` must be old, as before"):
        check_stream(tmp_path / "checkpoint-9", SimpleNamespace(training=None, recipe={}))


def test_a_run_does_not_go_on_as_another_model(tmp_path, tiny_config):
    arguments = SimpleNamespace(build_config=lambda: tiny_config(sliding_window=8), recipe={})
    tiny_config(sliding_window=8, eos_token_id=5, use_cache=False).save_pretrained(tmp_path)  # which runs set
    check_model(tmp_path, arguments)
    tiny_config(sliding_window=4).save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"`sliding_window` of the model must be as before \(4\) .*; got 8\. To change"
    ):
        check_model(tmp_path, arguments)


def test_the_folder_of_a_run_is_its_own(recipe, tmp_path, monkeypatch, capsys):
    """Also if two begin together, because a folder is free until the training begins; and results are of the end."""
    file, folder = recipe(max_steps=1, eval_strategy="no"), tmp_path / "run"
    arguments = parse_arguments(file, ["--output_dir", str(folder)])
    trainers = [build_trainer(arguments) for _ in range(2)]
    train_run(trainers[0], arguments)
    with monkeypatch.context() as other:
        other.setattr("lsgpt.training.train.build_trainer", lambda *arguments: trainers[1])
        assert lsgpt_cli.main(["train", str(file), "--output_dir", str(folder)]) == 2
    assert f"another one has just begun in '{folder}'" in capsys.readouterr().err
    assert (folder / "results.json").exists()

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    command, before = f"lsgpt train --resume_from_checkpoint {folder}", (folder / "recipe.yaml").read_bytes()
    with monkeypatch.context() as other:  # while the checkpoint is loaded
        other.setattr("transformers.Trainer._load_optimizer_and_scheduler", interrupt)
        assert lsgpt_cli.main([*command.split()[1:], "--max_steps", "9"]) == 130
    assert (folder / "results.json").exists() and (folder / "recipe.yaml").read_bytes() == before
    monkeypatch.setattr("lsgpt.training.LSGPTTrainer._run_epoch", interrupt)
    other = yaml.safe_dump({**RECIPE["config_overrides"], "sliding_window": 4}, default_flow_style=True)
    assert lsgpt_cli.main([*command.split()[1:], "--config_overrides", other]) == 2
    assert "`sliding_window` of the model must be as before (8)" in capsys.readouterr().err
    assert lsgpt_cli.main([*command.split()[1:], "--max_steps", "9"]) == 130
    assert f"To go on from the last checkpoint: {command}\n" in capsys.readouterr().out
    assert lsgpt_cli.main(["train", str(file), "--output_dir", str(tmp_path / "another")]) == 130
    assert "To go on" not in capsys.readouterr().out
    assert not (folder / "results.json").exists()


@pytest.mark.parametrize(
    "name",
    [
        *("learning_rate", "sink_learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"),
        *("optim", "optim_args", "trainable"),
    ],
)
def test_settings_that_the_optimizer_would_ignore_are_refused(tmp_path, name):
    checkpoint, arguments = tmp_path / "my run" / "checkpoint-9", SimpleNamespace(recipe={name: 0.5})
    check_optimizer(checkpoint, arguments)  # there is no recipe to compare with
    checkpoint.parent.mkdir()
    (checkpoint.parent / "recipe.yaml").write_text(yaml.safe_dump(arguments.recipe))
    check_optimizer(checkpoint, arguments)
    with pytest.raises(
        ValueError, match=rf"`{name}` must be as before \(0.5\) .*; got the default\. .*'.*/my run/checkpoint-9'$"
    ):
        check_optimizer(checkpoint, SimpleNamespace(recipe={}))


@pytest.mark.parametrize(
    ("rows", "per_row", "steps_taken", "num_bad", "finds_batch_size", "outcome"),
    [
        (2, 2, 9, 0, False, nullcontext()),
        (2, 2, 8, 0, False, nullcontext()),  # the loss of the last one was bad, which older checkpoints do not say
        (2, 2, 8, 1, False, nullcontext()),
        (2, 2, 7, 2, False, nullcontext()),
        (2, 2, 0, 0, False, nullcontext()),  # a `Trainer` that does not count
        (4, 2, 9, 0, True, nullcontext()),  # the batch was halved
        (2, 2, 7, 0, False, pytest.raises(ValueError, match=r"\(1,344 in 9 steps\); got 192")),
        (4, 2, 9, 0, False, pytest.raises(ValueError, match="got 384")),
        (2, 1, 9, 0, False, pytest.raises(ValueError, match="got 384")),
    ],
)
def test_a_stream_goes_on_with_the_same_rows(tmp_path, rows, per_row, steps_taken, num_bad, finds_batch_size, outcome):
    """Of 32 tokens, in batches of two, of which each step has three, with two processes for each row."""
    state = TrainerState(global_step=9, num_input_tokens_seen=steps_taken * 192, train_batch_size=2)
    state.log_history += [{"step": 5 + i, "bad_step": 5 + i} for i in range(num_bad)]
    state.save_to_json(str(tmp_path / "trainer_state.json"))
    args = SimpleNamespace(gradient_accumulation_steps=3, dataloader_num_workers=0, world_size=2)
    args.train_batch_size, args.auto_find_batch_size = rows, finds_batch_size
    args.parallelism_config = SimpleNamespace(cp_size=per_row)
    with outcome:
        check_stream(tmp_path, SimpleNamespace(training=args, data=SimpleNamespace(block_size=32), recipe={}))


def test_figures_of_the_best_checkpoint_are_its_own(train, recipe, tmp_path):
    """With `load_best_model_at_end`, the weights that are saved need not be those of the last evaluation."""
    fields = {"load_best_model_at_end": True, "greater_is_better": True, "eval_steps": 4}  # the highest loss
    train(recipe(**fields), "--output_dir", tmp_path / "run")
    logs = read_metrics(tmp_path / "run" / "metrics.jsonl")
    evaluated = [(log["step"], log["eval_perplexity"]) for log in logs if "eval_perplexity" in log]
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert [step for step, _ in evaluated] == [4, 8, 12, 16, 16]  # the last one is of the best weights
    assert results["eval_perplexity"] == evaluated[4][1] == pytest.approx(evaluated[0][1], rel=1e-6)
    assert evaluated[3][1] < 0.9 * evaluated[4][1]  # otherwise this test would show nothing


def test_a_run_that_an_explosion_stopped_is_not_finished(train, recipe, tmp_path):
    wide = {**RECIPE["config_overrides"], "initializer_range": 5.0}
    file = recipe(config_overrides=wide, on_explosion="stop", eval_strategy="no")
    assert "The run was stopped at step 3 by on_explosion." in train(file, "--output_dir", tmp_path / "run")
    result = RunResult.read(tmp_path / "run")
    assert (result.outcome, result.stopped_by, result.step) == ("stopped", "on_explosion", 3)
    assert result.tokens == 3 * 2 * 32
    assert "| status | stopped at step 3 by on_explosion |" in (tmp_path / "run" / "report.md").read_text("utf-8")
    # An average has the weights that QK-clip leaves.
    file = recipe(config_overrides=wide, on_explosion="clip", averaging={"kind": "ema", "decay": 0.0}, max_steps=2)
    train(file, "--output_dir", tmp_path / "clipped")
    assert_equal_weights(tmp_path / "clipped" / "averaged", tmp_path / "clipped")


def test_a_run_with_averaged_weights(train, recipe, tmp_path):
    """The run itself is as without; one that was ended in between goes on with the same averages, to the bit."""
    plain, whole, ended = tmp_path / "plain", tmp_path / "whole", tmp_path / "ended"
    train(recipe(eval_steps=4), "--output_dir", plain)
    file = recipe(averaging={"kind": "ema-warmup", "decay": 0.8}, eval_steps=4)
    train(file, "--output_dir", whole)
    assert logged(whole) == logged(plain)
    assert_equal_weights(whole, plain)
    train(file, "--output_dir", ended, "--max_steps", 12, "--lr_scheduler_kwargs", '{"num_training_steps": 16}')
    train("--resume_from_checkpoint", ended, "--max_steps", 16)
    assert_equal_weights(ended, whole)
    assert_equal_weights(ended / "averaged", whole / "averaged")
    recipe_of_run = (plain / "recipe.yaml").read_bytes()
    for folder, message in ((plain, "has no averaged weights"), (ended, "average must be ema-warmup, .* got ema")):
        with pytest.raises(ValueError, match=message):
            build_trainer(parse_arguments(None, ["--resume_from_checkpoint", str(folder), "--averaging", "ema"]))
    with pytest.raises(ValueError, match=r"`learning_rate` must be as before \(.*; got 0.0001\. .*_or_path .*-16"):
        build_trainer(parse_arguments(None, ["--resume_from_checkpoint", str(plain), "--learning_rate=1e-4"]))
    assert (plain / "recipe.yaml").read_bytes() == recipe_of_run

    results, without = (json.loads((folder / "results.json").read_text()) for folder in (whole, plain))
    averaged = results["eval_averaged_perplexity"]
    assert without["eval_averaged_perplexity"] is None
    for name in ("eval_perplexity", "loss_by_position"):
        assert results[name] == without[name]
    logs = [log for log in read_metrics(whole / "metrics.jsonl") if "eval_averaged_perplexity" in log]
    assert [log["step"] for log in logs] == [4, 8, 12, 16] and logs[-1]["eval_averaged_perplexity"] == averaged
    report = (whole / "report.md").read_text(encoding="utf-8")
    assert f"| evaluation perplexity with averaged weights | {averaged:.2f} |" in report
    # The figure is that of the folder with the averaged model, which is whole.
    arguments = parse_arguments(
        whole / "recipe.yaml", ["--output_dir", str(tmp_path / "again"), "--averaging", "null"]
    )
    trainer = build_trainer(arguments)
    trainer.model = trainer.model_wrapped = AutoModelForCausalLM.from_pretrained(whole / "averaged")
    assert trainer.evaluate()["eval_perplexity"] == pytest.approx(averaged, rel=1e-6)
    assert AutoTokenizer.from_pretrained(whole / "averaged").get_vocab() == trainer.processing_class.get_vocab()


def test_sigterm_saves_and_ends_cleanly(train, recipe, tmp_path):
    """SIGTERM goes to all processes of a job, those that load data included."""
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    options = {"max_steps": 4000, "save_steps": 4000, "eval_strategy": "no", "eval_on_start": True}
    options |= {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}
    # Workers are children of the training, as in a process that was not forked from a server.
    code = "import multiprocessing, sys, lsgpt_cli; multiprocessing.set_start_method('fork', force=True)"
    code += "; sys.exit(lsgpt_cli.main(sys.argv[1:]))"
    program = fresh.Program("-c", code, "train", recipe(**options), "--output_dir", stopped)
    metrics = stopped / "metrics.jsonl"
    program.wait_until(lambda: metrics.exists() and '"loss"' in metrics.read_text())
    workers = psutil.Process(program.process.pid).children(recursive=True)
    assert len(workers) == 2  # of the training, and of the evaluations
    for process in (*workers, program.process):
        process.terminate()  # SIGTERM
    assert program.wait() == 0, program.errors
    step = int(re.search(r"Saved step (\d+)\. Resume with: lsgpt train --resume_from_checkpoint", program.output)[1])
    assert 1 <= step < 4000
    assert (stopped / f"checkpoint-{step}" / "model.safetensors").is_file()
    assert not (stopped / "results.json").exists()

    more = ["--max_steps", step + 3, "--lr_scheduler_kwargs", '{"num_training_steps": 4000}']
    more += ["--dataloader_num_workers", 0, "--dataloader_persistent_workers", "false"]
    train("--resume_from_checkpoint", stopped, *more, "--save_steps", 2)
    saved = {int(file.name.removeprefix("checkpoint-")) for file in stopped.glob("checkpoint-*")}
    assert saved & {step + 1, step + 2}  # the one that is even
    train(recipe(**options), "--output_dir", whole, *more)
    assert_equal_weights(stopped, whole)


def test_everything_about_a_run_is_in_its_folder(train, recipe, tmp_path):
    """With a stream, Unigram tokens, documents kept apart and a stabilizer, none of which changes what comes out."""
    folder = tmp_path / "run"
    documents = [f"document {i} has {i * i} in it.\n" * (1 + i % 3) for i in range(600)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in documents))
    options = {
        "dataset_name": str(tmp_path / "text.jsonl"),
        "text_column": "body",
        "streaming": True,
        "respect_boundaries": True,
        "tokenizer": "unigram",
        "max_eval_blocks": 5,
        "z_loss": 1e-4,
        "config_overrides": {**RECIPE["config_overrides"], "attn_logit_softcapping": 50.0},
        "max_steps": 7,
        "gradient_accumulation_steps": 2,
        "per_device_eval_batch_size": 2,
    }
    output = train(recipe(**options), "--output_dir", folder)
    assert "on a stream of blocks (files or other shards: 1; data-loader workers: 0, 0 idle) of 32" in output
    files = {file.name for file in folder.iterdir()}
    assert files >= {
        "report.md",
        "results.json",
        "recipe.yaml",
        "metrics.jsonl",
        "modeling_lsgpt.py",
        "tokenizer.json",
    }
    report = (folder / "report.md").read_text(encoding="utf-8")
    plots = set(re.findall(r"\]\((\w+\.png)\)", report))
    assert {plot.removesuffix(".png") for plot in plots} == {
        "loss",
        "perplexity",
        "max_logits",
        "max_logits_by_head",
        "loss_by_position",
    }
    assert all((folder / plot).read_bytes().startswith(b"\x89PNG") for plot in plots)
    for text in ("| parameters |", "| window | 8 tokens |", "tokens per second", "z_loss:", "| torch |"):
        assert text in report

    # The figures are those of the checkpoint: perplexity and bits per byte of the first five blocks.
    results = json.loads((folder / "results.json").read_text())
    assert (results["status"], results["step"], results["tokens"]) == ("finished", 7, 7 * 2 * 2 * 32)
    first = next(text for text in documents if _is_held_out(text, 5, True))
    assert results["prompt"] == " ".join(first.split()[:3]) and f"continues {results['prompt']!r}:" in output
    assert results["parameters"] == sum(x.numel() for x in load_file(folder / "model.safetensors").values())
    tokenizer, model = (auto.from_pretrained(folder) for auto in (AutoTokenizer, AutoModelForCausalLM))
    held_out = [
        [*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in documents if _is_held_out(text, 5, True)
    ]
    positions = [i for ids in held_out for i in range(len(ids))]
    ids = torch.tensor([token for ids in held_out for token in ids])[: 5 * 32].view(5, 32)
    starts = torch.tensor([p == 0 for p in positions])[: 5 * 32].view(5, 32)
    starts[:, 0] = True
    assert len(starts.sum(1).unique()) > 1  # or the mean over rows would be that over tokens
    total, count, num_bytes = 0.0, 0, 0
    for row, row_starts in zip(ids, starts):
        for document in torch.tensor_split(row, row_starts.nonzero().flatten().tolist()):
            if len(document) > 1:
                total += model(document[None], labels=document[None]).loss.item() * (len(document) - 1)
                count += len(document) - 1
                num_bytes += count_bytes(tokenizer)[document[1:]].sum().item()
    assert results["eval_loss"] == pytest.approx(total / count, rel=1e-4)
    assert results["eval_loss"] == pytest.approx(math.log(results["eval_perplexity"]), rel=1e-9)
    assert results["eval_bits_per_byte"] == pytest.approx(total / torch.tensor(2.0).log().item() / num_bytes, rel=1e-4)


def test_a_run_that_diverges_says_so_and_keeps_good_weights(train, recipe, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    folder = tmp_path / "run"
    fields = {"learning_rate": 1e30, "warmup_steps": 0, "max_grad_norm": 0.0, "eval_strategy": "no"}
    train(recipe(**fields), "--output_dir", folder)
    status = json.loads((folder / "results.json").read_text())["status"]
    assert re.fullmatch(r"diverged at step \d+", status)
    step = int(status.split()[-1])
    assert f"the loss of step {step} is not finite" in caplog.text
    assert RunResult.read(folder).tokens == (step - 1) * 2 * 32  # those of the steps that were taken
    assert f"| status | {status} |" in (folder / "report.md").read_text()
    assert all(weight.isfinite().all() for weight in load_file(folder / "model.safetensors").values())
    losses = [log["loss"] for log in read_metrics(folder / "metrics.jsonl") if "loss" in log]
    assert math.isnan(losses[-1]) and all(losses[:-1])  # not 0, as Transformers would log it


def test_a_run_that_ends_with_infinite_logits_keeps_its_weights_and_its_report(train, recipe, tmp_path, monkeypatch):
    """The last step makes weights whose logits overflow, so that everything after the training meets infinities."""
    folder = tmp_path / "run"
    fields = {"learning_rate": 1e20, "warmup_steps": 0, "max_grad_norm": 0.0, "max_steps": 1, "save_strategy": "no"}
    train(recipe(**fields, eval_strategy="no", max_logit_every_n_steps=1), "--output_dir", folder)
    result = RunResult.read(folder)
    assert (result.status, result.step) == ("finished", 1) and not math.isfinite(result.eval_perplexity)
    assert "max_logits_by_head.png" in (folder / "report.md").read_text()
    weights = load_file(folder / "model.safetensors")
    assert max(weight.abs().max() for weight in weights.values()) > 1e19

    # Whatever else goes wrong after the training: the weights are there, and so are the results.
    def fail(*args, **kwargs):
        raise OSError("no space left on device")

    monkeypatch.setattr("lsgpt.training.train.write_report", fail)
    with pytest.raises(OSError, match="no space left"):
        train(recipe(max_steps=1, save_strategy="no", eval_strategy="no"), "--output_dir", tmp_path / "no-report")
    assert (tmp_path / "no-report" / "model.safetensors").is_file()
    assert json.loads((tmp_path / "no-report" / "results.json").read_text())["eval_perplexity"] > 1
    monkeypatch.setattr("transformers.Trainer.evaluate", fail)
    with pytest.raises(OSError, match="no space left"):
        train(recipe(max_steps=1, save_strategy="no", eval_strategy="no"), "--output_dir", tmp_path / "no-evaluation")
    assert (tmp_path / "no-evaluation" / "model.safetensors").is_file()


def test_what_cannot_be_resumed_is_said(train, recipe, tmp_path):
    """A `Trainer` would start the optimizer and its schedule anew."""
    folder = tmp_path / "run"
    file = recipe(save_only_model=True, max_steps=2, save_steps=2, eval_strategy="no")
    train(file, "--output_dir", folder)
    arguments = parse_arguments(None, ["--resume_from_checkpoint", str(folder)])
    with pytest.raises(
        ValueError, match=r"without optimizer.pt, scheduler.pt, rng_state.pth \(`save_only_model`"
    ) as error:
        build_trainer(arguments)
    assert f"--model_name_or_path {folder / 'checkpoint-2'}" in str(error.value)
    for name in ("scheduler.pt", "rng_state.pth"):
        (folder / "checkpoint-2" / name).touch()
    with pytest.raises(ValueError, match=r"without optimizer.pt \("):
        check_checkpoint(folder / "checkpoint-2")
    (folder / "checkpoint-2" / "optimizer_0").mkdir()  # FSDP's
    check_checkpoint(folder / "checkpoint-2")
    (tmp_path / "latest").write_text("global_step2")  # DeepSpeed's, which finds the rest itself
    check_checkpoint(tmp_path)


def test_fine_tuning_recipe(train, recipe, tmp_path, capsys):
    base, tuned = tmp_path / "base", tmp_path / "tuned"
    train(recipe(max_steps=30), "--output_dir", base)
    (tmp_path / "other.txt").write_text("a b c d e f g h\n" * 100)
    arguments = [
        "finetune",
        "--model_name_or_path",
        base,
        "--dataset_name",
        tmp_path / "other.txt",
        "--use_cpu",
        "true",
    ]
    arguments += ["--block_size", "32", "--output_dir", tuned, "--learning_rate", "1e-3"]
    train(*arguments)
    losses = [log["eval_loss"] for log in read_metrics(tuned / "metrics.jsonl") if "eval_loss" in log]
    assert len(losses) == 3 and losses[-1] < losses[0]
    assert (tuned / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (base, tuned))
    assert before == after
    for override, message in (
        ("{num_hidden_layers: 3}", "configuration; missing: model.layers.2."),
        ("{hidden_size: 32}", "of another shape: .* instead of"),
    ):
        overrides = ["--config_overrides", override, "--output_dir", tmp_path / "random"]
        assert lsgpt_cli.main(["train", *map(str, [*arguments[:-4], *overrides])]) == 2
        assert re.search(f"the weights in '{base}' must match .*{message}", capsys.readouterr().err)
    # Transformers saves this one as it is, but not with the tokenizer's token: the run must not end without weights.
    (base / "generation_config.json").write_text(json.dumps({"temperature": 0.5, "eos_token_id": 5}))
    assert lsgpt_cli.main(["train", *map(str, [*arguments[:-3], tmp_path / "lost"])]) == 2
    assert re.search("generation_config.json must be valid, .*`temperature`", capsys.readouterr().err, re.DOTALL)
    assert not (tmp_path / "lost").exists() or not any((tmp_path / "lost").iterdir())
    arguments += ["--block_size", "65", "--output_dir", tmp_path / "x"]
    assert lsgpt_cli.main(["train", *map(str, arguments)]) == 2
    assert "`block_size` must be between 2 and `max_position_embeddings` (64); got 65" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block_size": 64}, r"cannot pack the validation split: `block_size` must be at most the \d+ tokens "),
        (
            {"config_overrides": {**RECIPE["config_overrides"], "qk_norm": True}, "on_explosion": "clip"},
            "with `qk_norm`",
        ),
        ({"optim": "adagc"}, r"`max_grad_norm` must be 0 with AdaGC .*; got 1.0"),
        (
            {"averaging": "bema", "max_steps": -1, "num_train_epochs": 2},
            "`every_n_steps` of the average must be at most the 20 steps of the training",
        ),
        ({"streaming": True}, "the validation split of the stream has none"),
        ({"tokenizer": "nowhere/at-all"}, "`tokenizer`: the tokenizer 'nowhere/at-all' cannot"),
        ({"prediction_loss_only": True}, "`prediction_loss_only` must be false; got True"),
        ({"batch_eval_metrics": True}, "`batch_eval_metrics` must be false; got True"),
        ({"eval_do_concat_batches": False}, "`eval_do_concat_batches` must be true; got False"),
        ({"bf16_full_eval": True}, "`bf16_full_eval` must be false; got True"),
        ({"fp16_full_eval": True}, "`fp16_full_eval` must be false; got True"),
        ({"label_names": ["targets"]}, r"`label_names` must be labels; got \['targets'\]"),
        (
            {"metric_for_best_model": "eval_averaged_loss"},
            "`metric_for_best_model` must be one of eval_loss, .*; with `averaging`, there are more; got 'eval_avera",
        ),
        (
            {"metric_for_best_model": "eval_averaged_los", "averaging": "ema"},
            r"eval_averaged_bits_per_byte; got .*; did you mean 'eval_averaged_loss'\?",
        ),
        ({"optim": "lomo"}, "lomo_optim"),
    ],
)
def test_what_does_not_fit_is_said_before_the_training(recipe, tmp_path, monkeypatch, fields, message, offline):
    monkeypatch.chdir(tmp_path)
    arguments = parse_arguments(recipe(**fields))
    (tmp_path / "text.txt").write_text(LONG_TEXT[:1500], encoding="utf-8")
    with pytest.raises((ValueError, ImportError), match=message):
        build_trainer(arguments)


@pytest.mark.parametrize(
    ("averaging", "fields", "said"),
    [
        ({"kind": "ema", "decay": 0.99}, {"max_steps": -1, "num_train_epochs": 1}, True),
        ({"kind": "ema", "decay": 0.7}, {"max_steps": 9}, False),
    ],
)
def test_an_average_of_mostly_untrained_weights_is_announced(recipe, averaging, fields, said, tmp_path, capsys):
    folder = str(tmp_path / "run")
    trainer = build_trainer(parse_arguments(recipe(averaging=averaging, **fields), ["--output_dir", folder]))
    *_, max_steps = trainer.set_initial_training_values(trainer.args, trainer.get_train_dataloader())
    sentence = f"The average of {max_steps} steps will keep {averaging['decay'] ** max_steps:.0%} of the untrained"
    assert (sentence in capsys.readouterr().out) == said
    trainer.save_model(folder)
    trained = recipe(averaging=averaging, model_name_or_path=folder, preset=None, config_overrides=None, **fields)
    build_trainer(parse_arguments(trained, ["--output_dir", str(tmp_path / "more")]))
    assert "untrained weights" not in capsys.readouterr().out


def test_two_processes_train_as_one(train, recipe, tmp_path, monkeypatch):
    """
    Through the command (for launchers and other ways to share the work see `test_processes.py`). They agree on one new
    folder, and on the tokenizer that one of them trained: each would number the tokens of Unigram in its own way.
    """
    monkeypatch.chdir(tmp_path)
    # Adam divides by what may be rounding only; `adam_epsilon` is above that.
    options = ["--config_overrides", NO_DROPOUT, "--adam_epsilon", "1e-4", "--per_device_train_batch_size"]
    file = recipe(run_name="two", tokenizer="unigram")
    first, second = fresh.run_together(2, "-m", "lsgpt_cli", "train", file, *options, "2", CUDA_VISIBLE_DEVICES="")
    train(recipe(run_name="one", tokenizer="runs/two"), *options, "4")
    assert {folder.name for folder in (tmp_path / "runs").iterdir()} == {"one", "two"}
    one, two = logged(tmp_path / "runs" / "one"), logged(tmp_path / "runs" / "two")
    assert [log["step"] for log in one] == [log["step"] for log in two]
    for expected, found in zip(one, two):
        # The Trainer's `eval_loss` is a mean over batches, which differ; the perplexity is one over tokens.
        assert {k: v for k, v in found.items() if k != "eval_loss"} == pytest.approx(
            {k: v for k, v in expected.items() if k != "eval_loss"}, rel=1e-4
        )
    assert RunResult.read(tmp_path / "runs" / "two").tokens == RunResult.read(tmp_path / "runs" / "one").tokens > 0
    assert "The model continues" in first and "The model continues" not in second
