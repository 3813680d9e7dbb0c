"""docs/fine-tuning.md runs as printed, in a folder with a checkpoint and a text; LoRA trains the adapter only."""

import json
import re
import subprocess
import sys
from pathlib import Path

import fresh
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    DataCollatorWithFlattening,
    Trainer,
    TrainingArguments,
)

from lsgpt import LSGPTConfig, LSGPTForCausalLM, measure_max_logits
from lsgpt.training import LogitTelemetryCallback, parse_arguments
from lsgpt.training.data import load_documents, train_tokenizer
from lsgpt.training.train import build_model


DOC = (Path(__file__).parents[2] / "docs" / "fine-tuning.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", DOC, re.DOTALL)
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj"]

LOAD_WITHOUT_LSGPT = """
import sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    inputs = AutoTokenizer.from_pretrained(folder)("def", return_tensors="pt")
    with torch.no_grad():
        torch.save(model(**inputs).logits, f"{folder}/logits.pt")
assert "lsgpt" not in sys.modules
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Holds `runs/demo`, a small untrained model with its tokenizer, and `notes.txt`; both scripts have run there."""
    folder = tmp_path_factory.mktemp("fine-tuning")
    texts = load_documents("stdlib")["validation"]["text"][:50]
    tokenizer = train_tokenizer(texts, vocab_size=400)
    torch.manual_seed(0)
    config = LSGPTConfig(vocab_size=400, hidden_size=48, num_hidden_layers=2, num_attention_heads=6, sliding_window=8)
    LSGPTForCausalLM(config).save_pretrained(folder / "runs" / "demo")
    tokenizer.save_pretrained(folder / "runs" / "demo")
    (folder / "notes.txt").write_text("\n\n".join("\n\n".join(texts).split("\n\n")[:60]), encoding="utf-8")
    printed = [fresh.run("-c", block, cwd=folder) for block in BLOCKS]
    (folder / "printed.txt").write_text("".join(printed), encoding="utf-8")
    return folder


def log_history(folder):
    """What the `Trainer` wrote into its last checkpoint."""
    (state,) = folder.glob("checkpoint-*/trainer_state.json")
    return json.loads(state.read_text(encoding="utf-8"))["log_history"]


def logits_of(model, folder):
    inputs = AutoTokenizer.from_pretrained(folder / "runs" / "demo")("def", return_tensors="pt")
    with torch.no_grad():
        return model(**inputs).logits


def test_full_fine_tuning_lowers_the_loss_on_held_out_paragraphs(folder):
    printed = (folder / "printed.txt").read_text(encoding="utf-8")
    losses = json.loads(re.search(r"^\[\d.*\]$", printed, re.MULTILINE).group())
    assert len(losses) == 4  # before, and after each epoch
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] - 0.02
    assert any("max_logit" in log for log in log_history(folder / "runs" / "notes"))


def test_saved_folders_load_in_a_fresh_process_without_the_package(folder):
    folders = [folder / "runs" / "notes", folder / "runs" / "notes-merged"]
    # A process of its own and no fork: what the code of a checkpoint imports is the point.
    subprocess.run([sys.executable, "-c", LOAD_WITHOUT_LSGPT, *folders], cwd=folder, check=True)
    for saved in folders:
        assert (saved / "modeling_lsgpt.py").is_file()
        model = AutoModelForCausalLM.from_pretrained(saved)
        assert type(model) is LSGPTForCausalLM
        assert torch.equal(torch.load(saved / "logits.pt"), logits_of(model, folder))


def test_the_merged_checkpoint_is_the_base_with_the_adapter_added(folder):
    base, merged = (load_file(folder / "runs" / name / "model.safetensors") for name in ("demo", "notes-merged"))
    adapter = load_file(folder / "runs" / "notes-lora" / "adapter_model.safetensors")
    assert all("lora_" in name for name in adapter)
    assert sum(x.numel() for x in adapter.values()) < 0.05 * sum(x.numel() for x in base.values())
    assert base.keys() == merged.keys()
    for name, weight in base.items():
        if any(projection in name for projection in PROJECTIONS):
            a, b = (adapter[f"base_model.model.{name.replace('weight', f'lora_{x}.weight')}"] for x in "AB")
            assert (b @ a).abs().max() > 1e-4
            torch.testing.assert_close(merged[name], weight + b @ a)  # lora_alpha / r is 1
        else:
            assert torch.equal(merged[name], weight), name
    assert any("max_logit" in log for log in log_history(folder / "runs" / "notes-lora"))

    models = [AutoModelForCausalLM.from_pretrained(folder / "runs" / name) for name in ("demo", "notes-merged")]
    plain = logits_of(models[0], folder)
    adapted = logits_of(PeftModel.from_pretrained(models[0], folder / "runs" / "notes-lora"), folder)
    torch.testing.assert_close(logits_of(models[1], folder), adapted)
    assert (adapted - plain).abs().max() > 1e-4


