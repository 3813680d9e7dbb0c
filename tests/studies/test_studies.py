"""Studies: runs at a small size, and reports from results alone."""

import json
import math
import os
import re
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from study_reports import report_of, run_here
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback

import lsgpt
import lsgpt_cli
from lsgpt.studies import STUDIES, TrainingStudy, load_study, read_lines, run_study, write_report
from lsgpt.studies import __main__ as one_run
from lsgpt.studies.comparisons import LOSS, format_values
from lsgpt.studies.equal_time import BudgetCallback, rate_at
from lsgpt.studies.grid import sensitivity
from lsgpt.studies.long_runs import gaps_of, growth
from lsgpt.studies.measurements import logits_of, losses_by_context, parts_of_logits
from lsgpt.studies.runner import read_runs, result_file, word_comparisons
from lsgpt.studies.study import (
    NUM_POINTS,
    Stream,
    Study,
    collect,
    join_arm,
    spike_score,
    thin,
    train_small,
    validation_blocks,
)
from lsgpt.training import parse_arguments
from lsgpt.training.train import largest
from lsgpt.utilities import plots
from lsgpt.utilities.environment import describe_environment


ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "studies" / "results").glob("*/runs.jsonl"))

SMALL = {
    "dataset_name": "text.txt",
    "streaming": "false",
    "tokenizer": "bpe",
    "max_eval_blocks": "2",
    "max_steps": "4",
    "warmup_steps": "1",
    "gradient_accumulation_steps": "1",
    "per_device_train_batch_size": "2",
    "logging_steps": "1",
    "max_logit_every_n_steps": "1",
    "save_steps": "1",
    "bf16": "false",
    "torch_compile": "false",
    "dataloader_num_workers": "0",
    "use_cpu": "true",
}
SHAPE = (
    "{vocab_size: 300, hidden_size: 24, num_hidden_layers: 1, num_attention_heads: 6, head_dim: 4, sliding_window: 4}"
)


def small_fields(**changes):
    fields = {**SMALL, "config_overrides": SHAPE, **changes}
    return [part for name, value in fields.items() for part in (f"--{name}", value)]


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("".join(f"line {i} of {i * i}\n" for i in range(8000)))


def test_a_study_keeps_what_it_has_and_repeats_itself(tmp_path, monkeypatch):
    """Interruptions of real processes are tested with comparisons, which run on the same machinery."""
    monkeypatch.setattr("lsgpt.studies.runner.run_commands", run_here)
    arm, fields = "ls-lr0.01", small_fields(block_size="64")
    report = run_study(load_study("learning-rates"), num_seeds=1, only=[arm], fields=fields)
    (line,) = read_lines(report.parent)
    assert line["arm"] == arm and line["values"]["step"] == 4 and line["environment"]["commit"]
    assert (line["seed"], line["fields"]) == (42, fields)
    again = load_study("learning-rates").run(arm, 42, tmp_path / "again", fields)
    assert again["eval_loss"] == pytest.approx(line["values"]["eval_loss"], rel=1e-6)

    # One seed is no verdict; the report needs nothing but the lines.
    text = report.read_text()
    planned = len(load_study("learning-rates").arms) * load_study("learning-rates").num_seeds
    assert f"\n1 of {planned} runs: 1 arms with 1 seed" in text
    assert text.count("Verdict: **open**") == len(load_study("learning-rates").comparisons)
    copy = tmp_path / "copy"
    copy.mkdir()
    shutil.copy(report.parent / "runs.jsonl", copy)
    assert lsgpt_cli.main(["study", "learning-rates", "--report", str(copy)]) == 0
    assert (copy / "report.md").read_text() == text
    with pytest.raises(ValueError, match="`--output-dir` must be new, or hold runs with the same fields"):
        run_study(load_study("learning-rates"), num_seeds=1, only=[arm], fields=small_fields(max_steps="13"))
    with pytest.raises(ValueError, match=rf"with the same fields; those in {copy} have --dataset_name text.txt"):
        run_study(load_study("learning-rates"), 2, [arm], copy, fields=small_fields(max_steps="13"))
    (copy / "runs.jsonl").write_text(2 * (copy / "runs.jsonl").read_text())
    with pytest.raises(ValueError, match=rf"must have one run of each arm and seed; got two of {arm} with seed 42"):
        write_report(load_study("learning-rates"), copy)

    # A crash while the line was written: the run's results are still there, and become a line again.
    runs_file = report.parent / "runs.jsonl"
    whole = runs_file.read_text()
    runs_file.write_text(whole + whole[:100])
    assert read_lines(report.parent) == [line]
    runs_file.write_text(whole.rstrip())  # by an editor: nothing is run, and nothing lost
    run_study(load_study("learning-rates"), num_seeds=1, only=[arm], fields=fields)
    assert read_lines(report.parent) == [line]
    runs_file.write_text(whole[:100])
    run_study(load_study("learning-rates"), num_seeds=1, only=[arm], fields=fields)
    assert [(line["arm"], line["values"]) for line in read_lines(report.parent)] == [(arm, line["values"])]


