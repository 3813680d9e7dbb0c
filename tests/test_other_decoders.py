"""
Telemetry of decoders that are not LSGPT equals brute force for each layer and head, and leaves everything as it is.

The oracle projects, normalizes and rotates with the layer's own modules, multiplies all queries and keys in float64,
and knows who sees whom from the window and the padding alone.
"""

import copy
import logging
import re
import sys

import pytest
import torch
from peft import LoraConfig, get_peft_model
from reference import visible_pairs
from test_readme import blocks
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.parallel import DistributedDataParallel
from trainers import random_rows, trainer_of
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BertConfig,
    DynamicCache,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    JambaConfig,
    LlamaConfig,
    MambaConfig,
    Qwen3Config,
    StaticCache,
    T5Config,
    Trainer,
    TrainingArguments,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import flash_attention_mask
from transformers.models.llama import modeling_llama

from lsgpt import LSGPTForCausalLM, MaxLogits, measure_max_logits
from lsgpt.telemetry import StandIn, max_logits_of_call
from lsgpt.training import LogitTelemetryCallback, qk_clip, train_tokenizer


WINDOW = 8
GQA = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "initializer_range": 0.3,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.0,
}
WINDOWED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
CONFIGS = {
    "llama": LlamaConfig(**GQA),
    "qwen3": Qwen3Config(**GQA),
    "gemma2": Gemma2Config(**GQA, **WINDOWED, attn_logit_softcapping=1.0, query_pre_attn_scalar=5),
    "gemma3": Gemma3TextConfig(**GQA, **WINDOWED, query_pre_attn_scalar=5),
    "gpt2": GPT2Config(
        vocab_size=97,
        n_embd=48,
        n_layer=2,
        n_head=4,
        n_positions=64,
        initializer_range=0.3,
        scale_attn_by_inverse_layer_idx=True,  # a scale of its own in each layer
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "gpt-oss": GptOssConfig(**GQA, **WINDOWED, num_local_experts=2, num_experts_per_tok=1),
}
ENGINES = [(name, "eager") for name in CONFIGS] + [(name, "sdpa") for name in ("llama", "qwen3", "gemma3", "gpt2")]
"""Transformers has no `sdpa` for soft-capping and sinks."""


def build(name="llama", engine="sdpa", **values):
    torch.manual_seed(0)
    config = copy.deepcopy(CONFIGS[name])
    for key, value in values.items():
        setattr(config, key, value)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=engine).eval()
    for layer in attentions(model):
        if hasattr(layer, "sinks"):  # as large as the largest logits, so that it would show if they counted
            nn.init.constant_(layer.sinks, 100.0)
    return model


def attentions(model):
    return [module for module in model.modules() if type(module).__name__.endswith("Attention")]


def padded_batch(rows=3, length=30):
    """Rows without padding, with some on the left, and with some on the right."""
    input_ids = torch.randint(3, 97, (rows, length))
    mask = torch.ones_like(input_ids)
    mask[1, :7], mask[2, 20:] = 0, 0
    return {"input_ids": input_ids, "attention_mask": mask}


def queries_and_keys(layer, hidden_states, position_embeddings):
    """`(B, H, T, D)` and `(B, H, S, D)`, with the modules of the layer and Transformers' own rotation."""
    if hasattr(layer, "c_attn"):
        query, key, _ = layer.c_attn(hidden_states).chunk(3, dim=-1)
    else:
        query, key = layer.q_proj(hidden_states), layer.k_proj(hidden_states)
    query, key = (x.unflatten(-1, (-1, layer.head_dim)).transpose(1, 2) for x in (query, key))
    if hasattr(layer, "q_norm"):
        query, key = layer.q_norm(query), layer.k_norm(key)
    if position_embeddings is not None:
        rotate = sys.modules[type(layer).__module__].apply_rotary_pos_emb
        query, key = rotate(query, key, *position_embeddings)
    return query, key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)


