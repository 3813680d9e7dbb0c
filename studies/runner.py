"""Runs studies and writes their reports."""

import fnmatch
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from lsgpt.training.callbacks import read_metrics
from lsgpt.utilities import format_duration, suggest, table

from .comparisons import POWER, Runs, smallest_effect, title_of
from .processes import Command, run_commands
from .study import Study


RUNS_FILE = "runs.jsonl"
"""One line for each finished run: arm, seed, fields, seconds, environment, values."""

FIELDS_FILE = "fields.json"


def run_study(
    study: Study,
    num_seeds: int | None = None,
    only: Sequence[str] = (),
    output_dir: str | Path | None = None,
    num_processes: int | None = None,
    fields: Sequence[str] = (),
) -> Path:
    """
    Performs the missing runs of a study, and writes its report after each of them.

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
        ValueError: An arm is unknown, a value is invalid, or the folder holds runs with other fields. Raised before
            the first run.
        ImportError: A package that the study needs is missing. Raised before the first run.
        ChildProcessError: A run failed; the message names the file with its output.
    """
    if num_seeds is not None and num_seeds < 1:
        raise ValueError(f"`--seeds` must be at least 1; got {num_seeds}")
    if fields and study.recipe is None:
        raise ValueError(
            f"the study {study.name} has no recipe whose fields could be replaced; got {' '.join(fields)}"
        )
    for pattern in only:
        if not fnmatch.filter(study.arms, pattern):
            raise ValueError(
                f"`--only` must name arms of {study.name}, which are {', '.join(study.arms)}; got {pattern!r}"
                f"{suggest(pattern, study.arms)}"
            )
    arms = [arm for arm in study.arms if not only or any(fnmatch.fnmatch(arm, pattern) for pattern in only)]
    for arm in arms:
        study.check(arm, fields)
    folder = Path(output_dir or Path("runs") / f"study-{study.name}")
    work = folder / "work"
    work.mkdir(parents=True, exist_ok=True)
    file = work / FIELDS_FILE
    if file.exists() and (earlier := json.loads(file.read_text(encoding="utf-8"))) != list(fields):
        raise ValueError(
            f"`--output-dir` must be new, or hold runs with the same fields; those in {folder} have "
            f"{' '.join(earlier) or 'none'}"
        )
    study.prepare(work, fields)
    file.write_text(json.dumps(list(fields)), encoding="utf-8")  # `prepare` has accepted them

    # All arms of a seed come before the next seed, so that an early report already shows every arm.
    seeds = {arm: num_seeds or study.seeds_of(arm) for arm in arms}
    wanted = [(arm, study.first_seed + i) for i in range(max(seeds.values())) for arm in arms if i < seeds[arm]]
    return make_runs(study, wanted, folder, work, num_processes or os.cpu_count() or 1, fields)


def make_runs(
    study: Study,
    wanted: Sequence[tuple[str, int]],
    folder: Path,
    work: Path,
    num_processes: int,
    fields: Sequence[str] = (),
) -> Path:
    """
    Makes those of the `wanted` runs, each an arm and a seed, that `folder` does not hold, each in a process of its
    own, and writes the report after each of them. A run that was interrupted resumes from its checkpoint. Arguments as
    for `run_study`; `work` is the folder that the study has prepared.
    """
    runs_file = folder / RUNS_FILE
    if runs_file.exists() and not (text := runs_file.read_text(encoding="utf-8")).endswith("\n"):
        runs_file.write_text(text[: text.rfind("\n") + 1], encoding="utf-8")  # a crash cut off the last line
    made = {(line["arm"], line["seed"]) for line in read_lines(folder)}
    missing = [run for run in wanted if run not in made]
    print(f"{len(missing)} of {len(wanted)} runs to make, {num_processes} at once", flush=True)
    commands = []
    for arm, seed in missing:
        log = result_file(work, arm, seed).with_suffix(".log")
        log.parent.mkdir(parents=True, exist_ok=True)
        program: list[str | Path] = [sys.executable, "-m", "lsgpt.studies", study.name, arm, str(seed), work, *fields]
        commands.append(Command(program, log))
    start = time.perf_counter()
    with closing(run_commands(commands, num_processes)) as ended:  # an error here stops the other runs
        for number, (index, status) in enumerate(ended, start=1):
            arm, seed = missing[index]
            file = result_file(work, arm, seed)
            if status != 0 or not file.exists():
                raise ChildProcessError(
                    f"{arm} with seed {seed} ended with status {status} and without results; its output is in "
                    f"{commands[index].log}. Run the same command again to continue"
                )
            line = file.read_text(encoding="utf-8")
            with runs_file.open("a", encoding="utf-8") as runs:
                runs.write(line + "\n")
            write_report(study, folder)
            left = format_duration((time.perf_counter() - start) / number * (len(commands) - number))
            duration = format_duration(json.loads(line)["seconds"])
            print(f"[{number}/{len(commands)}] {arm}, seed {seed} ({duration}); {left} left", flush=True)
    report = write_report(study, folder)
    print(f"\n{report}")
    return report