@pytest.mark.parametrize("trained_on", [{}, {"hardware": "a GPU"}], ids=["here", "elsewhere"])
def test_runs_flush_denormal_numbers(tmp_path, monkeypatch, trained_on):
    class Products:
        digest = Study.digest
        comparisons = {}

        def run(self, arm, seed, folder, fields):
            return {"product": (torch.tensor([1e-30]) * 1e-10).item(), "environment": trained_on}

    monkeypatch.setattr(one_run, "load_study", lambda name: Products())
    assert Products().run("arm", 42, tmp_path, ())["product"] > 0
    try:
        one_run.main("products", "arm", "42", str(tmp_path))
    finally:
        torch.set_flush_denormal(False)
    line = json.loads(result_file(tmp_path, "arm", 42).read_text())
    assert line["values"] == {"product": 0}
    assert line["environment"] == (trained_on or describe_environment())  # of an earlier training, or of this process


def test_interrupted_runs_save_their_work_as_with_sigterm(tmp_path, monkeypatch, capsys):
    class Interrupted:
        def run(self, *_):
            os.kill(os.getpid(), signal.SIGINT)
            received.append(None)

    received, before = [], signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(one_run, "load_study", lambda name: Interrupted())
    monkeypatch.setattr(torch, "set_flush_denormal", lambda _: None)
    previous = signal.signal(signal.SIGTERM, lambda *_: received.append("SIGTERM"))
    try:
        with pytest.raises(AttributeError):  # it has no results
            one_run.main("interrupted", "arm", "42", str(tmp_path))
    finally:
        signal.signal(signal.SIGTERM, previous)
        signal.signal(signal.SIGINT, before)
    assert received == ["SIGTERM", None]

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("lsgpt_cli._study", interrupt)
    assert lsgpt_cli.main(["study", "lengths"]) == 130
    assert capsys.readouterr().err == "\nInterrupted. Run the same command again to continue\n"


def test_a_report_of_another_study_stays(tmp_path):
    line = {"arm": "ls", "seed": 42, "seconds": 1.0, "environment": {}, "values": {}}
    (tmp_path / "runs.jsonl").write_text(json.dumps(line) + "\n")
    (tmp_path / "report.md").write_text("good")
    with pytest.raises(ValueError, match=f"{tmp_path}' must have runs of learning-rates; it has none of mhsa-lr0.001"):
        write_report(load_study("learning-rates"), tmp_path)
    assert (tmp_path / "report.md").read_text() == "good"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["learning-rate"], "did you mean 'learning-rates'"),
        (["learning-rates", "--only", "ls-lr7"], "`--only` must name arms of learning-rates.*got 'ls-lr7'"),
        (["learning-rates", "--report", "nowhere"], "`--report` must be a folder with the runs of a study"),
        *(
            (["learning-rates", "--report", "x", option, "3"], "`--report` must stand alone")
            for option in ("--only", "--seeds", "--processes", "--output-dir", "--max_stps")
        ),
        (["learning-rates", "--seed", "3"], "`seed` must not be given, because every run of mhsa-lr0.001 has its own"),
        *(
            (["lengths", *option], "`block_size` must not be given, because every run of mhsa-n64 has its own")
            for option in (["--block_size=64"], ["--block-size", "64"])
        ),
        (["learning-rates", "--max_stps", "3"], "unknown field '--max_stps'; did you mean '--max_steps'"),
    ],
)
def test_mistakes_are_found_before_the_first_run(arguments, message, capsys):
    assert lsgpt_cli.main(["study", *arguments]) == 2
    error = capsys.readouterr().err
    assert message.split(".*")[0] in error and message.split(".*")[-1] in error
    assert not list(Path().glob("runs/*/runs.jsonl"))


