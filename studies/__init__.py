"""The paper's claims as experiments that anyone can run."""

from .registry import STUDIES, load_study
from .runner import judge, read_lines, read_runs, run_study, write_report
from .study import Claim, Finding, Runs, Scale, Study, TrainingStudy


__all__ = [
    "STUDIES",
    "Claim",
    "Finding",
    "Runs",
    "Scale",
    "Study",
    "TrainingStudy",
    "judge",
    "load_study",
    "read_lines",
    "read_runs",
    "run_study",
    "write_report",
]
