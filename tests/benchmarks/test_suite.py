"""The benchmark suite on tiny shapes: what it writes, what it refuses to time, and how it counts."""

import json
import re
import statistics

import pytest
import torch
from PIL import Image

import lsgpt_cli
from lsgpt.benchmarks import (
    floor,
    peers,
    plots,
    suite,
    targets,
    timing,
)
from lsgpt.benchmarks.peers import Shape
from lsgpt.configuration import load_preset
from lsgpt.modeling_lsgpt import (
    FULL_WINDOW,
)


def test_command(tmp_path, capsys):
    command = ["bench", "--preset", "demo", "--device", "cpu", "--lengths", "40", "130", "--budget", "0"]
    command += ["--engines", "sdpa", "eager", "flash_attention_2", "--output", str(tmp_path)]
    assert lsgpt_cli.main(command) == 0
    printed = capsys.readouterr().out
    result = json.loads((tmp_path / "bench-cpu.json").read_text(encoding="utf-8"))
    assert result["command"].startswith("lsgpt bench --preset demo")
    assert result["environment"].keys() >= {"hardware", "system", "Python", "commit", "torch", "transformers"}
    assert result["model"]["num_global_heads"] == 1

    names = ["attention", "prefill", "decode", "train"]
    assert [(row["benchmark"], row["length"]) for row in result["rows"]] == [(x, n) for x in names for n in (40, 130)]
    for row in result["rows"]:
        ours = {"lsgpt sdpa", "mhsa sdpa", "mhsa eager", "limit sdpa"}
        gpt2 = {"gpt2 sdpa", "gpt2-gelu sdpa"}
        others = {"attention": set(), "train": gpt2 | {"lsgpt-no-logits sdpa"}}.get(row["benchmark"], gpt2)
        assert row["seconds"].keys() == ours | others
        assert ("lsgpt", "mhsa") in {tuple(x["families"]) for x in row["ratios"]}
        assert row["skipped"].keys() == {"lsgpt flash_attention_2", "mhsa flash_attention_2"}
        assert row["gates"] == {"decode": 6, "train": 4}.get(row["benchmark"], 3)
        assert all(len(seconds) == 3 for seconds in row["seconds"].values())
        for x in row["ratios"]:
            if x["benchmark"] == "cache":
                continue
            a, b = (row["seconds"][peer] for peer in x["peers"])
            assert x["median"] == pytest.approx(statistics.median(i / j for i, j in zip(a, b)))
            assert x["target"] is None  # they are for another shape
            assert " / ".join(x["peers"]) in printed
        assert Image.open(tmp_path / f"bench-cpu-{row['benchmark']}.png").format == "PNG"

    caches = {row["length"]: row["cache_bytes"] for row in result["rows"] if "cache_bytes" in row}
    a_token = 2 * 2 * 24 * 4  # layers, key and value, head_dim, bytes
    assert caches[130] == {"lsgpt": a_token * (130 + 5 * 49), "mhsa": a_token * 6 * 130, "gpt2": a_token * 6 * 130}
    assert caches[40]["lsgpt"] == caches[40]["gpt2"]


