"""Studies of wrong labels and of corrupted text: what is replaced, a run of each at a small size, and verdicts."""

import json
import math
import sys
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from study_reports import report_of

from lsgpt.studies import judge, load_study
from lsgpt.studies.noisy_labels import DIGITS, LOSSES, classify, load_digits, replace_labels
from lsgpt.studies.noisy_text import SHARES, corrupt_lines, guess_next
from lsgpt.studies.study import Runs
from lsgpt.training.compare import join_arm
from lsgpt.training.data import collate_blocks


SEEDS = (42, 43, 44)
LABELS, TEXT = load_study("noisy-labels"), load_study("noisy-text")


def verdicts(study, runs):
    return {claim: finding.verdict for claim, finding in judge(study, Runs(runs)).items()}


# Wrong labels


@pytest.mark.parametrize("share", [0.0, 0.2, 0.6])
def test_a_share_of_the_labels_is_replaced_by_others(share):
    labels = np.arange(5000) % 10
    before = labels.copy()
    replaced = replace_labels(labels, share, 42)
    is_wrong = replaced != labels
    assert is_wrong.sum() == round(share * 5000)
    assert (labels == before).all() and (replaced == replace_labels(labels, share, 42)).all()
    if share:
        # Nine other classes, all of which are as likely.
        shifts = np.bincount((replaced - labels)[is_wrong] % 10, minlength=10)
        assert shifts[0] == 0 and shifts[1:].min() > 0.7 * is_wrong.sum() / 9
        assert (replaced != replace_labels(labels, share, 43)).any()
        assert ((replace_labels(labels, share + 0.2, 42) == replaced) | ~is_wrong).all()


def test_the_digits_are_cut_into_training_and_test():
    digits = load_digits(DIGITS)
    assert {name: images.shape for name, (images, _) in digits.items()} == {"train": (400, 64), "test": (1397, 64)}
    seen = {image.tobytes() for image in digits["train"][0]}
    assert not any(image.tobytes() in seen for image in digits["test"][0])
    for images, labels in digits.values():
        assert images.min() == 0 and images.max() == 16
        assert np.bincount(labels).min() > 0.08 * len(labels)


def test_digits_without_scikit_learn(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match="pip install scikit-learn"):
        LABELS.prepare("micro", tmp_path, ())


def test_an_arm_is_the_loss_that_it_is_called():
    logits, labels = torch.randn(50, 10), torch.randint(0, 10, (50,))
    p = logits.softmax(-1)[torch.arange(50), labels]
    expected = {f"e{e}": (-p.log()) ** e for e in (1, 0.9, 0.7, 0.5)}
    expected |= {"gce": (1 - p**0.7) / 0.7, "sce": -0.1 * p.log() + 4 * (1 - p)}
    assert set(LABELS.arms("micro")) == set(expected)
    for arm, losses in expected.items():
        assert LOSSES[arm]((logits,), labels).item() == pytest.approx(losses.mean().item(), rel=1e-5)


