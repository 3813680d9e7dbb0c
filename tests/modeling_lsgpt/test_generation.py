"""Every way to generate gives, token for token, what a model without a cache gives.

The oracle recomputes the whole sequence for each new token on the dense `eager` engine. Models run in float64: equal
text then means equal computation, not a lucky rounding.
"""

import copy
import weakref
from itertools import pairwise

import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn.functional import scaled_dot_product_attention
from transformers import CompileConfig, DynamicCache, GenerationConfig, StaticCache
from transformers.exporters.utils import get_leaf_tensors

from lsgpt import LSGPTConfig, LSGPTForCausalLM
from lsgpt.modeling_lsgpt import GLOBAL, LOCAL
from lsgpt.modeling_lsgpt.cache_lsgpt import ROOM
from lsgpt.modeling_lsgpt.local_lsgpt import past_attention_forward


SPLITS = {
    "2of6": {},
    "gqa": {"num_key_value_heads": 3, "num_global_heads": 2},
    "all-global": {"num_global_heads": 6},
    "all-local": {"num_global_heads": 0},
    "per-layer": {"num_global_heads": [0, 3]},
    "llama-sinks": {
        "position_embedding_type": "rope",
        "norm_type": "rms_norm",
        "gated_mlp": True,
        "attention_sinks": True,
        "num_key_value_heads": 3,
    },
    "late-sinks": {"position_embedding_type": "rope", "attention_sinks": "full_window", "num_key_value_heads": 3},
}
ENGINES = ("eager", "sdpa")
NEW_TOKENS = 24  # three windows: the local caches fill, overflow and roll


@pytest.fixture(params=SPLITS, ids=SPLITS)
def split(request):
    return SPLITS[request.param]


