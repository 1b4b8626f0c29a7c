"""Feed-forward layers: each kind with its activation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from glasshouse import registry
from glasshouse.config import Settings


class FeedForward(Settings, registry.Kind):
    """Two linear layers with an activation between; if gated, a third one, and its activated output multiplies."""

    build_arguments = "the spec"

    gated: ClassVar[bool] = False


@dataclass(frozen=True)
class Relu(FeedForward):
    """max(x, 0)."""

    kind: ClassVar[str] = "relu"


@dataclass(frozen=True)
class ReluSquared(FeedForward):
    """max(x, 0) squared."""

    kind: ClassVar[str] = "relu2"


@dataclass(frozen=True)
class Gelu(FeedForward):
    """x times the normal distribution's P(X < x), exact or by its tanh approximation."""

    kind: ClassVar[str] = "gelu"
    tanh: bool = False  # use the tanh approximation


@dataclass(frozen=True)
class Silu(FeedForward):
    """x times its sigmoid, also called swish."""

    kind: ClassVar[str] = "silu"


@dataclass(frozen=True)
class SwiGLU(FeedForward):
    """Gated linear unit with a SiLU gate."""

    kind: ClassVar[str] = "swiglu"
    gated: ClassVar[bool] = True


@dataclass(frozen=True)
class GeGLU(FeedForward):
    """Gated linear unit with a GELU gate."""

    kind: ClassVar[str] = "geglu"
    gated: ClassVar[bool] = True
    tanh: bool = False  # use the tanh approximation


registry.add(Relu, ReluSquared, Gelu, Silu, SwiGLU, GeGLU)
