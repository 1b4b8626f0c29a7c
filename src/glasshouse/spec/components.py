"""The choices a model is made of, each a union of small dataclasses that `kind` tells apart.

A setting lives inside the choice it belongs to, so a rotary base cannot exist beside learned positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from glasshouse.config import Settings, require


def require_positive(choice: Settings, *fields: str) -> None:
    """Refuse a number that is zero, negative, infinite or not a number."""
    for field in fields:
        value = getattr(choice, field)
        require(value > 0 and math.isfinite(value), f"{choice.kind}.{field}", value, "above 0")


# Positions --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NoScaling(Settings):
    """Angles as they were trained."""

    kind: ClassVar[str] = "none"


@dataclass(frozen=True)
class LinearScaling(Settings):
    """Every angle divided by one factor: positions squeezed into the trained length."""

    kind: ClassVar[str] = "linear"
    factor: float

    def check(self) -> None:
        require_positive(self, "factor")


@dataclass(frozen=True)
class Llama3Scaling(Settings):
    """Slow pairs divided by the factor, fast ones kept, a ramp between: the rule of Llama 3.1 and later."""

    kind: ClassVar[str] = "llama3"
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_len: int

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
    """Like `Llama3` with the ramp set in turns, and attention sharpened a little to make up for the length."""

    kind: ClassVar[str] = "yarn"
    factor: float
    original_max_len: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None  # None: 0.1 ln(factor) + 1, as published

    def check(self) -> None:
        require_positive(self, "factor", "original_max_len", "beta_fast", "beta_slow")
        if self.attention_factor is not None:
            require_positive(self, "attention_factor")
        require(self.beta_fast > self.beta_slow, "yarn.beta_fast", self.beta_fast, "above beta_slow")
        require(self.beta_fast < 1e9, "yarn.beta_fast", self.beta_fast, "a number of turns")
        require(self.beta_slow > 1e-9, "yarn.beta_slow", self.beta_slow, "a number of turns")


@dataclass(frozen=True)
class NoPosition(Settings):
    """No position at all; a causal mask alone still lets a decoder count."""

    kind: ClassVar[str] = "none"


@dataclass(frozen=True)
class Sinusoidal(Settings):
    """Fixed sines and cosines added to the token vectors: interleaved in pairs, or sines first in halves."""

    kind: ClassVar[str] = "sinusoidal"
    layout: Literal["pairs", "halves"] = "pairs"


@dataclass(frozen=True)
class Learned(Settings):
    """A trained table of `max_len` vectors added to the token vectors; `offset` rows before it stay unused."""

    kind: ClassVar[str] = "learned"
    offset: int = 0

    def check(self) -> None:
        require(self.offset >= 0, "learned.offset", self.offset, "0 or above")


@dataclass(frozen=True)
class Rotary(Settings):
    """Queries and keys turned by an angle that grows with the position, pair by pair."""

    kind: ClassVar[str] = "rotary"
    theta: float = 10_000.0
    layout: Literal["halves", "pairs"] = "halves"
    scaling: NoScaling | LinearScaling | Llama3Scaling | YarnScaling = NoScaling()

    def check(self) -> None:
        require(1 < self.theta < math.inf, "rotary.theta", self.theta, "above 1")


@dataclass(frozen=True)
class Relative(Settings):
    """A learned number per head and bucket of distance, added to the scores and shared by all layers (T5)."""

    kind: ClassVar[str] = "relative"
    n_buckets: int = 32
    max_distance: int = 128

    def check(self) -> None:
        require(self.n_buckets >= 4, "relative.n_buckets", self.n_buckets, "at least 4")
        rule = f"above half of n_buckets ({self.n_buckets})"
        require(self.max_distance > self.n_buckets // 2, "relative.max_distance", self.max_distance, rule)


@dataclass(frozen=True)
class Alibi(Settings):
    """Scores lowered in proportion to the distance, with a fixed slope per head."""

    kind: ClassVar[str] = "alibi"


Position = NoPosition | Sinusoidal | Learned | Rotary | Relative | Alibi


# Norms ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerNorm(Settings):
    """Subtract the mean, divide by the standard deviation, scale and shift."""

    kind: ClassVar[str] = "layer"
    eps: float = 1e-5
    bias: bool = True

    def check(self) -> None:
        require_positive(self, "eps")


@dataclass(frozen=True)
class RMSNorm(Settings):
    """Divide by the root of the mean square and scale."""

    kind: ClassVar[str] = "rms"
    eps: float = 1e-6

    def check(self) -> None:
        require_positive(self, "eps")


Norm = LayerNorm | RMSNorm


# Feed-forward -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Relu(Settings):
    """max(x, 0)."""

    kind: ClassVar[str] = "relu"


@dataclass(frozen=True)
class ReluSquared(Settings):
    """max(x, 0) squared."""

    kind: ClassVar[str] = "relu2"


@dataclass(frozen=True)
class Gelu(Settings):
    """x times the normal distribution's P(X < x), exact or by its tanh approximation."""

    kind: ClassVar[str] = "gelu"
    tanh: bool = False


