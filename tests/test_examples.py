"""The scripts in examples/ run as they are, at small size, and do what they say."""

import re
from pathlib import Path

import fresh
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from lsgpt import LSGPTConfig, LSGPTForCausalLM
from lsgpt.training.data import train_tokenizer


EXAMPLES = Path(__file__).parents[1] / "examples"
TEXT = "\n\n".join(f"Paragraph {i} of the notes: {i * i} is the square of {i}." for i in range(4000))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Holds a text, `runs/demo`, an untrained LSGPT, and `llama`, both with a tokenizer."""
    folder = tmp_path_factory.mktemp("examples")
    (folder / "notes.txt").write_text(TEXT, encoding="utf-8")
    tokenizer = train_tokenizer([TEXT], 400)
    torch.manual_seed(0)
    shape = {"vocab_size": 400, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.eos_token_id}
    llama = LlamaConfig(
        **shape, **ids, num_key_value_heads=2, intermediate_size=48, max_position_embeddings=256, head_dim=8
    )
    for name, model in (
        ("runs/demo", LSGPTForCausalLM(LSGPTConfig(**shape, **ids, sliding_window=8))),
        ("llama", LlamaForCausalLM(llama)),
    ):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


def run(name, folder, *arguments):
    return fresh.run("-c", (EXAMPLES / name).read_text(encoding="utf-8"), *arguments, cwd=folder)


def test_they_are_short():
    scripts = sorted(EXAMPLES.glob("*.py"))
    assert len(scripts) == 3
    for script in scripts:
        assert len(script.read_text(encoding="utf-8").splitlines()) <= 60, script.name


def test_train_with_telemetry(folder):
    printed = run("train_with_telemetry.py", folder, "notes.txt", "--steps", "10", "--output", "runs/telemetry")
    assert re.findall(r"^step (\d+): largest logit \d", printed, re.MULTILINE) == ["10"]
    assert float(re.search(r"validation loss ([\d.]+)", printed)[1]) < 8.3  # the logarithm of the vocabulary's size
    assert AutoModelForCausalLM.from_pretrained(folder / "runs" / "telemetry").config.num_global_heads == 1


def test_convert_and_heal(folder):
    small = ("--cache-share", "0.6", "--blocks", "2", "--steps", "2")
    printed = run("convert_and_heal.py", folder, "llama", "notes.txt", *small)
    rows = re.findall(r"^(\w+) +perplexity +([\d.]+) +KV cache at 256 tokens +([\d.]+)%$", printed, re.MULTILINE)
    assert [name for name, *_ in rows] == ["original", "converted", "healed"]
    caches = [float(cache) for *_, cache in rows]
    assert caches[0] == 100 and 50 <= caches[1] == caches[2] <= 60
    assert all(300 < float(perplexity) < 500 for _, perplexity, _ in rows)  # untrained, with 400 tokens
    assert (folder / "runs" / "smaller" / "converted" / "report.md").is_file()


def test_fine_tune_with_trl_and_peft(folder):
    (folder / "short.txt").write_text("\n\n".join(TEXT.split("\n\n")[:60]), encoding="utf-8")
    printed = run("fine_tune_with_trl_and_peft.py", folder, "runs/demo", "short.txt", "--epochs", "2")
    before, after = map(float, re.search(r"paragraphs: ([\d.]+) before, ([\d.]+) after", printed).groups())
    assert after < before
    tuned, base = (AutoModelForCausalLM.from_pretrained(folder / "runs" / name) for name in ("tuned", "demo"))
    ids = AutoTokenizer.from_pretrained(folder / "runs" / "tuned")("The ", return_tensors="pt").input_ids
    assert not torch.equal(tuned(ids).logits, base(ids).logits)