def test_the_command_passes_its_options_on(monkeypatch):
    calls = []
    monkeypatch.setattr("lsgpt.studies.run_study", lambda study, *arguments: calls.append((study.name, *arguments)))
    options = ["--seeds", "2", "--only", "ls-*,mhsa", "--output-dir", "here", "--processes", "3", "--max_steps", "5"]
    assert lsgpt_cli.main(["study", "learning-rates", *options]) == 0
    assert calls == [("learning-rates", 2, ["ls-*", "mhsa"], "here", 3, ["--max_steps", "5"])]


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.parent.name)
def test_committed_reports_are_made_of_committed_results(tmp_path, file):
    text = (file.parent / "report.md").read_text()
    if file.parent.name not in STUDIES:
        assert re.search(r"retired.* the last commit with its code is\n`[0-9a-f]{40}`\.", text[:300])
        return
    shutil.copy(file, tmp_path)
    assert write_report(load_study(file.parent.name), tmp_path).read_text() == text
    assert {plot.name for plot in tmp_path.glob("*.png")} == {plot.name for plot in file.parent.glob("*.png")}
    assert all("/" not in line["environment"]["commit"] for line in read_lines(file.parent))


def test_lengths_measure_what_is_longer(tmp_path, monkeypatch):
    study, arm = load_study("lengths"), "ls-rope"
    overrides = {"position_embedding_type": "rope", "max_position_embeddings": 64}
    fields = {"block_size": 64, "per_device_train_batch_size": 2, "config_overrides": overrides}
    monkeypatch.setattr(study, "arms", {arm: fields})
    values = study.run(arm, 42, tmp_path, small_fields(block_size="64"))
    assert values["step"] == 4 and math.isfinite(values["eval_loss"]) and values["curves"]["max_logit"]
    assert set(values["beyond"]) == {"1", "2", "4"} and json.dumps(values)
    folder = tmp_path / arm / "seed-42"
    model, blocks = AutoModelForCausalLM.from_pretrained(folder), validation_blocks(folder, 16, 4 * 64)
    for x in (1, 2, 4):  # the second half of each block
        ids, half = blocks[:, : x * 64], x * 32
        logits = model(ids).logits[:, half - 1 : -1].flatten(0, 1)
        expected = torch.nn.functional.cross_entropy(logits, ids[:, half:].flatten()).item()
        assert values["beyond"][str(x)] == pytest.approx(expected, rel=1e-5)
    # A run that is worse than before its training has diverged, even if its loss is finite.
    file = folder / "results.json"
    result = json.loads(file.read_text())
    assert not values["diverged"] and values["first_loss"] > result["eval_loss"]
    file.write_text(json.dumps({**result, "eval_loss": values["first_loss"] + 0.01}))
    assert collect(folder)["diverged"]