def test_packed_paragraphs_have_the_same_loss(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder / "runs" / "demo")
    model = AutoModelForCausalLM.from_pretrained(folder / "runs" / "demo")
    rows = [tokenizer(text + tokenizer.eos_token) for text in ("import os " * 20, "def", "class A:\n" * 9)]
    padded = DataCollatorForLanguageModeling(tokenizer, mlm=False)([dict(row) for row in rows])
    packed = DataCollatorWithFlattening()([{"input_ids": row["input_ids"]} for row in rows])
    assert packed["input_ids"].shape[0] == 1 and packed["input_ids"].numel() < padded["input_ids"].numel()
    torch.testing.assert_close(model(**packed).loss, model(**padded).loss)


class Expect(LogitTelemetryCallback):
    """Measures by itself, at the beginning of each step, what the callback is to log."""

    def __init__(self, input_ids):
        super().__init__(every_n_steps=1)
        self.input_ids = input_ids
        self.expected = []

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        maxima = measure_max_logits(model, input_ids=self.input_ids)
        self.expected.append({"max_logit_global": maxima[:, :2].max(), "max_logit_local": maxima[:, 2:].max()})
        super().on_step_begin(args, state, control, model=model, **kwargs)


def train_adapter(model, folder, **arguments):
    """A LoRA run in which every batch is the whole data."""
    torch.manual_seed(1)
    input_ids = torch.randint(97, (4, 40))
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules=PROJECTIONS))
    expect = Expect(input_ids)
    trainer = Trainer(
        model,
        TrainingArguments(
            folder,
            max_steps=4,
            per_device_train_batch_size=4,
            learning_rate=1e-2,
            report_to="none",
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            **arguments,
        ),
        train_dataset=Dataset.from_dict({"input_ids": input_ids.tolist(), "labels": input_ids.tolist()}),
        callbacks=[expect],
    )
    trainer.train()
    return trainer, expect.expected


@pytest.mark.parametrize("checkpointing", [None, {"use_reentrant": False}, {"use_reentrant": True}])
def test_lora_changes_the_adapter_only_and_its_logits_are_logged(tiny_model, tmp_path, checkpointing):
    before = tiny_model().state_dict()
    name, is_set = "activation_checkpointing", checkpointing is not None
    trainer, expected = train_adapter(tiny_model(), tmp_path, **{name: is_set, f"{name}_kwargs": checkpointing})

    after = {name: p for name, p in trainer.model.get_base_model().state_dict().items() if "lora_" not in name}
    after = {name.replace("base_layer.", ""): weight for name, weight in after.items()}
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    trained = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 4 * 2 and all("lora_" in name for name in trained)
    assert all(p.abs().max() > 0 for p in trained.values())  # every `lora_B` began at zero

    logged = [log for log in trainer.state.log_history if "max_logit" in log]
    assert len(logged) == len(expected) == 4
    for log, maxima in zip(logged, expected):
        for name, value in maxima.items():
            assert log[name] == pytest.approx(value.item(), rel=1e-5)
    assert logged[3]["max_logit"] != pytest.approx(logged[0]["max_logit"], rel=1e-3)  # the adapter's share is in it

    trainer.save_model(tmp_path / "adapter")
    again = PeftModel.from_pretrained(tiny_model(), tmp_path / "adapter")
    inputs = torch.randint(97, (2, 30))
    with torch.no_grad():
        wanted = trainer.model.eval()(inputs).logits
        assert torch.equal(again(inputs).logits, wanted)
        torch.testing.assert_close(again.merge_and_unload()(inputs).logits, wanted, rtol=1e-4, atol=1e-4)

    if checkpointing:
        plain, _ = train_adapter(tiny_model(), tmp_path)
        for name, p in plain.model.named_parameters():
            torch.testing.assert_close(dict(trainer.model.named_parameters())[name], p)


def test_checkpoints_in_bfloat16_are_trained_in_float32(tiny_model, tmp_path):
    tiny_model(torch.bfloat16).save_pretrained(tmp_path)
    options = ["--model_name_or_path", str(tmp_path), "--block_size", "32", "--use_cpu", "true"]
    arguments = parse_arguments("finetune", options)
    model = build_model(arguments, arguments.build_config(), train_tokenizer([], 258))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
