"""Published remedies against exploding logits and loss spikes, for comparison with Long Short-attention.

A recipe names them in `stabilizers`. Each function here can also be used alone, in a script with a stock `Trainer`.
"""

import math
from typing import NamedTuple

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, TrainingArguments
from transformers.loss.loss_utils import ForCausalLMLoss

from lsgpt.modeling_lsgpt import (
    ALL_ATTENTION_FUNCTIONS,
    ALL_MASK_ATTENTION_FUNCTIONS,
    attention_layers,
    eager_attention_forward,
)
from lsgpt.utilities import suggest


class Stabilizer(NamedTuple):
    """The published default of a method, what this value means, and its source."""

    default: float | bool
    meaning: str
    source: str


STABILIZERS = {
    "qk-norm": Stabilizer(True, "RMSNorm of every query and key before the rotary embedding", "arXiv:2309.14322"),
    "softcap": Stabilizer(50.0, "bound c of the attention logits, c * tanh(logits / c)", "Gemma 2, arXiv:2408.00118"),
    "z-loss": Stabilizer(1e-4, "weight of the squared log-partition of the output logits", "PaLM, arXiv:2204.02311"),
    "qk-clip": Stabilizer(100.0, "largest attention logit allowed", "MuonClip, arXiv:2507.20534"),
    "adagc": Stabilizer(1.05, "largest gradient norm of a tensor over its running mean", "arXiv:2502.11034"),
    "fp32-attention": Stabilizer(True, "attention in float32 under autocast", "arXiv:2405.02803"),
}


def read_stabilizers(value: str | list | dict | None) -> dict[str, float | bool]:
    """
    Reads a recipe's `stabilizers` into a dictionary of names and values. They may be a string such as
    `"z-loss,qk-clip"`, a list of names, or names with values; `true` stands for the published default.

    Raises:
        ValueError: If a name is unknown, or a value is not a positive number.
    """
    if isinstance(value, str):
        value = [name.strip() for name in value.split(",") if name.strip()]
    if not isinstance(value, dict):
        value = dict.fromkeys(value or [], True)
    result = {}
    for name, setting in value.items():
        if name not in STABILIZERS:
            known = ", ".join(STABILIZERS)
            raise ValueError(f"`stabilizers` must be among {known}; got {name!r}{suggest(str(name), STABILIZERS)}")
        default = STABILIZERS[name].default
        if setting is True:
            result[name] = default
        elif setting is not False:
            try:
                number = float(setting)  # YAML reads 1e-3 as a string
            except (TypeError, ValueError):
                number = 0.0
            if default is True or not 0 < number < math.inf:
                rule = "true or false" if default is True else "a positive number, true or false"
                raise ValueError(f"`stabilizers` must have {rule} for {name}; got {setting!r}")
            result[name] = number
    return result


def config_fields(stabilizers: dict[str, float | bool]) -> dict:
    """Returns the fields of `LSGPTConfig` that stand for QK-norm and soft-capping."""
    fields = {"qk_norm": stabilizers.get("qk-norm"), "attn_logit_softcapping": stabilizers.get("softcap")}
    return {name: value for name, value in fields.items() if value is not None}


def add_z_loss(model: PreTrainedModel, weight: float = STABILIZERS["z-loss"].default):
    """
    Adds `weight * mean(logsumexp(logits) ** 2)` over the predicted tokens to the training loss of the model.

    Without gradients, as in evaluation, the loss is still the cross-entropy.
    """

    def loss_function(logits, labels, vocab_size, num_items_in_batch=None, **kwargs):
        loss = ForCausalLMLoss(logits, labels, vocab_size, num_items_in_batch=num_items_in_batch, **kwargs)
        if not torch.is_grad_enabled():
            return loss
        predicted = labels[:, 1:] != -100
        log_partition = logits[:, :-1].float().logsumexp(dim=-1)[predicted]
        count = predicted.sum() if num_items_in_batch is None else num_items_in_batch
        return loss + weight * log_partition.square().sum() / count

    model.loss_function = loss_function


def attend_in_float32(model: nn.Module):
    """
    Makes every attention layer compute logits, softmax and weighted sums in float32, even under autocast, by an
    attention function of that kind, registered under the name of the model's own with `_in_float32`.

    Raises:
        ValueError: If `model` is not an LSGPT model.
    """
    config = attention_layers(model)[0].config
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(config._attn_implementation, eager_attention_forward)

    def attend_in_float32(module, query, key, value, *args, s_aux=None, **kwargs):
        kwargs["s_aux"] = None if s_aux is None else s_aux.float()
        with torch.autocast(query.device.type, enabled=False):
            output, weights = attend(module, query.float(), key.float(), value.float(), *args, **kwargs)
        return output.to(query.dtype), weights

    name = f"{config._attn_implementation}_in_float32"
    AttentionInterface.register(name, attend_in_float32)
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[config._attn_implementation])
    model.set_attn_implementation(name)


def adagc_optimizer(args: TrainingArguments, lambda_rel: float = STABILIZERS["adagc"].default) -> tuple[type, dict]:
    """
    AdamW with adaptive gradient clipping (AdaGC), for `Trainer(optimizer_cls_and_kwargs=adagc_optimizer(args))`. It
    scales the gradient of each tensor down to `lambda_rel` times the running mean of its norm.

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
