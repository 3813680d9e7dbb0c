"""Perplexity, bits per byte and loss by position, over tokens and not over batches.

Each is an `evaluate.Metric` that needs no network. All take rows, of equal length or not, as `predictions` and
`references`: the loss of each token as from `token_losses`, and the labels. The labels are those of the causal model:
unshifted, and ignored where they are -100. A row's first token is never predicted.
"""

import json
import re
from itertools import chain

import evaluate
import numpy as np
import torch
from datasets import Features, List, Value
from torch.nn import functional as F
from transformers import EvalPrediction, PreTrainedTokenizerBase


IGNORED_LABEL = -100
_METASPACE = "▁"
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")


@torch.no_grad()
def token_losses(logits: torch.Tensor | tuple[torch.Tensor, ...], labels: torch.Tensor) -> torch.Tensor:
    """
    The loss of each token, for `Trainer(preprocess_logits_for_metrics=token_losses)`: a Trainer that keeps these
    instead of the logits needs the vocabulary's size times less memory.

    Args:
        logits: `(B, T, V)`, or a tuple that begins with them.
        labels: `(B, T)`, unshifted; -100 where there is nothing to predict.

    Returns:
        `(B, T)` in float32: at `[b, t]` the cross-entropy in nats of `labels[b, t]` under `logits[b, t - 1]`, and zero
        for ignored labels and for the first column. As wide as the labels, so that a Trainer pads both alike.

    Raises:
        ValueError: Logits and labels of different shapes.
    """
    logits = logits[0] if isinstance(logits, tuple) else logits
    if logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"`logits` must have the shape of `labels` and a dimension more; got {tuple(logits.shape)} and "
            f"{tuple(labels.shape)}"
        )
    losses = torch.zeros(labels.shape, device=logits.device)
    # Row by row: a float32 copy of all logits at once can be the largest tensor of an evaluation.
    for row, row_logits, row_labels in zip(losses, logits, labels):
        row[1:] = F.cross_entropy(
            row_logits[:-1].float(), row_labels[1:], ignore_index=IGNORED_LABEL, reduction="none"
        )
    return losses


class _TokenMetric(evaluate.Metric):
    """What the metrics share: rows of losses and rows of labels come in."""

    def __init__(self, num_process: int = 1, **kwargs):
        # `compute` reads all rows into memory anyway. A file of them is of use only to several processes with parts of
        # the rows; with one process, it would stay behind, locked, after each error.
        super().__init__(num_process=num_process, **{"keep_in_memory": num_process == 1, **kwargs})

    def _finalize(self):
        if self.writer is None:
            raise ValueError("`compute` must be given rows, or called after `add_batch`; got no rows")
        super()._finalize()

    def _info(self):
        return evaluate.MetricInfo(
            description=self.__doc__,
            citation="",
            inputs_description=self.__doc__,
            features=Features({"predictions": List(Value("float32")), "references": List(Value("int64"))}),
        )


def _predicted_tokens(predictions: list[list[float]], references: list[list[int]]) -> tuple[np.ndarray, ...]:
    """The losses (float64), labels and positions in the row of all predicted tokens."""
    lengths = [len(row) for row in references]
    for row, (values, length) in enumerate(zip(predictions, lengths)):
        if len(values) != length:
            raise ValueError(
                f"rows of `predictions` must be as long as those of `references`; got {len(values)} losses and "
                f"{length} labels in row {row}"
            )
    losses = np.fromiter(chain.from_iterable(predictions), np.float64)
    labels = np.fromiter(chain.from_iterable(references), np.int64)
    positions = np.fromiter(chain.from_iterable(map(range, lengths)), np.int64)
    predicted = (labels != IGNORED_LABEL) & (positions > 0)
    if not predicted.any():
        raise ValueError(
            f"`references` must have a label other than {IGNORED_LABEL} after a row's first token; got none in "
            f"{len(lengths)} rows"
        )
    return losses[predicted], labels[predicted], positions[predicted]


class Perplexity(_TokenMetric):
    """
    Perplexity, with the same weight for every predicted token, whatever its row and batch.

    ```python
    >>> Perplexity().compute(predictions=token_losses(logits, labels), references=labels)
    {'loss': 2.0, 'perplexity': 7.38905609893065}
    ```

    Args:
        predictions: Rows of losses in nats, as from `token_losses`.
        references: Rows of labels.

    Returns:
        `loss`, the mean in nats per predicted token, and `perplexity`, its exponential, infinite where that overflows.

    Raises:
        ValueError: Losses and labels of different shapes, or no predicted token.
    """

    def _compute(self, predictions, references):
        losses, _, _ = _predicted_tokens(predictions, references)
        with np.errstate(over="ignore"):
            return {"loss": float(losses.mean()), "perplexity": float(np.exp(losses.mean()))}


