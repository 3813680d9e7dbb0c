"""The cost of `LogitTelemetryCallback` in training on the CPU: `lsgpt bench telemetry`.

`Trainer` runs on the same random tokens, alternately with and without the callback. Before anything is timed, the
logged maxima are compared with those of full score matrices, and the losses with and without the callback bit by bit.
"""

import argparse
import statistics
import tempfile
import time

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from lsgpt import LSGPTForCausalLM
from lsgpt.configuration import load_preset
from lsgpt.modeling_lsgpt import LOCAL
from lsgpt.training import LogitTelemetryCallback

from .record import OUTPUT, at_least, begin_result, result_file, write_result


LIMIT = 1.03
"""Largest acceptable ratio of training times, with the callback to without."""


class StepTimes(TrainerCallback):
    """
    Records the seconds of each step, from its beginning to the beginning of the next one or the end of the training.

    The end of the step itself would be too early, because the `Trainer` logs after it and logs only because of the
    callback. The `Trainer`'s `train_runtime` begins too early: it includes making the data loaders and the optimizer.
    """

    def __init__(self):
        self._marks = []

    def on_step_begin(self, args, state, control, **kwargs):
        self._marks.append(time.perf_counter())

    def on_train_end(self, args, state, control, **kwargs):
        self._marks.append(time.perf_counter())

    @property
    def seconds(self) -> list[float]:
        """One number per step; they add up to the time of the training."""
        return [end - begin for begin, end in zip(self._marks, self._marks[1:])]


