"""docs/pretrained.md from its first command to its last but one, on a small Llama under the name of the real model.

`vllm serve` needs vLLM: serving a converted checkpoint is tested in `serving/`. `make test-pretrained` walks the same
way with the real model.
"""

import re
import shlex
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import lsgpt_cli
from lsgpt.training.data import train_tokenizer


DOC = (Path(__file__).parents[1] / "docs" / "pretrained.md").read_text(encoding="utf-8")
COMMANDS = [
    shlex.split(line) for block in re.findall(r"```bash\n(.*?)```", DOC, re.DOTALL) for line in block.splitlines()
]
NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
SMALLER = {
    "convert": "--cache-share 0.3 --max-blocks 1",
    "train": "--use_cpu true --block_size 64 --max_steps 2 --max_eval_blocks 4 --warmup_steps 0 --save_steps 2",
    "generate": "",
    "info": "",
    "publish": "",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Holds the model under its name on the Hub, and the text."""
    text = "".join(f"line {i} of {i * i}, the capital of France is Paris\n" for i in range(3000))
    tokenizer = train_tokenizer([text], 300)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path / NAME)
    tokenizer.save_pretrained(tmp_path / NAME)
    (tmp_path / "books").mkdir()
    for i, part in enumerate(re.findall(r".{20000}", text, re.DOTALL)):
        (tmp_path / "books" / f"{i}.txt").write_text(part, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_command_of_the_page(folder, capsys):
    assert [command[:2] for command in COMMANDS[-1:]] == [["vllm", "serve"]]
    for command in COMMANDS[:-1]:
        assert lsgpt_cli.main([*command[1:], *SMALLER[command[1]].split()]) == 0, capsys.readouterr().err
    report = Path("runs/smollm2-ls/report.md").read_text(encoding="utf-8")
    assert "erplexity" in report and "five-digit numbers" in report
    (code,) = re.findall(r"```python\n(.*?)```", DOC, re.DOTALL)
    names = {}
    exec(code, names)
    assert names["model"].config.attention_sinks
    assert "France" in capsys.readouterr().out