def brute_force(model, input_ids, attention_mask=None, visible=None, **inputs):
    """The maxima `(layers, heads)`, from full matrices of logits in float64."""
    watched, maxima = copy.deepcopy(model), []

    def record(layer, args, kwargs):
        hidden_states = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        query, key = queries_and_keys(layer, hidden_states, kwargs.get("position_embeddings"))
        num_heads, window = query.shape[1], getattr(layer, "sliding_window", None)
        pairs = visible
        if pairs is None:
            lengths = query.shape[2], key.shape[2]
            pairs = visible_pairs(num_heads, 0 if window else num_heads, window or 0, *lengths, attention_mask)
            if attention_mask is not None:
                pairs = pairs & attention_mask[:, None, :, None].bool()  # queries, too
        logits = query.double() @ key.double().transpose(-1, -2) * layer.scaling
        maxima.append(logits.abs().masked_fill(~pairs, 0.0).amax(dim=(0, 2, 3)))

    for layer in attentions(watched):
        layer.register_forward_pre_hook(record, with_kwargs=True)
    with torch.no_grad():
        watched(input_ids, attention_mask=attention_mask, use_cache=False, **inputs)
    return nn.utils.rnn.pad_sequence(maxima, batch_first=True)


def close(actual, expected):
    torch.testing.assert_close(actual, expected.float(), rtol=1e-5, atol=0)


def stands_in_front(*files):
    return any(isinstance(value, StandIn) for file in files for value in vars(file).values())


def files_of(model):
    return [sys.modules[type(layer).__module__] for layer in attentions(model)]


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize(("name", "engine"), ENGINES)
def test_equals_brute_force(name, engine, padding):
    model, inputs = build(name, engine), padded_batch()
    if not padding:
        del inputs["attention_mask"]
    without = model(**inputs, use_cache=False).logits
    seen = []
    model.register_forward_hook(lambda module, args, outputs: seen.append(outputs.logits))
    measured = measure_max_logits(model, **inputs)
    assert measured.shape == (2, 4) and measured.dtype == torch.float32
    close(measured, brute_force(model, **inputs))
    assert torch.equal(seen[0], without)
    assert not stands_in_front(*files_of(model))
    if name == "gemma2":
        assert measured.min() > 1.0  # not soft-capped
    if name == "gpt-oss":
        assert measured.max() < 100.0  # a sink is no logit of a pair


def test_flex_attention():
    """... whose masks are functions; not compiled here."""
    name = "qwen3"
    model, inputs = build(name, "flex_attention"), padded_batch()
    with torch.compiler.set_stance("force_eager"):
        measured = measure_max_logits(model, **inputs)
        close(measured, brute_force(build(name, "eager"), **inputs))

        def sees_other_pairs(batch, head, query, key):
            return key <= query - head  # a mask for each head

        mask = create_block_mask(sees_other_pairs, 3, 4, 30, 30, device="cpu")
        measured = measure_max_logits(model, input_ids=inputs["input_ids"], attention_mask=mask)
    visible = torch.stack([torch.ones(30, 30).tril(-head).bool() for head in range(4)])
    expected = brute_force(build(name, "eager"), inputs["input_ids"], visible=visible)
    close(measured[0], expected[0])  # the layers after the first get other states


def flash_like_attention(module, query, key, value, attention_mask, sliding_window=None, position_ids=None, **kwargs):
    """What FlashAttention's wrapper in Transformers computes, with the masks and arguments that it is given."""
    num_heads, (q_length, kv_length) = query.shape[1], (query.shape[2], key.shape[2])
    documents = None
    if kwargs.get("cu_seq_lens_q") is not None:
        documents = torch.repeat_interleave(kwargs["cu_seq_lens_q"].diff())[None]
    elif attention_mask is None and query.shape[0] == 1 and position_ids is not None:
        documents = (position_ids == 0).cumsum(-1)
    num_global = 0 if sliding_window else num_heads
    lengths = q_length, kv_length
    visible = visible_pairs(num_heads, num_global, sliding_window or 0, *lengths, attention_mask, documents)
    return sdpa_attention_forward(module, query, key, value, visible[:, :1], scaling=kwargs["scaling"])


