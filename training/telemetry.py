"""Measuring a model's attention logits: in one forward pass, or while something else drives it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


class MaxLogits:
    """
    Switches the measurement on and off in every attention layer of a model, and reads it.

    While it is on, each forward pass raises a running maximum in every `HeadGroup`; the output stays the same.
    """

    def __init__(self, model: nn.Module):
        """Takes an LSGPT model, on its own or wrapped (DDP, PEFT, `torch.compile`). Raises `ValueError` for others."""
        # By name, because a checkpoint's own code has classes of its own.
        self.layers = [module for module in model.modules() if type(module).__name__ == "LSGPTAttention"]
        if not self.layers:
            raise ValueError(f"`model` must be an LSGPT model, to measure its logits; got {type(model).__name__}")

    def start(self):
        """Forgets earlier maxima and measures from now on."""
        for group in self._groups():
            group.max_logit = torch.zeros(group.num_heads)

    def stop(self):
        """Measures no more, and forgets the maxima."""
        for group in self._groups():
            group.max_logit = None

    def read(self) -> torch.Tensor:
        """The maxima since `start`, `(num_hidden_layers, num_attention_heads)` in float32, global heads first."""
        device = self.layers[0].q_proj.weight.device
        rows = [torch.cat([group.max_logit.to(device) for group in layer.head_groups]) for layer in self.layers]
        return torch.stack(rows)

    def _groups(self) -> Iterator[nn.Module]:
        for layer in self.layers:
            yield from layer.head_groups


@contextmanager
def recording_max_logits(model: nn.Module) -> Iterator[MaxLogits]:
    """Measures the forward passes inside the `with` block; `read()` what it yields before the block ends."""
    max_logits = MaxLogits(model)
    max_logits.start()
    try:
        yield max_logits
    finally:
        max_logits.stop()


@torch.no_grad()
def measure_max_logits(model: nn.Module, **inputs) -> torch.Tensor:
    """
    The largest attention logit of every head in one forward pass.

    It is the maximum of `|q . k * scaling|` after QK-norm and rotary embedding and before soft-capping, over all pairs
    that may attend, computed exactly in float32 whatever engine runs the model.

    Args:
        model: An LSGPT model.
        **inputs: What its `forward` takes, such as `input_ids` and `attention_mask`.

    Returns:
        `(num_hidden_layers, num_attention_heads)` in float32 on the model's device, global heads first.

    ```python
    >>> from lsgpt import measure_max_logits
    >>> measure_max_logits(model, **tokenizer("def ", return_tensors="pt")).max()
    ```
    """
    with recording_max_logits(model) as max_logits:
        model(**{"use_cache": False, **inputs})
        return max_logits.read()
