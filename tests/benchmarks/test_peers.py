"""What the benchmark suite compares: peers that compute what they should, and gates that refuse the others."""

import copy
import json

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import lsgpt_cli
from lsgpt.benchmarks import (
    attention,
    decode,
    gate,
    narrow_heads,
    peers,
    prefill,
    suite,
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


def check(benchmark):
    for run_gate in benchmark.gates:
        run_gate()


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
