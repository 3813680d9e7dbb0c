"""The benchmark suite on tiny shapes: what it writes, what it refuses to time, and how it counts."""

import copy
import json
import re
import statistics

import pytest
import torch
from PIL import Image
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import lsgpt_cli
from lsgpt.benchmarks import (
    attention,
    decode,
    floor,
    gate,
    narrow_heads,
    peers,
    plots,
    prefill,
    suite,
    targets,
    timing,
    train,
)
from lsgpt.benchmarks.peers import Shape, attention_function
from lsgpt.configuration import load_preset
from lsgpt.modeling_lsgpt import (
    FULL_WINDOW,
    LSGPTForCausalLM,
    attention_layers,
    attention_lsgpt,
    create_masks,
    describe_visibility,
)


@pytest.fixture
def shape():
    """Longer than two windows and no multiple of a block, so that local heads take the blocked path."""
    return Shape(load_preset("demo", sliding_window=20), length=75, batch_size=2, engines=("sdpa",))


@pytest.fixture
def llama_shape():
    """Blocks of Llama with sinks, and layers that differ in their global heads, as in a converted model."""
    fields = {"vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6}
    fields |= {"num_global_heads": [2, 0], "sliding_window": 20, "intermediate_size": 80}
    return Shape(load_preset("smollm2-135m", **fields), length=75, engines=("sdpa",))


def check(benchmark):
    for run_gate in benchmark.gates:
        run_gate()


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


def narrow_window(query, key, value, blocked_mask, *args):
    """The blocked engine with a window that is short of one key."""
    return blocked(query, key, value, blocked_mask & blocked_mask.roll(1, dims=-1), *args)


def wrong_gradient(query, key, value, *args):
    """The blocked engine with right outputs and gradients of values that are too large by 1%."""
    return blocked(query, key, 1.01 * value - 0.01 * value.detach(), *args)


blocked = attention_lsgpt.blocked_attention_forward


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("benchmark", [attention, prefill, train])
def test_wrong_window_is_not_timed(benchmark, dtype, shape, monkeypatch):
    shape = shape._replace(dtype=dtype)
    check(benchmark.prepare(shape))
    monkeypatch.setattr(attention_lsgpt, "blocked_attention_forward", narrow_window)
    with pytest.raises(RuntimeError, match="lsgpt sdpa, attention at 75 tokens, outputs of local heads: wrong by"):
        check(benchmark.prepare(shape))


@pytest.mark.parametrize("sinks", [True, FULL_WINDOW])
@pytest.mark.parametrize("benchmark", [attention, prefill, train])
def test_wrong_sinks_are_not_timed(benchmark, sinks, llama_shape, monkeypatch):
    def forgets_sinks(*args):
        return blocked(*args[:-1], None)

    llama_shape.config.num_global_heads = 2
    llama_shape.config.attention_sinks = sinks
    check(benchmark.prepare(llama_shape))
    monkeypatch.setattr(attention_lsgpt, "blocked_attention_forward", forgets_sinks)
    with pytest.raises(RuntimeError, match="lsgpt sdpa, attention at 75 tokens, outputs of local heads: wrong by"):
        check(benchmark.prepare(llama_shape))


@pytest.mark.parametrize("benchmark", [attention, train])
def test_wrong_gradient_is_not_timed(benchmark, shape, monkeypatch):
    monkeypatch.setattr(attention_lsgpt, "blocked_attention_forward", wrong_gradient)
    with pytest.raises(RuntimeError, match="gradients of values of local heads: wrong by"):
        check(benchmark.prepare(shape))


def test_flex_attention_passes_the_gate(shape, fresh_compiler):
    # Forward only: PyTorch has no backward pass of it on the CPU.
    attend = attention_function(shape.config, "flex_attention")
    gate.check_attention("lsgpt flex_attention", attend, shape, 1, gradients=False)
    with pytest.raises(RuntimeError, match="outputs of local heads: wrong by"):
        gate.check_attention("lsgpt flex_attention", attend, shape._replace(config=narrower(shape.config)), 1, False)


def narrower(config):
    config = copy.deepcopy(config)
    config.sliding_window -= 1
    return config


@pytest.mark.parametrize(("fault", "what"), [(narrow_window, "loss"), (wrong_gradient, "gradient of ")])
def test_wrong_model_is_not_timed(fault, what, shape, monkeypatch):
    # Attention alone is not looked at.
    monkeypatch.setattr("lsgpt.benchmarks.gate.check_attention", lambda *args, **kwargs: None)
    monkeypatch.setattr(attention_lsgpt, "blocked_attention_forward", fault)
    with pytest.raises(RuntimeError, match=f"lsgpt sdpa, {what}.* of 75 tokens: wrong by"):
        check(train.prepare(shape))


@pytest.mark.parametrize("kind", ["lsgpt", "mhsa"])
def test_wrong_decoding_is_not_timed(kind, shape, monkeypatch):
    def forgets_a_key(module, query, key, value, mask, **kwargs):
        is_local = kwargs["sliding_window"] is not None
        if query.shape[2] == 1 and is_local == (kind == "lsgpt"):
            key, value, mask = key[:, :, 1:], value[:, :, 1:], None if mask is None else mask[..., 1:]
        return attend(module, query, key, value, mask, **kwargs)

    attend = attention_lsgpt.sdpa_attention_forward
    check(decode.prepare(shape))
    monkeypatch.setattr(attention_lsgpt, "sdpa_attention_forward", forgets_a_key)
    benchmark = decode.prepare(shape)
    if kind == "mhsa":  # the global heads of `lsgpt` are as wrong, and come first
        benchmark = benchmark._replace(gates=[gate for gate in benchmark.gates if gate.args[0] == "mhsa sdpa"])
    with pytest.raises(RuntimeError, match=f"{kind} sdpa, logits after 75 tokens: wrong by"):
        check(benchmark)


def test_attention_without_global_heads(shape):
    prepared = attention.prepare(shape._replace(config=load_preset("demo", sliding_window=20, num_global_heads=0)))
    check(prepared)
    for prepare in prepared.peers.values():
        prepare()()


def test_wrong_multi_head_attention_is_not_timed(shape, monkeypatch):
    def sees_the_future(query, key, value, backend=None):
        return torch.nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2)

    monkeypatch.setattr(attention, "causal_attention", sees_the_future)
    with pytest.raises(RuntimeError, match="mhsa sdpa, attention at 75 tokens, outputs of global heads: wrong by"):
        check(attention.prepare(shape))


