"""
Makes the KV cache of a pretrained model smaller, heals the model with the original as teacher, and compares them.

    python examples/convert_and_heal.py HuggingFaceTB/SmolLM2-135M-Instruct books

The model is one that `lsgpt convert` takes: a folder, a GGUF file or a name on the Hub. The text is a file or a
folder, ideally similar to what the model will see in use.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from lsgpt.conversion import convert, load_pretrained, perplexity
from lsgpt.training import parse_arguments, run


parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
parser.add_argument("model", help="the pretrained model")
parser.add_argument("text", help="text to choose heads on, and to train on")
parser.add_argument("--output", default="runs/smaller", help="folder to write into; default: %(default)s")
parser.add_argument("--cache-share", type=float, default=0.2, help="of the original's cache; default: %(default)s")
parser.add_argument(
    "--blocks", type=int, default=4, help="blocks to choose on, and to compare on; default: %(default)s"
)
parser.add_argument("--steps", type=int, default=110, help="steps of training; default: %(default)s")
options = parser.parse_args()

converted, healed = Path(options.output, "converted"), Path(options.output, "healed")
convert(options.model, converted, text=options.text, cache_share=options.cache_share, max_blocks=options.blocks)
print(f"{converted / 'report.md'} shows which heads stayed global, and what that costs.")

config = AutoModelForCausalLM.from_pretrained(converted).config
fields = {
    "model_name_or_path": converted,
    "teacher": options.model,
    "dataset_name": options.text,
    "output_dir": healed,
    "block_size": min(4096, config.max_position_embeddings),
    "max_steps": options.steps,
    "max_eval_blocks": options.blocks,
}
trainer = run(parse_arguments("heal", [f"--{name}={value}" for name, value in fields.items()]))

# Held out: heads were chosen, and the model was healed, on other text.
blocks = [torch.tensor(block["input_ids"]) for block in trainer.eval_dataset]
context = min(8192, config.max_position_embeddings)
saved = config.kv_cache_bytes(context) / config.equal_mhsa().kv_cache_bytes(context)
models = {"original": load_pretrained(options.model), "converted": converted, "healed": healed}
for name, model in models.items():
    model = model if name == "original" else AutoModelForCausalLM.from_pretrained(model)
    cache = 1.0 if name == "original" else saved
    print(f"{name:<12}perplexity {perplexity(model, blocks):8.2f}   KV cache at {context:,} tokens {cache:6.1%}")
