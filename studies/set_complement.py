"""Which tokens are missing? The set complement task, trained on short inputs and tested on longer ones."""

import math
import tempfile
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel, Trainer, default_data_collator, set_seed

from lsgpt import LSGPTConfig, LSGPTForCausalLM
from lsgpt.configuration import load_preset
from lsgpt.modeling_lsgpt.modeling_lsgpt import LSGPTDecoderLayer
from lsgpt.training import AveragedWeightsCallback, StopOnBadLossCallback
from lsgpt.utilities import table

from .comparisons import Comparison, Metric, format_values
from .plots import plot
from .streams import Stream, small_training
from .study import SEED_OF_EVALUATION, Runs, Scale, Study, mean


ARCHITECTURES = ("attention-only", "mhsa", "ls")

REMEDIES = ("plain", "dropout", "post-norm")

WEIGHTS = ("raw", "ema", "bema")
"""The sets of weights that are measured in each training run: those of its last step, and the two averages."""

CLOSE = 0.005
"""The largest difference between two distances that counts as none."""


class Trained(NamedTuple):
    """Models that are compared: those of one architecture, trained with one remedy, with one of `WEIGHTS`."""

    architecture: str
    remedy: str = "plain"
    weights: str = "raw"

    @property
    def label(self) -> str:
        """The name in tables and plots."""
        name = f"`{self.architecture}`, {self.remedy}"
        return name if self.weights == "raw" else f"{name}, {self.weights}"


def beyond(remedy: str, weights: str = "raw") -> Metric:
    """The distance beyond the trained length of models that were trained with a remedy."""
    words = "the distance beyond the trained length" + ("" if remedy == "plain" else f" with {remedy}")
    words += "" if weights == "raw" else f" with {weights.upper()}"
    return Metric(words, f"trainings.{remedy}.{weights}.beyond_distance")


SOURCES = {
    "ema": ("EMA of the weights", "arXiv:2510.08341: it takes out the noise of the updates", beyond("plain", "ema")),
    "bema": ("an average with bias correction (BEMA)", "arXiv:2510.08341", beyond("plain", "bema")),
    "dropout": (
        "dropout",
        "arXiv:2510.08341, first version: it counteracts dispersion",
        beyond("dropout"),
    ),
    "post-norm": (
        "post-norm",
        "arXiv:2510.08341, second version: it sharpens again what dispersion has blurred",
        beyond("post-norm"),
    ),
}
"""For each remedy, its name, who says that it helps, and what is measured with it."""


