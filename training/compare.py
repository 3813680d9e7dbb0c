"""Comparisons: train every arm (a named set of recipe fields) with every seed, and write one report."""

import json
import math
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import yaml

from lsgpt.configuration import load_arms
from lsgpt.utilities import format_duration, suggest, table, with_unit

from .arguments import Arguments, find_checkpoint, parse_arguments
from .callbacks import read_metrics
from .data import ALGORITHMS
from .plots import CONTEXT_LABEL, average_in_bins, plot_curves
from .processes import Command, run_commands
from .report import describe_environment, points_of
from .results import RunResult, finite
from .train import check_checkpoint, load_texts, make_tokenizer


def compare(
    recipe: str | Path | None,
    arms: Sequence[str],
    num_seeds: int = 3,
    output_dir: str | Path | None = None,
    overrides: Sequence[str] = (),
    arms_file: str | Path | None = None,
    num_processes: int = 1,
) -> Path:
    """
    Trains every arm with every seed, and writes `report.md` with a table and plots.

    Each run is an `lsgpt train` in its own process, so that its peak memory can be measured. If the recipe trains a
    tokenizer, this is done once, and all arms that keep the recipe's algorithm and vocabulary size share it. When
    started again, a comparison continues where it stopped: finished runs are kept, runs with a checkpoint resume,
    and the others start over. More arms and seeds may be added.

    Args:
        recipe: The recipe that all arms share: a shipped name or a YAML file; `demo` by default.
        arms: Names of arms, shipped (`configuration/arms.yaml`) or from `arms_file`.
        num_seeds: Number of seeds, counting up from the recipe's seed.
        output_dir: The output folder; `runs/compare-NAME` by default.
        overrides: Command-line fields that replace the recipe's in all arms.
        arms_file: A YAML file with more arms.
        num_processes: Number of simultaneous runs.

    Returns:
        The path of the report.

    Raises:
        ValueError: If a name is unknown, a value is invalid, or the folder holds another comparison. It is raised
            before the first run.
        ChildProcessError: If a run fails; the message names the file with its output.
    """
    if num_seeds < 1:
        raise ValueError(f"`num_seeds` must be at least 1; got {num_seeds}")
    base = parse_arguments(recipe, overrides)
    arguments = {arm: resolve_arm(base.recipe, arm, arms_file) for arm in arms}
    recipes = {arm: arm_arguments.recipe for arm, arm_arguments in arguments.items()}
    folder = Path(output_dir or Path("runs") / f"compare-{base.recipe['run_name']}")
    _write_recipes(folder, recipes)
    trained = prepare_tokenizer(base, folder)

    seeds = [base.training.seed + i for i in range(num_seeds)]
    runs = [(arm, seed) for seed in seeds for arm in arguments]
    unfinished = []
    for arm, seed in runs:
        if (folder / arm / f"seed-{seed}" / "results.json").exists():
            _print_result(folder, arm, seed)
        else:
            unfinished.append((arm, seed))
    commands = []
    for arm, seed in unfinished:
        shares_tokenizer = trained and _trained_tokenizer(arguments[arm]) == trained
        commands.append(_command(folder, arm, seed, folder / "tokenizer" if shares_tokenizer else None))
    start = time.perf_counter()
    with closing(run_commands(commands, num_processes)) as ended:  # an error here also ends the other runs
        for number, (index, status) in enumerate(ended, start=1):
            arm, seed = unfinished[index]
            if status != 0 or not (folder / arm / f"seed-{seed}" / "results.json").exists():
                raise ChildProcessError(
                    f"{arm} with seed {seed} ended with status {status} and without results; its output is in "
                    f"{commands[index].log}. Run the same command again to continue"
                )
            _print_result(folder, arm, seed)
            left = (time.perf_counter() - start) / number * (len(commands) - number)
            if left:
                print(f"{number} of {len(commands)} runs; about {format_duration(left)} left", flush=True)
    report = write_comparison(folder, base.recipe, recipes, seeds)
    print(f"\n{report}")
    return report


