"""Perplexity, bits per byte and loss by position, averaged over tokens and not over batches."""

import math
import re
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch.nn import functional as F
from transformers import EvalPrediction, PreTrainedModel, PreTrainedTokenizerBase

from lsgpt.modeling_lsgpt import LSGPTConfig


IGNORED_LABEL = -100
_METASPACE = "▁"
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")


@torch.no_grad()
def token_losses(logits: torch.Tensor | tuple[torch.Tensor, ...], labels: torch.Tensor) -> torch.Tensor:
    """
    Returns the loss of each token, for `Trainer(preprocess_logits_for_metrics=token_losses)`.

    Args:
        logits: `(B, T, V)`, or a tuple that begins with them.
        labels: `(B, T)`, not shifted; -100 where there is nothing to predict.

    Returns:
        `(B, T)` in float32: at `[b, t]` the cross-entropy in nats of `labels[b, t]` under `logits[b, t - 1]`, and zero
        for ignored labels and in the first column.

    Raises:
        ValueError: If the shapes of logits and labels do not match.
    """
    logits = logits[0] if isinstance(logits, tuple) else logits
    check_shapes(logits, labels)
    losses = torch.zeros(labels.shape, device=logits.device)
    # Row by row: a float32 copy of all logits at once can be the largest tensor of an evaluation.
    for row, row_logits, row_labels in zip(losses, logits, labels):
        row[1:] = F.cross_entropy(
            row_logits[:-1].float(), row_labels[1:], ignore_index=IGNORED_LABEL, reduction="none"
        )
    return losses


def check_shapes(logits: torch.Tensor, labels: torch.Tensor):
    """Raises `ValueError` unless there are logits for every label."""
    if logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"`logits` must have the shape of `labels` and one more dimension; got {tuple(logits.shape)} and "
            f"{tuple(labels.shape)}"
        )


@torch.no_grad()
def total_loss(model: PreTrainedModel, batches: Iterable[dict[str, torch.Tensor]]) -> tuple[float, int]:
    """
    Returns the total loss of a causal language model in evaluation mode, in nats, and the number of predicted tokens.
    Batches are its inputs with `labels` `(B, T)`, not shifted; -100 where there is nothing to predict.
    """
    options = {"skip_logits": True} if model.config.model_type == LSGPTConfig.model_type else {}
    total, count = 0.0, 0
    for batch in batches:
        batch = {name: values.to(model.device) for name, values in batch.items()}
        number = (batch["labels"][:, 1:] != IGNORED_LABEL).sum().item()
        if number:
            total += model(**batch, use_cache=False, **options).loss.item() * number
            count += number
    return total, count


def perplexity_of(total: float, count: int) -> float:
    """Returns the exponential of the mean loss; infinity if that overflows."""
    with np.errstate(over="ignore"):
        return float(np.exp(total / count))


def summarize(predictions: Sequence, references: Sequence, bytes_per_token: np.ndarray | None = None) -> dict:
    """Returns the same as `TokenMetrics`, for all rows at once."""
    losses, labels, positions = _predicted_tokens(predictions, references)
    block_size = max(map(len, references))
    sums = np.bincount(positions, weights=losses, minlength=block_size)
    with np.errstate(invalid="ignore"):
        by_position = (sums / np.bincount(positions, minlength=block_size))[1:].tolist()
    total, count = float(losses.sum()), len(losses)
    results = {"loss": total / count, "perplexity": perplexity_of(total, count), "loss_by_position": by_position}
    if bytes_per_token is None:
        return results
    num_tokens = len(bytes_per_token)
    if labels.min() < 0 or labels.max() >= num_tokens:
        raise ValueError(
            f"`bytes_per_token` must have an entry for each label; got {num_tokens} entries and labels from "
            f"{labels.min()} to {labels.max()}"
        )
    num_bytes = bytes_per_token[labels].sum()
    if num_bytes == 0:
        raise ValueError(f"the predicted tokens must have bytes; got 0 bytes in {count} tokens")
    return {**results, "bits_per_byte": total / math.log(2) / float(num_bytes)}


