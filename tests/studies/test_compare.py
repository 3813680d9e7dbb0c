"""Comparisons of real runs, that are interrupted and go on."""

import json
import math
import re
import shutil
import sys
import time
from contextlib import closing

import fresh
import pytest
import yaml
from study_reports import run_here

import lsgpt_cli
from lsgpt.configuration import load_arms
from lsgpt.studies import RecipeArms, compare, read_lines, write_report
from lsgpt.studies.compare import resolve_arm
from lsgpt.studies.runner import run_commands
from lsgpt.studies.study import collect, find_checkpoint_or_delete_run
from lsgpt.training import RunResult, parse_arguments
from lsgpt.utilities.strict_json import finite


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


RECIPE = {
    "run_name": "tiny",
    "config_overrides": {
        "hidden_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 3,
        "max_position_embeddings": 64,
        "vocab_size": 300,
        "sliding_window": 4,
    },
    "dataset_name": "text.txt",
    "block_size": 32,
    "max_steps": 6,
    "tokenizer": "unigram",
    "logging_steps": 1,
    "eval_strategy": "steps",
    "eval_steps": 3,
    "save_strategy": "steps",
    "save_steps": 2,
    "max_logit_every_n_steps": 2,
    "use_cpu": True,
}


def write_inputs(tmp_path, **fields):
    (tmp_path / "text.txt").write_text("".join(f"line {i} of {i * i}\n" for i in range(300)))
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump({**RECIPE, **fields}))
    # Its logits are infinite after the first step, its loss is not a number after the second.
    (tmp_path / "arms.yaml").write_text("wild: {learning_rate: 1.0e+12, max_grad_norm: 0.0}\n")


def test_a_mistake_that_was_found_at_once_can_be_mended(tmp_path, monkeypatch):
    write_inputs(tmp_path)
    monkeypatch.setattr("lsgpt.studies.runner.run_commands", run_here)
    with pytest.raises(ValueError, match=r"no file or folder 'txet.txt'"):
        compare("tiny.yaml", ["ls"], num_seeds=1, overrides=["--dataset_name", "txet.txt"])
    assert compare("tiny.yaml", ["ls"], num_seeds=1).name == "report.md"


def test_every_shipped_arm_is_a_recipe():
    base = parse_arguments("demo").recipe
    for arm in load_arms():
        arguments = resolve_arm(base, arm)
        config = arguments.build_config()
        assert config.num_global_heads == {"ls": 1, "mhsa": 6, "local": 0}[arm.split("-")[0]]
        assert (config.position_embedding_type == "rope") == (arm.endswith("-rope") or base["preset"] == "demo")
        assert config.attention_sinks == (arm == "ls-sinks")


def test_arms_join_the_recipe():
    base = parse_arguments("demo", ["--config_overrides", "{sliding_window: 9}", "--z_loss", "1e-4"]).recipe
    recipe = resolve_arm(base, "mhsa-qknorm").recipe
    assert recipe["config_overrides"] == {"sliding_window": 9, "num_global_heads": "all", "qk_norm": True}
    assert recipe["z_loss"] == 1e-4
    assert {name for name in base if base[name] != recipe[name]} == {"config_overrides", "run_name"}


