"""The whole model: logits of every variant, training features, outputs, and what it says to bad input."""

import copy
from functools import partial
from itertools import pairwise

import pytest
import torch
from accelerate import Accelerator, ParallelismConfig, infer_auto_device_map
from accelerate.state import AcceleratorState
from reference import reference_logits
from torch.nn.attention.flex_attention import create_block_mask, noop_mask
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    DynamicCache,
    GenerationConfig,
    StaticCache,
    Trainer,
    TrainingArguments,
)
from transformers.generation.continuous_batching import PagedAttentionCache

from lsgpt import (
    LSGPTConfig,
    LSGPTForCausalLM,
    LSGPTForSequenceClassification,
    LSGPTForTokenClassification,
    LSGPTModel,
)
from lsgpt.modeling_lsgpt.modeling_lsgpt import LSGPTSinusoidalPositions, logger
from lsgpt.modeling_lsgpt.visibility_lsgpt import find_documents


LLAMA = {
    "norm_type": "rms_norm",
    "gated_mlp": True,
    "hidden_act": "silu",
    "position_embedding_type": "rope",
    "num_key_value_heads": 3,
}
VARIANTS = {
    "default": {},
    "sinusoidal": {"position_embedding_type": "sinusoidal"},
    "rope": {"position_embedding_type": "rope", "rope_parameters": {"rope_theta": 500.0}},
    "none": {"position_embedding_type": "none"},
    "bias": {"use_bias": True},
    "gqa-rope-qk-norm": {"position_embedding_type": "rope", "num_key_value_heads": 3, "qk_norm": True},
    "tied-relu-wide-mlp": {"tie_word_embeddings": True, "hidden_act": "relu", "intermediate_size": 80},
    "per-layer": {"num_global_heads": [5, 0]},
    "all-global": {"num_global_heads": 6},
    "all-local": {"num_global_heads": 0, "num_key_value_heads": 2},
    "wide-heads": {"head_dim": 32, "num_global_heads": 1},
    "llama": LLAMA,
    "qkv-bias": {**LLAMA, "use_bias": ["qkv_proj"]},
    "gated-gelu-bias": {"gated_mlp": True, "use_bias": True},
    "rms-bias-sinks": {"norm_type": "rms_norm", "use_bias": True, "attention_sinks": True},
    "llama-sinks": {**LLAMA, "attention_sinks": True, "use_bias": ["o_proj"], "num_global_heads": [0, 4]},
    "olmo": {**LLAMA, "norm_type": "rms_norm_after", "qk_norm": "all_heads", "num_key_value_heads": 3},
    "gemma": {
        **LLAMA,
        "norm_type": "rms_norm_around",
        "qk_norm": True,
        "final_logit_softcapping": 0.5,
        "num_global_heads": [0, 2],
        "rope_parameters": {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 10.0}},
    },
    "late-sinks": {**LLAMA, "attention_sinks": "full_window", "num_global_heads": [2, 4]},
}


def randomise(model):
    """Also gives norms and biases, which start as ones and zeros, values that show."""
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)
    return model


def batch(batch_size=2, length=45):
    return torch.randint(97, (batch_size, length))


@pytest.mark.parametrize("engine", ["eager", "sdpa"])
@pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS)
def test_logits_equal_reference(tiny_model, values, engine):
    model = randomise(tiny_model(torch.float64, engine, **values))
    input_ids = batch()
    in_float32 = values.get("position_embedding_type") in ("rope", "sinusoidal")  # angles, in the library
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if in_float32 else {}
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids).logits, reference_logits(model, input_ids), **tolerance)


def test_softcapped_logits_equal_reference(tiny_model):
    model = tiny_model(torch.float64, "eager", attn_logit_softcapping=1.5)
    input_ids = batch()
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids).logits, reference_logits(model, input_ids))


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("engine", ["eager", "sdpa"])
def test_packed_documents_are_computed_as_if_alone(tiny_model, engine, use_cache):
    """Documents in a row, as long as they are, short and long; also when the forward pass fills a cache."""
    model = tiny_model(torch.float64, engine)
    lengths = (1, 30, 7, 8, 44)
    documents = [torch.randint(97, (1, n)) for n in lengths]
    packed = torch.cat(documents, dim=1)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    with torch.no_grad():
        alone = torch.cat([model(document).logits for document in documents], dim=1)
        for attention_mask in (None, torch.ones_like(packed)):
            together = model(packed, attention_mask=attention_mask, position_ids=positions, use_cache=use_cache)
            torch.testing.assert_close(together.logits, alone)


