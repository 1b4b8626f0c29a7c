"""The interface that reports the progress of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from glasshouse.training.step import StepMetrics
    from glasshouse.training.throughput import Throughput


class ProgressReporter(Protocol):
    """Receives the progress of a run."""

    def stage(self, name: str, done: int, total: int) -> None:
        """Report the progress of a phase; a total of 0 means unknown."""
        return

    def log(self, text: str) -> None:
        """Report a message."""
        return

    def on_step_end(self, step: int, steps: int, metrics: StepMetrics, throughput: Throughput) -> None:
        """Report the metrics of a step."""
        return

    def on_validation_end(self, step: int, metrics: dict[str, float]) -> None:
        """Report the validation metrics."""
        return


class SilentReporter(ProgressReporter):
    """Reports nothing."""
