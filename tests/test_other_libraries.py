"""docs/other-libraries.md runs as printed, in a folder with a checkpoint and a text, and does what it says."""

import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import fresh
import pytest
import torch
from peft import PrefixTuningConfig, PromptTuningConfig, get_peft_model
from transformers import AutoTokenizer
from transformers.cli.serve import Serve

from lsgpt import LSGPTConfig, LSGPTForCausalLM
from lsgpt.training.data import load_documents, train_tokenizer


ROOT = Path(__file__).parents[1]
DOC = (ROOT / "docs" / "other-libraries.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", DOC, re.DOTALL | re.MULTILINE))


def block(section, language, index=0):
    return re.findall(rf"```{language}\n(.*?)```", SECTIONS[section], re.DOTALL)[index]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Holds `runs/demo`, a small untrained model with its tokenizer, and `notes.txt`."""
    folder = tmp_path_factory.mktemp("libraries")
    texts = load_documents("stdlib")["validation"]["text"][:50]
    tokenizer = train_tokenizer(texts, vocab_size=400)
    torch.manual_seed(0)
    config = LSGPTConfig(
        vocab_size=400,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=6,
        sliding_window=40,
        initializer_range=0.2,
    )
    LSGPTForCausalLM(config).save_pretrained(folder / "runs" / "demo")
    tokenizer.save_pretrained(folder / "runs" / "demo")
    (folder / "notes.txt").write_text("\n\n".join("\n\n".join(texts).split("\n\n")[:40]), encoding="utf-8")
    return folder


def run(command, folder):
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    environment = {**os.environ, **fresh.environment(), "PATH": path}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, encoding="utf-8")
    assert result.returncode == 0, f"{command[-1]}\n{result.stderr}"
    return result.stdout


def run_python(code, folder):
    return fresh.run("-c", code, cwd=folder, NO_PROXY="localhost")


def test_every_section_is_run_here():
    assert set(SECTIONS) == {
        "PEFT",  # docs/fine-tuning.md, run by tests/training/test_fine_tuning.py
        "TRL",
        "lm-evaluation-harness",
        "Pipelines",
        "torchao",
        "bitsandbytes",
        "torch.export",
        "transformers serve",
    }


def test_prompt_tuning_and_prefix_tuning(folder):
    """The text under PEFT: the first trains and generates, the second is refused."""
    model, ids = LSGPTForCausalLM.from_pretrained(folder / "runs" / "demo"), torch.arange(10, 30)[None]
    tuned = get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=50))
    tuned(ids, labels=ids).loss.backward()
    assert tuned.prompt_encoder["default"].embedding.weight.grad.abs().min(-1).values.any()
    expected = ids
    for _ in range(12):
        expected = torch.cat([expected, tuned.eval()(expected).logits[:, -1:].argmax(-1)], dim=1)
    generated = tuned.generate(input_ids=ids, max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert torch.equal(generated, expected)

    model = LSGPTForCausalLM.from_pretrained(folder / "runs" / "demo")
    prefix = get_peft_model(model, PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5))
    with pytest.raises(ValueError, match="prefix tuning fills all layers in the same way; use prompt tuning or LoRA"):
        prefix(ids)


def test_trl(folder):
    check = """
batch = next(iter(trainer.get_train_dataloader()))
assert "attention_mask" not in batch
assert (batch["position_ids"] == 0).sum() > 5  # many texts in a row, each with positions of its own
print(trainer.state.log_history[-1]["train_loss"])
"""
    loss = float(run_python(block("TRL", "python") + check, folder).splitlines()[-1])
    assert 0 < loss < 12
    before = LSGPTForCausalLM.from_pretrained(folder / "runs" / "demo").state_dict()
    after = LSGPTForCausalLM.from_pretrained(folder / "runs" / "sft").state_dict()
    assert all(not torch.equal(before[name], after[name]) for name in before)


def test_lm_evaluation_harness(folder):
    (folder / "tasks").mkdir()
    lines, task = (block("lm-evaluation-harness", language) for language in ("json", "yaml"))
    (folder / "tasks" / "continuations.jsonl").write_text(lines, encoding="utf-8")
    (folder / "tasks" / "continuations.yaml").write_text(task, encoding="utf-8")
    run(["bash", "-ec", block("lm-evaluation-harness", "bash")], folder)
    (samples,) = folder.glob("runs/eval/*/samples_continuations_*.jsonl")

    model = LSGPTForCausalLM.from_pretrained(folder / "runs" / "demo")
    tokenizer = AutoTokenizer.from_pretrained(folder / "runs" / "demo")
    for line in samples.read_text(encoding="utf-8").splitlines():
        sample = json.loads(line)
        for choice, response in zip(sample["doc"]["choices"], sample["filtered_resps"]):
            context, whole = (tokenizer(x).input_ids for x in (sample["doc"]["text"], sample["doc"]["text"] + choice))
            with torch.no_grad():
                scores = model(torch.tensor([whole])).logits[0].log_softmax(-1)
            expected = sum(scores[i - 1, whole[i]].item() for i in range(len(context), len(whole)))
            assert float(response[0]) == pytest.approx(expected, abs=1e-3)


def test_pipelines(folder):
    texts = run_python(block("Pipelines", "python"), folder)
    assert texts.startswith("def ")
    assert "import os\n" in texts


def test_bitsandbytes(folder):
    """Also a model with large matrices: all its layers are quantized."""
    check = """