@pytest.mark.parametrize("is_static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("engine", ["eager", "sdpa"])  # FlexAttention's code for changing lengths fails on the CPU
def test_packed_documents_continue_from_a_cache(tiny_model, engine, padding, is_static):
    """In chunks that begin with a document, inside one, at its last token, and of a single token."""
    model = tiny_model(torch.float64, engine).requires_grad_(False)
    lengths = (30, 9, 1, 24)
    documents = [torch.randint(97, (1, n)) for n in lengths]
    alone = torch.cat([model(document).logits for document in documents], dim=1)
    filler = torch.zeros(1, padding, dtype=torch.long)
    packed = torch.cat([filler, *documents], dim=1)
    positions = torch.cat([filler, *(torch.arange(n)[None] for n in lengths)], dim=1)
    real = torch.cat([filler, torch.ones(1, 64, dtype=torch.long)], dim=1)
    cache = StaticCache(config=model.config, max_cache_len=80) if is_static else DynamicCache(config=model.config)
    ends, logits = (0, 20, 30, 38, 39, 64), []
    if is_static:  # no single token: its length is not read then
        ends = (0, 20, 30, 38, 64)
    for begin, end in pairwise(ends):
        begin, end = (begin and begin + padding), end + padding
        inputs = {"input_ids": packed[:, begin:end], "position_ids": positions[:, begin:end]}
        inputs |= {"attention_mask": real[:, :end]} if padding else {}
        logits.append(model(**inputs, past_key_values=cache).logits)
    torch.testing.assert_close(torch.cat(logits, dim=1)[:, padding:], alone)


@pytest.mark.parametrize("cache_type", [DynamicCache, partial(StaticCache, max_cache_len=70)])
def test_packed_documents_continue_from_a_cache_in_a_compiled_model(tiny_model, fresh_compiler, cache_type):
    model = tiny_model(torch.float64).requires_grad_(False)
    documents = [torch.randint(97, (1, n)) for n in (30, 9, 25)]
    packed = torch.cat(documents, dim=1)
    positions = torch.cat([torch.arange(n) for n in (30, 9, 25)])[None]
    alone = torch.cat([model(document).logits for document in documents], dim=1)
    compiled = torch.compile(model, backend="eager")
    cache = cache_type(config=model.config)
    parts = [
        compiled(packed[:, part], position_ids=positions[:, part], past_key_values=cache).logits
        for part in (slice(20), slice(20, 34), slice(34, 40), slice(40, 41), slice(41, 64))
    ]
    torch.testing.assert_close(torch.cat(parts, dim=1), alone)


@pytest.mark.parametrize(
    ("engine", "is_boolean"),
    [("eager", True), ("eager", False), ("sdpa", True), ("sdpa", False), ("flex_attention", True)],
)
def test_a_custom_mask_decides_and_positions_do_not(tiny_model, engine, is_boolean):
    """Two branches of a tree, whose first tokens have the same position."""
    model = tiny_model(torch.float64, engine).requires_grad_(False)
    ids, positions = torch.randint(97, (1, 6)), torch.tensor([[0, 1, 2, 3, 3, 4]])
    mask = torch.ones(1, 1, 6, 6).tril().bool()
    mask[..., 4:, 3] = False  # the second branch does not see the first
    if not is_boolean:
        mask = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, torch.finfo(torch.float64).min)
    logits = model(ids, attention_mask=mask, position_ids=positions).logits
    torch.testing.assert_close(logits[:, :4], model(ids[:, :4]).logits)
    torch.testing.assert_close(logits[:, 4:], model(ids[:, [0, 1, 2, 4, 5]]).logits[:, 3:])


@pytest.mark.parametrize("engine", ["eager", "sdpa"])
@pytest.mark.parametrize("is_boolean", [True, False], ids=["boolean", "additive"])
@pytest.mark.parametrize("sinks", [False, True, "full_window"])
def test_a_custom_mask_of_cached_and_new_tokens(tiny_model, engine, is_boolean, sinks):
    """In chunks beside a cache that has dropped what local heads no longer see."""
    model = tiny_model(torch.float64, engine, attention_sinks=sinks).requires_grad_(False)
    ids = torch.randint(97, (2, 40))
    mask = allowed = (torch.rand(2, 1, 40, 40) < 0.6).tril() | torch.eye(40).bool()
    if not is_boolean:
        mask = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, torch.finfo(torch.float64).min)
    cache, logits, begin = DynamicCache(config=model.config), [], 0
    for size in (20, 1, 15, 1, 3):
        part = mask[:, :, begin : begin + size, : begin + size]
        logits.append(model(ids[:, begin : begin + size], attention_mask=part, past_key_values=cache).logits)
        begin += size
    torch.testing.assert_close(torch.cat(logits, dim=1), model(ids, attention_mask=allowed).logits)