def _predicted_tokens(predictions: Sequence, references: Sequence) -> tuple[np.ndarray, ...]:
    """Returns the losses (float64), the labels and the positions in their rows of all predicted tokens."""
    for number, (row, labels) in enumerate(zip(predictions, references)):
        if len(row) != len(labels):
            raise ValueError(
                f"rows of `predictions` must be as long as those of `references`; got {len(row)} losses and "
                f"{len(labels)} labels in row {number}"
            )
    losses = np.concatenate([np.asarray(row, np.float64) for row in predictions])
    labels = np.concatenate([np.asarray(row, np.int64) for row in references])
    positions = np.concatenate([np.arange(len(row)) for row in references])
    predicted = (labels != IGNORED_LABEL) & (positions > 0)
    if not predicted.any():
        raise ValueError(
            f"`references` must have a label other than {IGNORED_LABEL} after a row's first token; got none in "
            f"{len(references)} rows"
        )
    return losses[predicted], labels[predicted], positions[predicted]


def count_bytes(tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """
    Returns the number of bytes that each token stands for in decoded text, as `TokenMetrics` takes them.

    If the tokenizer is lossless, the numbers for the tokens of a text add up to its length in UTF-8 bytes, and one for
    a space that the tokenizer itself puts before a text (`prepend_scheme`, `add_prefix_space`).

    Args:
        tokenizer: A fast tokenizer with a byte-level (GPT-2) or a metaspace (SentencePiece) decoder.

    Returns:
        `(len(tokenizer),)` in int64; zero for special tokens.

    Raises:
        ValueError: If the tokenizer is of another kind, whose tokens do not show the text they stand for.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = repr(backend.decoder if backend else None)
    is_byte_level = "ByteLevel" in decoder
    if not is_byte_level and _METASPACE not in decoder:
        raise ValueError(
            f"`tokenizer` must be a fast tokenizer with a byte-level or a metaspace decoder; got "
            f"{type(tokenizer).__name__} with the decoder {decoder}"
        )
    vocab = tokenizer.get_vocab()
    added_tokens = tokenizer.added_tokens_decoder
    counts = torch.zeros(max(vocab.values()) + 1, dtype=torch.int64)  # longer than the vocabulary if ids have gaps
    for token, token_id in vocab.items():
        if token_id in added_tokens and added_tokens[token_id].special:
            continue
        if is_byte_level:
            # Each character stands for a byte, except in added tokens, which are text.
            counts[token_id] = len(token.encode() if token_id in added_tokens else token)
        elif _BYTE_TOKEN.fullmatch(token):
            counts[token_id] = 1
        else:
            counts[token_id] = len(token.replace(_METASPACE, " ").encode())
    return counts


class LanguageModelingMetrics:
    """
    Perplexity and bits per byte for a `Trainer`, which logs them as `eval_perplexity` and `eval_bits_per_byte`. Unlike
    `eval_loss`, a mean over batches, they weight every token equally, even across processes.

    ```python
    >>> Trainer(..., compute_metrics=LanguageModelingMetrics(tokenizer), preprocess_logits_for_metrics=token_losses)
    ```

    Attributes:
        loss_by_position: `(T - 1,)`, see `TokenMetrics`, in the last evaluation; None before the first.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        """Counts the bytes of the tokens with `count_bytes`, which may raise `ValueError`."""
        self.bytes_per_token = count_bytes(tokenizer).numpy()
        self.loss_by_position: np.ndarray | None = None

    def __call__(self, eval_prediction: EvalPrediction) -> dict[str, float]:
        """
        Returns `perplexity` and `bits_per_byte` of `predictions`, token losses `(N, T)`, for `label_ids` `(N, T)`.
        Raises `ValueError` if the predictions are not token losses, or as `TokenMetrics` does.
        """
        losses, labels = eval_prediction.predictions, eval_prediction.label_ids
        if np.shape(losses) != np.shape(labels):
            raise ValueError(
                f"`predictions` must be losses in the shape of the labels, as with "
                f"`preprocess_logits_for_metrics=token_losses`; got {np.shape(losses)} and {np.shape(labels)}"
            )
        results = summarize(losses, labels, self.bytes_per_token)
        self.loss_by_position = np.array(results["loss_by_position"])
        return {name: results[name] for name in ("perplexity", "bits_per_byte")}