def test_quick_look_explains_itself_and_judges_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(suite, "QUICK_LENGTHS", (40,))
    monkeypatch.setattr(suite, "LENGTHS", (40,))
    monkeypatch.setitem(targets.TARGETS, ("cpu", "attention", "lsgpt", "mhsa"), {40: 0.0})
    smaller = {"hidden_size": 48, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 6}
    monkeypatch.setattr(peers, "load_preset", lambda name, **fields: load_preset(name, **{**fields, **smaller}))
    monkeypatch.setattr("sys.argv", ["lsgpt"])
    command = ["bench", "attention", "train", "--device", "cpu", "--budget", "0", "--output", str(tmp_path)]
    assert lsgpt_cli.main([*command, "--quick"]) == 0
    printed = capsys.readouterr().out
    assert "target" not in printed.lower() and "MISSED" not in printed
    for family in suite.QUICK_FAMILIES:
        assert (peers.FAMILIES[family] in printed) == (family != "llama")  # the blocks are GPT-2's
    assert "bound" not in printed and "GPT-2's own" not in printed  # they are not timed
    lines = [line.split() for line in printed.splitlines() if line.startswith("  train, ")]
    assert [line[:-3] for line in lines] == [
        x.split() for x in ("train, logits on both sides", "train, LSGPT without logits")
    ]
    row = json.loads((tmp_path / "bench-cpu-quick.json").read_text(encoding="utf-8"))["rows"][1]
    shares = {tuple(x["families"]): f"{x['median']:.2f}" for x in row["ratios"]}
    for line, family in zip(lines, ("lsgpt", "lsgpt-no-logits")):
        assert line[-3:] == ["40", shares[family, "mhsa"], shares[family, "gpt2"]]

    assert lsgpt_cli.main([*command[:2], *command[3:], "--engines", "sdpa"]) == 0
    assert "0.000 MISSED" in capsys.readouterr().out


def test_plots_show_words_and_measured_lengths(tmp_path, monkeypatch):
    figures = []
    save = plots.Figure.savefig
    monkeypatch.setattr(
        plots.Figure,
        "savefig",
        lambda figure, *args, **options: figures.append(figure) or save(figure, *args, **options),
    )
    seconds = {"lsgpt sdpa": [1.0], "mhsa sdpa": [2.0], "gpt2 sdpa": [4.0], "limit sdpa": [0.9]}
    shape = Shape(load_preset("gpt2-small"), 2048)
    rows = [
        {
            "length": length,
            "ratios": suite.compare_peers("prefill", shape._replace(length=length), seconds, {}, targets.TARGETS),
        }
        for length in (2048, 8192)
    ]
    plots.plot_ratios(tmp_path / "plot.png", "prefill", rows)
    multi_head, gpt2 = figures[0].axes
    for axes in (multi_head, gpt2):
        assert list(axes.get_xticks()) == [2048, 8192]
        assert [label.get_text() for label in axes.get_xticklabels()] == ["2,048", "8,192"]
        assert not len(axes.get_xticks(minor=True))
    assert gpt2.get_title() == "Transformers' GPT-2 = 1"
    texts = [text.get_text() for text in figures[0].legends[0].get_texts()]
    assert "target: LSGPT, at most this" in texts and "multi-head attention in the same code" in texts
    assert not {"lsgpt", "limit", "mhsa", "target of lsgpt"} & set(texts)
    lines = {line.get_label(): list(line.get_ydata()) for line in gpt2.lines}
    assert (lines["LSGPT"], lines["target: LSGPT, at most this"]) == ([0.25, 0.25], [0.88, 0.66])

    cached = {"lsgpt": 1, "gpt2": 10}
    rows = [{"length": 2048, "ratios": suite.compare_peers("decode", shape, seconds, cached, {})}]
    plots.plot_ratios(tmp_path / "plot.png", "decode", rows)
    lines = {line.get_label(): list(line.get_ydata()) for line in figures[1].axes[1].lines}
    assert (lines["LSGPT"], lines[plots.CURVES["cache"]]) == ([0.25], [0.1])


