"""Position encodings: added to the embeddings, applied to queries and keys, or added to the attention scores.

Every kind is a module with the same three methods, of which it overrides the one it needs. Layers with a sliding
window may have one of their own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import assert_never

import torch
from torch import Tensor, nn

from glasshouse import registry, spec
from glasshouse.errors import InputError
from glasshouse.layers.embedding import Embedding
from glasshouse.layers.host_reads import can_read

Rotate = Callable[[Tensor], Tensor]


class Position(nn.Module):
    """No position encoding: each method does nothing."""

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """Add position embeddings to x [B, S, D] at positions [B, S]."""
        return x

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> Rotate:
        """Return the rotation of queries or keys [B, H, S, d] at positions [B, S]."""
        return _unchanged

    def bias(self, queries: Tensor, keys: Tensor) -> Tensor | None:
        """Return the bias of the attention scores, [B, H, Q, K], for positions [B, Q] and [B, K]."""
        return None

    @property
    def rotates(self) -> bool:
        """Whether queries and keys are rotated."""
        return type(self).rotation is not Position.rotation


def _unchanged(x: Tensor) -> Tensor:
    return x


def make_local_position(s: spec.TransformerSpec) -> Position | None:
    """Build the position encoding of layers with a sliding window, if it is another than that of the others."""
    if not isinstance(s.position, spec.Rotary) or s.position.local_theta is None:
        return None
    local = replace(s.position, theta=s.position.local_theta, scaling=spec.NoScaling())
    return make_position(replace(s, position=local), causal=True)


def make_position(s: spec.TransformerSpec, causal: bool) -> Position:
    """Build the position encoding of a stack."""
    if (position := registry.build(s.position, Position, s, causal)) is not None:
        return position
    match s.position:
        case spec.NoPosition():
            return Position()
        case spec.Sinusoidal(layout):
            return SinusoidalPosition(s.d_model, layout == "pairs")
        case spec.Learned(offset):
            return LearnedPosition(s.max_len, s.d_model, offset)
        case spec.Rotary(theta, layout, scaling, fraction, _):
            rotate_pairs = rotate_halves if layout == "halves" else rotate_interleaved
            kind = RotaryPosition if fraction == 1 else PartialRotaryPosition
            return kind(s.position.width(s.d_head), theta, rotate_pairs, scaling)
        case spec.Relative(n_buckets, max_distance):
            return RelativePosition(s.n_heads, n_buckets, max_distance, causal)
        case spec.Alibi():
            return AlibiPosition(s.n_heads)
    raise AssertionError(s.position)


class SinusoidalPosition(Position):
    """Sinusoidal position embeddings."""

    def __init__(self, d_model: int, interleaved: bool) -> None:
        super().__init__()
        self.d_model = d_model
        self.interleaved = interleaved

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """Add the embedding of each position."""
        return x + self.encodings(positions).to(x.dtype)

    def encodings(self, positions: Tensor) -> Tensor:
        """Return the embeddings [B, S, D] of positions [B, S]; any position has one."""
        # In float32 an angle of a thousand periods is off in the fourth digit; Apple's GPUs have no float64.
        exact = torch.float32 if positions.device.type == "mps" else torch.float64
        pairs = torch.arange(0, self.d_model, 2, device=positions.device, dtype=exact)
        angles = positions[..., None] * 10_000.0 ** (-pairs / self.d_model)
        waves = (angles.sin(), angles.cos())
        return torch.stack(waves, -1).flatten(-2) if self.interleaved else torch.cat(waves, -1)


class LearnedPosition(Position):
    """Learned position embeddings."""

    def __init__(self, max_len: int, d_model: int, offset: int) -> None:
        super().__init__()
        self.max_len = max_len
        self.offset = offset
        self.table = Embedding(max_len + offset, d_model)

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """Add the embedding of each position; raise beyond the table."""
        if can_read(positions):
            longest = int(positions.max()) + 1
            if longest > self.max_len:
                raise InputError(f"the sequence is {longest} long, but max_len is {self.max_len}; shorten it.")
        vectors: Tensor = self.table(positions + self.offset)
        return x + vectors


class RotaryPosition(Position):
    """Rotary position embeddings (RoPE): pairs of coordinates rotated by an angle proportional to the position."""

    def __init__(
        self,
        d_head: int,
        theta: float,
        rotate_pairs: Callable[[Tensor, Tensor, Tensor], Tensor],
        scaling: spec.NoScaling | spec.LinearScaling | spec.Llama3Scaling | spec.YarnScaling,
    ) -> None:
        super().__init__()
        self.d_head = d_head
        self.theta = theta
        self.rotate_pairs = rotate_pairs
        self.scaling = scaling.kind
        self.rescale, self.attention_factor = make_scaling(scaling, d_head, theta)

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> Rotate:
        """Return the rotation at these positions."""
        frequencies = self.frequencies(positions.device)
        angles = positions[:, None, :, None].float() * frequencies  # [B, 1, S, d / 2]
        cos, sin = (angles.cos() * self.attention_factor).to(dtype), (angles.sin() * self.attention_factor).to(dtype)
        return lambda x: self.rotate_pairs(x, cos, sin)

    def frequencies(self, device: torch.device) -> Tensor:
        """Return the frequency of each pair of coordinates, [d / 2]."""
        # Angles stay in float32 in every model: pretrained weights expect that rounding.
        pairs = torch.arange(0, self.d_head, 2, device=device, dtype=torch.float32)
        return self.rescale(1.0 / self.theta ** (pairs / self.d_head))


class PartialRotaryPosition(RotaryPosition):
    """Rotary position embeddings of the first `d_head` coordinates of each head; the others stay as they are."""

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> Rotate:
        """Return the rotation at these positions."""
        rotate, width = super().rotation(positions, dtype), self.d_head
        return lambda x: torch.cat((rotate(x[..., :width]), x[..., width:]), dim=-1)


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (k, k + d/2), as in Hugging Face's Llama weights."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def rotate_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (2k, 2k + 1), as in the RoPE paper."""
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2).to(x.dtype)


