"""Benchmarks run, at a size that takes seconds, and refuse to time what does not compute the right thing."""

import importlib
import json
import os
import re
import runpy
import shutil
import subprocess
from pathlib import Path

import fresh
import pytest
import torch

import lsgpt_cli
from lsgpt.benchmarks import gate, long_context, memory, prefill, record, serving, split, suite, telemetry, train
from lsgpt.benchmarks.peers import Benchmark, Peer
from lsgpt.configuration import load_preset
from lsgpt.training.data import train_tokenizer
from lsgpt.training.telemetry import summarize_max_logits
from lsgpt.utilities import environment


TINY = ["--preset", "demo", "--length", "100", "--steps", "4", "--every_n_steps", "2", "--threads", "1"]


def test_telemetry(tmp_path, capsys):
    telemetry.main([*TINY, "--rounds", "2", "--output", str(tmp_path / "results.json")])
    result = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert [len(row[name]) for row in result["rounds"] for name in ("seconds_without", "seconds_with")] == [4] * 4
    ratios = [sum(row["seconds_with"]) / sum(row["seconds_without"]) for row in result["rounds"]]
    assert result["ratios"] == pytest.approx(ratios)
    assert result["settings"]["every_n_steps"] == 2
    assert result["command"].startswith("lsgpt bench telemetry --preset demo")
    assert result["environment"]["commit"]
    printed = capsys.readouterr().out
    assert printed.startswith("checked: 5 maxima")
    assert f"median {result['median_ratio']:.4f}" in printed


def test_telemetry_overhead_is_that_of_the_measured_steps():
    rounds = [
        {"seconds_without": [1.0] * 4, "seconds_with": [1.0, 1.0, 1.0, 1.2]},
        {"seconds_without": [2.0] * 4, "seconds_with": [1.0, 1.0, 1.0, 1.4]},
    ]
    summary = telemetry.summarize(rounds, every_n_steps=4)
    assert summary["ratios"] == pytest.approx([4.2 / 4, 4.4 / 8])
    assert summary["median_ratio"] == pytest.approx(0.8)
    assert summary["measured_step_ratio"] == pytest.approx(1.3)
    assert summary["implied_ratio"] == pytest.approx(1.075)


@pytest.mark.parametrize("factor", [1.001, torch.nan])
def test_telemetry_that_measures_wrongly_is_not_timed(factor, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "lsgpt.training.telemetry.summarize_max_logits",
        lambda maxima, *others: summarize_max_logits(maxima * factor, *others),
    )
    with pytest.raises(RuntimeError, match="of the batch is"):
        telemetry.main([*TINY, "--output", str(tmp_path / "results.json")])


def test_telemetry_that_changes_the_training_is_not_timed(tmp_path, monkeypatch):
    class Disturbs(telemetry.LogitTelemetryCallback):
        def on_step_begin(self, args, state, control, model=None, **kwargs):
            super().on_step_begin(args, state, control, **kwargs)
            model.lm_head.weight.data.mul_(1.001)

    monkeypatch.setattr(telemetry, "LogitTelemetryCallback", Disturbs)
    with pytest.raises(RuntimeError, match="changes the losses"):
        telemetry.main([*TINY, "--output", str(tmp_path / "results.json")])
    assert not (tmp_path / "results.json").exists()


def test_results_name_the_commit(tmp_path, monkeypatch):
    clone = tmp_path / "clone"
    (clone / "utilities").mkdir(parents=True)
    shutil.copy(environment.__file__, clone / "utilities")
    monkeypatch.setattr(environment, "__file__", str(clone / "utilities" / "environment.py"))
    # An installed package has no commit, not even inside another project's clone.
    git(tmp_path, "init")
    assert record.begin_result("memory")["environment"]["commit"] == "none: the installed package, version 0.1.0"

    git(clone, "init")
    git(clone, "add", ".")
    git(clone, "-c", "user.name=A", "-c", "user.email=a@example.com", "commit", "-m", "first")
    commit = git(clone, "rev-parse", "HEAD")
    result = record.begin_result("memory", "--lengths", "8 9")
    assert result["command"] == "lsgpt bench memory --lengths '8 9'"
    assert result["environment"]["commit"] == commit
    (clone / "utilities" / "environment.py").write_text("changed")
    assert environment.describe_environment()["commit"] == f"{commit}-dirty"
    monkeypatch.setenv("PATH", "")
    assert environment.describe_environment()["commit"].startswith("unknown")


