"""Measured logits equal a brute-force maximum over the full masked score matrix."""

import pytest
import torch
from reference import visible_pairs
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from lsgpt import LSGPTForCausalLM, logits, measure_max_logits
from lsgpt.logits import max_logits
from lsgpt.modeling_lsgpt import Visibility
from lsgpt.telemetry import MaxLogits


def brute_force(query, key, visible):
    groups = query.shape[1] // key.shape[1]
    logits = query.float() @ key.float().repeat_interleave(groups, dim=1).transpose(-1, -2) * query.shape[-1] ** -0.5
    return (logits.abs() * visible).amax(dim=(0, 2, 3))


@pytest.mark.parametrize("at_once", [1, 1 << 12, 1 << 22])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 2, 7, 500])
@pytest.mark.parametrize("limits", ["none", "padding", "documents", "both"])
def test_equals_brute_force(monkeypatch, limits, window, kv_heads, at_once):
    monkeypatch.setattr(logits, "LOGITS_AT_ONCE", at_once)
    for q_length, kv_length in ((1, 1), (33, 33), (300, 300), (5, 40), (1, 40)):
        if at_once == 1 and q_length > 40:
            continue  # one row at a time is slow, and 33 of them have shown it
        query = torch.randn(2, 4, q_length, 12).transpose(1, 2).contiguous().transpose(1, 2)
        key = torch.randn(2, kv_heads, kv_length, 12)
        masks = {}
        if limits in ("padding", "both"):
            masks["padding_mask"] = torch.rand(2, kv_length) < 0.7
        if limits in ("documents", "both"):
            masks["documents"] = (torch.rand(2, kv_length) < 0.1).cumsum(-1)
        num_global_heads, reach = (4, 1) if window is None else (0, window)
        visible = visible_pairs(4, num_global_heads, reach, q_length, kv_length, **masks)
        if "padding_mask" in masks:
            visible = visible & masks["padding_mask"][:, None, -q_length:, None]  # queries, too
        sizes = {"q_length": q_length, "kv_length": kv_length, "q_offset": kv_length - q_length, "batch_size": 2}
        actual = max_logits(query, key, 12**-0.5, Visibility(**sizes, window=window, **masks))
        torch.testing.assert_close(actual, brute_force(query, key, visible), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("hidden", [None, torch.finfo(torch.float32).min, -1e9, -200.0, float("-inf")])
def test_a_custom_mask_says_by_itself_who_may_attend(hidden):
    """Boolean, or added to the logits: then a pair counts that the softmax gives some weight."""
    query, key = torch.randn(2, 4, 20, 8), torch.randn(2, 2, 30, 8)
    visible = torch.rand(2, 1, 20, 30) < 0.3
    mask = visible if hidden is None else torch.randn(visible.shape).masked_fill(~visible, hidden)
    visibility = Visibility(20, 30, 10, mask=mask, batch_size=2)
    actual = max_logits(query, key, 8**-0.5, visibility)
    torch.testing.assert_close(actual, brute_force(query, key, visible))
    if hidden == -200.0:
        return  # a row without a pair in the window would have its weight there
    in_window = torch.arange(30) > torch.arange(20)[:, None] + 10 - 3
    visibility.window = 3
    actual = max_logits(query, key, 8**-0.5, visibility)
    torch.testing.assert_close(actual, brute_force(query, key, visible & in_window))


@pytest.mark.parametrize("engine", ["sdpa", "eager", "flex_attention", "triton"])
def test_padding_at_the_end_counts_for_nothing(tiny_model, engine, on_gpu_if_any):
    model = tiny_model(engine=engine).requires_grad_(False)
    ids, mask = torch.randint(97, (2, 40)), torch.ones(2, 40)
    expected = measure_max_logits(model, input_ids=ids[:, :25])
    mask[:, 25:] = 0
    ids[:, 25:] = ids[:, :1] * 3 % 97  # logits of their own
    torch.testing.assert_close(measure_max_logits(model, input_ids=ids, attention_mask=mask), expected)


@pytest.mark.parametrize("is_static", [False, True], ids=["dynamic", "static"])
def test_after_a_cache(tiny_model, is_static):
    """The prompt, a chunk and a single token reach together what the whole text reaches at once."""
    model = tiny_model(num_global_heads=2)
    for ids in torch.randint(97, (8, 2, 40)):  # in some of them, a token would have its largest logit with a later one
        expected = measure_max_logits(model, input_ids=ids)
        cache = StaticCache(model.config, max_cache_len=50) if is_static else DynamicCache(config=model.config)
        parts = [measure_max_logits(model, input_ids=x, past_key_values=cache) for x in ids.split((25, 14, 1), dim=1)]
        torch.testing.assert_close(torch.stack(parts).amax(0), expected)


@pytest.mark.parametrize("engine", ["sdpa", "triton"])
def test_a_window_that_is_changed_is_measured(tiny_model, engine, on_gpu_if_any):
    """What attention computes and what is measured read the same configuration at the same time."""
    ids = torch.randint(97, (1, 60))
    expected = measure_max_logits(tiny_model(engine=engine, sliding_window=30), input_ids=ids)
    model = tiny_model(engine=engine)
    assert not measure_max_logits(model, input_ids=ids).equal(expected)
    model.config.sliding_window = 30
    torch.testing.assert_close(measure_max_logits(model, input_ids=ids), expected)


@pytest.mark.parametrize("engine", ["sdpa", "triton"])
def test_a_logit_that_is_no_number_shows(tiny_model, engine, on_gpu_if_any):
    model = tiny_model(engine=engine)
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight[0, 0] = float("nan")
    maxima = measure_max_logits(model, input_ids=torch.randint(97, (1, 40)))
    assert maxima[0].isfinite().all() and maxima[1, 1:].isfinite().all()
    assert not maxima[1, 0].isfinite()


def test_models_with_code_of_their_own(tiny_model, tmp_path):
    """The code that a checkpoint carries does not know of any measurement."""
    expected, ids = tiny_model(), torch.randint(97, (1, 40))
    expected.save_pretrained(tmp_path)
    model = get_class_from_dynamic_module("modeling_lsgpt.LSGPTForCausalLM", tmp_path).from_pretrained(tmp_path)
    assert not isinstance(model, type(expected))
    assert torch.equal(*(measure_max_logits(each.eval(), input_ids=ids) for each in (model, expected)))


@pytest.mark.parametrize("kind", ["lsgpt", "llama"])
def test_a_measurement_during_another_does_not_count_in_it(tiny_model, kind):
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = tiny_model() if kind == "lsgpt" else LlamaForCausalLM(LlamaConfig(vocab_size=97, **sizes))
    batches = torch.randint(97, (3, 2, 20))
    first, second, third = (measure_max_logits(model, input_ids=ids) for ids in batches)
    recorder = MaxLogits(model)
    recorder.start()
    model(batches[0])
    assert torch.equal(measure_max_logits(model, input_ids=batches[1]), second)
    model(batches[2])
    assert torch.equal(recorder.read(), torch.maximum(first, third))
    recorder.stop()
    assert torch.equal(measure_max_logits(model, input_ids=batches[1]), second)


def test_offloaded_layers(tiny_model, tmp_path):
    model, ids = tiny_model(), torch.randint(97, (2, 20))
    model.save_pretrained(tmp_path)
    devices = {name: "disk" if name == "layers" else "cpu" for name, _ in model.model.named_children()}
    devices = {f"model.{name}": device for name, device in devices.items()} | {"lm_head": "cpu"}
    loaded = LSGPTForCausalLM.from_pretrained(tmp_path, device_map=devices, offload_folder=tmp_path / "offload")
    assert next(loaded.model.layers.parameters()).is_meta
    torch.testing.assert_close(measure_max_logits(loaded, input_ids=ids), measure_max_logits(model, input_ids=ids))


def test_pairs_of_an_additive_mask_count_in_half_precision_too():
    """The mask hides with the least float16; within a window, local heads see fewer."""
    query, key = torch.randn(2, 4, 20, 8), torch.randn(2, 2, 30, 8)
    visible = torch.rand(2, 1, 20, 30) < 0.3
    mask = torch.randn(visible.shape).masked_fill(~visible, torch.finfo(torch.float16).min)
    visibility = Visibility(20, 30, 10, mask=mask, batch_size=2, window=3)
    in_window = torch.arange(30) > torch.arange(20)[:, None] + 10 - 3
    products = query @ key.repeat_interleave(2, 1).mT * 8**-0.5
    expected = (products.abs() * (visible & in_window)).amax((0, 2, 3))
    torch.testing.assert_close(max_logits(query, key, 8**-0.5, visibility), expected)
