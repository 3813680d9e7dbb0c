"""Attention and mask functions: Transformers' tables, what is registered there, and a decode step without waiting."""

import copy
import re
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from reference import assert_as_exact_as, visible_pairs
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    StaticCache,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import lsgpt.modeling_lsgpt
from lsgpt import LSGPTConfig, LSGPTForCausalLM
from lsgpt.modeling_lsgpt import (
    ALL_ATTENTION_FUNCTIONS,
    ALL_MASK_ATTENTION_FUNCTIONS,
    GLOBAL,
    HEAD_KINDS,
    LOCAL,
    attention_lsgpt,
    create_masks,
    describe_visibility,
    modeling_lsgpt,
    visibility_lsgpt,
)


DOCS = Path(lsgpt.modeling_lsgpt.__file__).parent.resolve().parent / "docs"
NAMES = ("eager", "sdpa", "flex_attention", "triton", "flash_attention_2", "flash_attention_3", "flash_attention_4")


def path_through_a_layer(model, run):
    """
    The functions that `run` calls in the second layer of a model, without those of PyTorch: the set of their files and
    names, and the number of changes from the file of one call to that of the next.
    """
    calls, is_inside = [], False

    def profile(frame, event, arg):
        file = frame.f_code.co_filename
        if event == "call" and is_inside and ("transformers" in file or "lsgpt" in file):
            calls.append((Path(file).name, frame.f_code.co_qualname))

    def enter(*args):
        nonlocal is_inside
        is_inside = True

    def leave(*args):
        nonlocal is_inside
        is_inside = False

    layer = model.model.layers[1]
    handles = layer.register_forward_pre_hook(enter), layer.register_forward_hook(leave)
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
        for handle in handles:
            handle.remove()
    return set(calls), sum(one[0] != other[0] for one, other in pairwise(calls))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="qualified names of functions are in frames since Python 3.11")
def test_the_way_through_a_layer_is_short(tiny_model):
    """
    Not much longer than in Transformers' Llama: two kinds of heads need a second call of an attention function, and
    windows need blocks.
    """
    model = tiny_model(position_embedding_type="rope", num_key_value_heads=3)
    ids, cache = torch.randint(97, (2, 40)), DynamicCache(config=model.config)
    llama = LlamaForCausalLM(
        LlamaConfig(vocab_size=97, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=6)
    )
    calls, changes = path_through_a_layer(
        model, lambda: model.train()(ids, labels=ids, use_cache=False).loss.backward()
    )
    ours = {call for call in calls if call[0].endswith("_lsgpt.py")}
    assert len(ours) <= 12 and {file for file, _ in ours} == {
        "modeling_lsgpt.py",
        "attention_lsgpt.py",
        "local_lsgpt.py",
    }
    assert len(calls) <= 25 and changes <= 22
    expected, _ = path_through_a_layer(llama, lambda: llama(ids, use_cache=False))
    assert len(calls) <= 2 * len(expected)
    with torch.no_grad():
        model.eval()(ids, past_key_values=cache)
        model(ids[:, :1], past_key_values=cache)  # gives the cache room, once for many tokens
        calls, changes = path_through_a_layer(model, lambda: model(ids[:, :1], past_key_values=cache))
    ours = {call for call in calls if call[0].endswith("_lsgpt.py")}
    assert len(ours) <= 12 and {file for file, _ in ours} == {
        "modeling_lsgpt.py",
        "attention_lsgpt.py",
        "cache_lsgpt.py",
    }
    assert len(calls) <= 25 and changes <= 22


@pytest.fixture
def registered(monkeypatch):
    """What a test registers with Transformers is gone after it."""
    for table in (AttentionInterface, AttentionMaskInterface):
        monkeypatch.setattr(table, "_global_mapping", dict(table._global_mapping))


