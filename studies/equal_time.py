"""Which model has the lower loss after an hour of one core?"""

import json
import math
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, TrainerCallback

from lsgpt.training import LSGPTTrainer
from lsgpt.training.callbacks import read_metrics
from lsgpt.utilities.plots import of_runs, plot_curves

from .comparisons import LOSS, Comparison, Metric, Runs
from .measurements import losses_by_context
from .study import ON_A_CORE, TrainingStudy, tabulate, thin, validation_blocks


CLOCK = "clock.json"
"""File in a checkpoint with the seconds that the run had used."""


class BudgetCallback(TrainerCallback):
    """
    Ends the training when its steps have used their seconds of processor time, and logs them with every loss. A busy
    machine takes no processor time from a run with one thread, but slows it down through shared caches and memory, so
    `wall_seconds` are recorded, too.
    """

    def __init__(self, budget: float):
        self.budget = budget
        self.used = self.wall = 0.0

    def on_train_begin(self, args, state, control, **kwargs):
        file = Path(args.output_dir) / f"checkpoint-{state.global_step}" / CLOCK
        if state.global_step:
            if not file.exists():
                raise ValueError(
                    f"{file} is missing, which holds the time that the run has used. Delete its folder, and the run "
                    "goes on from the checkpoint before"
                )
            self.used, self.wall = json.loads(file.read_text(encoding="utf-8"))

    def on_step_begin(self, args, state, control, **kwargs):
        self._began = (time.process_time(), time.perf_counter())

    def on_step_end(self, args, state, control, **kwargs):
        self.used += time.process_time() - self._began[0]
        self.wall += time.perf_counter() - self._began[1]
        if self.used >= self.budget:
            control.should_training_stop = True

    def on_save(self, args, state, control, **kwargs):
        file = Path(args.output_dir) / f"checkpoint-{state.global_step}" / CLOCK
        file.write_text(json.dumps([self.used, self.wall]), encoding="utf-8")

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs is not None and "loss" in logs:
            logs.update(cpu_seconds=self.used, wall_seconds=self.wall)


def rate_at(share: float) -> float:
    """The learning rate as a share of the highest when a share of the time is used: a warm-up, a cosine to a tenth."""
    if share < 0.02:
        return max(share / 0.02, 1e-3)
    progress = min((share - 0.02) / 0.98, 1.0)
    return 0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2


class EqualTime(TrainingStudy):
    name = "equal-time"
    title = "Equal time"
    question = """\
Local heads save time on long sequences, so that a model with few global heads can be trained on more text. Which
model has the lowest loss after the same time?"""
    protocol = """\
Models of 6 layers, hidden size 96, 6 heads of 16 dimensions, 2,048 tokens, windows of 50, rotary positions and
QK-norm, with one row in a step; all at a rate of 1.2e-3 (the paper's, multiplied by the ratio of the hidden sizes),
with a warm-up over 2% of the time and a cosine down to a tenth. `mhsa` has only global heads, `ls` one in each layer,
`layers` five layers of local heads and then one of global heads (as in Gemma 3), `local-only` no global head. Each is
trained for 3,600 seconds on one core: processor time of a process with one thread, in training steps alone. The
wall-clock time of the same steps is recorded. A run counts as undisturbed if it is at most 5% longer; runs that were
disturbed are repeated. Operations are those of docs/attention.md, three times the forward pass. Losses are those of
the whole validation text (about a million tokens), with shortened context those of 16,384 tokens. In earlier runs
with rotary positions, differences in loss had a standard deviation of about 0.03 nats between seeds."""
    comparisons = {
        "ls-mhsa": Comparison("paper: it is faster, and not worse", LOSS, "ls", "mhsa"),
        "ls-layers": Comparison("ours", LOSS, "ls", "layers", equal=True),
        "ls-local": Comparison("paper: 15 to 20% of perplexity", LOSS, "ls", "local-only"),
    }
    arms = {
        arm: {"config_overrides": {"num_global_heads": count}}
        for arm, count in (("mhsa", "all"), ("ls", 1), ("layers", [0] * 5 + [6]), ("local-only", 0))
    }
    recipe = "paper-v1"
    shape = {"vocab_size": 1024, "hidden_size": 96, "position_embedding_type": "rope", "qk_norm": True}
    fields = {
        **ON_A_CORE,
        "use_cpu": True,
        "config_overrides": shape,
        "learning_rate": 1.2e-3,
        "max_steps": 10_000_000,
        "save_steps": 500,
        "save_total_limit": 1,
        "max_logit_every_n_steps": 0,
    }
    hours = 12.0
    budget = 3600.0
    contexts = (16, 64, 256, 512, 2048)

    def change(self, trainer: LSGPTTrainer, arm: str):
        """Lets the time of one thread end the training, and set the learning rate."""
        torch.set_num_threads(1)
        clock = BudgetCallback(self.budget)
        trainer.callback_handler.callbacks.insert(0, clock)  # before the callback that writes the metrics

        def create_scheduler(num_training_steps, optimizer=None):
            optimizer = trainer.optimizer if optimizer is None else optimizer
            trainer.lr_scheduler = LambdaLR(optimizer, lambda step: rate_at(clock.used / clock.budget))
            return trainer.lr_scheduler

        trainer.create_scheduler = create_scheduler  # type: ignore[method-assign]

    def measure(self, folder: Path) -> dict:
        """Seconds and operations, the loss over time, and that with shortened context."""
        logs = [log for log in read_metrics(folder / "metrics.jsonl") if "cpu_seconds" in log]
        model = AutoModelForCausalLM.from_pretrained(folder)
        blocks = validation_blocks(folder, None, max(self.contexts))
        length = blocks.shape[1]
        return {
            "cpu_seconds": logs[-1]["cpu_seconds"],
            "wall_seconds": logs[-1]["wall_seconds"],
            "flops_per_step": 3 * model.config.flops_per_token(length) * length,
            "loss_over_seconds": thin([(log["cpu_seconds"], log["loss"]) for log in logs], statistics.fmean),
            "by_context": losses_by_context(model, blocks, self.contexts, 16_384),
        }

    def report(self, runs: Runs, folder: Path) -> str:
        columns = {
            "steps": Metric("", "step", 0),
            "operations (1e15)": Metric("", lambda run: run["step"] * run["flops_per_step"] / 1e15, 2),
            "validation loss": LOSS,
            "wall-clock / processor time": Metric("", lambda run: run["wall_seconds"] / run["cpu_seconds"]),
            **{f"{n:,} tokens of context": Metric("", f"by_context.{n}") for n in self.contexts},
        }
        times = np.linspace(self.budget / 30, self.budget, 30)  # in the logs, every run has others
        curves = of_runs(runs, lambda run: list(zip(times, np.interp(times, *np.transpose(run["loss_over_seconds"])))))
        shown = plot_curves(folder / "seconds.png", curves, "seconds of one core", "training loss (nats per token)")
        return f"{tabulate(runs, columns)}\n\n{shown}"
