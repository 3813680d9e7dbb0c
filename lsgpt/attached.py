"""Long Short-attention for other models of Transformers, those whose layers call its attention interface.

Importing this file registers the attention implementation `long_short`: an attention function, and a mask function
beside it, without which Transformers would hand every layer no mask at all.

Shapes: B batch, T queries, S keys, H query heads, H_kv key/value heads, D `head_dim`.
"""

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lsgpt.modeling_lsgpt.cpu_lsgpt import blocked_attention_forward, blocked_mask
from lsgpt.modeling_lsgpt.visibility_lsgpt import Visibility


LONG_SHORT = "long_short"
"""Name of the attention implementation, and of the entry in a configuration that holds its two numbers."""


def attach(model: PreTrainedModel, num_global_heads: int, sliding_window: int) -> PreTrainedModel:
    """
    Gives a decoder of another architecture Long Short-attention, in place: in every layer the first
    `num_global_heads` query heads go on attending to the whole past, the others to `sliding_window` keys.

    The weights stay as they are. The two numbers become the entry `long_short` of the model's configuration, which
    `save_pretrained` writes. Where this package is imported, `from_pretrained` restores them and the attention.

    Args:
        model: A model of Transformers, not wrapped, whose layers all have full causal attention (Llama, Qwen3,
            Mistral, GPT-2, ...).
        num_global_heads: From 0 (all local) to the number of query heads (all global). A multiple of the number of
            query heads that share a key/value head: no key/value head serves both kinds.
        sliding_window: Number of keys that a query of a local head sees, its own included; at least 2.

    Returns:
        The same model.

    Raises:
        ValueError: The model, or one of the numbers, does not fit.

    ```python
    >>> import lsgpt
    >>> from transformers import LlamaConfig, LlamaForCausalLM

    >>> config = LlamaConfig(num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4)
    >>> model = lsgpt.attach(LlamaForCausalLM(config), num_global_heads=2, sliding_window=100)
    ```
    """
    _check_model(model)
    heads = model.config.num_attention_heads
    _check_numbers(
        num_global_heads, sliding_window, heads, getattr(model.config, "num_key_value_heads", None) or heads
    )
    model.config.long_short = {"num_global_heads": num_global_heads, "sliding_window": sliding_window}
    model.set_attn_implementation(LONG_SHORT)
    return model


def long_short_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """
    Attention function of the implementation `long_short`.

    Args:
        module: The layer's attention module; its `config.long_short` says which heads are global.
        query (`(B, H, T, D)`), key (`(B, H_kv, S, D)`), value (`(B, H_kv, S, D)`): The last key belongs to the last
            query.
        attention_mask (`(B or 1, 1, T, S)`, *optional*): Boolean, True where a query may attend, or added to the
            logits: for global heads as it is, for local heads inside their window. `None` stands for causality alone.
        scaling: Factor of the dot products, by default `D**-0.5`.
        dropout: Probability of dropping an attention weight.
        **kwargs: What else the model's layers pass.

    Returns:
        Outputs `(B, T, H, D)`, and `None` in place of weights.

    Raises:
        ValueError: The layer asks for something that this attention does not do.
    """
    num_global_heads, window = _read_numbers(module.config)
    num_heads, num_kv_heads = query.shape[1], key.shape[1]
    _check_numbers(num_global_heads, window, num_heads, num_kv_heads)
    _check_call(module, query, value, attention_mask, kwargs)

    num_global_kv_heads = num_global_heads * num_kv_heads // num_heads
    outputs = []
    if num_global_heads:
        q, (k, v) = query[:, :num_global_heads], (x[:, :num_global_kv_heads] for x in (key, value))
        outputs.append(sdpa_attention_forward(module, q, k, v, attention_mask, dropout, scaling)[0])
    if num_global_heads < num_heads:
        q, (k, v) = query[:, num_global_heads:], (x[:, num_global_kv_heads:] for x in (key, value))
        outputs.append(_attend_locally(module, q, k, v, attention_mask, window, dropout, scaling))
    return torch.cat(outputs, dim=2), None


def long_short_mask(q_length: int, kv_length: int, q_offset=0, kv_offset: int = 0, local_size=None, **kwargs):
    """
    Mask function of the implementation `long_short`: the mask of global heads, `(B, 1, T, S)` or `None`, which is that
    of `sdpa`. Masks have no head axis, so the attention function derives the local heads' mask from it.

    Raises:
        ValueError: The model has a window of its own, or a cache with slots that are still empty.
    """
    if local_size is not None:
        raise ValueError(f"{LONG_SHORT!r} must not replace attention with a window of its own; got {local_size}")
    # A static cache, whose number of tokens may be a tensor: the mask would not tell where in it the queries stand.
    if isinstance(q_offset, torch.Tensor) or q_offset + q_length != kv_offset + kv_length:
        raise ValueError(
            f"`past_key_values` must be a dynamic cache with {LONG_SHORT!r}, without slots that are still empty; "
            "leave out `cache_implementation`"
        )
    return sdpa_mask(q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset, **kwargs)