def test_nothing_is_timed_before_the_gates(shape, monkeypatch):
    monkeypatch.setattr(attention_lsgpt, "blocked_attention_forward", narrow_window)
    monkeypatch.setattr(suite, "measure", lambda *args: pytest.fail("timed"))
    with pytest.raises(RuntimeError, match="it is not timed"):
        suite.run("prefill", shape, budget=0.0)


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


def test_what_is_dense_is_left_out_where_it_is_too_large():
    """At 8,192 tokens a single layer's weights are, at 2,048 those of 12 layers together."""
    for length, kept_layers, made in ((8192, 1, False), (2048, 12, False), (2048, 1, True)):
        found = peers.Peers()
        shape = Shape(load_preset("gpt2-small"), length, engines=("eager", "flex_attention"))
        found.add_engines(shape, length, kept_layers, lambda *args: object(), lambda peer: None)
        assert ("mhsa eager" in found) == made and ("mhsa eager" in found.skipped) != made
        assert {f"{family} flex_attention" in found.skipped for family in ("lsgpt", "mhsa")} == {length == 8192}


def test_decoding_says_which_engine_is_left_out(shape):
    benchmark = decode.prepare(shape._replace(engines=("sdpa", "flex_attention")))
    names = [f"{family} flex_attention" for family in ("lsgpt", "mhsa")]
    assert [benchmark.skipped[name] for name in names] == ["single tokens are computed by `sdpa`"] * 2
    assert not set(names) & benchmark.peers.keys()


def test_limit_leaves_local_attention_out(shape):
    shape, models = peers.build_models(shape, "prefill")
    ours, limit = models["lsgpt sdpa"], models["limit sdpa"]
    assert ours.model.lm_head.weight is limit.model.lm_head.weight
    hidden_states, outputs = torch.randn(2, 75, ours.model.config.hidden_size), []
    masks = create_masks(ours.model.config, describe_visibility(ours.model.config, hidden_states))
    for peer in (ours, limit):
        layer = attention_layers(peer.model)[0]
        layer.o_proj.register_forward_pre_hook(lambda layer, inputs: outputs.append(inputs[0].unflatten(2, (6, -1))))
        layer(hidden_states, attention_mask=masks)
    expected, actual = outputs
    value = layer.v_proj(hidden_states).unflatten(2, (6, -1)).transpose(1, 2)
    torch.testing.assert_close(actual[:, :, :1], expected[:, :, :1], rtol=0, atol=0)
    assert torch.equal(actual[:, :, 1:], value[:, 1:].transpose(1, 2))
    assert not torch.allclose(expected[:, :, 1:], actual[:, :, 1:], atol=0.1)

    ids = shape.token_ids()
    with torch.no_grad():
        cache = limit(input_ids=ids, use_cache=True).past_key_values
        limit(input_ids=ids[:, :1], past_key_values=cache, use_cache=True)
    assert [layer.get_seq_length() for layer in cache.layers] == [76, 0, 76, 0]  # of global and local heads


