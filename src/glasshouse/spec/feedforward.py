"""Feed-forward layers: each kind with its activation and its parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from glasshouse.config import Settings

if TYPE_CHECKING:
    from glasshouse.spec.model import TransformerSpec


class FeedForwardKind(Settings):
    """Two linear layers with an activation between; if gated, a third one, and its activated output multiplies."""

    gated: ClassVar[bool] = False

    def n_parameters(self, s: TransformerSpec) -> int:
        """Return the number of parameters of one layer."""
        d_up = s.d_ff * (2 if self.gated else 1)
        return s.d_model * d_up + s.d_ff * s.d_model + s.ffn_bias * (d_up + s.d_model)


@dataclass(frozen=True)
class Relu(FeedForwardKind):
    """max(x, 0)."""

    kind: ClassVar[str] = "relu"


@dataclass(frozen=True)
class ReluSquared(FeedForwardKind):
    """max(x, 0) squared."""

    kind: ClassVar[str] = "relu2"


@dataclass(frozen=True)
class Gelu(FeedForwardKind):
    """x times the normal distribution's P(X < x), exact or by its tanh approximation."""

    kind: ClassVar[str] = "gelu"
    tanh: bool = False  # use the tanh approximation


@dataclass(frozen=True)
class Silu(FeedForwardKind):
    """x times its sigmoid, also called swish."""

    kind: ClassVar[str] = "silu"


@dataclass(frozen=True)
class SwiGLU(FeedForwardKind):
    """Gated linear unit with a SiLU gate."""

    kind: ClassVar[str] = "swiglu"
    gated: ClassVar[bool] = True


@dataclass(frozen=True)
class GeGLU(FeedForwardKind):
    """Gated linear unit with a GELU gate."""

    kind: ClassVar[str] = "geglu"
    gated: ClassVar[bool] = True
    tanh: bool = False  # use the tanh approximation


FeedForward = Relu | ReluSquared | Gelu | Silu | SwiGLU | GeGLU
