"""A training run, from its arguments to a folder with a checkpoint that the Auto classes can load."""

import math
import shlex
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import yaml
from accelerate.utils import broadcast_object_list
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from torch.distributed.fsdp import StateDictType
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.trainer_utils import align_special_tokens

from lsgpt.configuration import LSGPTConfig
from lsgpt.telemetry import measure_max_logits
from lsgpt.utilities import encode_prompt, load_complete, suggest, with_unit
from lsgpt.utilities.environment import describe_environment, peak_memory, reset_peak_memory

from .arguments import Arguments, DataArguments, RunArguments
from .averaging import AveragedWeightsCallback, check_updates, initial_share
from .callbacks import MetricsFileCallback, SaveOnSignalCallback, StepTimerCallback, StopOnBadLossCallback
from .data import (
    ALGORITHMS,
    collate_blocks,
    first_characters,
    load_documents,
    load_tokenizer,
    pack,
    shuffle_blocks,
    tokenize,
    train_tokenizer,
)
from .folders import make_folder
from .healing import check_teacher, choose_trainable, load_teacher, measure_perplexity
from .hidden_numbers import HideNumbers
from .metrics import LanguageModelingMetrics, token_losses
from .report import points_of, write_report
from .results import RunResult
from .resuming import TOKENS, check_resuming
from .stabilizers import IN_FLOAT32, adagc_optimizer, attend_in_float32
from .telemetry import LogitTelemetryCallback
from .trainer import LSGPTTrainer


STREAM_BUFFER = 1000
"""Number of blocks in the shuffle buffer of a stream."""

TOKENIZER_CHARACTERS = 20_000_000
"""A tokenizer is trained on at most this many characters of the text."""

MAX_INITIAL_SHARE = 0.05
"""A run warns if the untrained weights will have a larger share of the average."""

NEUTRAL_WEIGHTS = (".sinks", ".bias", ".q_norm.weight", ".k_norm.weight")
"""Weights that fine-tuning may add to a checkpoint: their initial values are not random."""


def check_evaluation(args: TrainingArguments, is_averaged: bool):
    """Raises `ValueError` for options with which evaluations would fail, or lack figures."""
    for field, needed in (
        ("prediction_loss_only", False),
        ("batch_eval_metrics", False),
        ("eval_do_concat_batches", True),
    ):
        if (value := getattr(args, field)) != needed:
            raise ValueError(
                f"`{field}` must be {str(needed).lower()}; got {value}: figures need the loss of each token"
            )
    for field in ("bf16_full_eval", "fp16_full_eval"):
        if getattr(args, field):
            raise ValueError(
                f"`{field}` must be false; got True: the last evaluation would convert the weights. With `bf16` or "
                "`fp16`, evaluations have lower precision, too"
            )
    if args.label_names not in (None, ["labels"]):
        raise ValueError(f"`label_names` must be labels; got {args.label_names}")
    figures = ["loss", "perplexity", "bits_per_byte"]
    known = [f"eval_{name}" for name in figures + [f"averaged_{name}" for name in figures] * is_averaged]
    if (chosen := args.metric_for_best_model) is not None and f"eval_{chosen.removeprefix('eval_')}" not in known:
        more = "" if is_averaged else "; with `averaging`, there are more"
        raise ValueError(
            f"`metric_for_best_model` must be one of {', '.join(known)}{more}; got {chosen!r}{suggest(chosen, known)}"
        )


def run(arguments: Arguments, save_card: Callable[..., Any] | None = None) -> LSGPTTrainer:
    """
    Trains a model and writes everything about it to `arguments.training.output_dir`: the checkpoint with its code and
    tokenizer, `metrics.jsonl`, `results.json`, `recipe.yaml`, `report.md` and its plots. Returns the trainer, with the
    trained model. Raises `ValueError` if arguments are invalid, or the data does not fit them.

    Args:
        arguments: What `parse_arguments` returns.
        save_card: Writes the model card if the run is pushed to the Hub, see `LSGPTTrainer`.
    """
    trainer = build_trainer(arguments, save_card)
    train(trainer, arguments)
    return trainer


