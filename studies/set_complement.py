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
from lsgpt.modeling_lsgpt.modeling_lsgpt import LSGPTDecoderLayer
from lsgpt.training import AveragedWeightsCallback
from lsgpt.utilities import table

from .comparisons import Comparison, Metric, Runs, format_values
from .plots import plot
from .streams import Stream, train_small
from .study import SEED_OF_EVALUATION, Study, mean, tabulate


REMEDIES = ("plain", "dropout", "post-norm")

WEIGHTS = ("raw", "ema", "bema")
"""The sets of weights that are measured in each training run: those of its last step, and the two averages."""

CLOSE = 0.005
"""The largest difference between two distances that counts as none."""


def beyond(remedy: str, weights: str = "raw") -> Metric:
    """The distance beyond the trained length of models that were trained with a remedy."""
    words = "the distance beyond the trained length" + ("" if remedy == "plain" else f" with {remedy}")
    words += "" if weights == "raw" else f" with {weights.upper()}"
    return Metric(words, f"trainings.{remedy}.{weights}.beyond_distance")


def gain(weights: str) -> Metric:
    """What an average changes in plain training."""
    return Metric("", lambda run: beyond("plain", weights).of(run) - beyond("plain").of(run))


MEASURED = {
    "ema": beyond("plain", "ema"),
    "bema": beyond("plain", "bema"),
    "dropout": beyond("dropout"),
    "post-norm": beyond("post-norm"),
}
"""What is measured with each remedy. The first version of the paper has dropout, the second post-norm."""


