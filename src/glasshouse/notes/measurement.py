"""What `make claims` measured, in measured.json, and how it compares with the thresholds of the statements."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from glasshouse.notes.statement import Statement, Threshold

PATH = Path(__file__).parent / "measured.json"


@dataclass(frozen=True)
class Measurement:
    """Figures and curves of a statement that needs training."""

    on: str  # date
    figures: Mapping[str, float]
    curves: Mapping[str, list[tuple[float, float]]]
    along: str  # what the curves are drawn along


@cache
def measurements() -> dict[str, Measurement]:
    """Return what was measured last, by the number of the statement."""
    return {number: Measurement(**one) for number, one in json.loads(PATH.read_text(encoding="utf-8")).items()}


def save(found: Mapping[str, Measurement]) -> None:
    """Replace these measurements, and keep the others; each is a line."""
    kept = sorted({**measurements(), **found}.items())
    rows = ",\n".join(f"{json.dumps(number)}: {json.dumps(asdict(one), sort_keys=True)}" for number, one in kept)
    PATH.write_text(f"{{\n{rows}\n}}\n", encoding="utf-8")


@dataclass(frozen=True)
class Verdict:
    """A figure beside its threshold.

    >>> wanted = Threshold("accuracy", at_least=0.99)
    >>> Verdict(wanted, 1.0).holds, Verdict(wanted, 0.5).as_stated, Verdict(wanted, float("nan")).holds
    (True, False, False)
    >>> str(Verdict(wanted, 1.0))
    'accuracy: 1 (at least 0.99)'
    """

    threshold: Threshold
    value: float

    @property
    def holds(self) -> bool:
        """Whether the threshold is reached; NaN never is."""
        low, high = self.threshold.at_least, self.threshold.at_most
        return (low is None or self.value >= low) and (high is None or self.value <= high)

    @property
    def as_stated(self) -> bool:
        """Whether it holds, or fails where the notes say that it does."""
        return self.holds == self.threshold.holds

    def __str__(self) -> str:
        low, high = self.threshold.at_least, self.threshold.at_most
        wanted = [f"{side} {bound:g}" for side, bound in (("at least", low), ("at most", high)) if bound is not None]
        said = " and ".join(wanted) + ("" if self.threshold.holds else ", which is not reached at this size")
        return f"{self.threshold.figure}: {self.value:.4g} ({said})"


def verdicts(statement: Statement, figures: Mapping[str, float]) -> list[Verdict]:
    """Compare figures with the thresholds of a statement."""
    return [Verdict(one, figures.get(one.figure, float("nan"))) for one in statement.thresholds]