def build_trainer(arguments: Arguments, save_card: Callable[..., Any] | None = None) -> LSGPTTrainer:
    """Loads and tokenizes the text, and builds the model and its `LSGPTTrainer`. Raises `ValueError` as `run` does."""
    args = arguments.training
    check_evaluation(args, arguments.run.averaging is not None)
    if args.resume_from_checkpoint:
        check_resuming(args.resume_from_checkpoint, arguments)
    optimizer, callbacks = adagc_optimizer(args) if arguments.uses_adagc else None, _callbacks(arguments.run)
    if args.process_index == 0:
        make_folder(args)
    set_seed(args.seed)
    config = arguments.build_config()
    with args.main_process_first(desc="loading"):  # the other processes find everything in its cache
        documents = load_texts(arguments.data)
    tokenizer = get_tokenizer(arguments, config, documents)
    teacher = _get_teacher(arguments, config, tokenizer) if arguments.model.teacher else None
    with args.main_process_first(desc="tokenizing"):
        blocks = make_blocks(arguments, documents, tokenizer)

    model = build_model(arguments, config, tokenizer)
    adapters = choose_trainable(model, arguments.model.trainable)
    if args.process_index == 0:
        total, trained = model.num_parameters(), model.num_parameters(only_trainable=True)
        count = with_unit(total) if trained == total else f"{with_unit(trained)} of {with_unit(total)}"
        size = f"{_describe_size(blocks['train'], args.dataloader_num_workers)} of {arguments.data.block_size} tokens"
        print(f"Training {count} parameters on {size}; everything goes to {args.output_dir}", flush=True)
    trainer = LSGPTTrainer(
        model=model,
        args=args,
        train_dataset=blocks["train"],
        eval_dataset=blocks["validation"],
        processing_class=tokenizer,
        data_collator=collate_blocks,
        compute_metrics=LanguageModelingMetrics(tokenizer),
        preprocess_logits_for_metrics=token_losses,
        callbacks=callbacks,
        optimizer_cls_and_kwargs=optimizer,
        z_loss=arguments.run.z_loss,
        teacher=teacher,
        sink_learning_rate=arguments.model.sink_learning_rate,
        save_card=save_card,
    )
    # `Trainer` says only when it trains that a package or setting is missing. (Asking it for a layerwise optimizer
    # would already make the backward pass take steps.)
    if optimizer is None and not args.optim.endswith("layerwise"):
        trainer.get_optimizer_cls_and_kwargs(args, model)
    trainer.adapters = adapters
    if (averaging := arguments.run.averaging) is not None:
        max_steps = args.max_steps
        if max_steps == -1:  # only now known how many steps the epochs have
            *_, max_steps = trainer.set_initial_training_values(args, trainer.get_train_dataloader())
            check_updates(averaging, max_steps)
        share = initial_share(averaging, max_steps)
        if share > MAX_INITIAL_SHARE and not arguments.model.model_name_or_path:
            print(
                f"The average of {max_steps} steps will keep {share:.0%} of the untrained weights. Use "
                "`--averaging ema-warmup`, or train for more steps",
                flush=True,
            )
    return trainer


def _describe_size(blocks: Dataset | IterableDataset, num_workers: int) -> str:
    if isinstance(blocks, Dataset):
        return f"{len(blocks):,} blocks"
    shards, idle = blocks.num_shards, max(num_workers - blocks.num_shards, 0)
    return f"a stream of blocks (files or other shards: {shards}; data-loader workers: {num_workers}, {idle} idle)"