@dataclass(frozen=True)
class Silu(Settings):
    """x times its sigmoid, also called swish."""

    kind: ClassVar[str] = "silu"


@dataclass(frozen=True)
class SwiGLU(Settings):
    """One map, passed through SiLU, gates another."""

    kind: ClassVar[str] = "swiglu"


@dataclass(frozen=True)
class GeGLU(Settings):
    """One map, passed through GELU, gates another."""

    kind: ClassVar[str] = "geglu"
    tanh: bool = False


FeedForward = Relu | ReluSquared | Gelu | Silu | SwiGLU | GeGLU


# Heads ------------------------------------------------------------------------------------------------------

Pooling = Literal["first", "mean", "last"]


@dataclass(frozen=True)
class NoHead(Settings):
    """The vectors themselves, [batch, length, d_model]."""

    kind: ClassVar[str] = "none"


@dataclass(frozen=True)
class Pooled(Settings):
    """One vector a sequence, [batch, d_model]; `dense` adds BERT's map and tanh."""

    kind: ClassVar[str] = "pooled"
    pooling: Pooling = "mean"
    dense: bool = False


@dataclass(frozen=True)
class NextToken(Settings):
    """Logits over the vocabulary, through the embedding matrix itself (tied) or a matrix of their own."""

    kind: ClassVar[str] = "next_token"
    tied: bool = True
    bias: bool = False


@dataclass(frozen=True)
class MaskedToken(Settings):
    """Logits over the vocabulary; `transform` puts BERT's map, activation and norm before them."""

    kind: ClassVar[str] = "masked_token"
    tied: bool = True
    bias: bool = True
    transform: bool = True


@dataclass(frozen=True)
class SequenceClassification(Settings):
    """Logits over labels, one set a sequence; `dense` puts BERT's map and tanh before them."""

    kind: ClassVar[str] = "sequence_classification"
    n_labels: int
    pooling: Pooling = "first"
    dense: bool = True
    labels: tuple[str, ...] = ()  # their names, where they have any

    def check(self) -> None:
        require_labels(self)


@dataclass(frozen=True)
class TokenClassification(Settings):
    """Logits over labels, one set a token."""

    kind: ClassVar[str] = "token_classification"
    n_labels: int
    labels: tuple[str, ...] = ()  # their names, where they have any

    def check(self) -> None:
        require_labels(self)


def require_labels(head: SequenceClassification | TokenClassification) -> None:
    """Refuse a number of labels below 1, or names that are not as many."""
    require_positive(head, "n_labels")
    rule = f"{head.n_labels} different names, or none"
    fits = len(head.labels) in (0, head.n_labels) and len(set(head.labels)) == len(head.labels)
    require(fits, f"{head.kind}.labels", head.labels, rule)


Head = NoHead | Pooled | NextToken | MaskedToken | SequenceClassification | TokenClassification


# Initialisation ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Normal(Settings):
    """Every matrix drawn from one normal distribution."""

    kind: ClassVar[str] = "normal"
    std: float = 0.02

    def check(self) -> None:
        require_positive(self, "std")


@dataclass(frozen=True)
class Xavier(Settings):
    """Glorot's uniform for the maps; token vectors of standard deviation d_model ** -0.5 (Vaswani)."""

    kind: ClassVar[str] = "xavier"


@dataclass(frozen=True)
class DepthScaled(Settings):
    """`Normal`, with what writes to the residual stream divided by the root of the number of writes (GPT-2)."""

    kind: ClassVar[str] = "depth_scaled"
    std: float = 0.02

    def check(self) -> None:
        require_positive(self, "std")


@dataclass(frozen=True)
class ZeroOutput(Settings):
    """`Normal`, with what writes to the residual stream at zero: every block starts as the identity."""

    kind: ClassVar[str] = "zero_output"
    std: float = 0.02

    def check(self) -> None:
        require_positive(self, "std")


Init = Normal | Xavier | DepthScaled | ZeroOutput