class BitsPerByte(_TokenMetric):
    """
    Bits per byte of text, which compares models with different tokenizers: all bits over all bytes of the predicted
    tokens. Special tokens have a loss but no bytes.

    ```python
    >>> BitsPerByte(count_bytes(tokenizer)).compute(predictions=token_losses(logits, labels), references=labels)
    {'bits_per_byte': 1.25}
    ```

    Args:
        predictions: Rows of losses in nats, as from `token_losses`.
        references: Rows of labels.

    Returns:
        `bits_per_byte`.

    Raises:
        ValueError: Losses and labels of different shapes, no predicted token, a label without an entry in
            `bytes_per_token`, or no byte in any of the predicted tokens.
    """

    def __init__(self, bytes_per_token, **kwargs):
        """
        Args:
            bytes_per_token: `(V,)`, a list, array or tensor: the number of UTF-8 bytes of each token id.
            kwargs: As for `evaluate.Metric`.
        """
        super().__init__(**kwargs)
        self.bytes_per_token = torch.as_tensor(bytes_per_token).cpu().numpy()

    def _compute(self, predictions, references):
        losses, labels, _ = _predicted_tokens(predictions, references)
        num_tokens = len(self.bytes_per_token)
        if labels.min() < 0 or labels.max() >= num_tokens:
            raise ValueError(
                f"`bytes_per_token` must have an entry for each label; got {num_tokens} entries and labels from "
                f"{labels.min()} to {labels.max()}"
            )
        num_bytes = self.bytes_per_token[labels].sum()
        if num_bytes == 0:
            raise ValueError(f"the predicted tokens must have bytes; got 0 bytes in {len(labels)} tokens")
        return {"bits_per_byte": float(losses.sum() / np.log(2) / num_bytes)}


class LossByPosition(_TokenMetric):
    """
    The mean loss at each position of a block: how much a longer context helps.

    ```python
    >>> LossByPosition().compute(predictions=token_losses(logits, labels), references=labels)
    {'loss_by_position': [4.5, 3.25, 3.0]}
    ```

    Args:
        predictions: Rows of losses in nats, as from `token_losses`.
        references: Rows of labels.

    Returns:
        `loss_by_position`: a list of T - 1 means in nats for rows of up to T tokens. Entry `i` is for the tokens with
        a context of `i + 1` tokens, and NaN where nothing was predicted.

    Raises:
        ValueError: Losses and labels of different shapes, or no predicted token.
    """

    def _compute(self, predictions, references):
        losses, _, positions = _predicted_tokens(predictions, references)
        block_size = max(len(row) for row in references)
        sums = np.bincount(positions, weights=losses, minlength=block_size)
        counts = np.bincount(positions, minlength=block_size)
        with np.errstate(invalid="ignore"):
            return {"loss_by_position": (sums / counts)[1:].tolist()}


def count_bytes(tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """
    The number of bytes that each token stands for in decoded text, as `BitsPerByte` takes them.

    Over the tokens of a text they add up to its UTF-8 bytes if the tokenizer is lossless. A space that the tokenizer
    itself puts before a text (`prepend_scheme`, `add_prefix_space`) counts as one byte, because its token is that of
    a space in the text.

    Args:
        tokenizer: A fast tokenizer with a byte-level (GPT-2) or a metaspace (SentencePiece) decoder.

    Returns:
        `(len(tokenizer),)` in int64; zero for special tokens.

    Raises:
        ValueError: A tokenizer of another kind: its tokens do not say what text they become.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = str(json.loads(backend.to_str())["decoder"] if backend else None)
    is_byte_level = "ByteLevel" in decoder
    if not is_byte_level and _METASPACE not in decoder:
        raise ValueError(
            f"`tokenizer` must be a fast tokenizer with a byte-level or a metaspace decoder; got "
            f"{type(tokenizer).__name__} with the decoder {decoder}"
        )
    vocab = tokenizer.get_vocab()
    added_tokens = tokenizer.added_tokens_decoder
    counts = torch.zeros(max(vocab.values()) + 1, dtype=torch.int64)  # longer than the vocabulary if ids are left out
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
    Perplexity and bits per byte for a `Trainer`, which logs them as `eval_perplexity` and `eval_bits_per_byte`.

    Unlike `eval_loss`, a mean over batches, they weight every token equally, also over several processes.

    ```python
    >>> metrics = LanguageModelingMetrics(tokenizer)
    >>> trainer = Trainer(..., compute_metrics=metrics, preprocess_logits_for_metrics=token_losses)
    ```

    Attributes:
        loss_by_position: `(T - 1,)`, the result of `LossByPosition` in the last evaluation; None before the first.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        """Counts the bytes of the tokens, see `count_bytes`, and raises `ValueError` as it does."""
        self.bytes_per_token = count_bytes(tokenizer)
        self.loss_by_position: np.ndarray | None = None

    def __call__(self, eval_prediction: EvalPrediction) -> dict[str, float]:
        """
        Args:
            eval_prediction: Token losses `(N, T)` as `predictions` and labels `(N, T)` as `label_ids`.

        Returns:
            `perplexity` and `bits_per_byte`.

        Raises:
            ValueError: Predictions that are no token losses, and as `Perplexity` and `BitsPerByte` do.
        """
        losses, labels = eval_prediction.predictions, eval_prediction.label_ids
        if np.shape(losses) != np.shape(labels):
            raise ValueError(
                f"`predictions` must be losses in the shape of the labels, as with "
                f"`preprocess_logits_for_metrics=token_losses`; got {np.shape(losses)} and {np.shape(labels)}"
            )
        modules = evaluate.combine([Perplexity(), BitsPerByte(self.bytes_per_token), LossByPosition()])
        results = modules.compute(predictions=losses, references=labels)
        self.loss_by_position = np.array(results["loss_by_position"])
        return {name: results[name] for name in ("perplexity", "bits_per_byte")}
