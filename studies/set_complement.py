"""Which tokens are missing? The set complement task, trained on short inputs and tested on longer ones."""

import math
import tempfile
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel, Trainer, set_seed

from lsgpt import LSGPTConfig, LSGPTForCausalLM
from lsgpt.configuration import load_preset
from lsgpt.modeling_lsgpt import CACHE
from lsgpt.modeling_lsgpt.modeling_lsgpt import LSGPTDecoderLayer
from lsgpt.training import AveragedWeightsCallback
from lsgpt.utilities.plots import plot_curves

from .comparisons import Comparison, Metric, Runs
from .study import SEED_OF_EVALUATION, Stream, Study, tabulate, train_small


REMEDIES = ("plain", "dropout", "post-norm")

WEIGHTS = ("raw", "ema", "bema")
"""The sets of weights that are measured in each training run: those of its last step, and the two averages."""


def beyond(remedy: str, weights: str = "raw") -> Metric:
    """The distance beyond the trained length of models that were trained with a remedy."""
    words = "the distance beyond the trained length" + ("" if remedy == "plain" else f" with {remedy}")
    words += "" if weights == "raw" else f" with {weights.upper()}"
    return Metric(words, f"trainings.{remedy}.{weights}.beyond_distance", margin=0.005)


MEASURED = {
    "ema": beyond("plain", "ema"),
    "bema": beyond("plain", "bema"),
    "dropout": beyond("dropout"),
    "post-norm": beyond("post-norm"),
}
"""What is measured with each remedy. The first version of the paper has dropout, the second post-norm."""


