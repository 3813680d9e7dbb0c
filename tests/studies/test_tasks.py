"""Studies of small tasks: their data, a run of each at a small size, reports, and verdicts."""

import math
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from study_reports import report_of
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from lsgpt.studies import load_study, time_to_learn
from lsgpt.studies.degrees_of_freedom import fit, make_target
from lsgpt.studies.grid import collate_with_hidden_keys, hide_keys
from lsgpt.studies.measurements import visible_pairs
from lsgpt.studies.time_to_learn import TASKS, answer


TINY = {"max_steps": 3, "per_device_train_batch_size": 2, "warmup_steps": 1, "use_cpu": True}


# Degrees of freedom


def test_targets_are_what_they_are_called():
    local, sparse, mixed = (
        make_target(kind, 40, 8, 3, torch.Generator().manual_seed(0)) for kind in ("dense-local", "sparse", "mixed")
    )
    for target in (local, sparse, mixed):
        assert torch.allclose(target.sum(-1), torch.ones(40))
        assert not target.triu(1).any()
    queries, keys = local.nonzero().T
    assert (queries - keys).max() == 7  # 8 keys with the query's own
    assert (local > 0).sum(-1).tolist() == [min(i + 1, 8) for i in range(40)]
    assert (sparse > 0).sum(-1).tolist() == [min(i + 1, 3) for i in range(40)]
    queries, keys = sparse.nonzero().T
    assert (queries - keys).max() > 20
    assert torch.allclose(mixed.nonzero().T[0].bincount(), (mixed > 0).sum(-1))
    assert ((mixed > 0).sum(-1) > 8).any()
    assert visible_pairs(40, 8).sum(-1).tolist() == [min(i + 1, 8) for i in range(40)]


def test_queries_and_keys_are_fitted_to_a_target():
    target = make_target("dense-local", 48, 6, 2, torch.Generator().manual_seed(0))
    before, after = (fit(target, visible_pairs(48), 4, steps, torch.Generator().manual_seed(1)) for steps in (1, 150))
    windowed = fit(target, visible_pairs(48, 6), 4, 150, torch.Generator().manual_seed(1))
    assert 0 < after["divergence"] < before["divergence"] / 2
    assert after["max_logit"] > before["max_logit"]
    # The window is given, and need not be learned.
    assert 0 < windowed["divergence"] < after["divergence"]
    assert windowed["max_logit"] < after["max_logit"]
    # Queries and keys that are all zero express uniform attention.
    uniform = visible_pairs(48) / visible_pairs(48).sum(-1, keepdim=True)
    close = fit(uniform, visible_pairs(48), 4, 150, torch.Generator().manual_seed(1))
    assert abs(close["divergence"]) < 1e-3
    assert close["max_logit_at_close_fit"] < 3
    assert math.isnan(fit(target, visible_pairs(48), 1, 20)["max_logit_at_close_fit"])
    # A fit to 0.12 nats is not yet close.
    rough = fit(target, visible_pairs(48), 4, 110, torch.Generator().manual_seed(1))
    assert 0.1 < rough["divergence"] < 0.15 and math.isnan(rough["max_logit_at_close_fit"])


