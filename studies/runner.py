"""Runs studies and writes their reports."""

import fnmatch
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from lsgpt.training.callbacks import read_metrics
from lsgpt.utilities import format_duration, suggest, table

from .comparisons import LOSS
from .processes import Command, run_commands
from .registry import load_study
from .study import Runs, Study


RUNS_FILE = "runs.jsonl"
"""One line for each finished run: arm, seed, scale, fields, seconds, environment, values."""

FIELDS_FILE = "fields.json"


def run_study(
    name: str,
    scale: str = "micro",
    num_seeds: int | None = None,
    only: Sequence[str] = (),
    output_dir: str | Path | None = None,
    num_processes: int | None = None,
    fields: Sequence[str] = (),
) -> Path:
    """
    Performs the missing runs of a study, and writes its report after each of them.

    Args:
        name: One of `STUDIES`.
        scale: One of the study's scales.
        num_seeds: Number of seeds, counting up from the study's first (42 in most); by default that of the scale.
        only: Names of arms, or patterns such as `ls-*`; all arms by default.
        output_dir: Output folder, `runs/study-NAME-SCALE` by default. Runs whose results it already holds are skipped;
            interrupted runs are resumed.
        num_processes: Number of runs at a time; by default one for each core at `micro`, otherwise one.
        fields: Command-line fields that replace those of the recipe in all arms, if the study has a recipe.

    Returns:
        The path of the report.

    Raises:
        ValueError: A name is unknown, a value is invalid, or the folder holds runs of another scale or with other
            fields. Raised before the first run.
        ImportError: A package that the study needs is missing. Raised before the first run.
        ChildProcessError: A run failed; the message names the file with its output.
    """
    study = load_study(name)
    if scale not in study.scales:
        raise ValueError(f"`--scale` must be one of {', '.join(study.scales)}; got {scale!r}")
    if num_seeds is not None and num_seeds < 1:
        raise ValueError(f"`--seeds` must be at least 1; got {num_seeds}")
    if fields and study.scales[scale].recipe is None:
        raise ValueError(f"the study {name} has no recipe whose fields could be replaced; got {' '.join(fields)}")
    arms = _choose_arms(study, scale, only)
    for arm in arms:
        study.check(arm, scale, fields)
    folder = Path(output_dir or Path("runs") / f"study-{name}-{scale}")
    work = folder / "work"
    work.mkdir(parents=True, exist_ok=True)
    _check_folder(folder, scale, fields)
    study.prepare(scale, work, fields)
    (work / FIELDS_FILE).write_text(json.dumps(list(fields)), encoding="utf-8")  # `prepare` has accepted them

    # All arms of a seed come before the next seed, so that an early report already shows every arm.
    seeds = {arm: num_seeds or study.num_seeds(arm, scale) for arm in arms}
    wanted = [(arm, study.first_seed + i) for i in range(max(seeds.values())) for arm in arms if i < seeds[arm]]
    num_processes = num_processes or ((os.cpu_count() or 1) if scale == "micro" else 1)
    hours = study.scales[scale].hours * len(find_missing(folder, wanted)) / _num_runs(study, scale)
    print(f"Expected: {hours:.1f} h", flush=True)
    return make_runs(study, scale, wanted, folder, work, num_processes, fields)


