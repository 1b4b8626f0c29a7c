"""Who looks on while a run goes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from glasshouse.training.speed import Speed
    from glasshouse.training.update import Outcome


class Watch(Protocol):
    """What a run tells."""

    def stage(self, name: str, done: int, total: int) -> None:
        """Say how far a phase is; a total of 0 is one that is not known."""
        return

    def say(self, text: str) -> None:
        """Say something once."""
        return

    def step(self, step: int, steps: int, outcome: Outcome, speed: Speed) -> None:
        """Say how a step went."""
        return

    def evaluated(self, step: int, figures: dict[str, float]) -> None:
        """Say how the model fares on what is held out."""
        return


class Silent(Watch):
    """Keeps it all to itself."""
