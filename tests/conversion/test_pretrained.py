"""Decoders with Llama's blocks: converted, small random models compute what Transformers computes with them."""

import json
import shutil
import sys

import pytest
import torch
import yaml
from decoders import SIZES, make_source, make_tokenizer, relative_error
from fresh import run
from huggingface_hub.repocard import metadata_load
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    LlamaConfig,
    MinistralConfig,
    MistralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

import lsgpt_cli
from lsgpt import LSGPTForCausalLM
from lsgpt.conversion import (
    Sinks,
    budget_heads,
    convert,
    convert_pretrained,
    load_pretrained,
    pretrained,
    shards,
    with_global_heads,
)
from lsgpt.model_cards import make_card
from lsgpt.utilities import loading


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 3.0, 4.0],
    "original_max_position_embeddings": 32,
    "factor": 2.0,
}

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
GEMMA = {
    "head_dim": 16,
    "query_pre_attn_scalar": 24,  # what logits are divided by is not the heads' width
    "sliding_window": 8,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "initializer_range": 0.05,  # for varied text
}

SOURCES = {
    "Llama 3": (LlamaConfig, {"rope_parameters": LLAMA3}),
    "Llama, tied": (LlamaConfig, {"tie_word_embeddings": True, "rope_parameters": {"rope_theta": 100.0}}),
    "Llama with biases": (LlamaConfig, {"attention_bias": True, "mlp_bias": True, "head_dim": 14}),
    "Llama, linear": (LlamaConfig, {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}),
    "Llama, dynamic": (LlamaConfig, {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}),
    "Llama, long": (LlamaConfig, {"rope_parameters": LONGROPE}),
    "Mistral": (MistralConfig, {"head_dim": 12, "sliding_window": None, "num_key_value_heads": 3}),
    "Mistral, harmless window": (MistralConfig, {"sliding_window": 100, "hidden_act": "gelu"}),
    "Mistral, window": (MistralConfig, {"sliding_window": 8}),
    "Ministral": (
        MinistralConfig,
        {"head_dim": 12, "sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    "Qwen2": (Qwen2Config, {"tie_word_embeddings": True}),
    "Qwen2, YaRN": (Qwen2Config, {"rope_parameters": YARN}),
    "Qwen2, windows": (Qwen2Config, {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "Qwen3": (Qwen3Config, {"head_dim": 16, "tie_word_embeddings": True}),
    "Qwen3 with biases": (Qwen3Config, {"head_dim": 8, "attention_bias": True, "num_key_value_heads": 6}),
    "OLMo-2": (Olmo2Config, {}),
    "OLMo-3": (
        Olmo3Config,
        {"sliding_window": 8, "num_hidden_layers": 4, "rope_parameters": {"full_attention": YARN}},
    ),
    "OLMo-3, one rotation": (Olmo3Config, {"sliding_window": 100, "num_hidden_layers": 4}),
    "Gemma 2": (Gemma2Config, {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "Gemma 2 with biases, untied": (
        Gemma2Config,
        {**GEMMA, "attention_bias": True, "tie_word_embeddings": False, "initializer_range": 0.2},
    ),
    "Gemma 3": (
        Gemma3TextConfig,
        {
            **GEMMA,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e3},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
            },
            "final_logit_softcapping": 3.0,
            "attn_logit_softcapping": 0.1,  # which Gemma 3 ignores
        },
    ),
    "Gemma 3, harmless window": (Gemma3TextConfig, {**GEMMA, "sliding_window": 100}),
    "Phi-3": (Phi3Config, {"resid_pdrop": 0.1, "tie_word_embeddings": True}),
    "Phi-3, window": (Phi3Config, {"sliding_window": 8}),
    "Phi-3, long": (
        Phi3Config,
        {
            "rope_parameters": {**LONGROPE, "partial_rotary_factor": 1.0},
            "original_max_position_embeddings": 80,
            "max_position_embeddings": 128,
        },
    ),
}


@pytest.mark.parametrize("name", SOURCES)
def test_logits_and_text(name):
    config_class, values = SOURCES[name]
    source = make_source(config_class, **values)
    model = convert_pretrained(source)
    assert model.config.num_parameters() == model.num_parameters() == source.num_parameters()
    for field in ("attention_dropout", "bos_token_id", "eos_token_id", "initializer_range", "pad_token_id"):
        assert getattr(model.config, field) == getattr(source.config, field)
    assert model.config.resid_dropout == getattr(source.config, "resid_pdrop", 0.0)
    ours, theirs = (m.model.layers[-1].mlp.down_proj.weight for m in (model, source))
    assert ours.data_ptr() == theirs.data_ptr()

    ids = torch.randint(4, 97, (2, 90))  # past the 64 positions, where some rotary embeddings change
    assert relative_error(model, source, ids) <= 1e-5
    mask = torch.ones_like(ids)
    mask[0, :30] = 0
    assert relative_error(model, source, ids, attention_mask=mask) <= 1e-5
    actual, expected = (
        torch.autograd.grad(m(input_ids=ids, labels=ids).loss, m.model.layers[0].mlp.down_proj.weight)[0]
        for m in (model, source)
    )
    assert (actual - expected).norm() <= 1e-5 * expected.norm()

    inputs = {"input_ids": ids[:, :45], "attention_mask": mask[:, :45], "do_sample": False, "max_new_tokens": 24}
    actual, expected = (m.generate(**inputs, eos_token_id=None) for m in (model, source))
    assert torch.equal(actual, expected)
    assert len(expected[:, 45:].unique()) > 5  # no text that says one word over and over


def test_what_a_conversion_must_get_right_shows_in_the_logits():
    """The measure above is no formality: each of these mistakes is far outside it."""
    source, ids = make_source(Qwen3Config, head_dim=16, rope_parameters=LLAMA3), torch.randint(97, (2, 60))
    model = convert_pretrained(source)
    for field, value in [
        ("rope_parameters", {"rope_theta": 500_000.0, "rope_type": "default"}),
        ("rms_norm_eps", 1e-6),
    ]:
        values = {"head_dim": 16, "rope_parameters": LLAMA3, field: value}
        wrong = AutoModelForCausalLM.from_config(Qwen3Config(**{**SIZES, **values})).eval()
        wrong.load_state_dict(source.state_dict())
        assert relative_error(model, wrong, ids) > 1e-3


def test_gemmas_embeddings_are_scaled_as_gemma_rounds():
    source = make_source(Gemma2Config, **GEMMA).bfloat16()
    scale = torch.tensor(source.config.hidden_size**0.5).bfloat16()
    assert scale.item() ** 2 != source.config.hidden_size
    expected = source.model.embed_tokens.weight * scale
    assert torch.equal(convert_pretrained(source).model.embed_tokens.weight, expected)


@pytest.mark.parametrize("name", ["OLMo-2", "Gemma 2", "Gemma 3"])
def test_local_heads_in_layers_without_a_window(name):
    """A text of the window's length shows nothing but whether everything that belongs to a head moves with it."""
    config_class, values = SOURCES[name]
    source = make_source(config_class, **values)
    whole = convert_pretrained(source)
    counts = whole.config.num_global_heads_per_layer
    model = with_global_heads(whole, [[1] if count else [] for count in counts], window=8)
    assert model.config.num_global_heads_per_layer == [3 if count else 0 for count in counts]
    assert relative_error(model, source, torch.randint(4, 97, (2, 8))) <= 1e-5
    assert relative_error(model, source, torch.randint(4, 97, (2, 30))) > 1e-3


@pytest.mark.parametrize(
    ("heads", "window", "message"),
    [
        ([[], [], [0]], 9, "`window` must be 8, as in the layers"),
        ([[], [1], [0]], 8, r"`global_kv_heads` must be empty for layer 1, whose heads have a window; got \[1\]"),
        ([[], [], []], 8, "`global_kv_heads` must have at least one head for layer 2, .* another rotary embedding"),
    ],
)
def test_windows_of_layers_stay(heads, window, message):
    model = convert_pretrained(make_source(Gemma3TextConfig, **GEMMA))
    with pytest.raises(ValueError, match=message):
        with_global_heads(model, heads, window)


def test_layers_with_a_window_get_no_sinks():
    model = convert_pretrained(make_source(Gemma3TextConfig, **GEMMA))
    sinks = Sinks(torch.zeros(3, 6), torch.zeros(3, 2, 16))
    with pytest.raises(ValueError, match="`sinks` must be None for a model with layers that have a window"):
        with_global_heads(model, [[], [], [0]], 8, sinks)
    model.config.attention_sinks = True
    with pytest.raises(ValueError, match="`attention_sinks` must be False for a model with layers that have a window"):
        with_global_heads(model, [[], [], [0]], 8)


@pytest.mark.parametrize("has_other_layers", [True, False])
def test_heads_of_models_with_windows_are_not_measured(tmp_path, has_other_layers):
    values = GEMMA if has_other_layers else {"sliding_window": 8}
    source = make_source(Gemma2Config if has_other_layers else MistralConfig, **values, vocab_size=300)
    source.save_pretrained(tmp_path / "source")
    make_tokenizer().save_pretrained(tmp_path / "source")
    with pytest.raises(ValueError, match=r"`text` .* must be unset for a model with layers that have") as error:
        convert(tmp_path / "source", tmp_path / "out", 1, 8, "stdlib")
    assert ("its other layers" in str(error.value)) == has_other_layers


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A folder with a model in bfloat16 and all that may belong to it."""
    folder = tmp_path_factory.mktemp("sources") / "tiny-llama"
    torch.manual_seed(0)
    model = make_source(vocab_size=300, rope_parameters=LLAMA3, tie_word_embeddings=True).to(torch.bfloat16)
    model.generation_config.update(do_sample=True, temperature=0.6, top_p=0.9)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    metadata = {"license": "llama3.2", "base_model": "someone/base", "language": "en", "tags": ["other"]}
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump(metadata)}---\n# Tiny\n")
    (folder / "LICENSE").write_text("the license")
    return folder


def test_what_belongs_to_the_source_comes_along(llama, tmp_path, capsys):
    assert lsgpt_cli.main(["convert", str(llama), str(tmp_path / "out")]) == 0
    assert "6 global + 0 local" in capsys.readouterr().out
    source, model = (AutoModelForCausalLM.from_pretrained(folder) for folder in (llama, tmp_path / "out"))
    assert model.dtype == torch.bfloat16
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for name, weight in source.state_dict().items():
        assert torch.equal(weight, model.state_dict()[name]), name
    assert relative_error(model.float(), source.float(), torch.randint(4, 97, (2, 50))) <= 1e-5
    assert model.config.rope_parameters == source.config.rope_parameters
    assert model.config.eos_token_id == [2, 3]

    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text(encoding="utf-8"))
    assert generation == json.loads((llama / "generation_config.json").read_text(encoding="utf-8"))
    assert (generation["temperature"], generation["eos_token_id"]) == (0.6, [2, 3])
    before, after = (AutoTokenizer.from_pretrained(folder) for folder in (llama, tmp_path / "out"))
    text, chat = "to be <|endoftext|> question", [{"role": "user", "content": "or not"}]
    assert after(text)["input_ids"] == before(text)["input_ids"]
    assert after.apply_chat_template(chat, tokenize=False) == "<user>or not"
    assert (tmp_path / "out" / "LICENSE").read_text() == "the license"
    assert metadata_load(tmp_path / "out" / "README.md") == {"license": "llama3.2", "base_model": "someone/base"}
    readme = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "Converted from `tiny-llama` by" in readme  # not where it is on this machine
    card = make_card(tmp_path / "out")
    assert (card.data.license, card.data.base_model) == ("llama3.2", "someone/base")


def test_by_default_a_fifth_of_the_cache_stays_and_four_blocks_are_measured(tmp_path, monkeypatch):
    make_source(vocab_size=300, num_hidden_layers=8).save_pretrained(tmp_path / "source")
    make_tokenizer().save_pretrained(tmp_path / "source")
    given = []

    def calibrate(model, tokenizer, text, *options):
        given.append((model.config, text, *options))
        raise ValueError("enough")

    monkeypatch.setattr(sys.modules[convert.__module__], "calibrate", calibrate)
    with pytest.raises(ValueError, match="enough"):
        convert(tmp_path / "source", tmp_path / "out", text="stdlib")
    ((config, *options),) = given
    assert options == ["stdlib", *budget_heads(config, 0.2), "overall", 4]


def test_converted_from_memory_it_computes_what_it_does_from_a_folder(llama, tmp_path):
    model, _ = convert(llama, tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.randint(4, 97, (2, 50))
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


@pytest.mark.parametrize(
    ("config_class", "values", "message"),
    [
        (MistralConfig, {"sliding_window": 1}, "`sliding_window` of a mistral model to convert must be at least 2"),
        (
            Gemma2Config,
            {**GEMMA, "use_bidirectional_attention": True},
            "`use_bidirectional_attention` of a gemma2 mod",
        ),
        (
            Phi3Config,
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.75}},
            "`partial_rotary_factor` of a phi3 model to convert must be 1, because LSGPT rotates whole heads",
        ),
        (LlamaConfig, {"is_causal": False}, "`is_causal` of a llama model to convert must be unset: LSGPT is causal"),
        (LlamaConfig, {"partial_rotary_factor": 0.5}, "`partial_rotary_factor` of a llama model to convert must be 1"),
        (LlamaConfig, {"rope_parameters": {"rope_type": "spiral"}}, "`rope_type` of a llama model.*got 'spiral'"),
        (
            LlamaConfig,
            {"hidden_act": "sine"},
            "`hidden_act` of a llama model to convert must be an activation.*'sine'",
        ),
        (LlamaConfig, {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "is quantized with gptq"),
        (LlamaConfig, {"vocab_size": "97"}, "the configuration of .* cannot be read: .*vocab_size"),
    ],
)
def test_refused_configurations(config_class, values, message, tmp_path):
    config = {**SIZES, **values, "model_type": config_class.model_type}
    (tmp_path / "config.json").write_text(json.dumps(config))  # without weights: it is refused before they are read
    with pytest.raises(ValueError, match=message):
        load_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("config_class", "values", "num_global_heads"),
    [
        (MistralConfig, {"sliding_window": 63}, 0),
        (MistralConfig, {"sliding_window": 64}, 6),  # the model's positions: no text outgrows it
        (MistralConfig, {"sliding_window": 100}, 6),
        (Qwen2Config, {"use_sliding_window": False, "sliding_window": 8}, 6),
        (Qwen2Config, {"use_sliding_window": True, "sliding_window": 63, "max_window_layers": 0}, 0),
        (Qwen2Config, {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}, 6),
    ],
)
def test_harmless_windows(config_class, values, num_global_heads):
    """They leave heads global, which a conversion could then make local."""
    source = make_source(config_class, **values)
    model = convert_pretrained(source)
    assert model.config.num_global_heads == num_global_heads
    assert relative_error(model, source, torch.randint(97, (2, 64))) <= 1e-5


def test_fields_that_the_model_does_not_have_are_ignored():
    unknown = {"final_logit_softcapping": 0.01, "hidden_activation": "relu", "resid_pdrop": 0.5}
    source = make_source(sliding_window=8, layer_types=["sliding_attention"] * 2, **unknown)
    model = convert_pretrained(source)
    assert relative_error(model, source, torch.randint(97, (2, 60))) <= 1e-5 and model.config.resid_dropout == 0


def test_a_mistral_with_kinds_of_layers_is_a_ministral(tmp_path):
    """Transformers takes it for one."""
    source = make_source(
        MinistralConfig, head_dim=12, sliding_window=8, layer_types=["full_attention", "sliding_attention"]
    )
    source.save_pretrained(tmp_path / "source")
    change_config(tmp_path / "source", model_type="mistral")
    model, _ = convert(tmp_path / "source", tmp_path / "out")
    assert model.config.num_global_heads == [6, 0]
    assert relative_error(model, source, torch.randint(97, (2, 60))) <= 1e-5


@pytest.mark.parametrize("kind", ["granite", "lsgpt"])
def test_other_kinds_of_models_are_refused(kind, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    message = f"of the type gpt2, llama, .* olmo3, gemma2, gemma3_text, given .* is of the model type '{kind}'"
    with pytest.raises(ValueError, match=message):
        load_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("kind", "reason"), [("gpt_oss", "mixtures of experts"), ("mixtral", "mixtures"), ("gemma3", "reads images")]
)
def test_what_cannot_be_expressed_is_refused_with_a_reason(kind, reason, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(ValueError, match=f"of the model type '{kind}', which LSGPT cannot express: .*{reason}"):
        load_pretrained(tmp_path)


def test_language_model_of_gemma_3_with_images(tmp_path):
    """As the refusal says how to save it."""
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = Gemma3TextConfig(**{**SIZES, **GEMMA})
    whole = Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=vision)).eval()
    language_model = Gemma3ForCausalLM(whole.config.text_config)
    language_model.model, language_model.lm_head = whole.model.language_model, whole.lm_head
    language_model.save_pretrained(tmp_path / "text")
    model, _ = convert(tmp_path / "text", tmp_path / "out")
    assert relative_error(model, whole, torch.randint(4, 97, (2, 50))) <= 1e-5


def change_config(folder, **fields):
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, **fields}))


def test_a_configuration_that_is_no_json(tmp_path):
    (tmp_path / "config.json").write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(ValueError, match=r"the configuration of .* cannot be read: .*not a valid JSON"):
        convert(tmp_path, tmp_path / "out")


def test_refused_weights(tmp_path):
    make_source(attention_bias=True).save_pretrained(tmp_path)
    change_config(tmp_path, attention_bias=False, intermediate_size=81)
    with pytest.raises(
        ValueError, match=r"unknown: model.layers.0.self_attn.k_proj.bias.*mlp.down_proj.weight \(48, 80"
    ):
        load_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"unknown: model.layers.0.self_attn.k_proj.bias"):
        convert(tmp_path, tmp_path / "out")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"the weights of .* cannot be loaded"):
        convert(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", [b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n", b"", None])
def test_weights_that_are_cut_off(tmp_path, content):
    make_source().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8] if content is None else content)
    with pytest.raises(ValueError, match=r"model.safetensors' cannot be read: .*; download it again"):
        convert(tmp_path, tmp_path / "out")
    with pytest.raises(ValueError, match=r"the source must be a model's folder, not a file in it; got '"):
        convert(file, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_weights_that_are_no_safetensors(tmp_path):
    source = make_source()
    source.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(source.state_dict(), tmp_path / "pytorch_model.bin")
    model, _ = convert(tmp_path, tmp_path / "out")
    assert relative_error(model, source, torch.randint(4, 97, (2, 50))) <= 1e-5


@pytest.mark.parametrize("config_class", [LlamaConfig, Phi3Config, Gemma3TextConfig])
def test_converted_tensor_by_tensor_it_is_what_it_is_when_it_is_loaded(config_class, tmp_path, monkeypatch):
    """In bfloat16, read from several files and written to others; the folder loads as any other."""
    values = GEMMA if config_class is Gemma3TextConfig else {}
    source = make_source(config_class, **values).to(torch.bfloat16)
    source.generation_config.update(do_sample=True, temperature=0.6)
    source.save_pretrained(tmp_path / "source", max_shard_size="30KB")
    assert len(list((tmp_path / "source").glob("*.safetensors"))) > 2
    monkeypatch.setattr(shards, "MAX_SHARD_SIZE", 20_000)
    model, _ = convert(tmp_path / "source", tmp_path / "out")
    expected = convert_pretrained(load_pretrained(tmp_path / "source")).state_dict()
    for made in (model, AutoModelForCausalLM.from_pretrained(tmp_path / "out")):
        state = made.state_dict()
        assert state.keys() == expected.keys() and made.dtype == torch.bfloat16
        assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
        assert made.generation_config.temperature == 0.6
    files = sorted(file.name for file in (tmp_path / "out").glob("*.safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors" and len(files) > 2
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text(encoding="utf-8"))
    assert set(index["weight_map"].values()) == set(files)
    assert index["metadata"]["total_parameters"] == model.num_parameters()
    assert index["metadata"]["total_size"] == 2 * model.num_parameters()


@pytest.mark.parametrize("config_class", [LlamaConfig, Gemma3TextConfig])
def test_an_output_projection_of_its_own_beside_a_configuration_that_ties(config_class, tmp_path):
    """As in Transformers, which does not tie matrices that differ; equal ones are tied."""
    values = GEMMA if config_class is Gemma3TextConfig else {}
    for name in ("own", "equal"):
        model = make_source(config_class, **values | {"tie_word_embeddings": name == "equal"})
        model.save_pretrained(tmp_path / name)
        change_config(tmp_path / name, tie_word_embeddings=True)
        weights = {**model.state_dict(), "lm_head.weight": model.lm_head.weight.clone()}
        save_file(weights, tmp_path / name / "model.safetensors", metadata={"format": "pt"})
        ids = torch.randint(4, 97, (2, 50))
        loaded = load_pretrained(tmp_path / name)
        for converted in (convert(tmp_path / name, tmp_path / f"{name}-out")[0], convert_pretrained(loaded)):
            assert converted.config.tie_word_embeddings == (name == "equal")
            assert relative_error(converted, loaded, ids) <= 1e-5


def test_sampling_that_old_checkpoints_have_in_their_configuration(tmp_path):
    make_source().save_pretrained(tmp_path / "source")
    (tmp_path / "source" / "generation_config.json").unlink()
    change_config(tmp_path / "source", do_sample=True, temperature=0.7)
    model, _ = convert(tmp_path / "source", tmp_path / "out")
    assert (model.generation_config.do_sample, model.generation_config.temperature) == (True, 0.7)
    saved = json.loads((tmp_path / "out" / "generation_config.json").read_text(encoding="utf-8"))
    assert not saved.keys() & {"hidden_size", "model_type", "architectures"}


def test_frequencies_in_old_files_do_not_cost_memory(tmp_path):
    """Transformers ignores them. The model is converted without being loaded."""
    source = make_source()
    source.save_pretrained(tmp_path / "source")
    file = tmp_path / "source" / "model.safetensors"
    frequencies = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in range(2)}
    save_file({**load_file(file), **frequencies}, file, {"format": "pt"})
    model = shards.convert_shards(tmp_path / "source", source.config, tmp_path / "out")
    assert relative_error(model, source, torch.randint(97, (2, 60))) <= 1e-5


def test_the_precision_is_that_of_the_configuration(tmp_path):
    source = make_source()
    source.save_pretrained(tmp_path / "source")
    change_config(tmp_path / "source", dtype="bfloat16")
    model, _ = convert(tmp_path / "source", tmp_path / "out")
    for made in (model, AutoModelForCausalLM.from_pretrained(tmp_path / "out")):
        assert made.dtype == torch.bfloat16
        assert torch.equal(made.model.norm.weight, source.model.norm.weight.bfloat16())


def test_memory_that_a_conversion_takes(tmp_path):
    """A model of 260 MB, in a process of its own: a tenth of it would not be enough, and half of it is not needed."""
    config = LlamaConfig(
        vocab_size=1000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=8, dtype=torch.bfloat16
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path / "source")
    with torch.device("meta"):
        shapes = {name: x.shape for name, x in AutoModelForCausalLM.from_config(config).state_dict().items()}
    assert sum(shape.numel() for shape in shapes.values()) * 2 > 260e6
    zeros = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    save_file(zeros, tmp_path / "source" / "model.safetensors", metadata={"format": "pt"})
    code = """
import resource, sys
import lsgpt_cli
from lsgpt.conversion import shards
shards.MAX_SHARD_SIZE = 20_000_000
before = int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
assert lsgpt_cli.main(["convert", *sys.argv[1:]]) == 0
print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before)
"""
    output = run("-c", code, tmp_path / "source", tmp_path / "out")
    assert int(output.split()[-1]) < 130e6


def test_weights_that_are_not_finite_leave_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "CHECKED_AT_ONCE", 2)
    source = make_source()
    source.model.norm.weight.data[3] = torch.nan
    source.save_pretrained(tmp_path / "source")
    with pytest.raises(ValueError, match=r"must be finite; model.norm.weight has NaN or infinite values"):
        convert(tmp_path / "source", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()  # an empty folder that was there stays
    with pytest.raises(ValueError, match="must be finite"):
        convert(tmp_path / "source", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_conversion_whose_last_step_fails_leaves_nothing(tmp_path, monkeypatch):
    make_source().save_pretrained(tmp_path / "source")

    def fail(*args, **kwargs):
        raise OSError("no space left")

    monkeypatch.setattr(LSGPTForCausalLM, "save_pretrained", fail)
    with pytest.raises(OSError, match="no space left"):
        convert(tmp_path / "source", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_text_is_not_read_without_a_token_for_its_end(tmp_path):
    make_source(vocab_size=300).save_pretrained(tmp_path / "source")
    tokenizer = make_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "source")
    with pytest.raises(ValueError, match=r"the source's tokenizer must have an end-of-text token.* set `eos_token`"):
        convert(tmp_path / "source", tmp_path / "out", 1, 8, "stdlib")
    for file in (tmp_path / "source").glob("*token*"):
        file.unlink()
    with pytest.raises(ValueError, match="the source must have a tokenizer, to read a text with"):
        convert(tmp_path / "source", tmp_path / "out", 1, 8, "stdlib")


def test_a_tokenizer_of_a_vocabulary_and_merges(tmp_path):
    """As GPT-2 had it first, without `tokenizer.json`."""
    make_source(vocab_size=300).save_pretrained(tmp_path / "source")
    tokenizer, text = make_tokenizer(), "that is not the question"
    tokenizer.backend_tokenizer.model.save(str(tmp_path / "source"))
    (tmp_path / "source" / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    convert(tmp_path / "source", tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out")(text)["input_ids"] == tokenizer(text)["input_ids"]


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json"])
def test_files_that_show_that_there_is_a_tokenizer(name, tmp_path, monkeypatch):
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *args, **kwargs: "the tokenizer")
    assert pretrained.load_tokenizer(tmp_path) is None
    (tmp_path / name).write_text("{}")
    assert pretrained.load_tokenizer(tmp_path) == "the tokenizer"


def test_the_current_folder_has_a_name(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    make_source().save_pretrained(tmp_path / "mine")
    monkeypatch.chdir(tmp_path / "mine")
    convert(".", tmp_path / "out")
    assert "Converted from `mine` by" in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")


def test_broken_tokenizer_is_no_absent_one(llama, tmp_path):
    make_source().save_pretrained(tmp_path / "source")
    (tmp_path / "source" / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"the tokenizer of .* cannot be loaded"):
        convert(tmp_path / "source", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_name_on_the_hub(llama, tmp_path, monkeypatch, offline):
    """Read from where an earlier download left it; the name is then what the model card calls the base model."""
    repository = tmp_path / "models--someone--tiny"
    shutil.copytree(llama, repository / "snapshots" / ("0" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    convert("someone/tiny", tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    readme = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "Converted from `someone/tiny`" in readme
    assert metadata_load(tmp_path / "out" / "README.md") == {"license": "llama3.2", "base_model": "someone/tiny"}


def test_files_that_the_hub_cannot_be_asked_for_are_named(llama, tmp_path, monkeypatch, offline, caplog):
    """Without a network, after a download of the weights alone."""
    repository = tmp_path / "models--someone--tiny"
    shutil.copytree(llama, repository / "snapshots" / ("0" * 40), ignore=shutil.ignore_patterns("README*", "token*"))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    convert("someone/tiny", tmp_path / "out")
    assert not (tmp_path / "out" / "tokenizer.json").exists()
    for name in ("README.md", "tokenizer.json"):
        assert f"{name} of 'someone/tiny' is not in the cache" in caplog.text
    assert "hf download someone/tiny" in caplog.text