def find_missing(folder: Path, wanted: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """Returns those of the wanted runs, each an arm and a seed, that have no line in the folder's `RUNS_FILE`."""
    made = {(line["arm"], line["seed"]) for line in read_lines(folder)}
    return [run for run in wanted if run not in made]


def make_runs(
    study: Study,
    scale: str,
    wanted: Sequence[tuple[str, int]],
    folder: Path,
    work: Path,
    num_processes: int,
    fields: Sequence[str] = (),
) -> Path:
    """
    Makes those of the `wanted` runs that `folder` does not hold, each in a process of its own, and writes the report
    after each of them. A run that was interrupted resumes from its checkpoint. Arguments as for `run_study`; `work` is
    the folder that the study has prepared.
    """
    runs_file = folder / RUNS_FILE
    if runs_file.exists() and not (text := runs_file.read_text(encoding="utf-8")).endswith("\n"):
        runs_file.write_text(text[: text.rfind("\n") + 1], encoding="utf-8")  # a crash cut off the last line
    missing = find_missing(folder, wanted)
    print(f"{len(missing)} of {len(wanted)} runs to make, {num_processes} at once", flush=True)
    commands = []
    for arm, seed in missing:
        log = result_file(work, arm, seed).with_suffix(".log")
        log.parent.mkdir(parents=True, exist_ok=True)
        command: list[str | Path] = [
            sys.executable,
            "-m",
            "lsgpt.studies",
            study.name,
            scale,
            arm,
            str(seed),
            work,
            *fields,
        ]
        commands.append(Command(command, log))
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
            left = (time.perf_counter() - start) / number * (len(commands) - number)
            duration = format_duration(json.loads(line)["seconds"])
            print(
                f"[{number}/{len(commands)}] {arm}, seed {seed} ({duration}); {format_duration(left)} left", flush=True
            )
    report = write_report(study, folder)
    print(f"\n{report}")
    return report


def _choose_arms(study: Study, scale: str, only: Sequence[str]) -> list[str]:
    arms = list(study.arms(scale))
    for pattern in only:
        if not fnmatch.filter(arms, pattern):
            raise ValueError(
                f"`--only` must name arms of {study.name}, which are {', '.join(arms)}; got {pattern!r}"
                f"{suggest(pattern, arms)}"
            )
    return [arm for arm in arms if not only or any(fnmatch.fnmatch(arm, pattern) for pattern in only)]


def _num_runs(study: Study, scale: str) -> int:
    return sum(study.num_seeds(arm, scale) for arm in study.arms(scale))


def _check_folder(folder: Path, scale: str, fields: Sequence[str]):
    """Raises `ValueError` if the runs in the folder are of another scale or have other fields."""
    if other := {line["scale"] for line in read_lines(folder)} - {scale}:
        raise ValueError(
            f"`--output-dir` must be new, or hold runs of the scale {scale}; those in {folder} are of the scale "
            f"{', '.join(other)}"
        )
    file = folder / "work" / FIELDS_FILE
    if file.exists() and (earlier := json.loads(file.read_text(encoding="utf-8"))) != list(fields):
        raise ValueError(
            f"`--output-dir` must be new, or hold runs with the same fields; those in {folder} have "
            f"{' '.join(earlier) or 'none'}"
        )


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
    lines = read_lines(folder)
    for values in (line["values"] for line in lines):
        if values.get("diverged") and "eval_loss" in values:
            values["eval_loss"] = None
    arms = dict.fromkeys(arm for scale in study.scales for arm in study.arms(scale))
    grouped = {arm: [{"seed": x["seed"], **x["values"]} for x in lines if x["arm"] == arm] for arm in arms}
    runs = Runs({arm: of_arm for arm, of_arm in grouped.items() if of_arm})
    runs.scale = lines[0]["scale"] if lines else runs.scale
    return runs


ABOUT_COMPARISONS = """\
Effects are means of the differences, the first less the
second, between runs with the same seed, with 95% intervals (Student's t). The loss of a run that diverged counts as
infinite; where values are infinite, a verdict needs all runs of one arm and none of the other. A claim is open as long
as its runs are missing."""


def word_comparisons(study: Study, runs: Runs) -> str:
    """The claims of a study, their criteria, what the runs say about them, and what they could have said."""
    sections = []
    for item in study.comparisons.values():
        finding = item.judge(runs)
        effect = ""
        if math.isfinite(finding.effect):
            digits = max(2, getattr(item, "metric", LOSS).digits)
            interval = f" (95% interval {finding.low:.{digits}f} to {finding.high:.{digits}f})"
            effect = f"; effect {finding.effect:+.{digits}f}" + (interval if math.isfinite(finding.low) else "")
        seeds = f"; {finding.num_seeds} seed{'s' * (finding.num_seeds != 1)}" if finding.num_seeds else ""
        wanted = study.scales[runs.scale].num_seeds if runs.scale in study.scales else 0
        sections.append(
            f"**{item.claim[0].upper()}{item.claim[1:]}** ({item.source})\n\n- {item.criterion()}\n"
            f"- {item.power(finding.num_seeds or wanted)}\n"
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
    seeds = {arm: len(values) for arm, values in runs.items()}
    scales = sorted({line["scale"] for line in lines})
    seconds = sum(line["seconds"] for line in lines)
    counts = sorted(set(seeds.values()))
    how_many = f"of {len(seeds)} arms, {' or '.join(map(str, counts))} for each arm;\n{format_duration(seconds)}"
    how_many += " of computing, all runs added up. Figures are means ± sample standard deviations over seeds."
    made_with = {key: "; ".join(sorted({x["environment"][key] for x in lines})) for key in lines[0]["environment"]}
    changes = f"\n\n**Changed after results existed.** {study.changes}" if study.changes else ""
    intro, size = "", f"{len(lines)} runs {how_many}"
    if study.comparisons:
        except_for = ", except for the changes that are told below" if study.changes else ""
        criteria = f"Criteria were written down before the runs{except_for}.\n{ABOUT_COMPARISONS}"
        intro = f"{study.question}\n\n## Claims\n\n{criteria}\n\n{word_comparisons(study, runs)}\n\n"
        wanted = sum(_num_runs(study, scale) for scale in scales)
        made = f"{len(lines)} runs" if len(lines) >= wanted else f"so far {len(lines)} of {wanted} runs,"
        command = " ".join(["lsgpt study", study.name, "--scale", scales[0], *lines[0]["fields"]])
        size = f"Scale {', '.join(scales)}: {made} {how_many}\n"
        size += f"Again: `{command}`; this page alone: `lsgpt study {study.name} --report FOLDER`."
    report = f"""# {study.title}

{intro}## What was run

{study.protocol}{changes}

{size}

## Results

{study.report(runs, folder).strip()}

## Made with

{table(made_with.items())}
"""
    path = folder / "report.md"
    path.write_text(report, encoding="utf-8")
    return path