@pytest.mark.parametrize("engine", ["eager", "sdpa"])
@pytest.mark.parametrize("is_boolean", [True, False], ids=["boolean", "additive"])
def test_a_custom_mask_may_cover_the_empty_slots_of_a_static_cache(tiny_model, engine, is_boolean):
    model, ids = tiny_model(torch.float64, engine).requires_grad_(False), torch.randint(97, (2, 12))
    mask = torch.ones(2, 1, 12, 12).tril().bool()
    mask[1, :, 4:, 2] = False
    if not is_boolean:
        mask = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, torch.finfo(torch.float64).min)
    expected = model(ids, attention_mask=mask).logits
    for num_slots in (0, 4):
        whole = torch.nn.functional.pad(mask, (0, num_slots), value=False if is_boolean else mask.min().item())
        cache = StaticCache(config=model.config, max_cache_len=16)
        torch.testing.assert_close(model(ids, attention_mask=whole, past_key_values=cache).logits, expected)


def test_positions_that_go_on_from_a_cache_are_one_document():
    """As `generate` passes them: counted over real tokens, or over all; also with padding in the middle."""
    for positions in ([0, 1, 1, 2], [0, 1, 2, 3]):
        assert find_documents(torch.tensor([positions]), torch.tensor([[1, 1, 0, 1]]).bool()) is None
    padding = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]]).bool()
    for positions in ([[4, 5], [2, 3]], [[4, 5], [4, 5]]):
        assert find_documents(torch.tensor(positions), padding, past_length=4) is None
    assert find_documents(torch.tensor([[4], [9]]), None, past_length=4) is None
    # A turn of a chat that is padded on the left, where Transformers gives position 0.
    padding = torch.tensor([[1] * 6 + [0, 0, 1, 1]]).bool()
    assert find_documents(torch.tensor([[0, 0, 6, 7]]), padding, past_length=6) is None
    padding = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]]).bool()
    earlier = find_documents(torch.tensor([[4, 0], [1, 2]]), padding, past_length=4)
    assert earlier.tolist() == [[0, 0, 0, 0, 0, 1], [0, 0, -1, 0, 0, 0]]


@pytest.mark.parametrize("engine", ["eager", "sdpa", "flex_attention"])
def test_half_precision(tiny_model, engine):
    """Off by no more than twice what the dense engine is in the same precision."""
    input_ids = batch()
    for dtype, positions in ((torch.bfloat16, "learned"), (torch.float16, "learned"), (torch.float16, "sinusoidal")):
        values = {"head_dim": 16, "initializer_range": 0.1, "position_embedding_type": positions}
        model, plain = (tiny_model(dtype, name, **values).requires_grad_(False) for name in (engine, "eager"))
        exact = reference_logits(model, input_ids)
        logits = model(input_ids).logits
        assert logits.dtype == dtype
        error, usual_error = ((x - exact).norm() / exact.norm() for x in (logits, plain(input_ids).logits))
        assert error <= 2 * usual_error <= 16 * torch.finfo(dtype).eps


@pytest.mark.parametrize("engine", ["eager", "sdpa", "flex_attention"])
def test_autocast(tiny_model, engine):
    """In training and in generation, also where norms and rotations of queries and keys come out in float32."""
    for values in ({}, {"qk_norm": True, "position_embedding_type": "rope"}):
        model = tiny_model(engine=engine, head_dim=16, **values)
        input_ids = batch()
        trains = engine != "flex_attention"  # no backward on the CPU
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.set_grad_enabled(trains):
            loss = model(input_ids, labels=input_ids).loss
            assert model.generate(input_ids, max_new_tokens=3, do_sample=False).shape == (2, 48)
        exact = tiny_model(torch.float64, "eager", head_dim=16, **values)
        exact_loss = exact(input_ids, labels=input_ids).loss
        torch.testing.assert_close(loss, exact_loss.float(), rtol=0.02, atol=0)
        if trains:
            loss.backward()
            exact_loss.backward()
            for parameter, expected in zip(model.parameters(), exact.parameters()):
                error = (parameter.grad - expected.grad).norm() / expected.grad.norm()
                assert error < 0.1  # bfloat16 has two to three digits, and the initial weights are large


