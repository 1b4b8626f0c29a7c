"""The experiments of `make claims`, importable as `trained_claims`."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path

from glasshouse import notes

__all__ = ["FOLDER", "PARTS", "Part", "Result", "assert_as_stated"]

FOLDER = Path(__file__).parents[2] / "benchmarks" / "trained_claims"

# Only this folder: a module of benchmarks/ would hide the folder of tests that has its name.
_found = importlib.util.spec_from_file_location(
    FOLDER.name, FOLDER / "__init__.py", submodule_search_locations=[str(FOLDER)]
)
assert _found is not None
sys.modules[FOLDER.name] = importlib.util.module_from_spec(_found)

from trained_claims.experiment import Result  # noqa: E402 - which is importable now
from trained_claims.parts import PARTS, Part  # noqa: E402


def assert_as_stated(number: str, figures: Mapping[str, float], *, only: str = "") -> None:
    """Check the thresholds of a statement, those whose figure's name contains a text if one is given."""
    found = [one for one in notes.verdicts(notes.statement(number), figures) if only in one.threshold.figure]
    assert found
    for one in found:
        assert one.as_stated, str(one)