def test_comparison_goes_on_where_it_was(tmp_path, monkeypatch):
    write_inputs(tmp_path, max_steps=30, eval_steps=15)  # long enough that the signal comes before the end
    program = fresh.Program("-m", "lsgpt_cli", "compare", "tiny.yaml", "--arms", "ls", "--seeds", "1")
    folder = tmp_path / "runs" / "compare-tiny"
    program.wait_until((folder / "ls" / "seed-42" / "checkpoint-2" / "trainer_state.json").exists, timeout=300)
    program.process.terminate()  # SIGTERM
    assert program.wait() == 2
    assert "Run the same command again to continue" in program.errors
    assert not (folder / "report.md").exists()

    monkeypatch.setattr("lsgpt.studies.runner.run_commands", run_here)
    arms = {"arms": ["ls", "wild"], "num_seeds": 1, "arms_file": "arms.yaml"}
    report = compare("tiny.yaml", **arms)
    assert report == folder.relative_to(tmp_path) / "report.md"
    ls, wild = read_lines(folder)
    assert ls["environment"]["commit"] and (ls["arm"], ls["values"]["step"]) == ("ls", 30)
    assert wild["values"]["status"].startswith("diverged at step")
    text = report.read_text()
    assert re.search(r"^\| wild \| - \| - \| not finite \|.*\| 1 of 1 \|$", text, re.MULTILINE)
    for plot in ("loss.png", "perplexity.png", "max_logits.png", "loss_by_position.png"):
        assert f"]({plot})" in text and (folder / plot).is_file()
    # It resumed: the run's log has the line of both starts.
    assert (folder / "ls" / "seed-42.log").read_text().count("Training ") == 2

    report.unlink()
    files = {path: path.stat().st_mtime_ns for path in folder.glob("*/seed-*/results.json")}
    compare("tiny.yaml", **arms)  # everything is there
    assert report.read_text() == text
    assert {path: path.stat().st_mtime_ns for path in files} == files and len(files) == 2
    compare("tiny.yaml", ["ls"], num_seeds=1)  # nor is anything lost of the arms that are not named
    assert report.read_text() == text

    # One tokenizer for all.
    tokenizers = {file.read_bytes() for file in folder.glob("*/seed-*/tokenizer.json")}
    assert tokenizers == {(folder / "tokenizer" / "tokenizer.json").read_bytes()}

    (tmp_path / "arms.yaml").write_text("wild: {learning_rate: 1.0e+13}\n")
    with pytest.raises(ValueError, match="has another recipe or another arm of the same name"):
        compare("tiny.yaml", **arms)
    write_inputs(tmp_path, learning_rate=1e-5)
    with pytest.raises(ValueError, match="`output_dir` must be new, or hold the same comparison"):
        compare("tiny.yaml", ["ls"])


def test_curves_of_long_runs(tmp_path):
    """Each point has the mean loss and the largest logit of its part."""
    RunResult(loss_by_position=[1.0]).write(tmp_path)
    logs = [{"step": step, "loss": step, "max_logit": 9.0 if step % 2 else 1.0} for step in range(1, 121)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(log)}\n" for log in logs))
    curves = collect(tmp_path)["curves"]
    assert curves["loss"][0] == (2, 1.5) and {value for _, value in curves["max_logit"]} == {9.0}


def test_an_arm_with_another_vocabulary_has_a_tokenizer_of_its_own(tmp_path, monkeypatch):
    write_inputs(tmp_path)
    recipe = parse_arguments("tiny.yaml").recipe
    arms = {"a": {}, "b": {"config_overrides": {"vocab_size": 280}}, "c": {"tokenizer": "bpe"}}
    (tmp_path / "comparison.yaml").write_text(yaml.safe_dump({"recipe": recipe, "arms": arms}))
    study, used = RecipeArms(tmp_path), []
    study.prepare(tmp_path, list(arms), ())

    def build(arguments):
        used.append(arguments.data.tokenizer)
        raise NotImplementedError

    monkeypatch.setattr("lsgpt.studies.study.build_trainer", build)
    for arm in arms:
        with pytest.raises(NotImplementedError):
            study.run(arm, 42, tmp_path, ())
    assert used == [str(tmp_path / "tokenizer"), "unigram", "bpe"]


def test_a_run_starts_anew_where_nobody_can_go_on(tmp_path):
    useless = tmp_path / "seed-43" / "checkpoint-9"
    useless.mkdir(parents=True)
    (useless / "trainer_state.json").write_text('{"global_step": 9}')
    assert find_checkpoint_or_delete_run(tmp_path / "seed-43") is None
    assert not (tmp_path / "seed-43").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"arms": ["msha"]}, "`arms` must be among ls, mhsa, .*; got 'msha'; did you mean 'mhsa'"),
        ({"arms": ["ls"], "num_seeds": 0}, "`num_seeds` must be at least 1; got 0"),
        ({"arms": ["ls"], "overrides": ["--max_stps", "1"]}, "did you mean '--max_steps'"),
        ({"arms": ["ls"], "arms_file": "nowhere.yaml"}, "arms nowhere.yaml cannot be read"),
        ({"arms": ["ls"], "arms_file": "off.yaml"}, "the name of an arm must be text; got False. In YAML, put such a"),
    ],
)
def test_mistakes_are_found_before_the_first_run(tmp_path, arguments, message):
    write_inputs(tmp_path)
    (tmp_path / "off.yaml").write_text("off: {}")
    with pytest.raises(ValueError, match=message):
        compare("tiny.yaml", **arguments)
    assert not (tmp_path / "runs").exists()


