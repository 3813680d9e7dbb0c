"""Does an exponentiated loss help a classifier that is trained with some wrong labels?"""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import PreTrainedModel, Trainer, default_data_collator, set_seed

from lsgpt import LSGPTConfig, LSGPTForSequenceClassification
from lsgpt.configuration import load_preset
from lsgpt.training import exponentiated_loss, generalized_cross_entropy, symmetric_cross_entropy
from lsgpt.training.losses import LossFunction
from lsgpt.utilities import table

from .comparisons import Best, Comparison, Metric, format_values
from .plots import plot
from .streams import small_training
from .study import Runs, Scale, Study, points


NUM_TRAINING_IMAGES = 400
"""Number of images for training; all others are for testing."""

NUM_CLASSES = 10
NUM_GREYS = 17
PAD = NUM_GREYS
"""Padding token, which no image contains: classifiers look for the last token that is not padding."""

EXPONENTS = (1, 0.9, 0.7, 0.5)
"""Exponents in both studies of noise. The first one gives the cross-entropy, with which the others are compared."""

LOSSES: dict[str, LossFunction] = {
    **{f"e{e:g}": exponentiated_loss(e) for e in EXPONENTS},
    "gce": generalized_cross_entropy(0.7),
    "sce": symmetric_cross_entropy(0.1, 1.0),
}
CROSS_ENTROPY, *EXPONENTIATED = [f"e{e:g}" for e in EXPONENTS]
BASELINES = ("gce", "sce")

CLOSE = 0.01
"""The largest difference in accuracy that counts as none."""


def mean_accuracy(run: dict, is_noisy: bool) -> float:
    """The test accuracy of a run: its mean over all shares of wrong labels above 0, or that without wrong labels."""
    return statistics.fmean(fit["accuracy"] for fit in run["by_share"] if (fit["share"] > 0) == is_noisy)


RIGHT = Metric("the test accuracy without wrong labels", lambda run: mean_accuracy(run, False))
WRONG = Metric("the test accuracy over 20, 40 and 60% of wrong labels", lambda run: mean_accuracy(run, True))


