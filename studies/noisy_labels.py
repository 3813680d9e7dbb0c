"""Does an exponentiated loss help a classifier that is trained with some wrong labels?"""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import Trainer, set_seed

from lsgpt import LSGPTForSequenceClassification
from lsgpt.configuration import load_preset
from lsgpt.training import exponentiated_loss, generalized_cross_entropy, symmetric_cross_entropy
from lsgpt.training.losses import LossFunction

from .comparisons import Best, Comparison, Metric, Runs
from .streams import train_small
from .study import Study, picture, tabulate


NUM_TRAINING_IMAGES = 400
"""Number of images for training; all others are for testing."""

NUM_CLASSES = 10
NUM_GREYS = 17
PAD = NUM_GREYS
"""Padding token, which no image contains: classifiers look for the last token that is not padding."""

EXPONENTS = (1, 0.9, 0.7, 0.5)
"""The first exponent gives the cross-entropy, with which the others are compared."""

LOSSES: dict[str, LossFunction] = {
    **{f"e{e:g}": exponentiated_loss(e) for e in EXPONENTS},
    "gce": generalized_cross_entropy(0.7),
    "sce": symmetric_cross_entropy(0.1, 1.0),
}
CROSS_ENTROPY, *EXPONENTIATED = [f"e{e:g}" for e in EXPONENTS]

SHARES = (0.0, 0.2, 0.4, 0.6)

CLOSE = 0.01
"""The largest difference in accuracy that counts as none."""


def mean_accuracy(run: dict, is_noisy: bool) -> float:
    """The test accuracy of a run: the mean over all fractions of wrong labels above 0, or that without any."""
    return statistics.fmean(fit["accuracy"] for fit in run["by_share"] if (fit["share"] > 0) == is_noisy)


RIGHT = Metric("the test accuracy without wrong labels", lambda run: mean_accuracy(run, False))
WRONG = Metric("the test accuracy over 20, 40 and 60% of wrong labels", lambda run: mean_accuracy(run, True))


def highest(name: str, arms: Sequence[str], what: str) -> Best:
    """The loss with the highest accuracy."""
    return Best(name, tuple(arms), WRONG, lambda accuracies: -statistics.fmean(accuracies), what)