@pytest.mark.parametrize("name", ["eager", "sdpa", "flex_attention"])
@pytest.mark.parametrize("case", ["plain", "padded", "packed", "generated"])
@torch.no_grad()
def test_without_our_functions_those_of_transformers_compute_the_same(tiny_model, monkeypatch, name, case):
    model, ids = tiny_model(torch.float64, engine=name), torch.randint(97, (2, 40))
    if name == "flex_attention":
        if case == "generated":
            pytest.skip("PyTorch compiles FlexAttention for every length anew")
        monkeypatch.setattr(attention_lsgpt, "create_block_mask", None)  # shows that our functions do not run
    padding = torch.ones(2, 40, dtype=torch.long)
    padding[1, :7] = 0
    positions = torch.cat([torch.arange(15), torch.arange(25)])[None]
    inputs = {"padded": {"attention_mask": padding}, "packed": {"position_ids": positions}}.get(case, {})

    def run():
        if case == "generated":
            return model.generate(ids, max_new_tokens=20, num_beams=2, do_sample=False)
        return model(ids, **inputs).logits * padding[..., None]

    if name != "flex_attention":
        expected = run()
    else:
        model.set_attn_implementation("sdpa")
        expected = run()
        model.set_attn_implementation(name)
    monkeypatch.setattr(ALL_ATTENTION_FUNCTIONS, "_local_mapping", {})
    monkeypatch.setattr(ALL_MASK_ATTENTION_FUNCTIONS, "_local_mapping", {})
    with torch.compiler.set_stance("force_eager"):
        torch.testing.assert_close(run(), expected, rtol=1e-12, atol=1e-12)


@torch.no_grad()
def test_a_registered_function_computes_prompts_and_decodes(tiny_model, registered):
    """The function of `docs/attention.md`, as printed, beside `eager`; it gets dense masks."""
    page, before = (DOCS / "attention.md").read_text(encoding="utf-8"), set(AttentionInterface._global_mapping)
    exec(re.search(r"### Adding an attention function.*?```python\n(.*?)```", page, re.DOTALL)[1], {})
    lengths = []
    (name,) = set(AttentionInterface._global_mapping) - before
    attend = AttentionInterface._global_mapping[name]
    AttentionInterface.register(
        name,
        lambda module, query, *args, **kwargs: (
            lengths.append(query.shape[2]) or attend(module, query, *args, **kwargs)
        ),
    )
    model, ids = tiny_model(), torch.randint(97, (2, 40))
    expected, text = model(ids).logits, model.generate(ids, max_new_tokens=5, do_sample=False)
    model.set_attn_implementation(name)
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)
    lengths.clear()
    assert model.generate(ids, max_new_tokens=5, do_sample=False).equal(text)
    assert lengths == [40] * 4 + [1] * 16  # two layers of two kinds of heads


@torch.no_grad()
def test_a_third_kind_of_head(tiny_config, monkeypatch):
    """The dilated heads of `docs/attention.md`, as printed: who sees whom, on every function, cached and not."""
    monkeypatch.setitem(HEAD_KINDS, "dilated_attention", None)  # so that it is gone afterwards
    page = (DOCS / "attention.md").read_text(encoding="utf-8")
    names = {}
    exec(re.search(r"### A third kind of head.*?```python\n(.*?)```", page, re.DOTALL)[1], names)
    values = {**tiny_config().to_dict(), "num_attention_heads": 6}
    config = names["DilatedConfig"](
        **{name: x for name, x in values.items() if name in LSGPTConfig.__dataclass_fields__}
    )
    assert config.layer_types[:3] == ["full_attention", "full_attention", "sliding_attention"]
    index = torch.arange(20)
    distance = index[:, None] - index
    sees = describe_visibility(config, torch.empty(1, 20, 0))["dilated_attention"].dense()[0, 0]
    assert sees.equal((distance >= 0) & (distance % 4 == 0))

    ids, expected = torch.randint(97, (1, 40)), None
    for name in ("eager", "sdpa", "flex_attention", "triton"):
        config._attn_implementation = name
        torch.manual_seed(0)
        device = "cuda" if name == "triton" and torch.cuda.is_available() else "cpu"
        model = LSGPTForCausalLM(config).eval().to(device)
        logits = model(ids.to(device)).logits.cpu()
        expected = logits if expected is None else expected
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        cache, chunks = DynamicCache(config=config), ids.to(device).split((25, 14, 1), dim=1)
        parts = [model(part, past_key_values=cache).logits.cpu() for part in chunks]
        torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=1e-4, atol=1e-4)
    groups = model.model.layers[0].self_attn.head_groups
    assert [(heads.kind, heads.num_heads) for heads in groups] == [(GLOBAL, 1), ("dilated_attention", 2), (LOCAL, 3)]
    with pytest.raises(ValueError, match="FlashAttention does not support this kind of head"):
        config._attn_implementation = "flash_attention_2"
        create_masks(config, describe_visibility(config, torch.empty(1, 20, 0)))


