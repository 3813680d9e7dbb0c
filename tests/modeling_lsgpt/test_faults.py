"""Cases that were silently wrong once: copies of caches, documents beside a static cache, positions, gradients."""

import copy
import operator
from functools import partial
from itertools import product

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.export import Dim
from torch.utils.flop_counter import FlopCounterMode
from transformers import Cache, DataCollatorWithFlattening, DynamicCache, GenerationConfig, StaticCache
from transformers.cache_utils import DynamicSlidingWindowLayer, StaticLayer
from transformers.distributed import DistributedConfig
from transformers.integrations.executorch import TorchExportableModuleForDecoderOnlyLM, export_with_dynamic_cache

from lsgpt import LSGPTForCausalLM, LSGPTForSequenceClassification, LSGPTForTokenClassification
from lsgpt.modeling_lsgpt import (
    CACHE,
    LOCAL,
    attention_lsgpt,
    create_masks_for_generate,
    describe_visibility,
    linear_lsgpt,
)
from lsgpt.modeling_lsgpt.attention_lsgpt import flash_mask, sdpa_mask
from lsgpt.modeling_lsgpt.linear_lsgpt import SplitLinear


@pytest.mark.parametrize("num_global_heads", [2, 6])
@torch.no_grad()
def test_forked_caches_do_not_overwrite_each_other(tiny_model, num_global_heads):
    """Copies of a cache share the memory of its past, and each goes on with a token of its own."""
    model = tiny_model(num_global_heads=num_global_heads)
    ids, tokens = torch.randint(97, (1, 20)), torch.tensor([3, 41, 77])
    cache = DynamicCache(config=model.config)
    model(ids[:, :19], past_key_values=cache)
    model(ids[:, 19:], past_key_values=cache)  # gives the cache room for a few more
    forks = []
    for _ in tokens:
        fork = copy.copy(cache)
        fork.layers = [copy.copy(layer) for layer in cache.layers]
        forks.append(fork)
    for token, fork in zip(tokens, forks):
        model(token.view(1, 1), past_key_values=fork)
    following = torch.tensor([[5]])
    for token, fork in zip(tokens, forks):
        expected = model(torch.cat([ids, token.view(1, 1), following], dim=1)).logits[:, -1]
        torch.testing.assert_close(
            model(following, past_key_values=fork).logits[:, -1], expected, rtol=1e-4, atol=1e-4
        )


