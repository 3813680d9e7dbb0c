"""Trains with the stock `Trainer`, in as many processes as a launcher starts: `python train_script.py FOLDER`.

The rows of an optimizer step are the same for one process and for several, also if these share rows. On the CPU,
whatever the machine has.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from lsgpt import LSGPTConfig, LSGPTForCausalLM
from lsgpt.training import (
    AveragedWeightsCallback,
    ContextParallelismConfig,
    LogitTelemetryCallback,
    LSGPTTrainer,
    SaveOnSignalCallback,
    StopOnBadLossCallback,
)
from lsgpt.training.healing import measure_perplexity


STEPS, BATCH_SIZE, ACCUMULATION = 6, 4, 2


def rows() -> list[dict]:
    """Rows whose numbers of labels differ: a mean over processes is not the mean over tokens."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(97, (STEPS * BATCH_SIZE * ACCUMULATION, 24), generator=generator).tolist()
    return [{"input_ids": row, "labels": [-100] * (7 * i % 20) + row[7 * i % 20 :]} for i, row in enumerate(ids)]


class EndInTheSecondStep(TrainerCallback):
    """Sends SIGTERM to its own process."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def train(folder: str | Path, kind: str):
    """
    A run of 6 steps; leaves checkpoints and `history.json` in `folder`. The runs `plain` and `resumed` average their
    weights and evaluate, except with DeepSpeed; `taught` evaluates, also at the start, and predicts.

    Args:
        folder: Where to.
        kind: `plain`; `resumed`, from the third step of the `plain` run beside it; `bad`, with an infinity in the last
            process at the third step; `signal`, with SIGTERM to the last process in the second step; `clip`, with
            QK-clip; `llama`, a Llama instead of LSGPT; or `taught`, by another model and with a stream of rows.
    """
    processes, size = (int(os.environ.get(name, 1)) for name in ("WORLD_SIZE", "PARALLELISM_CONFIG_CP_SIZE"))
    # DeepSpeed takes no word for the CPU, and goes there where there is nothing else.
    is_deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
    is_averaged = kind in ("plain", "resumed") and not is_deepspeed
    checkpoint = str(Path(folder).with_name("plain") / "checkpoint-3") if kind == "resumed" else None
    args = TrainingArguments(
        str(folder),
        resume_from_checkpoint=checkpoint,
        eval_strategy="steps" if is_averaged or kind == "taught" else "no",
        eval_steps=3,
        eval_on_start=kind == "taught",
        per_device_eval_batch_size=1,
        max_steps=STEPS,
        per_device_train_batch_size=BATCH_SIZE * size // processes,
        parallelism_config=ContextParallelismConfig() if size > 1 else None,
        gradient_accumulation_steps=ACCUMULATION,
        train_sampling_strategy="sequential",
        learning_rate=1e-2,
        adam_epsilon=1e-4,  # above rounding, which is all the gradient that the bias of a key has
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        logging_steps=1,
        save_steps=3,
        report_to="none",
        disable_tqdm=True,
        **({"ddp_backend": "gloo"} if is_deepspeed else {"use_cpu": True}),
    )
    torch.manual_seed(args.process_index)  # the weights of process 0 are those to train
    model = LSGPTForCausalLM(
        LSGPTConfig(
            vocab_size=97,
            hidden_size=48,
            num_hidden_layers=2,
            num_attention_heads=6,
            num_global_heads=2,
            sliding_window=8,
            max_position_embeddings=64,
            initializer_range=0.3,
            use_bias=kind == "clip",
        )
    )
    if kind == "llama":
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
        sizes = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 64}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=97, **sizes, **heads))
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        # Accelerate knows FSDP on accelerators only, and would use DDP here. Everything after this line is its own.
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    telemetry = LogitTelemetryCallback(1, threshold=8.0, on_explosion="clip" if kind == "clip" else "warn")
    trainer_class = LSGPTTrainer if kind == "taught" else Trainer
    callbacks = [telemetry, StopOnBadLossCallback()]
    # The Trainer's loss of an evaluation is a mean over batches: with as many labels each, that over rows.
    # Our own takes any number of rows, also if processes share those of the training.
    count = 7 if kind == "taught" else 8
    held_out = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in rows()[:count]]
    data = Dataset.from_list(rows()).to_iterable_dataset() if kind == "taught" else rows()
    trainer = trainer_class(model, args, train_dataset=data, eval_dataset=held_out, callbacks=callbacks)
    if is_averaged:
        AveragedWeightsCallback("ema", decay=0.5).attach(trainer)
    perplexity = None
    if kind == "taught":
        torch.manual_seed(2)
        trainer.teacher = LSGPTForCausalLM(model.config).eval()
        blocks = Dataset.from_dict({"input_ids": [row["input_ids"] for row in rows()[:7]]})
        perplexity = measure_perplexity(trainer.teacher, blocks, args)
    assert trainer.accelerator.num_processes == args.world_size == processes
    if kind == "bad" and args.process_index == processes - 1:
        model.model.layers[0].mlp.down_proj.register_forward_hook(
            lambda module, inputs, output: output * (float("inf") if trainer.state.global_step == 2 else 1.0)
        )
    if kind == "signal":
        trainer.add_callback(SaveOnSignalCallback())
        if args.process_index == processes - 1:
            trainer.add_callback(EndInTheSecondStep())
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model()
    parameter = type(model.lm_head.weight).__name__  # which a prediction with FSDP2 leaves whole
    predicted = trainer.predict(held_out).predictions.shape if kind == "taught" else None
    if trainer.is_world_process_zero():
        how = {
            "processes": processes,
            "model": type(trainer.model_wrapped).__name__,
            "block": type(model.model.layers[0]).__name__,
            "parameter": parameter,
        }
        history = [log for log in trainer.state.log_history if "loss" in log]
        names = ("step", "eval_loss", "eval_averaged_loss")
        logs = [log for log in trainer.state.log_history if "eval_loss" in log]
        evaluations = [{name: log[name] for name in names if name in log} for log in logs]
        result = {"how": how, "history": history, "evaluations": evaluations, "perplexity": perplexity}
        result["predicted"] = predicted
        Path(folder, "history.json").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    for kind in sys.argv[2:]:
        train(Path(sys.argv[1], kind), kind)