def _get_teacher(arguments: Arguments, config: LSGPTConfig, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    name, data, args = arguments.model.teacher, arguments.data, arguments.training
    teacher = load_teacher(name, args)
    check_teacher(teacher, name, tokenizer, config.vocab_size, data.block_size, data.respect_boundaries)
    if args.process_index == 0:
        logits = args.per_device_train_batch_size * data.block_size * config.vocab_size * teacher.dtype.itemsize
        size, batch = with_unit(teacher.get_memory_footprint(), "B"), with_unit(logits, "B")
        print(f"The teacher {name} takes {size} in each process, and its logits for a batch {batch}", flush=True)
    return teacher


def get_tokenizer(
    arguments: Arguments, config: LSGPTConfig, documents: DatasetDict | IterableDatasetDict
) -> PreTrainedTokenizerBase:
    """Returns the tokenizer of a run: the checkpoint's, the named one, or a trained one, equal in all processes."""
    data, args = arguments.data, arguments.training
    name = args.resume_from_checkpoint or arguments.model.model_name_or_path or data.tokenizer
    if name in ALGORITHMS:
        # One process trains it for all of them: trained twice, Unigram numbers the same tokens differently.
        tokenizer = make_tokenizer(data, config, documents) if args.process_index == 0 else None
        return broadcast_object_list([tokenizer])[0]
    return load_tokenizer(str(name), config.vocab_size)


def make_blocks(
    arguments: Arguments, documents: DatasetDict | IterableDatasetDict, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Dataset | IterableDataset]:
    """
    Returns the packed blocks of the splits `train` and `validation`; the latter are never a stream. With a teacher, up
    to half of the training blocks hide numbers, see `HideNumbers`.
    """
    data, args = arguments.data, arguments.training
    blocks = {}
    for split, texts in documents.items():
        tokens = tokenize(texts, tokenizer)
        try:
            blocks[split] = pack(tokens, data.block_size, data.respect_boundaries)
        except ValueError as error:
            raise ValueError(f"cannot pack the {split} split: {error}") from error
        if split == "train" and arguments.model.teacher:
            blocks[split] = blocks[split].map(HideNumbers(tokenizer), features=blocks[split].features)
        if data.streaming and next(iter(blocks[split]), None) is None:
            raise ValueError(f"`dataset_name` must have a block of text; the {split} split of the stream has none")
    if data.max_eval_blocks:
        count = data.max_eval_blocks if data.streaming else min(data.max_eval_blocks, len(blocks["validation"]))
        blocks["validation"] = blocks["validation"].take(count)
    if data.streaming:
        seed = args.seed if args.data_seed is None else args.data_seed
        blocks["train"] = shuffle_blocks(blocks["train"], seed, STREAM_BUFFER)
        if not data.max_eval_blocks and args.process_index == 0:
            print("Reading the validation text to its end; `max_eval_blocks` limits it", flush=True)
        stream = blocks["validation"]  # read once, and not again for each evaluation
        blocks["validation"] = Dataset.from_list(list(stream), features=stream.features)
    return blocks


def load_texts(data: DataArguments) -> DatasetDict | IterableDatasetDict:
    """Loads the documents of the splits `train` and `validation`."""
    return load_documents(data.dataset_name, data.dataset_config_name, data.text_column, streaming=data.streaming)


def make_tokenizer(
    data: DataArguments, config: LSGPTConfig, documents: DatasetDict | IterableDatasetDict
) -> PreTrainedTokenizerBase:
    """Trains the tokenizer that `data` asks for."""
    print(f"Training a tokenizer of {config.vocab_size:,} tokens on {data.dataset_name}", flush=True)
    texts = (document["text"] for document in documents["train"])
    return train_tokenizer(first_characters(texts, TOKENIZER_CHARACTERS), config.vocab_size, data.tokenizer)


def build_model(arguments: Arguments, config: LSGPTConfig, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """
    Builds a model with new weights, or loads the checkpoint to fine-tune, in float32. Raises `ValueError` if the
    checkpoint lacks weights of the model, except `NEUTRAL_WEIGHTS`.
    """
    given = arguments.model.attn_implementation or ""
    engine, in_float32 = given.removesuffix(IN_FLOAT32), given.endswith(IN_FLOAT32)
    if not engine:
        soft_caps = "flex_attention" if torch.cuda.is_available() else "eager"
        engine = "sdpa" if config.attn_logit_softcapping is None else soft_caps
    if arguments.model.model_name_or_path:
        options = {"config": config, "attn_implementation": engine, "dtype": torch.float32}
        model = load_complete(arguments.model.model_name_or_path, NEUTRAL_WEIGHTS, **options)
    else:
        for token in TOKENS:
            setattr(config, token, getattr(tokenizer, token))
        model = AutoModelForCausalLM.from_config(config, attn_implementation=engine)
    if in_float32:
        attend_in_float32(model)
    return model


def _callbacks(run_args: RunArguments) -> list[TrainerCallback]:
    callbacks = [StopOnBadLossCallback(), SaveOnSignalCallback(), StepTimerCallback(), MetricsFileCallback()]
    if every_n_steps := run_args.max_logit_every_n_steps:
        measured = 1 if run_args.on_explosion == "clip" else every_n_steps
        options = {"on_explosion": run_args.on_explosion, "log_every_n_steps": every_n_steps}
        callbacks.append(LogitTelemetryCallback(measured, **options))
    if run_args.averaging is not None:
        callbacks.append(AveragedWeightsCallback(**run_args.averaging))  # after QK-clip, which changes the weights
    return callbacks


def _callback(trainer: LSGPTTrainer, callback_type: type) -> Any:
    return next((c for c in trainer.callback_handler.callbacks if isinstance(c, callback_type)), None)


def _check_sharding(trainer: LSGPTTrainer):
    """Raises `ValueError` if `Trainer` would not save the trained model, because FSDP keeps it in parts."""
    kind = trainer.accelerator.state.fsdp_plugin.state_dict_type if trainer.is_fsdp_enabled else None
    if kind not in (None, StateDictType.FULL_STATE_DICT):
        raise ValueError(
            "`fsdp_state_dict_type` must be FULL_STATE_DICT, or the trained model would not be saved; got "
            f"{kind.name}. Set it in the configuration of `accelerate launch`, as in configuration/launch/fsdp2.yaml"
        )


def _check_generation_config(trainer: LSGPTTrainer):
    """
    Raises `ValueError` if the generation config could not be saved after training, which would lose the weights.
    Transformers saves an invalid one only as it was loaded, but `Trainer` puts the tokenizer's special tokens into it.
    """
    align_special_tokens(trainer.model, trainer.processing_class)
    try:
        with TemporaryDirectory() as folder:
            trainer.model.generation_config.save_pretrained(folder)
    except ValueError as error:
        raise ValueError(
            f"the checkpoint's generation_config.json must be valid, to be saved again: {error}"
        ) from error


def train(trainer: LSGPTTrainer, arguments: Arguments) -> RunResult | None:
    """
    Trains, evaluates, saves, reports, and prints what to do next. Returns the results; `None` in processes other than
    the main one, and after SIGTERM, which ends the run with a checkpoint.
    """
    args = trainer.args
    folder = Path(args.output_dir)
    is_main = trainer.is_world_process_zero()
    _check_sharding(trainer)
    if is_main:
        _check_generation_config(trainer)
    if is_main and not args.resume_from_checkpoint:
        _write_recipe(folder, arguments)
    if args.resume_from_checkpoint:
        args.eval_on_start = False  # done at the first start; the checkpoint's log has it
        trainer.add_callback(_WriteRecipeCallback(arguments))
    teacher_perplexity = None
    if trainer.teacher is not None:
        teacher_perplexity = measure_perplexity(trainer.teacher, trainer.eval_dataset, args)
        if is_main:
            print(f"Perplexity of the teacher on the validation text: {teacher_perplexity:.2f}", flush=True)
    environment = describe_environment()  # with the commit that the run begins with
    reset_peak_memory()  # loading and tokenizing may have taken more than the training will
    seconds = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint).metrics["train_runtime"]
    if _callback(trainer, SaveOnSignalCallback).was_signalled:
        if is_main:
            command = shlex.join(["lsgpt", "train", "--resume_from_checkpoint", str(folder)])
            print(f"Saved step {trainer.state.global_step}. Resume with: {command}")
        return None
    if hasattr(trainer.optimizer, "eval"):  # evaluations do so, too: the averages of a schedule-free optimizer
        trainer.optimizer.eval()
    if trainer.adapters is not None:
        trainer.adapters.merge_and_unload()
    # Save the weights first, so that no later failure can lose them.
    trainer.save_model(_internal_call=True)  # like `save_model()`, but without a push, which waits for the report
    last_log = next((log for log in reversed(trainer.state.log_history) if "eval_loss" in log), {})
    is_of_these_weights = last_log.get("step") == trainer.state.global_step and not args.load_best_model_at_end
    if not is_of_these_weights or trainer.compute_metrics.loss_by_position is None:
        last_log = trainer.evaluate()
    results = None
    if is_main:
        results = _make_result(trainer, last_log, seconds, teacher_perplexity, environment)
        _report(trainer, arguments, results)
    if args.push_to_hub:
        trainer.push_to_hub()
    return results


class _WriteRecipeCallback(TrainerCallback):
    """
    Applies the recipe of a run that resumes to what the checkpoint has brought with it, and writes it only then, so
    that a mistake leaves that of before.
    """

    def __init__(self, arguments: Arguments):
        self.arguments = arguments

    def on_train_begin(self, args, state, control, **kwargs):
        state.compute_steps(args, state.max_steps)  # or those of the checkpoint would count, not those of the recipe
        if state.is_world_process_zero:
            _write_recipe(Path(args.output_dir), self.arguments)


def _write_recipe(folder: Path, arguments: Arguments):
    """Writes the recipe of a run that begins or resumes, and removes the results of an earlier end."""
    try:
        with (folder / "recipe.yaml").open("w" if arguments.training.resume_from_checkpoint else "x") as file:
            yaml.safe_dump(arguments.recipe, file, sort_keys=False)
    except FileExistsError as error:
        raise ValueError(
            f"`output_dir` must be different for each run; another one has just begun in {str(folder)!r}"
        ) from error
    (folder / "results.json").unlink(missing_ok=True)


def _report(trainer: LSGPTTrainer, arguments: Arguments, results: RunResult):
    """Writes and prints the main process's report on the finished run."""
    args, folder, prompt = trainer.args, Path(trainer.args.output_dir), results.prompt
    results.write(folder)  # before anything that could fail, such as plots
    unset_hf_deepspeed_config()  # or ZeRO-3 would shard this model, too, over processes that have ended
    # Load the model again: this works however the weights were sharded, and shows that the checkpoint loads.
    model = AutoModelForCausalLM.from_pretrained(folder).to(args.device)
    inputs = {name: value.to(args.device) for name, value in _evaluation_batch(trainer).items() if name != "labels"}
    max_logits = measure_max_logits(model, **inputs)
    diverged = results.outcome == "diverged"
    sample = "(nothing: the run diverged)" if diverged else generate_sample(model, trainer.processing_class, prompt)
    history = trainer.state.log_history
    report = write_report(folder, arguments.recipe, model.config, results, history, max_logits, sample)
    print(f"""
{results.sentence}. Evaluation loss {results.eval_loss:.3f}, perplexity {results.eval_perplexity:.1f}.
The model continues {prompt!r}:

{sample}

Next:
  {report} (curves, settings, versions)
  {shlex.join(["lsgpt", "generate", str(folder), prompt])}
  {shlex.join(["lsgpt", "info", str(folder)])}

  import lsgpt
  from transformers import AutoModelForCausalLM, AutoTokenizer
  model = AutoModelForCausalLM.from_pretrained({str(folder)!r})
  tokenizer = AutoTokenizer.from_pretrained({str(folder)!r})""")


def _make_result(
    trainer: LSGPTTrainer,
    evaluation: dict,
    seconds: float,
    teacher_perplexity: float | None,
    environment: dict[str, str],
) -> RunResult:
    state, timer = trainer.state, _callback(trainer, StepTimerCallback)
    telemetry = _callback(trainer, LogitTelemetryCallback)
    outcome, stopped_by = "finished", None
    if _callback(trainer, StopOnBadLossCallback).bad_step is not None:
        outcome = "diverged"
    elif telemetry is not None and telemetry.stop_step is not None:
        outcome, stopped_by = "stopped", "on_explosion"
    elif state.global_step < state.max_steps:
        outcome, stopped_by = "stopped", "a callback"
    perplexity = evaluation["eval_perplexity"]
    return RunResult(
        outcome=outcome,
        stopped_by=stopped_by,
        step=state.global_step,
        max_steps=state.max_steps,
        tokens=state.num_input_tokens_seen,
        tokens_per_second=timer.tokens_per_second,
        # The Trainer's `eval_loss` is a mean over batches, this one a mean over tokens.
        eval_loss=math.log(perplexity),
        eval_perplexity=perplexity,
        eval_bits_per_byte=evaluation["eval_bits_per_byte"],
        eval_averaged_perplexity=evaluation.get("eval_averaged_perplexity"),
        perplexity_before_training=next(
            (value for step, value in points_of(state.log_history, "eval_perplexity") if step == 0), None
        ),
        teacher_perplexity=teacher_perplexity,
        max_logit=largest([value for _, value in points_of(state.log_history, "max_logit")]),
        parameters=trainer.model.config.num_parameters(),
        peak_memory_bytes=peak_memory(),
        train_seconds=seconds,
        loss_by_position=trainer.compute_metrics.loss_by_position.tolist(),
        prompt=_first_words(trainer),
        environment=environment,
    )


def largest(values: list[float]) -> float | None:
    """Returns the maximum of the values: NaN if one of them is NaN, None if there are none."""
    return float(np.max(values)) if values else None


def _evaluation_batch(trainer: LSGPTTrainer) -> dict[str, torch.Tensor]:
    """Returns the first block of the evaluation data as a batch."""
    return collate_blocks(list(trainer.eval_dataset.take(1)))


def _first_words(trainer: LSGPTTrainer) -> str:
    """Returns the first three words of the evaluation data; the end-of-text token if it has none."""
    tokenizer = trainer.processing_class
    beginning = tokenizer.decode(_evaluation_batch(trainer)["input_ids"][0, :16], skip_special_tokens=True)
    return " ".join(beginning.split()[:3]) or tokenizer.eos_token


def generate_sample(model, tokenizer, prompt: str) -> str:
    """
    Continues `prompt` by up to 100 sampled tokens, as far as the model has positions. If the logits are not finite,
    the text is meaningless, but there is no error.
    """
    model.eval()
    positions = model.config.max_position_embeddings
    inputs = encode_prompt(tokenizer, prompt, truncation=True, max_length=positions - 1).to(model.device)
    room = positions - inputs["input_ids"].shape[1]
    options = {"do_sample": True, "temperature": 0.8, "top_k": 50, "remove_invalid_values": True}
    generated = model.generate(**inputs, max_new_tokens=min(100, room), **options)
    return tokenizer.decode(generated[0], skip_special_tokens=True)