@torch.no_grad()
def test_restored_keys_and_values_go_on(tiny_model):
    model, ids = tiny_model(), torch.randint(97, (1, 24))
    cache = DynamicCache(config=model.config)
    model(ids[:, :20], past_key_values=cache)
    model(ids[:, 20:21], past_key_values=cache)
    saved = [(layer.keys, layer.values) for layer in cache.layers]
    lengths = [getattr(layer, "cumulative_length", None) for layer in cache.layers]
    model(torch.tensor([[9]]), past_key_values=cache)
    for layer, (keys, values), length in zip(cache.layers, saved, lengths):
        layer.keys, layer.values = keys, values
        if length is not None:
            layer.cumulative_length = length
    actual = model(ids[:, 21:22], past_key_values=cache).logits
    torch.testing.assert_close(actual, model(ids[:, :22]).logits[:, -1:], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_batch_that_shrinks_leaves_its_buffers(tiny_model):
    """The first sequence alone is a view of the same memory, at the same place."""
    model, ids = tiny_model(), torch.randint(97, (2, 21))
    cache = DynamicCache(config=model.config)
    model(ids[:, :19], past_key_values=cache)
    model(ids[:, 19:20], past_key_values=cache)
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:1], layer.values[:1]
    actual = model(ids[:1, 20:], past_key_values=cache).logits
    torch.testing.assert_close(actual, model(ids[:1]).logits[:, -1:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("changed", ["keys", "values"])
@torch.no_grad()
def test_changed_keys_or_values_are_used(tiny_model, changed):
    """Also if only one of the two was replaced, after steps that left room in the buffers."""
    model, ids = tiny_model(), torch.randint(97, (1, 21))
    cache = DynamicCache(config=model.config)
    for part in ids.split((19, 1, 1), dim=1)[:2]:
        model(part, past_key_values=cache)
    room = cache.layers[0].buffers.tensors[changed == "values"].clone()  # other memory with the same strides
    setattr(cache.layers[0], changed, room[:, :, :20].mul_(2))
    twin = copy.deepcopy(cache)
    twin.layers[0].buffers = None
    logits = [model(ids[:, 20:], past_key_values=each).logits for each in (cache, twin)]
    assert torch.equal(*logits)


@torch.no_grad()
def test_a_cache_that_is_reset_holds_no_memory(tiny_model):
    model, cache = tiny_model(), DynamicCache(config=tiny_model().config)
    for ids in (torch.randint(97, (1, 20)), torch.tensor([[5]])):
        model(ids, past_key_values=cache)
    assert cache.layers[0].buffers is not None
    cache.reset()
    assert cache.layers[0].buffers is None and cache.get_seq_length() == 0
    ids = torch.randint(97, (1, 9))
    torch.testing.assert_close(model(ids, past_key_values=cache).logits, model(ids).logits)


def test_a_cache_beside_gradient_checkpointing_is_refused(tiny_model):
    """It stays empty there, so that `generate` would continue the last token alone."""
    model = tiny_model(num_global_heads=0)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.randint(97, (1, 12)), past_key_values=cache)
    model.gradient_checkpointing_enable()
    # Transformers keeps the cache where no gradients flow from 5.24 on.
    for needs_gradients in {True, CACHE == "cache"}:
        with torch.set_grad_enabled(needs_gradients), pytest.raises(ValueError, match="must be None with gradient"):
            model.train()(torch.randint(97, (1, 4)), past_key_values=cache)
    model.eval()(torch.randint(97, (1, 4)), past_key_values=cache)
    ids = torch.randint(97, (2, 12))
    expected = model.generate(ids, max_new_tokens=20, do_sample=False)
    model.train()
    assert torch.equal(model.generate(ids, max_new_tokens=20, do_sample=False, use_cache=False), expected)
    if CACHE == "cache":
        assert torch.equal(model.generate(ids, max_new_tokens=20, do_sample=False), expected)
    else:
        with pytest.raises(ValueError, match="must be None with gradient"):
            model.generate(ids, max_new_tokens=20, do_sample=False)


@torch.no_grad()
def test_a_cache_has_two_names(tiny_model):
    model, ids = tiny_model(), torch.randint(97, (2, 20))
    expected = model(ids).logits[:, -1:]
    for first, second in product(["past_key_values", "cache"], repeat=2):
        returned = model.model(ids[:, :-1], **{first: DynamicCache(config=model.config)})[CACHE]
        assert returned.get_seq_length() == 19
        embeds = model.get_input_embeddings()(ids[:, -1:])
        masks = create_masks_for_generate(model.config, embeds, **{second: returned})
        assert [mask.shape[-1] for mask in masks.values()] == [20, 8]  # of global heads, and of local ones
        outputs = model(ids[:, -1:], masks, **{second: returned})
        assert outputs[CACHE] is returned and returned.get_seq_length() == 20
        torch.testing.assert_close(outputs.logits, expected)
        with pytest.raises(ValueError, match="only one of `cache` and `past_key_values`"):
            model(ids[:, -1:], past_key_values=returned, cache=returned)


@pytest.mark.parametrize("implementation", ["static", "dynamic"])
@pytest.mark.parametrize("is_padded", [False, True])
@torch.no_grad()
def test_text_that_continues_packed_documents(tiny_model, implementation, is_padded):
    """The last document goes on as if it were alone, whatever the cache."""
    model = tiny_model(position_embedding_type="rope")
    ids = torch.randint(1, 97, (1, 40))
    positions, mask = torch.cat([torch.arange(15), torch.arange(25)])[None], torch.ones(1, 40, dtype=torch.long)
    if is_padded:
        ids = torch.nn.functional.pad(ids, (3, 0))
        positions, mask = (torch.nn.functional.pad(x, (3, 0)) for x in (positions, mask))
    options = {"max_new_tokens": 12, "do_sample": False, "cache_implementation": implementation}
    actual = model.generate(ids, attention_mask=mask, position_ids=positions, disable_compile=True, **options)
    alone = model.generate(ids[:, -25:], attention_mask=mask[:, -25:], max_new_tokens=12, do_sample=False)
    assert actual[:, -12:].equal(alone[:, -12:])


@torch.no_grad()
def test_single_tokens_after_packed_documents_on_a_static_cache(tiny_model):
    """Rows of two documents that begin together, and rows that do not."""
    model, ids = tiny_model(), torch.randint(97, (2, 40))
    for starts in ((15,), (15, 22)):
        positions = torch.stack([torch.cat([torch.arange(start), torch.arange(40 - start)]) for start in starts])
        cache = StaticCache(model.config, max_cache_len=50)
        parts = [
            model(ids[:, part], position_ids=positions[:, part], past_key_values=cache).logits
            for part in (slice(35), *(slice(i, i + 1) for i in range(35, 40)))
        ]
        for row, (logits, start) in enumerate(zip(torch.cat(parts[1:], dim=1), starts * 2)):
            expected = model(ids[row : row + 1, start:]).logits[0, -5:]
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_mask_of_another_shape_on_a_static_cache(tiny_model):
    model, ids = tiny_model(), torch.randint(97, (1, 5))
    cache = StaticCache(model.config, max_cache_len=20)
    model(ids, past_key_values=cache)
    with pytest.raises(ValueError, match=r"must have shape \(1, 'keys'\), .*; got \(1, 6, 6\)"):
        model(ids[:, :1], past_key_values=cache, attention_mask=torch.ones(1, 6, 6))


@pytest.mark.parametrize(
    ("positions", "boundaries"),
    [
        ([*range(15), *range(20, 45)], [0, 15, 40]),
        ([*range(5, 20), *range(3, 28)], [0, 15, 40]),
        ([*range(40)], None),
    ],
)
def test_flash_attention_separates_the_same_documents(tiny_config, positions, boundaries):
    """By Transformers' rule, the first of these is one document, and the second leaves tokens in none."""
    positions = torch.tensor(positions)[None]
    visibility = describe_visibility(tiny_config(), torch.empty(1, 40, 0), position_ids=positions)
    for each in visibility.values():
        mask = flash_mask(each)
        if boundaries is None:
            assert mask is None
        else:
            assert mask.cu_seq_lens.tolist() == boundaries and mask.cu_seq_lens.dtype == torch.int32
            assert mask.max_length == 25


@torch.no_grad()
def test_documents_that_come_as_lengths(tiny_model):
    """`DataCollatorWithFlattening` can return them instead of positions."""
    rows = [torch.randint(97, (n,)).tolist() for n in (7, 20, 12)]
    features = [{"input_ids": row} for row in rows]
    batch = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_position_ids=False)(features)
    batch.pop("labels")
    for positions in ("rope", "learned"):
        model = tiny_model(position_embedding_type=positions, max_position_embeddings=20)
        expected = torch.cat([model(torch.tensor([row])).logits for row in rows], dim=1)
        torch.testing.assert_close(model(**batch).logits, expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="`cu_seq_lens_q` must come with a single row"):
        model(torch.randint(97, (2, 10)), cu_seq_lens_q=torch.tensor([0, 4, 10]))
    cache = DynamicCache(config=model.config)
    model(torch.randint(97, (1, 5)), past_key_values=cache)
    with pytest.raises(ValueError, match="and without cached tokens"):
        model(torch.randint(97, (1, 10)), cu_seq_lens_q=torch.tensor([0, 4, 10]), past_key_values=cache)


