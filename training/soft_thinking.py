"""
Soft thinking (arXiv:2505.15778) with Gumbel noise, as in SofT-GRPO (arXiv:2511.06411).

While it thinks, the model does not choose one token per step. Instead, the next input is a mixture of the embeddings
of the k most likely tokens, whose weights are made random by Gumbel noise. After the end-of-thinking token, tokens are
sampled as usual. Given the noisy log-probabilities `u` of a step, the density of the noise `u - log p` gives the
log-probability of the step under other model weights, which `lsgpt.training.soft_grpo` needs.

Shapes: B sequences, P prompt tokens, C completion tokens, V vocabulary size, k candidates per step, D embedding
dimensions. `temperature` always divides the logits.
"""

import inspect
from typing import Any, NamedTuple

import torch
from accelerate.utils import extract_model_from_parallel
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lsgpt.modeling_lsgpt import CACHE


SMALLEST_PROBABILITY = 1e-6
"""Added to the probability of every candidate before the logarithm, as the authors' code does."""

GUMBEL_BOUNDS = (-1.5, 3.0)
"""The bounds to which the noise is clamped, both when it is drawn and when it is scored."""

LOWEST_LOG_PROBABILITY = -3.0
"""Candidates with a log-probability below this do not count in the log-probability of a step."""

SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "gumbel_temperature", "noise_factor", "max_thinking_tokens")
"""The settings of `generate_soft_thinking` that `check_sampling` checks."""

STEP_FIELDS = ("candidate_ids", "noisy_log_probs", "is_soft")
"""The fields of a `SoftRollout` that scoring needs besides the visible tokens, in the order of `embed_steps`."""