class SetComplement(Study):
    name = "set-complement"
    title = "Set complement"
    question = """\
Given some different tokens, which ones are missing? A model that has learned this on short inputs should manage
longer ones, too. Two obstacles have been named (arXiv:2510.08341): over more tokens than in training, attention
disperses, which separates the logits less and less; and when many next tokens are possible, the updates of the
weights are noisy. Which remedy helps beyond the trained length: averaged weights, dropout, norms after the sums, or
local heads, which never see more tokens than in training?"""
    protocol = """\
A row is a random order of all tokens of the vocabulary, of which training shows the beginning. Each token but the
first is to be predicted from those before it; all tokens that have not occurred yet are equally likely, so that the
right answer after s of v tokens is the uniform distribution over the other v - s. The measure is the total variation
distance of the model's distribution from it, from 0 to 1, after every number of tokens, in 512 new rows; beyond the
trained length means averaged over all longer inputs. A training whose loss becomes NaN or infinite ends before that
step, and is measured like the others.

The arms have no positions, since a set has no order: small models, `mhsa` with only global heads and `ls` with one in
each layer; and `attention-only`, a single layer of multi-head attention between embeddings and logits, as in the
theory of that paper. Each run trains its architecture three times: plain, with pre-norm blocks and without dropout;
with dropout of attention weights, embeddings and branch outputs; and post-norm, with the norms after the sums instead
of before the branches. Two averages of the weights (EMA and BEMA) are taken in each training, which they do not
change.

A seed draws initial weights, rows and hyperparameters, which are the same for everything that is compared: on a
logarithmic scale, the learning rate, the weight decay, the dropout, the horizon of EMA (1 / (1 - decay), in steps),
and the number of steps between updates of BEMA (every 400 steps, as published, it would be little more than the
initial weights after so short a training); with even chances, the learning rate stays constant or falls to a tenth on
a cosine. Sizes: v = 16, trained on inputs of up to 5 tokens; 2 layers of 4 heads of width 12, W = 3; 1,000 steps of
64 rows."""
    changes = """\
Until all runs had been made, a claim was about two of three models or trainings, by two standard errors of the
differences. It was replaced by one claim for each of them, with intervals by Student's t."""
    arms = {
        "attention-only": {"num_global_heads": "all", "num_hidden_layers": 1},
        "mhsa": {"num_global_heads": "all"},
        "ls": {"num_global_heads": 1},
    }
    comparisons = {
        f"{key}-{name}": Comparison("arXiv:2510.08341", metric, name, name, beyond("plain"))
        for key, metric in MEASURED.items()
        for name in ("attention-only", "mhsa", "ls")
    } | {
        f"ls-{remedy}": Comparison("ours: only global heads can disperse", beyond(remedy), "ls", "mhsa")
        for remedy in REMEDIES
    }
    num_seeds = 30
    hours = 0.6
    model: Mapping[str, Any] = {
        "vocab_size": 16,
        "hidden_size": 48,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "sliding_window": 3,
        "initializer_range": 0.15,
    }
    trained_length = 5
    eval_rows = 512
    ranges = {
        "learning_rate": (5e-4, 5e-3),
        "weight_decay": (1e-3, 0.1),
        "dropout": (0.05, 0.4),
        "ema_horizon": (30, 200),
        "bema_every_n_steps": (1, 5),
    }
    options: Mapping[str, Any] = {
        "max_steps": 1000,
        "per_device_train_batch_size": 64,
        "warmup_steps": 100,
        "bf16": False,
    }

    def run(self, arm: str, seed: int, folder: Path, fields: Sequence[str]) -> dict:
        """Trains one model with each remedy, all with the same hyperparameters, and measures them."""
        drawn = draw(self.ranges, seed)
        values = {}
        for remedy in REMEDIES:
            dropouts = ("attention_dropout", "resid_dropout", "embd_dropout") if remedy == "dropout" else ()
            shape = {**self.model, **self.arms[arm], **dict.fromkeys(dropouts, drawn["dropout"])}
            set_seed(seed)
            model = build_model(load_preset("demo", position_embedding_type="none", **shape), arm, remedy)
            values[remedy] = self.train_and_measure(model, drawn, seed)
            print(remedy, values[remedy], flush=True)
        return {"hyperparameters": drawn, "trained_length": self.trained_length, "trainings": values}

    def train_and_measure(self, model: PreTrainedModel, drawn: Mapping[str, float], seed: int) -> dict:
        """Trains a model with hyperparameters. Returns `diverged`, and what `measure` says of all `WEIGHTS`."""
        length, vocab_size = self.trained_length, model.config.vocab_size
        averages = [
            AveragedWeightsCallback("ema", decay=1 - 1 / drawn["ema_horizon"], name="ema"),
            AveragedWeightsCallback("bema", every_n_steps=round(drawn["bema_every_n_steps"]), name="bema"),
        ]
        options = {
            **self.options,
            "learning_rate": drawn["learning_rate"],
            "weight_decay": drawn["weight_decay"],
            "lr_scheduler_kwargs": {"min_lr_rate": drawn["final_rate"]},
        }

        def make_row(generator: np.random.Generator) -> dict[str, np.ndarray]:
            tokens = generator.permutation(vocab_size)[: length + 1]
            return {"input_ids": tokens, "labels": np.concatenate(([-100], tokens[1:]))}

        with tempfile.TemporaryDirectory() as folder:  # for averaged models, which the callbacks save and nothing uses
            rows = Stream(make_row, seed)
            diverged = train_small(model, rows, seed, Path(folder), options, averages, trainer_class=Trainer)
        orders = evaluation_rows(self.eval_rows, vocab_size)
        values = {"diverged": diverged, "raw": measure(model, orders, length)}
        for callback in averages:
            with callback.averaged_weights(model):
                values[callback.name] = measure(model, orders, length)
        return values

    def report(self, runs: Runs, folder: Path) -> str:
        trained = {
            f"{arm}, {remedy}, {weights}": [
                {**run["trainings"][remedy][weights], "diverged": run["trainings"][remedy]["diverged"]}
                for run in of_arm
            ]
            for (arm, of_arm), remedy, weights in product(runs.items(), REMEDIES, WEIGHTS)
        }
        columns = {
            "distance up to the trained length": Metric("", "trained_distance"),
            "beyond it": Metric("", "beyond_distance"),
            "divergence beyond it (nats)": Metric("", "beyond_divergence"),
        }
        gains, plain = {}, beyond("plain")
        for (arm, of_arm), (schedule, rate) in product(runs.items(), (("constant", 1.0), ("falling", 0.1))):
            chosen = [run for run in of_arm if run["hyperparameters"]["final_rate"] == rate]
            gains[f"{arm}, {schedule} rate"] = [
                {weights: MEASURED[weights].of(run) - plain.of(run) for weights in WEIGHTS[1:]} for run in chosen
            ]
        sections = [
            tabulate(trained, columns, "trained", diverged=True),
            "What an average of the weights adds to the distance beyond the trained length in plain training:\n\n"
            f"{tabulate(gains, {weights: Metric('', weights) for weights in WEIGHTS[1:]})}",
        ]
        shown = ("plain, raw", "plain, ema", "plain, bema", "dropout, raw", "post-norm, raw")
        for arm in runs:
            distances = {label: [run["distances"] for run in trained[f"{arm}, {label}"]] for label in shown}
            means = {label: [list(enumerate(np.mean(x, axis=0), start=1))] for label, x in distances.items()}
            tokens = f"tokens in the input (trained on up to {self.trained_length})"
            sections.append(plot_curves(folder / f"{arm}.png", means, tokens, f"distance, {arm} (mean over draws)"))
        return "\n\n".join(sections)