@pytest.mark.parametrize("cache_type", [DynamicCache, partial(StaticCache, max_cache_len=20)])
def test_a_cache_with_smaller_windows_is_refused(tiny_model, tiny_config, cache_type):
    ids = torch.randint(97, (1, 9))
    with pytest.raises(ValueError, match=r"must keep 8 tokens in layer 1, .*; the layer keeps 4"):
        tiny_model()(ids, past_key_values=cache_type(config=tiny_config(sliding_window=4)))
    with pytest.raises(ValueError, match=r"must keep all tokens in layer 0, .*; the layer keeps 8"):
        tiny_model(num_global_heads=6)(ids, past_key_values=cache_type(config=tiny_config(num_global_heads=0)))


def test_a_static_cache_of_windows_alone_must_not_overflow(tiny_model, tiny_config):
    model, ids = tiny_model(num_global_heads=0), torch.randint(97, (1, 6))
    small = StaticCache(config=tiny_config(num_global_heads=0, sliding_window=4), max_cache_len=20)
    with pytest.raises(ValueError, match=r"must keep 8 tokens in layer 0, .*; the layer keeps 4\."):
        model(ids, past_key_values=small)
    short = StaticCache(config=model.config, max_cache_len=5)
    model(ids[:, :5], past_key_values=short)
    with pytest.raises(ValueError, match=r"must keep 8 tokens in layer 0, .*; the layer keeps 5\. .* `max_cache_len`"):
        model(ids[:, 5:], past_key_values=short)