def test_pages_show_the_committed_results():
    script = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "fill_measurements.py"))
    pages = [page.read_text(encoding="utf-8") for page in script["PAGES"]]
    for page in pages:
        assert page.count("<!-- table: ") == page.count("<!-- end -->") > 0
        assert script["fill"](page) == page, "run `python docs/fill_measurements.py`"
    assert "".join(pages).count("<!-- table: ") == len(script["TABLES"])


def test_tables_come_from_results_that_name_their_command_and_commit():
    docs = Path(__file__).parents[2] / "docs"
    page = (docs / "measurements.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)]*)\)", "".join(re.findall("^From .*$", page, re.MULTILINE)))
    assert len(links) > 15
    for link in set(links):
        text = (docs / link).read_text(encoding="utf-8")
        results = [json.loads(part) for part in (text.splitlines() if link.endswith(".jsonl") else [text])]
        assert all(re.fullmatch("[0-9a-f]{40}", result["environment"]["commit"]) for result in results), link
        assert link.endswith(".jsonl") or all(result["command"] for result in results), link


def test_pictures_are_those_of_the_results(tmp_path):
    docs = Path(__file__).parents[2] / "docs"
    script = runpy.run_path(str(docs / "draw.py"))
    for name in script["PICTURES"]:
        script["draw"](name, tmp_path)
    drawn = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    assert len(drawn) == 2 * len(script["PICTURES"])
    for name, picture in drawn.items():
        assert picture == (docs / "pictures" / name).read_text(encoding="utf-8"), "run `python docs/draw.py`"


def git(folder, *arguments):
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_memory_and_long_context(tmp_path, capsys, monkeypatch):
    # Without `--output`, results are written where the command runs, and not into the package.
    monkeypatch.chdir(tmp_path)
    memory.main(["--growth_lengths", "64", "--lengths", "256", "--preset", "demo"])
    lengths = ["--length", "300", "--local_length", "1000", "--chunk_length", "256", "--mhsa_length", "100"]
    long_context.main(lengths)
    printed = capsys.readouterr().out
    result = json.loads((tmp_path / "runs" / "bench" / "memory.json").read_text(encoding="utf-8"))
    assert result["environment"]["commit"] and result["command"].startswith("lsgpt bench memory --growth_lengths 64")
    assert {(row["model"], row["tokens"]) for row in result["rows"]} == {
        *((name, 64) for name in memory.GROWTH),
        *((name, 256) for name in (*memory.FAMILIES, "gpt2")),
    }
    peaks = {row["model"]: row["peak_bytes"] for row in result["rows"]}
    assert all(row["bytes_per_token"] == row["peak_bytes"] / row["tokens"] for row in result["rows"])
    assert peaks["lsgpt"] - peaks["lsgpt-no-logits"] > 5e5  # the logits and their gradients: about 2 MB
    assert max(peaks.values()) < 1e8  # without what the process had already held
    shares = {tuple(x["families"]): x["share"] for x in result["ratios"]}
    # With logits on both sides, and without them on ours.
    assert {("lsgpt", "mhsa"), ("lsgpt", "gpt2"), ("lsgpt-no-logits", "gpt2")} <= shares.keys()
    for (one, other), share in shares.items():
        assert share == pytest.approx(peaks[one] / peaks[other])
        assert f"{one} / {other}" in printed
    result = json.loads((tmp_path / "runs" / "bench" / "long_context.json").read_text(encoding="utf-8"))
    assert result["environment"]["commit"]
    assert all(row["peak_bytes"] < 1e8 for row in result["rows"])
    mhsa, same_length, whole, local = result["rows"]
    assert mhsa["cache_bytes"] == 2 * 6 * 6 * 100 * 32 * 4 and same_length["tokens"] == 100
    # The window of 50 keeps 49 keys and values of 32 numbers, in each of 6 layers and for each of 6 heads.
    assert local["cache_bytes"] == 2 * 6 * 6 * 49 * 32 * 4
    assert whole["cache_bytes"] == 2 * 6 * (300 + 5 * 49) * 32 * 4


def test_a_measurement_that_is_killed_is_an_error():
    with pytest.raises(ChildProcessError, match="a measurement was killed, probably for want of memory"):
        memory.in_own_process(os._exit, 1)