@pytest.fixture
def flash_like(monkeypatch):
    """An engine that takes what FlashAttention takes."""
    for interface, function in (
        (AttentionInterface, flash_like_attention),
        (AttentionMaskInterface, flash_attention_mask),
    ):
        monkeypatch.setattr(interface, "_global_mapping", {**interface._global_mapping, "my_flash": function})
    return "my_flash"


@pytest.mark.parametrize("kind", ["padding", "positions", "lengths"])
def test_engines_without_masks(flash_like, kind):
    """They get padding in two dimensions, the window, and packed documents by their positions or lengths."""
    model, inputs = build("gemma3"), padded_batch()
    expected = measure_max_logits(model, **inputs)
    model.config._attn_implementation = flash_like  # past the search for a package of such a name
    if kind == "padding":
        close(measure_max_logits(model, **inputs), expected)
        return
    ids, lengths = inputs["input_ids"][:1], (4, 15, 11)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    parts = [measure_max_logits(model, input_ids=part) for part in ids.split(lengths, dim=1)]
    packed = {"input_ids": ids, "position_ids": positions}
    if kind == "lengths":
        packed = {"input_ids": ids, "cu_seq_lens_q": torch.tensor([0, 4, 19, 30], dtype=torch.int32)}
    close(measure_max_logits(model, **packed), torch.stack(parts).amax(0))


def test_empty_slots_of_a_static_cache_do_not_count():
    """Without a mask, `sdpa` sees as many keys as there are queries, and FlashAttention as many as its mask has."""
    module = nn.Module()
    query, key = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 9, 8)
    key[:, :, 5:] = 100 * query[:, :, 4:]  # the largest logits by far, if somebody saw them
    expected = (query @ key[:, :, :5].mT / 8**0.5).tril().abs().amax((0, 2, 3))
    close(max_logits_of_call("sdpa", module, query, key[:, :, :5], None), expected)
    close(max_logits_of_call("sdpa", module, query, key, None), expected)
    padding = torch.ones(1, 5, dtype=torch.long)
    close(max_logits_of_call("flash_attention_2", module, query, key, None, padding), expected)
    with pytest.raises(ValueError, match="cannot be measured with a paged cache, because Module does not have its"):
        max_logits_of_call("sdpa", module, query, key, None, cache=object())
    for engine, length in (("eager", 9), ("sdpa", 3)):  # without a mask; of fewer keys than queries
        with pytest.raises(ValueError, match="causal attention only; that of Module is not causal"):
            max_logits_of_call(engine, module, query, key[:, :, :length], None)
    with pytest.raises(ValueError, match=r"must have shape \(batch, 1 or 2 heads, .* got \(1, 3, 5, 9\)"):
        max_logits_of_call("sdpa", module, query, key, None, torch.ones(1, 3, 5, 9))


def test_cached_keys_count_beside_padding():
    """A new token that does not see itself is padding; what was cached before it is not."""
    query, key = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 9, 8)
    key[:, :, 1] = 10 * query[:, :, 0]
    visible = torch.ones(5, 9).tril(4).bool()
    visible[:, 8] = False  # the last token is padding, whatever else it sees
    query[:, :, 4] = 100 * key[:, :, 0]
    expected = (query @ key.mT / 8**0.5)[:, :, :4].masked_fill(~visible[:4], 0.0).abs().amax((0, 2, 3))
    close(max_logits_of_call("sdpa", nn.Module(), query, key, None, visible[None, None]), expected)