@pytest.mark.parametrize("num_global_heads", [0, 2])
def test_a_static_cache_shorter_than_the_window_is_whole(tiny_model, num_global_heads):
    model, ids = tiny_model(num_global_heads=num_global_heads), torch.randint(97, (1, 5))
    cache = StaticCache(config=model.config, max_cache_len=5)
    parts = [model(part, past_key_values=cache).logits for part in ids.split((3, 2), dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), model(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["seq_idx", "cu_seq_lens_k"])
def test_documents_that_would_be_mixed_are_refused(tiny_model, name):
    """What `DataCollatorWithFlattening` gives besides positions and `cu_seq_lens_q`."""
    model, ids = tiny_model(), torch.randint(97, (1, 10))
    value = torch.tensor([[0] * 4 + [1] * 6]) if name == "seq_idx" else torch.tensor([0, 4, 10])
    with pytest.raises(ValueError, match="`position_ids`, which begin at 0 in every document, or `cu_seq_lens_q`"):
        model(ids, **{name: value})
    model(ids, position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]]), **{name: value})


def test_a_cache_with_fewer_layers_is_refused(tiny_model, tiny_config):
    cache = DynamicCache(config=tiny_config(num_hidden_layers=1))
    with pytest.raises(ValueError, match=r"must have 4 layers, one for each kind of head in each layer .* got 2"):
        tiny_model()(torch.randint(97, (1, 9)), past_key_values=cache)


@pytest.mark.parametrize("engine", ["eager", "sdpa"])
def test_attention_to_later_tokens_is_refused(tiny_model, engine):
    """Transformers' `sdpa` would give it to the global heads, the other functions to none."""
    with pytest.raises(ValueError, match="`is_causal` must not be False: the heads of LSGPT see no later tokens"):
        tiny_model(engine=engine)(torch.randint(97, (1, 9)), is_causal=False)