def test_noisy_labels_run(tmp_path, monkeypatch):
    # Images of the same size and greys as in a dataset on the Hub, as at the paper's scale.
    generator = np.random.default_rng(0)
    for number in range(30):
        split, label = ("train" if number < 20 else "test"), number % 10
        file = tmp_path / "images" / split / str(label) / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (3, 4), dtype=np.uint8)).save(file)
    options = {"max_steps": 3, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "warmup_steps": 1}
    shape = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 6, "sliding_window": 5}
    changes = {
        "dataset": str(tmp_path / "images"),
        "preset": "demo",
        "config": {**shape, "max_position_embeddings": 12, "position_embedding_type": "learned"},
        "shares": (0.0, 0.5),
        "options": {**options, "use_cpu": True},
    }
    scales = {name: scale._replace(fields={**scale.fields, **changes}) for name, scale in LABELS.scales.items()}
    monkeypatch.setattr(LABELS, "scales", scales)
    images, labels = load_digits(str(tmp_path / "images"))["train"]
    assert images.shape == (20, 12) and images.max() == 16 and sorted(labels) == sorted([*range(10)] * 2)

    given, models = [], []
    original = sys.modules["lsgpt.studies.noisy_labels"].train_classifier

    def remember(config, images, labels, *others):
        given.append(labels)
        models.append(original(config, images, labels, *others))
        return models[-1]

    monkeypatch.setattr("lsgpt.studies.noisy_labels.train_classifier", remember)
    runs = {arm: [LABELS.run(arm, 42, "micro", tmp_path, ())] for arm in ("e1", "e0.5", "gce")}
    # The same seed gives the same labels to every loss, and the losses train to different models.
    assert (given[0] == labels).all() and (given[1] != labels).sum() == 10
    assert (given[3] == given[1]).all() and (given[5] == given[1]).all()
    weights = [model.score.weight for model in models]
    assert not torch.equal(weights[1], weights[3]) and not torch.equal(weights[1], weights[5])
    fit = runs["e0.5"][0]["by_share"][1]
    predicted = classify(models[3], images)
    is_wrong = given[3] != labels
    assert fit["memorized"] == np.mean(predicted[is_wrong] == given[3][is_wrong])
    assert fit["fitted"] == np.mean(predicted[~is_wrong] == labels[~is_wrong])
    assert LABELS.run("e0.5", 42, "paper", tmp_path, ()) == runs["e0.5"][0]
    text = report_of(LABELS, runs, tmp_path / "report")
    assert (tmp_path / "report" / "accuracy.png").stat().st_size > 1000
    assert "| loss | 0% wrong | 50% wrong |" in text and text.count("| `gce` |") == 3
    assert text.count("Verdict: **open**") == len(LABELS.claims)


def made_up_labels(wrong, right=None, noise=0.0):
    """Runs with given accuracies with and without wrong labels, 0.9 for other arms, that vary with the seed."""

    def fits(arm, i, sign):
        change = 0.02 * i + noise * sign * (i - 1)  # the first part is the same in all arms of a seed
        shares = (
            (0.0, (right or {}).get(arm, 0.9)),
            (0.2, wrong.get(arm, 0.9) + 0.05),
            (0.6, wrong.get(arm, 0.9) - 0.05),
        )
        return {"by_share": [{"share": share, "accuracy": accuracy - change} for share, accuracy in shares]}

    arms = LABELS.arms("micro")
    return {arm: [fits(arm, i, 1 if arm in ("e1", "gce") else -1) for i in range(3)] for arm in arms}


@pytest.mark.parametrize(
    ("wrong", "right", "noise", "expected"),
    [
        ({}, {}, 0.0, ("not seen", "seen", "seen")),
        ({"e0.9": 0.91, "e0.5": 0.95}, {}, 0.0, ("seen", "seen", "seen")),
        ({"e0.5": 0.95}, {}, 0.0, ("not seen", "seen", "seen")),
        ({"e0.9": 0.91, "e0.5": 0.91}, {}, 0.02, ("not seen", "seen", "seen")),
        ({"e0.7": 0.85, "e0.5": 0.85}, {"e0.5": 0.8}, 0.0, ("opposite", "not seen", "seen")),
        (
            {"e0.7": 0.8, "e0.5": 0.95, "sce": 0.99},
            {"e0.7": 0.85, "e0.5": 0.8},
            0.0,
            ("not seen", "opposite", "opposite"),
        ),
        ({"gce": 0.92}, {"e0.7": 0.88, "e0.5": 0.88}, 0.02, ("not seen", "not seen", "not seen")),
    ],
)
def test_verdicts_on_wrong_labels(wrong, right, noise, expected):
    runs = made_up_labels(wrong, right, noise)
    assert tuple(verdicts(LABELS, runs).values()) == expected
    runs["sce"] = runs["sce"][:1]
    assert set(verdicts(LABELS, runs).values()) == {"open"}


# Corrupted text


