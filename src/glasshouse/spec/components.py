"""The components of a model, each a union of small dataclasses distinguished by `kind`.

A setting belongs to its component, so a rotary base cannot be combined with learned positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from glasshouse.config import Settings, require


def require_positive(choice: Settings, *fields: str) -> None:
    """Raise ConfigError for a number that is zero, negative, infinite or NaN."""
    for field in fields:
        value = getattr(choice, field)
        require(value > 0 and math.isfinite(value), f"{choice.kind}.{field}", value, "above 0")


# Positions --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NoScaling(Settings):
    """Unscaled rotary frequencies."""

    kind: ClassVar[str] = "none"


@dataclass(frozen=True)
class LinearScaling(Settings):
    """Linear position interpolation: all frequencies divided by one factor."""

    kind: ClassVar[str] = "linear"
    factor: float

    def check(self) -> None:
        require_positive(self, "factor")


@dataclass(frozen=True)
class Llama3Scaling(Settings):
    """The scaling of Llama 3.1 and later: low frequencies divided by the factor, high ones kept, a ramp between."""

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
    """YaRN: like `Llama3Scaling` with the ramp in rotations, and an attention temperature for the longer context."""

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
        require(self.beta_fast < 1e9, "yarn.beta_fast", self.beta_fast, "a number of rotations")
        require(self.beta_slow > 1e-9, "yarn.beta_slow", self.beta_slow, "a number of rotations")


@dataclass(frozen=True)
class NoPosition(Settings):
    """No position encoding (NoPE); a decoder can infer positions from the causal mask."""

    kind: ClassVar[str] = "none"


@dataclass(frozen=True)
class Sinusoidal(Settings):
    """Fixed sinusoids added to the token embeddings: interleaved in pairs, or sines first in halves."""

    kind: ClassVar[str] = "sinusoidal"
    layout: Literal["pairs", "halves"] = "pairs"


@dataclass(frozen=True)
class Learned(Settings):
    """Learned position embeddings for `max_len` positions; the first `offset` rows of the table are unused."""

    kind: ClassVar[str] = "learned"
    offset: int = 0

    def check(self) -> None:
        require(self.offset >= 0, "learned.offset", self.offset, "0 or above")


@dataclass(frozen=True)
class Rotary(Settings):
    """Rotary position embedding (RoPE) of queries and keys."""

    kind: ClassVar[str] = "rotary"
    theta: float = 10_000.0
    layout: Literal["halves", "pairs"] = "halves"
    scaling: NoScaling | LinearScaling | Llama3Scaling | YarnScaling = NoScaling()

    def check(self) -> None:
        require(1 < self.theta < math.inf, "rotary.theta", self.theta, "above 1")


@dataclass(frozen=True)
class Relative(Settings):
    """T5's relative position bias on the scores: learned per head and distance bucket, shared by all layers."""

    kind: ClassVar[str] = "relative"
    n_buckets: int = 32
    max_distance: int = 128

    def check(self) -> None:
        require(self.n_buckets >= 4, "relative.n_buckets", self.n_buckets, "at least 4")
        rule = f"above half of n_buckets ({self.n_buckets})"
        require(self.max_distance > self.n_buckets // 2, "relative.max_distance", self.max_distance, rule)


@dataclass(frozen=True)
class Alibi(Settings):
    """ALiBi: a bias on the scores linear in the distance, with a fixed slope per head."""

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
    """Gated linear unit with a SiLU gate."""

    kind: ClassVar[str] = "swiglu"


@dataclass(frozen=True)
class GeGLU(Settings):
    """Gated linear unit with a GELU gate."""

    kind: ClassVar[str] = "geglu"
    tanh: bool = False


FeedForward = Relu | ReluSquared | Gelu | Silu | SwiGLU | GeGLU


# Heads ------------------------------------------------------------------------------------------------------

Pooling = Literal["first", "mean", "last"]


@dataclass(frozen=True)
class NoHead(Settings):
    """The hidden states, [batch, length, d_model]."""

    kind: ClassVar[str] = "none"


@dataclass(frozen=True)
class Pooled(Settings):
    """One vector per sequence, [batch, d_model]; `dense` adds BERT's linear layer and tanh."""

    kind: ClassVar[str] = "pooled"
    pooling: Pooling = "mean"
    dense: bool = False


@dataclass(frozen=True)
class NextToken(Settings):
    """Causal language-model head: logits over the vocabulary, with tied embeddings or its own matrix."""

    kind: ClassVar[str] = "next_token"
    tied: bool = True
    bias: bool = False


@dataclass(frozen=True)
class MaskedToken(Settings):
    """Masked language-model head; `transform` adds BERT's linear layer, activation and norm before the logits."""

    kind: ClassVar[str] = "masked_token"
    tied: bool = True
    bias: bool = True
    transform: bool = True


@dataclass(frozen=True)
class SequenceClassification(Settings):
    """Logits over labels per sequence; `dense` adds BERT's linear layer and tanh before them."""

    kind: ClassVar[str] = "sequence_classification"
    n_labels: int
    pooling: Pooling = "first"
    dense: bool = True
    labels: tuple[str, ...] = ()  # their names, if any

    def check(self) -> None:
        require_labels(self)


@dataclass(frozen=True)
class TokenClassification(Settings):
    """Logits over labels per token."""

    kind: ClassVar[str] = "token_classification"
    n_labels: int
    labels: tuple[str, ...] = ()  # their names, if any

    def check(self) -> None:
        require_labels(self)


def require_labels(head: SequenceClassification | TokenClassification) -> None:
    """Raise ConfigError for fewer than one label, or for another number of names."""
    require_positive(head, "n_labels")
    rule = f"{head.n_labels} different names, or none"
    fits = len(head.labels) in (0, head.n_labels) and len(set(head.labels)) == len(head.labels)
    require(fits, f"{head.kind}.labels", head.labels, rule)


Head = NoHead | Pooled | NextToken | MaskedToken | SequenceClassification | TokenClassification


# Initialization ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Normal(Settings):
    """Normal distribution with one standard deviation for every matrix."""

    kind: ClassVar[str] = "normal"
    std: float = 0.02

    def check(self) -> None:
        require_positive(self, "std")


@dataclass(frozen=True)
class Xavier(Settings):
    """Xavier (Glorot) uniform for linear layers; embeddings with standard deviation d_model ** -0.5 (Vaswani)."""

    kind: ClassVar[str] = "xavier"


@dataclass(frozen=True)
class DepthScaled(Settings):
    """`Normal`, with residual projections divided by the square root of their number (GPT-2)."""

    kind: ClassVar[str] = "depth_scaled"
    std: float = 0.02

    def check(self) -> None:
        require_positive(self, "std")


@dataclass(frozen=True)
class ZeroOutput(Settings):
    """`Normal`, with residual projections at zero: every block starts as the identity."""

    kind: ClassVar[str] = "zero_output"
    std: float = 0.02

    def check(self) -> None:
        require_positive(self, "std")


Init = Normal | Xavier | DepthScaled | ZeroOutput
