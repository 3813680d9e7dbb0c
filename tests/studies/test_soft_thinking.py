"""The study of soft thinking: its problems, pass@k, runs at a small size, and the report."""

import itertools
import json
import math
import sys

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lsgpt.configuration import load_preset
from lsgpt.studies import load_study, write_report
from lsgpt.studies.soft_thinking import (
    ATTEMPTS,
    END_OF_THINKING,
    SYMBOLS,
    as_chat,
    count_right,
    held_out_sums,
    is_right,
    make_problems,
    make_sum,
    make_tokenizer,
    pass_at,
    train_supervised,
)


SEEDS = (42, 43)

TINY = {
    "num_terms": 2,
    "num_digits": 1,
    "config": {"hidden_size": 24, "num_hidden_layers": 1, "sliding_window": 4, "max_position_embeddings": 32},
    "preset": "demo",
    "right_enough": 1.0,
    "check_every_n_steps": 2,
    "supervised_options": {
        "max_steps": 3,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "warmup_steps": 1,
        "use_cpu": True,
    },
    "options": {
        "max_steps": 3,
        "per_device_train_batch_size": 16,
        "steps_per_generation": 2,
        "learning_rate": 1e-2,
        "max_completion_length": 6,
        "gradient_checkpointing": False,
        "use_cpu": True,
    },
    "num_problems": 16,
    "eval_problems": 3,
    "eval_samples": 32,
    "eval_batch_size": 40,
}


def shrink(monkeypatch, study, **changes):
    """Puts other settings into all scales of a study."""
    scales = {name: scale._replace(fields={**scale.fields, **changes}) for name, scale in study.scales.items()}
    monkeypatch.setattr(study, "scales", scales)


@pytest.fixture
def study(monkeypatch):
    study = load_study("soft-thinking")
    shrink(monkeypatch, study, **TINY)
    return study


def report_of(study, runs, folder):
    """Writes runs as `lsgpt study` does, and returns the report that is made from the file alone."""
    common = {"scale": "micro", "seconds": 1.0, "fields": [], "environment": {"system": "any"}}
    lines = [
        {"arm": arm, "seed": seed, "values": values, **common}
        for arm, of_arm in runs.items()
        for seed, values in zip(SEEDS, of_arm)
    ]
    folder.mkdir()
    text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
    (folder / "runs.jsonl").write_text(text, encoding="utf-8")
    return write_report(study, folder).read_text(encoding="utf-8")


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
    scales = load_study("soft-thinking").scales
    settings = scales["micro"].fields
    config = load_preset(settings["preset"], **settings["config"])
    prompt, thinking, answer = make_sum(np.random.default_rng(0), settings["num_terms"], settings["num_digits"])
    space = settings["options"]["max_completion_length"]
    assert len(thinking) + 1 + len(answer) + 1 <= space
    assert len(prompt) + space <= min(config.max_position_embeddings, config.sliding_window)
    assert all(scale.fields["eval_samples"] >= ATTEMPTS[-1] for scale in scales.values())


def test_held_out_problems_are_in_no_training():
    settings = {**TINY, "eval_problems": 60, "num_problems": 500}
    training, held_out = make_problems(settings, 42, make_tokenizer())
    assert held_out == held_out_sums(settings) == make_problems(settings, 43, make_tokenizer())[1]
    assert len(training) == 500 and len(held_out) == 60
    prompts, tested = ({problem.prompt for problem in part} for part in (training, held_out))
    assert prompts and tested and not prompts & tested  # of 100 that there are
    assert training != make_problems(settings, 43, make_tokenizer())[0]


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("130</think>0155", "155", True),
        ("130</think>0155", "0155", True),
        ("155</think>0156", "155", False),
        ("0155", "155", False),
        ("0155</think>", "155", False),
        ("155</think>156</think>155", "155", True),
        ("So 7.</think>\n\nTom pays 3 times $1,250.50.", "1250.5", True),
        ("7</think>It is -12, not 13", "13", True),
        ("7</think>It is -12", "12", False),
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
    assert list(study.arms("micro")) == ["none", "grpo", "soft-grpo"]
    study.prepare("micro", tmp_path, ())
    runs = {}
    for arm, seed in (("none", 42), ("grpo", 42), ("soft-grpo", 42), ("none", 43)):
        runs.setdefault(arm, []).append(study.run(arm, seed, "micro", tmp_path, ()))
        for mode in ("discrete", "soft"):
            passes = [runs[arm][-1][mode][str(k)] for k in ATTEMPTS]
            assert all(0 <= x <= 1 for x in passes) and passes == sorted(passes)
    for arm in ("grpo", "soft-grpo"):
        curves = runs[arm][0]["curves"]
        assert [step for step, _ in curves["reward"]] == [1, 3]  # two steps for each generation
        assert all(0 <= x <= 1 for _, x in curves["reward"]) and all(x > 0 for _, x in curves["length"])
    # The model of a seed is trained once, and the same numbers come out of it again.
    assert sorted(path.name for path in (tmp_path / "supervised").iterdir() if path.is_dir()) == ["seed-42", "seed-43"]
    assert study.run("soft-grpo", 42, "micro", tmp_path, ()) == runs["soft-grpo"][0]
    assert study.run("none", 42, "micro", tmp_path / "again", ()) == runs["none"][0]
    text = report_of(study, runs, tmp_path / "report")
    assert "Verdict: **inconclusive**" in text and "| `soft-grpo` | soft |" in text
    for plot in ("pass.png", "reward.png"):
        assert f"]({plot})" in text
    for arm, of_arm in runs.items():
        assert f"| `{arm}` |" in report_of(study, {arm: of_arm}, tmp_path / f"report-of-{arm}")