def test_keys_stay_hidden_when_a_run_goes_on(tmp_path):
    study, arms = load_study("sparse-dependencies"), ("mhsa", "mhsa-hidden")
    fields = small_fields(block_size="64", save_steps="2", save_total_limit="3")
    study.prepare(tmp_path, arms, fields)
    runs = {arm: [study.run(arm, 42, tmp_path, fields)] for arm in arms}
    assert runs["mhsa"][0]["eval_loss"] != runs["mhsa-hidden"][0]["eval_loss"]

    folder = tmp_path / "mhsa-hidden" / "seed-42"
    (folder / "results.json").unlink()
    (folder / "checkpoint-4").rename(tmp_path / "checkpoint-4")
    again = study.run("mhsa-hidden", 42, tmp_path, fields)
    assert again["step"] == 4
    assert again["eval_loss"] == pytest.approx(runs["mhsa-hidden"][0]["eval_loss"], rel=1e-6)
    before, after = (AutoModelForCausalLM.from_pretrained(path / "checkpoint-4") for path in (tmp_path, folder))
    for first, second in zip(before.parameters(), after.parameters()):
        assert torch.allclose(first, second, atol=1e-6)

    text = report_of(study, runs, tmp_path / "report")
    assert text.count("Verdict: **open**") == 3  # one seed
    assert "| `mhsa-hidden` |" in text


@pytest.mark.parametrize("name", [name for name in STUDIES if isinstance(load_study(name), TrainingStudy)])
def test_every_arm_is_a_recipe(name, tmp_path):
    study = load_study(name)
    (tmp_path / "tokenizer").mkdir()  # there is one
    study.prepare(tmp_path, study.arms, ())


RATES = {"paper-size": 6e-4, "equal-time": 1.2e-3, "lengths": 1e-2, "sparse-dependencies": 3e-2}
RATES |= dict.fromkeys(("positions-long", "long-training"), 2.4e-3)
STEPS = {**dict.fromkeys(("paper-size", "positions-long", "long-training"), 20_000), "equal-time": 10_000_000}
SCHEDULES = {"paper-size": 600_000, "equal-time": 600_000, "positions-long": 240_000, "long-training": 240_000}


@pytest.mark.parametrize("name", [name for name in STUDIES if isinstance(load_study(name), TrainingStudy)])
def test_arms_are_what_they_are_called(name):
    study = load_study(name)
    base = study.base(()).recipe
    for arm, fields in study.arms.items():
        parts, numbers = re.split("-(?!only)", arm), dict(re.findall(r"-(lr|n)([\d.]+)", arm))
        arguments = join_arm(base, arm, fields)
        config, training = arguments.build_config(), arguments.training
        heads = {"mhsa": 6, "ls": 1, "layers": [0, 0, 0, 0, 0, 6], "local-only": 0}[parts[0]]
        assert (config.num_attention_heads, config.num_global_heads) == (6, heads), arm
        position = "rope" if name == "equal-time" else next((x for x in ("rope", "none") if x in parts), "learned")
        assert config.position_embedding_type == position, arm
        assert config.qk_norm == ("qknorm" in parts or name == "equal-time"), arm
        assert bool(config.attention_sinks) == ("sinks" in parts), arm
        assert config.attn_logit_softcapping == (50.0 if "softcap" in parts else None), arm
        assert arguments.run.z_loss == (1e-4 if "zloss" in parts else 0), arm
        assert arguments.run.on_explosion == ("clip" if "qkclip" in parts else "warn"), arm
        assert (arguments.recipe.get("optim") == "adagc") == ("adagc" in parts), arm
        assert training.learning_rate == float(numbers.get("lr") or RATES[name]), arm
        length = 2048 if study.recipe == "paper-v1" else int(numbers.get("n", 512))
        assert arguments.data.block_size == length == config.max_position_embeddings, arm
        assert config.sliding_window == (50 if study.recipe == "paper-v1" else 12), arm
        assert (training.max_steps, training.logging_steps) == (STEPS.get(name, 600), 1), arm
        assert training.lr_scheduler_kwargs.get("num_training_steps") == SCHEDULES.get(name), arm


def test_gaps_are_those_at_the_same_steps():
    first = {"seed": 1, "curves": {"loss": [(2, 5.0), (4, 4.0), (6, 3.0)]}}
    second = {"seed": 1, "curves": {"loss": [(4, 3.5), (6, 3.25)]}}
    (gap,) = gaps_of({"mhsa": [first], "ls": [{**second, "validation": {}}]})["mhsa - ls"]
    assert gap["curves"]["loss"] == [(4, 0.5), (6, -0.25)]


