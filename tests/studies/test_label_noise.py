"""The study of wrong labels: what is replaced, a run at a small size, and its report."""

import sys

import numpy as np
import pytest
import torch
from study_reports import report_of

from lsgpt.studies import load_study
from lsgpt.studies.noisy_labels import LOSSES, classify, load_digits, replace_labels


LABELS = load_study("noisy-labels")


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
    digits = load_digits()
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
    generator = np.random.default_rng(0)
    images, labels = generator.integers(0, 17, (20, 12)), np.arange(20) % 10
    monkeypatch.setattr(
        "lsgpt.studies.noisy_labels.load_digits", lambda: {"train": (images, labels), "test": (images, labels)}
    )
    options = {"max_steps": 3, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "warmup_steps": 1}
    shape = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 6, "sliding_window": 5}
    changes = {
        "preset": "demo",
        "config": {**shape, "max_position_embeddings": 12, "position_embedding_type": "learned"},
        "shares": (0.0, 0.5),
        "options": {**options, "use_cpu": True},
    }
    scales = {name: scale._replace(fields={**scale.fields, **changes}) for name, scale in LABELS.scales.items()}
    monkeypatch.setattr(LABELS, "scales", scales)
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
    assert LABELS.run("e0.5", 42, "micro", tmp_path, ()) == runs["e0.5"][0]
    text = report_of(LABELS, runs, tmp_path / "report")
    assert "](accuracy.png)" in text
    assert "| loss | 0% wrong | 50% wrong |" in text and text.count("| `gce` |") == 3
    assert text.count("Verdict: **open**") == 5 and text.count("Verdict: **inconclusive**") == 2  # one seed