def prepare_tokenizer(base: Arguments, folder: Path) -> tuple[str, int] | None:
    """
    Trains the tokenizer that the runs share, and saves it as `folder / "tokenizer"`, unless it is already there.
    Returns its algorithm and size, or `None` if the recipe trains no tokenizer.
    """
    trained = _trained_tokenizer(base)
    if trained and not (folder / "tokenizer").exists():
        tokenizer = make_tokenizer(base.data, base.build_config(), load_texts(base.data))
        tokenizer.save_pretrained(folder / "tokenizer")
    return trained


def _trained_tokenizer(arguments: Arguments) -> tuple[str, int] | None:
    """Returns the algorithm and size of the tokenizer that a run trains, or `None` if it trains none."""
    if arguments.model.model_name_or_path or arguments.data.tokenizer not in ALGORITHMS:
        return None
    return arguments.data.tokenizer, arguments.build_config().vocab_size


def resolve_arm(base: dict, arm: str, arms_file: str | Path | None = None) -> Arguments:
    """
    Returns the arguments of an arm. Its `config_overrides` are added to those of `base`; its other fields
    replace those of `base`. Raises `ValueError` if the arm is unknown or `parse_arguments` rejects the recipe.
    """
    arms = load_arms(arms_file)
    if arm not in arms:
        raise ValueError(f"`arms` must be among {', '.join(arms)}; got {arm!r}{suggest(arm, arms)}")
    return join_arm(base, arm, arms[arm])


def join_arm(base: dict, name: str, fields: dict, overrides: Sequence[str] = ()) -> Arguments:
    """
    Returns the arguments of an arm that is given by its recipe fields, see `resolve_arm`. `overrides` are command-line
    fields, which take precedence.
    """
    merged = {**base, **fields, "run_name": name}
    merged["config_overrides"] = {**(base["config_overrides"] or {}), **(fields.get("config_overrides") or {})}
    return parse_arguments(merged, overrides)


def _write_recipes(folder: Path, recipes: dict[str, dict]):
    """Writes `ARM/recipe.yaml` for each arm. Raises `ValueError` if a different one is already there."""
    for arm, recipe in recipes.items():
        file = folder / arm / "recipe.yaml"
        text = yaml.safe_dump(recipe, sort_keys=False)
        if file.exists() and file.read_text(encoding="utf-8") != text:
            raise ValueError(
                f"`output_dir` must be new, or hold the same comparison; {file} has different values for this arm"
            )
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")


def _command(folder: Path, arm: str, seed: int, tokenizer: Path | None) -> Command:
    """Returns the command that starts a run or resumes it."""
    run_folder = folder / arm / f"seed-{seed}"
    command = [sys.executable, "-m", "lsgpt_cli", "train", folder / arm / "recipe.yaml"]
    command += ["--seed", str(seed), "--output_dir", run_folder]
    command += ["--tokenizer", tokenizer] if tokenizer else []
    if checkpoint := find_checkpoint_or_delete_run(run_folder):
        command += ["--resume_from_checkpoint", checkpoint]
    return Command(command, folder / arm / f"seed-{seed}.log")


def find_checkpoint_or_delete_run(run_folder: Path) -> Path | None:
    """Returns the checkpoint from which the run in a folder can resume; if there is none, deletes the folder."""
    try:
        checkpoint = find_checkpoint(run_folder)
        check_checkpoint(checkpoint)
    except ValueError as error:
        if run_folder.exists():
            print(f"Starting the run in {run_folder} anew: {error}", flush=True)
            shutil.rmtree(run_folder)
        return None
    return checkpoint


def _print_result(folder: Path, arm: str, seed: int):
    result = RunResult.read(folder / arm / f"seed-{seed}")
    duration = format_duration(result.train_seconds)
    print(f"{arm}, seed {seed}: {result.status}, perplexity {result.eval_perplexity:.2f} ({duration})", flush=True)