def test_serving_counts_the_tokens_that_are_the_same(tmp_path, monkeypatch, capsys):
    """`serving/` runs it with vLLM, whose continuations all agree."""
    monkeypatch.setattr(serving, "packages_distributions", dict)
    with pytest.raises(ValueError, match=r"needs vLLM: pip install '\.\[serve\]'"):
        serving.main([])
    monkeypatch.setattr(serving, "packages_distributions", lambda: {"vllm": ["torch"]})
    with pytest.raises(ValueError, match="`--text` needs models with weights"):
        serving.main(["--text", "text.txt"])
    monkeypatch.setattr(serving, "continue_prompts", lambda *arguments: [[1, 2, 3, 4]] * 3)
    monkeypatch.setattr(
        serving, "in_own_process", lambda *arguments: (9.5, [[1, 2, 3, 4], [1, 2, 0, 4], [0, 2, 3, 4]])
    )
    monkeypatch.setattr(serving, "PASSAGES", (2, 4, 8))
    train_tokenizer([], 258).save_pretrained(tmp_path)
    (tmp_path / "short.txt").write_text("0 1 2 3 4 5 6 7 8 9 " * 20, encoding="utf-8")
    with pytest.raises(ValueError, match=r"`--text` must have at least 4,104 tokens; '.*short.txt' has \d+"):
        serving.main([str(tmp_path), "--text", str(tmp_path / "short.txt")])
    (tmp_path / "text.txt").write_text("0 1 2 3 4 5 6 7 8 9 " * 2000, encoding="utf-8")
    sizes = ["--block_sizes", "32", "--batched_tokens", "256", "--output", str(tmp_path / "serving.json")]
    serving.main([str(tmp_path), "--text", str(tmp_path / "text.txt"), *sizes])
    result = json.loads((tmp_path / "serving.json").read_text(encoding="utf-8"))
    settings = {"block_size": 32, "max_num_batched_tokens": 256}
    assert result["rows"] == [{"model": str(tmp_path), **settings, "requests": 9.5, "equal_tokens": [4, 2, 0]}]
    assert result["environment"]["torch"] == torch.__version__ and "requests 9.5" in capsys.readouterr().out


def test_split_receives_what_the_formula_says(tmp_path):
    options = ["--processes", "1", "3", "--length", "192", "--steps", "2", "--preset", "demo"]
    printed = fresh.run("-m", "lsgpt_cli", "bench", "split", *options, "--output", "split.json", cwd=tmp_path)
    assert printed.count("of the time with --processes 1\n") == 4
    rows = json.loads((tmp_path / "split.json").read_text(encoding="utf-8"))["rows"]
    assert [(row["model"], row["processes"]) for row in rows] == [(name, n) for name in split.MODELS for n in (1, 3)]
    config = load_preset("demo")
    local = config.num_attention_heads - 1
    # The last of three parts of 64 tokens, in float32. A global head needs the 128 tokens before it, and trades 32
    # queries and outputs; a local head needs the tokens in its window.
    per_head = 2 * config.head_dim * 4 * config.num_hidden_layers
    expected = per_head * (160 + local * min(config.sliding_window - 1, 128)), per_head * 160 * (1 + local)
    assert [row["received_bytes"] for row in rows] == [0, expected[0], 0, expected[1]]
    assert all(row["received_bytes"] == row["formula_bytes"] and row["seconds"] > 0 for row in rows)
    assert all(row["peak_bytes"] < 1e8 for row in rows)


def test_split_takes_the_highest_figures_and_the_bytes_of_the_last_process(monkeypatch):
    def start(function, arguments, processes, start_method):
        for rank in range(processes):
            figures = {"peak_bytes": 9 - rank, "received_bytes": rank, "seconds": 5 - rank}
            Path(arguments[0], f"{rank}.json").write_text(json.dumps(figures), encoding="utf-8")

    monkeypatch.setattr(split.multiprocessing, "start_processes", start)
    assert split.run(3) == {"peak_bytes": 9, "received_bytes": 2, "seconds": 5}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--preset", "dem"], "did you mean 'demo'"),
        (["--processes", "0"], "argument --processes: must be an integer of 1 or more; got '0'"),
        (["--steps", "0"], "argument --steps: must be an integer of 1 or more; got '0'"),
        (["--length", "190"], "`--length` must be a multiple of every number of `--processes`; got 190"),
    ],
)
def test_mistakes_are_found_before_processes_start(options, message, capsys):
    command = ["bench", "split", "--processes", "1", "3", *options]
    try:
        assert lsgpt_cli.main(command) == 2
    except SystemExit as end:
        assert end.code == 2
    assert message in capsys.readouterr().err