def test_registered_functions_that_would_ignore_sinks_are_refused(tiny_model, registered, fresh_compiler):
    """Transformers' own functions take any keyword, and only some of them add sinks."""
    AttentionInterface.register("plain", sdpa_attention_forward)
    AttentionInterface.register("with_sinks", lambda *args, s_aux=None, softcap=None, **kwargs: 1 / 0)
    model, ids = tiny_model(engine="eager", attention_sinks=True), torch.randint(97, (1, 40))
    model.config._attn_implementation = "plain"
    message = r'`attention_sinks` needs .* an argument `s_aux`; "plain" has none. Use attn_implementation="sdpa"'
    for call in (model, torch.compile(model, backend="eager")):
        with pytest.raises(ValueError, match=message):
            call(ids)
    model.config._attn_implementation = "with_sinks"
    with pytest.raises(ZeroDivisionError):
        model(ids)
    model.config.attention_sinks = "full_window"
    with pytest.raises(ValueError, match=r'must be True or False with "with_sinks", which shows .* got "full_window"'):
        model(ids)
    model.config.attn_logit_softcapping = 20.0  # which "sdpa" cannot do
    for name in ("plain", "with_sinks"):
        model.config._attn_implementation = name
        with pytest.raises(ValueError, match=r'`attention_sinks` .* Use attn_implementation="eager"'):
            model(ids)


def test_registered_functions_that_would_ignore_a_softcap_are_refused(tiny_model, registered):
    AttentionInterface.register("plain", sdpa_attention_forward)
    model = tiny_model(engine="eager", attn_logit_softcapping=0.5)
    model.config._attn_implementation = "plain"
    message = r'`attn_logit_softcapping` needs .* an argument `softcap`; "plain" has none. Use .*="eager"'
    with pytest.raises(ValueError, match=message):
        model(torch.randint(97, (1, 40)))


@pytest.mark.parametrize("engine", NAMES[:4])
@torch.no_grad()
def test_a_decode_step_waits_for_no_device(tiny_model, engine):
    """On `meta`, whose values nobody can read, a wait is an error. `generate` passes both masks and positions."""
    for values in ({}, {"num_global_heads": 0}, {"num_key_value_heads": 3, "position_embedding_type": "rope"}):
        model = tiny_model(**values).to("meta")
        for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=40)):
            model.config._attn_implementation = "sdpa"
            ids = torch.zeros(2, 20, dtype=torch.long, device="meta")
            model(ids, past_key_values=cache)
            model.config._attn_implementation = engine
            for n in (21, 23):
                mask, positions = torch.ones(2, n, device="meta").long(), torch.ones(2, 1, device="meta").long()
                model(ids[:, :1], attention_mask=mask, position_ids=positions, past_key_values=cache)
                model(ids[:, :1], past_key_values=cache)


