"""Int8 weights for the CPU: a quarter of the memory, and of the time to load them in decoding.

Each row of a weight has its own scale, so that its largest value is 127. Activations are quantized to fourteen
bits, relative to the largest of their row: two digits of seven bits, each multiplied by the weight in integers.
Such sums are exact in any order, so that a result does not depend on the rest of the batch.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from glasshouse.errors import InputError
from glasshouse.layers.embedding import TokenEmbedding
from glasshouse.layers.linear.fused import fuse_linears
from glasshouse.layers.module_swap import MakeLinear, swap_linears

BASE = 128  # of the digits: with eight bits, processors without VNNI saturate when they add two products
MIDDLE = BASE // 2  # the digit that stands for 0
PEAK = (BASE - 1 - MIDDLE) * (BASE + 1)  # the largest quantized activation: both digits at their maximum

# Tensors, since torch takes longer to wrap a number than to add it. The first of two is for the high digit.
_PLACES = torch.tensor([1 / BASE, 1.0])[:, None, None]
_PEAK = torch.tensor(float(PEAK))
_PEAKS = _PEAK * _PLACES
_ZEROS = (MIDDLE * (BASE + 1) + 0.5) * _PLACES  # the zero point; and a half, as the conversion truncates
_DIGIT = torch.tensor(BASE - 1, dtype=torch.uint8)


class Int8Weight(NamedTuple):
    """A weight as integers from -127 to 127, with a scale per row."""

    values: Tensor  # [N, K], int8
    scale: Tensor  # [N], float32


def quantize_rows(weight: Tensor) -> Int8Weight:
    """Quantize each row symmetrically to int8 by its largest absolute value.

    >>> quantize_rows(torch.tensor([[254.0, -2.0, 7.0], [0.0, 0.0, 0.0]]))
    Int8Weight(values=tensor([[127,  -1,   4],
            [  0,   0,   0]], dtype=torch.int8), scale=tensor([2., 0.]))
    """
    weight = weight.detach().float()
    scale = weight.abs().amax(1) / 127
    steps = weight / torch.where(scale > 0, scale, 1.0)[:, None]
    return Int8Weight(steps.round().clamp(-127, 127).to(torch.int8).contiguous(), scale)


def dequantize_rows(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight [N, K] of int8 values [N, K] and their scale [N].

    >>> dequantize_rows(torch.tensor([[127, -1]], dtype=torch.int8), torch.tensor([2.0]), torch.float32)
    tensor([[254.,  -2.]])
    """
    return values.to(dtype).mul_(scale[:, None])


class QuantizedLinear(nn.Module):
    """A linear layer with quantized weights, for float32 on the CPU, without gradients."""

    def __init__(self, matmul: Callable[[Tensor], Tensor], out_features: int, bias: Tensor | None) -> None:
        super().__init__()
        self.matmul = matmul  # [M, K] -> [M, N]
        self.out_features = out_features
        self.bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., K] to [..., N]."""
        y = self.matmul(x.detach().reshape(-1, x.shape[-1]).contiguous())
        y = y.float() if self.bias is None else y + self.bias  # float32 either way
        return y.view(*x.shape[:-1], self.out_features)


class Int8Linear(QuantizedLinear):
    """A linear layer with int8 weights.

    >>> weight = quantize_rows(torch.tensor([[127.0, -2.0], [0.0, 254.0]]))
    >>> Int8Linear(weight, torch.tensor([3.0, 0.0]))(torch.tensor([[1.0, 0.0], [0.0, 0.5]])).round(decimals=4)
    tensor([[130.,   0.],
            [  2., 127.]])
    """

    def __init__(self, weight: Int8Weight, bias: Tensor | None = None) -> None:
        super().__init__(make_int8_matmul(weight), len(weight.values), bias)


class Int8Embedding(nn.Module):
    """An embedding with an int8 table."""

    def __init__(self, weight: Int8Weight) -> None:
        super().__init__()
        self.quantized = weight
        self.num_embeddings = len(weight.values)
        self.weight = torch.empty(0)  # models take dtype and device from the weight of their embedding

    def forward(self, ids: Tensor) -> Tensor:
        """Map ids [...] to vectors [..., K]."""
        values, scale = self.quantized
        return values[ids] * scale[ids][..., None]


class OneDNNInt8Matmul:
    """A matmul by oneDNN's int8 kernels, with prepacked weights and activations in two digits."""

    def __init__(self, weight: Int8Weight) -> None:
        values, self.scale = weight
        self.packed = torch.ops.onednn.qlinear_prepack(values, None)
        self.middle = -MIDDLE * values.sum(1).float()  # corrects for the zero point of the digits
        self.ones = torch.ones_like(self.scale)
        self.zeros = torch.zeros_like(self.scale, dtype=torch.int32)

    def __call__(self, x: Tensor) -> Tensor:
        """Return x [M, K] times the transposed weight, [M, N]."""
        peak = x.abs().amax(-1, keepdim=True)
        whole = (x * (_PEAKS / peak)).add_(_ZEROS).to(torch.int32)  # [2, M, K]
        digits = whole.to(torch.uint8).bitwise_and_(_DIGIT).view(-1, x.shape[-1])
        multiply = _opaque_multiply if torch.compiler.is_compiling() else _multiply
        sums = multiply(digits, self.packed, self.ones, self.zeros, self.middle)
        high, low = sums[: len(x)], sums[len(x) :]
        return torch.add(low, high, alpha=BASE).mul_(self.scale).mul_(peak / _PEAK)


