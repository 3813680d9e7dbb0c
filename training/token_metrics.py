"""The metrics of token losses as a module of `evaluate`."""

import evaluate
import torch
from datasets import Features, List, Value

from .metrics import summarize


class TokenMetrics(evaluate.Metric):
    """
    Loss, perplexity, bits per byte and the loss by position, with the same weight for every predicted token, as an
    `evaluate.Metric` that needs no network.

    ```python
    >>> TokenMetrics(count_bytes(tokenizer)).compute(predictions=token_losses(logits, labels), references=labels)
    {'loss': 2.0, 'perplexity': 7.38905609893065, 'loss_by_position': [2.5, 1.5], 'bits_per_byte': 1.25}
    ```

    Args:
        predictions: Rows of losses in nats, as `token_losses` returns them. Their lengths may differ.
        references: Rows of labels, not shifted, and ignored where they are -100 and at the first token of a row.

    Returns:
        `loss`, the mean in nats per predicted token; `perplexity`, its exponential; `loss_by_position`, T - 1 means
        for rows of up to T tokens, of which entry `i` is for tokens with a context of `i + 1` tokens, or NaN; and,
        given `bytes_per_token`, `bits_per_byte`: the bits of all predicted tokens divided by their bytes. Special
        tokens have a loss but no bytes.

    Raises:
        ValueError: If losses and labels differ in shape, no token is predicted, a label has no entry in
            `bytes_per_token`, or none of the predicted tokens has a byte.
    """

    def __init__(self, bytes_per_token=None, num_process: int = 1, **kwargs):
        """
        Takes the number of UTF-8 bytes of each token id, `(V,)`, as a list, array or tensor. Other arguments are as
        for `evaluate.Metric`.
        """
        # `compute` reads all rows into memory anyway. A file is only needed if several processes hold parts of the
        # rows; with one process, it would stay behind, locked, after each error.
        super().__init__(num_process=num_process, **{"keep_in_memory": num_process == 1, **kwargs})
        self.bytes_per_token = None if bytes_per_token is None else torch.as_tensor(bytes_per_token).cpu().numpy()

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

    def _compute(self, predictions, references):
        return summarize(predictions, references, self.bytes_per_token)