def test_the_command_passes_its_options_on(monkeypatch):
    calls = []
    monkeypatch.setattr(sys.modules[compare.__module__], "compare", lambda *arguments: calls.append(arguments))
    options = ["--arms-file", "arms.yaml", "--output-dir", "here", "--processes", "3", "--max_steps", "5"]
    assert lsgpt_cli.main(["compare", "tiny.yaml", "--arms", "ls, wild", "--seeds", "2", *options]) == 0
    assert calls == [("tiny.yaml", ["ls", "wild"], 2, "here", ["--max_steps", "5"], "arms.yaml", 3)]


def test_a_run_that_fails_is_shown(tmp_path, monkeypatch):
    write_inputs(tmp_path)
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(ChildProcessError, match=r"ls with seed 42 ended with status \d.* its output is in .*42.log"):
        compare("tiny.yaml", ["ls"], num_seeds=1)


def test_table_over_uneven_runs(tmp_path):
    """Diverged runs do not count towards the mean, and a run without measured logits has none."""
    recipe = {"run_name": "x", "seed": 7}
    (tmp_path / "comparison.yaml").write_text(yaml.safe_dump({"recipe": recipe, "arms": {"a": {}}}))
    study, lines = RecipeArms(tmp_path), []
    assert study.first_seed == 7
    values = [
        ("finished", 10.0, None),
        ("finished", 14.0, 30.0),
        ("diverged", math.nan, 500.0),
        ("stopped", 9.0, 10.0),
    ]
    for seed, (outcome, perplexity, max_logit) in enumerate(values):
        run = tmp_path / "a" / f"seed-{seed}"
        run.mkdir(parents=True)
        speed = math.nan if seed == 0 else 100.0 * seed  # NaN: the run was resumed after its last step
        RunResult(
            outcome=outcome,
            eval_perplexity=perplexity,
            eval_bits_per_byte=1.5,
            max_logit=max_logit,
            tokens_per_second=speed,
            peak_memory_bytes=2_000_000_000,
            loss_by_position=[2.0, math.nan, 1.0],
        ).write(run)
        log = {"step": 1, "loss": 2.0} | ({"max_logit": max_logit} if max_logit else {})
        (run / "metrics.jsonl").write_text(f'{json.dumps(log)}\n{{"step": 2, "loss": "NaN"}}\n')
        found = collect(run) | study.measure(run)
        lines.append({"arm": "a", "seed": seed, "seconds": 1.0, "environment": {}, "values": found})
    (tmp_path / "runs.jsonl").write_text("".join(f"{json.dumps(finite(line))}\n" for line in lines))
    report = write_report(study, tmp_path).read_text()
    assert "| a | 12.00 ± 2.83 | 1.5000 ± 0.0000 | 180.0 ± 277.3 | 200 ± 100 | 2 GB | 2 of 4 |" in report
    assert "](perplexity.png)" not in report and "## Claims" not in report


@pytest.mark.parametrize(("given", "found"), [(None, "3"), ("5", "5")])
def test_runs_share_the_cores(tmp_path, monkeypatch, given, found):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(7)))
    monkeypatch.delenv("OMP_NUM_THREADS")
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    command = [sys.executable, "-c", "import os; print(os.environ['OMP_NUM_THREADS'])"]
    logs = [tmp_path / f"{i}.log" for i in range(2)]
    assert sorted(run_commands([command] * 2, logs, 2)) == [(0, 0), (1, 0)]
    assert [log.read_text() for log in logs] == [f"{found}\n"] * 2


def test_a_run_that_fails_ends_the_others(tmp_path):
    scripts = ["raise SystemExit(3)", "import time; time.sleep(600)"]
    commands = [[sys.executable, "-c", script] for script in scripts]
    logs = [tmp_path / f"{i}.log" for i in range(2)]
    start = time.monotonic()
    with pytest.raises(ChildProcessError), closing(run_commands(commands, logs, 2)) as ended:
        index, status = next(ended)
        assert (index, status) == (0, 3)
        raise ChildProcessError
    assert time.monotonic() - start < 60


def test_names_of_arms_are_not_patterns(tmp_path, monkeypatch):
    write_inputs(tmp_path)
    (tmp_path / "arms.yaml").write_text('{"ls*": {}, "ls[1]": {}}')
    started = []

    def run_commands(commands, *_):
        started.extend(command[4] for command in commands)
        raise InterruptedError
        yield

    monkeypatch.setattr("lsgpt.studies.runner.run_commands", run_commands)
    with pytest.raises(InterruptedError):
        compare("tiny.yaml", ["ls*", "ls[1]"], 1, arms_file="arms.yaml")
    assert started == ["ls*", "ls[1]"]