def select_candidates(
    logits: torch.Tensor, top_k: int = 5, top_p: float = 0.95, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Returns the k most likely tokens, the most likely first, and their probabilities after nucleus filtering, which sum
    to 1. Both are `(..., k)`.

    Args:
        logits: `(..., V)`.
        top_k: The number k, or V if that is smaller.
        top_p: Share of the candidates' probability to keep, in (0, 1]; the most likely one is always kept.
        temperature: Divides the logits.
    """
    values, ids = (in_float32(logits) / temperature).topk(min(top_k, logits.shape[-1]))
    probabilities = values.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    probabilities = probabilities.masked_fill(before >= top_p, 0)
    return ids, probabilities / probabilities.sum(-1, keepdim=True)


def add_gumbel_noise(
    probabilities: torch.Tensor, noise_factor: float = 1.0, generator: torch.Generator | None = None
) -> torch.Tensor:
    """
    Returns the noisy log-probabilities `u = log(p + 1e-6) + noise_factor * g` of candidates with the probabilities p
    `(..., k)`, where g is drawn from the standard Gumbel distribution and clamped to [-1.5, 3].
    """
    gumbel = -torch.empty_like(probabilities).exponential_(generator=generator).log()
    return (probabilities + SMALLEST_PROBABILITY).log() + noise_factor * gumbel.clamp(*GUMBEL_BOUNDS)


def soft_weights(noisy_log_probs: torch.Tensor, gumbel_temperature: float) -> torch.Tensor:
    """Returns the weights `softmax(u / tau)` `(..., k)` of the candidates' embeddings; almost one-hot for low tau."""
    return (noisy_log_probs / gumbel_temperature).softmax(-1)


def soft_log_probs(
    logits: torch.Tensor,
    candidate_ids: torch.Tensor,
    noisy_log_probs: torch.Tensor,
    temperature: float = 1.0,
    noise_factor: float = 1.0,
) -> torch.Tensor:
    """
    Returns the log-probabilities of soft steps under the model that gives `logits`: the log-density `-g - exp(-g)` of
    the noise `g = clamp((u - log(p + 1e-6)) / noise_factor, -1.5, 3)`, averaged over the candidates with
    `log(p + 1e-6) > -3`. (The density of u has another constant factor, which cancels in
    ratios.) `noise_factor` is positive.

    Logits are `(..., V)`, candidates and u `(..., k)`, and the result `(...)`. The gradient flows through p, the
    probabilities among the candidates only. If none of them is likely enough, the log-probability is 0.
    """
    probabilities = (in_float32(logits).gather(-1, candidate_ids) / temperature).softmax(-1)
    log_probs = (probabilities + SMALLEST_PROBABILITY).log()
    gumbel = ((noisy_log_probs - log_probs) / noise_factor).clamp(*GUMBEL_BOUNDS)
    is_counted = log_probs > LOWEST_LOG_PROBABILITY
    density = (-gumbel - (-gumbel).exp()) * is_counted
    return density.sum(-1) / is_counted.sum(-1).clamp(min=1)


def completion_log_probs(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    candidate_ids: torch.Tensor,
    noisy_log_probs: torch.Tensor,
    is_soft: torch.Tensor,
    temperature: float = 1.0,
    noise_factor: float = 1.0,
) -> torch.Tensor:
    """
    Returns the log-probability of each step of completions, `(B, C)`: `soft_log_probs` for a soft step, the
    log-probability of the token for any other. `logits` `(B, C, V)` are those from which each step was drawn; for the
    other tensors, see `SoftRollout`.
    """
    soft = soft_log_probs(logits, candidate_ids, noisy_log_probs, temperature, noise_factor)
    discrete = (in_float32(logits) / temperature).log_softmax(-1).gather(-1, token_ids[..., None])[..., 0]
    return torch.where(is_soft, soft, discrete)


@torch.no_grad()
def embed_steps(
    embeddings: nn.Module,
    token_ids: torch.Tensor,
    candidate_ids: torch.Tensor,
    noisy_log_probs: torch.Tensor,
    is_soft: torch.Tensor,
    gumbel_temperature: float,
) -> torch.Tensor:
    """
    Returns the model's input after each step, `(B, C, D)`, without a gradient: the mixture of the candidates'
    embeddings after a soft step, the embedding of the token after any other. `embeddings` are the model's
    `get_input_embeddings()`; for the tensors, see `SoftRollout`.
    """
    candidates = embeddings(candidate_ids)
    weights = soft_weights(noisy_log_probs, gumbel_temperature).to(candidates.dtype)
    mixed = (weights[..., None] * candidates).sum(-2)
    return torch.where(is_soft[..., None], mixed, embeddings(token_ids))


def in_float32(x: torch.Tensor) -> torch.Tensor:
    """Converts half precision, which is not enough for logarithms of probabilities, to float32; keeps float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class SoftRollout(NamedTuple):
    """Completions of `generate_soft_thinking`. Steps that are not soft have zeros as candidates and noise."""

    token_ids: torch.Tensor
    """`(B, C)`: the visible tokens; for a soft step, the one with the largest weight; padding after the end."""
    mask: torch.Tensor
    """`(B, C)`: which of them belong to the completion, the end-of-sequence token included."""
    candidate_ids: torch.Tensor
    """`(B, C, k)`."""
    noisy_log_probs: torch.Tensor
    """u, `(B, C, k)`, in float32."""
    is_soft: torch.Tensor
    """`(B, C)`: steps whose embedding is a mixture, unlike the end-of-thinking token and all tokens after it."""
    is_forced: torch.Tensor
    """`(B, C)`: end-of-thinking tokens that were inserted by `max_thinking_tokens`, not chosen by the model."""


@torch.no_grad()
def generate_soft_thinking(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    end_of_thinking_id: int,
    max_new_tokens: int = 512,
    max_thinking_tokens: int | None = None,
    temperature: float = 1.0,
    top_k: int = 5,
    top_p: float = 0.95,
    gumbel_temperature: float = 0.1,
    noise_factor: float = 1.0,
    eos_token_id: int | list[int] | None = None,
    pad_token_id: int = 0,
    generator: torch.Generator | None = None,
    use_cache: bool = True,
) -> SoftRollout:
    """
    Continues prompts, thinking softly up to the end-of-thinking token and sampling tokens after it. If the model has
    dropout, call `model.eval()` first.

    Args:
        model: Any decoder whose `forward` takes `inputs_embeds`.
        input_ids: Prompts `(B, P)`, padded on the left.
        attention_mask: `(B, P)`, 0 for padding; by default, nothing is padding.
        end_of_thinking_id: The token that ends the thinking, see `find_end_of_thinking`.
        max_new_tokens: Length C at which a completion ends in any case.
        max_thinking_tokens: After this many soft steps, the end-of-thinking token is inserted; by default, never.
        temperature, top_k, top_p: See `select_candidates`; they also apply after the thinking.
        gumbel_temperature, noise_factor: See `soft_weights` and `add_gumbel_noise`; no noise with a factor of 0.
        eos_token_id: The token or tokens that end a completion; those of `model.generation_config` by default.
        pad_token_id: Fills completions that end before others.
        generator: A generator on the model's device; PyTorch's own by default.
        use_cache: Whether to keep keys and values; otherwise, every step recomputes the whole sequence.

    Raises:
        ValueError: If a value is out of range, padding is not on the left, or the model is not supported.
    """
    check_sampling(temperature, top_k, top_p, gumbel_temperature, noise_factor, max_thinking_tokens)
    check_decoder(model)
    if max_new_tokens < 1:
        raise ValueError(f"`max_new_tokens` must be at least 1; got {max_new_tokens}")
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids)
    if not attention_mask[:, -1].all():
        raise ValueError("`input_ids` must be padded on the left: set `tokenizer.padding_side = 'left'`")
    if eos_token_id is None:
        eos_token_id = model.generation_config.eos_token_id
    eos_token_ids = torch.tensor([] if eos_token_id is None else eos_token_id, dtype=torch.long).to(input_ids.device)

    # The modules are asked: the model's own property has a new name in Transformers 5.23, and 6 drops the old one.
    recomputes = model.training and any(getattr(x, "gradient_checkpointing", False) for x in model.modules())
    embeddings = model.get_input_embeddings()
    inputs_embeds, cache = embeddings(input_ids), None
    is_thinking = torch.ones_like(input_ids[:, 0], dtype=torch.bool)
    is_running = is_thinking
    steps = []
    for length in range(max_new_tokens):
        options = {CACHE: cache, "use_cache": use_cache}
        outputs = run_decoder(model, inputs_embeds, attention_mask, 1, **options)
        ids, probabilities = select_candidates(outputs.logits[:, -1], top_k, top_p, temperature)
        noisy = add_gumbel_noise(probabilities, noise_factor, generator)
        sampled = torch.multinomial(probabilities, 1, generator=generator)
        chosen = torch.where(is_thinking[:, None], noisy.argmax(-1, keepdim=True), sampled)
        token_ids = ids.gather(-1, chosen)[:, 0]
        is_forced = torch.zeros_like(is_thinking)
        if max_thinking_tokens is not None and length >= max_thinking_tokens:
            is_forced = is_thinking & is_running
        token_ids = token_ids.masked_fill(is_forced, end_of_thinking_id).masked_fill(~is_running, pad_token_id)
        is_soft = is_thinking & is_running & (token_ids != end_of_thinking_id)
        ids, noisy = ids.masked_fill(~is_soft[:, None], 0), noisy.masked_fill(~is_soft[:, None], 0)
        steps.append(SoftRollout(token_ids, is_running, ids, noisy, is_soft, is_forced))

        is_thinking = is_thinking & (token_ids != end_of_thinking_id)
        is_running = is_running & ~torch.isin(token_ids, eos_token_ids)
        if not is_running.any():
            break
        next_embeds = embed_steps(embeddings, token_ids, ids, noisy, is_soft, gumbel_temperature)[:, None]
        attention_mask = F.pad(attention_mask, (0, 1), value=1)
        if use_cache:
            inputs_embeds, cache = next_embeds, getattr(outputs, CACHE, None)
            if cache is None or recomputes:
                raise ValueError(
                    "`use_cache` must be False for a model without a cache, as with activation checkpointing"
                )
        else:
            inputs_embeds = torch.cat([inputs_embeds, next_embeds], dim=1)
    return SoftRollout(*(torch.stack(tensors, dim=1) for tensors in zip(*steps)))


def run_decoder(
    model: nn.Module, inputs_embeds: torch.Tensor, attention_mask: torch.Tensor, logits_to_keep: int, **options: Any
) -> Any:
    """
    Returns what a decoder, possibly wrapped by a trainer, makes of `inputs_embeds` `(B, T, D)`, with at least the
    logits of the last `logits_to_keep` positions. `attention_mask` is `(B, past + T)`; `options` are more arguments of
    `forward`. Position ids count only real tokens, so that padding changes nothing.
    """
    position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -inputs_embeds.shape[1] :]
    known = forward_parameters(model)
    for name, value in (("position_ids", position_ids), ("logits_to_keep", logits_to_keep)):
        if name in known:
            options[name] = value
    return model(inputs_embeds=inputs_embeds, attention_mask=attention_mask, **options)


def check_sampling(
    temperature: float,
    top_k: int,
    top_p: float,
    gumbel_temperature: float,
    noise_factor: float,
    max_thinking_tokens: int | None,
):
    """Raises `ValueError` for settings of soft thinking that are out of range."""
    is_limit = max_thinking_tokens is None or max_thinking_tokens >= 0
    for name, value, is_allowed, rule in (
        ("temperature", temperature, temperature > 0, "positive"),
        ("top_k", top_k, top_k >= 1, "at least 1"),
        ("top_p", top_p, 0 < top_p <= 1, "in (0, 1]"),
        ("gumbel_temperature", gumbel_temperature, gumbel_temperature > 0, "positive"),
        ("noise_factor", noise_factor, noise_factor >= 0, "0 (no noise) or more"),
        ("max_thinking_tokens", max_thinking_tokens, is_limit, "0 or more, or None for no limit"),
    ):
        if not is_allowed:
            raise ValueError(f"`{name}` must be {rule}; got {value}")


def check_decoder(model: nn.Module):
    """Raises `ValueError` if a model is not a decoder, or its `forward` does not take `inputs_embeds`."""
    config = getattr(model, "config", None)
    if "inputs_embeds" not in forward_parameters(model) or getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"`model` must be a decoder that takes `inputs_embeds`; got {type(model).__name__}")


def find_end_of_thinking(tokenizer: PreTrainedTokenizerBase, token: str = "</think>") -> int:
    """Returns the id of the end-of-thinking token. Raises `ValueError` unless it is one token of the tokenizer."""
    ids = tokenizer.encode(token, add_special_tokens=False)
    if len(ids) != 1 or ids[0] == tokenizer.unk_token_id:
        raise ValueError(
            f"`end_of_thinking` must be one token that the tokenizer knows; got {token!r}. Set it to the model's, or "
            "add one with `tokenizer.add_tokens` and `model.resize_token_embeddings` and teach the model to use it"
        )
    return ids[0]


def forward_parameters(model: nn.Module) -> set[str]:
    """Returns the argument names of `forward`, even if a model is compiled, distributed or has a PEFT adapter."""
    model = extract_model_from_parallel(model, keep_torch_compile=False)
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    return set(inspect.signature(type(model).forward).parameters)
