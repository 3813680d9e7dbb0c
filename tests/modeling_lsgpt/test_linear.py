"""The product of one row in parts is that of `nn.Linear`, and others are left to it."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import FineGrainedFP8Config

from lsgpt import LSGPTConfig, LSGPTForCausalLM
from lsgpt.modeling_lsgpt.linear_lsgpt import MIN_WEIGHTS, SplitLinear, make_linear


class Operations(TorchDispatchMode):
    """Records the names of all operations."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def run(linear, row):
    with Operations() as operations, torch.no_grad():
        output = linear(row)
    return output, "bmm" in operations.names


def test_only_large_matrices_are_split():
    assert type(make_linear(LSGPTConfig(), 512, MIN_WEIGHTS // 512 - 1, bias=False)) is nn.Linear
    assert type(make_linear(LSGPTConfig(), 512, MIN_WEIGHTS // 512, bias=False)) is SplitLinear


def test_quantizers_that_replace_only_nn_linear_find_all_layers(tiny_config):
    """Such as bitsandbytes (see tests/test_other_libraries.py) and FP8: `from_pretrained` tells the configuration."""
    config = tiny_config(hidden_size=384, head_dim=64, gated_mlp=True, vocab_size=1000)
    assert Counter(map(type, LSGPTForCausalLM(config).modules()))[SplitLinear] == 2 * 7 + 1
    config.quantization_config = FineGrainedFP8Config()
    assert Counter(map(type, LSGPTForCausalLM(config).modules()))[nn.Linear] == 2 * 7 + 1


def test_those_of_gpt2_small_are_split_and_those_of_tiny_models_are_not():
    """With fewer split ones, GPT-2 small decodes slower; with more, models of 128 dimensions do."""
    config = LSGPTConfig()
    assert {type(make_linear(config, 768, width, bias=True)) for width in (768, 3072)} == {SplitLinear}
    assert {type(make_linear(config, 128, width, bias=True)) for width in (128, 512)} == {nn.Linear}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("out_features", [3, 12, 97])
@pytest.mark.parametrize("shape", [(20,), (1, 20), (1, 1, 20)])
def test_single_rows_are_multiplied_in_parts(four_threads, shape, out_features, bias):
    linear = SplitLinear(20, out_features, bias=bias)
    row = torch.randn(40)[::2].view(shape)
    output, in_parts = run(linear, row)
    assert in_parts
    torch.testing.assert_close(output, nn.functional.linear(row, linear.weight, linear.bias))


def test_everything_else_is_left_to_pytorch(four_threads):
    linear, row = SplitLinear(20, 12), torch.randn(1, 20)
    assert run(linear, row)[1]
    assert not run(linear, torch.randn(2, 20))[1]
    assert not run(linear.double(), row.double())[1]
    linear.float()
    assert linear(row).requires_grad
    with torch.autocast("cpu"):
        output, in_parts = run(linear, row)
    assert output.dtype == torch.bfloat16 and not in_parts
    torch.set_num_threads(1)
    assert not run(linear, row)[1]


def test_other_parameters_and_tracing_are_left_to_pytorch(four_threads):
    class Quantized(nn.Parameter):
        pass

    linear, rows = SplitLinear(20, 12).requires_grad_(False), torch.randn(3, 20)
    traced = torch.jit.trace(linear, rows[:1], check_trace=False)  # which would keep the shape of its example
    torch.testing.assert_close(traced(rows), nn.functional.linear(rows, linear.weight, linear.bias))
    linear.weight = Quantized(linear.weight.detach(), requires_grad=False)
    assert not run(linear, rows[:1])[1]