@pytest.mark.parametrize(
    ("error", "skipped"),
    [
        (TypeError("attend() got an unexpected keyword argument 'scale'"), False),
        (RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"), False),
        (ValueError("`attention_mask` must have 2 dimensions"), False),
        (KeyError("attn_implementation="), False),
        (ValueError('no backward pass on the CPU; train with attn_implementation="sdpa"'), True),
        (RuntimeError("No available kernel. Aborting execution."), True),
        (ImportError("FlashAttention is not installed"), True),
        (NotImplementedError("for the device"), True),
    ],
)
def test_only_what_is_missing_here_is_skipped(error, skipped):
    def fail(peer):
        raise error

    found = peers.Peers()
    if skipped:
        found.add("lsgpt other", object, fail)
        assert found.skipped == {"lsgpt other": str(error)} and not found
    else:
        with pytest.raises(RuntimeError, match="lsgpt other fails in a small trial with") as caught:
            found.add("lsgpt other", object, fail)
        assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prefil"], "got 'prefil'; did you mean 'prefill'?"),
        (["prefill", "memory"], "'memory' has its own options and must run alone: lsgpt bench memory"),
        (["--lengths", "2048", "2"], "`--lengths` must be 3 or more; got 2"),
        (["--preset", "dem"], "did you mean 'demo'"),
        (["--rounds", "0"], "`--rounds` must be 1 or more; got 0"),
        (["train", "--device", "cpu", "--families", "telemetry"], "`--families telemetry` needs a GPU; on a CPU"),
        (["--int8"], "`--int8` is for models that are not trained: lsgpt bench prefill decode --int8"),
        (["decode", "train", "--int8"], "`--int8` is for models that are not trained"),
    ],
)
def test_mistakes(arguments, message, capsys):
    assert lsgpt_cli.main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attn_logit_softcapping": 30.0}, "cannot soft-cap logits; `attn_logit_softcapping` of .* is 30.0"),
        ({"final_logit_softcapping": 30.0}, "cannot soft-cap logits; `final_logit_softcapping` of .* is 30.0"),
        ({"norm_type": "rms_norm_after"}, "norms are before attention and MLP; `norm_type` of .* is 'rms_norm_after'"),
        ({"num_key_value_heads": 3, "num_global_heads": 2}, "GPT-2 has no grouped queries"),
        ({"head_dim": 8}, "GPT-2 has no grouped queries, and `head_dim` is"),
    ],
)
def test_a_model_without_an_equal_is_not_compared(fields, message, tmp_path):
    load_preset("demo", num_attention_heads=6, hidden_size=96, **fields).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        peers.load_shape(str(tmp_path))


def test_models_are_compared_without_dropout(tmp_path):
    load_preset("demo", resid_dropout=0.1, attention_dropout=0.1, embd_dropout=0.1).save_pretrained(tmp_path)
    config = peers.load_shape(str(tmp_path))
    assert config.resid_dropout == config.attention_dropout == config.embd_dropout == 0


@pytest.fixture
def runs(monkeypatch):
    """The arguments of `suite.run`, which is called but times nothing."""
    calls = []

    def record(name, shape, *others):
        calls.append((name, shape, *others))
        return {"benchmark": name, "length": shape.length, "ratios": []}

    monkeypatch.setattr(suite, "run", record)
    monkeypatch.setattr(suite, "print_row", lambda row: None)
    monkeypatch.setattr(suite, "save", lambda *args: None)
    return calls


def test_training_on_long_rows_is_timed_on_a_cpu_only_if_it_is_asked_for(tmp_path, runs):
    """It takes minutes a step."""
    command = ["bench", "train", "prefill", "--device", "cpu", "--output"]
    assert lsgpt_cli.main([*command, str(tmp_path / "default")]) == 0
    assert lsgpt_cli.main([*command, str(tmp_path / "asked"), "--lengths", "16384"]) == 0
    assert [(name, shape.length) for name, shape, *_ in runs] == [
        *(("train", length) for length in suite.LENGTHS if length <= 8192),
        *(("prefill", length) for length in suite.LENGTHS),
        ("train", 16384),
        ("prefill", 16384),
    ]
    assert max(suite.LENGTHS) > 8192