def make_scaling(
    choice: spec.NoScaling | spec.LinearScaling | spec.Llama3Scaling | spec.YarnScaling, d_head: int, theta: float
) -> tuple[Callable[[Tensor], Tensor], float]:
    """Return the scaling of the frequencies [d / 2] for longer contexts, and the scale of the rotated vectors."""
    match choice:
        case spec.NoScaling():
            return _unchanged, 1.0
        case spec.LinearScaling(factor):
            return functools.partial(linear_scaling, factor=factor), 1.0
        case spec.Llama3Scaling(factor, low, high, original):
            return functools.partial(llama3_scaling, factor=factor, low=low, high=high, original=original), 1.0
        case spec.YarnScaling(factor, original, fast, slow, attention_factor):

            def pair_with(rotations: float) -> float:  # over the original length
                return d_head * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

            first = max(math.floor(pair_with(fast)), 0)
            last = min(math.ceil(pair_with(slow)), d_head - 1)
            default = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
            rescale = functools.partial(yarn_scaling, factor=factor, first=first, last=last)
            return rescale, default if attention_factor is None else attention_factor
        case _:
            assert_never(choice)


def linear_scaling(frequencies: Tensor, factor: float) -> Tensor:
    """Divide every frequency by the factor."""
    return frequencies / factor


def llama3_scaling(frequencies: Tensor, factor: float, low: float, high: float, original: int) -> Tensor:
    """Divide frequencies of few rotations over the original length, keep those of many, and interpolate between."""
    rotations = original * frequencies / (2 * math.pi)
    keep = ((rotations - low) / (high - low)).clamp(0, 1)
    return frequencies * keep + frequencies / factor * (1 - keep)


def yarn_scaling(frequencies: Tensor, factor: float, first: int, last: int) -> Tensor:
    """Keep frequencies up to pair `first`, divide those from `last` on, and interpolate between."""
    index = torch.arange(len(frequencies), device=frequencies.device, dtype=torch.float32)
    keep = 1 - ((index - first) / max(last - first, 0.001)).clamp(0, 1)
    return frequencies * keep + frequencies / factor * (1 - keep)


class RelativePosition(Position):
    """T5's relative position bias: a learned value per head and bucket of distances, logarithmic for far ones."""

    def __init__(self, n_heads: int, n_buckets: int, max_distance: int, causal: bool) -> None:
        super().__init__()
        self.table = Embedding(n_buckets, n_heads)
        self.max_distance = max_distance
        self.causal = causal

    def bias(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Look up the bias of every query-key distance."""
        return self.table(self.bucket(keys[:, None, :] - queries[:, :, None])).permute(0, 3, 1, 2)

    def bucket(self, offset: Tensor) -> Tensor:
        """Return the bucket of each offset, key position minus query position."""
        n_buckets = self.table.num_embeddings
        if self.causal:
            side: Tensor | int = 0
            distance = (-offset).clamp(min=0)
        else:  # half the buckets for earlier keys, half for later ones
            n_buckets //= 2
            side = (offset > 0).long() * n_buckets
            distance = offset.abs()
        exact = n_buckets // 2
        growth = (distance.clamp(min=1).float() / exact).log() / math.log(self.max_distance / exact)
        far = (exact + (growth * (n_buckets - exact)).long()).clamp(max=n_buckets - 1)
        return side + torch.where(distance < exact, distance, far)


class AlibiPosition(Position):
    """ALiBi: a penalty of slope times distance, with a geometric sequence of slopes over the heads."""

    def __init__(self, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads

    def bias(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return the negative slope times the distance."""
        distance = (queries[:, None, :, None] - keys[:, None, None, :]).abs()
        return -distance * alibi_slopes(self.n_heads, keys.device)[:, None, None]


def alibi_slopes(n_heads: int, device: torch.device) -> Tensor:
    """Return the slopes 2 ** (-8 / n), its square, its cube, ...; as in the paper where n is no power of two.

    >>> alibi_slopes(4, torch.device("cpu"))
    tensor([0.2500, 0.0625, 0.0156, 0.0039])
    """
    power = 2 ** math.floor(math.log2(n_heads))
    steps = torch.arange(1, power + 1, device=device)
    between = torch.arange(1, 2 * power, 2, device=device)[: n_heads - power]
    return torch.exp2(torch.cat([-8 / power * steps, -4 / power * between]))