def test_labels_shift_and_num_items_in_batch(tiny_model):
    model = tiny_model()
    input_ids = batch()
    labels = input_ids.clone()
    labels[:, :5] = -100
    logits = model(input_ids).logits
    expected = torch.nn.functional.cross_entropy(logits[:, 4:-1].flatten(0, 1), input_ids[:, 5:].flatten())
    torch.testing.assert_close(model(input_ids, labels=labels).loss, expected)
    total = expected * 2 * 40
    torch.testing.assert_close(model(input_ids, labels=labels, num_items_in_batch=1000).loss, total / 1000)


@pytest.mark.parametrize("field", ["embd_dropout", "resid_dropout"])
def test_dropout_of_embeddings_and_branches(tiny_model, field):
    model, shares = tiny_model(**{field: 0.3}), []

    def note(module, inputs, output):
        shares.append((output == 0).double().mean().item())

    places = [model.model.dropout] if field == "embd_dropout" else [layer.dropout for layer in model.model.layers]
    for place in places:
        place.register_forward_hook(note)
    ids = torch.randint(97, (4, 60))
    model.train()(ids)
    assert len(shares) == (1 if field == "embd_dropout" else 4)  # two branches in each of two layers
    assert shares == pytest.approx([0.3] * len(shares), abs=0.03)
    shares.clear()
    model.eval()(ids)
    assert max(shares) < 0.01


@pytest.mark.parametrize("skip_logits", [False, True])
def test_labels_may_be_int32(tiny_model, skip_logits):
    model, ids = tiny_model(), torch.randint(97, (2, 20))
    for name in ("labels", "shift_labels"):
        labels = ({"labels": ids, name: ids.to(dtype)} for dtype in (torch.int32, torch.int64))
        assert torch.equal(*(model(ids, **each, skip_logits=skip_logits).loss for each in labels))


def test_logits_to_keep(tiny_model):
    model = tiny_model()
    input_ids = batch()
    logits = model(input_ids).logits
    torch.testing.assert_close(model(input_ids, logits_to_keep=3).logits, logits[:, -3:])
    kept = torch.tensor([0, 7])
    torch.testing.assert_close(model(input_ids, logits_to_keep=kept).logits, logits[:, kept])
    of_rows = torch.tensor([[0, 7, 9], [3, 2, 44]])
    expected = torch.stack([row[kept] for row, kept in zip(logits, of_rows)])
    torch.testing.assert_close(model(input_ids, logits_to_keep=of_rows).logits, expected)
    mask = torch.rand(2, 45) > 0.5
    torch.testing.assert_close(model(input_ids, logits_to_keep=mask).logits, logits[mask])
    for skip_logits in (False, True):
        with pytest.raises(ValueError, match="`logits_to_keep` must not be a mask with `labels`"):
            model(input_ids, logits_to_keep=mask, labels=input_ids[mask], skip_logits=skip_logits)
    torch.testing.assert_close(model(input_ids, logits_to_keep=mask[0]).logits, logits[:, mask[0]])
    expected = torch.nn.functional.cross_entropy(logits[:, -3:-1].flatten(0, 1), input_ids[:, -2:].flatten())
    for skip_logits in (False, True):
        options = {"labels": input_ids[:, -3:], "logits_to_keep": 3, "skip_logits": skip_logits}
        torch.testing.assert_close(model(input_ids, **options).loss, expected)


def test_inputs_embeds(tiny_model):
    model = tiny_model()
    input_ids = batch()
    embeds = model.get_input_embeddings()(input_ids)
    torch.testing.assert_close(model(inputs_embeds=embeds).logits, model(input_ids).logits)


def test_hidden_states_and_attentions(tiny_model):
    model = tiny_model(engine="eager")
    outputs = model(batch(), output_hidden_states=True, output_attentions=True)
    assert [tuple(h.shape) for h in outputs.hidden_states] == [(2, 45, 48)] * 3
    assert [tuple(a.shape) for a in outputs.attentions] == [(2, 6, 45, 45)] * 2


@pytest.mark.parametrize("engine", ["sdpa", "flex_attention"])
@pytest.mark.parametrize("num_global_heads", [0, 2])
def test_attentions_that_are_not_there_are_announced(tiny_model, caplog, engine, num_global_heads):
    logger.warning_once.cache_clear()
    model = tiny_model(engine=engine, num_global_heads=num_global_heads)
    with caplog.at_level("WARNING", logger.name), torch.no_grad():
        model(batch())
        assert not caplog.messages
        assert not model(batch(), output_attentions=True).attentions
    assert "no attention weights are returned: `output_attentions` needs `eager` attention" in caplog.messages


