"""
Fine-tunes an LSGPT on your text with TRL and a LoRA adapter, and merges the adapter into a checkpoint.

    pip install trl peft
    lsgpt train                                                   # makes runs/demo, or take any other checkpoint
    python examples/fine_tune_with_trl_and_peft.py runs/demo notes.txt

Paragraphs of the text, separated by empty lines, are packed into rows; attention stays inside each of them.
"""

import argparse

from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

import lsgpt  # noqa: F401 (registers LSGPT with Transformers)
from lsgpt.training import LogitTelemetryCallback


parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
parser.add_argument("model", help="a checkpoint with its tokenizer")
parser.add_argument("text", help="a text file")
parser.add_argument("--output", default="runs/tuned", help="folder of the merged model; default: %(default)s")
parser.add_argument("--epochs", type=float, default=3, help="passes over the text; default: %(default)s")
parser.add_argument("--max-length", type=int, default=256, help="tokens in a row; default: %(default)s")
options = parser.parse_args()

data = load_dataset("text", data_files=options.text, sample_by="paragraph", split="train")
parts = data.train_test_split(test_size=0.1, seed=0)
trainer = SFTTrainer(
    model=options.model,
    args=SFTConfig(
        f"{options.output}-adapter",
        num_train_epochs=options.epochs,
        learning_rate=1e-3,
        max_length=options.max_length,
        packing=True,
        eval_strategy="epoch",
        eval_on_start=True,
        bf16=False,  # for the CPU
        report_to="none",
    ),
    train_dataset=parts["train"],
    eval_dataset=parts["test"],
    peft_config=LoraConfig(task_type="CAUSAL_LM", r=8, target_modules="all-linear"),
    callbacks=[LogitTelemetryCallback(every_n_steps=10)],
)
trainer.train()
losses = [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log]
print(f"loss on held-out paragraphs: {losses[0]:.3f} before, {losses[-1]:.3f} after")

trainer.model.merge_and_unload().save_pretrained(options.output)
tokenizer = AutoTokenizer.from_pretrained(options.model)
tokenizer.save_pretrained(options.output)
model = AutoModelForCausalLM.from_pretrained(options.output)
text = model.generate(**tokenizer("The ", return_tensors="pt"), max_new_tokens=30, pad_token_id=tokenizer.eos_token_id)
print(tokenizer.decode(text[0]))
