"""Registry of the studies."""

import importlib

from lsgpt.utilities import suggest

from .study import Study


STUDIES = {
    "paper-size": "long_runs.PAPER_SIZE",
    "positions-long": "long_runs.POSITIONS_LONG",
    "equal-time": "equal_time.STUDY",
    "time-to-learn": "time_to_learn.STUDY",
    "degrees-of-freedom": "degrees_of_freedom.STUDY",
    "learning-rates": "learning_rates.STUDY",
    "stabilizers": "stabilizers.STUDY",
    "long-training": "long_training.STUDY",
    "heads-and-windows": "heads_and_windows.STUDY",
    "heads-or-layers": "heads_or_layers.STUDY",
    "positions": "positions.STUDY",
    "sparse-dependencies": "sparse_dependencies.STUDY",
    "lengths": "lengths.STUDY",
    "long-range": "long_range.STUDY",
    "where-heads-look": "where_heads_look.STUDY",
    "images": "images.STUDY",
    "set-complement": "set_complement.STUDY",
    "othello": "othello.STUDY",
    "noisy-labels": "noisy_labels.STUDY",
    "noisy-text": "noisy_text.STUDY",
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
