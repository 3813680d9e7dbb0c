"""
Runs the README's blocks, in their order: `python docs/run_readme.py README.md FOLDER`, with the Python of an
environment in which the package is installed.

FOLDER gets a small Llama under the name of the pretrained model, and a text under that of the books, so that no
network is needed; converting and healing are shortened, and everything else is run as printed.
"""

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path


SOURCE = "HuggingFaceTB/SmolLM2-135M-Instruct"
SMALLER = {
    "convert": "--cache-share 0.3 --max-blocks 2",
    "train heal": "--use_cpu true --block_size 64 --max_steps 2 --max_eval_blocks 4 --warmup_steps 0 --save_steps 2",
}
"""Options that are added to a command."""


def make_source(folder: Path, max_position_embeddings: int = 256):
    """Writes the model, with that many positions, and the text that the README's commands name."""
    import torch  # noqa: PLC0415
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    from lsgpt.training import train_tokenizer  # noqa: PLC0415

    text = "".join(f"line {i} of {i * i}, the capital of France is Paris\n" for i in range(3000))
    tokenizer = train_tokenizer([text], 300)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_position_embeddings,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder / SOURCE)
    tokenizer.save_pretrained(folder / SOURCE)
    (folder / "books").mkdir()
    for i, part in enumerate(re.findall(r".{20000}", text, re.DOTALL)):
        (folder / "books" / f"{i}.txt").write_text(part, encoding="utf-8")


def commands(readme: str) -> list[tuple[list[str], str | None]]:
    """The commands of the blocks, except installation, each with the output that the page shows, if any."""
    found = []
    for language, content in re.findall(r"^```(\w+)\n(.*?)^```", readme, re.DOTALL | re.MULTILINE):
        if language == "bash":
            found += [(shlex.split(line, comments=True), None) for line in content.splitlines()]
        elif language == "python":
            found.append((["python", "-c", content], None))
        elif language == "text":
            found[-1] = (found[-1][0], content)
    return [(words, output) for words, output in found if words[0] in ("lsgpt", "python")]


def run(readme: str, execute: Callable[[list[str]], str], smaller: dict[str, str] = SMALLER):
    """
    Runs all commands.

    Args:
        readme: The page.
        execute: Runs a command and returns what it prints; raises an exception if it fails.
        smaller: Options for commands, by the words that follow `lsgpt`.

    Raises:
        AssertionError: If a command does not print what the page shows.
    """
    for words, expected in commands(readme):
        options = next((more for start, more in smaller.items() if " ".join(words[1:]).startswith(start)), "")
        output = execute([*words, *options.split()])
        if expected is not None and output != expected:
            raise AssertionError(f"the README shows {expected!r}, and the code prints {output!r}")


def _execute(words: list[str], folder: Path) -> str:
    print("$", shlex.join(words), flush=True)
    program = Path(sys.executable).with_name(words[0])
    return subprocess.run([program, *words[1:]], cwd=folder, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    page, place = Path(sys.argv[1]).read_text(encoding="utf-8"), Path(sys.argv[2])
    place.mkdir(parents=True)
    make_source(place)
    run(page, lambda words: _execute(words, place))
    print("all blocks of the README ran")
