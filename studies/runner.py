"""Runs studies and writes their reports."""

import fnmatch
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import closing
from pathlib import Path

from lsgpt.training.callbacks import append_line, read_metrics
from lsgpt.utilities import format_duration, suggest, table
from lsgpt.utilities.strict_json import with_nan

from .comparisons import Runs
from .study import Study


RUNS_FILE = "runs.jsonl"
"""One line for each finished run: arm, seed, fields, seconds, environment, values."""


def run_study(
    study: Study,
    num_seeds: int | None = None,
    only: Sequence[str] = (),
    output_dir: str | Path | None = None,
    num_processes: int | None = None,
    fields: Sequence[str] = (),
) -> Path:
    """
    Performs the missing runs of a study, each in a process of its own, and writes its report after each of them.

    Args:
        study: One of `STUDIES`.
        num_seeds: Number of seeds, counting up from the study's first (42 in most); by default the study's.
        only: Names of arms, or patterns such as `ls-*`; all arms by default.
        output_dir: Output folder, `runs/study-NAME` by default. Runs whose results it already holds are skipped;
            interrupted runs are resumed.
        num_processes: Number of runs at a time; by default one for each core.
        fields: Command-line fields that replace those of the recipe in all arms, if the study has a recipe.

    Returns:
        The path of the report.

    Raises:
        ValueError: An arm is unknown, a value invalid, or the folder holds runs with other fields; before any run.
        ImportError: A package that the study needs is missing; before any run.
        ChildProcessError: A run failed; the message names the file with its output.
    """
    if fields and study.recipe is None:
        raise ValueError(f"{study.name} has no recipe whose fields could be replaced; got {' '.join(fields)}")
    for pattern in only:
        if not fnmatch.filter(study.arms, pattern):
            raise ValueError(
                f"`--only` must name arms of {study.name}, which are {', '.join(study.arms)}; got {pattern!r}"
                f"{suggest(pattern, study.arms)}"
            )
    arms = [arm for arm in study.arms if not only or any(fnmatch.fnmatch(arm, pattern) for pattern in only)]
    folder = Path(output_dir or Path("runs") / f"study-{study.name}")
    work = folder / study.work
    work.mkdir(parents=True, exist_ok=True)
    file = work / "fields.json"
    earlier = [json.loads(file.read_text(encoding="utf-8"))] if file.exists() else []
    for before in (*earlier, *(line["fields"] for line in read_lines(folder))):
        if before != list(fields):
            raise ValueError(
                f"`--output-dir` must be new, or hold runs with the same fields; those in {folder} have "
                f"{' '.join(before) or 'none'}"
            )
    study.prepare(work, arms, fields)
    if study.recipe is not None:
        file.write_text(json.dumps(list(fields)), encoding="utf-8")  # `prepare` has accepted them
    runs_file = folder / RUNS_FILE
    made = {(line["arm"], line["seed"]) for line in read_lines(folder)}
    # All arms of a seed come before the next seed, so that an early report already shows every arm.
    seeds = {arm: num_seeds or study.seeds_of(arm) for arm in arms}
    wanted = [(arm, study.first_seed + i) for i in range(max(seeds.values())) for arm in arms if i < seeds[arm]]
    missing = [run for run in wanted if run not in made]
    num_processes = num_processes or usable_cores()
    print(f"{len(missing)} of {len(wanted)} runs to make, {num_processes} at once", flush=True)
    files = [result_file(work, *run) for run in missing]
    logs = [file.with_suffix(".log") for file in files]
    module = [sys.executable, "-m", "lsgpt.studies", study.name]
    commands = [[*module, arm, str(seed), str(work), *fields] for arm, seed in missing]
    start = time.perf_counter()
    with closing(run_commands(commands, logs, num_processes)) as ended:  # an error here stops the other runs
        for number, (index, status) in enumerate(ended, start=1):
            (arm, seed), file = missing[index], files[index]
            if status != 0 or not file.exists():
                raise ChildProcessError(
                    f"{arm} with seed {seed} ended with status {status} and without results; its output is in "
                    f"{logs[index]}. Run the same command again to continue"
                )
            append_line(runs_file, json.loads(file.read_text(encoding="utf-8")))
            write_report(study, folder)
            left = format_duration((time.perf_counter() - start) / number * (len(missing) - number))
            print(f"[{number}/{len(missing)}] {arm}, seed {seed}; {left} left", flush=True)
    print(f"\n{(report := write_report(study, folder))}")
    return report


def run_commands(
    commands: Sequence[Sequence[str]], logs: Sequence[Path], num_processes: int = 1
) -> Generator[tuple[int, int], None, None]:
    """
    Runs commands in order, `num_processes` at a time, and appends their output to `logs`. Each has an equal share of
    the cores, unless the environment variable `OMP_NUM_THREADS` is set. SIGTERM to this process is passed on to the
    running commands, so that they can save their work, and no others are started.

    Yields:
        The index of a command and its exit status, as the commands end. When the generator is closed, or an exception
        passes through it, the running commands are ended with SIGTERM.
    """
    environment = {**os.environ}
    if num_processes > 1:
        environment.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // num_processes)))
    waiting, running = list(range(len(commands))), {}

    def terminate(*_):
        nonlocal num_processes
        num_processes = 0  # start no more
        for process in running.values():
            process.terminate()

    previous = signal.signal(signal.SIGTERM, terminate)
    try:
        while running or (waiting and num_processes):
            while waiting and len(running) < num_processes:
                index = waiting.pop(0)
                logs[index].parent.mkdir(parents=True, exist_ok=True)
                with logs[index].open("a", encoding="utf-8") as log:
                    running[index] = subprocess.Popen(
                        commands[index], stdout=log, stderr=subprocess.STDOUT, env=environment
                    )
            time.sleep(0.1)
            for index in [index for index, process in running.items() if process.poll() is not None]:
                yield index, running.pop(index).returncode
        yield from ((index, -signal.SIGTERM) for index in waiting)
    finally:
        terminate()
        for process in running.values():
            process.wait()
        signal.signal(signal.SIGTERM, previous)


