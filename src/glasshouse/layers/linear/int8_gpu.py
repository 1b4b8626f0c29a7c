"""Weight-only int8 quantization for a GPU: half the memory of bfloat16, and of the time to load it in decoding.

Activations stay in the model's dtype. A single vector is mapped by `matvec`, which loads a weight as one byte; for
more rows the weight is first converted in memory.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from glasshouse.layers.linear.fused import fuse_linears
from glasshouse.layers.linear.int8 import quantize_rows
from glasshouse.layers.linear.matvec import available, matvec
from glasshouse.layers.module_swap import swap_linears


class WeightOnlyInt8Linear(nn.Module):
    """A linear layer with int8 weights and a scale per row, without gradients.

    >>> layer = WeightOnlyInt8Linear(torch.tensor([[127.0, -2.0], [0.0, 254.0]]), torch.tensor([3.0, 0.0]))
    >>> layer(torch.tensor([[1.0, 0.0], [0.0, 0.5]]))
    tensor([[130.,   0.],
            [  2., 127.]])
    """

    values: Tensor  # [N, K], int8
    scale: Tensor  # [N]

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        values, scale = quantize_rows(weight)
        self.register_buffer("values", values)
        self.register_buffer("scale", scale.to(weight.dtype))
        self.bias = None if bias is None else bias.detach()
        self.by_kernel = available and weight.is_cuda

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., K] to [..., N]."""
        if self.by_kernel and x.shape[:-1].numel() == 1:
            y = matvec(self.values, x.flatten().contiguous(), self.scale).view(*x.shape[:-1], -1)
        else:
            y = F.linear(x, self.values.to(x.dtype)) * self.scale
        return y if self.bias is None else y + self.bias


def quantize_weights(tree: nn.Module) -> None:
    """Quantize the linear layers and the head of an inference copy (see module_swap), not the token embedding."""
    with torch.no_grad():
        fuse_linears(tree, WeightOnlyInt8Linear)
        swap_linears(tree, WeightOnlyInt8Linear)
