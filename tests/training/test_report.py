import json
import math
from dataclasses import replace

import matplotlib
import psutil
import pytest
import torch
import yaml
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from lsgpt.training import RunResult, plot_max_logits, write_report
from lsgpt.training.data import train_tokenizer
from lsgpt.training.train import generate_sample
from lsgpt.utilities import format_duration, with_unit
from lsgpt.utilities.environment import peak_memory, reset_peak_memory
from lsgpt.utilities.plots import LOCAL, average_in_bins, plot_curves


RESULT = RunResult(
    eval_loss=2.0,
    eval_perplexity=7.389,
    eval_bits_per_byte=1.25,
    max_logit=12.5,
    parameters=1234,
    step=20,
    max_steps=20,
    tokens=5000,
    tokens_per_second=100.0,
    peak_memory_bytes=500_000_000,
    train_seconds=3.0,
    loss_by_position=[5.0, 4.0, math.nan, 2.0],
    environment={"commit": "that at the beginning"},
)


def test_a_sample_ends_with_the_positions_of_the_model(tiny_model):
    tokenizer = train_tokenizer([], vocab_size=258)
    options = {"vocab_size": 258, "position_embedding_type": "rope", "eos_token_id": None}
    sample = generate_sample(tiny_model(max_position_embeddings=24, **options), tokenizer, "def f")
    assert sample.startswith("def f") and len(sample) <= 24
    sample = generate_sample(tiny_model(max_position_embeddings=4, **options), tokenizer, "def f")
    assert sample.startswith("def") and len(sample) <= 4
    sample = generate_sample(tiny_model(max_position_embeddings=256, **options), tokenizer, "def f")
    assert len(sample) <= 5 + 100  # one character for each token, or less


def test_report_holds_recipe_results_model_and_plots(tiny_config, tmp_path):
    history = [{"step": 10, "loss": 3.0, "max_logit_global": 5.0}, {"step": 20, "eval_loss": 2.0}]
    recipe = {"run_name": "mine", "max_steps": 20, "max_logit_threshold": 100.0}
    backend = matplotlib.rcParams._get_backend_or_none()
    path = write_report(tmp_path, recipe, tiny_config(), RESULT, history, torch.ones(2, 6), "a sample ```f```")
    report = path.read_text(encoding="utf-8")
    assert matplotlib.rcParams._get_backend_or_none() == backend  # the caller's plots stay as they are
    assert yaml.safe_load(report.split("````yaml\n")[1].split("````")[0]) == recipe
    for text in (
        "# mine: training report",
        "| status | finished |",
        "| evaluation loss (nats per token) | 2.0000 |",
        "| evaluation perplexity (per token) | 7.39 |",
        "| evaluation bits per byte | 1.2500 |",
        "| parameters | 1,234 |",
        "| optimizer steps | 20 of 20 |",
        "| commit | that at the beginning |",
        "| training tokens | 5,000 |",
        "| training tokens per second (median step, without waiting for data) | 100 |",
        "| peak memory of the training (process 0) | 500 MB |",
        "| wall time of the training since its last start, evaluation included (s) | 3.0 |",
        "| largest attention logit seen in training | 12.5 |",
        "| heads per layer | 2 global + 4 local, 12 dimensions each |",
        "a sample ```f```",
    ):
        assert text in report
    for plot in ("loss", "max_logits", "max_logits_by_head", "loss_by_position"):
        assert f"]({plot}.png)" in report
        assert imread(tmp_path / f"{plot}.png").ndim == 3
    assert "perplexity.png" not in report  # nothing to draw
    assert "The heat map\nshows those of the trained model in one block" in report


@pytest.mark.parametrize("teacher", [None, "runs/source"])
def test_with_a_teacher_the_training_loss_is_called_a_divergence(tiny_config, tmp_path, monkeypatch, teacher):
    drawn = {}
    monkeypatch.setattr("lsgpt.training.report.plot_curves", lambda file, *args, **_: drawn.update({file.name: args}))
    history = [{"step": 10, "loss": 3.0}, {"step": 20, "eval_loss": 2.0}]
    recipe = {"run_name": "mine", "teacher": teacher}
    write_report(tmp_path, recipe, tiny_config(), RESULT, history, torch.ones(2, 6), "a sample")
    lines, _, label = drawn["loss.png"]
    names = ["training (divergence from the teacher)" if teacher else "training", "evaluation (held-out text)"]
    assert list(lines) == names
    assert label == ("loss (nats per token)" if teacher else "cross-entropy (nats per token)")


def test_results_are_json_and_come_back_whatever_the_numbers(tmp_path):
    changed = {"outcome": "stopped", "stopped_by": "on_explosion", "eval_loss": math.inf, "max_logit": math.nan}
    result = replace(RESULT, **changed)
    result.write(tmp_path)
    values = json.loads((tmp_path / "results.json").read_text(), parse_constant=pytest.fail)
    lost = [values[name] for name in ("status", "eval_loss", "max_logit")]
    assert lost == ["stopped at step 20 by on_explosion", "Infinity", "NaN"]
    assert values["loss_by_position"] == [5.0, 4.0, "NaN", 2.0]
    assert repr(RunResult.read(tmp_path)) == repr(result)  # NaN is not equal to itself
    del values["tokens"], values["environment"]  # as earlier versions wrote it
    (tmp_path / "results.json").write_text(json.dumps(values))
    assert repr(RunResult.read(tmp_path)) == repr(replace(result, tokens=0, environment={}))