def train(options: argparse.Namespace, steps: int, every_n_steps: int | None, brute_force: bool = False) -> dict:
    """
    Trains a new model, in the same way each time except for the callback.

    Args:
        options: The command-line options.
        steps: Number of optimizer steps.
        every_n_steps: The callback's argument; `None` to train without it.
        brute_force: Whether to compute the largest logits of each step's batch from full score matrices as well.

    Returns:
        The `seconds` and `losses` of the steps; `logged`, the last figures that the callback logged; and, with
        `brute_force`, the `expected` figures for the last step.
    """
    torch.manual_seed(0)
    config = load_preset(options.preset)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    rows = torch.randint(config.vocab_size, (steps * options.batch_size, options.length)).tolist()
    losses, expected = [], {}
    model.register_forward_hook(lambda model, inputs, output: losses.append(output.loss.item()))
    if brute_force:
        watch_scores(model, expected)
    times = StepTimes()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=options.batch_size,
            logging_strategy="no",  # so that only the callback causes logging, and its cost counts
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = Trainer(
            model,
            arguments,
            train_dataset=Dataset.from_dict({"input_ids": rows, "labels": rows}),
            callbacks=[times] if every_n_steps is None else [times, LogitTelemetryCallback(every_n_steps)],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    logged = [log for log in trainer.state.log_history if "max_logit" in log]
    return {"seconds": times.seconds, "losses": losses, "logged": logged[-1] if logged else {}, "expected": expected}


def watch_scores(model: LSGPTForCausalLM, expected: dict[str, float]):
    """Stores the largest logits of each layer's global and local heads in the last batch, named as in the log."""

    def watch(number):
        def record(layer, args, kwargs):
            states = layer.project(*args, kwargs["position_embeddings"])
            for heads, query, key, _ in type(layer).split_heads(layer, *(x.detach() for x in states)):
                position = torch.arange(query.shape[2])
                distance = position[:, None] - position
                window = layer.config.window(heads.kind) or len(position)
                scores = query @ key.repeat_interleave(layer.num_key_value_groups, dim=1).mT * layer.scaling
                kind = "local" if heads.kind == LOCAL else "global"
                is_visible = (distance >= 0) & (distance < window)
                expected[f"max_logit/layer_{number}/{kind}"] = (scores.abs() * is_visible).max().item()

        return record

    for number, layer in enumerate(model.model.layers):
        layer.self_attn.register_forward_pre_hook(watch(number), with_kwargs=True)


def check(options: argparse.Namespace):
    """
    Runs the correctness gate: a short training without the callback and one with it. This also warms up the process.

    Raises:
        RuntimeError: If a logged maximum is not that of the batch, or the callback changes a loss.
    """
    steps = min(options.steps, 3)
    without = train(options, steps, None)
    measured = train(options, steps, steps, brute_force=True)
    expected = {**measured["expected"], "max_logit": max(measured["expected"].values())}
    for name, value in expected.items():
        logged = measured["logged"].get(name)
        if logged is None or not abs(logged - value) <= 1e-5 * value:  # NaN fails, too
            raise RuntimeError(f"`{name}` of the batch is {value}, but {logged} was logged")
    compare_losses(without, measured)
    print(f"checked: {len(expected)} maxima of a batch, and the losses of {steps} steps with and without the callback")


def compare_losses(without: dict, measured: dict):
    """Raises `RuntimeError` unless two trainings have the same losses, bit by bit."""
    if without["losses"] != measured["losses"]:
        raise RuntimeError(f"the callback changes the losses {without['losses']} to {measured['losses']}")


def summarize(rounds: list[dict], every_n_steps: int) -> dict:
    """
    Summarizes the rounds.

    Args:
        rounds: For each, `seconds_without` and `seconds_with`, the seconds of all steps of the two trainings.
        every_n_steps: Which steps of the second training were measured.

    Returns:
        `ratios` of the training times and their `median_ratio`; the median seconds of measured and other steps of the
        trainings with the callback; and `implied_ratio`, 1 plus the additional share of time of a measured step
        divided by `every_n_steps`.
    """
    ratios = [sum(row["seconds_with"]) / sum(row["seconds_without"]) for row in rounds]
    steps = [step for row in rounds for step in enumerate(row["seconds_with"], start=1)]
    measured = statistics.median(seconds for step, seconds in steps if step % every_n_steps == 0)
    other = statistics.median(seconds for step, seconds in steps if step % every_n_steps != 0)
    return {
        "ratios": ratios,
        "median_ratio": statistics.median(ratios),
        "measured_step_seconds": measured,
        "other_step_seconds": other,
        "measured_step_ratio": measured / other,
        "implied_ratio": 1 + (measured / other - 1) / every_n_steps,
    }


def main(arguments: list[str]):
    """Checks, measures every round, prints the times and ratios and writes them to a JSON file."""
    parser = argparse.ArgumentParser(prog="lsgpt bench telemetry", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=at_least(1), default=50, help="optimizer steps of each run")
    parser.add_argument("--rounds", type=at_least(1), default=3, help="pairs of runs, without and with the callback")
    parser.add_argument("--batch_size", type=at_least(1), default=1)
    parser.add_argument("--length", type=at_least(1), default=2048, help="tokens in a sequence")
    parser.add_argument(
        "--every_n_steps", type=at_least(1), default=50, help="interval of the callback's measurements"
    )
    parser.add_argument("--threads", type=at_least(1), default=2)
    parser.add_argument("--preset", default="paper-v1")
    parser.add_argument(
        "--output", type=result_file, metavar="FILE", default=OUTPUT / "telemetry.json", help="default: %(default)s"
    )
    options = parser.parse_args(arguments)
    if not 2 <= options.every_n_steps <= options.steps:
        parser.error(f"--every_n_steps must be between 2 and --steps ({options.steps}); got {options.every_n_steps}")
    torch.set_num_threads(options.threads)

    result = begin_result("telemetry", *arguments)
    check(options)
    rounds = []
    print(f"{'round':>5} {'without':>10} {'with':>10} {'ratio':>8}")
    for number in range(options.rounds):
        order = [None, options.every_n_steps] if number % 2 == 0 else [options.every_n_steps, None]
        runs = {every_n_steps: train(options, options.steps, every_n_steps) for every_n_steps in order}
        without, measured = runs[None], runs[options.every_n_steps]
        compare_losses(without, measured)
        rounds.append({"seconds_without": without["seconds"], "seconds_with": measured["seconds"]})
        totals = [sum(seconds) for seconds in rounds[-1].values()]
        print(f"{number + 1:5d} {totals[0]:8.2f} s {totals[1]:8.2f} s {totals[1] / totals[0]:8.4f}", flush=True)

    summary = summarize(rounds, options.every_n_steps)
    ratios = summary["ratios"]
    print(
        f"training time, with / without: median {summary['median_ratio']:.4f} ({min(ratios):.4f} to "
        f"{max(ratios):.4f}), {'at most' if summary['median_ratio'] <= LIMIT else 'MORE THAN'} {LIMIT}\n"
        f"measured steps take {summary['measured_step_seconds']:.3f} s, the others "
        f"{summary['other_step_seconds']:.3f} s: {summary['measured_step_ratio']:.3f} times as long, which implies "
        f"{summary['implied_ratio']:.5f} with one step in {options.every_n_steps}"
    )

    settings = {name: value for name, value in vars(options).items() if name != "output"}
    result["settings"] = {**settings, "engine": "sdpa", "dtype": "float32"}
    write_result(options.output, result | summary | {"rounds": rounds})
    print(f"saved in {options.output}")
