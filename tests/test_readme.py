"""The README's code runs as printed, in order, in a folder where the demo has been run."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import lsgpt_cli
from lsgpt import LSGPTConfig, LSGPTForCausalLM
from lsgpt.training.data import load_documents, train_tokenizer


ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Holds the README and `runs/demo`, with a small untrained model in place of the demo's."""
    folder = tmp_path_factory.mktemp("readme")
    shutil.copy(ROOT / "README.md", folder)
    tokenizer = train_tokenizer(load_documents("stdlib")["validation"]["text"][:50], vocab_size=400)
    config = LSGPTConfig(vocab_size=400, hidden_size=48, num_hidden_layers=2, num_attention_heads=6)
    LSGPTForCausalLM(config).save_pretrained(folder / "runs" / "demo")
    tokenizer.save_pretrained(folder / "runs" / "demo")
    return folder


def test_python_blocks(folder):
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 6
    assert all(re.search(r"^(import|from) lsgpt\b", block, re.MULTILINE) for block in blocks)
    # One process, because starting takes longest, but names of its own for each block.
    program = "\n".join(f"exec({block!r}, {{'__name__': '__main__'}})" for block in blocks)
    result = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert (folder / "runs" / "finetuned" / "modeling_lsgpt.py").is_file()


@pytest.mark.parametrize(
    "command",
    [
        "lsgpt info gpt2-small --length 8192",
        'lsgpt generate runs/demo "def "',
        "lsgpt publish runs/demo your-name/your-lsgpt --license apache-2.0 --dry-run",
    ],
)
def test_commands(folder, command, monkeypatch, capsys):
    assert command in README
    monkeypatch.chdir(folder)
    assert lsgpt_cli.main(shlex.split(command)[1:]) == 0
    output = capsys.readouterr().out
    assert output
    if "generate" in command:
        assert output.startswith("def ")  # the prompt's own space, whatever token it belongs to
