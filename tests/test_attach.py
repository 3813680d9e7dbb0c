"""`attach` on other architectures computes what their own dense attention computes under a mask for each head.

The oracle is the same model on Transformers' `eager` attention, which takes a 4-D mask with a head axis; nothing of
ours runs in it but the weights.
"""

import copy
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from reference import visible_pairs
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    DynamicCache,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Qwen3Config,
    T5Config,
)
from transformers.models.auto.modeling_auto import AutoModelForSeq2SeqLM

import lsgpt
from lsgpt.attached import long_short_attention_forward


GQA = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 12,
    "initializer_range": 0.3,  # logits far apart, so that a wrong mask shows
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
CONFIGS = {
    "llama": LlamaConfig(**GQA),
    "qwen3": Qwen3Config(**GQA),
    "mistral": MistralConfig(**GQA, sliding_window=None),
    # A scale of its own in each layer.
    "gpt2": GPT2Config(
        vocab_size=97,
        n_embd=48,
        n_layer=2,
        n_head=8,
        n_positions=256,
        initializer_range=0.3,
        scale_attn_by_inverse_layer_idx=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
    ),
}
HEADS, WINDOW = 8, 8
DOC = Path(__file__).parents[1] / "docs" / "attach.md"


@pytest.fixture(params=CONFIGS)
def config(request):
    return copy.deepcopy(CONFIGS[request.param])


def build(config, num_global_heads=2):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    return lsgpt.attach(model, num_global_heads=num_global_heads, sliding_window=WINDOW)


def dense_logits(model, input_ids, padding_mask=None, documents=None, position_ids=None):
    """The logits of the model's weights under dense attention with a mask for each head."""
    numbers, length = model.config.long_short, input_ids.shape[1]
    visible = visible_pairs(
        HEADS, numbers["num_global_heads"], numbers["sliding_window"], length, length, padding_mask, documents
    )
    mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    model.set_attn_implementation("eager")
    try:
        mask = mask.expand(input_ids.shape[0], -1, -1, -1)
        return model(input_ids, attention_mask=mask, position_ids=position_ids, use_cache=False).logits
    finally:
        model.set_attn_implementation("long_short")