def test_split_has_a_gpu_for_each_process(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(SystemExit):
        lsgpt_cli.main(["bench", "split", "--processes", "1", "4"])
    assert "`--processes` must be at most 2, the number of GPUs; got 4" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["memory", "long_context"])
def test_what_was_measured_stays_if_the_next_one_is_killed(name, tmp_path, monkeypatch, capsys):
    module, measured = importlib.import_module(f"lsgpt.benchmarks.{name}"), []

    def in_own_process(*_):
        if measured:
            raise ChildProcessError("killed")
        measured.append(name)
        return 2**20 if name == "memory" else dict.fromkeys(("seconds", "peak_bytes", "cache_bytes"), 1)

    monkeypatch.setattr(module, "in_own_process", in_own_process)
    file = tmp_path / "result.json"
    assert lsgpt_cli.main(["bench", name, "--output", str(file)]) == 2
    assert len(json.loads(file.read_text(encoding="utf-8"))["rows"]) == 1


@pytest.mark.parametrize("options", [["memory", "--lengths", "0"], ["serving", "here", "--batched_tokens", "0"]])
def test_numbers_of_tokens_are_positive(options, capsys):
    with pytest.raises(SystemExit):
        lsgpt_cli.main(["bench", *options])
    assert f"argument {options[-2]}: must be an integer of 1 or more; got '0'" in capsys.readouterr().err


def test_shapes_have_the_heads_of_their_names():
    for name, heads in (("local-only", 0), ("global-only", 6)):
        assert set(memory.build_model(name, 64, "demo").config.num_global_heads_per_layer) == {heads}
    alike = serving.SHAPES["lsgpt"].equal_mhsa()
    assert serving.SHAPES["mhsa"].num_global_heads_per_layer == alike.num_global_heads_per_layer


@pytest.mark.parametrize("name", ["lsgpt-no-logits", "mhsa", "llama"])
def test_memory_of_llamas_blocks(name, tmp_path):
    """The model in a folder gives the shape of all of them."""
    fields = {"vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6}
    load_preset("smollm2-135m", **fields, num_global_heads=[2, 0], sliding_window=20).save_pretrained(tmp_path)
    config = memory.build_model(name, 64, str(tmp_path)).config
    shape = config.vocab_size, config.hidden_size, config.num_hidden_layers, config.num_attention_heads
    assert shape == (97, 48, 2, 6) and config.max_position_embeddings == 64
    assert config.model_type == ("llama" if name == "llama" else "lsgpt")
    if name != "llama":
        assert config.num_global_heads_per_layer == ([2, 0] if name == "lsgpt-no-logits" else [6, 6])


def test_times_are_those_of_one_repetition(shape, monkeypatch):
    peers = dict.fromkeys(("lsgpt sdpa", "mhsa sdpa", "gpt2 sdpa"))
    monkeypatch.setitem(suite.BENCHMARKS, "decode", lambda shape: Benchmark(peers, [], {}, repeats=4))
    monkeypatch.setattr(suite, "measure", lambda *_: {"lsgpt sdpa": [8.0], "mhsa sdpa": [16.0], "gpt2 sdpa": [4.0]})
    assert suite.run("decode", shape, 1.0)["seconds"]["lsgpt sdpa"] == [2.0]


def test_prefill_fills_a_cache_and_gives_the_last_logits(shape, monkeypatch):
    calls = []
    monkeypatch.setattr(Peer, "__call__", lambda self, **inputs: calls.append(inputs))
    next(iter(prefill.prepare(shape).peers.values()))()()
    assert calls[-1]["use_cache"] and calls[-1]["logits_to_keep"] == 1 and calls[-1]["input_ids"].shape == (2, 75)


def test_a_training_step_updates_the_weights(shape, monkeypatch):
    updated, update = [], torch.optim.AdamW.step

    def step(self, *args):
        updated.append(sum(x.grad is not None for group in self.param_groups for x in group["params"]))
        return update(self, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    peers = train.prepare(shape).peers
    assert "gpt2 sdpa" in peers  # whose optimizer is its own
    for number, prepare in enumerate(peers.values(), 1):
        prepare()()
        assert len(updated) == number and updated[-1]


def test_a_few_times_the_error_of_rounding_is_allowed():
    exact = torch.ones(9)
    gate.compare("sums", exact + 0.02, exact, exact + 0.01)
    for wrong in (0.05, torch.nan):
        with pytest.raises(RuntimeError, match="sums: wrong by"):
            gate.compare("sums", exact + wrong, exact, exact + 0.01)