def test_positions_past_the_last_are_refused_without_a_look_at_them(tiny_model):
    """Values are not read on a GPU, where the lookup of such a position would end the process."""
    model = tiny_model(max_position_embeddings=20).to("meta")
    ids = torch.zeros(1, 20, dtype=torch.long, device="meta")
    cache = model(ids, use_cache=True)[CACHE]
    for inputs, options in ((ids[:, :1], {CACHE: cache}), (torch.cat([ids, ids[:, :1]], dim=1), {})):
        with pytest.raises(ValueError, match=r"`position_ids` must be between 0 and 19 .*; got 20; learned positions"):
            model(inputs, **options)


@torch.no_grad()
def test_layers_that_were_rearranged_have_no_cache(tiny_model, tmp_path):
    """Copies of a layer would share a part of the cache. Saved and loaded, each layer has its own."""
    model, ids = tiny_model(num_hidden_layers=3), torch.randint(97, (1, 20))
    for layers in ([0, 1, 0, 1], [0, 2], [1, 0, 2]):
        changed = copy.deepcopy(model)
        changed.model.layers = torch.nn.ModuleList(copy.deepcopy(model.model.layers[i]) for i in layers)
        changed.config.num_hidden_layers = len(layers)
        with pytest.raises(ValueError, match=r"needs the layers that the model was built with; .* save and load"):
            changed(ids, use_cache=True)
        changed.save_pretrained(tmp_path)
        saved = LSGPTForCausalLM.from_pretrained(tmp_path)
        torch.testing.assert_close(saved(ids, use_cache=True).logits, changed(ids, use_cache=False).logits)


def test_layers_without_a_number_of_global_heads_are_refused(tiny_model):
    """They were left out."""
    model = tiny_model(num_global_heads=[2, 1])
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], layer_replication=[[0, 2], [0, 1]])
    with pytest.raises(ValueError, match=r"must have a number for each of the 3 layers; got \[2, 1\]"):
        get_peft_model(model, config)(torch.randint(97, (1, 20)), use_cache=False)


def test_dynamic_quantization_reaches_the_projections(tiny_model, monkeypatch):
    quantized = torch.ao.quantization.quantize_dynamic(tiny_model(), {torch.nn.Linear})
    assert "DynamicQuantizedLinear" in repr(quantized.model.layers[0].self_attn.q_proj)
    # As docs/other-libraries.md says: large ones stay as they are.
    wide = tiny_model(hidden_size=384, head_dim=64, num_hidden_layers=1)
    quantized = torch.ao.quantization.quantize_dynamic(wide, {torch.nn.Linear})
    assert type(quantized.model.layers[0].self_attn.q_proj) is SplitLinear
    monkeypatch.setattr(linear_lsgpt, "MIN_WEIGHTS", float("inf"))
    wide = tiny_model(hidden_size=384, head_dim=64, num_hidden_layers=1)
    quantized = torch.ao.quantization.quantize_dynamic(wide, {torch.nn.Linear})
    assert "DynamicQuantizedLinear" in repr(quantized.model.layers[0].self_attn.q_proj)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("sinks", [False, True, "full_window"])
@pytest.mark.parametrize("engine", ["eager", "sdpa"])
def test_functional_gradients(tiny_model, engine, sinks):
    """Of a batch, and of each of its rows (`vmap`)."""
    model, ids = tiny_model(engine=engine, attention_sinks=sinks), torch.randint(97, (2, 40))
    parameters = {name: x.detach() for name, x in model.named_parameters()}

    def loss(parameters, ids):
        return torch.func.functional_call(model, parameters, (ids,), {"labels": ids, "use_cache": False}).loss

    gradient = torch.func.grad(loss)
    of_batch, of_rows = gradient(parameters, ids), torch.func.vmap(gradient, (None, 0))(parameters, ids[:, None])
    model(ids, labels=ids, use_cache=False).loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(of_batch[name], parameter.grad)
        torch.testing.assert_close(of_rows[name].mean(0), parameter.grad)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("sinks", [False, True, "full_window"])
