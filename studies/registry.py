"""Registry of the studies."""

import importlib

from lsgpt.utilities import suggest

from .study import Study


STUDIES = {
    "paper-size": "long_runs.PAPER_SIZE",
    "positions-long": "long_runs.POSITIONS_LONG",
    "equal-time": "equal_time.STUDY",
    "time-to-learn": "time_to_learn.STUDY",
    "long-training": "long_runs.LONG_TRAINING",
    "learning-rates": "grid.LEARNING_RATES",
    "stabilizers": "grid.STABILIZERS",
    "heads-and-windows": "grid.HEADS_AND_WINDOWS",
    "heads-or-layers": "grid.HEADS_OR_LAYERS",
    "positions": "grid.POSITIONS",
    "lengths": "grid.LENGTHS_STUDY",
    "sparse-dependencies": "grid.SPARSE_DEPENDENCIES",
    "degrees-of-freedom": "degrees_of_freedom.STUDY",
    "long-range": "long_range.STUDY",
    "set-complement": "set_complement.STUDY",
    "othello": "othello.STUDY",
    "noisy-labels": "noisy_labels.STUDY",
    "soft-thinking": "soft_thinking.STUDY",
}
"""Maps names on the command line to instances of subclasses of `Study`, each in its module."""


def load_study(name: str) -> Study:
    """
    Loads a study by its name.

    Raises:
        ValueError: The name is unknown; the message suggests the nearest known one.
        ImportError: A package that the study needs is not installed.
    """
    if name not in STUDIES:
        raise ValueError(f"the study must be one of {', '.join(STUDIES)}; got {name!r}{suggest(name, STUDIES)}")
    module, attribute = STUDIES[name].split(".")
    return getattr(importlib.import_module(f".{module}", __package__), attribute)
