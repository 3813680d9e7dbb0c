"""Large matrices times a single row on all CPU cores: what decoding does with every weight, once for each token."""

import torch
from torch import nn

from .configuration_lsgpt import LSGPTConfig


MIN_WEIGHTS = 2**17
"""
Smaller matrices stay `nn.Linear`: dividing them saves less time than the checks in `forward` cost. The bound was
chosen with models 128 to 768 wide on two cores; with 2**20, GPT-2 small takes 1.2 times as long for a token.
"""


def make_linear(config: LSGPTConfig, in_features: int, out_features: int, bias: bool) -> nn.Linear:
    """`nn.Linear`, or a `SplitLinear` if there are enough weights, and they are not to be quantized."""
    # Transformers' bitsandbytes and FP8 quantizers replace modules whose type is exactly `nn.Linear`.
    is_quantized = getattr(config, "quantization_config", None) is not None
    kind = nn.Linear if is_quantized or in_features * out_features < MIN_WEIGHTS else SplitLinear
    return kind(in_features, out_features, bias=bias)


class SplitLinear(nn.Linear):
    """
    `nn.Linear` that uses all CPU threads for a single input row in float32 without gradients.

    PyTorch multiplies a matrix by a single row on one core. A batch of products, one for each thread with its share of
    the weight's rows, uses all cores.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Maps `(..., in_features)` to `(..., out_features)`."""
        if input.numel() != input.shape[-1] or torch.compiler.is_compiling() or not self._takes_parts(input):
            return super().forward(input)
        parts = torch.get_num_threads()
        rows = self.weight.shape[0] // parts
        weights = self.weight[: parts * rows].unflatten(0, (parts, rows)).transpose(1, 2)
        output = torch.bmm(input.reshape(1, 1, -1).expand(parts, -1, -1), weights).flatten()
        if parts * rows < self.weight.shape[0]:
            output = torch.cat((output, torch.mv(self.weight[parts * rows :], input.flatten())))
        if self.bias is not None:
            output = output + self.bias
        return output.view(*input.shape[:-1], -1)

    def _takes_parts(self, input: torch.Tensor) -> bool:
        # Quantized, sharded and fake weights are of other types.
        is_plain = type(input) is torch.Tensor and type(self.weight) is nn.Parameter
        is_float32_on_cpu = input.device.type == "cpu" and self.weight.dtype == input.dtype == torch.float32
        is_inference = not (torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or torch.jit.is_tracing())
        return is_plain and is_float32_on_cpu and is_inference and torch.get_num_threads() > 1
