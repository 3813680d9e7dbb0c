"""Do models with averaged weights follow the rules of Othello in games longer than those in training?"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from lsgpt.configuration import load_preset
from lsgpt.training import AveragedWeightsCallback
from lsgpt.utilities import table

from .comparisons import Comparison, Metric, format_values, less
from .plots import plot
from .streams import train_on_stream
from .study import SEED_OF_EVALUATION, Runs, Scale, Study, points


NUM_MOVES = 60
"""Number of moves in a whole game: all squares but the four that are occupied at the start."""

NUM_SHORT = 30
"""Number of moves in shortened training games."""

NUM_SQUARES = 64
"""Number of squares, which are the tokens: `8 * row + column`, with a1 as 0, b1 as 1 and h8 as 63."""

WEIGHTS = {"raw": "as trained", "ema": "EMA", "bema": "BEMA"}
"""The sets of weights that are compared, and their names in tables and plots."""

KINDS = {"mhsa": "multi-head attention", "ls": "LS-attention"}

CLOSE = 0.005
"""The largest difference between shares that counts as none."""


def share(name: str, part: str = "beyond") -> Metric:
    """The share of legal first choices of one set of weights, within or beyond the trained length."""
    return Metric(
        f"the share of legal moves {part} move {NUM_SHORT} ({WEIGHTS[name]})", f"weights.{name}.legal_{part}", 4
    )


def gain(name: str) -> Metric:
    """What an average gains over the raw weights of the same training beyond the trained length."""
    raw, averaged = share("raw"), share(name)
    return Metric(f"what {WEIGHTS[name]} gains beyond move {NUM_SHORT}", lambda run: averaged.of(run) - raw.of(run), 4)


class Game(NamedTuple):
    """A game without its passes, which are not tokens."""

    moves: list[int]
    """The squares that were played, in order."""
    legal: list[list[int]]
    """For each move, the squares that could have been played."""


class Othello(Study):
    """Legal moves in games longer than those in training, with raw and averaged weights and both attentions."""

    name = "othello"
    title = "Othello"
    question = """\
A model that is trained on the first half of games of Othello has to play the second half, too: does it know the rules
beyond the length that it was trained on? Many next moves are equally right, so that every update of the weights is
noisy; an average of the weights should be less so. And the more tokens a softmax attends to, the less it can tell them
apart; the window of local heads never holds more of them than in the training."""
    protocol = f"""\
Games of random moves, each of which is drawn from the legal ones with the same probability, are made during the
training and never stored. A token is the square of a move; a pass is no token, so that the next move is the other
player's. The model predicts every move but the first. `mhsa-...` has global heads only, `ls-...` one in each layer.
`...-30` is trained on the first {NUM_SHORT} moves of games; `...-whole`, the control, on as many whole games: how much
worse the first does at moves {NUM_SHORT + 1} to {NUM_MOVES} is what the unknown length costs. Positions are rotary:
learned ones beyond move {NUM_SHORT} would never have been trained. Each training gives three sets of weights, those at
its end (raw) and two averages, which leave the training as it is. EMA has a constant decay, at `micro` 0.99, and with
it a memory of about 100 steps. BEMA has the exponents of arXiv:2508.00180, but an update every 2 steps at `micro`, so
that its memory is about as long in the end. With the published one every 400 steps, the average would still consist
mostly of the random weights at the start, for these models are trained from scratch. The learning rate falls to a
tenth, which leaves less noise to an average than a constant one would. Measured on new whole games, 2,000 at `micro`
and the same for all: how often the model's first choice is legal, and the probability that it gives to all legal moves
together. At `micro`: 4 layers of 6 heads of width 12, W = 10, 64 games in a batch, 2,000 steps."""
    changes = """\