class SetComplement(Study):
    """Set complement with averaged weights, dropout, post-norm, and LS-attention."""

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
        f"{key}-{name}": Comparison(
            "arXiv:2510.08341", metric, name, name, second_metric=beyond("plain"), margin=CLOSE
        )
        for key, metric in MEASURED.items()
        for name in ("attention-only", "mhsa", "ls")
    } | {
        f"ls-{remedy}": Comparison("ours: only global heads can disperse", beyond(remedy), "ls", "mhsa", margin=CLOSE)
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
        """
        Trains a model with the hyperparameters from `draw` on the beginnings of random permutations of its vocabulary.
        Returns `diverged`, and the result of `measure` for each of `WEIGHTS`.
        """
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
        rows = Stream(lambda generator: as_row(generator.permutation(vocab_size)[: length + 1]), seed)
        with tempfile.TemporaryDirectory() as folder:  # for averaged models, which the callbacks save and nothing uses
            figures = train_small(model, rows, seed, Path(folder), options, averages, trainer_class=Trainer)
        orders = evaluation_rows(self.eval_rows, vocab_size)
        values = {"diverged": figures["diverged"], "raw": measure(model, orders, length)}
        for callback in averages:
            with callback.averaged_weights(model):
                values[callback.name] = measure(model, orders, length)
        return values

    def report(self, runs: Runs, folder: Path) -> str:
        """Distances of all models, the effect of averages with each schedule, and plots over the input length."""
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
        rows = [
            [
                f"`{arm}`",
                *(
                    format_values(
                        [gain(weights).of(run) for run in of_arm if run["hyperparameters"]["final_rate"] == final_rate]
                    )
                    for final_rate, weights in product((1.0, 0.1), WEIGHTS[1:])
                ),
            ]
            for arm, of_arm in runs.items()
        ]
        head = [f"{weights}, {rate} rate" for rate, weights in product(("constant", "falling"), WEIGHTS[1:])]
        sections = [
            tabulate(trained, columns, "trained", diverged=True),
            "What an average of the weights adds to the distance beyond the trained length in plain training, at a "
            f"constant and at a falling learning rate:\n\n{table(rows, ['arm', *head])}",
        ]
        for arm, of_arm in runs.items():
            curves = {}
            for remedy, weights in (*product(("plain",), WEIGHTS), *product(REMEDIES[1:], ("raw",))):
                by_length = zip(*(run["distances"] for run in trained[f"{arm}, {remedy}, {weights}"]))
                curves[f"{remedy}, {weights}"] = [list(enumerate(map(mean, by_length), start=1))]
            lengths = [length for length, _ in curves["plain, raw"][0]]
            curves["uniform over all tokens"] = [[(length, length / (len(lengths) + 1)) for length in lengths]]
            label = f"tokens in the input (trained on up to {of_arm[0]['trained_length']})"
            plot(folder / f"{arm}.png", curves, label, "distance, mean over draws")
            sections.append(f"### `{arm}`\n\n![Distance over the length of the input, {arm}]({arm}.png)")
        return "\n\n".join(sections)


def draw(ranges: Mapping[str, tuple[float, float]], seed: int) -> dict[str, float]:
    """
    Draws hyperparameters: one number from each range, uniformly on a logarithmic scale, and `final_rate`, the final
    learning rate as a fraction of the initial one, which is 1 or 0.1.
    """
    generator = np.random.default_rng(seed)
    drawn = {name: math.exp(generator.uniform(math.log(low), math.log(high))) for name, (low, high) in ranges.items()}
    return {**drawn, "final_rate": float(generator.choice((0.1, 1.0)))}


def as_row(tokens: np.ndarray) -> dict[str, np.ndarray]:
    """A row of a batch from tokens `(n,)`, all of which are predicted except the first."""
    return {"input_ids": tokens, "labels": np.concatenate(([-100], tokens[1:]))}


def evaluation_rows(count: int, vocab_size: int) -> np.ndarray:
    """Random permutations of the vocabulary, `(count, vocab_size)`, always the same, and never those of training."""
    generator = np.random.default_rng(SEED_OF_EVALUATION)
    return np.stack([generator.permutation(vocab_size) for _ in range(count)])


class PostNormLayer(LSGPTDecoderLayer):
    """A block with each norm after the residual sum, as in "Attention Is All You Need"."""

    def forward(self, hidden_states: torch.Tensor, **kwargs) -> torch.Tensor:
        """Maps `(B, T, hidden_size)` to the same shape; `kwargs` go to the attention."""
        attended, _ = self.self_attn(hidden_states, **kwargs)
        hidden_states = self.input_layernorm(hidden_states + self.dropout(attended))
        return self.post_attention_layernorm(hidden_states + self.dropout(self.mlp(hidden_states)))


class AttentionOnlyLayer(LSGPTDecoderLayer):
    """A block that consists of its attention only."""

    def forward(self, hidden_states: torch.Tensor, **kwargs) -> torch.Tensor:
        """Maps `(B, T, hidden_size)` to the same shape; `kwargs` go to the attention."""
        attended, _ = self.self_attn(hidden_states, **kwargs)
        return self.dropout(attended)


def build_model(config: LSGPTConfig, architecture: str, remedy: str) -> PreTrainedModel:
    """
    Builds a new model.

    Args:
        config: Sizes, heads and dropout of the model.
        architecture: One of the arms; `mhsa` and `ls` differ in their configurations only.
        remedy: One of `REMEDIES`; only `post-norm` changes more than the configuration.
    """
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
    The right distribution after each beginning of a row.

    Args:
        orders (`(N, v)`): Permutations of the tokens from 0 to v - 1.

    Returns:
        `(N, v - 1, v)` in float64. Index s - 1 has the uniform distribution over the tokens missing after s tokens.
    """
    is_absent = 1 - nn.functional.one_hot(orders)[:, :-1].cumsum(1).double()
    return is_absent / is_absent.sum(-1, keepdim=True)


@torch.no_grad()
def measure(model: nn.Module, orders: np.ndarray, trained_length: int) -> dict[str, Any]:
    """
    Measures how far a model's distributions are from the right ones.

    Args:
        model: A causal language model, which is put into evaluation mode.
        orders (`(N, v)`): See `right_answers`.
        trained_length: The largest number of input tokens in training.

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