def usable_cores() -> int:
    """How many cores this process may use; a job scheduler may have given it a part of them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def result_file(work: Path, arm: str, seed: int) -> Path:
    """The file to which a run writes its line of `RUNS_FILE`."""
    return work / arm / f"seed-{seed}.json"


def read_lines(folder: str | Path) -> list[dict]:
    """Reads the runs in a folder, ordered by seed and then by their ends, without a last line that a crash cut off."""
    file = Path(folder) / RUNS_FILE
    return sorted(read_metrics(file), key=lambda line: line["seed"]) if file.exists() else []


def read_runs(study: Study, folder: str | Path) -> Runs:
    """Reads the values of the runs in a folder, in the order of the study's arms, with NaN for null."""
    runs: dict[str, list[dict]] = {arm: [] for arm in study.arms}
    for line in read_lines(folder):
        if line["arm"] in runs:
            if any(run["seed"] == line["seed"] for run in runs[line["arm"]]):
                of_run = f"{line['arm']} with seed {line['seed']}"
                raise ValueError(f"{folder} must have one run of each arm and seed; got two of {of_run}")
            runs[line["arm"]].append({"seed": line["seed"], **with_nan(line["values"])})
    return {arm: of_arm for arm, of_arm in runs.items() if of_arm}


def word_comparisons(study: Study, runs: Runs) -> str:
    """The claims of a study, their criteria, and what the runs say about them, once arms have all their seeds."""
    runs = {arm: of_arm for arm, of_arm in runs.items() if len(of_arm) >= study.seeds_of(arm)}
    sections = []
    for item in study.comparisons.values():
        finding, title, criterion = item.judge(runs), item.title, item.criterion()
        if not item.claim:  # the heading has said what is compared
            criterion = criterion.replace(f"{title}: ", "")
        seeds = f"; {finding.num_seeds} seed{'s' * (finding.num_seeds != 1)}" if finding.num_seeds else ""
        sections.append(
            f"**{title[0].upper()}{title[1:]}** ({item.source})\n\n- {criterion}\n"
            f"- Found: {finding.figure}{seeds}\n- Verdict: **{finding.verdict}**"
        )
    return "\n\n".join(sections)


def write_report(study: Study, folder: str | Path) -> Path:
    """Writes `report.md` and its plots, using only the runs that the folder holds. Returns the path of the report."""
    folder = Path(folder)
    lines, runs = read_lines(folder), read_runs(study, folder)
    if not runs:
        raise ValueError(f"{str(folder)!r} must have runs of {study.name}; it has none of {', '.join(study.arms)}")
    *sizes, largest = sorted({len(of_arm) for of_arm in runs.values()})
    counts = f"{', '.join(map(str, sizes))} or {largest}" if sizes else f"{largest}"
    counts += " seed" if counts == "1" else " seeds"
    # "At least": a run that was trained on another machine has as `seconds` those of its measuring alone, and one that
    # was interrupted those since it went on.
    seconds = format_duration(sum(max(x["seconds"], x["values"].get("train_seconds") or 0) for x in lines))
    made_with = {key: "; ".join(sorted({x["environment"][key] for x in lines})) for key in lines[0]["environment"]}
    changes = f"\n\n**Changed after results existed.** {study.changes}" if study.changes else ""
    claims, again, wanted = "", "", ""
    if study.comparisons:
        except_for = ", except for the changes described below" if study.changes else ""
        claims = f"""{study.question}

## Claims

The criteria were written down before the runs{except_for}.
Effects are mean differences between runs with the same seed, the first minus the second, with 95% intervals (Student's
t). The loss of a run that diverged counts as infinite; where values are infinite, a verdict requires all runs of one
arm and none of the other. A claim stays open as long as its runs are missing.

{word_comparisons(study, runs)}

"""
        planned = sum(map(study.seeds_of, study.arms))
        wanted = f" of {planned}" if len(lines) <= planned else ""
        command = " ".join(["lsgpt study", study.name, *lines[0]["fields"]])
        again = f"\nTo repeat them: `{command}`. To rewrite this page: `lsgpt study {study.name} --report FOLDER`."
    report = f"""# {study.title}

{claims}## What was run

{study.protocol}{changes}

{len(lines)}{wanted} runs: {len(runs)} arms with {counts} each; at least {seconds} of computing in total.
Tables show means ± sample standard deviations over seeds.{again}

## Results

{study.report(runs, folder).strip()}

## Made with

{table(made_with.items())}
"""
    (folder / "report.md").write_text(report, encoding="utf-8")
    return folder / "report.md"