Until all runs had been made, criteria were two standard errors of the differences of both kinds of attention
together, as if the runs of `mhsa` and `ls` with the same seed were independent. They were replaced by a claim for
each kind, with intervals by Student's t."""
    comparisons = {
        **{
            f"{name}-{kind}": Comparison(
                f"{words} plays more legal moves beyond the trained length ({KINDS[kind]})",
                source,
                share("raw"),
                f"{kind}-30",
                f"{kind}-30",
                second_metric=share(name),
                margin=CLOSE,
            )
            for name, words, source in (
                ("ema", "an average of the weights (EMA)", "arXiv:2510.08341"),
                ("bema", "an average with bias correction (BEMA)", "arXiv:2510.08341 and arXiv:2508.00180"),
            )
            for kind in KINDS
        },
        **{
            f"ema-within-{kind}": Comparison(
                f"EMA costs nothing within the trained length ({KINDS[kind]})",
                "ours",
                share("ema", "within"),
                f"{kind}-30",
                f"{kind}-30",
                second_metric=share("raw", "within"),
                equal=True,
                margin=CLOSE,
            )
            for kind in KINDS
        },
        **{
            f"ema-length-{kind}": Comparison(
                f"EMA gains more where the length is new than at the same moves where it is not ({KINDS[kind]})",
                "arXiv:2510.08341: averages help to generalise to longer inputs",
                gain("ema"),
                f"{kind}-whole",
                f"{kind}-30",
                margin=CLOSE,
            )
            for kind in KINDS
        },
        "ls": Comparison(
            "LS-attention loses less beyond the trained length than multi-head attention",
            "ours: only the softmax of global heads gets more to attend to",
            share("raw"),
            less("ls-whole", "ls-30"),
            less("mhsa-whole", "mhsa-30"),
            margin=CLOSE,
        ),
    }
    scales = {
        "micro": Scale(
            None,
            {
                "preset": "demo",
                "config": {"hidden_size": 72, "num_hidden_layers": 4, "sliding_window": 10},
                "averages": {"ema": {"decay": 0.99}, "bema": {"every_n_steps": 2}},
                "eval_games": 2000,
                "options": {
                    "max_steps": 2000,
                    "per_device_train_batch_size": 64,
                    "learning_rate": 3e-3,
                    "warmup_steps": 100,
                },
            },
            3,
            0.8,
        ),
    }

    def arms(self, scale: str) -> Mapping[str, Any]:
        """The number of global heads and the length of training games of each arm."""
        heads, lengths = {"mhsa": "all", "ls": 1}, {"30": NUM_SHORT, "whole": NUM_MOVES}
        return {f"{kind}-{name}": (heads[kind], length) for kind in KINDS for name, length in lengths.items()}

    def prepare(self, scale: str, folder: Path, fields: Sequence[str]):
        """Checks that games can be played, before the first run. Raises `ImportError` as `play` does."""
        play(np.random.default_rng(0), 1)

    def run(self, arm: str, seed: int, scale: str, folder: Path, fields: Sequence[str]) -> dict:
        """Trains a model on games, and measures how it plays with each of the three sets of weights."""
        settings = self.scales[scale].fields
        num_global_heads, num_moves = self.arms(scale)[arm]
        sizes = {"vocab_size": NUM_SQUARES, "max_position_embeddings": NUM_MOVES}
        config = load_preset(settings["preset"], **sizes, **settings["config"], num_global_heads=num_global_heads)
        averages = {
            kind: AveragedWeightsCallback(kind, name=kind, **options) for kind, options in settings["averages"].items()
        }

        def make_row(generator: np.random.Generator) -> dict[str, np.ndarray]:
            return as_row(play(generator, num_moves).moves, num_moves)

        model, values = train_on_stream(
            config,
            make_row,
            seed,
            folder / arm / f"seed-{seed}",
            settings["options"],
            callbacks=list(averages.values()),
        )
        generator = np.random.default_rng(SEED_OF_EVALUATION)
        games = [play(generator) for _ in range(settings["eval_games"])]
        figures = {"raw": measure(model, games)}
        for kind, average in averages.items():
            with average.averaged_weights(model):
                figures[kind] = measure(model, games)
        return {"weights": figures, **values}

    def report(self, runs: Runs, folder: Path) -> str:
        """Tables of shares of legal moves, plots of them over a game,"""
        rows = [
            [
                f"`{arm}`",
                label,
                *(
                    format_values([run["weights"][name][key] for run in of_arm], 4)
                    for key in ("legal_within", "legal_beyond", "mass_within", "mass_beyond")
                ),
            ]
            for arm, of_arm in runs.items()
            for name, label in WEIGHTS.items()
        ]
        parts = [f"moves {part}" for part in (f"2 to {NUM_SHORT}", f"{NUM_SHORT + 1} to {NUM_MOVES}")]
        head = ["arm", "weights", *(f"{what}, {part}" for what in ("legal", "probability") for part in parts)]
        trainings = [
            [
                f"`{arm}`",
                format_values([run["max_logit"] for run in of_arm], 1),
                f"{sum(run['diverged'] for run in of_arm)} of {len(of_arm)}",
            ]
            for arm, of_arm in runs.items()
        ]
        sections = [
            "Shares of moves before which the first choice is legal, and the mean probability of all legal moves "
            f"together:\n\n{table(rows, head)}",
            table(trainings, ["arm", "largest logit on the way", "diverged"]),
        ]
        curves = {arm: [over_moves(run["weights"]["raw"]["legal"]) for run in of_arm] for arm, of_arm in runs.items()}
        plot(folder / "legal.png", curves, "move", "share of legal first choices")
        sections.append(
            f"### Raw weights\n\nEach curve is a seed. The arms `...-30` know the first {NUM_SHORT} moves only.\n\n"
            "![Share of legal first choices over the moves](legal.png)"
        )
        return "\n\n".join(sections)