def test_numbers_and_durations_have_units():
    numbers = {0: "0", 999.4: "999", 999.5: "1 k", 1234567: "1.23 M", 2e9: "2 G", 5e15: "5e+03 T"}
    assert {number: with_unit(number) for number in numbers} == numbers
    assert with_unit(2048, "B") == "2.05 kB" and with_unit(3, "B") == "3 B"
    durations = {89.4: "89 s", 90: "1.5 min", 5399: "90.0 min", 5400: "1.5 h"}
    assert {seconds: format_duration(seconds) for seconds in durations} == durations


def test_bins_hold_every_position_once():
    points = average_in_bins([float(i) for i in range(1, 1001)])
    assert points[:3] == [(1.0, 1.0), (2.5, 2.5), (5.5, 5.5)] and points[-1] == (756.0, 756.0)  # 512 to 1,000
    assert len(points) == 10
    assert average_in_bins([1.0, math.nan, 4.0, math.inf]) == [(1.0, 1.0), (2.5, 4.0), (4.0, math.inf)]
    assert average_in_bins([math.nan]) == average_in_bins([]) == []


@pytest.mark.parametrize(("num_global_heads", "has_title"), [(2, True), ([6, 1], True), ([6, 0], False)])
def test_the_red_line_is_explained_where_there_is_one(tiny_config, tmp_path, monkeypatch, num_global_heads, has_title):
    figures = []
    monkeypatch.setattr("lsgpt.utilities.plots.Figure.savefig", lambda figure, *args, **kwargs: figures.append(figure))
    plot_max_logits(torch.ones(2, 6), tmp_path / "map.png", tiny_config(num_global_heads=num_global_heads))
    assert figures[0].axes[0].get_title().startswith("left of the red line") == has_title


def heat_map(tmp_path, maxima, config=None):
    plot_max_logits(maxima, tmp_path / "map.png", config)
    return imread(tmp_path / "map.png")[..., :3]


def test_heat_map_shows_layers_heads_and_kinds(tiny_config, tmp_path):
    """By colours: of two rows of heads the upper has the largest logits, the lower the smallest."""
    yellow, purple, red = (253, 231, 36), (68, 1, 84), (255, 0, 0)
    maxima = torch.tensor([[200.0] * 6, [10.0] * 6])

    def rows_of(image, colour):
        return ((image * 255).round() == torch.tensor(colour).numpy()).all(-1)[:, : image.shape[1] * 3 // 4].any(1)

    plain = heat_map(tmp_path, maxima)
    assert rows_of(plain, yellow).nonzero()[0].max() <= rows_of(plain, purple).nonzero()[0].min()
    flipped = heat_map(tmp_path, maxima.flip(0))
    assert rows_of(flipped, yellow).nonzero()[0].min() >= rows_of(flipped, purple).nonzero()[0].max()
    assert not rows_of(plain, red).any()
    assert rows_of(heat_map(tmp_path, maxima, tiny_config()), red).sum() > plain.shape[0] / 2  # between the kinds
    for count in (0, 6):
        assert not rows_of(heat_map(tmp_path, maxima, tiny_config(num_global_heads=count)), red).any()


@pytest.mark.filterwarnings("error::UserWarning", "error::RuntimeWarning")
@pytest.mark.parametrize(
    "maxima",
    [
        torch.zeros(1, 3),
        torch.full((2, 2), math.nan),
        torch.full((2, 2), math.inf),
        torch.tensor([[3.0, math.inf, math.nan, 0.0, 1e38, 1e-38]]),
        torch.rand(40, 30),
        torch.zeros(0, 6),
        torch.zeros(2, 0),
    ],
)
def test_heat_map_takes_all_numbers(tmp_path, maxima):
    image = heat_map(tmp_path, maxima)
    has_grey = ((image * 255).round() == 211).all(-1).mean() > 0.05  # a cell, not the edge of a letter
    assert has_grey == (not maxima.isfinite().all() or not maxima.numel())


@pytest.mark.filterwarnings("error::UserWarning", "error::RuntimeWarning")
@pytest.mark.parametrize("log_y", [False, True])
def test_curves_take_all_numbers(tmp_path, log_y):
    """What is not finite is marked, in the colour of its curve, and takes nothing from the rest."""
    finite = [(1, 5.0), (2, 4.0)]
    for line in ([(3, math.nan)], [*finite, (3, math.inf)], [(1, -math.inf)], [(1, 0.0)], []):
        for log_x in (False, True):
            plot_curves(tmp_path / "c.png", {"ls": [line], "mhsa": [[]]}, "x", "y", log_x, log_y, threshold=3.0)
            colours = imread(tmp_path / "c.png")[..., :3].reshape(-1, 3)
            has_colour = (abs(colours - torch.tensor(to_rgb(LOCAL)).numpy()) < 0.004).all(-1).any()
            assert has_colour == bool(line)


def test_peak_memory():
    assert "resource" not in peak_memory.__globals__  # Windows does not have this module
    process = psutil.Process()
    torch.ones(60_000_000)  # 240 MB, given back at once
    before, now = peak_memory(), process.memory_info().rss
    assert before > now + 200e6
    reset_peak_memory()
    assert 0.9 * now < peak_memory() < before - 150e6
