"""Matrix-vector products on a GPU, for decoding one sequence: loads the weights at nearly the memory bandwidth.

cuBLAS loads the smaller matrices of a layer at half of it: its kernels are made for products of matrices.
"""

# ruff: noqa: ANN001, ANN202, N803 (Triton reads a kernel's annotations and names)
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BLOCK, WARPS = 1024, 2  # columns per load; within 2% of the best of eleven choices for all matrices of a 1B model
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

available = importlib.util.find_spec("triton") is not None  # it comes with torch for CUDA

if available:
    import triton
    import triton.language as tl

    @triton.jit
    def _multiply(x_ptr, w_ptr, scale_ptr, y_ptr, WIDTH: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        total = tl.zeros([BLOCK], tl.float32)
        for start in tl.static_range(0, WIDTH, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < WIDTH
            # Weights are used once in a step, and must not displace what is used again.
            w = tl.load(w_ptr + row * WIDTH + columns, mask=inside, other=0.0, eviction_policy="evict_first")
            x = tl.load(x_ptr + columns, mask=inside, other=0.0)
            total += w.to(tl.float32) * x.to(tl.float32)
        y = tl.sum(total, 0)
        if SCALED:
            y *= tl.load(scale_ptr + row).to(tl.float32)
        tl.store(y_ptr + row, y.to(y_ptr.dtype.element_ty))


@torch.library.custom_op("glasshouse::matvec", mutates_args=())
def matvec(weight: Tensor, x: Tensor, scale: Tensor | None = None) -> Tensor:
    """Return weight [N, K] times x [K], both contiguous: [N]; `scale` [N] is that of each row of an int8 weight."""
    y = x.new_empty(len(weight))
    sizes = {"WIDTH": weight.shape[1], "BLOCK": BLOCK, "num_warps": WARPS}
    _multiply[(len(weight),)](x, weight, scale, y, SCALED=scale is not None, **sizes)
    return y


@matvec.register_fake
def _(weight: Tensor, x: Tensor, scale: Tensor | None = None) -> Tensor:
    return x.new_empty(len(weight))


class MatvecLinear(nn.Module):
    """A linear layer that maps a single vector by `matvec`; without gradients."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., K] to [..., N]."""
        if x.shape[:-1].numel() != 1:
            return F.linear(x, self.weight, self.bias)
        y: Tensor = matvec(self.weight, x.flatten().contiguous()).view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias


def make_matvec_linear(weight: Tensor, bias: Tensor | None) -> MatvecLinear | None:
    """Return a layer with these tensors, or None if the kernel does not support them."""
    supported = available and weight.is_cuda and weight.dtype in DTYPES and weight.is_contiguous()
    return MatvecLinear(weight, bias) if supported else None
