"""benchmarks/claims.py keeps finished experiments, and runs again those whose code changed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from claims.experiments import FOLDER, PARTS, Part, Result


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/claims.py, under another name than the folder of these tests, with a folder of its own."""
    found = importlib.util.spec_from_file_location("claims_script", FOLDER.parent / "claims.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    monkeypatch.setitem(sys.modules, "claims_script", module)
    found.loader.exec_module(module)
    monkeypatch.setattr(module, "FINISHED", tmp_path)
    return module


def test_a_finished_part_is_run_again_only_if_its_code_changed(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []

    def experiment() -> Result:
        runs.append(1)
        return Result({"runs": len(runs)}, {"a curve": [(1.0, 2.0)]}, "x")

    monkeypatch.setitem(PARTS, "m7", Part(experiment, ("M7",), {}))
    first, again = script.run("m7"), script.run("m7")
    assert again.result.figures == first.result.figures == {"runs": 1}
    assert (again.key, again.on, again.seconds) == (first.key, first.on, first.seconds)
    monkeypatch.setattr(Part, "key", "of changed code")
    assert script.run("m7").result.figures == {"runs": 2}


def test_the_key_is_that_of_the_experiments_own_code() -> None:
    assert PARTS["m7"].key == PARTS["m8"].key != PARTS["p9"].key  # the first two are in one file
