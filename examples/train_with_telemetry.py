"""
Trains a small LSGPT with Transformers' own `Trainer`, and watches the largest attention logit of every head.

    python examples/train_with_telemetry.py notes.txt  # a file, a folder or a dataset; without one, Python's library

The callbacks work with any Hugging Face decoder.
"""

import argparse

from transformers import Trainer, TrainingArguments

from lsgpt import LSGPTConfig, LSGPTForCausalLM
from lsgpt.training import LogitTelemetryCallback, StopOnBadLossCallback
from lsgpt.training.data import collate_blocks, load_documents, pack, tokenize, train_tokenizer


parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
parser.add_argument("text", nargs="?", default="stdlib", help="what to train on; default: %(default)s")
parser.add_argument("--output", default="runs/telemetry", help="folder of the model; default: %(default)s")
parser.add_argument("--steps", type=int, default=1000, help="number of steps; default: %(default)s")
options = parser.parse_args()

documents = load_documents(options.text)
tokenizer = train_tokenizer(documents["train"]["text"], vocab_size=4096)
blocks = {name: pack(tokenize(split, tokenizer), block_size=256) for name, split in documents.items()}

config = LSGPTConfig(
    vocab_size=len(tokenizer),
    hidden_size=192,
    num_hidden_layers=4,
    num_attention_heads=6,
    sliding_window=50,  # of all heads but the first, which is global
    position_embedding_type="rope",
)
trainer = Trainer(
    model=LSGPTForCausalLM(config),
    args=TrainingArguments(
        options.output,
        max_steps=options.steps,
        learning_rate=2e-3,
        warmup_steps=max(1, options.steps // 20),
        logging_steps=max(1, options.steps // 20),
        report_to="none",
    ),
    train_dataset=blocks["train"],
    eval_dataset=blocks["validation"].select(range(min(64, len(blocks["validation"])))),
    data_collator=collate_blocks,
    processing_class=tokenizer,
    callbacks=[
        LogitTelemetryCallback(every_n_steps=10, threshold=100.0, on_explosion="stop"),
        StopOnBadLossCallback(),
    ],
)
trainer.train()
trainer.save_model()
for log in trainer.state.log_history:
    if "max_logit" in log:
        print(f"step {log['step']}: largest logit {log['max_logit']:.1f}")
print(f"validation loss {trainer.evaluate()['eval_loss']:.3f}; the model is in {options.output}")
