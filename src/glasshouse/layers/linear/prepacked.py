"""Linear layers with weights in a memory layout for CPU inference.

Decoding on a CPU is bound by loading weights, and the fastest layout depends on the batch size.
"""

from __future__ import annotations

import functools
import platform

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from glasshouse.layers.linear.fused import fuse_linears
from glasshouse.layers.module_swap import MakeLinear, swap_linears

MIN_ROWS = 4  # with fewer F.linear is faster
MIN_WORK = 2**22  # multiplications; with fewer the call costs more than it saves


class ColumnMajorLinear(nn.Module):
    """A linear layer with a column-major weight, for inputs of a single row.

    The product is then a sum of scaled columns, without a reduction across a register. A weight that is column-major
    already, as some of GPT-2's are, is not copied.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.in_features = weight.shape[1]
        self.weight = weight.detach().T.contiguous().T
        self.bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., K] to [..., N]."""
        # Compiled, a matrix-vector product would become a loop that is three times as slow.
        if x.numel() != x.shape[-1] or x.dtype != self.weight.dtype or torch.compiler.is_compiling():
            return F.linear(x, self.weight, self.bias)
        row = x.reshape(-1)  # faster than a matrix of one row
        y = self.weight.mv(row) if self.bias is None else torch.addmv(self.bias, self.weight, row)
        return y.view(*x.shape[:-1], -1)


class PrepackedLinear(nn.Module):
    """A linear layer with a weight prepacked by oneDNN, for inputs of four rows and more, without gradients.

    Needs `can_prepack`.
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
    """Replace linear layers of an inference copy by prepacked ones, where they are faster for inputs of `rows` rows.

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
    elif rows >= MIN_ROWS and can_prepack():
        min_size = MIN_WORK // rows
        make = lambda weight, bias: PrepackedLinear(weight, bias) if fits(weight, min_size) else None  # noqa: E731
    else:
        return
    if all(fits(one) for one in tree.parameters()):
        fuse_linears(tree, make)
    swap_linears(tree, make)


def fits(weight: Tensor, min_size: int = 0) -> bool:
    """Whether a weight is float32 on the CPU, and large enough."""
    return weight.is_cpu and weight.dtype == torch.float32 and weight.numel() >= min_size


@functools.cache
def can_prepack() -> bool:
    """Whether this build of torch can prepack weights, tested once on a small one."""
    try:
        # Elsewhere the operators may be slow references, unless the Arm Compute Library is there too.
        if platform.machine() not in ("x86_64", "AMD64") and not torch.ops.mkldnn._is_mkldnn_acl_supported():
            return False
        x, weight = torch.eye(MIN_ROWS, 16), torch.arange(256.0).view(16, 16)
        with torch.no_grad():
            return PrepackedLinear(weight)(x).equal(weight.T[:MIN_ROWS])
    except (AttributeError, RuntimeError):
        return False
