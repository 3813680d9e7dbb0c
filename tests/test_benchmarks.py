"""Benchmarks run, at a size that takes seconds, and refuse to time what does not compute the right thing."""

import json

import pytest

from lsgpt.benchmarks import long_context, memory, telemetry
from lsgpt.training.telemetry import summarize_max_logits


TINY = ["--preset", "demo", "--length", "100", "--steps", "4", "--every_n_steps", "2", "--threads", "1"]


def test_telemetry(tmp_path, capsys):
    telemetry.main([*TINY, "--rounds", "2", "--output", str(tmp_path / "results.json")])
    result = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert [len(row[name]) for row in result["rounds"] for name in ("seconds_without", "seconds_with")] == [4] * 4
    ratios = [sum(row["seconds_with"]) / sum(row["seconds_without"]) for row in result["rounds"]]
    assert result["ratios"] == pytest.approx(ratios)
    assert result["settings"]["every_n_steps"] == 2
    printed = capsys.readouterr().out
    assert printed.startswith("checked: 5 maxima")
    assert f"median {result['median_ratio']:.4f}" in printed


def test_telemetry_overhead_is_that_of_the_measured_steps():
    rounds = [
        {"seconds_without": [1.0] * 4, "seconds_with": [1.0, 1.0, 1.0, 1.2]},
        {"seconds_without": [2.0] * 4, "seconds_with": [1.0, 1.0, 1.0, 1.4]},
    ]
    summary = telemetry.summarize(rounds, every_n_steps=4)
    assert summary["ratios"] == pytest.approx([4.2 / 4, 4.4 / 8])
    assert summary["median_ratio"] == pytest.approx(0.8)
    assert summary["measured_step_ratio"] == pytest.approx(1.3)
    assert summary["implied_ratio"] == pytest.approx(1.075)


def test_telemetry_that_measures_wrongly_is_not_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "lsgpt.training.telemetry.summarize_max_logits",
        lambda maxima, *others: summarize_max_logits(maxima * 1.001, *others),
    )
    with pytest.raises(RuntimeError, match="of the batch is"):
        telemetry.main([*TINY, "--output", str(tmp_path / "results.json")])


def test_telemetry_that_changes_the_training_is_not_timed(tmp_path, monkeypatch):
    class Disturbs(telemetry.LogitTelemetryCallback):
        def on_step_begin(self, args, state, control, model=None, **kwargs):
            super().on_step_begin(args, state, control, **kwargs)
            model.lm_head.weight.data.mul_(1.001)

    monkeypatch.setattr(telemetry, "LogitTelemetryCallback", Disturbs)
    with pytest.raises(RuntimeError, match="changes the losses"):
        telemetry.main([*TINY, "--output", str(tmp_path / "results.json")])
    assert not (tmp_path / "results.json").exists()


def test_memory_and_long_context(tmp_path, capsys):
    memory.main(["--growth_lengths", "64", "--lengths", "--output", str(tmp_path / "memory.json")])
    lengths = ["--length", "300", "--local_length", "1000", "--chunk_length", "256"]
    long_context.main([*lengths, "--output", str(tmp_path / "long.json")])
    assert "local-only" in capsys.readouterr().out
    whole, local = json.loads((tmp_path / "long.json").read_text(encoding="utf-8"))["rows"]
    # The window of 50 keeps 49 keys and values of 32 numbers, in each of 6 layers and for each of 6 heads.
    assert local["cache_bytes"] == 2 * 6 * 6 * 49 * 32 * 4
    assert whole["cache_bytes"] == 2 * 6 * (300 + 5 * 49) * 32 * 4
