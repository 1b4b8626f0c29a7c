"""Who looks on while a run goes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from glasshouse.training.step import StepMetrics
    from glasshouse.training.throughput import Throughput


class ProgressReporter(Protocol):
    """What a run tells."""

    def stage(self, name: str, done: int, total: int) -> None:
        """Say how far a phase is; a total of 0 is one that is not known."""
        return

    def log(self, text: str) -> None:
        """Say something once."""
        return

    def on_step_end(self, step: int, steps: int, outcome: StepMetrics, speed: Throughput) -> None:
        """Say how a step went."""
        return

    def on_validation_end(self, step: int, figures: dict[str, float]) -> None:
        """Say how the model fares on what is held out."""
        return


class SilentReporter(ProgressReporter):
    """Keeps it all to itself."""
