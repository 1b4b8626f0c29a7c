"""Schemes of weight initialization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from glasshouse.config import Settings, require_positive


@dataclass(frozen=True)
class Normal(Settings):
    """Normal distribution with one standard deviation for every matrix."""

    kind: ClassVar[str] = "normal"
    std: float = 0.02  # standard deviation

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
    std: float = 0.02  # standard deviation

    def check(self) -> None:
        require_positive(self, "std")


@dataclass(frozen=True)
class ZeroOutput(Settings):
    """`Normal`, with residual projections at zero: every block starts as the identity."""

    kind: ClassVar[str] = "zero_output"
    std: float = 0.02  # standard deviation

    def check(self) -> None:
        require_positive(self, "std")


@dataclass(frozen=True)
class FanIn(Settings):
    """Normal distribution of standard deviation 1 / sqrt(inputs) for linear layers, residual projections at zero.

    For Muon: embeddings are large, and the logits of an untied head begin near zero. Where the head is tied to the
    token embedding, embeddings have a standard deviation of 1 / sqrt(d_model) instead, for logits of 1.
    """

    kind: ClassVar[str] = "fan_in"
    embedding_std: float = 1.0  # standard deviation of embeddings
    head_std: float = 0.001  # standard deviation of the matrix of an untied head

    def check(self) -> None:
        require_positive(self, "embedding_std", "head_std")


Init = Normal | Xavier | DepthScaled | ZeroOutput | FanIn
