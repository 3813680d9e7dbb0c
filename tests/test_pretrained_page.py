"""docs/pretrained.md from its first command to its last but one, on a small Llama under the name of the real model.

`vllm serve` needs vLLM: serving a converted checkpoint is tested in `serving/`. `make test-pretrained` walks the same
way with the real model.
"""

import re
import runpy
import shlex
from pathlib import Path

import pytest

import lsgpt_cli


ROOT = Path(__file__).parents[1]
DOC = (ROOT / "docs" / "pretrained.md").read_text(encoding="utf-8")
COMMANDS = [
    shlex.split(line) for block in re.findall(r"```bash\n(.*?)```", DOC, re.DOTALL) for line in block.splitlines()
]
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
    script = runpy.run_path(str(ROOT / "docs" / "run_readme.py"))
    script["make_source"](tmp_path, max_position_embeddings=1024)
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