class SetComplement(Study):
    """Set complement with averaged weights, dropout, post-norm, and LS-attention."""

    name = "set-complement"
    title = "Set complement"
    question = """\
Given different tokens, which ones are missing? A model that has learnt this on short inputs should manage longer ones,
too. Two things are said to be in the way (arXiv:2510.08341): attention disperses over more tokens than in training,
which moves the logits apart less and less; and when many next tokens are possible, the updates of the weights are
noisy. Which of the remedies helps beyond the trained length: averaged weights, dropout, norms after the sums, or local
heads, which never see more tokens than in training?"""
    protocol = """\
A row is a random order of all tokens of the vocabulary, of which the training shows the beginning. Each token but the
first is to be predicted from those before it; any token that has not come yet is as likely, so that the right answer
after s of v tokens is the uniform distribution over the other v - s, of which the training sees one sample for each.
Measured is the total variation distance between the model's distribution and the right one, from 0 to 1, after every
number of tokens, in 512 new rows; beyond the trained length means averaged over all longer inputs. (The uniform
distribution over all tokens is at the distance s / v.) A training whose loss becomes NaN or infinite ends before that
step, and is measured like the others. The Kullback-Leibler divergence of the model's distribution from the right one
is in the table.

The arms are architectures. `mhsa` and `ls` are small models of the usual kind, without positions, since a set has no
order; of the heads of `ls` one in each layer is global. `attention-only` is a single layer of multi-head attention
between embeddings and logits, as in the paper's theory: no MLP, no norm, no residual connection. Each run trains its
architecture three times: plain, with pre-norm blocks and without dropout; with dropout of attention weights,
embeddings and the outputs of branches; and post-norm, with the norms after the sums and not before the branches, in
`attention-only` after the attention. Two averages of the weights (EMA and BEMA) are taken in each training, which they
do not change.

It is a random search: a seed draws initial weights, rows and hyperparameters, which are the same for all that is
compared, so that the comparison is draw by draw. Drawn from a range, uniformly on a logarithmic scale, are the
learning rate, the weight decay, the share that is dropped, the horizon of EMA (1 / (1 - decay), in steps), and the
number of steps between updates of BEMA. (Its exponents are the published ones. Updated every 400 steps, as published,
it would be little else than the initial weights after so short a training.) With even chances, the learning rate stays
constant or falls to a tenth on a cosine. At `micro`: v = 16, trained on inputs of up to 5 tokens; 2 layers of 4 heads
of width 12, W = 3; 1,000 steps of 64 rows."""
    changes = """\
Until all runs had been made, a claim was about two of three models or trainings, by two standard errors of the
differences. It was replaced by one claim for each of them, with intervals by Student's t."""
    comparisons = {
        **{
            f"{key}-{name}": Comparison(
                f"{words} helps beyond the trained length (`{name}`)",
                source,
                metric,
                name,
                name,
                second_metric=beyond("plain"),
                margin=CLOSE,
            )
            for key, (words, source, metric) in SOURCES.items()
            for name in ARCHITECTURES
        },
        **{
            f"ls-{remedy}": Comparison(
                f"LS-attention stays closer to the right answer beyond the trained length ({remedy})",
                "ours: only global heads can disperse over more keys than they were trained on",
                beyond(remedy),
                "ls",
                "mhsa",
                margin=CLOSE,
            )
            for remedy in REMEDIES
        },
    }
    scales = {
        "micro": Scale(
            None,
            {
                "preset": "demo",
                "config": {
                    "vocab_size": 16,
                    "hidden_size": 48,
                    "num_attention_heads": 4,
                    "num_hidden_layers": 2,
                    "sliding_window": 3,
                    "initializer_range": 0.15,
                },
                "trained_length": 5,
                "eval_rows": 512,
                "ranges": {
                    "learning_rate": (5e-4, 5e-3),
                    "weight_decay": (1e-3, 0.1),
                    "dropout": (0.05, 0.4),
                    "ema_horizon": (30, 200),
                    "bema_every_n_steps": (1, 5),
                },
                "options": {"max_steps": 1000, "per_device_train_batch_size": 64, "warmup_steps": 100},
            },
            30,
            0.6,
        ),
    }

    def arms(self, scale: str) -> Mapping[str, Any]:
        """Configuration fields of each arm's model."""
        return {
            "attention-only": {"num_global_heads": "all", "num_hidden_layers": 1},
            "mhsa": {"num_global_heads": "all"},
            "ls": {"num_global_heads": 1},
        }

    def run(self, arm: str, seed: int, scale: str, folder: Path, fields: Sequence[str]) -> dict:
        """Trains one model with each remedy, all with the same hyperparameters, and measures them."""
        settings = self.scales[scale].fields
        drawn = draw(settings["ranges"], seed)
        values = {}
        for remedy in REMEDIES:
            dropouts = ("attention_dropout", "resid_dropout", "embd_dropout") if remedy == "dropout" else ()
            config = load_preset(
                settings["preset"],
                position_embedding_type="none",
                **{**settings["config"], **self.arms(scale)[arm], **dict.fromkeys(dropouts, drawn["dropout"])},
            )
            set_seed(seed)
            model = build_model(config, arm, remedy)
            values[remedy] = train_and_measure(model, drawn, seed, settings)
            print(remedy, values[remedy], flush=True)
        return {"hyperparameters": drawn, "trained_length": settings["trained_length"], "trainings": values}

    def report(self, runs: Runs, folder: Path) -> str:
        """Distances of all models, the effect of averages with each schedule, and plots over the input length."""
        rows = []
        for trained in (Trained(*names) for names in product(runs, REMEDIES, WEIGHTS)):
            of_arm = runs[trained.architecture]
            beyond = column(of_arm, trained, "beyond_distance")
            rows.append(
                [
                    trained.label,
                    format_values(column(of_arm, trained, "trained_distance")),
                    format_values(beyond),
                    f"{min(beyond):.3f}",
                    format_values(column(of_arm, trained, "beyond_divergence")),
                    f"{sum(run['trainings'][trained.remedy]['diverged'] for run in of_arm)} of {len(of_arm)}",
                ]
            )
        head = ["trained", "distance up to the trained length", "beyond it", "beyond it, best draw"]
        sections = [table(rows, [*head, "divergence beyond it (nats)", "diverged"])]

        schedules = {"constant": lambda rate: rate == 1, "falling": lambda rate: rate < 1}
        rows = [[f"`{arm}`"] for arm in runs]
        for row, (arm, of_arm) in zip(rows, runs.items()):
            for is_chosen, weights in product(schedules.values(), WEIGHTS[1:]):
                chosen = [run for run in of_arm if is_chosen(run["hyperparameters"]["final_rate"])]
                both = (column(chosen, Trained(arm, "plain", x), "beyond_distance") for x in (weights, "raw"))
                row.append(format_values([ours - theirs for ours, theirs in zip(*both)]))
        head = ["arm", *(f"{weights}, {name} rate" for name, weights in product(schedules, WEIGHTS[1:]))]
        sections.append(
            "The distance beyond the trained length with an average less that with the raw weights, of plain "
            f"trainings at a learning rate that stays constant and at one that falls:\n\n{table(rows, head)}"
        )

        for arm, of_arm in runs.items():
            shown = [Trained(arm, weights=weights) for weights in WEIGHTS]
            shown += [Trained(arm, remedy) for remedy in REMEDIES[1:]]
            curves = {trained.label.split(", ", 1)[1]: [mean_curve(of_arm, trained)] for trained in shown}
            lengths = [length for length, _ in curves["plain"][0]]
            curves["uniform over all tokens"] = [[(length, length / (len(lengths) + 1)) for length in lengths]]
            label = f"tokens in the input (trained on up to {of_arm[0]['trained_length']})"
            plot(folder / f"{arm}.png", curves, label, "distance, mean over draws")
            sections.append(f"### `{arm}`\n\n![Distance over the length of the input, {arm}]({arm}.png)")
        return "\n\n".join(sections)