@pytest.mark.parametrize(
    ("options", "engines", "dtype", "budget", "rounds", "has_targets"),
    [
        ([], peers.ENGINES, torch.float32, 120.0, 3, True),
        (["--engines", "eager"], ("sdpa", "eager"), torch.float32, 120.0, 3, True),
        (["--quick"], ("sdpa",), torch.float32, 3.0, 2, False),
        (["--dtype", "float32"], peers.ENGINES, torch.float32, 120.0, 3, True),
        (["--dtype", "bfloat16", "--budget", "7"], None, torch.bfloat16, 7.0, 3, False),
        (["--int8", "--rounds", "5"], None, torch.float32, 120.0, 5, False),
    ],
)
def test_what_is_run_by_default(tmp_path, runs, options, engines, dtype, budget, rounds, has_targets):
    """LSGPT is always timed on `sdpa`, too; targets are for whole models in plain float32."""
    command = ["bench", "prefill", "--device", "cpu", "--lengths", "2048", "--output", str(tmp_path)]
    assert lsgpt_cli.main([*command, *options]) == 0
    ((_, shape, *others),) = runs
    assert engines in (None, shape.engines) and (shape.dtype, shape.batch_size) == (dtype, 1)
    assert others[:3] == [budget, rounds, targets.TARGETS if has_targets else {}]
    assert shape.config.num_hidden_layers == (1 if "--quick" in options else 12)
    assert "gpt2" in others[4] and ("limit" in others[4]) == ("--quick" not in options)