def padding(kind, length):
    """A mask `(2, length)` that pads the second row, and positions that count real tokens."""
    mask = torch.ones(2, length, dtype=torch.long)
    if kind == "left":
        mask[1, : length // 3] = 0
    elif kind == "right":
        mask[1, -(length // 3) :] = 0
    return mask, (mask.cumsum(-1) - 1).clamp(min=0)


def gradients(model, logits, real):
    """Gradients of a loss of the real tokens' logits, which depends on every one of them."""
    model.zero_grad()
    targets = torch.arange(real.sum()) % 97
    torch.nn.functional.cross_entropy(logits[real], targets).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def close(actual, expected):
    # Float32, two layers: the rounding of sums of about a hundred terms in another order.
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("kind", ["none", "left", "right"])
# Shorter than the window; the last length in one piece; the first in blocks; a block and a rest; several blocks.
@pytest.mark.parametrize("length", [7, 16, 17, 69, 150])
def test_outputs_and_gradients(config, length, kind):
    model = build(config)
    input_ids = torch.randint(97, (2, length))
    mask, positions = padding(kind, length)
    real = mask.bool()
    expected = dense_logits(model, input_ids, mask, position_ids=positions)
    expected_gradients = gradients(model, expected, real)
    actual = model(input_ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    close(actual[real], expected[real])
    for one, other in zip(gradients(model, actual, real), expected_gradients):
        close(one, other)


@pytest.mark.parametrize("num_global_heads", [0, 4, 8])
def test_other_splits(config, num_global_heads):
    model = build(config, num_global_heads)
    input_ids = torch.randint(97, (2, 69))
    close(model(input_ids).logits, dense_logits(model, input_ids))


def test_packed_documents(config):
    model = build(config)
    input_ids = torch.randint(97, (1, 90))
    lengths = (33, 5, 52)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    documents = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])[None]
    expected = dense_logits(model, input_ids, documents=documents, position_ids=positions)
    close(model(input_ids, position_ids=positions, use_cache=False).logits, expected)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
@pytest.mark.parametrize("length", [12, 69])
def test_masks_of_the_user(config, dtype, length):
    """A 4-D mask holds as it is for global heads, and inside their window for local ones."""
    model = build(config)
    input_ids = torch.randint(97, (2, length))
    documents = torch.arange(length).expand(2, -1) // 10
    visible = visible_pairs(1, 1, WINDOW, length, length, documents=documents)
    mask = visible if dtype == torch.bool else torch.zeros(visible.shape).masked_fill(~visible, -1e9)
    close(model(input_ids, attention_mask=mask).logits, dense_logits(model, input_ids, documents=documents))


# The padding of the short prompt is still in the window when the first tokens are decoded.
@pytest.mark.parametrize(("length", "chunk_size"), [(6, None), (50, None), (50, 5), (50, 37)])
def test_generation(config, length, chunk_size):
    """Greedy text of a left-padded batch, prefilled at once and in chunks, equals that without a cache."""
    model = build(config)
    input_ids = torch.randint(2, 97, (2, length))
    mask, _ = padding("left", length)
    ids, ones = input_ids, mask
    with torch.no_grad():
        for _ in range(12):
            logits = dense_logits(model, ids, ones, position_ids=(ones.cumsum(-1) - 1).clamp(min=0))
            ids = torch.cat((ids, logits[:, -1:].argmax(-1)), dim=-1)
            ones = torch.nn.functional.pad(ones, (0, 1), value=1)
    generated = model.generate(
        input_ids, attention_mask=mask, max_new_tokens=12, do_sample=False, prefill_chunk_size=chunk_size
    )
    assert torch.equal(generated, ids)


@torch.no_grad()
def test_decoding_reads_the_window_only(config):
    model = build(config)
    input_ids = torch.randint(97, (1, 31))
    cache = DynamicCache(config=model.config)
    model(input_ids[:, :30], past_key_values=cache)
    num_global_kv_heads = 2 * getattr(config, "num_key_value_heads", HEADS) // HEADS
    for layer in cache.layers:
        for states in (layer.keys, layer.values):
            states[:, num_global_kv_heads:, : 30 - (WINDOW - 1)] = torch.nan
    logits = model(input_ids[:, 30:], past_key_values=cache).logits
    close(logits, dense_logits(model, input_ids)[:, -1:])


def test_local_heads_need_no_square(config):
    class LargestTensor(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                self.elements = max(self.elements, result.numel())
            return result

    length = 2048
    if hasattr(config, "n_positions"):
        config.n_positions = length
    model = build(config, num_global_heads=0)
    with LargestTensor() as largest:
        model(torch.randint(97, (1, length)), logits_to_keep=1, use_cache=False).logits.sum().backward()
    assert 0 < largest.elements < length**2 / 4


def test_gradient_checkpointing(config):
    model = build(config).train()
    input_ids = torch.randint(97, (2, 69))
    everything = torch.ones_like(input_ids).bool()
    expected = gradients(model, model(input_ids, use_cache=False).logits, everything)
    model.gradient_checkpointing_enable()
    assert model.is_gradient_checkpointing
    for one, other in zip(gradients(model, model(input_ids, use_cache=False).logits, everything), expected):
        close(one, other)


def test_autocast(config):
    """In bfloat16 the error is at most twice that of the dense attention in bfloat16."""
    model = build(config)
    input_ids = torch.randint(97, (2, 69))
    with torch.no_grad():
        exact = dense_logits(model, input_ids)
        with torch.autocast("cpu", torch.bfloat16):
            plain, actual = dense_logits(model, input_ids), model(input_ids).logits
    assert (actual - exact).pow(2).mean().sqrt() <= 2 * (plain - exact).pow(2).mean().sqrt()


def test_saved_and_restored(config, tmp_path):
    input_ids = torch.randint(97, (1, 40))
    expected = build(config)(input_ids).logits
    model = build(config)
    for folder in ("first", "second"):  # what was loaded is saved as it was
        model.save_pretrained(tmp_path / folder)
        saved = json.loads((tmp_path / folder / "config.json").read_text())
        assert saved["long_short"] == {"num_global_heads": 2, "sliding_window": WINDOW}
        model = AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        assert torch.equal(model(input_ids).logits, expected)
    full = AutoModelForCausalLM.from_pretrained(tmp_path / "first", attn_implementation="sdpa")
    assert not torch.allclose(full(input_ids).logits, expected, atol=1e-2)


def test_document(tmp_path, monkeypatch, capsys):
    """docs/attach.md runs as printed."""
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```python\n(.*?)```", DOC.read_text(encoding="utf-8"), re.DOTALL)
    exec(block, {})
    assert capsys.readouterr().out == "{'num_global_heads': 2, 'sliding_window': 16} long_short\n"


def test_no_full_attention_in_silence(tmp_path):
    build(copy.deepcopy(CONFIGS["llama"])).save_pretrained(tmp_path)
    code = f"from transformers import LlamaForCausalLM; LlamaForCausalLM.from_pretrained({str(tmp_path)!r})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode != 0
    assert 'attn_implementation="long_short"` is not supported' in result.stderr


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((3, 8), "`num_global_heads` must be between 0 and 8, .* a multiple of 2, .* got 3"),
        ((10, 8), "`num_global_heads` must be .* got 10"),
        ((-2, 8), "`num_global_heads` must be .* got -2"),
        ((2, 1), "`sliding_window` must be at least 2; got 1"),
    ],
)
def test_numbers_that_do_not_fit(numbers, message):
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS["llama"]))
    with pytest.raises(ValueError, match=message):
        lsgpt.attach(model, *numbers)
    assert model.config._attn_implementation != "long_short"