class LargestNewTensor(torch.utils._python_dispatch.TorchDispatchMode):
    """Records the number of elements of the largest tensor that is made, views of others not counted."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        def storages(x):
            tensors = (y for y in torch.utils._pytree.tree_leaves(x) if isinstance(y, torch.Tensor))
            return {y.untyped_storage().data_ptr(): y.numel() for y in tensors}

        output = function(*args, **(kwargs or {}))
        known = storages((args, kwargs))
        new = [numel for pointer, numel in storages(output).items() if pointer not in known]
        self.numel = max(self.numel, *new, 0)
        return output


@pytest.mark.parametrize("engine", ["eager", "sdpa", "flex_attention"])
@torch.no_grad()
def test_one_mask_for_all_rows(tiny_model, engine):
    model, ids = tiny_model(engine=engine, head_dim=16), torch.randint(97, (2, 40))
    for mask in (torch.ones(1, 1, 40, 40).tril().bool(), torch.ones(1, 1, 40, 40).triu(1) * -1e9):
        if engine == "flex_attention" and mask.dtype != torch.bool:
            continue  # which takes none
        actual = model(ids, attention_mask=mask).logits
        torch.testing.assert_close(actual, model(ids).logits, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_decode_step_makes_no_tensor_that_grows(tiny_model):
    model, sizes = tiny_model(max_position_embeddings=5000), []
    for n in (600, 4600):
        cache = DynamicCache(config=model.config)
        model(torch.randint(97, (1, n)), past_key_values=cache)
        model(torch.randint(97, (1, 1)), past_key_values=cache)  # gives the cache room for a few more
        mask, positions = torch.ones(1, n + 3, dtype=torch.long), torch.tensor([[n + 2]])
        for inputs in ({}, {"attention_mask": mask, "position_ids": positions}):
            with LargestNewTensor() as largest:
                model(torch.randint(97, (1, 1)), past_key_values=cache, **inputs)
            sizes.append(largest.numel)
    assert max(sizes) == min(sizes) < 600


def test_generating_without_padding_needs_no_mask_on_any_device(tiny_model, monkeypatch):
    """Where values are not read, every step would build the masks of packed documents if it were given positions."""
    monkeypatch.setattr(visibility_lsgpt, "may_look_at", lambda x, q_length=2: q_length > 1)  # as on an accelerator
    found = []

    def describe(*args):
        found.append(describe_visibility(*args))
        return found[-1]

    monkeypatch.setattr(modeling_lsgpt, "describe_visibility", describe)
    model, prompt = tiny_model(), torch.randint(1, 97, (2, 20))
    model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, min_new_tokens=12)
    assert len(found) == 12
    assert all(visibility.is_plain for step in found for visibility in step.values())


def test_masks_move_to_another_device(tiny_config):
    """As Accelerate does where a model is spread over several."""
    padding, additive = torch.ones(2, 40), torch.zeros(2, 1, 40, 40)
    padding[1, :5] = 0
    for name, mask in (("sdpa", padding), ("sdpa", additive), ("triton", padding), ("flex_attention", padding)):
        config = tiny_config()
        config._attn_implementation = name
        masks = create_masks(config, describe_visibility(config, torch.empty(2, 40, 0), mask)).to("meta")
        assert all(v.device == "meta" for v in masks.visibility.values())
        for mask in masks.masks.values():
            tensors = mask if isinstance(mask, tuple) else [getattr(mask, "kv_num_blocks", mask)]
            assert {x.device.type for x in tensors} == {"meta"}
            if name == "flex_attention":
                assert mask.mask_mod.visibility.padding_mask.device.type == "meta"

    config = tiny_config(attention_sinks="full_window")
    config._attn_implementation = "sdpa"
    masks = create_masks(config, describe_visibility(config, torch.empty(2, 40, 0), padding)).to("meta")
    assert masks.sees_sink[LOCAL].device.type == "meta"


@pytest.fixture
def flash_calls(monkeypatch):
    """
    Registers `my_flash`, a function that takes what Transformers' wrapper of FlashAttention takes, and returns the
    list of its calls: number of keys, window, shape of the padding mask, and length of the longest packed document.
    """
    calls = []

    def my_flash(module, query, key, value, attention_mask, sliding_window=None, **kwargs):
        shape, longest = getattr(attention_mask, "shape", None), kwargs.get("max_length_q")
        calls.append((key.shape[2], sliding_window, shape, longest))
        sizes = query.shape[2], key.shape[2]
        visible = visible_pairs(1, 0 if sliding_window else 1, sliding_window or 0, *sizes, attention_mask)
        if longest is not None:
            assert torch.equal(kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"])
            assert kwargs["cu_seq_lens_q"].dtype == torch.int32 and kwargs["max_length_k"] == longest
            lengths = kwargs["cu_seq_lens_q"].diff()
            documents = torch.arange(len(lengths)).repeat_interleave(lengths)
            visible = visible & (documents[:, None] == documents)
        return sdpa_attention_forward(module, query, key, value, visible, scaling=kwargs["scaling"])

    functions = {**AttentionInterface._global_mapping, "my_flash": my_flash}
    monkeypatch.setattr(AttentionInterface, "_global_mapping", functions)
    return calls


def test_flash_attention_gets_every_option_but_positions(monkeypatch):
    given = {}

    def my_flash(module, query, key, value, attention_mask, **kwargs):
        given.update(kwargs)
        return query, None

    functions = {**AttentionInterface._global_mapping, "my_flash": my_flash}
    monkeypatch.setattr(AttentionInterface, "_global_mapping", functions)
    monkeypatch.setattr(attention_lsgpt, "_flash_takes", lambda *arguments: True)
    options = {"dropout": 0.5, "softcap": 2.0, "s_aux": torch.zeros(4), "scaling": 0.1, "sliding_window": 3}
    module = SimpleNamespace(config=SimpleNamespace(_attn_implementation="my_flash"))
    states, positions = torch.randn(1, 4, 5, 8).bfloat16(), torch.arange(5)[None]
    attend = attention_lsgpt.checked_flash_attention_forward
    attend(module, states, states, states, None, position_ids=positions, **options)
    assert given == options

    # Queries in float32 that Transformers casts, as PEFT leaves them beside quantized weights.
    module.modules = lambda: [torch.nn.Linear(1, 1, dtype=torch.bfloat16)]
    given.clear()
    attend(module, states.float(), states, states, None, **options)
    assert given == options


@torch.no_grad()
def test_flash_attention_gets_windows_and_padding(tiny_model, flash_calls):
    """The prompt, a chunk after the local heads' cache has dropped tokens, and a single token."""
    model, ids, padding = tiny_model(torch.bfloat16), torch.randint(97, (2, 40)), torch.ones(2, 40)
    padding[1, :6] = 0
    plain = model(ids, attention_mask=padding).logits
    exact = copy.deepcopy(model).double()(ids, attention_mask=padding).logits
    model.config._attn_implementation = "my_flash"
    cache, logits = DynamicCache(config=model.config), []
    for end, size in ((20, 20), (39, 19), (40, 1)):
        inputs = {"attention_mask": padding[:, :end], "past_key_values": cache}
        logits.append(model(ids[:, end - size : end], **inputs).logits)
        assert set(flash_calls) == {
            (end, None, (2, end), None),
            (min(end, 7 + size), 8, (2, min(end, 7 + size)), None),
        }
        flash_calls.clear()
    actual, exact, plain = ([x[padding.bool()]] for x in (torch.cat(logits, dim=1), exact, plain))
    assert_as_exact_as(actual, exact, plain, model.config.head_dim)