class NoisyLabels(Study):
    """Exponentiated losses on images of digits, of which 0 to 60% have wrong labels in training."""

    name = "noisy-labels"
    title = "Wrong labels"
    question = """\
The cross-entropy gives most weight to the examples with the largest losses, and wrong labels are among them. Raised
to a power below 1, it gives them less (arXiv:1902.06127). Does a classifier then become better, and does it cost
anything where all labels are right?"""
    protocol = f"""\
A classifier (`LSGPTForSequenceClassification`) reads handwritten digits pixel by pixel, in {NUM_GREYS} grey levels:
the 1,797 digits of scikit-learn, 8 x 8 pixels, {NUM_TRAINING_IMAGES} for the training, few enough to be learnt by
heart, and the others for the test. Before the training 0, 20, 40, or
60% of the training labels are replaced by one of the other nine, drawn at random; the test labels stay right. An arm
is a loss: `e...` the cross-entropy to this power, `gce` generalized cross-entropy (q = 0.7), `sce` symmetric
cross-entropy (alpha = 0.1, beta = 1, A = -4). Each run trains a new model for each share of wrong labels. In all arms,
runs with the same seed share initial weights, order of the examples, and wrong labels, and differences are taken seed
by seed. The accuracy is that of the last step: nothing chooses an earlier one."""
    changes = """\
Until all runs had been made, a claim was about two of three exponents, by two standard errors of the differences, and
"costs nothing" about means alone. It was replaced by one claim for each exponent, with intervals by Student's t."""
    comparisons = {
        **{
            f"wrong-{arm}": Comparison(
                f"with wrong labels, the exponent {arm[1:]} gives a higher accuracy on clean data",
                "paper (arXiv:1902.06127)",
                WRONG,
                CROSS_ENTROPY,
                arm,
                margin=CLOSE,
            )
            for arm in EXPONENTIATED
        },
        **{
            f"right-{arm}": Comparison(
                f"without wrong labels, the exponent {arm[1:]} costs nothing",
                "ours",
                RIGHT,
                arm,
                CROSS_ENTROPY,
                equal=True,
                margin=CLOSE,
            )
            for arm in EXPONENTIATED
        },
        "baselines": Comparison(
            "with wrong labels, the exponentiated loss does better than generalized and symmetric cross-entropy",
            "ours",
            WRONG,
            Best("gce or sce", BASELINES, WRONG, -1, "whichever is better,"),
            Best("e0.9 to e0.5", tuple(EXPONENTIATED), WRONG, -1, "at the best exponent"),
            margin=CLOSE,
        ),
    }
    scales = {
        "micro": Scale(
            None,
            {
                "preset": "demo",
                "config": {
                    "hidden_size": 48,
                    "num_global_heads": 3,  # the answer is read from the last pixel, and one head of width 8 is narrow
                    "sliding_window": 9,  # reaches the pixel above
                    "max_position_embeddings": 64,
                    "position_embedding_type": "learned",
                },
                "shares": (0.0, 0.2, 0.4, 0.6),
                "options": {
                    "max_steps": 500,
                    "per_device_train_batch_size": 32,
                    "learning_rate": 3e-3,
                    "warmup_steps": 50,
                },
            },
            5,
            0.4,
        ),
    }

    def arms(self, scale: str) -> Mapping[str, Any]:
        """The losses."""
        return LOSSES

    def prepare(self, scale: str, folder: Path, fields: Sequence[str]):
        """Checks that the images can be loaded, before the first run. Raises `ImportError` as `load_digits` does."""
        load_digits()

    def run(self, arm: str, seed: int, scale: str, folder: Path, fields: Sequence[str]) -> dict:
        """Trains a model for each share of wrong labels, and measures its accuracy."""
        settings = self.scales[scale].fields
        config = load_preset(settings["preset"], vocab_size=PAD + 1, pad_token_id=PAD, **settings["config"])
        config.num_labels = NUM_CLASSES
        loss, run_folder = self.arms(scale)[arm], folder / arm / f"seed-{seed}"
        digits = load_digits()
        (images, labels), (test_images, test_labels) = digits["train"], digits["test"]
        by_share = []
        for share in settings["shares"]:
            given = replace_labels(labels, share, seed)
            model = train_classifier(config, images, given, loss, seed, run_folder, settings["options"])
            gives_back, is_wrong = classify(model, images) == given, given != labels
            fit = {
                "share": share,
                "accuracy": float(np.mean(classify(model, test_images) == test_labels)),
                "fitted": float(gives_back[~is_wrong].mean()),
            }
            by_share.append(fit | ({"memorized": float(gives_back[is_wrong].mean())} if is_wrong.any() else {}))
        return {"by_share": by_share}

    def report(self, runs: Runs, folder: Path) -> str:
        """Test accuracy by loss and share of wrong labels, and the shares of training labels that models give back."""
        shares = sorted({fit["share"] for of_arm in runs.values() for run in of_arm for fit in run["by_share"]})
        curves = {
            arm: [points([(100 * fit["share"], fit["accuracy"]) for fit in run["by_share"]]) for run in of_arm]
            for arm, of_arm in runs.items()
        }
        plot(folder / "accuracy.png", curves, "wrong labels in the training (%)", "test accuracy")
        sections = ["![Test accuracy over the share of wrong labels](accuracy.png)"]
        for key, title in (
            ("accuracy", "Test accuracy"),
            ("fitted", "Share of the right training labels that the model gives back"),
            ("memorized", "Share of the wrong training labels that the model gives back"),
        ):
            rows = [
                [
                    f"`{arm}`",
                    *(
                        format_values(
                            [
                                fit[key]
                                for run in of_arm
                                for fit in run["by_share"]
                                if fit["share"] == share and key in fit
                            ]
                        )
                        for share in shares
                    ),
                ]
                for arm, of_arm in runs.items()
            ]
            head = ["loss", *(f"{share:.0%} wrong" for share in shares)]
            sections.append(f"### {title}\n\n{table(rows, head)}")
        return "\n\n".join(sections)


STUDY = NoisyLabels()


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


def train_classifier(
    config: LSGPTConfig,
    images: np.ndarray,
    labels: np.ndarray,
    loss: LossFunction,
    seed: int,
    folder: Path,
    options: dict[str, Any],
) -> PreTrainedModel:
    """
    Trains a new classifier with the optimizer and schedule of the recipe `micro`.

    Args:
        config: Configuration of the model.
        images: `(N, n)` grey levels.
        labels: `(N,)`.
        loss: The loss to minimize.
        seed: Seed for the initial weights and the order of the examples.
        folder: Output folder of the Trainer, which stays empty.
        options: Fields of `TrainingArguments`, including `max_steps`.

    Returns:
        The trained model in evaluation mode.
    """
    set_seed(seed)
    trainer = Trainer(
        model=LSGPTForSequenceClassification(config),
        args=small_training(folder, seed, options),
        train_dataset=Dataset.from_dict({"input_ids": images, "labels": labels}),
        data_collator=default_data_collator,
        compute_loss_func=loss,
    )
    trainer.train()
    return trainer.model.eval()


@torch.no_grad()
def classify(model: torch.nn.Module, images: np.ndarray, batch_size: int = 256) -> np.ndarray:
    """The most likely class of each image: `(N,)` for images `(N, n)`."""
    batches = torch.as_tensor(images, device=model.device).split(batch_size)
    return torch.cat([model(batch).logits.argmax(-1) for batch in batches]).cpu().numpy()