def draw(ranges: Mapping[str, tuple[float, float]], seed: int) -> dict[str, float]:
    """
    Draws hyperparameters: a number from each range, uniformly on a logarithmic scale, and `final_rate`, the last
    learning rate as a fraction of the first, 1 or 0.1.
    """
    generator = np.random.default_rng(seed)
    drawn = {name: math.exp(generator.uniform(math.log(low), math.log(high))) for name, (low, high) in ranges.items()}
    return {**drawn, "final_rate": float(generator.choice((0.1, 1.0)))}


def evaluation_rows(count: int, vocab_size: int) -> np.ndarray:
    """Random permutations of the vocabulary, `(count, vocab_size)`, always the same, and never those of training."""
    generator = np.random.default_rng(SEED_OF_EVALUATION)
    return np.stack([generator.permutation(vocab_size) for _ in range(count)])


class PostNormLayer(LSGPTDecoderLayer):
    """A block with each norm after the residual sum, as in "Attention Is All You Need"."""

    def forward(self, hidden_states: torch.Tensor, **kwargs) -> torch.Tensor:
        attended, _ = self.self_attn(hidden_states, past_key_values=kwargs.pop(CACHE, None), **kwargs)
        hidden_states = self.input_layernorm(hidden_states + self.dropout(attended))
        return self.post_attention_layernorm(hidden_states + self.dropout(self.mlp(hidden_states)))


class AttentionOnlyLayer(LSGPTDecoderLayer):
    """A block that consists of its attention only."""

    def forward(self, hidden_states: torch.Tensor, **kwargs) -> torch.Tensor:
        attended, _ = self.self_attn(hidden_states, past_key_values=kwargs.pop(CACHE, None), **kwargs)
        return self.dropout(attended)


def build_model(config: LSGPTConfig, architecture: str, remedy: str) -> PreTrainedModel:
    """A new model. Only the architecture `attention-only` and the remedy `post-norm` change more than `config`."""
    model = LSGPTForCausalLM(config)
    is_alone, is_post_norm = architecture == "attention-only", remedy == "post-norm"
    for layer in model.model.layers:
        if is_alone:
            layer.__class__ = AttentionOnlyLayer
            layer.input_layernorm = layer.post_attention_layernorm = layer.mlp = nn.Identity()
        elif is_post_norm:
            layer.__class__ = PostNormLayer
    # In `attention-only`, the norm before the logits directly follows the attention, which makes the model post-norm.
    # Post-norm blocks of the other architectures end with a norm of their own and do not need this one.
    if is_alone != is_post_norm:
        model.model.norm = nn.Identity()
    return model


def right_answers(orders: torch.Tensor) -> torch.Tensor:
    """
    The right distributions for permutations of the tokens from 0 to v - 1, `(N, v)`: in float64 `(N, v - 1, v)`, at
    index s - 1 the uniform distribution over the tokens that are missing after s tokens.
    """
    is_absent = 1 - nn.functional.one_hot(orders)[:, :-1].cumsum(1).double()
    return is_absent / is_absent.sum(-1, keepdim=True)


@torch.no_grad()
def measure(model: nn.Module, orders: np.ndarray, trained_length: int) -> dict[str, Any]:
    """
    Measures how far the distributions of a causal language model are from the right ones, for permutations `(N, v)`.

    Returns:
        `distances`, the total variation distances after 1 to v - 1 tokens, averaged over rows; `trained_distance` and
        `beyond_distance`, their means up to the trained length and over all longer inputs; and `beyond_divergence`,
        the mean Kullback-Leibler divergence in nats over all longer inputs. If the model's numbers are not finite, the
        distance is 1, its largest possible value, and the divergence is NaN.
    """
    rows = torch.as_tensor(orders)
    right = right_answers(rows)
    logits = model.eval()(rows[:, :-1].to(model.device)).logits
    log_probabilities = logits.double().log_softmax(-1).cpu()
    distances = (log_probabilities.exp() - right).abs().sum(-1).div(2).nan_to_num(nan=1.0).mean(0)
    divergences = (torch.xlogy(right, right) - right * log_probabilities).sum(-1).mean(0)
    return {
        "distances": [round(distance, 5) for distance in distances.tolist()],
        "trained_distance": distances[:trained_length].mean().item(),
        "beyond_distance": distances[trained_length:].mean().item(),
        "beyond_divergence": divergences[trained_length:].mean().item(),
    }