@pytest.mark.parametrize("values", [{}, {"num_global_heads": 0}, {"num_global_heads": [6, 0]}])
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_attentions_of_cached_steps_stand_on_the_full_key_axis(tiny_model, static, values):
    model = tiny_model(engine="eager", **values)
    input_ids = batch()
    cache = StaticCache(config=model.config, max_cache_len=50) if static else DynamicCache(config=model.config)
    with torch.no_grad():
        expected = model(input_ids, output_attentions=True, use_cache=False).attentions
        plain = model(input_ids, use_cache=False).logits
        start = 0
        for chunk in input_ids.split((20, 1, 15, 9), dim=1):
            outputs = model(chunk, past_key_values=cache, use_cache=True, output_attentions=True)
            stop = start + chunk.shape[1]
            torch.testing.assert_close(outputs.logits, plain[:, start:stop], rtol=1e-4, atol=1e-4)
            for actual, whole in zip(outputs.attentions, expected):
                torch.testing.assert_close(actual[..., :stop], whole[:, :, start:stop, :stop])
                assert not actual[..., stop:].any()  # slots of a static cache that no token has filled yet
            start = stop


def test_sinusoids_do_not_depend_on_the_default_dtype():
    positions, embed = torch.arange(500)[None], LSGPTSinusoidalPositions(64)
    expected = embed(positions)
    torch.set_default_dtype(torch.bfloat16)
    try:
        torch.testing.assert_close(embed(positions), expected, rtol=0, atol=0)
    finally:
        torch.set_default_dtype(torch.float32)


def test_predictions_of_a_trainer_are_logits_alone(tiny_model, tmp_path):
    """And not the cache, which it would join over batches like everything else that a model returns."""
    trainer = Trainer(tiny_model(), TrainingArguments(str(tmp_path), use_cpu=True, use_cache=True, report_to="none"))
    row = {"input_ids": list(range(12)), "labels": list(range(12))}
    assert trainer.predict([row] * 3).predictions.shape == (3, 12, 97)


@pytest.mark.parametrize("kind", [LSGPTForSequenceClassification, LSGPTForTokenClassification])
def test_accumulated_batches_of_a_classifier_are_averaged(tiny_config, tmp_path, kind):
    """Unlike those of Transformers' own classifiers, whose gradients are summed."""
    shape = () if kind is LSGPTForSequenceClassification else (16,)
    ids, labels = torch.randint(1, 97, (8, 16)).tolist(), torch.randint(3, (8, *shape)).tolist()
    rows = [{"input_ids": row, "labels": label} for row, label in zip(ids, labels)]
    logs = []
    for count in (1, 4):
        torch.manual_seed(0)
        model = kind(tiny_config(num_labels=3, pad_token_id=0, classifier_dropout=0.0))
        sizes = {"per_device_train_batch_size": 8 // count, "gradient_accumulation_steps": count}
        options = {"max_steps": 1, "logging_steps": 1, "save_strategy": "no", "use_cpu": True, "report_to": "none"}
        trainer = Trainer(model, TrainingArguments(str(tmp_path), **options, **sizes), train_dataset=rows)
        trainer.train()
        logs.append([trainer.state.log_history[0][name] for name in ("loss", "grad_norm")])
    assert logs[1] == pytest.approx(logs[0], rel=1e-4)


def test_gradient_checkpointing_changes_nothing(tiny_model):
    model = tiny_model().train()
    input_ids = batch()

    def gradients(**options):
        model.zero_grad()
        model(input_ids, labels=input_ids, **options).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = gradients(use_cache=False)
    model.gradient_checkpointing_enable()
    torch.testing.assert_close(gradients(use_cache=False), expected)
    cache = DynamicCache(config=model.config)
    torch.testing.assert_close(gradients(past_key_values=cache), expected)
    assert cache.get_seq_length() == 0  # it would be filled twice


@pytest.mark.parametrize(
    ("engine", "values"), [("eager", {}), ("sdpa", {**LLAMA, "attention_sinks": True})], ids=["eager", "sdpa-llama"]
)
def test_compiles_without_graph_breaks(tiny_model, fresh_compiler, engine, values):
    model = tiny_model(engine=engine, num_hidden_layers=1, **values).train()
    input_ids = batch()
    mask = torch.ones_like(input_ids)
    mask[1, -4:] = 0
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for kwargs in ({}, {"attention_mask": mask}, {"position_ids": torch.arange(45)[None] % 20}):
        expected = model(input_ids, labels=input_ids, use_cache=False, **kwargs).loss
        actual = compiled(input_ids, labels=input_ids, use_cache=False, **kwargs).loss
        torch.testing.assert_close(actual, expected)
        actual.backward()


def test_compiled_kernels_give_the_same_gradients(tiny_model, fresh_compiler):
    model = tiny_model(num_hidden_layers=1).train()
    input_ids = batch()
    model(input_ids, labels=input_ids, use_cache=False).loss.backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    torch.compile(model, fullgraph=True)(input_ids, labels=input_ids, use_cache=False).loss.backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], expected)


