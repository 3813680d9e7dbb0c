"""
Losses that give wrong labels less weight than the cross-entropy does, for `Trainer(compute_loss_func=...)`.

Each is a function of the cross-entropy `l = -log p` of one example, which for a language model is one token. The model
has to return all of its logits; in addition to them and their gradient, these losses need memory for 1,024 tokens.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .metrics import IGNORED_LABEL, check_shapes


CHUNK_SIZE = 1024
"""Number of examples whose logits are held in float32 at a time."""

LossFunction = Callable[..., torch.Tensor]


def exponentiated_loss(e: float, floor: float = 1e-4, causal: bool = True) -> LossFunction:
    """
    The mean of `l ** e` over the examples (arXiv:1902.06127): the smaller `e`, the less a large loss counts.

    The slope `e * l ** (e - 1)` is unbounded as `l` goes to 0. Below `floor`, the loss is therefore the tangent to
    `l ** e` at `floor`: value and slope are continuous, the slope is at most `e * floor ** (e - 1)`, and the loss at 0
    is `(1 - e) * floor ** e`.

    Args:
        e: The exponent, above 0 and at most 1; 1 gives the cross-entropy. The paper uses 0.5 to 1.
        floor: The loss in nats below which the tangent is used.
        causal: Whether logits `(B, T, V)` are those of a causal language model, whose labels are shifted here. For a
            token classifier, this must be false; for logits `(B, C)`, it makes no difference.

    Returns:
        A function of `outputs`, `labels` and `num_items_in_batch`, as a `Trainer` passes them.

    Raises:
        ValueError: If an argument is invalid. The returned function raises it if logits and labels do not match.
    """
    _check("e", e, 0 < e <= 1, "above 0 and at most 1")
    _check("floor", floor, 0 < floor < math.inf, "positive and finite")
    if e == 1:
        return _mean_of(lambda losses: losses, causal)
    slope = e * floor ** (e - 1)

    def power(losses):
        clamped = losses.clamp(min=floor)  # no gradient below the floor, where it all comes from the second term
        return clamped**e + slope * (losses - clamped)

    return _mean_of(power, causal)


def generalized_cross_entropy(q: float = 0.7, causal: bool = True) -> LossFunction:
    """
    The mean of `(1 - p ** q) / q` over the examples (arXiv:1805.07836), where `p` is the probability of the label.

    Args:
        q: Above 0 and at most 1. Towards 0 the loss approaches the cross-entropy; at 1 it is `1 - p`. The paper uses
            0.7.
        causal: As in `exponentiated_loss`, like the result and the errors.
    """
    _check("q", q, 0 < q <= 1, "above 0 and at most 1")
    return _mean_of(lambda losses: -torch.expm1(-q * losses) / q, causal)


def symmetric_cross_entropy(alpha: float, beta: float, log_zero: float = -4.0, causal: bool = True) -> LossFunction:
    """
    The mean of `alpha * l + beta * r` over the examples (arXiv:1908.06112), where `r` is the reverse cross-entropy, in
    which labels and predictions are exchanged. With a finite number in place of the logarithm of 0, it is
    `-log_zero * (1 - p)`.

    Args:
        alpha: Weight of the cross-entropy, at least 0.
        beta: Weight of the reverse cross-entropy, at least 0. One of the two must be positive.
        log_zero: Replaces the logarithm of 0, must be below 0; the paper's A. Only its product with `beta` matters.
        causal: As in `exponentiated_loss`, like the result and the errors.
    """
    _check("alpha", alpha, 0 <= alpha < math.inf, "at least 0 and finite")
    _check("beta", beta, 0 <= beta < math.inf, "at least 0 and finite")
    _check("log_zero", log_zero, -math.inf < log_zero < 0, "below 0 and finite")
    if alpha == beta == 0:
        raise ValueError("`alpha` or `beta` must be positive; got 0 for both, which would leave no loss")
    return _mean_of(lambda losses: alpha * losses + beta * log_zero * torch.expm1(-losses), causal)


def _check(name: str, value: float, is_right: bool, rule: str):
    if not is_right:
        raise ValueError(f"`{name}` must be {rule}; got {value!r}")


def _mean_of(transform: Callable[[torch.Tensor], torch.Tensor], causal: bool) -> LossFunction:
    """Returns the loss that averages `transform` of the cross-entropies, a vector, over all examples with a label."""

    def sum_of(logits, labels):
        precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
        losses = F.cross_entropy(precise, labels, ignore_index=IGNORED_LABEL, reduction="none")
        return transform(losses).masked_fill(labels == IGNORED_LABEL, 0.0).sum()

    def compute_loss(
        outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """
        Returns the loss, a scalar, of a model's outputs, whose logits are `(B, T, V)` or, of a classifier, `(B, C)`,
        and of labels `(B, T)`, not shifted for a language model, or `(B,)`; -100 where there is nothing to learn. The
        sum is divided by `num_items_in_batch`, the number of labels in all micro-batches of a step; by default, by
        that of these labels.
        """
        logits = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
        if labels is None:
            raise ValueError("`labels` must be among the columns of the data: this loss compares them with the logits")
        if labels.is_floating_point():
            raise ValueError(f"`labels` must be whole numbers, one class for each example; got {labels.dtype}")
        check_shapes(logits, labels)
        if causal and logits.ndim == 3:
            labels = F.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)
        labels = labels.flatten().to(logits.device)
        total = torch.zeros((), device=logits.device)
        for chunk in zip(logits.flatten(0, -2).split(CHUNK_SIZE), labels.split(CHUNK_SIZE)):
            # Recomputed in the backward pass, because what cross-entropy saves for it is as large as the logits.
            total = total + checkpoint(sum_of, *chunk, use_reentrant=False, preserve_rng_state=False)
        count = (labels != IGNORED_LABEL).sum() if num_items_in_batch is None else num_items_in_batch
        count = torch.as_tensor(count, device=total.device)
        return total / count.masked_fill(count == 0, 1)

    return compute_loss
