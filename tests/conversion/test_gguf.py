"""GGUF files: converted, they compute what the models in them compute, and what cannot be read is refused."""

import sys

import pytest
import torch
from decoders import make_source, make_tokenizer, relative_error
from gguf_file import write_gguf
from huggingface_hub.repocard import metadata_load
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

import lsgpt_cli
from lsgpt.conversion import convert, load_pretrained


@pytest.mark.parametrize(
    ("config_class", "values"),
    [
        (LlamaConfig, {"tie_word_embeddings": True, "rope_parameters": {"rope_theta": 777.0}}),
        (Qwen2Config, {}),
        (Qwen3Config, {"head_dim": 128}),  # what Transformers takes for granted
        (Phi3Config, {"tie_word_embeddings": True}),
    ],
)
def test_gguf(config_class, values, tmp_path, capsys):
    tokenizer = make_tokenizer()
    source = make_source(config_class, vocab_size=len(tokenizer), **values)
    origin = {"general__license": "apache-2.0", "general__base_model__0__repo_url": "https://huggingface.co/some/tiny"}
    origin["general__license__link"] = "https://example.org/license"
    write_gguf(tmp_path / "tiny.gguf", source, tokenizer, tokenizer__ggml__padding_token_id=3, **origin)
    assert lsgpt_cli.main(["convert", str(tmp_path / "tiny.gguf"), str(tmp_path / "out")]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.float32
    assert relative_error(model, source, torch.randint(4, 97, (2, 50))) <= 1e-5
    assert model.config.tie_word_embeddings == source.config.tie_word_embeddings
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.config.bos_token_id == tokenizer.bos_token_id and model.config.pad_token_id == 3
    loaded = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "to be  12 question<|endoftext|>or not"
    assert loaded.decode(loaded(text)["input_ids"]) == text
    assert loaded(text)["input_ids"].count(tokenizer.eos_token_id) == 1
    assert loaded.apply_chat_template([{"role": "user", "content": "or"}], tokenize=False) == "<user>or"
    if config_class is LlamaConfig:
        # SmolLM, whose tokenizer splits digits before anything else; the classes of others have their own rules
        words = loaded.backend_tokenizer.pre_tokenizer.pre_tokenize_str("be  12")
        assert [word for word, _ in words] == ["be", "ĠĠ", "1", "2"]
    card = {"license": "apache-2.0", "license_link": "https://example.org/license", "base_model": "some/tiny"}
    assert metadata_load(tmp_path / "out" / "README.md") == card


def test_gguf_with_a_license_that_the_hub_does_not_list(tmp_path):
    names = {"general__license": "other", "general__license__name": "mine", "general__license__link": "LICENSE"}
    write_gguf(tmp_path / "tiny.gguf", make_source(), **names)
    (tmp_path / "LICENSE").write_text("the license")
    convert(tmp_path / "tiny.gguf", tmp_path / "out")
    card = metadata_load(tmp_path / "out" / "README.md")
    assert card == {"license": "other", "license_name": "mine", "license_link": "LICENSE"}
    assert (tmp_path / "out" / "LICENSE").read_text() == "the license"


def test_a_license_of_something_else_beside_a_gguf_file(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", make_source(), general__license="apache-2.0")
    (tmp_path / "LICENSE").write_text("that of the project in whose folder the file lies")
    convert(tmp_path / "tiny.gguf", tmp_path / "out")
    assert not (tmp_path / "out" / "LICENSE").exists()


@pytest.mark.parametrize(
    ("metadata", "tensors", "message"),
    [
        ({"llama__rope__scaling__type": "yarn"}, (), "`llama.rope.scaling.type` .* must be unset.* got 'yarn'"),
        ({"llama__attention__causal": False}, (), "`llama.attention.causal`.*got 0"),
        ({"llama__expert_count": 8}, (), "`llama.expert_count`.*got 8"),
        ({"llama__rope__scale_linear": 4}, (), "`llama.rope.scale_linear` .* must be unset.* got 4"),
        ({"llama__attention__sliding_window": 32}, (), "`llama.attention.sliding_window`.*got 32"),
        ({}, ("rope_freqs.weight",), "must not have `rope_freqs.weight`, the rope scaling of Llama 3.1"),
        ({}, ("blk.0.attn_q.bias",), "unknown: blk.0.attn_q.bias"),
    ],
)
def test_refused_gguf(metadata, tensors, message, tmp_path):
    write_gguf(tmp_path / "tiny.gguf", make_source(), tensors=tensors, **metadata)
    with pytest.raises(ValueError, match=message):
        load_pretrained(tmp_path / "tiny.gguf")
    with pytest.raises(ValueError, match=message) as error:
        convert(tmp_path / "tiny.gguf", tmp_path / "out")
    assert "the tokenizer of" not in str(error.value)


def test_what_cannot_be_read_is_not_a_tokenizer(tmp_path, monkeypatch):
    (tmp_path / "text.gguf").write_text("this is not a GGUF file")
    with pytest.raises(ValueError, match=r"^the GGUF file .* cannot be read"):
        convert(tmp_path / "text.gguf", tmp_path / "out")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="needs the package `gguf`"):
        convert(tmp_path / "text.gguf", tmp_path / "out")


@pytest.mark.parametrize("config_class", [Gemma2Config, Gemma3TextConfig])
def test_gguf_of_gemma(config_class, tmp_path):
    """Without its tokenizer, which is of another kind than the others'."""
    source = make_source(config_class, head_dim=256, sliding_window=8, num_hidden_layers=6)
    write_gguf(tmp_path / "tiny.gguf", source)
    model, _ = convert(tmp_path / "tiny.gguf", tmp_path / "out")
    assert relative_error(model, source, torch.randint(4, 97, (2, 50))) <= 1e-5
    assert 0 in model.config.num_global_heads and model.config.sliding_window == 8


@pytest.mark.parametrize(
    ("config_class", "values", "metadata", "message"),
    [
        (Gemma2Config, {"head_dim": 16}, {}, "`gemma2.attention.key_length` of a GGUF file must be 256, .* got 16"),
        (
            Gemma3TextConfig,
            {"head_dim": 256},
            {"gemma3__rope__scaling__type": "linear"},
            "`gemma3.rope.scaling.type` of a GGUF file must be unset, because Transformers does not read it",
        ),
        (
            Gemma3TextConfig,
            {"head_dim": 256},
            {"gemma3__rope__freq_base_swa": 5000},
            "`gemma3.rope.freq_base_swa` of a GGUF file must be unset",
        ),
        (
            Gemma2Config,
            {"head_dim": 256},
            {"gemma2__attn_logit_softcapping": 20},
            "softcapping` .* must be unset.* 20",
        ),
        (
            Phi3Config,
            {},
            {"phi3__rope__dimension_count": 6},
            "`phi3.rope.dimension_count` .* rotates whole heads; got 6",
        ),
        (Phi3Config, {}, {"phi3__attention__sliding_window": 32}, "`phi3.attention.sliding_window`.*got 32"),
    ],
)
def test_refused_gguf_of_other_architectures(config_class, values, metadata, message, tmp_path):
    write_gguf(tmp_path / "tiny.gguf", make_source(config_class, **values), **metadata)
    with pytest.raises(ValueError, match=message):
        load_pretrained(tmp_path / "tiny.gguf")


def test_broken_gguf_and_missing_package(tmp_path, monkeypatch, capsys):
    path = tmp_path / "tiny.gguf"
    write_gguf(path, make_source())
    with pytest.raises(ValueError, match=r"has no config.json .* but a GGUF file: name that file"):
        load_pretrained(tmp_path)
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ValueError, match=r"the configuration of .*gguf' cannot be read"):
        load_pretrained(path)
    path.write_text("text")
    with pytest.raises(ValueError, match=r"the GGUF file .* cannot be read"):
        load_pretrained(path)
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert lsgpt_cli.main(["convert", str(path), str(tmp_path / "out")]) == 2
    assert "install it: pip install gguf" in capsys.readouterr().err