def test_long_runs_are_measured(tmp_path, monkeypatch):
    study = load_study("positions-long")
    for field, value in {"steps": (2, 4), "contexts": (16, 64), "num_blocks": 4, "num_targets": 64}.items():
        monkeypatch.setattr(study, field, value)
    fields = small_fields(block_size="64", save_steps="2", max_eval_blocks="4", eval_steps="2")
    runs = {arm: [study.run(arm, seed, tmp_path, fields) for seed in (42, 43)] for arm in ("mhsa-rope", "ls-rope")}
    run, other = runs["ls-rope"]
    assert run["eval_loss"] != other["eval_loss"]
    assert run["validation"]["2"] > run["validation"]["4"]
    assert run["validation"]["4"] == pytest.approx(run["eval_loss"])
    assert run["environment"] == describe_environment()  # of the training: the measuring may be done elsewhere
    assert all(abs(loss - run["eval_loss"]) < 0.5 for loss in run["by_context"].values())
    assert run["looks"]["is_local"] == [[False] + [True] * 5]
    text = report_of(study, runs, tmp_path / "report")
    gap = np.mean([a["validation"]["4"] - b["validation"]["4"] for a, b in zip(runs["mhsa-rope"], runs["ls-rope"])])
    assert re.search(rf"^\| `mhsa-rope - ls-rope` \|.* {gap:.3f} ± [\d.]+ \|$", text, re.MULTILINE)
    assert "| `mhsa-rope, global heads` |" in text and "| `mhsa-rope, local heads` |" not in text
    top, position, content = (np.array(run["parts"][key]) for key in ("max_logit", "max_position", "max_content"))
    assert (top <= position + content + 1e-3).all() and (np.array(run["parts"]["position_share"]) <= 1).all()
    # A run that diverged before the last of these steps has no loss there.
    file = tmp_path / "ls-rope" / "seed-42" / "metrics.jsonl"
    logs = [line for line in file.read_text().splitlines() if json.loads(line)["step"] < 4]
    file.write_text("".join(f"{line}\n" for line in logs))
    again = study.measure(file.parent)["validation"]
    assert again == {"2": run["validation"]["2"], "4": math.inf}


def test_parts_of_logits_are_those_of_the_model(tiny_model):
    model = tiny_model(position_embedding_type="learned", num_global_heads=2)
    blocks = torch.randint(0, 97, (6, 24))
    parts = parts_of_logits(model, blocks)
    largest = lsgpt.measure_max_logits(model, input_ids=blocks)
    assert torch.allclose(torch.tensor(parts["max_logit"]), largest, atol=1e-3)
    # The same text again and again: nothing depends on the content.
    alike = parts_of_logits(model, blocks[:1].expand(6, -1))
    assert np.allclose(alike["position_share"], 1, atol=1e-3) and np.allclose(alike["max_content"], 0, atol=1e-4)
    assert np.allclose(alike["max_position"], alike["max_logit"], atol=1e-3)
    assert (np.array(parts["position_share"]) < 0.9).all()
    # The share of the first, global head by the formulas of random effects.
    logits = torch.stack([logits_of(model, ids)[0][0] for ids in blocks])[:, torch.ones(24, 24).tril().bool()]
    within = logits.var(0).mean()
    between = logits.mean(0).var(correction=0) - within / 6
    assert parts["position_share"][0][0] == pytest.approx((between / (between + within)).item(), rel=1e-3)


