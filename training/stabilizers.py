"""Published remedies against exploding logits and loss spikes that are neither configuration nor part of the loss."""

from torch import nn
from transformers import TrainingArguments

from lsgpt.modeling_lsgpt import attention_layers


def attend_in_float32(model: nn.Module):
    """
    Makes every attention layer compute logits, softmax and weighted sums in float32, even under autocast.

    Raises:
        ValueError: If `model` is not an LSGPT model.
    """
    for layer in attention_layers(model):
        layer.in_float32 = True


def adagc_optimizer(args: TrainingArguments, lambda_rel: float = 1.05) -> tuple[type, dict]:
    """
    AdamW with adaptive gradient clipping (AdaGC, arXiv:2502.11034), for
    `Trainer(optimizer_cls_and_kwargs=adagc_optimizer(args))`. It scales the gradient of each tensor down to
    `lambda_rel` times the running mean of its norm.

    It replaces clipping by the global norm, so set `args.max_grad_norm` to 0. Learning rate, betas and epsilon are
    taken from `args`; the rest are AdaGC's defaults (`lambda_abs` 1.0, `beta` 0.98, `warmup_steps` 100).

    Raises:
        ImportError: If the package `pytorch_optimizer` is not installed.
    """
    try:
        from pytorch_optimizer import AdaGC  # noqa: PLC0415 (optional)
    except ImportError as error:
        raise ImportError("AdaGC needs the package pytorch_optimizer: pip install pytorch_optimizer") from error
    kwargs = {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    return AdaGC, {**kwargs, "lambda_rel": lambda_rel}