def test_gpt2_has_the_same_shape(shape):
    _, models = peers.build_models(shape, "train")
    gpt2, ours = models["gpt2 sdpa"].model, models["lsgpt sdpa"].model
    matrices = [sum(x.numel() for x in model.parameters() if x.ndim == 2) for model in (gpt2, ours)]
    # GPT-2's output matrix is its embedding's, and ours has rotary positions.
    positions, vocabulary = gpt2.transformer.wpe.weight.numel(), ours.lm_head.weight.numel()
    assert matrices[0] - positions + vocabulary == matrices[1]
    assert gpt2.config._attn_implementation == "sdpa"
    gelu = models["gpt2-gelu sdpa"].model
    assert (gpt2.config.activation_function, gelu.config.activation_function) == ("gelu_new", "gelu")
    assert {id(x) for x in gelu.parameters()} == {id(x) for x in gpt2.parameters()}


def test_compiled_decoding_passes_the_gate(shape, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda model, **options: model)
    benchmark = decode.prepare(shape, compiled=True)
    assert {"lsgpt compiled", "mhsa compiled"} < benchmark.peers.keys()
    check(benchmark)
    calls = []
    monkeypatch.setattr(
        decode, "decode", lambda peer, cache, shape, count: calls.append((int(cache.get_seq_length()), count))
    )
    for prepare in benchmark.peers.values():
        prepare()()
    assert calls == [(75, 1), (75, benchmark.repeats)] * len(benchmark.peers) and benchmark.repeats == decode.TOKENS
    # Every round starts from the prompt, though static caches have grown in the gates


def test_logits_are_on_both_sides(shape, monkeypatch):
    shape, models = peers.build_models(shape, "train")
    ids = shape.token_ids()
    with_logits = {name for name, peer in models.items() if peer(input_ids=ids, labels=ids).logits is not None}
    assert models.keys() - with_logits == {"lsgpt-no-logits sdpa"}
    assert models["lsgpt-no-logits sdpa"].model is models["lsgpt sdpa"].model

    def wrong_loss(model, *args, skip_logits=False, **kwargs):
        output = forward(model, *args, skip_logits=skip_logits, **kwargs)
        if skip_logits:
            output.loss = output.loss * 1.001
        return output

    forward = LSGPTForCausalLM.forward
    monkeypatch.setattr(LSGPTForCausalLM, "forward", wrong_loss)
    with pytest.raises(RuntimeError, match="lsgpt-no-logits sdpa, loss of 75 tokens: wrong by"):
        check(train.prepare(shape))


def test_heads_are_timed_with_and_without_zeros(monkeypatch):
    """The function that fills heads up is compared with the one that it calls with wider heads."""
    widths = []

    def recording(module, query, *args, **kwargs):
        widths.append(query.shape[-1])
        return sdpa_attention_forward(module, query, *args, **kwargs)

    monkeypatch.setattr(attention_lsgpt, "sdpa_attention_forward", recording)
    monkeypatch.setattr(narrow_heads, "sdpa_attention_forward", recording)
    times = narrow_heads.compare(8, 16, budget=0)
    assert widths == [16, 8] * 4
    assert 0 < times["low"] <= times["median"] <= times["high"]


def test_telemetry_is_timed_as_a_training_step(shape):
    benchmark = train.prepare(shape, telemetry=True)
    calls = []
    benchmark.peers["telemetry sdpa"]()()
    model = benchmark.gates[0].args[1].model
    assert all(layer.max_logits is None for layer in attention_layers(model))
    handles = [
        layer.register_forward_pre_hook(lambda layer, inputs: calls.append(layer.max_logits is not None))
        for layer in attention_layers(model)
    ]
    benchmark.peers["telemetry sdpa"]()()
    benchmark.peers["lsgpt sdpa"]()()
    assert calls == [True] * len(handles) + [False] * len(handles)