def _multiply(digits: Tensor, packed: Tensor, ones: Tensor, zeros: Tensor, middle: Tensor) -> Tensor:
    # What oneDNN computes is exact, or rounded once: its kernels scale and shift in different orders.
    return torch.ops.onednn.qlinear_pointwise.default(
        digits, 1.0, 0, packed, ones, zeros, middle, 1.0, 0, torch.float32, "none", [], ""
    )


# For torch.compile, which would replace oneDNN's operator by a form of it that takes constant weights only.
_opaque_multiply = torch.library.custom_op("glasshouse::onednn_int8_matmul", _multiply, mutates_args=())
_opaque_multiply.register_fake(
    lambda digits, packed, ones, zeros, middle: digits.new_empty(len(digits), len(ones), dtype=torch.float32)
)


class WeightOnlyInt8Matmul:
    """A weight-only int8 matmul, by a torch kernel that is fast on ARM; elsewhere correct and slow."""

    def __init__(self, weight: Int8Weight) -> None:
        count, width = weight.values.shape
        self.padding = -width % 8  # the kernel loads values by eights, and scales by fours
        self.values = F.pad(weight.values, (0, self.padding)) if self.padding else weight.values
        self.scale = F.pad(weight.scale, (0, -count % 4))[:count]

    def __call__(self, x: Tensor) -> Tensor:
        """Return x [M, K] times the transposed weight, [M, N]."""
        x = F.pad(x, (0, self.padding)) if self.padding else x
        return torch._weight_int8pack_mm(x, self.values, self.scale)


def make_int8_matmul(weight: Int8Weight) -> OneDNNInt8Matmul | WeightOnlyInt8Matmul:
    """Build the fastest matmul that is exact on this machine."""
    return OneDNNInt8Matmul(weight) if onednn_int8_is_exact() else WeightOnlyInt8Matmul(weight)


@functools.cache
def onednn_int8_is_exact() -> bool:
    """Whether oneDNN is available and multiplies the largest digits without saturating, tested once."""
    if platform.machine() not in ("x86_64", "AMD64"):  # elsewhere it may fall back to a slow reference
        return False
    weight = Int8Weight(torch.tensor([[127], [-127]], dtype=torch.int8).repeat(16, 64), torch.ones(32))
    x = torch.full((2, 64), float(PEAK))
    exact = (x.double() @ weight.values.double().T).float()  # float32 would round partial sums
    try:
        return OneDNNInt8Matmul(weight)(x).equal(exact)
    except (AttributeError, RuntimeError):
        return False


def quantize_int8(tree: nn.Module) -> None:
    """Quantize the linear layers, the token embedding and the head of an inference copy to int8."""
    quantize_model(tree, "int8", lambda weight, bias: Int8Linear(quantize_rows(weight), bias))


def quantize_model(tree: nn.Module, name: str, make: MakeLinear) -> None:
    """Quantize an inference copy (see module_swap): linear layers by `make`, token embedding and head to int8.

    A tied head stays tied: embedding and head share the int8 values. Of the model the copy keeps norms, biases and
    positions; the original weights are freed once nothing else references them.
    """
    for weight in tree.parameters():
        if weight.dtype != torch.float32 or not weight.is_cpu:
            raise InputError(
                f"a weight is {weight.dtype} on {weight.device}, but {name} needs float32 on the CPU; "
                "load or convert the model accordingly."
            )
    token_embedding = cast(TokenEmbedding, tree.token_embedding)
    table = token_embedding.table.weight
    quantized = quantize_rows(table)
    head = cast(Any, tree).head
    unembedding = head.unembedding(table) if hasattr(head, "unembedding") else None

    def make_linear(weight: Tensor, bias: Tensor | None) -> nn.Module | None:
        if weight is unembedding:
            return Int8Linear(quantized if weight is table else quantize_rows(weight), bias)
        return make(weight, bias)

    fuse_linears(tree, make_linear)
    swap_linears(tree, make_linear)
    token_embedding.register_module("table", Int8Embedding(quantized))