@pytest.mark.parametrize("engine", ["eager", "sdpa"])
def test_masks_of_the_users(engine):
    model, ids = build(engine=engine), torch.randint(3, 97, (2, 20))
    for heads in (1, 4):
        visible = torch.rand(2, heads, 20, 20) < 0.3
        visible |= torch.eye(20).bool()
        mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
        close(measure_max_logits(model, input_ids=ids, attention_mask=mask), brute_force(model, ids, mask, visible))
        mask = mask + torch.randn(mask.shape)  # a bias of every pair, which does not count itself
        close(measure_max_logits(model, input_ids=ids, attention_mask=mask), brute_force(model, ids, mask, visible))


def test_pairs_count_whatever_weight_they_get():
    """Also with `eager`, whose mask is added: there, the softmax leaves nothing of a logit of -200 beside one of 0."""
    inputs, maxima = padded_batch(), {}
    for engine in ("eager", "sdpa"):
        model = build(engine=engine)
        model.model.layers[0].self_attn.q_proj.weight.data *= 40
        maxima[engine] = measure_max_logits(model, **inputs)[0]
        close(maxima[engine], brute_force(model, **inputs)[0])
    assert maxima["sdpa"].min() > 300


@pytest.mark.parametrize("cache_type", [DynamicCache, StaticCache])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_after_a_cache(name, cache_type):
    """The prompt, a chunk and a single token reach together what the whole text reaches at once."""
    model, ids = build(name), torch.randint(3, 97, (2, 30))
    expected = measure_max_logits(model, input_ids=ids)
    options = {"max_cache_len": 40} if cache_type is StaticCache else {}
    cache, parts = cache_type(config=model.config, **options), []
    for part in ids.split((20, 9, 1), dim=1):
        parts.append(measure_max_logits(model, input_ids=part, past_key_values=cache, use_cache=True))
    close(torch.stack(parts).amax(0), expected)


def test_queries_of_flex_attention_come_after_the_cache():
    mask = create_block_mask(lambda b, h, q, k: k <= q + 4, None, None, 5, 9, device="cpu")
    query, key = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 9, 8)
    key[:, :, 8] = 100 * query[:, :, 0]  # only the last query sees it
    expected = (query @ key.mT / 8**0.5).tril(4).abs().amax((0, 2, 3))
    close(max_logits_of_call("flex_attention", nn.Module(), query, key, key, mask), expected)


@pytest.mark.parametrize("how", ["PEFT", "DDP", "compiled", "checkpointed"])
def test_wrapped(how, fresh_compiler):
    model, inputs = build(num_hidden_layers=1 if how == "compiled" else 2).train(), padded_batch()
    expected = measure_max_logits(model, **inputs)
    if how == "PEFT":
        wrapped = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
    elif how == "DDP":
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        wrapped = DistributedDataParallel(model)
    elif how == "compiled":
        model.model.layers[0].self_attn.compile(backend="eager")  # the whole model would take half a minute
        model(**inputs, use_cache=False)  # so that the measured step finds something compiled
        wrapped = model
    else:
        model.gradient_checkpointing_enable()
        wrapped = model
    try:
        maxima = MaxLogits(wrapped)
        maxima.start()
        wrapped(**inputs, labels=inputs["input_ids"], use_cache=False).loss.backward()
        assert torch.equal(maxima.read(), expected)
        maxima.stop()
    finally:
        if how == "DDP":
            maxima = wrapped = None  # which hold the group; ended by them, it can wait for itself (seen in torch 2.13)
            torch.distributed.destroy_process_group()


@pytest.mark.parametrize("model_class", [LSGPTForCausalLM, None])
def test_maxima_need_a_measurement(tiny_config, model_class):
    maxima = MaxLogits(build() if model_class is None else model_class(tiny_config()))
    for use in (maxima.start, maxima.stop):  # before and after
        for read in (maxima.read, maxima.layer_numbers):
            with pytest.raises(ValueError, match="`start` must be called before the maxima are read"):
                read()
        use()
        maxima.stop()


