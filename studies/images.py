"""Does a window need to cover the structure of the data? Next-pixel prediction, where rows are the structure."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image as Pillow

from lsgpt.configuration import load_preset
from lsgpt.training.metrics import token_losses
from lsgpt.training.plots import plot_curves
from lsgpt.utilities import table

from .streams import train_on_stream
from .study import (
    EXCHANGED,
    Claim,
    Finding,
    Runs,
    Scale,
    Study,
    below,
    compare_losses,
    curves_over,
    format_values,
    is_below,
    is_no_lower,
    no_lower,
    points,
)


PHOTOGRAPHS = "scikit-learn"
"""Name of the dataset that consists of the two photographs in scikit-learn."""

NUM_GREYS = 32

WINDOWS = {"quarter-row": 0.25, "half-row": 0.5, "one-row": 1.0, "row-and-more": 1.25, "four-rows": 4.0}
"""Window of each arm, in rows."""


class Images(Study):
    """Next-pixel prediction with windows shorter and longer than a row."""

    name = "images"
    title = "Images"
    question = """\
In text the dependencies between near neighbours are dense, and a short window covers them. In an image that is read
row by row, the pixel above is as near as the one to the left, and yet a whole row away. Does a window need to cover
this structure, or do global heads make up for it?"""
    protocol = """\