def test_the_loss_with_a_shorter_context_is_that_of_shorter_windows(tiny_model):
    model, blocks = tiny_model(position_embedding_type="rope"), torch.randint(0, 97, (4, 48))
    text, found = blocks.flatten(), losses_by_context(model, blocks, (8, 16), num_targets=4)
    starts = [16 + 2 * place for place in torch.linspace(0, (192 - 18) // 2, 2).long().tolist()]
    for context in (8, 16):
        losses = []
        for place in (start + i for start in starts for i in range(2)):
            size = context // 8
            begin = place - (place - starts[0]) % size if size > 1 else place
            window = text[begin + size - 1 - context : begin + size - 1]
            logits = model(window[None]).logits[0, place - begin - size]
            losses.append(torch.nn.functional.cross_entropy(logits[None], text[None, place]).item())
        assert found[str(context)] == pytest.approx(np.mean(losses), rel=1e-4)


def test_equal_time_ends_with_the_budget_and_resumes(tmp_path, monkeypatch):
    study = load_study("equal-time")
    monkeypatch.setattr(study, "budget", 1.0)
    monkeypatch.setattr(study, "contexts", (16, 64))
    fields = small_fields(block_size="64", max_steps="100000", save_steps="5", max_logit_every_n_steps="0")
    threads = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)  # for this process has more to do
    run = study.run("ls", 42, tmp_path, fields)
    assert threads == [1] and study.fields["use_cpu"]
    assert 1.0 <= run["cpu_seconds"] < 1.5 and run["wall_seconds"] > 0 and run["step"] > 5
    assert not run["diverged"] and LOSS.of(run) == run["eval_loss"] < run["first_loss"]
    logs = [json.loads(line) for line in (tmp_path / "ls" / "seed-42" / "metrics.jsonl").read_text().splitlines()]
    rates = [log["learning_rate"] for log in logs if "learning_rate" in log]
    assert max(rates) <= 1.2e-3 and rates[-1] < 0.3 * 1.2e-3 and rate_at(0.02) == 1 and rate_at(1.0) == 0.1
    assert rate_at(0.265) == pytest.approx(0.1 + 0.9 * (1 + 0.5**0.5) / 2)  # a quarter of a cosine
    assert (rate_at(0), rate_at(0.01), rate_at(1.5)) == (1e-3, 0.5, 0.1)
    assert run["status"] == f"stopped at step {run['step']} by a callback"
    config = AutoConfig.from_pretrained(tmp_path / "ls" / "seed-42")
    assert run["flops_per_step"] == 3 * 64 * config.flops_per_token(64)  # forward once, backward twice
    # A run that goes on has used what it had used.
    (tmp_path / "ls" / "seed-42" / "results.json").unlink()
    again = study.run("ls", 42, tmp_path, fields)
    assert again["step"] <= run["step"] + 60 and again["cpu_seconds"] < 1.5
    assert "operations (1e15)" in report_of(study, {"ls": [run, again]}, tmp_path / "report")


def test_equal_time_shows_the_mean_at_the_same_seconds(tmp_path, monkeypatch):
    """Runs log at seconds of their own; between them, losses are interpolated."""
    figures = []
    monkeypatch.setattr(plots.Figure, "savefig", lambda figure, *args, **kwargs: figures.append(figure))
    study = load_study("equal-time")
    run = {
        "step": 9,
        "flops_per_step": 1.0,
        "eval_loss": 3.0,
        "diverged": False,
        "cpu_seconds": 1.0,
        "wall_seconds": 1.0,
    }
    run["by_context"] = {str(context): 3.0 for context in study.contexts}
    runs = [{**run, "loss_over_seconds": [(0.0, 6.0), (end, 3.0)]} for end in (3600.0, 4000.0)]
    study.report({"ls": runs}, tmp_path)
    (axes,) = figures[0].axes
    seconds, mean = axes.lines[-1].get_data()
    assert (seconds[0], seconds[-1], len(seconds)) == (120.0, 3600.0, 30)
    assert (mean[14], mean[-1]) == pytest.approx(((4.5 + 4.65) / 2, (3.0 + 3.3) / 2))
    assert [text.get_text() for text in axes.texts] == ["ls"]


def test_the_clock_goes_on_from_where_it_was(tmp_path):
    args, state = SimpleNamespace(output_dir=tmp_path), SimpleNamespace(global_step=5)
    first, second = BudgetCallback(1.0), BudgetCallback(1.0)
    first.used, first.wall = 0.6, 0.7
    (tmp_path / "checkpoint-5").mkdir()
    first.on_save(args, state, None)
    second.on_train_begin(args, state, None)
    assert (second.used, second.wall) == (0.6, 0.7)
    (tmp_path / "checkpoint-5" / "clock.json").unlink()
    with pytest.raises(ValueError, match=r"checkpoint-5/clock.json is missing, which holds the time"):
        BudgetCallback(1.0).on_train_begin(args, state, None)


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_says_what_it_does_before_it_is_run(name, capsys):
    assert lsgpt_cli.main(["study"]) == 0
    assert name in capsys.readouterr().out
    study = load_study(name)
    assert study.name == name and study.title and study.question and study.protocol and study.comparisons
    assert study.num_seeds >= 2 and study.arms and all(Path(arm).name == arm for arm in study.arms)
    with pytest.raises(SystemExit):
        lsgpt_cli.main(["study", name, "--help"])
    text = capsys.readouterr().out
    num_runs = sum(study.seeds_of(arm) for arm in study.arms)
    assert f"{len(study.arms)} arms, {num_runs} runs, about {study.hours:g} h on two CPU cores" in text
    assert all(item.title in text for item in study.comparisons.values())


def test_a_run_that_diverged_has_no_loss(tmp_path):
    """Whatever the last good weights have: the arm is not the best one, and the table tells."""
    study = load_study("sparse-dependencies")
    lines = []
    for arm in study.arms:
        for i, loss in enumerate((4.3, 4.31, 4.32)):
            values = {"eval_loss": loss, "first_loss": 7.0, "diverged": False, "max_logit": 9.0, "spike_score": 0.0}
            values |= {"diverged": True, "eval_loss": 4.0} if (arm, i) == ("ls", 1) else {}
            lines.append({"arm": arm, "seed": 42 + i, "values": values})
    (tmp_path / "runs.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    runs = read_runs(study, tmp_path)
    assert "4.310 ± 0.014 (1 not finite)" in study.report(runs, tmp_path)
    assert study.comparisons["gain"].judge(runs).verdict == "inconclusive"


def test_a_claim_is_open_until_its_arms_have_all_their_seeds(tmp_path, monkeypatch):
    study = load_study("sparse-dependencies")
    values = {"eval_loss": 4.0, "diverged": False, "max_logit": 9.0}
    runs = {arm: [{"seed": seed, **values} for seed in (42, 43, 44)] for arm in study.arms}
    count = lambda: word_comparisons(study, runs).count("Verdict: **open**")  # noqa: E731
    assert count() == 0
    runs["ls-hidden"].pop()
    assert count() == 2  # not the one about `mhsa` alone
    monkeypatch.setattr(study, "fewer_seeds", {"ls-hidden": 2})
    assert count() == 0

    # Those are the seeds that are run.
    started = []

    def run_commands(commands, *args):
        started.extend(command[4:6] for command in commands)
        raise InterruptedError
        yield

    monkeypatch.setattr("lsgpt.studies.runner.run_commands", run_commands)
    with pytest.raises(InterruptedError):
        run_study(study, only=["ls*"], fields=small_fields(block_size="64"))
    assert started == [["ls", "42"], ["ls-hidden", "42"], ["ls", "43"], ["ls-hidden", "43"], ["ls", "44"]]


def test_sensitivity_is_the_mean_over_rates_less_the_best():
    assert sensitivity("ls").combine([4.0, 4.5, 5.0]) == pytest.approx(0.5)
    study = load_study("learning-rates")
    runs = {
        arm: [
            {"seed": seed, "first_loss": 7.0, "eval_loss": 4.0 + 0.1 * seed, "diverged": arm == "ls-lr0.1"}
            for seed in range(3)
        ]
        for arm in study.arms
    }
    finding = study.comparisons["less-sensitive"].judge(runs)
    assert finding.verdict == "contradicted" and finding.effect == pytest.approx((3.0 + 2.9 + 2.8) / 3 / 5)


def test_growth_compares_tenths_of_the_steps():
    """With points that are not spread evenly, of which the last one of the second tenth is the largest there."""
    curve = [[100, 9.0], [110, 1.0], [190, 1.5], [200, 2.0], [210, 9.0], [900, 9.0], [910, 16.0], [1000, 12.0]]
    assert growth({"step": 1000, "curves": {"max_logit": curve}}) == 3.0
    for short in ([[20, 1.0], [40, 2.0]], [[8, 1.0], [48, math.nan]], []):  # nothing measured there, or a divergence
        assert math.isnan(growth({"step": 50, "curves": {"max_logit": short}}))


def test_plots_know_global_from_local_heads():
    looks = plots.looks_of(
        ["mhsa-rope", "ls-rope", "ls-rope-qknorm", "local-only", "recall-1", "global heads", "local heads"]
    )
    assert looks["mhsa-rope"][0] != looks["ls-rope"][0] == looks["ls-rope-qknorm"][0]
    assert looks["ls-rope"] != looks["ls-rope-qknorm"] and len({color for color, _ in looks.values()}) == 4
    assert looks["global heads"][0] == looks["mhsa-rope"][0] and looks["local heads"][0] == looks["ls-rope"][0]


def test_summaries():
    assert format_values([1.0, 2.0, math.inf]) == "1.500 ± 0.707 (1 not finite)"
    assert format_values([math.nan]) == "not finite" and format_values([]) == "-"
    curve = [(step, float(step % 7)) for step in range(1, 1001)]
    assert math.isnan(thin([(i, math.nan if i == 2 else 3.0) for i in range(1, 121)], largest)[0][1])
    assert len(thin(curve, max)) <= NUM_POINTS and thin(curve, max)[-1][0] == 1000
    assert max(value for _, value in thin(curve, max)) == 6.0
    noise = [math.sin(i) for i in range(400)]
    assert spike_score(noise) == 0
    # Their standard deviation is 0.707.
    assert spike_score([*noise[:200], 4.1, *noise[201:]]) == 0
    assert spike_score([*noise[:200], 4.4, *noise[201:]]) == pytest.approx(1 / 272)
    assert spike_score([*noise[:200], math.nan, *noise[201:]]) == pytest.approx(1 / 272)
    assert spike_score(noise[:128]) == spike_score([math.nan] * 128 + [9.0]) == 0  # nothing to compare with


@pytest.mark.parametrize("log_y", [False, True])
def test_plots_show_means_and_intervals_on_the_scale_of_the_axis(log_y, tmp_path, monkeypatch):
    """With three seeds, the mean of the values or of their logarithms, and Student's interval around it."""
    figures = []
    monkeypatch.setattr(plots.Figure, "savefig", lambda figure, *args, **kwargs: figures.append(figure))
    seeds = [1.0, 10.0, 100.0]
    plots.plot_curves(tmp_path / "x.png", {"ls": [[(1, y), (2, y)] for y in seeds]}, "x", "y", log_y=log_y)
    (axes,) = figures[0].axes
    mean = axes.lines[-1].get_ydata()
    assert mean == pytest.approx([10.0 if log_y else 37.0] * 2)
    (band,) = axes.collections
    low, high = np.unique(band.get_paths()[0].vertices[:, 1])[[0, -1]]
    to_scale = np.log if log_y else np.asarray
    half = 4.302653 * np.std(to_scale(seeds), ddof=1) / np.sqrt(3)  # Student's t, two degrees of freedom
    assert (to_scale([low, high]) - to_scale(mean)) == pytest.approx([-half, half], rel=1e-5)
    assert axes.texts[0].get_text() == "ls"


def test_small_trainings_have_the_rows_of_their_seed_and_the_optimizer_of_micro(tiny_model, tmp_path):
    def make_row(generator):
        ids = generator.integers(97, size=12)
        return {"input_ids": ids, "labels": ids}

    first, again, other = (next(iter(Stream(make_row, seed)))["input_ids"].tolist() for seed in (1, 1, 2))
    assert first == again != other
    found = {}

    class Look(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            found.update(vars(args))

    options = {"max_steps": 1, "learning_rate": 1e-3, "use_cpu": True}
    assert not train_small(tiny_model(), Stream(make_row, 1), 1, tmp_path, options, [Look()])
    recipe = parse_arguments("micro").training
    assert found["seed"] == 1
    for name in ("adam_beta2", "weight_decay", "lr_scheduler_type", "lr_scheduler_kwargs"):
        assert found[name] == getattr(recipe, name), name
