"""Does an exponentiated loss help a language model that is trained on text with some corrupted lines?"""

import json
import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Trainer

from lsgpt.configuration import load_arms
from lsgpt.training import Arguments, exponentiated_loss
from lsgpt.training.plots import plot_curves
from lsgpt.training.train import load_texts, make_blocks
from lsgpt.utilities import table

from .noisy_labels import EXPONENTS, judge_costs, judge_gains
from .study import Claim, Finding, Runs, Scale, TrainingStudy, curves_over, format_values, number, validation_blocks


SHARES = {"clean": 0.0, "corrupted": 0.3}
"""Share of corrupted lines in each kind of text."""

CLOSE = 0.01
"""The largest difference in loss, in nats per token, that counts as none: 1% of perplexity."""

SEED_OF_CORRUPTION = 0
"""Seed that makes the corrupted text the same in all runs, which draw their blocks from it with seeds of their own."""

NUM_BLOCKS = 32
"""Number of validation blocks on which the accuracy of next-token predictions is measured."""


class NoisyText(TrainingStudy):
    """Exponentiated losses on books in which some lines are corrupted."""

    name = "noisy-text"
    title = "Corrupted text"
    question = """\
In text there are no labels to be wrong, but there are lines that make no sense: tables, page headers, errors of a
scanner. Does a language model become better when its loss, raised to a power below 1, gives them less weight
(arXiv:1902.06127)?"""
    protocol = """\
Language models with LS-attention are trained on books as they are (`clean-...`), and on books of which 30% of the
lines, drawn at random, have been corrupted (`corrupted-...`): each of their words is replaced by a word drawn at
random from the same book, so that a corrupted line has as many words as before, all of them real ones, and makes no
sense. The loss of each token is raised to the power in the arm's name; `e1` is the cross-entropy. The validation text
is never corrupted, and losses, perplexities and accuracies are those on it, of the cross-entropy in all arms. Runs
with the same seed share initial weights and order of the blocks, and differences are taken seed by seed. An
exponentiated loss is not at its minimum where a model gives every token its true probability, so that its perplexity
may be worse although it guesses as well: the share of next tokens that have the highest probability is given, too. A
run has diverged when its loss became not finite or ended above that of guessing all tokens alike."""
    claims = {
        "corrupted": Claim(
            "a language model that is trained on corrupted text has a lower perplexity on clean text with an exponent "
            "below 1",
            "paper (arXiv:1902.06127), in language models",
            "with at least two of the three exponents, the loss of `corrupted-e...` is below that of `corrupted-e1` "
            "by more than two standard errors of the difference",
            "with at least two of them, it is above by more than that",
        ),
        "clean": Claim(
            "on clean text, an exponent below 1 costs a language model nothing",
            "ours",
            f"with each of the three exponents, the mean loss of `clean-e...` is above that of `clean-e1` by at most "
            f"{CLOSE:g} nats, which is 1% of perplexity",
            "with at least two of them, it is above by more than that, and by more than two standard errors",
        ),
    }
    scales = {
        "micro": Scale("micro", {"max_steps": 600}, 5, 0.6),
        # Batches are small because the loss is computed outside the model, which therefore returns all of its logits.
        "paper": Scale(
            "paper-v1",
            {
                "max_steps": 50_000,
                "stop_at_step": None,
                "per_device_train_batch_size": 32,
                "gradient_accumulation_steps": 8,
            },
            5,
            1800.0,
        ),
    }

    def arms(self, scale: str) -> Mapping[str, Any]:
        """LS-attention at every exponent, on clean and on corrupted text."""
        ls = load_arms()["ls"]
        return {arm_at(kind, e): ls for e in EXPONENTS for kind in SHARES}

    def build(self, arguments: Arguments, arm: str) -> Trainer:
        """Builds the trainer of a run, with the loss and the training text of its arm."""
        trainer = super().build(arguments, arm)
        kind, e = arm.split("-e")
        trainer.compute_loss_func = exponentiated_loss(float(e))
        if share := SHARES[kind]:
            documents = load_texts(arguments.data)
            documents["train"] = documents["train"].map(corrupt_row, fn_kwargs={"share": share})
            trainer.train_dataset = make_blocks(arguments, documents, trainer.processing_class)["train"]
        return trainer

    def measure(self, folder: Path) -> dict:
        """
        The share of next tokens that the model predicts, and whether it diverged. The training loss does not show
        whether it did, because it is a power of the cross-entropy.
        """
        results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
        model = AutoModelForCausalLM.from_pretrained(folder)
        blocks = validation_blocks(folder, NUM_BLOCKS, model.config.max_position_embeddings)
        is_finished = results["status"] == "finished"
        return {
            "accuracy": guess_next(model, blocks),
            "diverged": not (is_finished and number(results["eval_loss"]) < math.log(model.config.vocab_size)),
        }

    def judge(self, runs: Runs) -> dict[str, Finding]:
        """Judges each of `claims`."""
        losses = {arm: runs.column(arm, "eval_loss") for arm in self.arms(runs.scale)}
        findings = {}
        for kind, share in SHARES.items():
            base, *others = [losses[arm_at(kind, e)] for e in EXPONENTS]
            costs = [[ours - theirs for ours, theirs in zip(of_arm, base)] for of_arm in others]
            gains = [[-cost for cost in of_arm] for of_arm in costs]
            figure = "loss " + ", ".join(
                f"{format_values(losses[arm])} for `{arm}`" for arm in (arm_at(kind, e) for e in EXPONENTS)
            )
            findings[kind] = Finding(figure, judge_gains(gains) if share else judge_costs(costs, CLOSE))
        return findings

    def report(self, runs: Runs, folder: Path) -> str:
        """Figures of every arm on clean text, and a plot of the perplexity over the exponent."""
        rows = [
            [
                f"`{arm}`",
                format_values((_perplexity(run) for run in of_arm), 2),
                format_values(run["eval_loss"] for run in of_arm),
                format_values(run["accuracy"] for run in of_arm),
                format_values((run["max_logit"] for run in of_arm), 1),
                f"{sum(run['diverged'] for run in of_arm)} of {len(of_arm)}",
            ]
            for arm, of_arm in runs.items()
        ]
        head = ["arm", "perplexity on clean text", "loss (nats per token)", "next tokens guessed"]
        head += ["largest logit on the way", "diverged"]
        perplexities = Runs({arm: [{"perplexity": _perplexity(run)} for run in x] for arm, x in runs.items()})
        curves = {
            f"{share:.0%} of lines corrupted": curves_over(
                perplexities, [(e, arm_at(kind, e)) for e in sorted(EXPONENTS)], "perplexity"
            )
            for kind, share in SHARES.items()
        }
        plot_curves(folder / "perplexity.png", curves, "exponent e", "perplexity on clean text", log_x=True)
        return f"{table(rows, head)}\n\n![Perplexity on clean text over the exponent](perplexity.png)"


