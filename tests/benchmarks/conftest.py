"""
Tiny shapes to time.

PyTorch is imported late: this file may be read before `tests/conftest.py` has told Triton to interpret kernels.
"""

# ruff: noqa: PLC0415

import pytest


@pytest.fixture
def shape():
    """Longer than two windows and no multiple of a block, so that local heads take the blocked path."""
    from lsgpt.benchmarks.peers import Shape
    from lsgpt.configuration import load_preset

    return Shape(load_preset("demo", sliding_window=20), length=75, batch_size=2, engines=("sdpa",))


@pytest.fixture
def llama_shape():
    """Blocks of Llama with sinks, and layers that differ in their global heads, as in a converted model."""
    from lsgpt.benchmarks.peers import Shape
    from lsgpt.configuration import load_preset

    fields = {"vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6}
    fields |= {"num_global_heads": [2, 0], "sliding_window": 20, "intermediate_size": 80}
    return Shape(load_preset("smollm2-135m", **fields), length=75, engines=("sdpa",))