@pytest.mark.parametrize("engine", ["eager", "sdpa"])
@torch.no_grad()
def test_vmap_over_rows_with_masks_and_after_a_cache(tiny_model, engine, sinks, monkeypatch):
    model, ids = tiny_model(engine=engine, attention_sinks=sinks), torch.randint(97, (3, 1, 20))
    masks = torch.ones(3, 1, 20, dtype=torch.long)
    masks[1, 0, :3] = 0

    def padded(ids, mask):
        return model(ids, attention_mask=mask, use_cache=False).logits

    rows = torch.stack([padded(*row) for row in zip(ids, masks)])
    torch.testing.assert_close(torch.func.vmap(padded)(ids, masks), rows, rtol=1e-4, atol=1e-4)

    cache = DynamicCache(config=model.config)
    model(torch.randint(97, (1, 30)), past_key_values=cache)

    def go_on(ids):
        return model(ids, past_key_values=copy.deepcopy(cache)).logits

    for pairs in (attention_lsgpt.MASKED_PAIRS, 1):  # with a mask, and without one for the past
        monkeypatch.setattr(attention_lsgpt, "MASKED_PAIRS", pairs)
        rows = torch.stack([go_on(row) for row in ids])
        torch.testing.assert_close(torch.func.vmap(go_on)(ids), rows, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mask_dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@torch.no_grad()
def test_additive_masks_of_another_dtype(tiny_model, dtype, mask_dtype):
    ids, bias = torch.randint(97, (2, 20)), torch.randn(2, 1, 20, 20, dtype=mask_dtype)
    mask = bias.masked_fill(torch.ones(20, 20).triu(1).bool(), torch.finfo(mask_dtype).min)
    mask[..., :3] = torch.finfo(mask_dtype).min  # so that the first three queries see nothing
    logits = [tiny_model(engine=name).to(dtype)(ids, attention_mask=mask).logits for name in ("sdpa", "eager")]
    assert all(x.isfinite().all() for x in logits)
    torch.testing.assert_close(*(x[:, 3:] for x in logits), rtol=1e-4, atol=1e-4)


def test_second_derivatives(tiny_model):
    """With `eager`; PyTorch's other kernels have none on the CPU, and say so."""
    ids = torch.randint(97, (1, 40))
    for engine in ("eager", "sdpa"):
        model = tiny_model(engine=engine)
        weight = model.model.layers[0].self_attn.q_proj.weight
        (gradient,) = torch.autograd.grad(model(ids, labels=ids).loss, weight, create_graph=True)
        if engine == "eager":
            gradient.square().sum().backward()
            assert weight.grad.isfinite().all() and weight.grad.any()
        else:
            with pytest.raises(RuntimeError, match=r"derivative for .*attention.*backward is not implemented"):
                gradient.square().sum().backward()


@torch.no_grad()
@pytest.mark.parametrize("cls", [LSGPTForSequenceClassification, LSGPTForTokenClassification])
def test_padding_on_the_left_does_not_change_scores(tiny_config, cls):
    model = cls(tiny_config(pad_token_id=0, num_labels=3, max_position_embeddings=12)).eval()
    ids = torch.randint(1, 97, (1, 12))
    padded, mask = torch.nn.functional.pad(ids, (5, 0)), torch.ones(1, 17, dtype=torch.long)
    mask[:, :5] = 0
    expected = model(ids).logits
    actual = model(padded, attention_mask=mask).logits
    actual = actual[:, 5:] if cls is LSGPTForTokenClassification else actual
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_dropout_of_the_token_classifier(tiny_config):
    assert LSGPTForTokenClassification(tiny_config(classifier_dropout=0.25)).dropout.p == 0.25


def test_sinks_are_finite_in_half_precision(tiny_model):
    """Under autocast, rotary queries are in float32, whose smallest number is minus infinity in float16."""
    ids, losses = torch.randint(97, (1, 60)), []
    for engine in ("sdpa", "eager"):
        values = {"position_embedding_type": "rope", "attention_sinks": "full_window", "head_dim": 64}
        model = tiny_model(engine=engine, **values, initializer_range=0.02).train()
        with torch.autocast("cpu", dtype=torch.float16):
            losses.append(model(ids, labels=ids, use_cache=False).loss)
    torch.testing.assert_close(*losses, rtol=1e-3, atol=0)


def test_pipelines_are_refused(tiny_model):
    model = tiny_model()
    config = DistributedConfig(pp_size=2)
    with pytest.raises(ValueError, match="`pp_size` of the `DistributedConfig` must be 1; got 2"):
        type(model).maybe_distribute_model(model, config, None)
    assert type(model).maybe_distribute_model(model, DistributedConfig(fsdp_size=1), None) is model


@pytest.mark.parametrize("attention_sinks", [False, "full_window"])
@pytest.mark.parametrize("length", [5, 6, 20])
@torch.no_grad()
def test_a_trace_holds_for_longer_inputs(tiny_model, attention_sinks, length):
    """The example of 5 or 6 tokens needs no mask besides causality, that of 20 has blocks."""
    model = tiny_model(sliding_window=6, use_cache=False, attention_sinks=attention_sinks)
    traced = torch.jit.trace(model, torch.randint(97, (1, length)), check_trace=False, strict=False)
    for longer in (3, 8, 20, 31):
        ids = torch.randint(97, (1, longer))
        torch.testing.assert_close(traced(ids)["logits"], model(ids).logits, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_trace_holds_for_other_padding(tiny_model):
    """The example's mask has none."""
    model, ids, mask = tiny_model(use_cache=False), torch.randint(97, (2, 20)), torch.ones(2, 20).long()
    traced = torch.jit.trace(model, (ids, mask.clone()), check_trace=False, strict=False)
    mask[1, :5] = 0
    expected = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(traced(ids, mask)["logits"][mask == 1], expected[mask == 1], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_prompt_and_a_step_with_a_dynamic_cache_are_exported(tiny_model):
    model, ids = tiny_model(), torch.randint(97, (1, 20))
    program = export_with_dynamic_cache(model, ids, torch.ones_like(ids)).module()
    cache = DynamicCache(config=model.config)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), CACHE: cache}
    torch.testing.assert_close(program(**inputs, use_cache=True).logits, model(ids).logits, rtol=1e-4, atol=1e-4)
    with FlopCounterMode(display=False):  # looks into outputs, as the export has registered
        model(ids[:, :19], **{CACHE: cache})
    inputs = {"input_ids": ids[:, 19:], CACHE: copy.deepcopy(cache), "use_cache": True}
    program = torch.export.export(model, (), inputs, strict=False).module()
    actual = program(**inputs | {CACHE: cache}).logits
    torch.testing.assert_close(actual, model(ids).logits[:, 19:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("length", [1, 3])
@torch.no_grad()
def test_decoding_with_a_static_cache_is_exported(tiny_model, length):
    model, ids = tiny_model(), torch.randint(97, (1, 15))
    expected, cache = model(ids).logits, {"batch_size": 1, "max_cache_len": 20}
    model.generation_config = GenerationConfig(cache_implementation="static", cache_config=cache)
    chunks = [
        {"input_ids": ids[:, i : i + length], "cache_position": torch.arange(i, i + length)}
        for i in range(0, ids.shape[1], length)
    ]
    program = TorchExportableModuleForDecoderOnlyLM(model).export(**chunks[0]).module()
    logits = [program(**chunk) for chunk in chunks]
    torch.testing.assert_close(torch.cat(logits, dim=1), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("engine", ["eager", "sdpa", "flex_attention"])
@torch.no_grad()
def test_local_heads_with_a_static_cache_of_full_size(tiny_model, engine):
    """Its keys end with empty slots, not with the last query's."""
    model, ids = tiny_model(engine=engine), torch.randint(97, (1, 30))
    cache = Cache(layers=[StaticLayer(max_cache_len=40) for _ in model.config.cache_layers])
    logits = [model(chunk, **{CACHE: cache}).logits for chunk in ids.split([20, 3, 1, 6], dim=1)]
    torch.testing.assert_close(torch.cat(logits, dim=1), model(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("engine", ["eager", "sdpa", "triton"])
@torch.no_grad()
def test_a_cache_of_static_and_dynamic_layers(tiny_model, engine, on_gpu_if_any):
    model, ids = tiny_model(engine=engine), torch.randint(97, (1, 30))
    kinds = [partial(StaticLayer, max_cache_len=40), partial(DynamicSlidingWindowLayer, sliding_window=8)]
    cache = Cache(layers=[kind() for _ in range(2) for kind in kinds])
    logits = [model(chunk, **{CACHE: cache}).logits for chunk in ids.split([20, 3, 1, 6], dim=1)]
    torch.testing.assert_close(torch.cat(logits, dim=1), model(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("position_embedding_type", ["learned", "rope"])
@pytest.mark.parametrize("engine", ["eager", "sdpa"])
@torch.no_grad()
def test_a_cache_filled_under_autocast_goes_on_without_it(tiny_model, engine, position_embedding_type):
    model, ids = tiny_model(engine=engine, position_embedding_type=position_embedding_type), torch.randint(97, (1, 24))
    cache = DynamicCache(config=model.config)
    with torch.autocast("cpu", torch.bfloat16):
        model(ids[:, :20], past_key_values=cache)
        model(ids[:, 20:22], past_key_values=cache)
    found = [model(ids[:, i : i + 1], past_key_values=cache).logits for i in (22, 23)]
    torch.testing.assert_close(torch.cat(found, dim=1), model(ids).logits[:, 22:], rtol=0.1, atol=0.3)


@torch.no_grad()
def test_only_layers_of_a_window_have_blocks_with_a_static_cache(tiny_model):
    model, ids = tiny_model(), torch.randint(97, (1, 10))
    caches = StaticCache(model.config, 40), Cache(layers=[StaticLayer(40) for _ in model.config.cache_layers])
    for cache, ndim in zip(caches, (5, 4), strict=True):
        model(ids, **{CACHE: cache})
        visibility = describe_visibility(model.config, torch.empty(1, 20, 48), None, cache)
        assert sdpa_mask(visibility[LOCAL]).ndim == ndim


@pytest.mark.parametrize(("length", "exported"), [(Dim.AUTO, 80), (Dim("length", min=65, max=96), 80), (Dim.AUTO, 20)])
@torch.no_grad()
def test_an_exported_program_takes_every_length(tiny_model, length, exported):
    """Also those that fill the blocks of local heads, of 64 queries, and one beyond four windows from one below."""
    model, ids = tiny_model(max_position_embeddings=256), torch.randint(97, (2, exported))
    sizes = {"input_ids": {0: Dim.AUTO, 1: length}, "use_cache": None}
    program = torch.export.export(model, (), {"input_ids": ids, "use_cache": False}, dynamic_shapes=sizes).module()
    divided = [node.args[0] for node in program.graph.nodes if node.target is operator.floordiv]
    assert divided and all(number.target is not operator.neg for number in divided)  # in ONNX, -70 // 64 is -1
    numbers = [65, 96] if isinstance(length, Dim) else [65, 127, 128, 129, 192]
    for number in numbers if exported > 64 else [20, 33, 64]:
        ids = torch.randint(97, (3, number))
        torch.testing.assert_close(
            program(input_ids=ids, use_cache=False).logits, model(ids).logits, rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("length", [6, 20])
def test_shapes_of_a_model_with_sinks_are_found_without_weights(tiny_model, length):
    model = tiny_model(attention_sinks=True).to("meta")
    assert model(torch.zeros(2, length, dtype=torch.long, device="meta")).logits.shape == (2, length, 97)
