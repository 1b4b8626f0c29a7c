"""Position encodings: each kind with its settings, its limit and the sizes that it needs.

A setting belongs to its kind, so a rotary base cannot be combined with learned positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from glasshouse import registry
from glasshouse.config import Settings, require, require_positive
from glasshouse.spec.init import Init, Xavier


@dataclass(frozen=True)
class NoScaling(Settings):
    """Unscaled rotary frequencies."""

    kind: ClassVar[str] = "none"


@dataclass(frozen=True)
class LinearScaling(Settings):
    """Linear position interpolation: all frequencies divided by one factor."""

    kind: ClassVar[str] = "linear"
    factor: float  # extension of the context length

    def check(self) -> None:
        require_positive(self, "factor")


@dataclass(frozen=True)
class Llama3Scaling(Settings):
    """The scaling of Llama 3.1 and later: low frequencies divided by the factor, high ones kept, a ramp between."""

    kind: ClassVar[str] = "llama3"
    factor: float  # extension of the context length
    low_freq_factor: float  # wavelengths above original_max_len / low_freq_factor are scaled fully
    high_freq_factor: float  # wavelengths below original_max_len / high_freq_factor are kept
    original_max_len: int  # [tokens] context length before the extension

    def check(self) -> None:
        require_positive(self, "factor", "low_freq_factor", "high_freq_factor", "original_max_len")
        rule = "above low_freq_factor"
        require(
            self.high_freq_factor > self.low_freq_factor,
            "llama3.high_freq_factor",
            self.high_freq_factor,
            rule,
        )


@dataclass(frozen=True)
class YarnScaling(Settings):
    """YaRN: like `Llama3Scaling` with the ramp in rotations, and an attention temperature for the longer context."""

    kind: ClassVar[str] = "yarn"
    factor: float  # extension of the context length
    original_max_len: int  # [tokens] context length before the extension
    beta_fast: float = 32.0  # [rotations] over original_max_len above which a frequency is kept
    beta_slow: float = 1.0  # [rotations] over original_max_len below which a frequency is scaled fully
    attention_factor: float | None = None  # factor of queries and keys; None: 0.1 ln(factor) + 1, as published

    def check(self) -> None:
        require_positive(self, "factor", "original_max_len", "beta_fast", "beta_slow")
        if self.attention_factor is not None:
            require_positive(self, "attention_factor")
        require(self.beta_fast > self.beta_slow, "yarn.beta_fast", self.beta_fast, "above beta_slow")
        require(self.beta_fast < 1e9, "yarn.beta_fast", self.beta_fast, "a number of rotations")
        require(self.beta_slow > 1e-9, "yarn.beta_slow", self.beta_slow, "a number of rotations")


class Position(Settings, registry.Kind):
    """Base class of position encodings; the defaults fit most kinds."""

    build_arguments = "the spec, and whether the stack is causal"

    init: ClassVar[Init | None] = None  # the initialization that it needs, if any
    scales_embeddings: ClassVar[bool] = False  # whether token embeddings are multiplied by sqrt(d_model) by default

    def check_sizes(self, d_model: int, d_head: int) -> None:
        """Raise ConfigError for a model whose sizes do not fit."""

    def limit(self, max_len: int) -> int | None:
        """Return the length of the longest possible sequence in a model with this max_len; None: any length."""
        return None


@dataclass(frozen=True)
class NoPosition(Position):
    """No position encoding (NoPE); a decoder can infer positions from the causal mask."""

    kind: ClassVar[str] = "none"


@dataclass(frozen=True)
class Sinusoidal(Position):
    """Fixed sinusoids added to the token embeddings: interleaved in pairs, or sines first in halves."""

    kind: ClassVar[str] = "sinusoidal"
    # Sinusoids have norm sqrt(d_model / 2) and are not trained: they would dominate embeddings with std 0.02.
    init: ClassVar[Init] = Xavier()
    scales_embeddings: ClassVar[bool] = True
    layout: Literal["pairs", "halves"] = "pairs"  # sines and cosines interleaved, or all sines first

    def check_sizes(self, d_model: int, d_head: int) -> None:
        require(d_model % 2 == 0, "d_model", d_model, "even, as sinusoidal positions come in pairs")


@dataclass(frozen=True)
class Learned(Position):
    """Learned position embeddings for `max_len` positions; the first `offset` rows of the table are unused."""

    kind: ClassVar[str] = "learned"
    offset: int = 0  # [rows] unused at the start of the table

    def check(self) -> None:
        require(self.offset >= 0, "learned.offset", self.offset, "0 or above")

    def limit(self, max_len: int) -> int:
        return max_len


@dataclass(frozen=True)
class Rotary(Position):
    """Rotary position embedding (RoPE) of queries and keys."""

    kind: ClassVar[str] = "rotary"
    theta: float = 10_000.0  # base of the wavelengths
    layout: Literal["halves", "pairs"] = "halves"  # coordinates rotated together: i and i + d_head / 2, or neighbours
    scaling: NoScaling | LinearScaling | Llama3Scaling | YarnScaling = NoScaling()  # extension of the context length
    # part of each head's coordinates, from the first on, that is rotated, as in GPT-NeoX; the others have no position
    fraction: float = field(default=1.0, metadata={"omit_default": True})
    # theta of layers with a sliding window, which are not scaled, as in Gemma 3; None: they are as the others
    local_theta: float | None = field(default=None, metadata={"omit_default": True})

    def check(self) -> None:
        require(1 < self.theta < math.inf, "rotary.theta", self.theta, "above 1")
        local = self.local_theta
        require(local is None or 1 < local < math.inf, "rotary.local_theta", local, "above 1")
        require(0 < self.fraction <= 1, "rotary.fraction", self.fraction, "above 0 and at most 1")

    def check_sizes(self, d_model: int, d_head: int) -> None:
        if self.fraction == 1:
            require(d_head % 2 == 0, "d_head", d_head, "even, as rotary positions rotate pairs")
        width = self.width(d_head)
        rule = f"a share of d_head = {d_head} that is even, as pairs are rotated, not {width}"
        require(width > 0 and width % 2 == 0, "rotary.fraction", self.fraction, rule)

    def width(self, d_head: int) -> int:
        """Return how many coordinates of a head are rotated."""
        return int(d_head * self.fraction)


@dataclass(frozen=True)
class Relative(Position):
    """T5's relative position bias on the scores: learned per head and distance bucket, shared by all layers."""

    kind: ClassVar[str] = "relative"
    n_buckets: int = 32  # number of distance buckets
    max_distance: int = 128  # [tokens] distance from which all share the last bucket

    def check(self) -> None:
        require(self.n_buckets >= 4, "relative.n_buckets", self.n_buckets, "at least 4")
        rule = f"above half of n_buckets ({self.n_buckets})"
        require(self.max_distance > self.n_buckets // 2, "relative.max_distance", self.max_distance, rule)


@dataclass(frozen=True)
class Alibi(Position):
    """ALiBi: a bias on the scores linear in the distance, with a fixed slope per head."""

    kind: ClassVar[str] = "alibi"


registry.add(NoPosition, Sinusoidal, Learned, Rotary, Relative, Alibi)
