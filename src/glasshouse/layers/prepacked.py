"""Linear maps with their matrices laid out for a CPU.

A CPU that writes spends its time on reading matrices, and in which order it reads them fastest depends on how many
rows it multiplies at once.
"""

from __future__ import annotations

import functools
import platform

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from glasshouse.layers.fused_linear import fuse_linears
from glasshouse.layers.module_swap import MakeLinear, swap_linears

FEWEST_ROWS = 4  # with fewer the plain product is faster
LEAST_WORK = 2**22  # products of two numbers; with fewer the call costs more than it saves


class ColumnMajorLinear(nn.Module):
    """A linear map that holds its matrix column by column, for products of a single row.

    Such a product is then the sum of the columns, each times a number of the row, and no sum crosses a register.
    A matrix that lies so already, as some of GPT-2's do, is not copied.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.in_features = weight.shape[1]
        self.weight = weight.detach().T.contiguous().T
        self.bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., K] to [..., N]."""
        if x.numel() != x.shape[-1] or x.dtype != self.weight.dtype:
            return F.linear(x, self.weight, self.bias)
        row = x.reshape(-1)  # torch multiplies a vector faster than a matrix of one row
        y = self.weight.mv(row) if self.bias is None else torch.addmv(self.bias, self.weight, row)
        return y.view(*x.shape[:-1], -1)


class PrepackedLinear(nn.Module):
    """A linear map that holds its matrix in oneDNN's order, for products of four rows and more, without gradients.

    `can_prepack` says whether this build of torch has what it needs.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.in_features = weight.shape[1]
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 16)
        self.bias = None if bias is None else bias.detach()
        self.multiply = torch.ops.mkldnn._linear_pointwise.default

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., K] to [..., N]."""
        product: Tensor = self.multiply(x.float(), self.packed, self.bias, "none", [], "")
        return product


def prepack_linears(tree: nn.Module, rows: int) -> None:
    """Lay out, in a second tree, each matrix that gains by it where so many rows are multiplied at once.

    >>> from glasshouse.layers.module_swap import clone_sharing_parameters
    >>> model = nn.Sequential(nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 2))
    >>> copy = clone_sharing_parameters(model)
    >>> prepack_linears(copy, rows=8)
    >>> with torch.no_grad():
    ...     x = torch.randn(8, 1024)
    ...     torch.allclose(copy(x), model(x), atol=1e-5)
    True
    """
    make: MakeLinear
    if rows == 1:
        make = lambda weight, bias: ColumnMajorLinear(weight, bias) if fits(weight) else None  # noqa: E731
    elif rows >= FEWEST_ROWS and can_prepack():
        least = LEAST_WORK // rows
        make = lambda weight, bias: PrepackedLinear(weight, bias) if fits(weight, least) else None  # noqa: E731
    else:
        return
    if all(fits(one) for one in tree.parameters()):
        fuse_linears(tree, make)
    swap_linears(tree, make)


def fits(weight: Tensor, least: int = 0) -> bool:
    """Whether a matrix is of the kind that gains by its order, and large enough."""
    return weight.is_cpu and weight.dtype == torch.float32 and weight.numel() >= least


@functools.cache
def can_prepack() -> bool:
    """Whether this build of torch packs matrices, tried once on a small one."""
    try:
        # Elsewhere the operators may be there with no more than a reference behind them, unless ARM's library is too.
        if platform.machine() not in ("x86_64", "AMD64") and not torch.ops.mkldnn._is_mkldnn_acl_supported():
            return False
        x, weight = torch.eye(FEWEST_ROWS, 16), torch.arange(256.0).view(16, 16)
        with torch.no_grad():
            return PrepackedLinear(weight)(x).equal(weight.T[:FEWEST_ROWS])
    except (AttributeError, RuntimeError):
        return False
