"""The study of Othello: its games and measures against plain rules, runs of a few steps, reports."""

import sys

import numpy as np
import pytest
import torch
from study_reports import report_of
from transformers import set_seed

from lsgpt import LSGPTForCausalLM
from lsgpt.configuration import load_preset
from lsgpt.studies import load_study
from lsgpt.studies.othello import (
    NUM_MOVES,
    NUM_SHORT,
    as_row,
    measure,
    play,
)


DIRECTIONS = [(dy, dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1) if dy or dx]


def flipped(board, player, square):
    """The squares that a disc of `player` would turn over, none where the move is illegal. `board` is a list."""
    found = []
    if board[square] == "-":
        for dy, dx in DIRECTIONS:
            (y, x), line = divmod(square, 8), []
            while 0 <= (y := y + dy) < 8 and 0 <= (x := x + dx) < 8 and board[8 * y + x] not in ("-", player):
                line.append(8 * y + x)
            if 0 <= y < 8 and 0 <= x < 8 and board[8 * y + x] == player:
                found += line
    return found


def legal_moves(board, player):
    return [square for square in range(64) if flipped(board, player, square)]


def replay(moves):
    """For each move the legal ones and the board before it, then what both players could still do, and the passes."""
    board, player, positions, num_passes = list("-" * 64), "X", [], 0
    board[28] = board[35] = "X"
    board[27] = board[36] = "O"
    for move in moves:
        if not legal_moves(board, player):
            player, num_passes = "XO".replace(player, ""), num_passes + 1
        positions.append((legal_moves(board, player), "".join(board)))
        for square in (move, *flipped(board, player, move)):
            board[square] = player
        player = "XO".replace(player, "")
    return positions, legal_moves(board, "X") + legal_moves(board, "O"), num_passes


def short_game():
    """A game that ends before all squares are taken."""
    generator = np.random.default_rng(0)
    return next(game for game in (play(generator) for _ in range(1000)) if len(game.moves) < NUM_MOVES)


def test_games_keep_to_the_rules():
    generator = np.random.default_rng(0)
    games, all_passes = [short_game(), *(play(generator) for _ in range(12))], 0
    for game in games:
        positions, left, num_passes = replay(game.moves)
        assert not left
        assert game.legal == [legal for legal, _ in positions]
        assert all(move in legal for move, legal in zip(game.moves, game.legal))
        all_passes += num_passes
    assert all_passes > 0
    assert len(games[0].moves) < NUM_MOVES and max(len(game.moves) for game in games) == NUM_MOVES


def test_games_follow_from_the_seed():
    games, same, others, short = (
        [play(generator, num_moves) for _ in range(400)]
        for generator, num_moves in (
            (np.random.default_rng(3), NUM_MOVES),
            (np.random.default_rng(3), NUM_MOVES),
            (np.random.default_rng(4), NUM_MOVES),
            (np.random.default_rng(3), NUM_SHORT),
        )
    )
    assert games == same
    assert not {tuple(game.moves) for game in games} & {tuple(game.moves) for game in others}
    # Where they are cut, they are the same games, so that two trainings differ in nothing else.
    assert [game.moves[:NUM_SHORT] for game in games] == [game.moves for game in short]
    # All legal moves are as likely: the first one is one of four.
    counts = np.bincount([game.moves[0] for game in games])
    assert np.flatnonzero(counts).tolist() == [19, 26, 37, 44]
    assert counts[counts > 0].min() > 70


def test_a_game_that_ends_early_is_not_predicted_any_further():
    row = as_row([19, 18, 17], 5)
    assert row["input_ids"].tolist() == [19, 18, 17, 0, 0]
    assert row["labels"].tolist() == [19, 18, 17, -100, -100]


def test_measures_are_those_of_a_replay(tiny_model):
    model = tiny_model(vocab_size=64, position_embedding_type="rope")
    generator = np.random.default_rng(1)
    games = [play(generator), short_game(), play(generator)]
    legal, mass = ({move: [] for move in range(2, NUM_MOVES + 1)} for _ in range(2))
    for game in games:
        positions, _, _ = replay(game.moves)
        for move, (squares, _) in enumerate(positions, start=1):
            if move == 1:
                continue
            with torch.no_grad():
                logits = model(torch.tensor([game.moves[: move - 1]])).logits[0, -1]
            legal[move].append(logits.argmax().item() in squares)
            mass[move].append(logits.softmax(-1)[squares].sum().item())
    found = measure(model, games, batch_size=2)
    for key, expected in (("legal", legal), ("mass", mass)):
        assert found[key] == pytest.approx([np.mean(values) for values in expected.values()], abs=2e-5)
        for part, moves in (("within", range(2, 31)), ("beyond", range(31, 61))):
            values = [value for move in moves for value in expected[move]]
            assert found[f"{key}_{part}"] == pytest.approx(np.mean(values), abs=1e-5)
    assert 0 < found["legal_beyond"] < 1 and 0 < found["mass_within"] < 1
    assert sorted(map(len, legal.values()))[0] < len(games)


def test_othello_without_rust_reversi(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "rust_reversi", None)
    with pytest.raises(ImportError, match="pip install rust-reversi"):
        load_study("othello").prepare("micro", tmp_path, ())


TINY_MODEL = {"hidden_size": 24, "num_hidden_layers": 1, "sliding_window": 4}


@pytest.fixture
def tiny_study(monkeypatch):
    """The study at a tiny size, whose averages are known: EMA without a memory, and BEMA that moves by nothing."""
    study = load_study("othello")
    options = {"max_steps": 3, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "use_cpu": True}
    changes = {
        "config": TINY_MODEL,
        "averages": {"ema": {"decay": 0.0}, "bema": {"every_n_steps": 1, "kappa": 50.0, "eta": 50.0}},
        "eval_games": 6,
        "options": {**options, "warmup_steps": 1},
    }
    micro = study.scales["micro"]
    monkeypatch.setattr(study, "scales", {"micro": micro._replace(fields={**micro.fields, **changes})})
    return study


def test_othello_runs(tiny_study, tmp_path):
    tiny_study.prepare("micro", tmp_path, ())
    arms = [("mhsa-30", 42), ("mhsa-30", 43), ("ls-whole", 42)]
    runs = {}
    for arm, seed in arms:
        runs.setdefault(arm, []).append(tiny_study.run(arm, seed, "micro", tmp_path, ()))
    assert runs["mhsa-30"][0] == tiny_study.run("mhsa-30", 42, "micro", tmp_path, ())
    assert runs["mhsa-30"][0]["weights"] != runs["mhsa-30"][1]["weights"]

    # One training gives the figures of all three sets of weights.
    weights = runs["mhsa-30"][0]["weights"]
    assert weights["ema"] == weights["raw"]
    assert weights["bema"] != weights["raw"]
    set_seed(42)
    untrained = LSGPTForCausalLM(
        load_preset("demo", **TINY_MODEL, vocab_size=64, max_position_embeddings=60, num_global_heads="all")
    )
    generator = np.random.default_rng(2**31)
    games = [play(generator) for _ in range(6)]
    expected = measure(untrained.eval(), games)
    assert {key: weights["bema"][key] for key in expected} == expected

    # The report is made of what was written alone.
    text = report_of(tiny_study, runs, tmp_path / "report")
    assert text.count("Verdict: **open**") + text.count("Verdict: **inconclusive**") >= 7
    assert "| `ls-whole` | BEMA |" in text
    assert text.count("\n![") == 1
