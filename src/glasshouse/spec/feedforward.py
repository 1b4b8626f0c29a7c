"""Feed-forward layers: each kind with its activation and its parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from glasshouse import registry
from glasshouse.config import Settings

if TYPE_CHECKING:
    from glasshouse.spec.model import TransformerSpec


class FeedForward(Settings, registry.Kind):
    """Two linear layers with an activation between; if gated, a third one, and its activated output multiplies."""

    build_arguments = "the spec"

    gated: ClassVar[bool] = False

    def n_parameters(self, s: TransformerSpec) -> int:
        """Return the number of parameters of one layer."""
        d_up = s.d_ff * (2 if self.gated else 1)
        return s.d_model * d_up + s.d_ff * s.d_model + s.ffn_bias * (d_up + s.d_model)


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