STUDY = Othello()


def play(generator: np.random.Generator, num_moves: int = NUM_MOVES) -> Game:
    """
    Plays random legal moves, each of which is equally likely: a whole game or its first moves. Every game takes the
    same number of random numbers, so a generator gives the same games wherever they are cut.

    Raises:
        ImportError: rust-reversi is not installed.
    """
    try:
        from rust_reversi import Board  # noqa: PLC0415 (an optional package)
    except ImportError as error:
        raise ImportError("the games need the package rust-reversi: pip install rust-reversi") from error
    board, game = Board(), Game([], [])
    for number in generator.random(NUM_MOVES)[:num_moves].tolist():
        if board.is_game_over():
            break
        if board.is_pass():
            board.do_pass()
        legal = board.get_legal_moves_vec()
        move = legal[int(number * len(legal))]
        board.do_move(move)
        game.moves.append(move)
        game.legal.append(legal)
    return game


def as_row(moves: Sequence[int], length: int) -> dict[str, np.ndarray]:
    """Converts moves to a row of a batch, `(length,)` each; the padding after games that ended early has no labels."""
    ids, labels = np.zeros(length, dtype=np.int64), np.full(length, -100)
    ids[: len(moves)] = labels[: len(moves)] = moves
    return {"input_ids": ids, "labels": labels}


@torch.no_grad()
def measure(model: nn.Module, games: Sequence[Game], batch_size: int = 64) -> dict:
    """
    Measures how well a model follows the rules.

    Returns:
        For each move from the second on, over the games that last that long: `legal`, the share of games in which the
        model's first choice is legal, and `mass`, the mean probability of all legal moves together. Also their means
        over the moves up to `NUM_SHORT` (`legal_within`, `mass_within`) and over later moves (`..._beyond`).
    """
    ids = torch.as_tensor(np.stack([as_row(game.moves, NUM_MOVES)["input_ids"] for game in games]))
    is_legal = torch.zeros(len(games), NUM_MOVES, NUM_SQUARES, dtype=torch.bool)
    for i, game in enumerate(games):
        for j, legal in enumerate(game.legal):
            is_legal[i, j, legal] = True
    is_legal = is_legal[:, 1:]
    logits = (model(batch.to(model.device)).logits[:, :-1].float().cpu() for batch in ids.split(batch_size))
    probabilities = torch.cat([x.softmax(-1) for x in logits])
    figures = {
        "legal": is_legal.gather(-1, probabilities.argmax(-1, keepdim=True)).squeeze(-1).double(),
        "mass": (probabilities * is_legal).sum(-1).double(),
    }
    is_played = is_legal.any(-1)
    parts = {"within": slice(NUM_SHORT - 1), "beyond": slice(NUM_SHORT - 1, None)}
    result: dict[str, Any] = {}
    for key, values in figures.items():
        values[~is_played] = torch.nan
        result[key] = rounded(values.nanmean(0))
        for part, moves in parts.items():
            result[f"{key}_{part}"] = values[:, moves].nanmean().item()
    return result


def rounded(values: torch.Tensor) -> list[float]:
    """Rounds values to as many digits as the report can use."""
    return [round(value, 5) for value in values.tolist()]


def over_moves(values: Sequence[float | None]) -> list[tuple[float, float]]:
    """A curve over the moves that are predicted, from the second on."""
    return points(list(enumerate(values, start=2)))
