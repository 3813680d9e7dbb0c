"""A training run: from arguments to a folder with a checkpoint that the Auto classes load."""

import math
from pathlib import Path

import yaml
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
    set_seed,
)

from .arguments import DataArguments, ModelArguments, check_arguments, resolve_recipe
from .callbacks import MetricsFileCallback
from .data import load_documents, pack, tokenize, train_tokenizer
from .report import write_report


def run(model_args: ModelArguments, data_args: DataArguments, training_args: TrainingArguments) -> Trainer:
    """
    Trains a model and leaves everything about it in `training_args.output_dir`: the checkpoint with its code and
    tokenizer, `metrics.jsonl`, `recipe.yaml`, `report.md` and `loss.png`.

    Returns:
        The trainer, with the trained model.

    Raises:
        ValueError: Arguments that cannot be, see `check_arguments`.
    """
    recipe = resolve_recipe(model_args, data_args, training_args)
    trainer = build_trainer(model_args, data_args, training_args)
    train(trainer, recipe)
    return trainer


def build_trainer(model_args: ModelArguments, data_args: DataArguments, training_args: TrainingArguments) -> Trainer:
    """Loads and tokenizes the text, and builds the model and its `Trainer`. Raises `ValueError` as `run` does."""
    check_arguments(model_args, data_args, training_args)
    set_seed(training_args.seed)
    config = model_args.build_config()
    print(f"Reading {data_args.dataset_name} and training a tokenizer of {config.vocab_size:,} tokens", flush=True)
    documents = load_documents(data_args.dataset_name)
    tokenizer = train_tokenizer(documents["train"]["text"], config.vocab_size)
    blocks = {split: pack(tokenize(texts, tokenizer), data_args.block_size) for split, texts in documents.items()}

    for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, token, getattr(tokenizer, token))
    model = AutoModelForCausalLM.from_config(config)
    print(
        f"Training {model.num_parameters() / 1e6:.1f}M parameters on {len(blocks['train']):,} blocks of "
        f"{data_args.block_size} tokens; everything goes to {training_args.output_dir}",
        flush=True,
    )
    return Trainer(
        model=model,
        args=training_args,
        train_dataset=blocks["train"],
        eval_dataset=blocks["validation"],
        processing_class=tokenizer,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        callbacks=[MetricsFileCallback()],
    )


def train(trainer: Trainer, recipe: dict):
    """Trains, evaluates, saves, reports, and shows what to do next; `recipe` as from `resolve_recipe`."""
    model, prompt = trainer.model, recipe["prompt"]
    folder = Path(trainer.args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")

    speed = trainer.train().metrics
    history = trainer.state.log_history
    evaluations = [log for log in history if "eval_loss" in log and log["step"] == trainer.state.global_step]
    eval_loss = (evaluations or [trainer.evaluate()])[-1]["eval_loss"]
    perplexity = math.exp(eval_loss) if eval_loss < 700 else math.inf
    trainer.log({"eval_perplexity": perplexity})
    trainer.save_model()

    sample = generate_sample(model, trainer.processing_class, prompt)
    tokens_per_second = speed["train_samples_per_second"] * recipe["block_size"]
    results = {
        "evaluation loss (nats per token)": f"{eval_loss:.4f}",
        "evaluation perplexity": f"{perplexity:.2f}",
        "parameters": f"{model.num_parameters():,}",
        "optimizer steps": f"{trainer.state.global_step:,}",
        "training time, evaluation included (s)": f"{speed['train_runtime']:.1f}",
        "training tokens per second": f"{tokens_per_second:,.0f}",
    }
    report = write_report(folder, recipe, results, history, sample)
    print(f"""
Evaluation loss {eval_loss:.3f}, perplexity {perplexity:.1f}. The model continues {prompt!r}:

{sample}

Next:
  {report} (the loss curve and every setting)
  lsgpt generate {folder} {prompt!r}
  lsgpt info {folder}

  import lsgpt
  from transformers import AutoModelForCausalLM, AutoTokenizer
  model = AutoModelForCausalLM.from_pretrained("{folder}")
  tokenizer = AutoTokenizer.from_pretrained("{folder}")""")


def generate_sample(model, tokenizer, prompt: str, max_new_tokens: int = 100) -> str:
    """Continues `prompt` by up to `max_new_tokens` sampled tokens, as far as the model has positions."""
    model.eval()
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False).to(model.device)
    room = model.config.max_position_embeddings - inputs["input_ids"].shape[1]
    generated = model.generate(
        **inputs, max_new_tokens=min(max_new_tokens, room), do_sample=True, temperature=0.8, top_k=50
    )
    return tokenizer.decode(generated[0], skip_special_tokens=True)
