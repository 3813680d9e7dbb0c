"""
A `Trainer` for the tests of what we rely on in other libraries.

PyTorch is imported late: this file may be read before `tests/conftest.py` has told Triton to interpret kernels.
"""

# ruff: noqa: PLC0415

import pytest


@pytest.fixture
def trainer(tmp_path):
    """Builds a `Trainer` of a `TinyForCausalLM`: `trainer(label_smoothing_factor=..., compute_loss_func=...)`."""
    import torch
    from torch import nn
    from transformers import PreTrainedConfig, Trainer, TrainingArguments

    class TinyForCausalLM(nn.Module):
        """As much of a language model as a `Trainer` needs, under a name that Transformers does not know."""

        def __init__(self):
            super().__init__()
            self.config = PreTrainedConfig()
            self.table = nn.Parameter(torch.randn(7, 7))
            self.inputs = []

        def forward(self, input_ids, **inputs):
            self.inputs.append(inputs)
            return {"loss": self.table.sum(), "logits": self.table[input_ids]}

    def build(compute_loss_func=None, **options):
        args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", **options)
        return Trainer(TinyForCausalLM(), args, compute_loss_func=compute_loss_func)

    return build
