"""Norms: each kind with its settings and its parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from glasshouse import registry
from glasshouse.config import Settings, require_positive


class Norm(Settings, registry.Kind):
    """What a model asks of its norm."""

    build_arguments = "its settings and the width"

    def n_parameters(self, width: int) -> int:
        """Return the number of parameters of a norm over `width` coordinates."""
        raise NotImplementedError


@dataclass(frozen=True)
class LayerNorm(Norm):
    """Subtract the mean, divide by the standard deviation, scale and shift."""

    kind: ClassVar[str] = "layer"
    eps: float = 1e-5  # added to the variance
    bias: bool = True  # a learned shift

    def check(self) -> None:
        require_positive(self, "eps")

    def n_parameters(self, width: int) -> int:
        return width * (2 if self.bias else 1)


@dataclass(frozen=True)
class RMSNorm(Norm):
    """Divide by the root of the mean square and scale."""

    kind: ClassVar[str] = "rms"
    eps: float = 1e-6  # added to the mean square

    def check(self) -> None:
        require_positive(self, "eps")

    def n_parameters(self, width: int) -> int:
        return width


registry.add(LayerNorm, RMSNorm)
