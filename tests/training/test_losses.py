"""Values and gradients of the losses are those of their formulas, for language models and classifiers."""

import math
from functools import partial

import pytest
import torch
from torch.nn import functional as F
from trainers import random_rows, trainer_of
from transformers import GPT2Config, GPT2LMHeadModel, Trainer

from lsgpt import LSGPTForSequenceClassification
from lsgpt.training import (
    LSGPTTrainer,
    collate_blocks,
    exponentiated_loss,
    generalized_cross_entropy,
    symmetric_cross_entropy,
)


FLOOR = 1e-4


def exponentiated(probabilities, labels, e):
    """The published formula, and below the floor its tangent there."""
    losses = -probabilities.gather(-1, labels[:, None])[:, 0].log()
    tangent = FLOOR**e + e * FLOOR ** (e - 1) * (losses - FLOOR)
    return torch.where(losses < FLOOR, tangent, losses**e)


def generalized(probabilities, labels, q):
    return (1 - probabilities.gather(-1, labels[:, None])[:, 0] ** q) / q


def symmetric(probabilities, labels, alpha, beta, log_zero):
    targets = F.one_hot(labels, probabilities.shape[-1])
    log_targets = torch.where(targets == 1, 0.0, log_zero)
    forward, reverse = -targets * probabilities.log(), -probabilities * log_targets
    return (alpha * forward + beta * reverse).sum(-1)


LOSSES = [
    (exponentiated_loss(1), lambda p, y: exponentiated(p, y, 1)),
    (exponentiated_loss(0.7), lambda p, y: exponentiated(p, y, 0.7)),
    (exponentiated_loss(0.1), lambda p, y: exponentiated(p, y, 0.1)),
    (generalized_cross_entropy(), lambda p, y: generalized(p, y, 0.7)),
    (generalized_cross_entropy(1.0), lambda p, y: generalized(p, y, 1.0)),
    (symmetric_cross_entropy(0.1, 1.0), lambda p, y: symmetric(p, y, 0.1, 1.0, -4.0)),
    (symmetric_cross_entropy(6.0, 0.1, log_zero=-6.0), lambda p, y: symmetric(p, y, 6.0, 0.1, -6.0)),
]
"""Each loss, and its formula for probabilities `(N, C)` and labels `(N,)`."""


def gradient(loss, logits):
    return torch.autograd.grad(loss, logits)[0]


@pytest.mark.parametrize(("loss", "formula"), LOSSES)
@pytest.mark.parametrize("length", [6, 700])
def test_values_and_gradients_for_a_language_model(loss, formula, length):
    """Of 12 tokens, and of 1,400, which are more than a chunk; some losses are below the floor."""
    logits = torch.randn(2, length, 7, dtype=torch.float64) * 3
    labels = torch.randint(7, (2, length))
    logits[0, 0, labels[0, 1]] += 24
    labels[1, 2:5] = -100
    logits.requires_grad_()
    found = loss({"logits": logits}, labels)
    kept = labels[:, 1:] != -100
    assert kept.sum() == 2 * (length - 1) - 3
    expected = formula(logits[:, :-1][kept].softmax(-1), labels[:, 1:][kept]).mean()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradient(found, logits), gradient(expected, logits))
    # Divided by what a Trainer counts over all micro-batches of a step, a number or a tensor.
    for count in (1000, torch.tensor(1000)):
        torch.testing.assert_close(loss((logits,), labels, num_items_in_batch=count), expected * kept.sum() / 1000)


@pytest.mark.parametrize(("loss", "formula"), LOSSES)
def test_values_and_gradients_for_a_classifier(loss, formula):
    logits, labels = torch.randn(5, 7, dtype=torch.float64, requires_grad=True), torch.randint(7, (5,))
    found, expected = loss((logits,), labels), formula(logits.softmax(-1), labels).mean()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradient(found, logits), gradient(expected, logits))
    assert torch.autograd.gradcheck(lambda x: loss((x,), labels), logits)
    half = logits.bfloat16()  # computed with in float32
    torch.testing.assert_close(loss((half,), labels), loss((half.float(),), labels))


@pytest.mark.parametrize("make", [exponentiated_loss, generalized_cross_entropy])
def test_a_classifier_of_tokens_has_labels_where_its_logits_are(make):
    logits, labels = torch.randn(2, 5, 7), torch.randint(7, (2, 5))
    labels[0, 3] = -100
    kept = labels != -100
    found = make(0.5, causal=False)((logits,), labels)
    torch.testing.assert_close(found, make(0.5)((logits[kept],), labels[kept]))
    assert found != make(0.5)((logits,), labels)