def test_batches_on_a_gpu(tmp_path, runs, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(suite, "begin_result", lambda *args: {})
    monkeypatch.setattr(suite, "measure_rates", lambda *args: (1.0, 1.0))
    suite.main(["prefill", "decode", "--device", "cuda", "--output", str(tmp_path)])
    sizes = [(name, shape.length, shape.batch_size) for name, shape, *_ in runs]
    assert sizes == [
        *(("prefill", length, size) for length, size in zip(suite.LENGTHS, (8, 2, 1))),
        *(("decode", length, 16) for length in suite.LENGTHS),
    ]
    assert {shape.dtype for _, shape, *_ in runs} == {torch.bfloat16}


@pytest.mark.parametrize("name", ["memory", "telemetry", "long_context", "quality", "split"])
def test_other_measurements_get_their_own_options(name, monkeypatch):
    got = []
    monkeypatch.setattr(f"lsgpt.benchmarks.{name}.main", got.extend)
    assert lsgpt_cli.main(["bench", name, "--output", "x.json"]) == 0
    assert got == ["--output", "x.json"]


def test_peers_are_timed_in_turn(monkeypatch):
    clock, log = [0.0], []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

    def peer(name, seconds):
        def prepare():
            clock[0] += 0.5  # nobody's time

            def run():
                log.append(name)
                clock[0] += seconds

            return run

        return prepare

    runs = {"a": peer("a", 1.0), "b": peer("b", 3.0)}
    assert timing.measure(runs, "cpu", budget=20.0) == {"a": [1.0] * 4, "b": [3.0] * 4}
    assert log == ["a", "b"] * (1 + 4)  # a warm-up, and as many rounds of 5 seconds as the budget has room for
    assert timing.measure(runs, "cpu", budget=0.0, min_rounds=2)["a"] == [1.0] * 2
    assert timing.measure(runs, "cpu", budget=1000.0, max_rounds=7)["a"] == [1.0] * 7
    log.clear()
    assert timing.measure(runs, "cpu", budget=3.0, min_rounds=1) == {"a": [1.0], "b": [3.0]}
    assert log == ["a", "b"]  # the warm-up alone


def test_ratios_of_given_times():
    seconds = {
        "lsgpt sdpa": [2.0, 4.0, 2.0],
        "lsgpt other": [5.0, 6.0, 5.0],
        "mhsa sdpa": [9.0, 9.0, 9.0],
        "mhsa other": [8.0, 5.0, 5.0],
        "limit sdpa": [2.0, 2.0, 1.0],
    }
    shape = Shape(load_preset("gpt2-small"), 2048)
    ratios = suite.compare_peers("prefill", shape, seconds, {}, targets.TARGETS)
    found = {x["families"]: x for x in ratios}
    assert found.keys() == {("lsgpt", "mhsa"), ("lsgpt", "limit"), ("limit", "mhsa")}
    ours = found["lsgpt", "mhsa"]
    assert ours["peers"] == ["lsgpt sdpa", "mhsa other"]
    # By round 0.25, 0.8 and 0.4; the ratio of the medians would be another one.
    assert (ours["median"], ours["low"], ours["high"]) == (0.4, 0.25, 0.8)
    assert (ours["target"], ours["met"]) == (None, None)
    assert (found["lsgpt", "limit"]["median"], found["lsgpt", "limit"]["met"]) == (2.0, False)
    assert found["lsgpt", "limit"]["target"] == 1.06

    on_cuda = suite.compare_peers("prefill", shape._replace(device="cuda"), seconds, {}, targets.TARGETS)
    assert [(x["target"], x["met"]) for x in on_cuda if x["families"] == ("lsgpt", "mhsa")] == [(0.95, True)]
    assert not any(x["target"] for x in suite.compare_peers("prefill", shape, seconds, {}, {}))

    cache = suite.compare_peers("decode", shape, {}, {"lsgpt": 129, "mhsa": 500, "gpt2": 1000}, targets.TARGETS)
    assert [(x["median"], x["target"], x["met"]) for x in cache] == [(0.258, None, None), (0.129, 0.128, False)]

    seconds = {"lsgpt sdpa": [4.0], "lsgpt-no-logits sdpa": [3.0], "mhsa sdpa": [5.0], "gpt2 sdpa": [4.0]}
    found = {x["families"]: x for x in suite.compare_peers("train", shape, seconds, {}, targets.TARGETS)}
    assert (found["lsgpt", "gpt2"]["median"], found["lsgpt", "gpt2"]["target"]) == (1.0, None)
    assert (found["lsgpt-no-logits", "gpt2"]["median"], found["lsgpt-no-logits", "gpt2"]["target"]) == (0.75, 0.78)
    assert (found["lsgpt", "mhsa"]["median"], found["mhsa", "gpt2"]["median"]) == (0.8, 1.25)


def test_families_and_rounds_can_be_fewer(shape, capsys):
    row = suite.run("prefill", shape, budget=0.0, min_rounds=1, rates=(1.0, 1e30), families=("limit",))
    # `lsgpt` never stands without the same code with all heads global.
    assert {peer: len(x) for peer, x in row["seconds"].items()} == {"lsgpt sdpa": 1, "mhsa sdpa": 1, "limit sdpa": 1}
    assert [x["families"] for x in row["ratios"]] == [("lsgpt", "mhsa"), ("lsgpt", "limit"), ("limit", "mhsa")]
    floors = row["floor_seconds"]
    assert floors["lsgpt"] < floors["mhsa"]
    suite.print_row(row | {"seconds": {"lsgpt sdpa": [1.5, 9.0, 1.0]}})
    printed = capsys.readouterr().out
    assert re.search(r"lsgpt sdpa +1500\.00 ms", printed)
    assert re.search(rf"floor of mhsa +{1000 * floors['mhsa']:.2f} ms", printed)


@pytest.mark.parametrize("sinks", [True, FULL_WINDOW])
def test_a_folder_names_a_shape(sinks, llama_shape, tmp_path, capsys):
    llama_shape.config.attention_sinks = sinks
    llama_shape.config.save_pretrained(tmp_path / "converted")
    command = ["bench", "prefill", "decode", "--preset", str(tmp_path / "converted"), "--lengths", "75"]
    command += ["--rounds", "1", "--budget", "0", "--device", "cpu", "--engines", "sdpa", "--output", str(tmp_path)]
    assert lsgpt_cli.main(command) == 0
    printed = capsys.readouterr().out
    result = json.loads((tmp_path / "bench-cpu.json").read_text(encoding="utf-8"))
    assert (result["model"]["num_global_heads"], result["model"]["attention_sinks"]) == ([2, 0], sinks)
    pairs = {(x["benchmark"], *x["families"]) for row in result["rows"] for x in row["ratios"]}
    assert {(name, "lsgpt", "llama") for name in ("prefill", "decode", "cache")} <= pairs
    assert "Transformers' Llama" in printed and "GPT-2" not in printed
    assert lsgpt_cli.main(command) == 2
    assert "bench-cpu.json exists. Name another one" in capsys.readouterr().err  # nothing is lost
    command[-1] = str(tmp_path / "other")
    for arguments, message in (
        (["attention"], "name other benchmarks: lsgpt bench prefill decode train"),
        (["prefill", "--quick"], "name other benchmarks"),
        (["prefill", "--families", "gpt2"], "must fit the model's blocks, which are those of llama; got gpt2"),
    ):
        assert lsgpt_cli.main(["bench", *arguments, *command[3:]]) == 2
        assert message in capsys.readouterr().err


def test_targets_are_for_two_shapes():
    assert targets.find_targets("gpt2-small", load_preset("gpt2-small")) is targets.TARGETS
    third = load_preset("smollm2-135m")
    sixth = load_preset("smollm2-135m", num_global_heads=[3, 0] * 15)
    assert targets.find_targets("converted", sixth) is targets.SMOLLM2_TARGETS
    wider = load_preset("smollm2-135m", num_global_heads=[3, 0] * 15, sliding_window=129)
    for config in (third, wider, load_preset("demo")):
        assert targets.find_targets("converted", config) == {}


def test_floor(monkeypatch):
    config = load_preset("gpt2-small")
    shape = Shape(config, 2048, 8, dtype=torch.bfloat16)
    tokens, head = 8 * 2048, 2 * config.vocab_size * config.hidden_size
    operations = floor.floor_seconds("train", config, shape, (1e12, 1e30))
    assert operations == pytest.approx(3 * tokens * config.flops_per_token(2048) / 1e12)
    prefill = floor.floor_seconds("prefill", config, shape, (1e12, 1e30))
    assert prefill == pytest.approx((tokens * config.flops_per_token(2048) - (tokens - 8) * head) / 1e12)
    matrices = 12 * 12 * 768**2 + 50257 * 768
    decoding = floor.floor_seconds("decode", config, shape, (1e30, 1e9))
    assert decoding == pytest.approx((2 * matrices + 8 * config.kv_cache_bytes(2048)) / 1e9)
    # What must be moved: weights and cache; twice the weights and their gradients, and six of AdamW; 12 tensors.
    weights, width = 2 * matrices, config.num_attention_heads * config.head_dim
    moved = {"prefill": weights + 8 * config.kv_cache_bytes(2048), "train": 10 * weights}
    moved["attention"] = 12 * tokens * width * 2
    for name, size in moved.items():
        assert floor.floor_seconds(name, config, shape, (1e30, 1e9)) == pytest.approx(size / 1e9)
    # In 8 bits, weights have half of the bytes; a third of the key/value heads has a third of their tensors' bytes.
    in_8_bits = floor.floor_seconds("decode", config, shape._replace(int8=True), (1e30, 1e9))
    assert in_8_bits == pytest.approx((matrices + 8 * config.kv_cache_bytes(2048)) / 1e9)
    grouped = load_preset("gpt2-small", num_key_value_heads=4, num_global_heads=3)
    assert floor.floor_seconds("attention", grouped, shape, (1e30, 1e9)) == pytest.approx(8 * tokens * width * 2 / 1e9)
    # The attention of 12 layers is what a token costs beyond its matrices, and 3.5 times that with the backward pass.
    alone = floor.floor_seconds("attention", config, shape, (1e12, 1e30))
    assert alone == pytest.approx(3.5 / 12 * tokens * (config.flops_per_token(2048) - 2 * matrices) / 1e12)
    assert all(rate > 0 for rate in floor.measure_rates("cpu", torch.float32, size=64))
    # A multiplication and an addition for each product; what is copied is read and written.
    monkeypatch.setattr(floor, "measure", lambda *args, **options: {"product": [2.0], "copy": [4.0]})
    assert floor.measure_rates("cpu", torch.float32, size=64) == (2 * 64**3 / 2, 2 * 8 * 64**2 / 4)
