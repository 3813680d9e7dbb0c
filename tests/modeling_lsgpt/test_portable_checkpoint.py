"""A checkpoint carries its code: it loads, and computes the same bits, where this package cannot be imported."""

import json

import fresh
import pytest
import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from lsgpt import LSGPTForCausalLM, LSGPTForSequenceClassification, LSGPTForTokenClassification, LSGPTModel
from lsgpt.conversion import convert


# Runs in a process of its own. The finder makes `import lsgpt` fail as it does where the package is not installed.
WITHOUT_LSGPT = """
import sys

class Uninstalled:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("lsgpt", "lsgpt_cli"):
            raise ModuleNotFoundError(f"No module named {name!r}")

sys.meta_path.insert(0, Uninstalled())

import torch
from transformers import %(auto)s
inputs, results = torch.load("inputs.pt"), []
for folder in sys.argv[1:]:
    model = %(auto)s.from_pretrained(folder, trust_remote_code=True).eval()
    assert type(model).__module__.startswith("transformers_modules"), type(model).__module__
    with torch.no_grad():
        results.append({"logits": model(inputs).logits})
        if hasattr(model, "generate"):
            results[-1]["text"] = model.generate(inputs, max_new_tokens=20, do_sample=False)
torch.save(results, "results.pt")
"""


def run_without_lsgpt(auto_class, folders, inputs, tmp_path):
    """What the checkpoint in each folder computes, all in one process, because starting takes longest."""
    torch.save(inputs, tmp_path / "inputs.pt")
    code = WITHOUT_LSGPT % {"auto": auto_class}
    fresh.run("-c", code, *folders, cwd=tmp_path)
    return torch.load(tmp_path / "results.pt")


ROPE = {"position_embedding_type": "rope", "num_global_heads": [0, 2]}


@pytest.mark.parametrize("values", [{}, {**ROPE, "norm_type": "rms_norm", "gated_mlp": True, "attention_sinks": True}])
def test_trainers_checkpoint_loads_without_the_package(tiny_model, tmp_path, values):
    model = tiny_model(**values).train()
    blocks = Dataset.from_dict({"input_ids": torch.randint(97, (8, 30)).tolist()})
    blocks = blocks.map(lambda row: {"labels": row["input_ids"]})
    arguments = TrainingArguments(
        tmp_path / "run", max_steps=3, save_steps=2, per_device_train_batch_size=2, use_cpu=True, report_to=[]
    )
    trainer = Trainer(model, arguments, train_dataset=blocks)
    trainer.train()
    trainer.save_model(tmp_path / "final")
    sizes = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2}
    llama = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=6, num_key_value_heads=2, head_dim=10))
    llama.save_pretrained(tmp_path / "llama")
    convert(tmp_path / "llama", tmp_path / "converted")

    inputs = torch.randint(97, (2, 15))
    folders = [tmp_path / "final", tmp_path / "run" / "checkpoint-2", tmp_path / "converted"]
    for folder, theirs in zip(folders, run_without_lsgpt("AutoModelForCausalLM", folders, inputs, tmp_path)):
        ours = LSGPTForCausalLM.from_pretrained(folder).eval()
        files = {path.name for path in folder.iterdir()}
        assert files >= {"model.safetensors", "config.json", "generation_config.json"}
        parts = ("attention", "cache", "configuration", "linear", "loss", "modeling", "visibility")
        assert files >= {f"{part}_lsgpt.py" for part in parts}
        with torch.no_grad():
            assert torch.equal(theirs["logits"], ours(inputs).logits)
        assert torch.equal(theirs["text"], ours.generate(inputs, max_new_tokens=20, do_sample=False))


def test_a_language_model_becomes_a_classifier_without_the_package(tiny_model, tiny_config, tmp_path):
    """Any Auto class finds its code, whichever model was saved."""
    tiny_model(pad_token_id=0).save_pretrained(tmp_path / "model")
    auto_map = json.loads((tmp_path / "model" / "config.json").read_text(encoding="utf-8"))["auto_map"]
    assert len(auto_map) == 5
    classifier = LSGPTForSequenceClassification(tiny_config(pad_token_id=0, num_labels=3)).eval()
    classifier.save_pretrained(tmp_path / "classifier")
    inputs, folders = torch.randint(1, 97, (2, 15)), [tmp_path / "model", tmp_path / "classifier"]
    first, second = run_without_lsgpt("AutoModelForSequenceClassification", folders, inputs, tmp_path)
    assert first["logits"].shape == (2, 2)
    with torch.no_grad():
        assert torch.equal(second["logits"], classifier(inputs).logits)


@pytest.mark.parametrize("cls", [LSGPTModel, LSGPTForTokenClassification])
def test_other_models_carry_their_code_too(tiny_config, tmp_path, cls):
    cls(tiny_config()).save_pretrained(tmp_path)
    assert (tmp_path / "modeling_lsgpt.py").is_file()
    auto_map = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))["auto_map"]
    assert f"modeling_lsgpt.{cls.__name__}" in auto_map.values()