def test_residual_projections_start_smaller():
    config = LSGPTConfig(vocab_size=50, hidden_size=256, num_hidden_layers=8, num_attention_heads=8)
    for name, parameter in LSGPTForCausalLM(config).named_parameters():
        if parameter.ndim == 2:
            scaled = name.endswith(("o_proj.weight", "down_proj.weight"))
            assert parameter.std().item() == pytest.approx(0.02 / 4 if scaled else 0.02, rel=0.05), name
        else:
            assert (parameter == 1).all()


def test_tied_and_untied_heads_survive_resizing(tiny_model):
    for tied in (True, False):
        model = tiny_model(tie_word_embeddings=tied)
        model.resize_token_embeddings(120)
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
        assert model(torch.full((1, 3), 110)).logits.shape == (1, 3, 120)


def test_generic_heads(tiny_config):
    config = tiny_config(num_labels=3, pad_token_id=0)
    input_ids = torch.randint(1, 97, (2, 12))
    input_ids[1, 9:] = 0  # padding, on the right
    mask = (input_ids != 0).long()
    sequence = LSGPTForSequenceClassification(config).eval()
    states = sequence.model(input_ids, attention_mask=mask).last_hidden_state
    output = sequence(input_ids, attention_mask=mask, labels=torch.tensor([0, 2]))
    expected = sequence.score(states[[0, 1], [11, 8]])
    torch.testing.assert_close(output.logits, expected)
    torch.testing.assert_close(output.loss, torch.nn.functional.cross_entropy(expected, torch.tensor([0, 2])))

    token, labels = LSGPTForTokenClassification(config).eval(), torch.randint(3, (2, 12))
    output = token(input_ids, attention_mask=mask, labels=labels)
    expected = token.score(token.model(input_ids, attention_mask=mask).last_hidden_state)
    torch.testing.assert_close(output.logits, expected)
    torch.testing.assert_close(
        output.loss, torch.nn.functional.cross_entropy(expected.flatten(0, 1), labels.flatten())
    )
    causal = mask[:, None, None].bool() & torch.ones(12, 12).tril().bool()
    real = mask.bool()
    torch.testing.assert_close(token(input_ids, attention_mask=causal).logits[real], expected[real])
    assert sequence.score.bias is None and token.score.bias is not None  # as in Transformers' Llama
    assert isinstance(AutoModelForSequenceClassification.from_config(config), LSGPTForSequenceClassification)
    assert isinstance(AutoModelForTokenClassification.from_config(config), LSGPTForTokenClassification)


def test_auto_classes_without_trust_remote_code(tiny_model, tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path)
    input_ids = batch()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is LSGPTForCausalLM and loaded.config._attn_implementation == "sdpa"
    assert torch.equal(loaded(input_ids).logits, model(input_ids).logits)
    assert type(AutoModel.from_pretrained(tmp_path)) is LSGPTModel


def test_device_map(tiny_model, tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path)
    input_ids = batch()
    devices = {"model.embed_tokens": "cpu", "model.embed_positions": "cpu", "model.layers.0": "cpu"}
    devices |= {"model.layers.1": "disk", "model.norm": "cpu", "lm_head": "cpu"}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=devices, offload_folder=tmp_path / "offload")
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids).logits, model(input_ids).logits)


