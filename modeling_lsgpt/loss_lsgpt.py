"""The language modelling loss without the full logits, by far the largest tensor in training on long blocks.

Shapes: N tokens of the batch, d `hidden_size`, V `vocab_size`.
"""

import math
from collections.abc import Iterable
from itertools import repeat
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .linear_lsgpt import SplitLinear


CHUNK_LENGTH = 1024
"""
Number of tokens whose logits are held at a time. Each chunk reads the weight twice and adds to its gradient; with
shorter chunks, that takes a noticeable share of the time.
"""


class LinearCrossEntropy(torch.autograd.Function):
    """
    The cross-entropy of the logits `z = h @ W.T`, summed over the tokens. Computes gradients in the forward pass.

    For a token with hidden state `h` and target `t`, the loss is `logsumexp(z) - z[t]`. Its gradient with respect to
    the logits is `g = softmax(z) - onehot(t)`, or zero if the token is ignored; with respect to `h` it is `g @ W`, and
    with respect to the weight it is the sum of `outer(g, h)` over the tokens. All of this is known as soon as the
    logits are. So each chunk of tokens adds its share and discards its logits, none are computed twice, and the
    backward pass only multiplies by the incoming gradient (as in Liger-Kernel, arXiv:2410.10989). PyTorch 2.13 has
    such a function for labels (`linear_cross_entropy`), but without z-loss and teachers.

    With a teacher's logits `y`, the target is the distribution `p = softmax(y)`, the gradient is `g = softmax(z) - p`,
    and the loss is the Kullback-Leibler divergence `sum(p * (log(p) - log_softmax(z)))`: the cross-entropy minus a
    constant, so that it is zero where both distributions agree.

    Label smoothing `e` replaces `onehot(t)` by `(1 - e) * onehot(t) + e / V` (arXiv:1512.00567). Z-loss of weight `w`
    adds `w * logsumexp(z)**2` to the loss and `2 * w * logsumexp(z) * softmax(z)` to `g` (PaLM, arXiv:2204.02311).

    Matrix products are computed in the precision of the inputs, or of autocast; the loss and the weight's gradient are
    accumulated in float32 (float64 for float64). Second derivatives are not supported.
    """

    @staticmethod
    def forward(
        ctx,
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        ignore_index: int,
        teacher_logits: torch.Tensor | None = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
    ) -> torch.Tensor:
        """
        Takes hidden states `(N, d)`, the weight `(V, d)`, targets `(N,)`, logits of a teacher `(N, V)` and settings of
        `causal_lm_loss`. Returns the summed loss `()` in float32 or float64.
        """
        needs_states, needs_weight = ctx.needs_input_grad[:2]
        device, dtype = hidden_states.device.type, hidden_states.dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        sum_dtype = torch.promote_types(dtype, torch.float32)
        matrix = weight.to(dtype)
        loss = hidden_states.new_zeros((), dtype=sum_dtype)
        states_gradients = []
        weight_gradient = torch.zeros_like(weight, dtype=sum_dtype) if needs_weight else None
        with torch.autocast(device, enabled=False):
            for states, labels, teacher in _split(hidden_states, targets, teacher_logits):
                states = states.to(dtype)
                is_counted = (labels != ignore_index)[:, None]
                logits = states @ matrix.T
                log_probabilities = F.log_softmax(logits, dim=-1, dtype=sum_dtype)
                if z_loss:  # log-partition (N, 1); at the largest logit, the difference is the most precise
                    log_partition = logits.amax(-1, True).to(sum_dtype) - log_probabilities.amax(-1, True)
                    loss += z_loss * log_partition.square().where(is_counted, 0.0).sum()
                del logits
                if teacher is None:
                    nll = F.nll_loss(log_probabilities, labels, reduction="sum", ignore_index=ignore_index)
                    loss += (1 - label_smoothing) * nll
                    if label_smoothing:
                        loss -= label_smoothing * log_probabilities.mean(-1, True).where(is_counted, 0.0).sum()
                else:
                    difference = F.log_softmax(teacher, dim=-1, dtype=sum_dtype)
                    target = difference.exp()
                    difference -= log_probabilities
                    # A token that the teacher rules out costs nothing, although its logarithm is infinite.
                    difference.masked_fill_(target == 0, 0.0)
                    loss += torch.linalg.vecdot(target, difference).where(is_counted[:, 0], 0.0).sum()
                if not (needs_states or needs_weight):
                    continue
                gradient = log_probabilities.exp_()  # in place, because chunks of logits are large
                if z_loss:
                    gradient *= 1 + 2 * z_loss * log_partition
                if teacher is None:
                    share = gradient.new_full(is_counted.shape, label_smoothing - 1.0)
                    gradient.scatter_add_(1, labels.where(is_counted[:, 0], 0)[:, None], share)
                    if label_smoothing:
                        gradient -= label_smoothing / gradient.shape[1]
                else:
                    gradient -= target
                gradient = gradient.to(dtype)
                # Tokens are selected here, where each has `d` numbers, not above, where each has `V`.
                if needs_states:
                    states_gradients.append((gradient @ matrix).where(is_counted, 0.0))
                if needs_weight:
                    states = states.where(is_counted, 0.0)
                    if dtype == sum_dtype:
                        weight_gradient.addmm_(gradient.T, states)  # saves a temporary tensor as large as the weight
                    else:
                        weight_gradient += gradient.T @ states
        ctx.save_for_backward(torch.cat(states_gradients) if needs_states else None, weight_gradient)
        ctx.dtypes = hidden_states.dtype, weight.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        """Multiplies the saved gradients by `gradient` `()`; not in place, so that it can run again."""
        scaled = (
            None if saved is None else (saved * gradient).to(dtype)
            for saved, dtype in zip(ctx.saved_tensors, ctx.dtypes)
        )
        return *scaled, None, None, None, None, None


