"""Matrices in a byte a number: a quarter of the memory, and of the time a CPU takes to read them for one token.

Each row has a scale of its own, so that its largest number is 127. Activations keep fourteen bits: relative to the
largest of their own row they become two digits of seven, and both are multiplied by the matrix in whole numbers.
Such sums are exact in any order, so that a row of a batch cannot feel the others.
"""

from __future__ import annotations

import functools
import platform
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from glasshouse.errors import InputError
from glasshouse.layers.embedding import TokenEmbedding
from glasshouse.layers.fused_linear import fuse_linears
from glasshouse.layers.module_swap import swap_linears

BASE = 128  # of the digits: with eight bits, processors without VNNI saturate where they add two products
MIDDLE = BASE // 2  # the digit that stands for 0
PEAK = (BASE - 1 - MIDDLE) * (BASE + 1)  # what the largest activation of a row becomes: both digits at their end

# Tensors, since torch takes longer to wrap a number than to add it to a row. The first of two is for the high digit.
_PLACES = torch.tensor([1 / BASE, 1.0])[:, None, None]
_PEAK = torch.tensor(float(PEAK))
_PEAKS = _PEAK * _PLACES
_ZEROS = (MIDDLE * (BASE + 1) + 0.5) * _PLACES  # 0 in digits; and a half, as what comes after is cut off
_DIGIT = torch.tensor(BASE - 1, dtype=torch.uint8)


class Int8Weight(NamedTuple):
    """A matrix as whole numbers from -127 to 127, and what those of each row are multiples of."""

    values: Tensor  # [N, K], int8
    scale: Tensor  # [N], float32


def quantize_rows(weight: Tensor) -> Int8Weight:
    """Round each row to multiples of a 127th of its largest number.

    >>> quantize_rows(torch.tensor([[254.0, -2.0, 7.0], [0.0, 0.0, 0.0]]))
    Int8Weight(values=tensor([[127,  -1,   4],
            [  0,   0,   0]], dtype=torch.int8), scale=tensor([2., 0.]))
    """
    weight = weight.detach().float()
    scale = weight.abs().amax(1) / 127
    steps = weight / torch.where(scale > 0, scale, 1.0)[:, None]
    return Int8Weight(steps.round().clamp(-127, 127).to(torch.int8).contiguous(), scale)