@torch.no_grad()
def test_flash_attention_gets_padding_inside_a_row_within_the_window(tiny_model, flash_calls):
    model, mask = tiny_model(torch.bfloat16), torch.tensor([[1, 1, 0, 0, 1, 1, 1, 1]] * 2)
    model.config._attn_implementation = "my_flash"
    model(torch.randint(97, (2, 8)), attention_mask=mask)
    assert set(flash_calls) == {(8, None, (2, 8), None), (8, 8, (2, 8), None)}


@torch.no_grad()
def test_flash_attention_gets_packed_documents(tiny_model, flash_calls):
    model, ids = tiny_model(torch.bfloat16), torch.randint(97, (1, 40))
    positions = torch.cat([torch.arange(5), torch.arange(23), torch.arange(12)])[None]
    plain = model(ids, position_ids=positions).logits
    exact = copy.deepcopy(model).double()(ids, position_ids=positions).logits
    model.config._attn_implementation = "my_flash"
    actual = model(ids, position_ids=positions).logits
    assert set(flash_calls) == {(40, None, None, 23), (40, 8, None, 23)}
    assert_as_exact_as([actual], [exact], [plain], model.config.head_dim)
    flash_calls.clear()
    # Lengths beside positions say nothing new: as with other functions, positions decide.
    whole = {"cu_seq_lens_q": torch.tensor([0, 12, 40]), "max_length_q": 28}
    model(ids, position_ids=torch.arange(40)[None], **whole)
    assert set(flash_calls) == {(40, None, None, None), (40, 8, None, None)}