def test_only_the_measured_model_counts():
    """Not a teacher of the same class that runs in between, unless it is measured itself."""
    model, inputs = build(), padded_batch()
    expected = measure_max_logits(model, **inputs)
    teacher = build()
    for layer in attentions(teacher):
        layer.q_proj.weight.data *= 10
    maxima = MaxLogits(model)
    maxima.start()
    teacher(**inputs)
    model(**inputs)
    assert measure_max_logits(teacher, **inputs).min() > expected.max()
    model(**inputs)
    assert stands_in_front(modeling_llama)  # what measured the teacher has not taken it away
    assert torch.equal(maxima.read(), expected)
    maxima.stop()
    assert not stands_in_front(modeling_llama)


def test_taken_away_after_an_error():
    model = build()
    with pytest.raises(IndexError):
        measure_max_logits(model, input_ids=torch.tensor([[1000]]))
    assert not stands_in_front(modeling_llama)
    maxima = MaxLogits(model)
    maxima.start()
    maxima.start()  # from the beginning again
    maxima.stop()
    assert not stands_in_front(modeling_llama)
    maxima.start()
    assert stands_in_front(modeling_llama)
    del maxima  # as when an error ends a training
    assert not stands_in_front(modeling_llama)


def test_layers_with_different_numbers_of_heads_and_layers_without():
    model, inputs = build(), padded_batch()
    config = LlamaConfig(**{**GQA, "num_attention_heads": 2, "num_key_value_heads": 1})
    config._attn_implementation = "sdpa"
    model.model.layers[0].self_attn = modeling_llama.LlamaAttention(config, layer_idx=0)
    measured = measure_max_logits(model, **inputs)
    assert measured[0, 2:].tolist() == [0.0, 0.0]
    close(measured, brute_force(model, **inputs))

    values = {key: GQA[key] for key in GQA.keys() - {"head_dim", "max_position_embeddings"}}
    hybrid = JambaConfig(
        **{**values, "num_hidden_layers": 3}, attn_layer_period=3, attn_layer_offset=1, use_mamba_kernels=False
    )
    maxima = MaxLogits(hybrid_model := AutoModelForCausalLM.from_config(hybrid))
    maxima.start()
    hybrid_model(inputs["input_ids"], use_cache=False)
    assert maxima.read().shape == (1, 4) and maxima.layer_numbers() == [1]
    maxima.stop()