def _attend_locally(module, query, key, value, mask, window, dropout, scaling) -> torch.Tensor:
    """Attention of local heads, as `long_short_attention_forward`."""
    q_length, kv_length = query.shape[2], key.shape[2]
    past_length = kv_length - q_length
    if q_length == 1:
        key, value = key[:, :, -window:], value[:, :, -window:]
        mask = None if mask is None else mask[..., -window:]
    elif kv_length > 2 * window and (mask is None or mask.dtype == torch.bool):
        batch_size = query.shape[0]
        if mask is not None:
            mask = mask.expand(batch_size, -1, -1, -1)
        sizes = {"q_length": q_length, "kv_length": kv_length, "q_offset": past_length}
        visibility = Visibility(**sizes, window=window, mask=mask, batch_size=batch_size, device=query.device)
        blocks = blocked_mask(visibility)
        return blocked_attention_forward(query, key, value, blocks, scaling, dropout)
    elif kv_length > window:
        position = torch.arange(kv_length, device=query.device)
        distance = position[past_length:, None] - position
        if mask is None:
            mask = (distance >= 0) & (distance < window)
            mask = mask[None, None]
        elif mask.dtype == torch.bool:
            mask = mask & (distance < window)
        else:
            mask = mask.masked_fill(distance >= window, torch.finfo(mask.dtype).min)
    return sdpa_attention_forward(module, query, key, value, mask, dropout, scaling)[0]


def _read_numbers(config: PreTrainedConfig) -> tuple[int, int]:
    numbers = getattr(config, LONG_SHORT, None)
    if numbers is None:
        raise ValueError(
            f"`config.{LONG_SHORT}` must say which heads are global; got None. Call `lsgpt.attach(model, "
            "num_global_heads=..., sliding_window=...)`"
        )
    return numbers["num_global_heads"], numbers["sliding_window"]


def _check_numbers(num_global_heads: int, sliding_window: int, num_heads: int, num_kv_heads: int):
    groups = num_heads // num_kv_heads
    if not 0 <= num_global_heads <= num_heads or num_global_heads % groups:
        raise ValueError(
            f"`num_global_heads` must be between 0 and {num_heads}, the number of query heads, and a multiple of "
            f"{groups}, the number of them that share a key/value head; got {num_global_heads}"
        )
    if sliding_window < 2:
        raise ValueError(f"`sliding_window` must be at least 2; got {sliding_window}")


def _check_model(model: PreTrainedModel):
    def require(condition: bool, rule: str, got):
        if not condition:
            raise ValueError(f"`model` must {rule}; got {got}")

    name = type(model).__name__
    require(
        isinstance(model, PreTrainedModel),
        "be a model of Transformers (attach first, then wrap it for PEFT, processes or compilation)",
        name,
    )
    config = model.config
    require(model._supports_attention_backend, "call Transformers' attention interface", name)
    is_decoder = not config.is_encoder_decoder and not getattr(config, "add_cross_attention", False)
    is_decoder = is_decoder and config.get_text_config() is config
    require(is_decoder, "be one decoder, without an encoder, cross-attention or parts for images and sound", name)
    is_causal = all(getattr(module, "is_causal", True) for module in model.modules())
    require(is_causal and getattr(config, "is_causal", True), "have causal attention in all layers", name)
    if getattr(config, "layer_types", None) is not None:
        kinds = set(config.layer_types)
    else:
        windows = {key: getattr(config, key, None) for key in ("sliding_window", "attention_chunk_size")}
        kinds = {f"{key}={value}" for key, value in windows.items() if value is not None} or {"full_attention"}
    require(
        kinds == {"full_attention"}, "have full attention in all layers", f"{name} with {', '.join(sorted(kinds))}"
    )
    require(not model._is_stateful, "have full attention in all layers", f"{name}, which has recurrent ones")
    softcap = getattr(config, "attn_logit_softcapping", None)
    require(softcap is None, "have no soft-capping of attention logits", f"attn_logit_softcapping={softcap}")


def _check_call(module, query, value, attention_mask, kwargs):
    """What a layer may ask for that cannot be seen on the model."""

    def refuse(what: str):
        raise ValueError(f"{LONG_SHORT!r} has no {what}, which {type(module).__name__} asks for")

    if kwargs.get("is_causal") is False or not getattr(module, "is_causal", True):
        refuse("attention that is not causal")
    if kwargs.get("output_attentions"):
        refuse("attention weights (`output_attentions`)")
    for key, what in (
        ("softcap", "soft-capping"),
        ("sliding_window", "second window"),
        ("s_aux", "attention sinks"),
        ("position_bias", "position biases"),
        ("cache", "paged cache"),
    ):
        if kwargs.get(key) is not None:
            refuse(what)
    if value.shape[-1] != query.shape[-1]:
        refuse(f"values of {value.shape[-1]} dimensions beside keys of {query.shape[-1]}")
    if attention_mask is not None and attention_mask.shape[1] != 1:
        raise ValueError(
            f"`attention_mask` must be the same for all heads, of shape (batch, 1, queries, keys); "
            f"got {tuple(attention_mask.shape)}"
        )


def _get_entry(config: PreTrainedConfig) -> dict:
    try:
        return vars(config)[LONG_SHORT]
    except KeyError:
        raise AttributeError(f"{type(config).__name__} has no entry `{LONG_SHORT}`") from None


def _set_entry(config: PreTrainedConfig, numbers: dict):
    vars(config)[LONG_SHORT] = numbers
    vars(config)["attn_implementation"] = LONG_SHORT


# Transformers saves what stands in a configuration, but for the attention implementation, which it expects to change
# nothing. This one does: a model saved with it must not come back with full attention in silence. So the entry brings
# `attn_implementation` along, into `config.json`, and again when it is read from there. Where this package is not
# imported, loading fails with Transformers' own message that there is no such implementation.
PreTrainedConfig.long_short = property(_get_entry, _set_entry)
ALL_ATTENTION_FUNCTIONS.register(LONG_SHORT, long_short_attention_forward)
ALL_MASK_ATTENTION_FUNCTIONS.register(LONG_SHORT, long_short_mask)