class NoisyLabels(Study):
    """Exponentiated losses on images of digits, of which 0 to 60% have wrong labels in training."""

    name = "noisy-labels"
    title = "Wrong labels"
    question = """\
Cross-entropy gives most weight to the examples with the largest losses, and wrong labels are among them. Raised to a
power below 1, it gives them less (arXiv:1902.06127). Does a classifier become better this way, and does it cost
anything where all labels are right?"""
    protocol = f"""\
A classifier (`LSGPTForSequenceClassification`) reads handwritten digits pixel by pixel, in {NUM_GREYS} grey levels:
the 1,797 digits of scikit-learn, 8 x 8 pixels, {NUM_TRAINING_IMAGES} for training, few enough to be memorized, and
the others for testing. Before the training, 0, 20, 40, or 60% of the training labels are replaced by one of the other
nine, drawn at random; the test labels stay right. An arm is a loss: `e...` the cross-entropy to this power, `gce`
generalized cross-entropy (q = 0.7), `sce` symmetric cross-entropy (alpha = 0.1, beta = 1, A = -4). Each run trains a
new model for each fraction of wrong labels. Runs with the same seed share initial weights, order of the examples, and
wrong labels, whatever the arm. The accuracy is that of the last step: nothing chooses an earlier one."""
    changes = """\
Until all runs had been made, a claim was about two of three exponents, by two standard errors of the differences, and
"costs nothing" about means alone. It was replaced by one claim for each exponent, with intervals by Student's t."""
    comparisons = {
        **{
            f"wrong-{arm}": Comparison("arXiv:1902.06127", WRONG, CROSS_ENTROPY, arm, margin=CLOSE)
            for arm in EXPONENTIATED
        },
        **{
            f"right-{arm}": Comparison("ours: it costs nothing", RIGHT, arm, CROSS_ENTROPY, equal=True, margin=CLOSE)
            for arm in EXPONENTIATED
        },
        "baselines": Comparison(
            "ours",
            WRONG,
            highest("gce or sce", ("gce", "sce"), "(whichever is better)"),
            highest("e0.9 to e0.5", EXPONENTIATED, "at the best exponent"),
            margin=CLOSE,
        ),
    }
    arms = LOSSES
    num_seeds = 5
    hours = 0.4
    model: Mapping[str, Any] = {
        "hidden_size": 48,
        "num_global_heads": 3,  # the answer is read from the last pixel, and one head of width 8 is narrow
        "sliding_window": 9,  # reaches the pixel above
        "max_position_embeddings": 64,
        "position_embedding_type": "learned",
    }
    options: Mapping[str, Any] = {
        "max_steps": 500,
        "per_device_train_batch_size": 32,
        "learning_rate": 3e-3,
        "warmup_steps": 50,
    }

    def prepare(self, folder: Path, fields: Sequence[str]):
        """Checks that the images can be loaded, before the first run. Raises `ImportError` as `load_digits` does."""
        load_digits()

    def run(self, arm: str, seed: int, folder: Path, fields: Sequence[str]) -> dict:
        """Trains a model for each fraction of wrong labels, and measures its accuracy."""
        config = load_preset("demo", vocab_size=PAD + 1, pad_token_id=PAD, **self.model)
        config.num_labels = NUM_CLASSES
        digits = load_digits()
        (images, labels), (test_images, test_labels) = digits["train"], digits["test"]
        by_share = []
        for share in SHARES:
            given = replace_labels(labels, share, seed)
            set_seed(seed)
            model = LSGPTForSequenceClassification(config)
            data = Dataset.from_dict({"input_ids": images, "labels": given})
            run_folder = folder / arm / f"seed-{seed}"
            train_small(model, data, seed, run_folder, self.options, loss=LOSSES[arm], trainer_class=Trainer)
            gives_back, is_wrong = classify(model, images) == given, given != labels
            fit = {
                "share": share,
                "accuracy": float(np.mean(classify(model, test_images) == test_labels)),
                "fitted": float(gives_back[~is_wrong].mean()),
            }
            by_share.append(fit | ({"memorized": float(gives_back[is_wrong].mean())} if is_wrong.any() else {}))
        return {"by_share": by_share}

    def report(self, runs: Runs, folder: Path) -> str:
        """Test accuracy by loss and fraction of wrong labels, and the training labels that models reproduce."""

        def accuracy(run: dict) -> list[tuple[float, float]]:
            return [(100 * fit["share"], fit["accuracy"]) for fit in run["by_share"]]

        title, wrong = "Test accuracy over the fraction of wrong labels", "wrong labels in training (%)"
        sections = [picture(folder / "accuracy.png", title, runs, accuracy, wrong, "test accuracy")]
        for key, title in (
            ("accuracy", "Test accuracy"),
            ("fitted", "Fraction of the right training labels that the model reproduces"),
            ("memorized", "Fraction of the wrong training labels that the model reproduces"),
        ):
            columns = {
                f"{100 * share:g}% wrong": Metric("", f"by_share.{i}.{key}")
                for i, share in enumerate(SHARES)
                if share or key != "memorized"
            }
            sections.append(f"### {title}\n\n{tabulate(runs, columns, 'loss')}")
        return "\n\n".join(sections)


def load_digits() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """
    Loads scikit-learn's images of digits as sequences of pixels, and their labels.

    Returns:
        The images `(N, n)` in `NUM_GREYS` grey levels and the labels `(N,)` of each of the splits `train` and `test`.

    Raises:
        ImportError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits as load  # noqa: PLC0415 (an optional package)
        from sklearn.model_selection import train_test_split  # noqa: PLC0415
    except ImportError as error:
        raise ImportError("the digits need the package scikit-learn: pip install scikit-learn") from error
    images, labels = load(return_X_y=True)
    train_images, test_images, train_labels, test_labels = train_test_split(
        images.astype(np.int64), labels, train_size=NUM_TRAINING_IMAGES, random_state=0, stratify=labels
    )
    return {"train": (train_images, train_labels), "test": (test_images, test_labels)}


def replace_labels(labels: np.ndarray, share: float, seed: int) -> np.ndarray:
    """
    Replaces a share of the labels `(N,)`, rounded to a whole number, by one of the other classes, each of which is
    equally likely. With the same seed, labels that are replaced at one share are also replaced at every larger share.
    """
    generator = np.random.default_rng(seed)
    order, shifts = generator.permutation(len(labels)), generator.integers(1, NUM_CLASSES, len(labels))
    chosen = order[: round(share * len(labels))]
    replaced = labels.copy()
    replaced[chosen] = (labels[chosen] + shifts[chosen]) % NUM_CLASSES
    return replaced


@torch.no_grad()
def classify(model: torch.nn.Module, images: np.ndarray, batch_size: int = 256) -> np.ndarray:
    """The most likely class of each image: `(N,)` for images `(N, n)`."""
    batches = torch.as_tensor(images, device=model.device).split(batch_size)
    return torch.cat([model(batch).logits.argmax(-1) for batch in batches]).cpu().numpy()