def test_before_a_step_figures_are_those_of_the_visible_pairs():
    target, visible = make_target("dense-local", 48, 6, 2), visible_pairs(48, 6)
    found = fit(target, visible, 4, 0, torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(1)
    query, key = (0.3 * torch.randn(48, 4, generator=generator) for _ in range(2))
    logits = query @ key.T / 2
    assert found["max_logit"] == pytest.approx(logits[visible].abs().max().item())
    assert found["max_logit"] < logits.abs().max().item()
    weights = logits.masked_fill(~visible, -torch.inf).softmax(-1)
    divergence = (torch.special.xlogy(target, target) - torch.special.xlogy(target, weights)).sum(-1).mean()
    assert found["divergence"] == pytest.approx(divergence.item(), rel=1e-5)


def test_degrees_of_freedom_runs(tmp_path, monkeypatch):
    study = load_study("degrees-of-freedom")
    for field, value in {"width": 4, "window": 6, "lengths": (16, 32), "num_steps": 20}.items():
        monkeypatch.setattr(study, field, value)
    runs = {arm: [study.run(arm, seed, tmp_path, ()) for seed in (42, 43)] for arm in study.arms}
    assert runs["dense-local-causal"][0] != runs["dense-local-causal"][1]
    # The same seed gives the same numbers.
    assert runs["mixed-causal"][0] == study.run("mixed-causal", 42, tmp_path, ())
    text = report_of(study, runs, tmp_path / "report")
    assert "| arm | n / d = 4 | n / d = 8 |" in text
    assert text.count("| `mixed-causal` |") == 3


# Sparse dependencies


def test_half_of_the_earlier_keys_are_hidden():
    ids = torch.randint(0, 1000, (3, 128))
    mask = hide_keys(ids)
    assert mask.shape == (3, 1, 128, 128) and mask.dtype == torch.bool
    assert mask.diagonal(dim1=2, dim2=3).all()
    assert not mask.triu(1).any()
    earlier = mask[torch.ones_like(mask).tril(-1)]
    assert earlier.float().mean() == pytest.approx(0.5, abs=0.02)
    # Every query has keys of its own: neither rows nor columns of the mask are alike.
    share_of_rows = (mask[0, 0, 64:, :64]).float().mean(1)
    share_of_columns = (mask[0, 0, 64:, :64]).float().mean(0)
    assert share_of_rows.min() > 0.2 and share_of_rows.max() < 0.8
    assert share_of_columns.min() > 0.2 and share_of_columns.max() < 0.8
    # They follow from the row's tokens alone.
    assert not torch.equal(mask[0], mask[1])
    torch.rand(5)
    assert torch.equal(hide_keys(ids[[2, 0]].int()), mask[[2, 0]])
    batch = collate_with_hidden_keys([{"input_ids": row.tolist()} for row in ids])
    assert torch.equal(batch["attention_mask"], mask)
    assert batch["labels"][:, 0].tolist() == [-100] * 3


# Recall and copying


@pytest.mark.parametrize("task", TASKS)
def test_answers_are_those_that_were_given(task):
    generator, found = np.random.default_rng(0), []
    for _ in range(100):
        ids, labels, distances = TASKS[task](generator, 96, 64)
        assert ids.shape == labels.shape == distances.shape == (96,)
        assert ids.min() >= 2 and ids.max() < 64
        places = np.flatnonzero(labels >= 0)
        assert (np.flatnonzero(distances) == places).all() and (labels[places] == ids[places]).all()
        if task == "recall":
            assert set(ids[::2]) <= set(range(2, 33)) and set(ids[1::2]) <= set(range(33, 64))
            for place in range(1, 96, 2):
                before = np.flatnonzero(ids[: place - 1] == ids[place - 1])
                assert (place in places) == (len(before) > 0)
                if len(before):
                    assert set(ids[before + 1]) == {ids[place]}
                    assert distances[place] == place - 1 - before[-1]
        else:
            size = places[0]
            assert 4 <= size <= 48 and len(set(ids[:size])) == size
            assert (places == np.arange(size, 96)).all() and (distances[places] == size).all()
            assert (ids[places] == ids[places - size]).all()
        found.extend(distances[places])
    assert min(found) < 20 and max(found) > 40
    # Other rows have other answers: nothing can be learned by heart.
    following = {}
    for _ in range(20):
        ids, labels, _ = TASKS[task](generator, 96, 64)
        for place in np.flatnonzero(labels >= 0):
            following.setdefault(ids[place - 1], set()).add(ids[place])
    assert min(map(len, following.values())) >= 3


def test_arms_of_time_to_learn_are_what_they_are_called(tmp_path, monkeypatch):
    found = []

    def train_small(model, data, seed, folder, options, callbacks):
        found.append((model.config.num_global_heads, options["learning_rate"], data.seed, options["max_steps"]))

    monkeypatch.setattr("lsgpt.studies.time_to_learn.train_small", train_small)
    study = load_study("time-to-learn")
    monkeypatch.setattr(study, "eval_rows", 2)
    for arm in ("recall-0-lr0.001", "copy-3-lr0.004", "recall-6-lr0.002"):
        task, count, rate = arm.replace("lr", "").split("-")
        assert study.arms[arm][0] == task
        study.run(arm, 44, tmp_path, ())
        assert found.pop() == (int(count), float(rate), 44, 6000)


class Oracle(nn.Module):
    """Knows the rows, and gives every token but the last the label of the next one, or else another one."""

    device = torch.device("cpu")

    def __init__(self, rows, is_right):
        super().__init__()
        self.labels, self.is_right = {tuple(row.input_ids): torch.tensor(row.labels) for row in rows}, is_right

    def forward(self, input_ids):
        labels = torch.stack([self.labels[tuple(ids.tolist())] for ids in input_ids]).roll(-1, dims=1).clamp(min=0)
        return CausalLMOutputWithPast(logits=nn.functional.one_hot((labels + 1 - self.is_right) % 64, 64).float())


@pytest.mark.parametrize("task", TASKS)
def test_an_answer_is_what_the_token_before_it_predicts(task):
    generator = np.random.default_rng(1)
    rows = [TASKS[task](generator, 96, 64) for _ in range(5)]
    is_right, distances = answer(Oracle(rows, 1), rows, batch_size=2)
    assert is_right.all() and len(is_right) >= 5 * 12
    assert distances.tolist() == [x for row in rows for x in row.distances if x]
    assert not answer(Oracle(rows, 0), rows)[0].any()


def test_models_are_judged_on_far_answers_of_rows_that_are_not_trained(tmp_path, monkeypatch):
    found = {}

    def train_small(model, data, seed, folder, options, callbacks):
        found.update(data=data, goal=callbacks[0])
        weights.append(model.lm_head.weight.sum().item())
        return False

    weights = []
    monkeypatch.setattr(time_to_learn, "train_small", train_small)
    for seed in (48, 47, 47):
        load_study("time-to-learn").run("recall-1-lr0.001", seed, tmp_path, ())
    assert weights[0] != weights[1] == weights[2]
    goal, trained = found["goal"], {tuple(row["input_ids"]) for row in islice(found["data"], 256)}
    assert len(goal.rows) == 128 and not trained & {tuple(row.input_ids) for row in goal.rows}

    # Two layers with windows of 8 reach 14 tokens back, and an answer is predicted one token before it.
    answers = np.array([True, True, False, False]), np.array([3, 15, 16, 90])
    monkeypatch.setattr(time_to_learn, "answer", lambda model, rows: answers)
    goal.on_step_end(None, SimpleNamespace(global_step=time_to_learn.EVERY), None, model=nn.Identity())
    assert goal.curve == [(time_to_learn.EVERY, 0.0)] and goal.steps is None


def test_time_to_learn_stops_at_the_goal(tmp_path, monkeypatch):
    study, arm = load_study("time-to-learn"), "recall-1-lr0.001"
    monkeypatch.setattr("lsgpt.studies.time_to_learn.EVERY", 5)
    monkeypatch.setattr(study, "eval_rows", 4)
    monkeypatch.setattr(study, "options", {**study.options, **TINY, "max_steps": 10})
    run = study.run(arm, 47, tmp_path, ())
    assert run["steps"] is None and [step for step, _ in run["far_accuracy"]] == [5, 10]
    assert not run["diverged"]
    monkeypatch.setattr("lsgpt.studies.time_to_learn.GOAL", 0.0)
    run = study.run(arm, 47, tmp_path, ())
    assert run["steps"] == 5 and len(run["far_accuracy"]) == 1
    runs = {
        arm: [{"seed": seed, "steps": 300 if arm.startswith("recall-1") else math.inf} for seed in range(47, 52)]
        for arm in study.arms
    }
    assert study.comparisons["one-all-recall"].judge(runs).verdict == "supported"
    assert study.comparisons["one-all-copy"].judge(runs).verdict == "inconclusive"
    assert study.comparisons["no-head-recall"].judge(runs).verdict == "supported"


def test_of_rates_with_equal_medians_that_with_the_smaller_mean_is_taken():
    """Runs that were stopped count as a number, or a single one of them would make every mean infinite."""
    steps = [5 * [math.inf], [300, 400, *3 * [math.inf]], [500, *4 * [math.inf]]]
    arms = [time_to_learn.arm_of("recall", 1, rate) for rate in time_to_learn.RATES]
    runs = {arm: [{"seed": i, "steps": x} for i, x in enumerate(of_arm)] for arm, of_arm in zip(arms, steps)}
    assert time_to_learn.tuned("recall", 1).choose(time_to_learn.STEPS, runs) == arms[1]