STUDY = SetComplement()


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
        architecture: One of `ARCHITECTURES`; `mhsa` and `ls` differ in their configurations only.
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


def train_and_measure(model: PreTrainedModel, drawn: Mapping[str, float], seed: int, settings: Mapping) -> dict:
    """
    Trains a model on the beginnings of random permutations of its vocabulary, and measures it.

    Args:
        model: The model.
        drawn: The hyperparameters from `draw`.
        seed: Seed for the rows.
        settings: The `fields` of one of the study's scales.

    Returns:
        `diverged`, and the result of `measure` for each of `WEIGHTS`.
    """
    length, vocab_size = settings["trained_length"], model.config.vocab_size
    averages = [
        AveragedWeightsCallback("ema", decay=1 - 1 / drawn["ema_horizon"], name="ema"),
        AveragedWeightsCallback("bema", every_n_steps=round(drawn["bema_every_n_steps"]), name="bema"),
    ]
    guard = StopOnBadLossCallback()
    with tempfile.TemporaryDirectory() as folder:  # for averaged models, which the callbacks save and nothing uses
        args = small_training(
            Path(folder),
            seed,
            settings["options"],
            learning_rate=drawn["learning_rate"],
            weight_decay=drawn["weight_decay"],
            lr_scheduler_kwargs={"min_lr_rate": drawn["final_rate"]},
            bf16=False,
        )
        trainer = Trainer(
            model=model,
            args=args,
            train_dataset=Stream(lambda generator: as_row(generator.permutation(vocab_size)[: length + 1]), seed),
            data_collator=default_data_collator,
            callbacks=[guard, *averages],
        )
        trainer.train()
    orders = evaluation_rows(settings["eval_rows"], vocab_size)
    values = {"diverged": guard.bad_step is not None, "raw": measure(model, orders, length)}
    for callback in averages:
        with callback.averaged_weights(model):
            values[callback.name] = measure(model, orders, length)
    return values


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


def column(runs: Sequence[Mapping[str, Any]], trained: Trained, key: str) -> list:
    """One of the values that `measure` returns, for every run of an architecture."""
    return [run["trainings"][trained.remedy][trained.weights][key] for run in runs]


def mean_curve(runs: Sequence[Mapping[str, Any]], trained: Trained) -> list[tuple[int, float]]:
    """The distance after 1, 2, ... tokens, averaged over runs."""
    by_length = zip(*column(runs, trained, "distances"))
    return [(length, mean(distances)) for length, distances in enumerate(by_length, start=1)]
