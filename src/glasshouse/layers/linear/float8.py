"""Linear layers whose matrix products are in fp8, for training.

Each operand is scaled so that its largest entry is the largest that its type has, and cast: inputs and weights to
e4m3, which has the finer mantissa, gradients to e5m2, which has the wider range. Products are summed in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from glasshouse.layers.linear.linear import is_plain_linear
from glasshouse.layers.module_swap import replace_module

FINE, WIDE = torch.float8_e4m3fn, torch.float8_e5m2
ALIGNED = 16  # the matrix units take rows of a multiple of 16 bytes
SMALLEST = 1e-12  # of a scale's denominator: a tensor of zeros has no largest entry


class Float8Linear(nn.Linear):
    """A linear layer that multiplies in fp8, forward and backward; weight and bias keep their dtype.

    >>> layer = Float8Linear(16, 16, bias=False, dtype=torch.bfloat16)
    >>> _ = nn.init.eye_(layer.weight)
    >>> layer(torch.full((1, 16), 3.0, dtype=torch.bfloat16))[0, :4]
    tensor([3., 3., 3., 3.], dtype=torch.bfloat16, grad_fn=<SliceBackward0>)
    """

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., K] to [..., N]."""
        y: Tensor = _Float8Matmul.apply(x.flatten(0, -2), self.weight)  # type: ignore[no-untyped-call]
        y = y.unflatten(0, x.shape[:-1])
        return y if self.bias is None else y + self.bias


class _Float8Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:  # noqa: ANN401
        """Return x [T, K] @ weight.T, where weight is [N, K]."""
        (x8, x_scale), (w8, w_scale) = quantize(x, FINE), quantize(weight, FINE)
        ctx.save_for_backward(x8, x_scale, w8, w_scale)
        return multiply(x8, x_scale, w8.t(), w_scale, x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        x8, x_scale, w8, w_scale = ctx.saved_tensors
        g8, g_scale = quantize(grad, WIDE)
        grad_x = multiply(g8, g_scale, column_major(w8), w_scale, grad.dtype)
        rows = -len(g8) % ALIGNED  # of zeros, as the sum over tokens is over rows of g8.T
        if rows:
            g8, x8 = F.pad(g8, (0, 0, 0, rows)), F.pad(x8, (0, 0, 0, rows))
        grad_weight = multiply(g8.t().contiguous(), g_scale, column_major(x8), x_scale, grad.dtype)
        return grad_x, grad_weight


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return x in fp8 and the scale to multiply it by."""
    largest = torch.finfo(dtype).max
    scale = x.detach().abs().amax().float().clamp(min=SMALLEST) / largest
    return (x.float() / scale).clamp(-largest, largest).to(dtype), scale


def multiply(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a @ b, scaled; a is row-major and b column-major, as the matrix units want them."""
    if a.is_cpu:  # few have such units, and nothing trains there in fp8
        return (a.float() @ b.float() * (a_scale * b_scale)).to(dtype)
    return torch._scaled_mm(a, b, scale_a=a_scale, scale_b=b_scale, out_dtype=dtype)


def column_major(x: Tensor) -> Tensor:
    """Return a matrix with contiguous columns."""
    return x.t().contiguous().t()


def convert_to_float8(tree: nn.Module) -> None:
    """Replace the linear layers whose sizes the matrix units can take; parameters stay the same objects."""
    for module in list(tree.modules()):
        for name, child in list(module.named_children()):
            if is_plain_linear(child) and child.in_features % ALIGNED == child.out_features % ALIGNED == 0:
                made = Float8Linear(child.in_features, child.out_features, child.bias is not None, device="meta")
                made.weight, made.bias = child.weight, child.bias
                replace_module(module, name, made)