def greedy_without_cache(model, input_ids, new_tokens, attention_mask=None):
    """Argmax of the whole sequence's last logits, one token at a time."""
    engine = model.config._attn_implementation
    model.set_attn_implementation("eager")
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    with torch.no_grad():
        for _ in range(new_tokens):
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
            logits = model(input_ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
            input_ids = torch.cat((input_ids, logits[:, -1:].argmax(-1)), dim=-1)
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
    model.set_attn_implementation(engine)
    return input_ids


def greedy(model, input_ids, new_tokens=NEW_TOKENS, **kwargs):
    return model.generate(input_ids, max_new_tokens=new_tokens, do_sample=False, **kwargs)


def logits_without_cache(model, input_ids):
    with torch.no_grad():
        return model(input_ids, use_cache=False).logits


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("prompt", [1, 7, 8, 9, 40])
def test_token_by_token(tiny_model, split, engine, prompt):
    model = tiny_model(torch.float64, engine, **split)
    input_ids = torch.randint(97, (2, prompt))
    assert torch.equal(greedy(model, input_ids), greedy_without_cache(model, input_ids, NEW_TOKENS))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("chunks", [(5, 1, 1, 7, 30), (20, 8, 16), (3, 5, 1, 9, 26), (1, 43)])
@pytest.mark.parametrize("cache", ["dynamic", "dynamic-without-config", "static"])
def test_continuation_in_chunks_that_straddle_the_window(tiny_model, split, engine, chunks, cache):
    model = tiny_model(torch.float64, engine, **split)
    input_ids = torch.randint(97, (2, sum(chunks)))
    past_key_values = {
        "dynamic": lambda: DynamicCache(config=model.config),
        "dynamic-without-config": DynamicCache,
        "static": lambda: StaticCache(config=model.config, max_cache_len=64),
    }[cache]()
    steps = []
    with torch.no_grad():
        for chunk in input_ids.split(chunks, dim=1):
            steps.append(model(chunk, past_key_values=past_key_values, use_cache=True).logits)
    close(torch.cat(steps, dim=1), logits_without_cache(model, input_ids))


def test_flex_attention_continues_from_a_static_cache(tiny_model):
    """Its mask function is called after the cache has been updated, and must not see the new length."""
    model, input_ids = tiny_model(engine="flex_attention"), torch.randint(97, (1, 40))
    cache = StaticCache(config=model.config, max_cache_len=40)
    with torch.no_grad():
        steps = [model(chunk, past_key_values=cache).logits for chunk in input_ids.split((25, 15), dim=1)]
        cache.reset()
        again = model(input_ids, past_key_values=cache).logits
    expected = logits_without_cache(model.set_attn_implementation("eager") or model, input_ids)
    torch.testing.assert_close(torch.cat(steps, dim=1), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(again, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
def test_long_prompts_in_blocks_and_chunked_prefill(tiny_model, engine):
    model = tiny_model(torch.float64, engine)
    input_ids = torch.randint(97, (2, 150))
    expected = greedy_without_cache(model, input_ids, 12)
    assert torch.equal(greedy(model, input_ids, 12), expected)
    for chunk_size in (4, 33, 70):
        assert torch.equal(greedy(model, input_ids, 12, prefill_chunk_size=chunk_size), expected)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("cache_implementation", [None, "static"])
def test_left_padded_batches(tiny_model, split, engine, cache_implementation):
    model = tiny_model(torch.float64, engine, **split)
    lengths = (30, 9, 3)
    input_ids = torch.randint(97, (3, 30))
    mask = torch.tensor([[0] * (30 - n) + [1] * n for n in lengths])
    text = greedy(model, input_ids, attention_mask=mask, pad_token_id=0, cache_implementation=cache_implementation)
    for row, length in enumerate(lengths):
        alone = greedy_without_cache(model, input_ids[row : row + 1, 30 - length :], NEW_TOKENS)
        assert torch.equal(text[row, 30 - length :], alone[0])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "how",
    [
        {"num_beams": 3},
        {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.5},
        {"do_sample": True, "temperature": 0.8, "num_return_sequences": 3},
        {"do_sample": True, "top_k": 20, "num_beams": 2},
    ],
    ids=["beams", "beams-returned", "sampling", "beam-sampling"],
)
def test_beams_and_sampling(tiny_model, split, engine, how):
    model = tiny_model(torch.float64, engine, **split)
    input_ids = torch.randint(97, (2, 12))
    results = []
    for use_cache in (True, False):
        torch.manual_seed(1)
        results.append(
            model.generate(input_ids, max_new_tokens=NEW_TOKENS, use_cache=use_cache, **{"do_sample": False, **how})
        )
    assert torch.equal(*results)


@pytest.mark.parametrize("engine", ENGINES)
def test_prompt_lookup(tiny_model, split, engine):
    model = tiny_model(torch.float64, engine, **split)
    input_ids = torch.randint(97, (1, 6)).repeat(1, 5)
    expected = greedy_without_cache(model, input_ids, NEW_TOKENS)
    assert torch.equal(greedy(model, input_ids, prompt_lookup_num_tokens=5), expected)


@pytest.mark.parametrize("engine", ENGINES)
def test_assisted_decoding_rolls_back_past_the_window(tiny_model, split, engine):
    model = tiny_model(torch.float64, engine, **split)
    # The same model with noise: it guesses right often enough to run ahead, and wrong often enough to be rolled back.
    assistant = tiny_model(torch.float64, engine, **split)
    for parameter in assistant.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    assistant.generation_config = GenerationConfig(
        num_assistant_tokens=15, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
    )
    input_ids = torch.randint(97, (1, 20))
    expected = greedy_without_cache(model, input_ids, NEW_TOKENS)
    assert torch.equal(greedy(model, input_ids, assistant_model=assistant), expected)


def test_the_first_layers_draft_for_the_model(tiny_model, split):
    model, ids = tiny_model(**split), torch.randint(97, (1, 20))
    assert torch.equal(greedy(model, ids, assistant_early_exit=1), greedy(model, ids))
    assert model.config.num_hidden_layers == 2


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("prompt", [1, 7, 8, 30])
def test_static_cache(tiny_model, split, engine, prompt):
    model = tiny_model(torch.float64, engine, **split)
    input_ids = torch.randint(97, (2, prompt))
    expected = greedy_without_cache(model, input_ids, NEW_TOKENS)
    assert torch.equal(greedy(model, input_ids, cache_implementation="static"), expected)


def test_static_cache_compiled(tiny_model, fresh_compiler):
    model = tiny_model(torch.float64, "sdpa", num_hidden_layers=1)
    input_ids = torch.randint(97, (2, 5))
    expected = greedy_without_cache(model, input_ids, NEW_TOKENS)
    decode = torch.compile(model, fullgraph=True)
    cache = StaticCache(config=model.config, max_cache_len=32)
    text = input_ids
    with torch.no_grad():
        # As in `generate`, the prompt is not compiled.
        logits = model(input_ids, past_key_values=cache, use_cache=True).logits
        for _ in range(NEW_TOKENS):
            text = torch.cat((text, logits[:, -1:].argmax(-1)), dim=-1)
            logits = decode(text[:, -1:].contiguous(), past_key_values=cache, use_cache=True).logits
    assert torch.equal(text, expected)


@pytest.mark.parametrize("engine", ENGINES)
def test_cache_is_reused_across_turns(tiny_model, split, engine):
    model = tiny_model(torch.float64, engine, **split)
    cache = DynamicCache(config=model.config)
    text = torch.randint(97, (1, 10))
    for turn in range(3):
        text = torch.cat((text, torch.randint(97, (1, 1 + 6 * turn))), dim=-1)  # the user writes
        expected = greedy_without_cache(model, text, 10)
        text = greedy(model, text, 10, past_key_values=cache)
        assert torch.equal(text, expected)


def test_flex_attention_generates(tiny_model):
    model = tiny_model(torch.float32, "flex_attention", head_dim=16).requires_grad_(False)
    input_ids = torch.randint(97, (2, 12))
    mask = torch.ones_like(input_ids)
    mask[1, :5] = 0
    with_cache = greedy(model, input_ids, 12, attention_mask=mask, pad_token_id=0)
    assert torch.equal(with_cache, greedy_without_cache(model, input_ids, 12, mask))
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        steps = [model(x, past_key_values=cache, use_cache=True).logits for x in input_ids.split((3, 1, 8), dim=1)]
    model.set_attn_implementation("eager")
    torch.testing.assert_close(torch.cat(steps, dim=1), logits_without_cache(model, input_ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_cache_holds_a_window_only(static):
    """12 heads, 1 global, W = 100 at 8,192 tokens: at most 9.5% of the bytes of plain multi-head attention."""
    length = 8192

    def cache_bytes(config):
        model = LSGPTForCausalLM(config).eval()
        cache = StaticCache(config=config, max_cache_len=length) if static else DynamicCache(config=config)
        with torch.no_grad():
            # The last token alone: after a chunk the local layers still hold on to its memory, until the next step.
            for chunk in torch.randint(config.vocab_size, (1, length)).split((length - 1, 1), dim=1):
                model(chunk, past_key_values=cache, use_cache=True, logits_to_keep=1)
        assert cache.get_seq_length() == length
        return sum(x.untyped_storage().nbytes() for layer in cache.layers for x in (layer.keys, layer.values))

    shape = {"vocab_size": 8, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 12, "head_dim": 4}
    config = LSGPTConfig(**shape, position_embedding_type="none", num_global_heads=1, sliding_window=100)
    measured, mhsa = cache_bytes(config), cache_bytes(config.equal_mhsa())
    room = 0 if static else 1 / ROOM
    assert mhsa == pytest.approx(config.equal_mhsa().kv_cache_bytes(length, bytes_per_value=4), rel=room)
    assert measured <= config.kv_cache_bytes(length, bytes_per_value=4) * (1 + room)
    assert measured / mhsa <= 0.095


def test_two_cache_layers_per_decoder_layer(tiny_config):
    assert tiny_config().layer_types == [GLOBAL, LOCAL, GLOBAL, LOCAL]
    assert tiny_config(num_global_heads=[0, 6]).layer_types == [LOCAL, GLOBAL]
    views = tiny_config(num_key_value_heads=3).per_layer_config
    assert [view.num_key_value_heads for view in views] == [1, 2, 1, 2]
    assert [view.num_attention_heads for view in views] == [2, 4, 2, 4]


@pytest.mark.parametrize("values", [SPLITS[name] for name in ("llama-sinks", "late-sinks", "all-local")])
def test_compiled_decoding_never_recompiles_after_one_warm_up(tiny_model, fresh_compiler, values):
    model = tiny_model(**values)
    # What is compiled when does not depend on the backend. On a GPU `generate` compiles by itself.
    compile_config = CompileConfig(backend="eager", mode=None)
    compile_config._compile_all_devices = True

    def compilations_of(length):
        before = counters["stats"]["unique_graphs"]
        input_ids = torch.randint(97, (1, length))
        options = {"max_length": 64, "do_sample": False}
        text = model.generate(input_ids, cache_implementation="static", compile_config=compile_config, **options)
        assert torch.equal(text, model.generate(input_ids, **options))
        return counters["stats"]["unique_graphs"] - before

    assert compilations_of(3) > 0  # a short prompt, so that the window of 8 fills up while decoding
    assert [compilations_of(length) for length in (3, 2, 5, 7, 8, 9, 33, 60)] == [0] * 8


def fill(model, length):
    with torch.no_grad():
        return model(torch.randint(97, (2, length))).past_key_values


def test_a_decoded_token_copies_nothing_of_the_global_cache(tiny_model):
    model = tiny_model(position_embedding_type="rope")
    cache = fill(model, 5120)
    places = []
    for _ in range(60):
        with torch.no_grad():
            model(torch.randint(97, (2, 1)), past_key_values=cache)
        places.append(cache.layers[0].keys.data_ptr())
    assert cache.get_seq_length() == 5180
    assert sum(a != b for a, b in pairwise(places)) == 2  # there was room for 20 tokens each time


def test_a_cache_that_was_changed_by_others_goes_on(tiny_model):
    """What beam search, rollbacks, copies, offloading and inference mode do to the tensors of a cache."""
    model = tiny_model()
    tokens = torch.randint(97, (2, 6))

    def continued(cache, rows=(0, 1)):
        """First with a single token, for which there may be room."""
        with torch.no_grad():
            parts = tokens[list(rows)].split((1, 5), dim=1)
            return torch.cat([model(part, past_key_values=cache).logits for part in parts], dim=1)

    def prefilled():
        torch.manual_seed(1)
        cache = fill(model, 20)
        with torch.no_grad():
            model(tokens[:, :1], past_key_values=cache)  # there is room from here on
        return cache

    expected = continued(prefilled())
    cache = prefilled()
    buffer = weakref.ref(cache.layers[0].keys._base)
    cache.reorder_cache(torch.tensor([1, 0]))
    assert buffer() is None  # beam search would hold each cache twice
    torch.testing.assert_close(continued(cache, (1, 0)), expected[[1, 0]])

    cache = prefilled()
    cache.batch_repeat_interleave(2)
    assert cache.layers[0].buffers is None
    torch.testing.assert_close(continued(cache, (0, 0, 1, 1)), expected[[0, 0, 1, 1]])
    cache = prefilled()
    cache.batch_select_indices(torch.tensor([1]))
    assert cache.layers[0].buffers is None
    torch.testing.assert_close(continued(cache, (1,)), expected[[1]])

    cache = prefilled()
    twin = copy.deepcopy(cache)
    torch.testing.assert_close(continued(cache), expected)
    torch.testing.assert_close(continued(twin), expected)

    cache = prefilled()
    for layer in cache.layers:
        layer.activate_past_recording() if layer.is_sliding else None
    with torch.no_grad():
        model(torch.randint(97, (2, 3)), past_key_values=cache)
    cache.crop(-3)
    torch.testing.assert_close(continued(cache), expected)

    cache = prefilled()
    cache.layers[0].offload()
    torch.testing.assert_close(continued(cache), expected)


def test_a_cache_of_inference_mode_is_used_outside(tiny_model):
    model = tiny_model()
    tokens = torch.randint(97, (1, 30))
    with torch.inference_mode():
        cache = model(tokens[:, :10]).past_key_values
        model(tokens[:, 10:20], past_key_values=cache)
    with torch.no_grad():
        # A token for which the buffers have room, and several for which they have none.
        parts = [model(part, past_key_values=cache).logits for part in tokens[:, 20:].split((1, 9), dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), model(tokens).logits[:, 20:])


def test_gradients_flow_through_a_cache(tiny_model):
    model = tiny_model(torch.float64)
    tokens = torch.randint(97, (1, 30))

    def gradients(loss):
        return torch.autograd.grad(loss, list(model.parameters()))

    cache = None
    parts = []
    for part in tokens.split(10, dim=1):
        output = model(part, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        parts.append(output.logits)
    expected = gradients(model(tokens, use_cache=False).logits.square().sum())
    torch.testing.assert_close(gradients(torch.cat(parts, dim=1).square().sum()), expected)


def test_gradients_flow_through_a_cache_to_what_is_not_cached(tiny_model):
    """To a soft prompt before single tokens of a frozen model, and to the projection of queries."""
    model, tokens = tiny_model(torch.float64).requires_grad_(False), torch.randint(97, (1, 4))
    prompt = torch.randn(1, 10, model.config.hidden_size, dtype=torch.float64, requires_grad=True)
    weight = model.model.layers[1].self_attn.q_proj.weight.requires_grad_()
    whole = torch.cat([prompt, model.get_input_embeddings()(tokens)], dim=1)
    expected = torch.autograd.grad(model(inputs_embeds=whole).logits[:, 10:].square().sum(), [prompt, weight])
    cache = DynamicCache(config=model.config)
    model(inputs_embeds=prompt, past_key_values=cache)
    parts = [model(token, past_key_values=cache).logits for token in tokens.split(1, dim=1)]
    torch.testing.assert_close(torch.autograd.grad(torch.cat(parts, dim=1).square().sum(), [prompt, weight]), expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("engine", ["eager", "sdpa", "flex_attention", "triton"])
def test_generates_on_a_gpu_what_it_does_on_the_cpu(tiny_model, engine, fresh_compiler):
    """With a static cache, `generate` compiles the decoding step there, and replays it as a CUDA graph."""
    shape = SPLITS["late-sinks"] | {"head_dim": 16}
    on_cpu, on_gpu = tiny_model(**shape), tiny_model(engine=engine, **shape).to("cuda")
    ids = torch.randint(97, (2, 40))
    for options in ({}, {"cache_implementation": "static"}, {"prefill_chunk_size": 15}, {"num_beams": 2}):
        wanted = greedy(on_cpu, ids, **{**options, "cache_implementation": None})
        assert torch.equal(greedy(on_gpu, ids.to("cuda"), **options).cpu(), wanted), options


@torch.no_grad()
def test_an_offloaded_layer_has_no_spare_room(tiny_model):
    model = tiny_model()
    cache = DynamicCache(config=model.config)
    for length in (20, 1):
        model(torch.randint(97, (1, length)), past_key_values=cache)
    assert cache.layers[0].buffers is not None
    cache.layers[0].offload()
    assert cache.layers[0].buffers is None


@torch.no_grad()
def test_exporters_find_no_more_tensors_in_a_cache_than_it_has(tiny_model):
    """What is compared with the outputs of an exported decoding step, whose cache has no buffers."""
    model, cache = tiny_model(), None
    for length in (20, 1):
        cache = model(torch.randint(97, (1, length)), past_key_values=cache, use_cache=True).past_key_values
    assert cache.layers[0].buffers is not None
    assert not any("buffers" in name for name in get_leaf_tensors({"cache": cache}))


@torch.no_grad()
def test_a_cache_with_larger_windows_is_taken(tiny_model, tiny_config):
    model, ids = tiny_model(), torch.randint(97, (1, 40))
    cache = DynamicCache(config=tiny_config(sliding_window=16))
    parts = [model(part, past_key_values=cache).logits for part in ids.split((25, 14, 1), dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), model(ids).logits, rtol=1e-4, atol=1e-4)


def test_a_past_under_autocast_has_one_dtype():
    """Rotary embeddings leave queries and keys in float32, and values are in bfloat16."""
    query, key, value = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 15, 8), torch.randn(1, 2, 15, 8).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        output = past_attention_forward(query, key, value, scaling=0.4)
    assert output.dtype == torch.bfloat16
    visible = torch.ones(6, 15).tril(9).bool()
    expected = scaled_dot_product_attention(query, key, value.float(), visible, scale=0.4, enable_gqa=True)
    torch.testing.assert_close(output.float(), expected.transpose(1, 2), rtol=0.02, atol=0.02)
