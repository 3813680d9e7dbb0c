"""Published remedies against exploding logits and loss spikes that are neither configuration nor part of the loss."""

import functools
from typing import Any

import torch
from accelerate.utils import parse_flag_from_env
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, TrainingArguments

from lsgpt.modeling_lsgpt import (
    ALL_ATTENTION_FUNCTIONS,
    ALL_MASK_ATTENTION_FUNCTIONS,
    attention_layers,
    eager_attention_forward,
)


IN_FLOAT32 = "_in_float32"


ADAGC_SETTINGS = {"beta", "lambda_abs", "lambda_rel", "warmup_steps"}
"""The settings of AdaGC that `optim_args` may have. Others have fields of their own, such as `learning_rate`."""


def attend_in_float32(model: nn.Module):
    """
    Makes every attention layer compute logits, softmax and weighted sums in float32, even under autocast, by an
    attention function of that kind, registered under the name of the model's own with `IN_FLOAT32`. Raises
    `ValueError` for models other than LSGPT.
    """
    config = attention_layers(model)[0].config
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(config._attn_implementation, eager_attention_forward)

    @functools.wraps(attend)  # with its arguments and attributes, which tell whether it takes sinks
    def attend_precisely(module, query, key, value, *args, s_aux=None, **kwargs):
        kwargs["s_aux"] = None if s_aux is None else s_aux.float()
        with torch.autocast(query.device.type, enabled=False):
            output, weights = attend(module, query.float(), key.float(), value.float(), *args, **kwargs)
        return output.to(query.dtype), weights

    name = config._attn_implementation + IN_FLOAT32
    AttentionInterface.register(name, attend_precisely)
    if (create_mask := ALL_MASK_ATTENTION_FUNCTIONS.get(config._attn_implementation)) is not None:
        AttentionMaskInterface.register(name, create_mask)
    model.set_attn_implementation(name)


def is_sharded(args: TrainingArguments) -> bool:
    """Returns whether FSDP or DeepSpeed will split the weights over the processes."""
    # The environment: `accelerate launch` sets it, and the Trainer does so for `fsdp`, but only later.
    return args.deepspeed_plugin is not None or bool(args.fsdp) or parse_flag_from_env("ACCELERATE_USE_FSDP")


def adagc_optimizer(args: TrainingArguments) -> tuple[type, dict]:
    """
    AdamW with adaptive gradient clipping (AdaGC, arXiv:2502.11034), for
    `Trainer(optimizer_cls_and_kwargs=adagc_optimizer(args))`. It scales the gradient of each tensor down to
    `lambda_rel` times the running mean of its norm; during the first `warmup_steps`, it clips the global norm at
    `lambda_abs`. Settings are those of `args` and its `optim_args`, which may have the four of `ADAGC_SETTINGS`, or
    else AdaGC's defaults (`lambda_rel` 1.05, `lambda_abs` 1.0, `beta` 0.98, `warmup_steps` 100).

    Raises:
        ValueError: If `args.max_grad_norm` is not 0, because AdaGC clips gradients itself; or with FSDP or DeepSpeed,
            because it needs the gradients of whole tensors; or if `optim_args` or other settings are invalid.
        ImportError: If the package `pytorch_optimizer` is not installed.
    """
    if args.max_grad_norm != 0:
        raise ValueError(
            "`max_grad_norm` must be 0 with AdaGC (`optim: adagc`), which clips the gradient of each tensor instead; "
            f"got {args.max_grad_norm}"
        )
    if is_sharded(args):
        raise ValueError("AdaGC must not be combined with FSDP or DeepSpeed: it needs the gradients of whole tensors")
    try:
        from pytorch_optimizer import AdaGC  # noqa: PLC0415 (optional)
    except ImportError as error:
        raise ImportError("AdaGC needs the package pytorch_optimizer: pip install pytorch_optimizer") from error
    kwargs: dict[str, Any] = {
        "lr": args.learning_rate,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
    }
    pairs = [item.split("=") for item in (args.optim_args or "").replace(" ", "").split(",") if item]
    try:
        given: dict[str, Any] = {name: float(value) for name, value in pairs}
        if unknown := given.keys() - ADAGC_SETTINGS:
            raise ValueError(f"no setting is called {min(unknown)!r}")  # AdaGC ignores what it does not know
        AdaGC([nn.Parameter(torch.zeros(1))], **kwargs, **given)  # has errors of its own
    except ValueError as error:
        raise ValueError(
            "`optim_args` must be settings of AdaGC, as in 'lambda_abs=2.0,beta=0.98', with `optim: adagc`; got "
            f"{args.optim_args!r}: {error}"
        ) from error
    return AdaGC, {**kwargs, **given}
