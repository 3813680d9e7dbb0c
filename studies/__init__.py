"""The paper's claims as experiments that anyone can run."""

from .compare import RecipeArms, compare
from .registry import STUDIES, load_study
from .runner import read_lines, read_runs, run_study, write_report
from .study import Study, TrainingStudy


__all__ = [
    "STUDIES",
    "RecipeArms",
    "Study",
    "TrainingStudy",
    "compare",
    "load_study",
    "read_lines",
    "read_runs",
    "run_study",
    "write_report",
]