STUDY = NoisyText()


def arm_at(kind: str, e: float) -> str:
    """The name of an arm, from its kind of text (a key of `SHARES`) and its exponent."""
    return f"{kind}-e{e:g}"


def _perplexity(run: dict) -> float:
    return math.exp(number(run["eval_loss"]))


def corrupt_row(row: dict, share: float) -> dict:
    """Applies `corrupt_lines` to a document."""
    return {"text": corrupt_lines(row["text"], share)}


def corrupt_lines(text: str, share: float, seed: int = SEED_OF_CORRUPTION) -> str:
    """
    Replaces every word of some lines by a word drawn at random from the whole text.

    The choice of lines and words depends only on the text and the seed. So a stream of texts is corrupted in the same
    way in every pass, whatever texts came before.

    Args:
        text: Lines of words.
        share: Share of the lines with words that are corrupted, rounded to a whole number of lines.
        seed: Random seed.
    """
    generator = np.random.default_rng((seed, zlib.crc32(text.encode())))
    words, lines = np.array(text.split(), dtype=object), text.split("\n")
    with_words = [i for i, line in enumerate(lines) if line.strip()]
    for i in generator.permutation(with_words)[: round(share * len(with_words))]:
        lines[i] = " ".join(words[generator.integers(len(words), size=len(lines[i].split()))])
    return "\n".join(lines)


@torch.no_grad()
def guess_next(model: torch.nn.Module, blocks: torch.Tensor, batch_size: int = 4) -> float:
    """The share of tokens in blocks `(N, n)`, except the first of each, to which the model gives top probability."""
    is_right = [(model(batch).logits[:, :-1].argmax(-1) == batch[:, 1:]).float() for batch in blocks.split(batch_size)]
    return torch.cat(is_right).mean().item()