def result_file(work: Path, arm: str, seed: int) -> Path:
    """The file to which a run writes its line of `RUNS_FILE`."""
    return work / arm / f"seed-{seed}.json"


def read_lines(folder: str | Path) -> list[dict]:
    """
    Reads the runs in a folder, ordered by seed and, for the same seed, by the time at which they finished. Skips a
    last line that was cut off by a crash.
    """
    file = Path(folder) / RUNS_FILE
    return sorted(read_metrics(file), key=lambda line: line["seed"]) if file.exists() else []


def read_runs(study: Study, folder: str | Path) -> Runs:
    """
    Reads the values of the runs in a folder, in the order of the study's arms. Runs that diverged have no `eval_loss`:
    what was measured is that of the last good weights.
    """
    runs: dict[str, list[dict]] = {arm: [] for arm in study.arms}
    for line in read_lines(folder):
        values = {"seed": line["seed"], **line["values"]}
        if values.get("diverged") and "eval_loss" in values:
            values["eval_loss"] = None
        if line["arm"] in runs:
            runs[line["arm"]].append(values)
    return {arm: of_arm for arm, of_arm in runs.items() if of_arm}


def word_comparisons(study: Study, runs: Runs) -> str:
    """The claims of a study, their criteria, and what the runs say about them."""
    sections = []
    for item in study.comparisons.values():
        finding = item.judge(runs)
        metric = getattr(item, "metric", None)
        effect = finding.format_effect(max(2, metric.digits) if metric else 3)
        effect = f"; effect {effect}" if effect else ""
        seeds = f"; {finding.num_seeds} seed{'s' * (finding.num_seeds != 1)}" if finding.num_seeds else ""
        title = title_of(item)
        criterion = item.criterion()
        if not item.claim:  # the heading has said what is compared
            criterion = criterion.replace(f"{title}: ", "")
        sections.append(
            f"**{title[0].upper()}{title[1:]}** ({item.source})\n\n- {criterion}\n"
            f"- Found: {finding.figure}{effect}{seeds}\n- Verdict: **{finding.verdict}**"
        )
    return "\n\n".join(sections)


def write_report(study: Study, folder: str | Path) -> Path:
    """
    Writes `report.md` and its plots, using only the runs that the folder holds.

    Returns:
        The path of the report.
    """
    folder = Path(folder)
    lines, runs = read_lines(folder), read_runs(study, folder)
    counts = " or ".join(map(str, sorted({len(of_arm) for of_arm in runs.values()})))
    seconds = format_duration(sum(line["seconds"] for line in lines))
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
arm and none of the other. A claim stays open as long as its runs are missing. With {study.num_seeds} seeds, an effect
is found with a probability of {POWER:.0%} if it is {smallest_effect(study.num_seeds):.2g} times as large as the
standard deviation of the differences.

{word_comparisons(study, runs)}

"""
        wanted = f" of {sum(map(study.seeds_of, study.arms))}"
        command = " ".join(["lsgpt study", study.name, *lines[0]["fields"]])
        again = f"\nTo repeat them: `{command}`. To rewrite this page: `lsgpt study {study.name} --report FOLDER`."
    report = f"""# {study.title}

{claims}## What was run

{study.protocol}{changes}

{len(lines)}{wanted} runs: {len(runs)} arms with {counts} seeds each; {seconds} of computing in total.
Tables show means ± sample standard deviations over seeds.{again}

## Results

{study.report(runs, folder).strip()}

## Made with

{table(made_with.items())}
"""
    path = folder / "report.md"
    path.write_text(report, encoding="utf-8")
    return path