Photographs in 32 grey levels are cut into crops, which are read row by row; a model predicts each pixel from those
before. At `micro` they are the two photographs of scikit-learn, crops are 32 pixels wide and 16 high (n = 512), and
the right fifth of each photograph is for validation, so that no pixel of it is in a training crop. At `paper` they
are those of CIFAR-10, whole (n = 1,024), with its own test images. The model is that of the recipe `micro`, with
learned positions, at a learning rate of 0.01. In `mhsa` all heads are global, in `ls-...` one in each layer, in
`local-only-...` none; the rest of the name is the window: a quarter, half of a row, a row (which reaches just to the
pixel above the one that is predicted), a row and a quarter, and four rows. Over several layers local heads see
further: with a quarter of a row, four layers do not reach the row above, with half of a row they do. The loss is in
nats per pixel."""
    claims = {
        "row": Claim(
            "a window must cover the row: local heads do better with a row than with half of one",
            "paper's open question: a rule for the window",
            below("the mean loss", "local-only-one-row", "local-only-half-row"),
            EXCHANGED,
        ),
        "more": Claim(
            "local heads gain nothing from windows longer than a row",
            "paper's open question: a rule for the window",
            no_lower("both `local-only-row-and-more` and `local-only-four-rows`", "`local-only-one-row`"),
            "the mean losses of both are below that of `local-only-one-row` by more than two standard errors",
        ),
        "global-head": Claim(
            "a global head makes up for a window that is too short",
            "paper: global heads take what is far",
            below("the mean loss", "ls-half-row", "local-only-one-row"),
            EXCHANGED,
        ),
        "ls-row": Claim(
            "with a global head, too, the window must cover the row",
            "paper's open question: a rule for the window",
            below("the mean loss", "ls-one-row", "ls-half-row"),
            EXCHANGED,
        ),
        "mhsa": Claim(
            "LS-attention whose window covers the row has a lower loss than multi-head attention",
            "paper, beyond text",
            below("the mean loss", "ls-one-row", "mhsa"),
            EXCHANGED,
        ),
    }
    scales = {
        "micro": Scale(
            None,
            {
                "dataset": PHOTOGRAPHS,
                "width": 32,
                "height": 16,
                "preset": "demo",
                "config": {"hidden_size": 48, "num_hidden_layers": 4, "position_embedding_type": "learned"},
                "options": {
                    "max_steps": 800,
                    "per_device_train_batch_size": 4,
                    "learning_rate": 1e-2,
                    "warmup_steps": 100,
                },
            },
            3,
            0.5,
        ),
        "paper": Scale(
            None,
            {
                "dataset": "uoft-cs/cifar10",
                "width": 32,
                "height": 32,
                "preset": "paper-v1",
                "config": {},
                "options": {
                    "max_steps": 10_000,
                    "per_device_train_batch_size": 128,
                    "learning_rate": 1e-3,
                    "warmup_steps": 1000,
                },
            },
            3,
            20.0,
        ),
    }

    def arms(self, scale: str) -> Mapping[str, Any]:
        """Number of global heads, and the window in pixels."""
        width = self.scales[scale].fields["width"]
        split = {
            f"{kind}-{name}": {"num_global_heads": count, "sliding_window": round(window * width)}
            for kind, count in (("ls", 1), ("local-only", 0))
            for name, window in WINDOWS.items()
        }
        return {"mhsa": {"num_global_heads": "all"}, **split}

    def prepare(self, scale: str, folder: Path, fields: Sequence[str]):
        """Checks that the images can be loaded, before the first run. Raises `ImportError` as `load_images` does."""
        load_images(self.scales[scale].fields["dataset"])

    def run(self, arm: str, seed: int, scale: str, folder: Path, fields: Sequence[str]) -> dict:
        """Trains on random crops, and measures the loss on the validation crops."""
        settings = self.scales[scale].fields
        width, height = settings["width"], settings["height"]
        sizes = {"vocab_size": NUM_GREYS, "max_position_embeddings": width * height}
        config = load_preset(settings["preset"], **sizes, **settings["config"], **self.arms(scale)[arm])
        images = load_images(settings["dataset"])

        def make_row(generator: np.random.Generator) -> dict[str, np.ndarray]:
            return as_row(random_crop(images["train"], width, height, generator))

        model, values = train_on_stream(config, make_row, seed, folder / arm / f"seed-{seed}", settings["options"])
        losses = measure_losses(model, all_crops(images["validation"], width, height))
        by_row = losses.mean(0).view(height, width).nanmean(1)
        return {"eval_loss": losses.nanmean().item(), "loss_by_row": by_row.tolist(), **values}

    def judge(self, runs: Runs) -> dict[str, Finding]:
        """Judges each of `claims`."""
        losses = {arm: runs.column(arm, "eval_loss") for arm in self.arms(runs.scale)}
        pairs = {
            "row": ("local-only-one-row", "local-only-half-row"),
            "global-head": ("ls-half-row", "local-only-one-row"),
            "ls-row": ("ls-one-row", "ls-half-row"),
            "mhsa": ("ls-one-row", "mhsa"),
        }
        findings = {claim: compare_losses(losses, first, second) for claim, (first, second) in pairs.items()}
        longer, row = ("local-only-row-and-more", "local-only-four-rows"), losses["local-only-one-row"]
        figure = "loss " + ", ".join(f"{format_values(losses[x])} for `{x}`" for x in ("local-only-one-row", *longer))
        verdict = "not seen"
        if all(is_below(losses[arm], row) for arm in longer):
            verdict = "opposite"
        elif all(is_no_lower(losses[arm], row) for arm in longer):
            verdict = "seen"
        return {**findings, "more": Finding(figure, verdict)}

    def report(self, runs: Runs, folder: Path) -> str:
        """Losses and logits of each arm, and plots of the loss over the window and over the rows of a crop."""
        rows = [
            [
                f"`{arm}`",
                format_values(run["eval_loss"] for run in of_arm),
                format_values(run["loss_by_row"][-1] for run in of_arm),
                format_values((run["max_logit"] for run in of_arm), 1),
                f"{sum(run['diverged'] for run in of_arm)} of {len(of_arm)}",
            ]
            for arm, of_arm in runs.items()
        ]
        head = ["arm", "validation loss (nats per pixel)", "in the last row", "largest logit on the way", "diverged"]
        curves = {}
        for kind, label in (("ls", "one global head"), ("local-only", "none")):
            places = [(window, f"{kind}-{name}") for name, window in WINDOWS.items()]
            curves[label] = curves_over(runs, places, "eval_loss")
        ends = min(WINDOWS.values()), max(WINDOWS.values())
        curves["all heads global"] = [points([(x, run["eval_loss"]) for x in ends]) for run in runs.get("mhsa", [])]
        plot_curves(folder / "windows.png", curves, "window in rows", "validation loss (nats per pixel)", log_x=True)
        by_row = {
            arm: [points(list(enumerate(run["loss_by_row"], start=1))) for run in of_arm]
            for arm, of_arm in runs.items()
            if arm == "mhsa" or arm.endswith(("half-row", "one-row"))
        }
        plot_curves(folder / "rows.png", by_row, "row of the crop", "validation loss (nats per pixel)")
        return (
            f"{table(rows, head)}\n\n![Validation loss over the window](windows.png)\n\n"
            "![Validation loss by row of the crop](rows.png)"
        )


STUDY = Images()


def load_images(dataset: str) -> dict[str, list[np.ndarray]]:
    """
    Loads images in `NUM_GREYS` grey levels, `(rows, columns)` each, for training and for validation.

    Args:
        dataset: `PHOTOGRAPHS`, where the left four fifths of each photograph are for training; or the name on the Hub
            or the folder of a dataset of images with the splits `train` and `test`.

    Raises:
        ImportError: scikit-learn is not installed.
    """
    if dataset != PHOTOGRAPHS:
        from datasets import Image, load_dataset  # noqa: PLC0415 (for `paper` only)

        splits = load_dataset(dataset)
        column = next(name for name, kind in splits["train"].features.items() if isinstance(kind, Image))
        return {
            ours: [to_greys(image) for image in splits[theirs][column]]
            for ours, theirs in (("train", "train"), ("validation", "test"))
        }
    try:
        from sklearn.datasets import load_sample_images  # noqa: PLC0415 (an optional package)
    except ImportError as error:
        raise ImportError("the photographs need the package scikit-learn: pip install scikit-learn") from error
    greys = [to_greys(Pillow.fromarray(image)) for image in load_sample_images().images]
    edges = [image.shape[1] * 4 // 5 for image in greys]
    return {
        "train": [image[:, :edge] for image, edge in zip(greys, edges)],
        "validation": [image[:, edge:] for image, edge in zip(greys, edges)],
    }


def to_greys(image: Pillow.Image) -> np.ndarray:
    """Converts an image to pixels `(rows, columns)` from 0 (black) to `NUM_GREYS - 1` (white)."""
    return np.asarray(image.convert("L")) // (256 // NUM_GREYS)


def random_crop(images: Sequence[np.ndarray], width: int, height: int, generator: np.random.Generator) -> np.ndarray:
    """A random crop, `(height, width)`, of one of the images, each of which is equally likely."""
    image = images[int(generator.integers(len(images)))]
    top, left = (generator.integers(size - part + 1) for size, part in zip(image.shape, (height, width)))
    return image[top : top + height, left : left + width]


def all_crops(images: Sequence[np.ndarray], width: int, height: int) -> np.ndarray:
    """Cuts images into adjacent crops that do not overlap, `(N, height, width)`."""
    crops = [
        image[top : top + height, left : left + width]
        for image in images
        for top in range(0, image.shape[0] - height + 1, height)
        for left in range(0, image.shape[1] - width + 1, width)
    ]
    return np.stack(crops)


def as_row(crop: np.ndarray) -> dict[str, np.ndarray]:
    """Flattens a crop to a sequence, row by row; its first pixel is not predicted."""
    ids = crop.reshape(-1).astype(np.int64)
    labels = ids.copy()
    labels[0] = -100
    return {"input_ids": ids, "labels": labels}


@torch.no_grad()
def measure_losses(model: torch.nn.Module, crops: np.ndarray, batch_size: int = 32) -> torch.Tensor:
    """The loss of each pixel in nats, `(N, height * width)`, NaN for the first of each crop."""
    ids = torch.as_tensor(np.stack([as_row(crop)["input_ids"] for crop in crops]))
    batches = [batch.to(model.device) for batch in ids.split(batch_size)]
    losses = torch.cat([token_losses(model(batch).logits, batch).cpu() for batch in batches])
    losses[:, 0] = torch.nan
    return losses