def test_models_that_do_not_fit():
    small = {"vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    encoder = BertConfig(**small, intermediate_size=64)
    both = T5Config(vocab_size=97, d_model=48, d_ff=64, num_layers=1, num_heads=4)
    recurrent = MambaConfig(vocab_size=97, hidden_size=48, num_hidden_layers=1)
    for model, message in (
        (nn.Linear(2, 2), "must be a decoder of Transformers, alone or wrapped; got Linear"),
        (AutoModelForCausalLM.from_config(encoder), "must have causal attention, .* got BertLMHeadModel"),
        (AutoModelForSeq2SeqLM.from_config(both), "a decoder alone; got T5ForConditionalGeneration, which has an enc"),
        (AutoModelForCausalLM.from_config(recurrent), "must have causal attention, .* got MambaForCausalLM"),
    ):
        with pytest.raises(ValueError, match=f"`model` must .*{message}|`model` {message}"):
            MaxLogits(model)
    ids = torch.randint(3, 97, (1, 5))
    with pytest.raises(ValueError, match=r"must ask Transformers for its attention .* GPT2LMHeadModel did not"):
        measure_max_logits(build("gpt2", "eager", reorder_and_upcast_attn=True), input_ids=ids)
    with pytest.raises(ValueError, match="causal attention only; that of LlamaAttention is not"):
        measure_max_logits(build(), input_ids=ids, is_causal=False)
    with pytest.raises(ValueError, match="must be an LSGPT model; got LlamaForCausalLM"):
        qk_clip(build(), torch.ones(2, 4), threshold=1.0)


# In training


def test_figures_of_a_training(tmp_path):
    """They are those of the step's micro-batches; on other steps nothing stands in the way."""
    model, expected, measured_steps = build("qwen3").train(), {}, set()
    trainer = trainer_of(model, tmp_path, LogitTelemetryCallback(every_n_steps=3, threshold=1e-3), with_mask=True)

    def watch(module, args, kwargs):
        step = trainer.state.global_step + 1
        if stands_in_front(*files_of(model)):
            measured_steps.add(step)
        oracle = copy.deepcopy(model)
        oracle.model._forward_pre_hooks.clear()
        expected.setdefault(step, []).append(brute_force(oracle, kwargs["input_ids"], kwargs["attention_mask"]))

    model.model.register_forward_pre_hook(watch, with_kwargs=True)
    trainer.train()
    history = {log["step"]: log for log in trainer.state.log_history if "max_logit" in log}
    assert list(history) == [3, 6] and measured_steps == {3, 6}
    for step, log in history.items():
        assert len(expected[step]) == 2
        maxima = torch.stack(expected[step]).amax(0)
        wanted = {f"max_logit/layer_{layer}": row.max() for layer, row in enumerate(maxima)}
        wanted = {**wanted, "max_logit": maxima.max(), "heads_over_threshold": 8}
        figures = {name: value for name, value in log.items() if "logit" in name or "heads" in name}
        assert figures == {name: pytest.approx(float(value), rel=1e-5) for name, value in wanted.items()}
    assert not stands_in_front(*files_of(model))


def test_a_training_is_not_changed(tmp_path):
    weights = []
    for every_n_steps in (1, 1000):
        model = build().train()
        trainer_of(model, tmp_path, LogitTelemetryCallback(every_n_steps)).train()
        weights.append(model.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(weights[0].values(), weights[1].values()))


def test_document(tmp_path, monkeypatch, capsys):
    """The lines that docs/telemetry.md adds to a script, and its other code, run as printed."""
    monkeypatch.chdir(tmp_path)
    (added,), (code,) = blocks("docs/telemetry.md", "diff"), blocks("docs/telemetry.md", "python")
    assert added.count("\n+") + added.startswith("+") == 10
    args = TrainingArguments("run", max_steps=50, logging_steps=50, use_cpu=True, report_to="none", disable_tqdm=True)
    script = {"Trainer": Trainer, "args": args, "model": build("gpt2"), "train_dataset": random_rows(with_mask=True)}
    exec("\n".join(line[1:] for line in added.splitlines()), script)
    (log,) = (log for log in script["trainer"].state.log_history if "max_logit" in log)
    assert log["step"] == 50 and f"'max_logit/layer_1': {log['max_logit/layer_1']}" in capsys.readouterr().out

    tokenizer = train_tokenizer(["import os, sys\n"] * 10, vocab_size=300)
    tokenizer.save_pretrained("my-llama")
    build(vocab_size=len(tokenizer)).save_pretrained("my-llama")
    exec(code, {})
    first, second = re.findall(r"tensor\(.*?\]\]\)", capsys.readouterr().out, re.DOTALL)
    assert first == second


def test_warn_stop_and_clip(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    model = build("gemma2", "eager").train()
    model.model.layers[1].self_attn.q_proj.weight.data[-1] = float("nan")
    callback = LogitTelemetryCallback(1, threshold=1000.0, on_explosion="stop")
    trainer = trainer_of(model, tmp_path, callback)
    trainer.train()
    assert trainer.state.global_step == 1
    assert "1 head(s) with logits over 1000, the largest nan in head 3 of layer 1; saving" in caplog.text
    assert (tmp_path / "checkpoint-1" / "model.safetensors").is_file()
    with pytest.raises(
        ValueError,
        match=r'must be "warn" or "stop", not "clip", for models other than LSGPT, .* got GPT2LMHeadModel',
    ):
        trainer_of(build("gpt2"), tmp_path, LogitTelemetryCallback(on_explosion="clip")).train()
