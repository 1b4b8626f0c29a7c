"""Int4 weights for the CPU, in groups of 32: an eighth of the memory that a decode step must load in float32.

Each group of a row has its own scale, by which its largest value is -8. The token embedding and the head are in int8,
as their rounding reaches the logits directly. Torch's kernels also round activations: on x86-64 to bfloat16, on ARM
to eight bits relative to the range of their row.
"""

from __future__ import annotations

import functools
import platform
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from glasshouse.errors import InputError
from glasshouse.layers.linear.int8 import QuantizedLinear, quantize_model

GROUP = 32  # weights that share a scale


class Int4Weight(NamedTuple):
    """A weight as integers from -8 to 7, with a scale per group of a row."""

    values: Tensor  # [N, K], int8
    scale: Tensor  # [N, K // 32], float32, with no more digits than bfloat16 has

    def to_float32(self) -> Tensor:
        """Return the weight that the integers stand for, [N, K]."""
        return (self.values.unflatten(1, (-1, GROUP)) * self.scale[..., None]).flatten(1)


def quantize_groups(weight: Tensor) -> Int4Weight:
    """Quantize each group of 32 weights to int4 by its value of the largest magnitude.

    >>> weight = torch.zeros(1, 32)
    >>> weight[0, :4] = torch.tensor([4.0, -1.0, 0.3, 0.2])
    >>> quantized = quantize_groups(weight)
    >>> quantized.values[0, :4], quantized.scale
    (tensor([-8,  2, -1,  0], dtype=torch.int8), tensor([[-0.5000]]))
    """
    if weight.shape[1] % GROUP:
        raise InputError(
            f"a weight has {weight.shape[1]} columns, but int4 needs a multiple of {GROUP}; use weights='int8'."
        )
    groups = weight.detach().float().unflatten(1, (-1, GROUP))
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    scale = (largest / -8).bfloat16().float()  # rounded before the values are, as the kernels take it
    steps = groups / torch.where(scale == 0, 1.0, scale)
    return Int4Weight(steps.round().clamp(-8, 7).to(torch.int8).flatten(1), scale.squeeze(-1))


def pack_pairs(values: Tensor) -> Tensor:
    """Pack int4 values [N, K] two in a byte, [N, K // 2]: the first in the lower half, and each 8 higher.

    >>> pack_pairs(torch.tensor([[-8, 7, 0, 1]], dtype=torch.int8))
    tensor([[240, 152]], dtype=torch.uint8)
    """
    nibbles = (values + 8).to(torch.uint8)
    return nibbles[:, 1::2] << 4 | nibbles[:, ::2]


def dequantize_pairs(pairs: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight [N, K] of packed values [N, K // 2] and their scale [N, K // 32].

    >>> quantized = quantize_groups(torch.linspace(-1, 1, 64).view(2, 32))
    >>> dequantize_pairs(pack_pairs(quantized.values), quantized.scale, torch.float32).equal(quantized.to_float32())
    True
    """
    weight = pairs.new_empty(*pairs.shape, 2, dtype=dtype)
    weight[..., 0] = pairs & 15  # into its place: large temporary tensors would be in the peak of memory
    weight[..., 1] = pairs >> 4
    return weight.flatten(1).sub_(8).unflatten(1, (-1, GROUP)).mul_(scale[..., None]).flatten(1)


class Int4Linear(QuantizedLinear):
    """A linear layer with int4 weights, for float32 on the CPU, without gradients.

    >>> weight = quantize_groups(torch.eye(32) * 8)
    >>> Int4Linear(weight, torch.ones(32))(torch.full((1, 32), 0.5)).round().unique()
    tensor([5.])
    """

    def __init__(self, weight: Int4Weight, bias: Tensor | None = None) -> None:
        super().__init__(choose_int4_matmul()(weight), len(weight.values), bias)


class BFloat16Int4Matmul:
    """A matmul of bfloat16 activations, by a torch kernel that is fast on x86-64."""

    def __init__(self, weight: Int4Weight) -> None:
        self.count = len(weight.values)
        padding = -self.count % 16  # the kernel computes sixteen outputs at a time
        values, scale = F.pad(weight.values, (0, 0, 0, padding)), F.pad(weight.scale, (0, 0, 0, padding))
        self.packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values.int() + 8, 1)
        self.scale_and_zero = (
            torch.stack([scale, torch.zeros_like(scale)], -1).transpose(0, 1).bfloat16().contiguous()
        )
        self.multiply = torch.ops.aten._weight_int4pack_mm_for_cpu.default

    def __call__(self, x: Tensor) -> Tensor:
        """Return x [M, K] times the transposed weight, [M, N], in bfloat16."""
        y: Tensor = self.multiply(x.bfloat16(), self.packed, GROUP, self.scale_and_zero)
        return y if y.shape[1] == self.count else y[:, : self.count]


class DynamicInt4Matmul:
    """A matmul of activations that are quantized to eight bits per row, by a torch kernel that is fast on ARM."""

    def __init__(self, weight: Int4Weight) -> None:
        self.shape = weight.values.shape[1], len(weight.values)
        pairs = pack_pairs(weight.values)
        # The kernel for groups takes bfloat16, the one for whole rows float32.
        scale = weight.scale if self.shape[0] == GROUP else weight.scale.bfloat16()
        self.packed = torch.ops.aten._dyn_quant_pack_4bit_weight(pairs, scale.contiguous(), None, GROUP, *self.shape)
        self.multiply = torch.ops.aten._dyn_quant_matmul_4bit.default

    def __call__(self, x: Tensor) -> Tensor:
        """Return x [M, K] times the transposed weight, [M, N]."""
        return self.multiply(x, self.packed, GROUP, *self.shape)


@functools.cache
def choose_int4_matmul() -> type[BFloat16Int4Matmul] | type[DynamicInt4Matmul]:
    """Return the matmul that is fast on this machine; else another that this build of torch has, tested once."""
    matmuls: list[type[BFloat16Int4Matmul] | type[DynamicInt4Matmul]] = [BFloat16Int4Matmul, DynamicInt4Matmul]
    if platform.machine() not in ("x86_64", "AMD64"):
        matmuls.reverse()
    weight = quantize_groups(torch.linspace(-1, 1, 48 * 2 * GROUP).view(48, -1))
    x = torch.linspace(-1, 1, 2 * 2 * GROUP).view(2, -1)
    expected = x @ weight.to_float32().T
    for matmul in matmuls:
        try:
            if (matmul(weight)(x) - expected).abs().max() <= 0.02 * expected.abs().max():
                return matmul
        except (AttributeError, RuntimeError):
            continue
    raise InputError("this build of torch has no int4 matmul for this machine; use weights='int8'.")


def quantize_int4(tree: nn.Module) -> None:
    """Quantize the linear layers of an inference copy to int4, its token embedding and head to int8."""
    quantize_model(tree, "int4", lambda weight, bias: Int4Linear(quantize_groups(weight), bias))