def write_comparison(folder: str | Path, base: dict, recipes: dict[str, dict], seeds: Sequence[int]) -> Path:
    """
    Writes `report.md`, `results.json` and plots from the results of all runs in `folder`.

    Args:
        folder: The comparison's folder, with a run in each `ARM/seed-SEED`.
        base: The recipe that the arms share.
        recipes: The recipe of each arm.
        seeds: The seeds of each arm.

    Returns:
        The path of the report.
    """
    folder = Path(folder)
    results, logs = {}, {}
    for arm in recipes:
        runs = [folder / arm / f"seed-{seed}" for seed in seeds]
        results[arm] = [RunResult.read(run) for run in runs]
        logs[arm] = [read_metrics(run / "metrics.jsonl") for run in runs]
    summary = {
        arm: [
            {"status": run.status, **{name: value for name, value in vars(run).items() if name != "loss_by_position"}}
            for run in runs
        ]
        for arm, runs in results.items()
    }
    environment = describe_environment()
    text = json.dumps(finite({"environment": environment, "arms": summary}), indent=2)
    (folder / "results.json").write_text(text + "\n", encoding="utf-8")

    step, loss = "optimizer step", "cross-entropy (nats per token)"
    plots = []

    def draw(file, title, curves, xlabel, ylabel, **options):
        if any(points for lines in curves.values() for points in lines):
            plot_curves(folder / file, curves, xlabel, ylabel, **options)
            plots.append(f"![{title}]({file})\n")

    for file, key, title, ylabel, options in (
        ("loss.png", "loss", "Training loss", loss, {}),
        ("perplexity.png", "eval_perplexity", "Evaluation perplexity", "perplexity per token", {"log_y": True}),
        (
            "max_logits.png",
            "max_logit",
            "Largest attention logits",
            "largest |logit|",
            {"log_y": True, "threshold": base["max_logit_threshold"]},
        ),
    ):
        curves = {arm: [points_of(history, key, math.nan) for history in histories] for arm, histories in logs.items()}
        draw(file, title, curves, step, ylabel, **options)
    curves = {arm: [average_in_bins(run.loss_by_position) for run in runs] for arm, runs in results.items()}
    draw("loss_by_position.png", "Loss by position", curves, CONTEXT_LABEL, loss, log_x=True)

    differences = {
        arm: {name: value for name, value in recipe.items() if value != base.get(name) and name != "run_name"}
        for arm, recipe in recipes.items()
    }
    newline = "\n"
    report = f"""# Comparison: {base["run_name"]}

{len(recipes)} arms, {len(seeds)} seeds each ({", ".join(map(str, seeds))}). Mean ± sample standard deviation over the
seeds whose run finished; the others, which diverged or were stopped, are lost. The largest logit is that of all seeds
and measured steps; speed is the median over the steps, without waiting for data.

{_results_table(results)}

{newline.join(plots)}
## What differs between the arms

```yaml
{yaml.safe_dump(differences, sort_keys=False).strip()}
```

## Recipe

```yaml
{yaml.safe_dump(base, sort_keys=False).strip()}
```

## Environment

{table(environment.items())}
"""
    path = folder / "report.md"
    path.write_text(report, encoding="utf-8")
    return path


def _results_table(results: dict[str, list[RunResult]]) -> str:
    columns = [
        "arm",
        "validation perplexity",
        "bits per byte",
        "largest logit",
        "tokens/s",
        "peak memory",
        "lost",
    ]
    rows = []
    for arm, runs in results.items():
        # A run may diverge after its last measured loss; its perplexity is then not finite.
        finished = [run for run in runs if run.outcome == "finished" and math.isfinite(run.eval_perplexity)]
        # A run that was killed after its last step has taken no step since, whose time could be measured.
        speeds = [run.tokens_per_second for run in runs if math.isfinite(run.tokens_per_second)]
        rows.append(
            [
                arm,
                _mean_and_deviation(finished, "eval_perplexity", 2),
                _mean_and_deviation(finished, "eval_bits_per_byte", 4),
                _mean_and_deviation(runs, "max_logit", 1),
                f"{statistics.median(speeds):,.0f}" if speeds else "-",
                with_unit(max(run.peak_memory_bytes for run in runs), "B"),
                f"{len(runs) - len(finished)} of {len(runs)}",
            ]
        )
    return table(rows, columns)


def _mean_and_deviation(runs: list[RunResult], key: str, digits: int) -> str:
    values = [getattr(run, key) for run in runs if getattr(run, key) is not None]
    if not values:
        return "-"
    if not all(map(math.isfinite, values)):
        return "not finite"
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{deviation}"
