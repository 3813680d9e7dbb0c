"""The projections' matrix product on the CPU, which decides how fast single tokens are decoded there."""

import torch
from torch import nn
from transformers.utils.import_utils import is_tracing


class Linear(nn.Linear):
    """
    `nn.Linear`, which on the CPU multiplies a single row in float32 on all threads.

    Decoding reads every weight once for each token. PyTorch's product of a matrix with one row does that on one core;
    as a batch of products, one for each thread with its share of the weight's rows, it takes all of them.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Maps `(..., in_features)` to `(..., out_features)`."""
        if is_tracing(input) or not self._takes_parts(input):
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
        is_single_row = input.numel() == input.shape[-1] and input.device.type == "cpu"
        # Quantised and sharded weights are of other types.
        is_plain = type(self.weight) is nn.Parameter and self.weight.dtype == input.dtype == torch.float32
        is_inference = not (torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"))
        return is_single_row and is_plain and is_inference and torch.get_num_threads() > 1
