"""Norm, rotation and gated activation on a GPU, each as one kernel, for inference.

Operation by operation they take a third of a decode step: seven kernels rotate queries or keys, and two apply a gate.
They compute in float32 and round once.
"""

# ruff: noqa: ANN001, ANN202, N803 (Triton reads a kernel's annotations and names)
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor

from glasshouse.layers.cache.kernels import tile
from glasshouse.layers.context import Context
from glasshouse.layers.feedforward import GATED_SITES, FeedForward, FusedGateUpFeedForward
from glasshouse.layers.norm import RMSNorm
from glasshouse.layers.position import RotaryPosition, rotate_halves
from glasshouse.layers.sublayer import LayerSite

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ACTIVATIONS = {"swiglu": 0, "geglu": 1, "geglu_tanh": 2}  # of gated feed-forward layers, by kind
GATE_BLOCK = 1024  # neurons per program

available = importlib.util.find_spec("triton") is not None  # it comes with torch for CUDA

if available:
    import triton
    import triton.language as tl

    @triton.jit
    def _rms_norm(x_ptr, weight_ptr, y_ptr, eps, WIDTH: tl.constexpr, PADDED: tl.constexpr):
        columns = tl.arange(0, PADDED)
        inside, at = columns < WIDTH, tl.program_id(0).to(tl.int64) * WIDTH + columns
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
        tl.store(y_ptr + at, (x * scale * weight).to(y_ptr.dtype.element_ty), mask=inside)

    @triton.jit(do_not_specialize=["length"])
    def _rotate(
        x_ptr, cos_ptr, sin_ptr, y_ptr, length, x_batch, x_head, x_seq, angle_batch, angle_seq,
        HEADS: tl.constexpr, HALF: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
        INTERLEAVED: tl.constexpr,
    ):  # fmt: skip
        token = tl.program_id(0).to(tl.int64)
        batch, seq = token // length, token % length
        heads, pairs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, PADDED)
        inside = (heads < HEADS)[:, None] & (pairs < HALF)[None, :]
        angle = batch * angle_batch + seq * angle_seq + pairs
        cos = tl.load(cos_ptr + angle, mask=pairs < HALF, other=0.0).to(tl.float32)[None, :]
        sin = tl.load(sin_ptr + angle, mask=pairs < HALF, other=0.0).to(tl.float32)[None, :]
        first = 2 * pairs if INTERLEAVED else pairs
        apart = 1 if INTERLEAVED else HALF
        x_at = x_ptr + batch * x_batch + heads[:, None] * x_head + seq * x_seq + first[None, :]
        a = tl.load(x_at, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(x_at + apart, mask=inside, other=0.0).to(tl.float32)
        y_at = y_ptr + (token * HEADS + heads[:, None]) * 2 * HALF + first[None, :]
        tl.store(y_at, (a * cos - b * sin).to(y_ptr.dtype.element_ty), mask=inside)
        tl.store(y_at + apart, (b * cos + a * sin).to(y_ptr.dtype.element_ty), mask=inside)

    @triton.jit
    def _gate(gate_ptr, up_ptr, y_ptr, gate_row, up_row, width, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
        row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = columns < width
        gate = tl.load(gate_ptr + row * gate_row + columns, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(up_ptr + row * up_row + columns, mask=inside, other=0.0).to(tl.float32)
        if ACTIVATION == 0:
            share = tl.sigmoid(gate)
        elif ACTIVATION == 1:
            share = 0.5 * (1 + tl.erf(gate * 0.7071067811865476))
        else:  # tanh(z) = 2 sigmoid(2 z) - 1
            share = tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
        tl.store(y_ptr + row * width + columns, (gate * share * up).to(y_ptr.dtype.element_ty), mask=inside)


class KernelRMSNorm(RMSNorm):
    """RMS normalisation by one kernel, for the few rows of a decode step."""

    def __init__(self, norm: RMSNorm) -> None:
        torch.nn.Module.__init__(self)
        self.normalized_shape, self.eps, self.elementwise_affine = norm.normalized_shape, norm.eps, True
        self.weight = norm.weight

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., D]."""
        x = x.contiguous()
        y, width = torch.empty_like(x), x.shape[-1]
        _rms_norm[(x.numel() // width,)](
            x, self.weight, y, self.eps, WIDTH=width, PADDED=triton.next_power_of_2(width), num_warps=4
        )
        return y


class KernelRotaryPosition(RotaryPosition):
    """Rotary position embeddings by one kernel, with frequencies that are computed once."""

    def __init__(self, position: RotaryPosition, device: torch.device) -> None:
        torch.nn.Module.__init__(self)
        interleaved = position.rotate_pairs is not rotate_halves
        self.rotate_pairs = functools.partial(rotate, interleaved=interleaved)
        self.attention_factor = position.attention_factor
        self._frequencies = position.frequencies(device)

    def frequencies(self, device: torch.device) -> Tensor:
        """Return the frequency of each pair of coordinates, [d / 2]."""
        return self._frequencies


class KernelGatedFeedForward(FeedForward):
    """A gated feed-forward layer with a fused projection, whose gate is applied by one kernel."""

    def __init__(self, layer: FusedGateUpFeedForward) -> None:
        torch.nn.Module.__init__(self)
        self.gate_up, self.down, self.kind = layer.gate_up, layer.down, layer.kind

    def sites(self) -> list[LayerSite]:
        """Return those of the layer, of which the kernel hides the gate and what it multiplies."""
        return list(GATED_SITES)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """Map x [B, S, D] to [B, S, D]."""
        gated, up = self.gate_up(x)
        return self.down(gate(gated, up, self.kind))


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate pairs of x [B, H, S, d], neighbours or halves, by angles of cosines and sines [1 or B, 1, S, d/2]."""
    batch, heads, length, width = x.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    y = x.new_empty(batch, length, heads, width)
    padded, block, blocks = tile(heads, width // 2)
    _rotate[(batch * length, blocks)](
        x, cos, sin, y, length, *x.stride()[:3], cos.stride(0) if len(cos) > 1 else 0, cos.stride(2),
        HEADS=heads, HALF=width // 2, PADDED=padded, BLOCK=block, INTERLEAVED=interleaved, num_warps=2,
    )  # fmt: skip
    return y.transpose(1, 2)


def gate(gated: Tensor, up: Tensor, kind: str) -> Tensor:
    """Return act(gated) * up for two [B, S, F], where `kind` is that of the feed-forward layer."""
    width = up.shape[-1]
    rows = [one if one.stride(-1) == 1 else one.contiguous() for one in (gated.flatten(0, -2), up.flatten(0, -2))]
    y = up.new_empty(up.shape)
    _gate[(len(rows[0]), triton.cdiv(width, GATE_BLOCK))](
        *rows, y, *(one.stride(0) for one in rows), width, ACTIVATION=ACTIVATIONS[kind], BLOCK=GATE_BLOCK
    )
    return y
