"""Norms: each kind with its settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from glasshouse import registry
from glasshouse.config import Settings, require_positive


class Norm(Settings, registry.Kind):
    """What a model asks of its norm."""

    build_arguments = "its settings and the width"


@dataclass(frozen=True)
class LayerNorm(Norm):
    """Subtract the mean, divide by the standard deviation, scale and shift."""

    kind: ClassVar[str] = "layer"
    eps: float = 1e-5  # added to the variance
    bias: bool = True  # a learned shift

    def check(self) -> None:
        require_positive(self, "eps")


@dataclass(frozen=True)
class RMSNorm(Norm):
    """Divide by the root of the mean square and scale."""

    kind: ClassVar[str] = "rms"
    eps: float = 1e-6  # added to the mean square

    def check(self) -> None:
        require_positive(self, "eps")


registry.add(LayerNorm, RMSNorm)
