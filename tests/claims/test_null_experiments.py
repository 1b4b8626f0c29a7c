"""No experiment of `make claims` passes without what it is about: training, norms, or scaled embeddings."""

from __future__ import annotations

import pytest

from claims.experiments import PARTS
from glasshouse import notes

QUICK = ("m7", "m10", "b6", "b8", "p9")
CASES = [pytest.param(part, marks=() if part in QUICK else pytest.mark.long) for part in PARTS]


@pytest.mark.parametrize("part", CASES)
def test_without_what_it_is_about_an_experiment_does_not_pass(part: str) -> None:
    figures = PARTS[part].run(**PARTS[part].null).figures
    for number in PARTS[part].statements:
        found = notes.verdicts(notes.statement(number), figures)
        measured = [one for one in found if one.value == one.value]  # NaN: sizes that the small run leaves out
        assert measured, f"the thresholds of {number} name no figure of {part}"
        failed = [one for one in measured if not one.as_stated]
        print(f"\n{number} without: {'; '.join(map(str, failed))}")
        assert failed, "; ".join(map(str, found))


def test_every_statement_with_a_threshold_has_an_experiment() -> None:
    with_thresholds = {one.number for part in notes.parts() for one in part.statements if one.thresholds}
    assert with_thresholds == {number for part in PARTS.values() for number in part.statements}
