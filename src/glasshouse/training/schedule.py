"""Learning-rate schedules: a factor for each step, a pure function of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from glasshouse import registry
from glasshouse.config import Settings, require


@dataclass(frozen=True)
class Schedule(Settings, registry.Kind):
    """A schedule with a linear warm-up; a kind decides the factors after it."""

    warmup: int = 0  # [steps] over which the learning rate rises linearly

    def check(self) -> None:
        require(self.warmup >= 0, f"{self.kind}.warmup", self.warmup, "0 or more")

    def factor(self, step: int, steps: int) -> float:
        """Return the factor of the learning rate at a step, counted from 0, of `steps`."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        return self.after_warmup(step, steps)

    def first_difference(self, steps: int, other: int, taken: int) -> int | None:
        """Return the first of the steps `taken` whose factor would differ in a run of `other` steps, if any.

        >>> Cosine(warmup=10).first_difference(100, 200, taken=10), Cosine(warmup=10).first_difference(100, 200, 50)
        (None, 11)
        >>> WSD(decay_fraction=0.2).first_difference(100, 200, taken=80)
        """
        if steps == other:
            return None
        return next((step for step in range(taken) if self.factor(step, steps) != self.factor(step, other)), None)

    def after_warmup(self, step: int, steps: int) -> float:
        """Return the factor at a step after the warm-up."""
        return 1.0

    def progress(self, step: int, steps: int) -> float:
        """Return the progress from the end of the warm-up to the last step, 0 to 1."""
        return min(1.0, (step - self.warmup) / max(1, steps - 1 - self.warmup))


@dataclass(frozen=True)
class Constant(Schedule):
    """A constant learning rate after the warm-up.

    >>> [Constant(warmup=2).factor(step, 4) for step in range(4)]
    [0.5, 1.0, 1.0, 1.0]
    """

    kind: ClassVar[str] = "constant"


@dataclass(frozen=True)
class _Decaying(Schedule):
    final_factor: float = 0.1  # learning rate at the last step, as a fraction of the peak

    def check(self) -> None:
        super().check()
        require(0 <= self.final_factor <= 1, f"{self.kind}.final_factor", self.final_factor, "from 0 to 1")


@dataclass(frozen=True)
class Cosine(_Decaying):
    """Cosine decay to `final_factor`.

    >>> [round(Cosine(final_factor=0.0).factor(step, 5), 3) for step in range(5)]
    [1.0, 0.854, 0.5, 0.146, 0.0]
    """

    kind: ClassVar[str] = "cosine"

    def after_warmup(self, step: int, steps: int) -> float:
        return self.final_factor + (1 - self.final_factor) * (1 + math.cos(math.pi * self.progress(step, steps))) / 2


@dataclass(frozen=True)
class Linear(_Decaying):
    """Linear decay to `final_factor`.

    >>> [Linear(final_factor=0.0).factor(step, 5) for step in range(5)]
    [1.0, 0.75, 0.5, 0.25, 0.0]
    """

    kind: ClassVar[str] = "linear"

    def after_warmup(self, step: int, steps: int) -> float:
        return 1 - (1 - self.final_factor) * self.progress(step, steps)


@dataclass(frozen=True)
class WSD(_Decaying):
    """Warmup-stable-decay: constant, then a linear decay over the last part of the steps.

    >>> [WSD(final_factor=0.0, decay_fraction=0.5).factor(step, 9) for step in range(9)]
    [1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    """

    kind: ClassVar[str] = "wsd"
    decay_fraction: float = 0.2  # fraction of the steps after the warm-up over which the learning rate decays

    def check(self) -> None:
        super().check()
        require(
            0 < self.decay_fraction <= 1, f"{self.kind}.decay_fraction", self.decay_fraction, "above 0 and at most 1"
        )

    def after_warmup(self, step: int, steps: int) -> float:
        left = (1 - self.progress(step, steps)) / self.decay_fraction
        return self.final_factor + (1 - self.final_factor) * min(1.0, left)


@dataclass(frozen=True)
class InverseSqrt(Schedule):
    """The schedule of the original transformer: the inverse square root of the step.

    With a learning rate of d_model^-0.5 * warmup^-0.5 it equals the paper's at every step.

    >>> [round(InverseSqrt(warmup=4).factor(step, 100), 3) for step in (0, 3, 15, 63)]
    [0.25, 1.0, 0.5, 0.25]
    """

    kind: ClassVar[str] = "inverse_sqrt"

    def after_warmup(self, step: int, steps: int) -> float:
        return math.sqrt(max(1, self.warmup) / (step + 1))


registry.add(Constant, Cosine, Linear, WSD, InverseSqrt)