@torch.no_grad()
def test_flash_attention_refuses_what_it_cannot_do(tiny_model, flash_calls):
    ids, positions = torch.randint(97, (2, 12)), torch.cat([torch.arange(5), torch.arange(7)])[None]
    row = {"input_ids": ids[:1], "position_ids": positions}
    filled = tiny_model(torch.bfloat16)(ids[:1, :3]).past_key_values
    for dtype, inputs, message in (
        (torch.float32, {}, "computes in float16 or bfloat16; got torch.float32"),
        (torch.bfloat16, {"attention_mask": torch.ones(2, 1, 12, 12).tril().bool()}, "does not support a 4-D"),
        (torch.bfloat16, {"attention_mask": torch.zeros(2, 1, 12, 12)}, "does not support a 4-D"),
        (
            torch.bfloat16,
            {"attention_mask": torch.tensor([[1] * 3 + [0] * 4 + [1] * 5] * 2)},
            "not between its tokens",
        ),
        (torch.bfloat16, {"position_ids": positions}, "packed documents only in a single row without padding"),
        (torch.bfloat16, {**row, "attention_mask": torch.arange(12)[None] < 10}, "a single row without padding"),
        (torch.bfloat16, {**row, "past_key_values": filled}, "packed documents only .* and without a cache"),
    ):
        model = tiny_model(dtype)
        model.config._attn_implementation = "my_flash"
        with pytest.raises(ValueError, match=message):
            model(**{"input_ids": ids, **inputs})
    with pytest.raises(ValueError, match="does not support a static cache"):
        model(ids, past_key_values=StaticCache(config=model.config, max_cache_len=20))
    assert not flash_calls
    model = tiny_model(position_embedding_type="rope")
    model.config._attn_implementation = "my_flash"
    with torch.autocast("cpu", dtype=torch.bfloat16):  # rotary queries are in float32 here, and cast by FlashAttention
        model(ids)
    assert flash_calls


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"num_key_value_heads": 3},
        {"num_key_value_heads": 3, "attention_sinks": True},
        {"attn_logit_softcapping": 2.0},
    ],
    ids=["plain", "gqa", "gqa-sinks", "softcap"],
)
@torch.no_grad()
def test_flex_attention_as_on_a_gpu(tiny_model, monkeypatch, values):
    """The calls that a GPU compiles, here without compiling them."""
    monkeypatch.setattr(attention_lsgpt, "is_tracing", lambda *tensors: bool(tensors))
    monkeypatch.setattr(attention_lsgpt, "_flex_uncompiled", None)  # the branch of the CPU
    values, ids = {"head_dim": 16, "num_global_heads": 2, **values}, torch.randint(97, (2, 40))
    with torch.compiler.set_stance("force_eager"):
        actual = tiny_model(engine="flex_attention", **values)(ids).logits
    torch.testing.assert_close(actual, tiny_model(engine="eager", **values)(ids).logits, rtol=1e-4, atol=1e-4)


def test_a_block_mask_of_inference_mode_is_one_for_training():
    visibility = visibility_lsgpt.Visibility(q_length=77, kv_length=77, window=9)
    with torch.inference_mode():
        assert not attention_lsgpt.flex_mask(visibility, LSGPTConfig()).kv_indices.is_inference()


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 0.5])
@torch.no_grad()
def test_decode_steps_of_flex_attention(tiny_model, has_sinks, softcap):
    """`sdpa`, which takes single tokens otherwise, cannot soft-cap them."""
    values = {"attn_logit_softcapping": softcap, "attention_sinks": has_sinks}
    ids, logits = torch.randint(97, (2, 21)), []
    for engine in ("flex_attention", "eager"):
        model = tiny_model(engine=engine, **values)
        cache = DynamicCache(config=model.config)
        model(ids[:, :20], past_key_values=cache)
        logits.append(model(ids[:, 20:], past_key_values=cache).logits)
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


