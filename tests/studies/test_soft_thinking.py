"""The study of soft thinking: its problems, pass@k, runs at a small size, and the report."""

import itertools
import sys

import numpy as np
import pytest
import torch
from study_reports import report_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from lsgpt.configuration import load_preset
from lsgpt.studies import load_study
from lsgpt.studies.soft_thinking import (
    ATTEMPTS,
    END_OF_THINKING,
    SYMBOLS,
    is_right,
    make_sum,
    make_tokenizer,
    pass_at,
)


TINY = {
    "num_terms": 2,
    "num_digits": 1,
    "model": {"hidden_size": 24, "num_hidden_layers": 1, "sliding_window": 4, "max_position_embeddings": 32},
    "right_enough": 1.0,
    "check_every_n_steps": 2,
    "num_problems": 16,
    "eval_problems": 3,
    "eval_samples": 32,
    "eval_batch_size": 40,
}


@pytest.fixture
def study(monkeypatch):
    study = load_study("soft-thinking")
    few = {"max_steps": 3, "learning_rate": 1e-2, "use_cpu": True}
    supervised = {**study.supervised_options, **few, "per_device_train_batch_size": 4, "warmup_steps": 1}
    options = {**study.options, **few, "per_device_train_batch_size": 16, "max_completion_length": 6}
    for field, value in {**TINY, "supervised_options": supervised, "options": options}.items():
        monkeypatch.setattr(study, field, value)
    return study


# Problems


@pytest.mark.parametrize(("num_terms", "num_digits"), [(2, 1), (3, 2), (5, 3)])
def test_answers_are_right(num_terms, num_digits):
    generator, lengths, largest = np.random.default_rng(0), set(), []
    for _ in range(200):
        prompt, thinking, answer = make_sum(generator, num_terms, num_digits)
        terms = prompt.removesuffix("=").split("+")
        assert len(terms) == num_terms and {len(term) for term in terms} == {num_digits}
        sums = [sum(map(int, terms[:i])) for i in range(2, num_terms + 1)]
        assert [int(x[::-1]) for x in thinking.split(",")] == sums
        assert int(answer) == sums[-1]
        lengths.add((len(prompt), len(thinking), len(answer)))
        largest.append(max(map(int, terms)))
    assert len(lengths) == 1
    for digits in range(1, num_digits + 1):  # as many of each size
        share = np.mean([10 ** (digits - 1) <= x < 10**digits for x in largest])
        assert share == pytest.approx(1 / num_digits, abs=0.1)


def test_sums_fit_into_the_model():
    study = load_study("soft-thinking")
    config = load_preset("demo", **study.model)
    prompt, thinking, answer = make_sum(np.random.default_rng(0), study.num_terms, study.num_digits)
    space = study.options["max_completion_length"]
    assert len(thinking) + 1 + len(answer) + 1 <= space
    assert len(prompt) + space <= min(config.max_position_embeddings, config.sliding_window)
    assert study.eval_samples >= ATTEMPTS[-1]


def test_held_out_problems_are_in_no_training(study, monkeypatch):
    monkeypatch.setattr(study, "eval_problems", 60)
    held_out, (training, others) = (
        study.held_out_sums(),
        (study.training_sums(np.random.default_rng(seed), 500) for seed in (42, 43)),
    )
    assert held_out == study.held_out_sums() and len(training) == 500 and len(held_out) == 60
    prompts, tested = ({problem.prompt for problem in part} for part in (training, held_out))
    assert prompts and tested and not prompts & tested  # of 100 that there are
    assert training != others


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("130</think>0155", "155", True),
        ("130</think>0155", "0155", True),
        ("155</think>0156", "155", False),
        ("0155", "155", False),
        ("0155</think>", "155", False),
        ("155</think>156</think>155", "155", True),
        ("7</think>12+13", "13", True),
    ],
)
def test_the_last_number_after_the_thinking_counts(completion, answer, expected):
    assert is_right(completion, answer) is expected


def test_the_tokenizer_keeps_every_character():
    tokenizer = make_tokenizer()
    text = f"12+99=111,{END_OF_THINKING}0210<eos>"
    ids = tokenizer.encode(text)
    assert [SYMBOLS[i] for i in ids] == [*"12+99=111,", END_OF_THINKING, *"0210", "<eos>"]
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([0, 0, *ids], skip_special_tokens=True) == text.removesuffix("<eos>")


# pass@k