BAD_INPUTS = {
    "token id too large": ({"input_ids": torch.tensor([[1, 97]])}, "`input_ids` must be between 0 and 96"),
    "label id as token": ({"input_ids": torch.tensor([[1, -100]])}, "got -100"),
    "no batch axis": ({"input_ids": torch.tensor([1, 2])}, "`input_ids` must have shape (batch, tokens)"),
    "no tokens": ({"input_ids": torch.zeros(1, 0, dtype=torch.long)}, "with at least one token"),
    "float ids": ({"input_ids": torch.zeros(1, 4)}, "`input_ids` must be integers"),
    "uint16 ids": ({"input_ids": torch.zeros(1, 4, dtype=torch.uint16)}, "torch.int32; got torch.uint16; convert"),
    "label too large": (
        {"input_ids": torch.ones(1, 3).long(), "labels": torch.tensor([[1, -100, 97]])},
        "`labels` must be between 0 and 96 (`vocab_size` is 97), or -100 to be ignored; got 97",
    ),
    "negative label": (
        {"input_ids": torch.ones(1, 3).long(), "labels": torch.tensor([[1, -1, 2]]), "skip_logits": True},
        "or -100 to be ignored; got -1",
    ),
    "no input": ({}, "exactly one of `input_ids` and `inputs_embeds`"),
    "two inputs": ({"input_ids": torch.ones(1, 2).long(), "inputs_embeds": torch.ones(1, 2, 48)}, "exactly one"),
    "narrow embeddings": ({"inputs_embeds": torch.ones(1, 2, 47)}, "`inputs_embeds` must have shape"),
    "too long": ({"input_ids": torch.ones(1, 257).long()}, "`max_position_embeddings` is 256"),
    "mask too short": (
        {"input_ids": torch.ones(2, 5).long(), "attention_mask": torch.ones(2, 4)},
        "`attention_mask` must have shape (2, 5)",
    ),
    "mask of another batch": (
        {"input_ids": torch.ones(2, 5).long(), "attention_mask": torch.ones(3, 5)},
        "`attention_mask` must have shape (2, 5)",
    ),
    "3-D mask": (
        {"input_ids": torch.ones(2, 5).long(), "attention_mask": torch.ones(2, 5, 5)},
        "each new token, or 4 dimensions; got (2, 5, 5)",
    ),
    "4-D mask too short": (
        {"input_ids": torch.ones(2, 5).long(), "attention_mask": torch.ones(2, 1, 5, 4)},
        "a 4-D `attention_mask` must have shape (2, 1, 5, 5)",
    ),
    "4-D mask too long": (
        {"input_ids": torch.ones(2, 5).long(), "attention_mask": torch.ones(2, 1, 5, 6)},
        "a 4-D `attention_mask` must have shape (2, 1, 5, 5)",
    ),
    "a mask of blocks": (
        {
            "input_ids": torch.ones(2, 5).long(),
            "attention_mask": create_block_mask(noop_mask, 2, 1, 5, 5, "cpu"),
        },
        "`attention_mask` must be a tensor, such as a boolean mask of 4 dimensions; got a BlockMask",
    ),
    "positions too many": (
        {"input_ids": torch.ones(2, 5).long(), "position_ids": torch.arange(6)[None]},
        "`position_ids` must have shape (2, 5)",
    ),
    "position out of range": (
        {"input_ids": torch.ones(1, 2).long(), "position_ids": torch.tensor([[0, 256]])},
        "`position_ids` must be between 0 and 255",
    ),
    "labels of another shape": (
        {"input_ids": torch.ones(2, 5).long(), "labels": torch.ones(2, 4).long()},
        "`labels` must have shape (2, 5)",
    ),
}


@pytest.mark.parametrize(("inputs", "message"), BAD_INPUTS.values(), ids=BAD_INPUTS)
def test_bad_inputs_are_named(tiny_model, inputs, message):
    with pytest.raises(ValueError) as error:
        tiny_model()(**inputs)
    assert message in str(error.value)


def test_generation_beyond_learned_positions_is_named(tiny_model):
    with pytest.raises(ValueError, match="learned positions end there"):
        tiny_model().generate(torch.ones(1, 250).long(), max_new_tokens=20, do_sample=False, eos_token_id=None)


