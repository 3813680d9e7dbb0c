"""The study of set complement: its data, models and measure, a run at a small size, and its report."""

import math

import numpy as np
import pytest
import torch
from study_reports import report_of
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from lsgpt import LSGPTConfig
from lsgpt.studies import load_study
from lsgpt.studies.set_complement import (
    REMEDIES,
    WEIGHTS,
    build_model,
    draw,
    evaluation_rows,
    measure,
    right_answers,
)


SIZES = {"vocab_size": 10, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "sliding_window": 3}
OPTIONS = {"max_steps": 4, "per_device_train_batch_size": 4, "warmup_steps": 1, "use_cpu": True, "bf16": False}


@pytest.fixture
def small_study(monkeypatch):
    """The study with small models and few steps."""
    study = load_study("set-complement")
    for field, value in {"model": SIZES, "trained_length": 4, "eval_rows": 20, "options": OPTIONS}.items():
        monkeypatch.setattr(study, field, value)
    return study


def small_model(architecture="mhsa", remedy="plain", **fields):
    torch.manual_seed(0)
    fields = {"num_global_heads": 4, "position_embedding_type": "none", "initializer_range": 0.5, **fields}
    return build_model(LSGPTConfig(**{**SIZES, **fields}), architecture, remedy).eval()


def table(logits):
    """A model that gives the logits in a table, by row and place."""
    model = nn.Module()
    model.device, model.forward = torch.device("cpu"), lambda input_ids: CausalLMOutputWithPast(logits=logits)
    return model


def test_the_measure_is_that_of_a_plain_computation():
    generator = np.random.default_rng(0)
    orders = np.stack([generator.permutation(7) for _ in range(5)])
    logits = torch.randn(5, 6, 7, generator=torch.Generator().manual_seed(0))
    found = measure(table(logits), orders, trained_length=2)
    distances, divergences = [], []
    for s in range(1, 7):
        of_length = []
        for row in range(5):
            exponentials = [math.exp(x) for x in logits[row, s - 1].tolist()]
            model = [x / sum(exponentials) for x in exponentials]
            right = [0.0 if token in orders[row, :s] else 1 / (7 - s) for token in range(7)]
            total_variation = sum(abs(p - q) for p, q in zip(model, right)) / 2
            divergence = sum(q * math.log(q / p) for p, q in zip(model, right) if q)
            of_length.append((total_variation, divergence))
        distances.append(sum(x for x, _ in of_length) / 5)
        divergences.append(sum(x for _, x in of_length) / 5)
    assert found["distances"] == pytest.approx(distances, abs=1e-5)
    assert found["trained_distance"] == pytest.approx(sum(distances[:2]) / 2)
    assert found["beyond_distance"] == pytest.approx(sum(distances[2:]) / 4)
    assert found["beyond_divergence"] == pytest.approx(sum(divergences[2:]) / 4)

    right = measure(table(50.0 * (right_answers(torch.as_tensor(orders)) > 0)), orders, 2)
    assert right["distances"] == [0.0] * 6
    assert right["beyond_divergence"] == pytest.approx(0, abs=1e-12)
    uniform = measure(table(torch.zeros(5, 6, 7)), orders, 2)
    assert uniform["distances"] == pytest.approx([s / 7 for s in range(1, 7)], abs=1e-5)
    broken = measure(table(torch.full((5, 6, 7), torch.nan)), orders, 2)
    assert broken["distances"] == [1.0] * 6 and math.isnan(broken["beyond_divergence"])


def test_post_norm_blocks_end_with_a_norm():
    ids = torch.randint(0, 10, (3, 6))
    model = small_model("mhsa", "post-norm")
    hidden = nn.functional.embedding(ids, model.model.embed_tokens.weight)
    mask = torch.ones(6, 6).tril().bool()
    for layer in model.model.layers:
        # A plain computation, (B, H, T, head_dim) for the heads.
        q, k, v = (
            part(hidden).unflatten(-1, (4, 6)).transpose(1, 2)
            for part in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)
        )
        weights = (q @ k.mT / 6**0.5).masked_fill(~mask, -math.inf).softmax(-1)
        attended = layer.self_attn.o_proj((weights @ v).transpose(1, 2).flatten(2))
        hidden = nn.functional.layer_norm(hidden + attended, (24,))
        hidden = nn.functional.layer_norm(hidden + layer.mlp(hidden), (24,))
    assert torch.allclose(model(ids).logits, model.lm_head(hidden), atol=1e-5)
    # The same weights to begin with, and another computation.
    plain = small_model("mhsa")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, plain.get_parameter(name))
    assert not torch.allclose(model(ids).logits, plain(ids).logits, atol=0.1)


@pytest.mark.parametrize("remedy", ["plain", "post-norm"])
def test_attention_alone_is_a_mean_of_values(remedy):
    model = small_model("attention-only", remedy, num_hidden_layers=1, num_attention_heads=1, num_global_heads=1)
    (layer,) = model.model.layers
    with torch.no_grad():
        layer.self_attn.q_proj.weight.zero_()  # attention is uniform
    ids = torch.tensor([[3, 1, 4]])
    hidden = layer.self_attn.o_proj(layer.self_attn.v_proj(model.model.embed_tokens.weight[ids])).mean(1)
    if remedy == "post-norm":
        hidden = nn.functional.layer_norm(hidden, (24,))
    assert torch.allclose(model(ids).logits[:, -1], model.lm_head(hidden), atol=1e-5)
    names = {name.split(".")[-2] for name, _ in model.named_parameters()}
    norm = {"norm"} if remedy == "post-norm" else set()
    assert names == {"embed_tokens", "q_proj", "k_proj", "v_proj", "o_proj", "lm_head"} | norm


