"""The paper's claims as experiments that anyone can run."""

from lsgpt.utilities import suggest

from .compare import RecipeArms, compare
from .degrees_of_freedom import DegreesOfFreedom
from .equal_time import EqualTime
from .grid import LearningRates, Lengths, SparseDependencies, Stabilizers
from .long_runs import LongTraining, PaperSize, PositionsLong
from .runner import read_lines, run_study, write_report
from .set_complement import SetComplement
from .study import Study, TrainingStudy
from .time_to_learn import TimeToLearn


__all__ = [
    "STUDIES",
    "RecipeArms",
    "TrainingStudy",
    "compare",
    "load_study",
    "read_lines",
    "run_study",
    "write_report",
]

STUDIES: dict[str, Study] = {
    study.name: study()
    for study in (
        PaperSize,
        PositionsLong,
        EqualTime,
        TimeToLearn,
        LongTraining,
        LearningRates,
        Stabilizers,
        Lengths,
        SparseDependencies,
        DegreesOfFreedom,
        SetComplement,
    )
}
"""The studies by their names on the command line."""


def load_study(name: str) -> Study:
    """Returns a study by its name. Raises `ValueError` with the nearest name if there is none."""
    if name not in STUDIES:
        raise ValueError(f"the study must be one of {', '.join(STUDIES)}; got {name!r}{suggest(name, STUDIES)}")
    return STUDIES[name]
