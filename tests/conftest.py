"""
Shared fixtures: tiny models whose heads, layers and positions all differ, so that a mix-up shows.

PyTorch is imported late: the process of pytest-xdist that hands out tests reads this file, too, and can do without.
"""

# ruff: noqa: PLC0415

import os
import sys
from functools import cache
from pathlib import Path

import pytest


sys.path.insert(0, str(Path(__file__).parent))  # for `import reference`


@cache
def prepare():
    """What must be before the first test is imported."""
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # kernels run on the CPU; Triton must see this when something imports it
    import lsgpt  # noqa: F401

    # Tiny tensors: a second thread costs more than it brings, and processes of pytest-xdist would fight for the cores.
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # the same in processes that tests start


def pytest_collectstart():
    prepare()


@pytest.fixture(scope="session", autouse=True)
def fork_server():
    """Benchmarks use the same one, and must not be the first."""
    import fresh

    fresh.start_server()


TINY = {
    "vocab_size": 97,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_global_heads": 2,
    "head_dim": 12,
    "sliding_window": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,  # logits far apart, so that equal greedy text means equal computation
}


@pytest.fixture
def tiny_config():
    """Builds an `LSGPTConfig`: `tiny_config(**overrides)`."""
    from lsgpt import LSGPTConfig

    def build(**overrides):
        return LSGPTConfig(**{**TINY, **overrides})

    return build


@pytest.fixture
def tiny_model(tiny_config):
    """Builds an `LSGPTForCausalLM` in evaluation mode: `tiny_model(dtype=..., engine=..., **overrides)`."""
    import torch

    from lsgpt import LSGPTForCausalLM

    def build(dtype=torch.float32, engine="sdpa", **overrides):
        torch.manual_seed(0)
        config = tiny_config(**overrides)
        config._attn_implementation = engine
        return LSGPTForCausalLM(config).to(dtype).eval()

    return build


@pytest.fixture(autouse=True)
def seed():
    """Every test draws the same random numbers, whatever ran before it."""
    import torch

    torch.manual_seed(0)


@pytest.fixture
def fresh_compiler():
    """PyTorch counts recompilations of a function over the whole process, and gives up after a few."""
    import torch

    torch.compiler.reset()


@pytest.fixture
def on_gpu_if_any():
    """Tensors and models are made on a GPU if there is one, where Triton's kernels need it."""
    import torch

    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        yield


@pytest.fixture
def four_threads():
    """What the CPU's engines do for several threads."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def offline(monkeypatch):
    """Names that are on no disk fail at once: where there is no network, the Hub is asked again for half a minute."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