@pytest.mark.parametrize(("num_samples", "num_right"), [(6, 0), (6, 1), (6, 4), (6, 6), (7, 2)])
def test_pass_at_k_is_the_share_of_draws_with_a_right_one(num_samples, num_right):
    right = [i < num_right for i in range(num_samples)]
    for k in range(1, num_samples + 1):
        draws = [any(draw) for draw in itertools.combinations(right, k)]
        assert pass_at(k, num_samples, num_right) == pytest.approx(sum(draws) / len(draws), abs=1e-12)
    assert pass_at(1, num_samples, num_right) == pytest.approx(num_right / num_samples)


# Runs


def test_soft_thinking_runs(study, tmp_path):
    study.prepare(tmp_path, ())
    runs = {arm: [study.run(arm, 42, tmp_path, ())] for arm in study.arms}
    for (run,) in runs.values():
        for mode in ("discrete", "soft"):
            passes = [run[mode][str(k)] for k in ATTEMPTS]
            assert all(0 <= x <= 1 for x in passes) and passes == sorted(passes)
    for arm in ("grpo", "soft-grpo"):
        curves = runs[arm][0]["curves"]
        assert [step for step, _ in curves["reward"]] == [1, 3]  # two steps for each generation
        assert all(0 <= x <= 1 for _, x in curves["reward"]) and all(x > 0 for _, x in curves["length"])
    # The same numbers come out of it again.
    assert study.run("soft-grpo", 42, tmp_path, ()) == runs["soft-grpo"][0]
    assert study.run("none", 42, tmp_path / "again", ()) == runs["none"][0]
    text = report_of(study, runs, tmp_path / "report")
    assert "Verdict: **inconclusive**" in text and "| `soft-grpo, soft` |" in text
    assert "](pass.png)" in text and "](reward.png)" in text
    assert "| `none, soft` |" in report_of(study, {"none": runs["none"]}, tmp_path / "report-of-none")


def test_models_of_a_seed_are_made_once_and_whole(study, tmp_path):
    path = study.train_supervised(42, tmp_path / "model")
    before = AutoModelForCausalLM.from_pretrained(path).state_dict()
    stamp = (path / "model.safetensors").stat().st_mtime_ns
    assert study.train_supervised(42, path) == path
    assert (path / "model.safetensors").stat().st_mtime_ns == stamp
    # What an interrupted process left is no model.
    other = tmp_path / "other"
    (tmp_path / "other-partial").mkdir()
    again = AutoModelForCausalLM.from_pretrained(study.train_supervised(42, other)).state_dict()
    assert all(torch.equal(before[name], again[name]) for name in before)
    assert AutoTokenizer.from_pretrained(other).encode("1+2") == make_tokenizer().encode("1+2")


def test_the_supervised_training_ends_when_enough_is_right(study, tmp_path, capsys, monkeypatch):
    """At the latest at its last step, and at the first check if nothing need be right."""
    monkeypatch.setattr(study, "supervised_options", {**study.supervised_options, "max_steps": 5})
    for share, expected in ((1.0, ["2", "4"]), (0.0, ["2"])):
        monkeypatch.setattr(study, "right_enough", share)
        study.train_supervised(42, tmp_path / f"until-{share}")
        lines = [line for line in capsys.readouterr().out.splitlines() if " right after " in line]
        assert [line.split()[-2] for line in lines] == expected


def test_right_answers_are_counted_problem_by_problem(study, tmp_path, monkeypatch):
    """A model that was trained on 1 + 2 = 03 alone says so whatever it is asked."""
    monkeypatch.setattr(study, "eval_batch_size", 7)
    path = study.train_supervised(42, tmp_path / "model")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), make_tokenizer()
    tokenizer.padding_side = "left"
    ids = torch.tensor([tokenizer.encode(f"{prompt}{END_OF_THINKING}03<eos>") for prompt in ("1+2=", "4+4=", "2+1=")])
    labels = ids.clone()
    labels[:, :4] = -100
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(80):
        model(ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    problems = [
        problem._replace(prompt=prompt, answer=answer)
        for problem, prompt, answer in zip(study.held_out_sums(), ("1+2=", "4+4=", "2+1="), ("03", "08", "3"))
    ]
    for mode in ("discrete", "soft"):
        assert study.count_right(model.eval(), tokenizer, problems, mode, 5) == [5, 0, 5]


def test_without_trl(study, tmp_path, monkeypatch):
    """The study says what it needs before the first run."""
    monkeypatch.delitem(sys.modules, "lsgpt.training.soft_grpo", raising=False)
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(ImportError, match=r"in a clone of lsgpt, pip install '\.\[rl\]'"):
        study.prepare(tmp_path, ())