import torch
from bitsandbytes.nn import Linear4bit

def kinds(model):
    return [type(module) for module in model.modules() if isinstance(module, torch.nn.Linear)]

assert kinds(model).count(Linear4bit) == 2 * 6
input_ids = torch.arange(40)[None]
model.train()(input_ids, labels=input_ids).loss.backward()
assert all(p.grad is not None for name, p in model.named_parameters() if "lora_B" in name)

config = lsgpt.LSGPTConfig(vocab_size=512, hidden_size=384, num_hidden_layers=2, num_attention_heads=6)
lsgpt.LSGPTForCausalLM(config).save_pretrained("runs/wide")
wide = AutoModelForCausalLM.from_pretrained("runs/wide", quantization_config=quantization)
assert kinds(wide) == 2 * 6 * [Linear4bit] + [torch.nn.Linear]  # the last is `lm_head`
with torch.no_grad():
    full = AutoModelForCausalLM.from_pretrained("runs/wide")(input_ids).logits
    error = (wide(input_ids).logits - full).square().mean().sqrt()
    assert 0 < error < 0.3 * full.std()
"""
    run_python(block("bitsandbytes", "python") + check, folder)


def test_torchao(folder):
    check = """
import torch
full = AutoModelForCausalLM.from_pretrained("runs/demo")
quantized = [name for name, parameter in model.named_parameters() if type(parameter).__name__ == "Int8Tensor"]
assert len(quantized) == 2 * 6, quantized
input_ids = torch.arange(40)[None]
with torch.no_grad():
    error = (model(input_ids).logits - full(input_ids).logits).square().mean().sqrt()
    assert 0 < error < 0.05 * full(input_ids).logits.std()  # 127 steps a row, through two layers
model.generate(input_ids, max_new_tokens=3)
"""
    run_python(block("torchao", "python") + check, folder)
    sizes = [(folder / "runs" / name / "model.safetensors").stat().st_size for name in ("int8", "demo")]
    assert sizes[1] - sizes[0] > 2.5 * 2 * 12 * 48**2  # of the 4 bytes of each weight in the layers 1 is left


def test_torch_export(folder):
    run_python(block("torch.export", "python"), folder)
    elsewhere = """
import sys
import torch
import transformers.modeling_outputs
program = torch.export.load("runs/demo.pt2").module()
assert program(input_ids=torch.ones(5, 200).long(), use_cache=False).logits.shape == (5, 200, 400)
assert "lsgpt" not in sys.modules
try:
    program(input_ids=torch.ones(2, 80).long(), use_cache=False)
except AssertionError as error:
    print(error)
"""
    # Whatever it needs is what it imports. The shortest length is one more than two windows.
    assert ">= 81" in run([sys.executable, "-c", elsewhere], folder)


def test_transformers_serve(folder):
    port = str(fresh.find_port())
    server, client = (block("transformers serve", "python", i).replace("8000", port) for i in (0, 1))
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    program = fresh.Program("-c", server, cwd=folder, NO_PROXY="localhost")
    try:
        deadline = time.monotonic() + 120
        while True:
            assert program.process.is_alive() and time.monotonic() < deadline, program.errors
            try:
                opener.open(f"http://localhost:{port}/health", timeout=5).close()
                break
            except urllib.error.URLError:
                time.sleep(0.2)
        text = run_python(client, folder)
    finally:
        program.process.terminate()
        program.wait()

    tokenizer = AutoTokenizer.from_pretrained(folder / "runs" / "demo")
    model = LSGPTForCausalLM.from_pretrained(folder / "runs" / "demo")
    inputs = tokenizer("def ", return_tensors="pt")
    expected = model.generate(**inputs, max_new_tokens=20, do_sample=False)[0, inputs.input_ids.shape[1] :]
    assert text == tokenizer.decode(expected, skip_special_tokens=True) + "\n"


def test_the_command_cannot_serve(folder):
    """The day it can, the document is to say so."""
    with pytest.raises(AttributeError, match="module transformers has no attribute LSGPTForCausalLM"):
        Serve(str(folder / "runs" / "demo"), trust_remote_code=True, non_blocking=True)