def causal_lm_loss(
    hidden_states: torch.Tensor,
    lm_head: Any,
    labels: torch.Tensor,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    teacher_logits: torch.Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    **kwargs,
) -> torch.Tensor:
    """
    Transformers' `ForCausalLMLoss` of the logits `lm_head(hidden_states)`, computed one chunk at a time.

    Args:
        hidden_states (`(B, T, d)`): Inputs of the output projection.
        lm_head: The output projection. If it only multiplies by its weight, the weight is used directly; otherwise (an
            adapter, a quantized or sharded weight, hooks, soft-capping) it is called, and again in the backward pass.
        labels (`(B, T)`): Token ids; each token predicts the next one.
        num_items_in_batch: Divisor of the summed loss; by default the number of targets in this batch.
        ignore_index: The label of tokens that are not predicted.
        shift_labels (`(B, T)`, *optional*): Targets that are already shifted, used instead of `labels`.
        teacher_logits (`(B, T, V)`, *optional*): Logits of a teacher model for the same tokens. The loss is then the
            Kullback-Leibler divergence between its distributions and this model's at every token with a label.
        label_smoothing: Share of the target that is spread evenly over the vocabulary (arXiv:1512.00567), as in
            `TrainingArguments`; of labels only, so 0 with `teacher_logits`.
        z_loss: Weight of the squared log-partition of the logits, `logsumexp(logits)**2`, which is added to the loss
            of every token that predicts a label (PaLM, arXiv:2204.02311, with 1e-4).
        **kwargs: Not used, as in `ForCausalLMLoss`.

    Returns:
        The loss `()`; NaN, with gradients of zero, if there is nothing to predict.
    """
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[:, 1:]
    states, targets = hidden_states.flatten(0, 1), shift_labels.flatten().to(hidden_states.device)
    teacher = None if teacher_logits is None else teacher_logits.flatten(0, 1)
    if _is_plain_matrix(lm_head, states.device):
        weight = lm_head.weight if torch.is_grad_enabled() else lm_head.weight.detach()
        loss = LinearCrossEntropy.apply(states, weight, targets, ignore_index, teacher, label_smoothing, z_loss)
    else:
        chunks, settings = _split(states, targets, teacher), (ignore_index, label_smoothing, z_loss)
        loss = sum(checkpoint(_summed_loss, lm_head, *chunk, *settings, use_reentrant=False) for chunk in chunks)
    if num_items_in_batch is not None:
        return loss / torch.as_tensor(num_items_in_batch, device=loss.device)
    count = (targets != ignore_index).sum()
    return (loss / count.clamp(min=1)).where(count > 0, math.nan)


def refuse_loss_arguments(
    teacher_logits: torch.Tensor | None = None, label_smoothing: float = 0.0, z_loss: float = 0.0, **kwargs
):
    """Raises `ValueError` if an argument of `causal_lm_loss` is set that other losses would ignore."""
    given = {"teacher_logits": teacher_logits is not None, "label_smoothing": label_smoothing, "z_loss": z_loss}
    if name := next((name for name, is_set in given.items() if is_set), None):
        raise ValueError(
            f"`{name}` must be unset without `skip_logits` or with a custom `loss_function`, because the loss would "
            "not use it"
        )


def _split(states: torch.Tensor, targets: torch.Tensor, teacher_logits: torch.Tensor | None) -> Iterable[tuple]:
    """Splits hidden states, targets and the teacher's logits, or `None`, into chunks of tokens."""
    teacher_chunks = repeat(None) if teacher_logits is None else teacher_logits.split(CHUNK_LENGTH)
    return zip(states.split(CHUNK_LENGTH), targets.split(CHUNK_LENGTH), teacher_chunks)


def _summed_loss(lm_head, states, targets, teacher, ignore_index, label_smoothing, z_loss) -> torch.Tensor:
    """What `LinearCrossEntropy` computes, for a chunk, and with gradients by PyTorch."""
    logits = lm_head(states)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    penalty = z_loss * logits.logsumexp(-1).square().where(targets != ignore_index, 0.0).sum() if z_loss else 0.0
    if teacher is None:
        return penalty + F.cross_entropy(
            logits, targets, reduction="sum", ignore_index=ignore_index, label_smoothing=label_smoothing
        )
    expected = F.log_softmax(teacher, dim=-1, dtype=logits.dtype)
    # Without `log_target`, with which tokens that the teacher rules out would give NaN.
    divergence = F.kl_div(F.log_softmax(logits, dim=-1), expected.exp(), reduction="none").sum(-1)
    return penalty + divergence.where(targets != ignore_index, 0.0).sum()


def _is_plain_matrix(lm_head: Any, device: torch.device) -> bool:
    """Whether calling `lm_head` only multiplies by its weight, and the whole weight is available on `device`."""
    if type(lm_head) not in (nn.Linear, SplitLinear):  # an adapter, a quantized layer
        return False
    # FSDP2 and DeepSpeed, for example, gather the weight in hooks.
    hooks = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    return (
        not any(getattr(lm_head, name) for name in hooks)
        and "forward" not in vars(lm_head)  # Accelerate's hooks load the weight from the CPU or disk
        and lm_head.bias is None
        and type(lm_head.weight) in (torch.Tensor, nn.Parameter)  # not quantized, not sharded
        and lm_head.weight.shape == (lm_head.out_features, lm_head.in_features)  # not an empty placeholder
        and lm_head.weight.device == device
    )