def test_a_seed_draws_hyperparameters():
    ranges = load_study("set-complement").ranges
    draws = [draw(ranges, seed) for seed in range(42, 142)]
    assert draws[0] == draw(ranges, 42) != draws[1]
    for name, (low, high) in ranges.items():
        values = [drawn[name] for drawn in draws]
        assert low <= min(values) < low * 1.3 and high / 1.3 < max(values) <= high
        assert np.median(values) == pytest.approx((low * high) ** 0.5, rel=0.5)
    rates = [drawn["final_rate"] for drawn in draws]
    assert set(rates) == {0.1, 1.0} and 35 < rates.count(1.0) < 65


def test_set_complement_runs(tmp_path, small_study, monkeypatch):
    monkeypatch.setattr(small_study, "num_seeds", 1)
    runs = {arm: [small_study.run(arm, 42, tmp_path, ())] for arm in small_study.arms}
    seen = set()
    for (run,) in runs.values():
        assert list(run["trainings"]) == list(REMEDIES)
        for values in run["trainings"].values():
            assert values["diverged"] is False
            for weights in WEIGHTS:
                assert len(values[weights]["distances"]) == 9
                assert 0 < values[weights]["beyond_distance"] < 1 and values[weights]["beyond_divergence"] > 0
                seen.add(values[weights]["beyond_distance"])
    # Averages are not the weights, and remedies make a difference.
    assert len(seen) == 3 * len(REMEDIES) * len(WEIGHTS)
    # The same seed gives the same numbers, and nothing is left behind.
    assert small_study.run("attention-only", 42, tmp_path, ()) == runs["attention-only"][0]
    assert list(tmp_path.iterdir()) == []

    text = report_of(small_study, {"mhsa": runs["mhsa"]}, tmp_path)
    assert text.count("Verdict: **open**") == 11 and "(mhsa.png)" in text and "(ls.png)" not in text
    text = report_of(small_study, runs, tmp_path)
    assert "| `ls, post-norm, bema` |" in text
    assert all(f"]({arm}.png)" in text for arm in runs)


def test_training_closes_the_distance(small_study, monkeypatch):
    monkeypatch.setattr(small_study, "options", {**OPTIONS, "max_steps": 250, "per_device_train_batch_size": 32})
    drawn = {**draw(small_study.ranges, 42), "learning_rate": 1e-2, "ema_horizon": 10}
    model = small_model("attention-only", num_hidden_layers=1, initializer_range=0.3)
    values = small_study.train_and_measure(model, drawn, 42)
    distance_of_uniform = sum(s / 10 for s in range(1, 5)) / 4
    assert all(values[weights]["trained_distance"] < 0.75 * distance_of_uniform for weights in ("raw", "ema"))
    # The model has its own weights again after it was measured with the averages.
    assert measure(model, evaluation_rows(20, 10), 4) == values["raw"]


def test_what_was_drawn_is_what_is_trained_with(small_study, monkeypatch):
    found = []

    def train_small(model, data, seed, folder, options, callbacks, **more):
        found.extend((options, *callbacks))
        row = next(iter(data))
        length = small_study.trained_length
        assert len(set(row["input_ids"])) == len(row["input_ids"]) == length + 1
        assert row["labels"].tolist() == [-100, *row["input_ids"][1:]]
        raise InterruptedError

    monkeypatch.setattr("lsgpt.studies.set_complement.train_small", train_small)
    drawn = {"learning_rate": 3e-3, "weight_decay": 0.05, "final_rate": 0.1}
    drawn |= {"ema_horizon": 50, "bema_every_n_steps": 2.6}
    with pytest.raises(InterruptedError):
        small_study.train_and_measure(small_model(), drawn, 42)
    options, ema, bema = found
    assert (options["learning_rate"], options["weight_decay"]) == (3e-3, 0.05)
    assert options["lr_scheduler_kwargs"] == {"min_lr_rate": 0.1}
    assert (ema.kind, ema.settings["decay"]) == ("ema", 0.98) and (bema.kind, bema.settings["every_n_steps"]) == (
        "bema",
        3,
    )


def test_models_of_other_seeds_begin_with_other_weights(tmp_path, monkeypatch):
    study = load_study("set-complement")
    monkeypatch.setattr(study, "train_and_measure", lambda model, *_: model.model.embed_tokens.weight.sum().item())
    arm = next(iter(study.arms))
    first, again, other = (study.run(arm, seed, tmp_path, [])["trainings"] for seed in (1, 1, 2))
    assert first == again and not {*first.values()} & {*other.values()}

    def dropouts(model, drawn, seed):
        return {name: getattr(model.config, f"{name}_dropout") for name in ("attention", "resid", "embd")}, drawn

    monkeypatch.setattr(study, "train_and_measure", dropouts)
    for remedy, (found, drawn) in study.run(arm, 1, tmp_path, [])["trainings"].items():
        assert set(found.values()) == {drawn["dropout"] if remedy == "dropout" else 0.0}