SMALL = {"vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            MistralConfig(**GQA, sliding_window=64),
            "full attention in all layers; got MistralForCausalLM with sliding_w",
        ),
        (Qwen3Config(**GQA, layer_types=["full_attention", "sliding_attention"]), "full attention in all layers"),
        (Gemma2Config(**GQA, layer_types=["full_attention"] * 2), "no soft-capping .* attn_logit_softcapping=50.0"),
        (MambaConfig(hidden_size=48, num_hidden_layers=1, vocab_size=97), "call Transformers' attention interface"),
        (BertConfig(**SMALL, intermediate_size=64), "causal attention in all layers; got BertLMHeadModel"),
        (BertConfig(**SMALL, intermediate_size=64, is_decoder=True, add_cross_attention=True), "one decoder"),
        (GPT2Config(vocab_size=97, n_embd=48, n_layer=1, n_head=4, add_cross_attention=True), "one decoder"),
        (T5Config(vocab_size=97, d_model=48, d_ff=64, num_layers=1, num_heads=4), "one decoder|attention interface"),
        (lsgpt.LSGPTConfig(**SMALL), "full attention in all layers; got LSGPTForCausalLM with .*sliding_attention"),
    ],
)
def test_models_that_do_not_fit(config, message):
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    with pytest.raises(ValueError, match=f"`model` must .*({message})"):
        lsgpt.attach(auto.from_config(config), num_global_heads=2, sliding_window=8)


def test_wrapped_models():
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS["llama"]))
    with pytest.raises(ValueError, match=r"`model` must be a model of Transformers .* got Sequential"):
        lsgpt.attach(torch.nn.Sequential(model), num_global_heads=2, sliding_window=8)


def test_what_layers_may_ask_for():
    model = build(copy.deepcopy(CONFIGS["llama"]))
    input_ids = torch.randint(97, (2, 20))
    with pytest.raises(ValueError, match="no attention weights"):
        model(input_ids, output_attentions=True)
    with pytest.raises(ValueError, match="`past_key_values` must be a dynamic cache"):
        model.generate(input_ids, max_new_tokens=2, cache_implementation="static")
    with pytest.raises(ValueError, match="`attention_mask` must be the same for all heads"):
        model(input_ids, attention_mask=torch.ones(2, HEADS, 20, 20).bool())


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"s_aux": torch.zeros(HEADS)}, "no attention sinks, which LlamaAttention asks for"),
        ({"position_bias": torch.zeros(1, HEADS, 5, 5)}, "no position biases"),
        ({"is_causal": False}, "no attention that is not causal"),
        ({"sliding_window": 4}, "no second window"),
        ({"softcap": 50.0}, "no soft-capping"),
        ({"value": torch.zeros(1, 4, 5, 16)}, "no values of 16 dimensions beside keys of 12"),
    ],
)
def test_arguments_of_other_layers(argument, message):
    layer = build(copy.deepcopy(CONFIGS["llama"])).model.layers[0].self_attn
    tensors = {
        "query": torch.zeros(1, HEADS, 5, 12),
        "key": torch.zeros(1, 4, 5, 12),
        "value": torch.zeros(1, 4, 5, 12),
    }
    with pytest.raises(ValueError, match=message):
        long_short_attention_forward(layer, **{**tensors, "attention_mask": None, **argument})


def test_implementation_chosen_without_attach():
    """Loading with the name alone is no way around the checks."""
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS["llama"]), attn_implementation="long_short")
    with pytest.raises(ValueError, match=r"`config\.long_short` must say which heads are global"):
        model(torch.randint(97, (1, 5)))
    config = MistralConfig(**GQA, sliding_window=64)
    config.long_short = {"num_global_heads": 2, "sliding_window": 8}
    model = AutoModelForCausalLM.from_config(config, attn_implementation="long_short")
    with pytest.raises(ValueError, match="a window of its own; got 64"):
        model(torch.randint(97, (1, 5)))