def test_lines_are_replaced_by_words_of_the_text():
    lines = [f"a{i} b{i}  c{i}" if i % 3 else f"  d{i}" for i in range(200)] + ["", " ", ""]
    text = "\n".join(lines)
    corrupted = corrupt_lines(text, 0.3)
    after = corrupted.split("\n")
    changed = [i for i, line in enumerate(after) if line != lines[i]]
    assert len(after) == len(lines) and len(changed) == 60  # of 200 lines with words
    assert all(len(after[i].split()) == len(lines[i].split()) for i in range(len(lines)))
    assert {word for line in after for word in line.split()} <= set(text.split())
    drawn = [word for i in changed for word in after[i].split()]
    assert len(set(drawn)) > len(drawn) / 2
    assert changed[0] < 20 and changed[-1] > 180

    assert corrupt_lines(text, 0.3) == corrupted != corrupt_lines(text, 0.3, seed=1)
    assert corrupt_lines(text + "\nmore", 0.3) != corrupted + "\nmore"
    assert corrupt_lines(text, 0.0) == text
    assert corrupt_lines("", 0.3) == "" and corrupt_lines(" \n", 0.3) == " \n"


def test_next_tokens_are_guessed(tiny_model):
    model, blocks = tiny_model(), torch.randint(0, 97, (3, 12))
    for row in blocks[:2]:  # some are right
        for i in range(4, 9):
            row[i] = model(row[None, :i]).logits[0, -1].argmax()
    guesses = [[model(row[None, :i]).logits[0, -1].argmax() == row[i] for i in range(1, 12)] for row in blocks]
    share = guess_next(model, blocks, batch_size=2)
    assert share == pytest.approx(np.mean(guesses)) and 10 / 33 <= share < 1


def test_noisy_text_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    parts = {"train": range(3000), "validation": range(3000, 3400)}
    texts = {name: "".join(f"line {i} of {i * i}\n" for i in numbers) for name, numbers in parts.items()}
    for name, text in texts.items():
        Path("books", name).mkdir(parents=True)
        Path("books", name, "text.txt").write_text(text)
    shape = "{vocab_size: 300, hidden_size: 24, num_hidden_layers: 1, max_position_embeddings: 32, sliding_window: 4}"
    options = {
        "dataset_name": "books",
        "streaming": "false",
        "max_eval_blocks": "2",
        "block_size": "32",
        "config_overrides": shape,
        "max_steps": "3",
        "warmup_steps": "1",
        "use_cpu": "true",
        "prompt": "line",
    }
    fields = [part for name, value in options.items() for part in (f"--{name}", value)]
    TEXT.prepare("micro", tmp_path, fields)

    def build(arm, folder, *more):
        overrides = ["--tokenizer", "tokenizer", "--output_dir", folder, *more]
        base = TEXT.base("micro", [*fields, *more])
        return TEXT.build(join_arm(base.recipe, arm, TEXT.arms("micro")[arm], overrides), arm)

    def blocks(data):
        return [list(map(int, row["input_ids"])) for row in data]

    def decode(data):
        return clean.processing_class.decode(list(chain(*blocks(data))))

    # Training text and loss are the arm's; the validation text is the same.
    clean, corrupted = build("clean-e0.9", "a"), build("corrupted-e0.5", "b")
    streamed = build("corrupted-e0.5", "c", "--streaming", "true")
    for name, trainer in (("clean", clean), ("corrupted", corrupted)):
        text = decode(trainer.train_dataset)
        assert len(text) > 1000 and corrupt_lines(texts["train"], SHARES[name]).startswith(text)
    assert blocks(corrupted.eval_dataset) == blocks(clean.eval_dataset)
    assert texts["validation"].startswith(decode(clean.eval_dataset))
    assert sorted(blocks(streamed.train_dataset)) == sorted(blocks(corrupted.train_dataset))
    assert blocks(streamed.eval_dataset) == blocks(clean.eval_dataset)
    batch = collate_blocks([clean.train_dataset[i] for i in range(2)])
    logits = clean.model(batch["input_ids"]).logits
    losses = torch.nn.functional.cross_entropy(
        logits[:, :-1].transpose(1, 2), batch["labels"][:, 1:], reduction="none"
    )
    for trainer, e in ((clean, 0.9), (corrupted, 0.5)):
        found = trainer.compute_loss_func({"logits": logits}, batch["labels"])
        assert found.item() == pytest.approx((losses**e).mean().item(), rel=1e-5)

    arms = ("clean-e1", "clean-e0.5", "corrupted-e0.5")
    runs = {arm: [TEXT.run(arm, 42, "micro", tmp_path, fields)] for arm in arms}
    first = {arm: runs[arm][0]["curves"]["loss"][0][1] for arm in arms}
    assert first["clean-e0.5"] == pytest.approx(first["clean-e1"] ** 0.5, rel=0.01)
    # What is reported is the cross-entropy, whatever the loss.
    assert all(of_arm[0]["eval_loss"] > 3 and not of_arm[0]["diverged"] for of_arm in runs.values())
    assert runs["corrupted-e0.5"][0]["eval_loss"] != runs["clean-e0.5"][0]["eval_loss"]
    results = tmp_path / "clean-e1" / "seed-42" / "results.json"
    for loss in (None, math.log(300) + 0.1):
        results.write_text(json.dumps({**json.loads(results.read_text()), "eval_loss": loss}))
        assert TEXT.measure(results.parent) == {"accuracy": runs["clean-e1"][0]["accuracy"], "diverged": True}

    runs["clean-e0.9"] = [{**runs["clean-e1"][0], "eval_loss": None, "accuracy": 0.0, "diverged": True}]
    text = report_of(TEXT, runs, tmp_path / "report")
    assert (tmp_path / "report" / "perplexity.png").stat().st_size > 1000
    assert "| `corrupted-e0.5` |" in text and "| `clean-e0.9` | not finite | not finite |" in text
    assert text.count("Verdict: **open**") == len(TEXT.claims)