def test_engines_say_what_they_cannot_do(tiny_model, tiny_config):
    input_ids = batch()
    flex = tiny_model(engine="flex_attention", head_dim=16).train()
    with pytest.raises(ValueError, match=r'on the CPU; train with attn_implementation="sdpa"'):
        flex(input_ids)
    capped = tiny_model(engine="flex_attention", head_dim=16, attn_logit_softcapping=20.0, attention_dropout=0.1)
    with pytest.raises(ValueError, match=r'on the CPU; train with attn_implementation="eager"'):
        capped(input_ids)
    with pytest.raises(ValueError, match=r'`attention_dropout`, which is 0\.1 here; use attn_implementation="eager"'):
        capped.train()(input_ids)
    with pytest.raises(ValueError, match=r"`flex_attention` needs a boolean 4-D mask, .* got torch.float32"):
        flex(input_ids, attention_mask=torch.zeros(2, 1, 45, 45))
    dropout = tiny_model(engine="flex_attention", head_dim=16, attention_dropout=0.1).train().requires_grad_(False)
    with pytest.raises(ValueError, match="FlexAttention does not support `attention_dropout`"):
        dropout(input_ids)
    config = tiny_config(attn_logit_softcapping=20.0)
    with pytest.raises(ValueError, match="cannot soft-cap logits"):
        LSGPTForCausalLM._from_config(copy.deepcopy(config), attn_implementation="sdpa")
    assert LSGPTForCausalLM(config).config._attn_implementation == "eager"  # the default steps aside
    for version in (2, 3, 4):
        with pytest.raises(ImportError, match=rf'FlashAttention{version}.*Install it, or use .*"sdpa"'):
            LSGPTForCausalLM._from_config(tiny_config(), attn_implementation=f"flash_attention_{version}")
    with pytest.raises(ValueError, match="is not supported"):
        LSGPTForCausalLM._from_config(tiny_config(), attn_implementation="magic")
    with pytest.raises(ValueError, match="continuous batching needs the same number of key/value heads"):
        tiny_model().generate_batch(input_ids.tolist(), generation_config=GenerationConfig(max_new_tokens=2))
    with pytest.raises(ValueError, match=r"must be a cache, .* got PagedAttentionCache"):
        tiny_model()(input_ids, cache=PagedAttentionCache.__new__(PagedAttentionCache))


def test_nothing_to_return_is_refused(tiny_model):
    with pytest.raises(ValueError, match="`skip_logits` must be False without `labels`"):
        tiny_model()(batch(), skip_logits=True)
    with pytest.raises(ValueError, match="`teacher_logits` must be unset without `skip_logits`"):
        tiny_model()(batch(), labels=batch(), teacher_logits=torch.zeros(2, 45, 97))
    with pytest.raises(ValueError, match=r"`teacher_logits` must have shape \(2, 45, 97\).* got \(2, 45, 98\)"):
        tiny_model()(batch(), labels=batch(), skip_logits=True, teacher_logits=torch.zeros(2, 45, 98))


def test_a_tuple_is_no_cache(tiny_model):
    with pytest.raises(ValueError, match=r"`past_key_values` must be a cache, .* got tuple"):
        tiny_model()(batch(), past_key_values=((torch.zeros(2, 2, 3, 8), torch.zeros(2, 2, 3, 8)),))


@pytest.mark.parametrize("field", ["cp_size", "sp_size"])
def test_a_sequence_that_is_split_over_processes_is_refused(tiny_model, field):
    """In any training script: the state of Accelerate is where it is known."""
    model, ids = tiny_model(), torch.randint(97, (1, 9))
    AcceleratorState._reset_state(True)
    try:
        Accelerator(cpu=True).state.parallelism_config = ParallelismConfig(**{field: 2})
        message = f"`{field}` of Accelerate's `ParallelismConfig` must be 1; got 2.* ContextParallelismConfig"
        with pytest.raises(ValueError, match=message.replace(" Con", ".*Con")):
            model.train()(ids)
        model.eval()(ids)
    finally:
        AcceleratorState._reset_state(True)


def test_new_sinks_are_silent(tiny_model, tiny_config, tmp_path):
    tiny_model().save_pretrained(tmp_path)
    config = tiny_config(attention_sinks=True)
    for model in (LSGPTForCausalLM(config), LSGPTForCausalLM.from_pretrained(tmp_path, config=config)):
        assert not any(layer.self_attn.sinks.any() for layer in model.model.layers)


def test_layers_stay_on_one_device(tiny_model):
    model = tiny_model()
    size = sum(parameter.nbytes for parameter in model.parameters())
    memory = {"cpu": size // 2, "disk": 10 * size}
    devices = infer_auto_device_map(model, memory, no_split_module_classes=model._no_split_modules)
    assert len({*devices.values()}) == 2 and not any(name.startswith("model.layers.0.") for name in devices)


def test_classifiers_drop_a_tenth_by_default(tiny_config):
    assert LSGPTForTokenClassification(tiny_config()).dropout.p == 0.1