@pytest.mark.parametrize("make", [partial(exponentiated_loss, 1), partial(symmetric_cross_entropy, 1.0, 1.0)])
def test_other_losses_of_such_a_classifier(make):
    logits, labels = torch.randn(2, 5, 7), torch.randint(7, (2, 5))
    found = make(causal=False)((logits,), labels)
    torch.testing.assert_close(found, make()((logits.flatten(0, 1),), labels.flatten()))


@pytest.mark.parametrize("e", [0.01, 0.5, 0.99])
@pytest.mark.parametrize("floor", [FLOOR, 0.01])
def test_the_floor(e, floor):
    """Value and slope are continuous there; the slope is bounded, and the loss at 0 is what the docstring says."""

    def at(cross_entropy):
        """The loss of two classes, and its slope as a function of their cross-entropy."""
        logit = torch.tensor(-math.log(math.expm1(cross_entropy)), dtype=torch.float64, requires_grad=True)
        loss = exponentiated_loss(e, floor)((torch.stack([logit, torch.zeros_like(logit)])[None],), torch.tensor([0]))
        return loss.item(), gradient(loss, logit).item() / math.expm1(-cross_entropy)

    (below, slope_below), (above, slope_above) = at(floor * (1 - 1e-7)), at(floor * (1 + 1e-7))
    assert (below, above) == pytest.approx((floor**e, floor**e), rel=1e-6)
    slope = e * floor ** (e - 1)
    assert (slope_below, slope_above) == pytest.approx((slope, slope), rel=1e-6)
    for cross_entropy in (floor / 2, floor / 1000):
        assert at(cross_entropy)[1] == pytest.approx(slope, rel=1e-6)
    assert at(2 * floor) == pytest.approx(((2 * floor) ** e, e * (2 * floor) ** (e - 1)), rel=1e-6)
    certain = torch.tensor([[1000.0, 0.0]], dtype=torch.float64, requires_grad=True)
    loss = exponentiated_loss(e, floor)((certain,), torch.tensor([0]))
    assert loss.item() == pytest.approx((1 - e) * floor**e, rel=1e-9)
    assert gradient(loss, certain).tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize(("loss", "formula"), LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_finite_everywhere(loss, formula, dtype):
    """From certainty of the label to certainty of another one; bfloat16 logits are computed with in float32."""
    margins = torch.tensor([-1e4, -100.0, -1.0, 0.0, 1.0, 8.0, 12.0, 16.0, 20.0, 100.0, 1e4])
    logits = torch.stack([margins, torch.zeros_like(margins)], dim=1).to(dtype).requires_grad_()
    labels = torch.zeros(len(margins), dtype=torch.int64)
    value = loss((logits,), labels)
    assert value.dtype == torch.float32 and value.isfinite()
    assert gradient(value, logits).isfinite().all() and gradient(loss((logits,), labels), logits).any()


def test_labels_that_are_all_ignored():
    logits = torch.randn(2, 5, 7, requires_grad=True)
    for count in (None, torch.tensor(0), 0):  # a Trainer counts the labels of the whole step
        loss = exponentiated_loss(0.5)((logits,), torch.full((2, 5), -100), count)
        assert loss == 0 and not gradient(loss, logits).any()
    labels = torch.full((1, 2), 3)
    one, half = (exponentiated_loss(0.5)((logits[:1, :2],), labels, count) for count in (1, torch.tensor(0.5)))
    assert half == 2 * one  # as where processes share a row, and its count


def test_packed_documents_are_as_separate_ones(tiny_model):
    """The collator ignores the first token of each, which nothing predicts."""
    model, loss = tiny_model(), exponentiated_loss(0.5)
    first, second = torch.randint(97, (9,)), torch.randint(97, (14,))
    positions = torch.cat([torch.arange(9), torch.arange(14)])
    rows = [{"input_ids": torch.cat([first, second]).tolist(), "position_ids": positions.tolist()}]
    batch = collate_blocks(rows)
    labels = batch.pop("labels")
    packed = loss(model(**batch, use_cache=False), labels)
    alone = [loss(model(document[None]), document[None]) for document in (first, second)]
    torch.testing.assert_close(packed, (8 * alone[0] + 13 * alone[1]) / 21)


def rows_with_gaps():
    """Rows that differ in how many labels they have, so that a mean of means is another one."""
    starts = [7 * i % 30 for i in range(64)]
    return [{**row, "labels": [-100] * start + row["labels"][start:]} for row, start in zip(random_rows(), starts)]


def gpt2():
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "n_positions": 64, "n_embd": 32, "n_layer": 1, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def train(folder, loss, model=None, rows=None, trainer_type=Trainer, **arguments):
    model = gpt2() if model is None else model
    arguments = {"learning_rate": 1e-2, "adam_epsilon": 1e-4, "train_sampling_strategy": "sequential", **arguments}
    trainer = trainer_of(model, folder, trainer_type=trainer_type, **arguments)
    trainer.train_dataset, trainer.compute_loss_func = rows or rows_with_gaps(), loss
    trainer.train()
    return trainer, [log["loss"] for log in trainer.state.log_history if "loss" in log]


def test_in_a_trainer_micro_batches_make_no_difference(tmp_path):
    """With the exponent 1 it is the training with the model's own loss."""
    torch.manual_seed(0)
    rows = rows_with_gaps()
    whole = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    own, own_losses = train(tmp_path, None, rows=rows)
    one, one_losses = train(tmp_path, exponentiated_loss(1), rows=rows)
    half, half_losses = train(tmp_path, exponentiated_loss(0.5), rows=rows)
    half_whole, half_whole_losses = train(tmp_path, exponentiated_loss(0.5), rows=rows, **whole)
    assert own_losses == pytest.approx(one_losses, rel=1e-5)
    assert half_losses == pytest.approx(half_whole_losses, rel=1e-5)
    assert half_losses[0] == pytest.approx(math.sqrt(own_losses[0]), rel=1e-2)  # losses are alike before the training
    torch.testing.assert_close(own.model.state_dict(), one.model.state_dict(), rtol=0, atol=1e-5)
    torch.testing.assert_close(half.model.state_dict(), half_whole.model.state_dict(), rtol=0, atol=1e-5)
    difference = max((a - b).abs().max() for a, b in zip(own.model.parameters(), half.model.parameters()))
    assert difference > 1e-3


@pytest.mark.parametrize(
    "loss", [exponentiated_loss(0.7), generalized_cross_entropy(), symmetric_cross_entropy(0.1, 1.0)]
)
def test_a_classifier_learns(tiny_config, tmp_path, loss):
    """Which of two tokens a row is full of, with a classifier of LSGPT and its Trainer."""
    torch.manual_seed(0)
    model = LSGPTForSequenceClassification(tiny_config(num_labels=2, pad_token_id=0, initializer_range=0.02))
    rows = [{"input_ids": [5 + i % 2] * 8, "labels": i % 2} for i in range(64)]
    trainer, losses = train(tmp_path, loss, model, rows, LSGPTTrainer, max_steps=12)
    assert losses[-1] < 0.5 * losses[0]
    logits = trainer.model.eval()(torch.tensor([rows[0]["input_ids"], rows[1]["input_ids"]])).logits
    assert logits.argmax(-1).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: exponentiated_loss(0), "`e` must be above 0 and at most 1; got 0"),
        (lambda: exponentiated_loss(1.5), "`e` must be above 0 and at most 1; got 1.5"),
        (lambda: exponentiated_loss(math.nan), "`e` must be above 0 and at most 1; got nan"),
        (lambda: exponentiated_loss(0.5, floor=0.0), "`floor` must be positive and finite; got 0.0"),
        (lambda: generalized_cross_entropy(0.0), "`q` must be above 0 and at most 1; got 0.0"),
        (lambda: symmetric_cross_entropy(-1.0, 1.0), "`alpha` must be at least 0 and finite; got -1.0"),
        (lambda: symmetric_cross_entropy(1.0, math.inf), "`beta` must be at least 0 and finite; got inf"),
        (lambda: symmetric_cross_entropy(0.0, 0.0), "`alpha` or `beta` must be positive; got 0 for both"),
        (lambda: symmetric_cross_entropy(1.0, 1.0, log_zero=0.0), "`log_zero` must be below 0 and finite; got 0.0"),
    ],
)
def test_values_that_cannot_be(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (None, "`labels` must be among the columns of the data"),
        (torch.zeros(2, 5), "`labels` must be whole numbers, one class for each example; got torch.float32"),
        (torch.zeros(2, 4, dtype=torch.int64), r"shape of `labels` and one more dimension; got \(2, 5, 7\) and \(2"),
    ],
)
def test_labels_that_do_not_fit(labels, message):
    with pytest.raises(ValueError, match=message):
        exponentiated_loss(0.5)((torch.randn(2, 5, 7),), labels)