def test_models_of_a_seed_are_made_once_and_whole(tmp_path, monkeypatch):
    path = train_supervised(TINY, 42, tmp_path / "model")
    before = AutoModelForCausalLM.from_pretrained(path).state_dict()
    stamp = (path / "model.safetensors").stat().st_mtime_ns
    assert train_supervised(TINY, 42, path) == path
    assert (path / "model.safetensors").stat().st_mtime_ns == stamp
    # What an interrupted process left is no model.
    other = tmp_path / "other"
    (tmp_path / "other-partial").mkdir()
    again = AutoModelForCausalLM.from_pretrained(train_supervised(TINY, 42, other)).state_dict()
    assert all(torch.equal(before[name], again[name]) for name in before)
    assert AutoTokenizer.from_pretrained(other).encode("1+2") == make_tokenizer().encode("1+2")


def test_the_supervised_training_ends_when_enough_is_right(tmp_path, capsys):
    """At the latest at its last step, and at the first check if nothing need be right."""
    for share, expected in ((1.0, ["2", "4"]), (0.0, ["2"])):
        options = {**TINY["supervised_options"], "max_steps": 5}
        settings = {**TINY, "right_enough": share, "supervised_options": options}
        train_supervised(settings, 42, tmp_path / f"until-{share}")
        lines = [line for line in capsys.readouterr().out.splitlines() if " right after " in line]
        assert [line.split()[-2] for line in lines] == expected


def test_right_answers_are_counted_problem_by_problem(study, tmp_path):
    """A model that was trained on 1 + 2 = 03 alone says so whatever it is asked."""
    settings = {**TINY, "eval_batch_size": 7, "eval_samples": 5}
    path = train_supervised(settings, 42, tmp_path / "model")
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
        for problem, prompt, answer in zip(held_out_sums(settings), ("1+2=", "4+4=", "2+1="), ("03", "08", "3"))
    ]
    for mode in ("discrete", "soft"):
        assert count_right(model.eval(), tokenizer, problems, mode, settings) == [5, 0, 5]


CHAT = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}="


def test_the_papers_scale_runs_on_a_data_set_of_the_hub(study, tmp_path, monkeypatch):
    model = train_supervised(TINY, 42, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template, tokenizer.bos_token = CHAT, "<pad>"
    tokenizer.save_pretrained(model)
    rows = [{"question": "1+2", "answer": "1 and 2\n#### 1,003"}, {"question": "4+14", "answer": "#### 18"}] * 4
    assert as_chat(rows[0], tokenizer) == ("1+2=", "", "1003")
    for part in ("train", "test"):
        file = tmp_path / "data" / f"{part}.jsonl"
        file.parent.mkdir(exist_ok=True)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shrink(monkeypatch, study, model=str(model), dataset=(str(tmp_path / "data"),))
    problems, held_out = make_problems(study.scales["paper"].fields, 42, tokenizer)
    assert len(problems) == 8 and len(held_out) == 3 and {x.answer for x in problems} == {"1003", "18"}
    for arm in ("none", "soft-grpo", "grpo"):
        values = study.run(arm, 42, "paper", tmp_path / "work", ())
        assert all(math.isfinite(values[mode]["32"]) for mode in ("discrete", "soft"))
    assert not (tmp_path / "work" / "supervised").exists()


def test_without_trl(study, tmp_path, monkeypatch):
    """The study can be listed and described, and says what it needs before the first run."""
    monkeypatch.delitem(sys.modules, "lsgpt.training.soft_grpo", raising=False)
    monkeypatch.delitem(sys.modules, "lsgpt.studies.soft_thinking")
    monkeypatch.setitem(sys.modules, "trl", None)
    study = load_study("soft-thinking")
    assert "SofT-GRPO" in study.describe()
    with pytest.raises(ImportError, match=r"in a clone of lsgpt, pip install '\.\[rl\]'"):
        study.prepare("micro", tmp_path, ())
