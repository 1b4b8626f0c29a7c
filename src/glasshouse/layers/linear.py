"""Linear maps that read the same input, done in one product."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class JoinedLinear(nn.Linear):
    """Several linear maps of one input, their matrices stacked so that one larger, faster product does them all.

    >>> query, key = JoinedLinear(8, (4, 2), bias=False)(torch.zeros(3, 8))
    >>> query.shape, key.shape
    (torch.Size([3, 4]), torch.Size([3, 2]))
    """

    def __init__(self, d_in: int, d_outs: tuple[int, ...], bias: bool) -> None:
        super().__init__(d_in, sum(d_outs), bias)
        self.d_outs = list(d_outs)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        """Return one output for each of the maps."""
        return torch.split(super().forward(x), self.d_outs, dim=-1)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.d_outs}, bias={self.bias is not None}"
