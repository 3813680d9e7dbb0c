import json
import math

import matplotlib
import psutil
import pytest
import torch
import yaml
from matplotlib.image import imread

from lsgpt import measure_max_logits
from lsgpt.training import plot_max_logits, write_report
from lsgpt.training.plots import average_in_bins, plot_curves
from lsgpt.training.report import peak_memory, points_of, reset_peak_memory, write_results


RESULTS = {
    "status": "finished",
    "eval_loss": 2.0,
    "eval_perplexity": 7.389,
    "eval_bits_per_byte": 1.25,
    "max_logit": 12.5,
    "parameters": 1234,
    "step": 20,
    "max_steps": 20,
    "tokens": 5000,
    "tokens_per_second": 100.0,
    "peak_memory_bytes": 5e8,
    "train_seconds": 3.0,
    "loss_by_position": [5.0, 4.0, math.nan, 2.0],
}


def test_report_holds_recipe_results_model_and_plots(tiny_config, tmp_path):
    history = [{"step": 10, "loss": 3.0, "max_logit_global": 5.0}, {"step": 20, "eval_loss": 2.0}]
    recipe = {"run_name": "mine", "max_steps": 20, "max_logit_threshold": 100.0}
    backend = matplotlib.rcParams._get_backend_or_none()
    path = write_report(tmp_path, recipe, tiny_config(), RESULTS, history, torch.ones(2, 6), "a sample ```f```")
    report = path.read_text(encoding="utf-8")
    assert matplotlib.rcParams._get_backend_or_none() == backend  # the caller's plots stay as they are
    assert yaml.safe_load(report.split("````yaml\n")[1].split("````")[0]) == recipe
    for text in (
        "# mine: training report",
        "| evaluation bits per byte | 1.2500 |",
        "| optimizer steps | 20 of 20 |",
        "| largest attention logit seen in training | 12.5 |",
        "| heads per layer | 2 global + 4 local, 12 dimensions each |",
        "a sample ```f```",
        "| transformers |",
    ):
        assert text in report
    for plot in ("loss", "max_logits", "max_logits_by_head", "loss_by_position"):
        assert f"]({plot}.png)" in report
        assert imread(tmp_path / f"{plot}.png").ndim == 3
    assert "perplexity.png" not in report  # nothing to draw


def test_results_are_json_whatever_the_numbers(tmp_path):
    write_results(tmp_path, {**RESULTS, "eval_loss": math.inf})
    results = json.loads((tmp_path / "results.json").read_text(), parse_constant=pytest.fail)
    assert results["eval_loss"] is None
    assert results["loss_by_position"] == [5.0, 4.0, None, 2.0]
    assert results["eval_perplexity"] == 7.389


def test_points_of_a_history():
    assert points_of([{"step": 1, "loss": 2.0}, {"step": 2}, {"step": 3, "loss": None}], "loss") == [(1, 2.0)]


def test_bins_hold_every_position_once():
    points = average_in_bins([float(i) for i in range(1, 1001)], num_bins=10)
    assert all(x == pytest.approx(y) for x, y in points)  # the mean of the positions is that of the losses
    assert points[0] == (1.0, 1.0) and points[-1][0] < 1000
    assert average_in_bins([1.0, math.nan, math.nan, 4.0], num_bins=4)[-1][1] == 4.0
    assert average_in_bins([math.nan]) == []


def heat_map(tmp_path, name, maxima, config=None):
    plot_max_logits(maxima, tmp_path / name, config)
    return imread(tmp_path / name)


def test_heat_map_shows_layers_heads_and_kinds(tiny_model, tmp_path):
    model = tiny_model()
    maxima = measure_max_logits(model, input_ids=torch.randint(97, (1, 40)))
    plain = heat_map(tmp_path, "plain.png", maxima)
    assert (heat_map(tmp_path, "again.png", maxima) == plain).all()
    for changed in (
        heat_map(tmp_path, "kinds.png", maxima, model.config),
        heat_map(tmp_path, "t.png", maxima.flip(0)),
    ):
        assert changed.shape != plain.shape or (changed != plain).any()
    for odd in (torch.zeros(1, 3), torch.full((2, 2), math.nan), torch.rand(40, 30)):
        assert heat_map(tmp_path, "odd.png", odd).size


def test_curves_of_an_arm_share_a_colour(tmp_path):
    lines = {"a": [[(1, 1.0), (2, 2.0)], [(1, 2.0), (2, 1.0)]], "b": [[]]}
    plot_curves(tmp_path / "a.png", lines, "x", "y", log_x=True, log_y=True, threshold=3.0)
    colours = {tuple(pixel) for pixel in (imread(tmp_path / "a.png")[..., :3] * 255).astype(int).reshape(-1, 3)}
    assert (31, 119, 180) in colours and (255, 127, 14) not in colours


def test_peak_memory():
    process = psutil.Process()
    torch.ones(60_000_000)  # 240 MB, given back at once
    before, now = peak_memory(), process.memory_info().rss
    assert before > now + 200e6
    reset_peak_memory()
    assert 0.9 * now < peak_memory() < before - 150e6
