"""Registry of the studies."""

import importlib

from lsgpt.utilities import suggest

from .study import Study


STUDIES = {
    "degrees-of-freedom": "degrees_of_freedom",
    "learning-rates": "learning_rates",
    "stabilizers": "stabilizers",
    "long-training": "long_training",
    "heads-and-windows": "heads_and_windows",
    "heads-or-layers": "heads_or_layers",
    "positions": "positions",
    "sparse-dependencies": "sparse_dependencies",
    "lengths": "lengths",
    "long-range": "long_range",
    "where-heads-look": "where_heads_look",
    "images": "images",
    "set-complement": "set_complement",
    "othello": "othello",
    "noisy-labels": "noisy_labels",
    "noisy-text": "noisy_text",
    "soft-thinking": "soft_thinking",
}
"""Maps names on the command line to modules, each of which has an instance of a subclass of `Study`, named `STUDY`."""


def load_study(name: str) -> Study:
    """
    Loads a study by its name.

    Raises:
        ValueError: The name is unknown; the message suggests the nearest known one.
        ImportError: A package that the study needs is not installed.
    """
    if name not in STUDIES:
        raise ValueError(f"the study must be one of {', '.join(STUDIES)}; got {name!r}{suggest(name, STUDIES)}")
    return importlib.import_module(f".{STUDIES[name]}", __package__).STUDY