def made_up_texts(clean, corrupted, noise=0.0):
    """Runs with given losses, 5.0 for other exponents."""
    losses = {"clean": clean, "corrupted": corrupted}
    return {
        arm: [
            {"eval_loss": losses[arm.split("-e")[0]].get(arm.split("-e")[1], 5.0) + 0.1 * i + sign * noise * (i - 1)}
            for i in range(3)
        ]
        for arm in TEXT.arms("micro")
        for sign in (1 if arm.endswith("e1") else -1,)
    }


@pytest.mark.parametrize(
    ("clean", "corrupted", "noise", "expected"),
    [
        ({}, {}, 0.0, ("not seen", "seen")),
        ({"0.5": 5.009}, {"0.9": 4.99, "0.7": 4.9, "0.5": 5.2}, 0.0, ("seen", "seen")),
        ({"0.5": 5.02}, {"0.9": 4.9}, 0.0, ("not seen", "not seen")),
        ({"0.7": 5.02, "0.5": 5.1}, {"0.7": 5.01, "0.5": 5.1}, 0.0, ("opposite", "opposite")),
        ({"0.7": 5.02, "0.5": 5.1}, {"0.7": 4.9, "0.5": 4.9}, 0.1, ("not seen", "not seen")),
    ],
)
def test_verdicts_on_corrupted_text(clean, corrupted, noise, expected):
    runs = made_up_texts(clean, corrupted, noise)
    found = verdicts(TEXT, runs)
    assert (found["corrupted"], found["clean"]) == expected
    # Diverged runs are worse than any other, one of them among others tells nothing, and one seed is no verdict.
    exponentiated = [run for arm in ("corrupted-e0.7", "corrupted-e0.5") for run in runs[arm]]
    exponentiated[0]["eval_loss"] = exponentiated[3]["eval_loss"] = math.inf
    assert verdicts(TEXT, runs)["corrupted"] == "not seen"
    for run in exponentiated:
        run["eval_loss"] = math.inf
    assert verdicts(TEXT, runs)["corrupted"] == "opposite"
    runs["clean-e1"] = runs["clean-e1"][:1]
    assert set(verdicts(TEXT, runs).values()) == {"open"}