def test_training_leaves_the_weights(shape):
    benchmark = train.prepare(shape)
    model = benchmark.gates[0].args[1].model
    before = [x.clone() for x in model.parameters()]
    for prepare in benchmark.peers.values():
        prepare()()
    assert all(map(torch.equal, before, model.parameters()))
    assert all(x.grad is None for x in model.parameters())


@pytest.mark.parametrize("benchmark", [prefill, decode, train])
def test_todays_blocks_are_timed_beside_llama(benchmark, llama_shape, monkeypatch):
    prepared = benchmark.prepare(llama_shape)
    assert prepared.peers.keys() >= {"lsgpt sdpa", "mhsa sdpa", "llama sdpa"}
    assert not any(name.startswith("gpt2") for name in prepared.peers)
    check(prepared)
    for prepare in prepared.peers.values():
        prepare()()
    if benchmark is decode:
        assert prepared.cache_bytes["llama"] == prepared.cache_bytes["mhsa"] > prepared.cache_bytes["lsgpt"]

    def other_positions(config):
        config = copy.deepcopy(config)
        config.rope_parameters["rope_theta"] = 100.0
        return llama_config(config)

    llama_config = peers.llama_config
    monkeypatch.setattr(peers, "llama_config", other_positions)
    with pytest.raises(RuntimeError, match=r"llama sdpa, .*: wrong by"):
        check(benchmark.prepare(llama_shape))


def test_llama_has_the_same_weights(llama_shape):
    _, models = peers.build_models(llama_shape, "prefill")
    ours = {name: id(x) for name, x in models["lsgpt sdpa"].model.named_parameters(remove_duplicate=False)}
    llama = {name: id(x) for name, x in models["llama sdpa"].model.named_parameters(remove_duplicate=False)}
    assert ours.items() - llama.items() == {(name, x) for name, x in ours.items() if name.endswith(".sinks")}
    assert llama.items() <= ours.items()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_in_8_bits(dtype, llama_shape, tmp_path, monkeypatch):
    llama_shape.config.save_pretrained(tmp_path / "converted")
    command = [
        "bench",
        "prefill",
        "decode",
        "--preset",
        str(tmp_path / "converted"),
        "--lengths",
        "75",
        "--dtype",
        dtype,
    ]
    command += ["--int8", "--rounds", "1", "--budget", "0", "--device", "cpu", "--engines", "sdpa"]
    command += ["--output", str(tmp_path)]
    built, build_models = [], peers.build_models

    def record(*arguments):
        built.append(build_models(*arguments))
        return built[-1]

    monkeypatch.setattr(prefill, "build_models", record)
    monkeypatch.setattr(decode, "build_models", record)
    monkeypatch.setattr(suite, "find_targets", lambda *args: {("cpu", "decode", "lsgpt", "llama"): {75: 1e9}})
    assert lsgpt_cli.main(command) == 0  # all gates are passed
    result = json.loads((tmp_path / "bench-cpu.json").read_text(encoding="utf-8"))
    assert all(x["target"] is None for row in result["rows"] for x in row["ratios"])  # they are for plain float32
    settings = result["settings"]
    assert (settings["dtype"], settings["int8"]) == (dtype, True)
    assert len(built) == 2
    for model in (peer.model for _, timed in built for peer in timed.values()):
        linear = [layer.weight for layer in model.modules() if isinstance(layer, torch.nn.Linear)]
        assert {(type(x).__name__, str(x.dtype)) for x in linear} == {("Int8Tensor", f"torch.{dtype}")}
    monkeypatch.setattr(suite, "is_torchao_available", lambda: False)
    with pytest.raises(ValueError, match="`--int8` needs torchao: pip install torchao"):
        suite.main(command[1:])


@pytest.mark.parametrize(
    ("values", "compared"), [({}, True), ({"use_bias": ["o_proj"]}, True), ({"qk_norm": True}, False)]
)
def test_llama_is_compared_where_it_is_the_same(llama_shape, values, compared):
    config = copy.deepcopy(llama_shape.config)
    for name, value in values.items():
        setattr(config, name, value)
    shape, models = peers.build_models(llama_shape._replace(config=config), "prefill")
    gates = gate.llama_gates(models, shape, "prefill")
    assert len(gates) == compared
    for run_gate in gates:
        run_gate()


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