def test_keys_that_a_cache_returns_beyond_those_it_announced_are_cut_off(tiny_model):
    """As the sliding layer of Transformers 5.17 does while it records the past for a rollback."""

    class Recording(DynamicCache):
        def update(self, key, value, layer_idx, *args):
            key, value = super().update(key, value, layer_idx, *args)
            return (torch.nn.functional.pad(x, (0, 0, 3, 0), value=9.0) for x in (key, value))

    model, ids = tiny_model().requires_grad_(False), torch.randint(97, (1, 30))
    caches = [cache_class(config=model.config) for cache_class in (DynamicCache, Recording)]
    logits = [torch.cat([model(x, past_key_values=c).logits for x in ids.split(10, dim=1)], dim=1) for c in caches]
    assert torch.equal(*logits)


@pytest.mark.parametrize("engine", ["eager", "sdpa", "flex_attention"])
@torch.no_grad()
def test_heads_without_a_mask_in_a_dictionary_see_what_they_usually_see(tiny_model, engine):
    model, ids = tiny_model(engine=engine), torch.randint(97, (1, 40))
    causal = torch.ones(1, 1, 40, 40).tril().bool()
    for masks in ({GLOBAL: causal, LOCAL: None}, {GLOBAL: None, LOCAL: causal.triu(-7)}):
        actual = model(ids, attention_mask=masks).logits
        torch.testing.assert_close(actual, model(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("engine", ["eager", "sdpa", "flex_attention"])
@torch.no_grad()
def test_masks_that_cannot_be_are_named(tiny_model, engine):
    model, ids = tiny_model(engine=engine), torch.randint(97, (2, 9))
    square = torch.ones(2, 1, 9, 9).tril()
    for mask, message in (
        (square.bool().expand(-1, 6, -1, -1), r"must have shape \(2, 1, 9, 9\): batch, all heads .*; got \(2, 6"),
        (square.bool().expand(-1, 2, -1, -1), r"must have shape \(2, 1, 9, 9\): batch, all heads"),
        (square.long(), r"must be boolean, True where a token may attend, or floating point.*got torch.int64"),
        ({GLOBAL: square.long(), LOCAL: None}, r"must be boolean"),
        ({GLOBAL: square.bool()}, r"dictionary must hold a 4-D mask, or None, for each of 'full_attention', 'sliding"),
        ({"global": square.bool(), "local": square.bool()}, r"dictionary must hold .* got \{'global': \(2, 1, 9, 9\)"),
        ({GLOBAL: torch.ones(2, 9), LOCAL: torch.ones(2, 9)}, r"dictionary must hold a 4-D mask"),
    ):
        with pytest.raises(ValueError, match=message):
            model(ids, attention_mask=mask)


@pytest.mark.parametrize("name", ["learned", "rope"])
def test_checkpoints_of_earlier_versions(name):
    """Written by version 0.1.0 with what it computed on `eager`; to the bit on an Intel CPU of the same kind."""
    from safetensors import safe_open  # noqa: PLC0415

    folder = Path(__file__).parent / "checkpoints" / name
    is_intel = "GenuineIntel" in Path("/proc/cpuinfo").read_text(encoding="utf-8")  # others sum in another order
    with safe_open(folder / "expected.safetensors", "pt") as file:
        expected = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (it is no dictionary)
        same_cpu = file.metadata()["cpu"] == torch.backends.cpu.get_cpu_capability() and is_intel
    tolerance = {"rtol": 0, "atol": 0} if same_cpu else {"rtol": 1e-4, "atol": 1e-5}
    model = LSGPTForCausalLM.from_pretrained(folder, attn_implementation="eager")
    ids, mask = expected["input_ids"], expected["attention_mask"]
    with torch.no_grad():
        actual = {
            "logits": model(ids).logits,
            "logits_of_padded": model(ids, attention_mask=mask).logits,
            "loss": model(ids, labels=ids).loss,
            "generated": model.generate(ids[:1], max_new_tokens=16, do_sample=False),
        }
    for key, value in actual.items():
        torch.testing.assert_close(value, expected[key], **tolerance)