class Int8Linear(nn.Module):
    """A linear map with int8 weights, for float32 on the CPU; no gradient passes.

    >>> rows = quantize_rows(torch.tensor([[127.0, -2.0], [0.0, 254.0]]))
    >>> Int8Linear(rows, torch.tensor([3.0, 0.0]))(torch.tensor([[1.0, 0.0], [0.0, 0.5]])).round(decimals=4)
    tensor([[130.,   0.],
            [  2., 127.]])
    """

    def __init__(self, rows: Int8Weight, bias: Tensor | None = None) -> None:
        super().__init__()
        self.product = make_int8_matmul(rows)
        self.out_features = len(rows.values)
        self.bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., K] to [..., N]."""
        y = self.product(x.detach().reshape(-1, x.shape[-1]).contiguous())
        if self.bias is not None:
            y.add_(self.bias)
        return y.view(*x.shape[:-1], self.out_features)


class Int8Embedding(nn.Module):
    """Look ids up in an int8 table."""

    def __init__(self, rows: Int8Weight) -> None:
        super().__init__()
        self.rows = rows
        self.num_embeddings = len(rows.values)
        self.weight = torch.empty(0)  # a model reads its type and device off the weight of its table

    def forward(self, ids: Tensor) -> Tensor:
        """Map ids [...] to vectors [..., K]."""
        values, scale = self.rows
        return values[ids] * scale[ids][..., None]


class OneDNNInt8Matmul:
    """Rows times digits, in oneDNN's order and by its int8 kernels."""

    def __init__(self, rows: Int8Weight) -> None:
        values, self.scale = rows
        self.packed = torch.ops.onednn.qlinear_prepack(values, None)
        self.multiply = torch.ops.onednn.qlinear_pointwise.default
        self.middle = -MIDDLE * values.sum(1).float()  # takes off what digits around the middle add to each sum
        self.ones = torch.ones_like(self.scale)
        self.zeros = torch.zeros_like(self.scale, dtype=torch.int32)

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply x [M, K] by the rows: [M, N]."""
        peak = x.abs().amax(-1, keepdim=True)
        whole = (x * (_PEAKS / peak)).add_(_ZEROS).to(torch.int32)  # [2, M, K]
        digits = whole.to(torch.uint8).bitwise_and_(_DIGIT).view(-1, x.shape[-1])
        # All that is left to oneDNN is exact, or rounded once: its kernels scale and shift in different orders.
        sums: Tensor = self.multiply(
            digits, 1.0, 0, self.packed, self.ones, self.zeros, self.middle, 1.0, 0, torch.float32, "none", [], ""
        )
        high, low = sums[: len(x)], sums[len(x) :]
        return torch.add(low, high, alpha=BASE).mul_(self.scale).mul_(peak / _PEAK)


class WeightOnlyInt8Matmul:
    """Rows times floats, by a kernel that torch has for ARM; elsewhere right and slow."""

    def __init__(self, rows: Int8Weight) -> None:
        count, width = rows.values.shape
        self.missing = -width % 8  # the kernel reads values by eights, and scales by fours
        self.values = F.pad(rows.values, (0, self.missing)) if self.missing else rows.values
        self.scale = F.pad(rows.scale, (0, -count % 4))[:count]

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply x [M, K] by the rows: [M, N]."""
        x = F.pad(x, (0, self.missing)) if self.missing else x
        return torch._weight_int8pack_mm(x, self.values, self.scale)


def make_int8_matmul(rows: Int8Weight) -> OneDNNInt8Matmul | WeightOnlyInt8Matmul:
    """Choose the fastest product that this machine gets right."""
    return OneDNNInt8Matmul(rows) if onednn_int8_is_exact() else WeightOnlyInt8Matmul(rows)


@functools.cache
def onednn_int8_is_exact() -> bool:
    """Whether oneDNN is there and multiplies the largest digits without saturating, tried once."""
    if platform.machine() not in ("x86_64", "AMD64"):  # elsewhere it may fall back to a reference, far too slow
        return False
    rows = Int8Weight(torch.tensor([[127], [-127]], dtype=torch.int8).repeat(16, 64), torch.ones(32))
    x = torch.full((2, 64), float(PEAK))
    exact = (x.double() @ rows.values.double().T).float()  # float32 would round the sums on their way
    try:
        return OneDNNInt8Matmul(rows)(x).equal(exact)
    except (AttributeError, RuntimeError):
        return False


def quantize_int8(tree: nn.Module) -> None:
    """Put int8 in the place of the linear maps, the token table and the head of a second tree (`twin.clone_sharing_parameters`).

    A head that is tied stays tied: table and head are the same whole numbers. What the tree keeps of the model are
    norms, biases and positions; once nothing else holds the model, its matrices are gone.
    """
    for weight in tree.parameters():
        if weight.dtype != torch.float32 or not weight.is_cpu:
            raise InputError(
                f"a weight is {weight.dtype} on {weight.device}, but int8 is made from float32 on the CPU; "
                "load or convert the model so."
            )
    token_embedding = cast(TokenEmbedding, tree.token_embedding)
    table = token_embedding.table.weight
    rows = quantize_rows(table)

    def make(weight: Tensor, bias: Tensor | None) -> nn.Module:
        return Int8Linear(rows if weight is table else quantize_rows(weight), bias)

    fuse_linears(tree, make)
    swap_linears(tree, make)
    token_embedding.register_module("table", Int8Embedding(rows))
