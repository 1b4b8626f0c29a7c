"""Short runs, without the slow parts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from runs import PutRun, table, write_data

from glasshouse.training import Run, train


@pytest.fixture
def data_folder(tmp_path: Path) -> Path:
    """A folder with data."""
    write_data(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def uninterrupted_runs() -> dict[str, Path]:
    """The folders of runs that were trained already, by their settings."""
    return {}


@pytest.fixture
def put_run(
    data_folder: Path, uninterrupted_runs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> PutRun:
    """Put an uninterrupted run into the folder; for the same settings it is trained once and then copied."""

    def put(out: str = "whole", kind: str = "decoder", **choices: Any) -> None:  # noqa: ANN401
        key = json.dumps([kind, choices], sort_keys=True)
        if key not in uninterrupted_runs:
            folder = tmp_path_factory.mktemp("uninterrupted")
            write_data(folder)
            train(Run.from_dict(table(folder, kind, **choices)))
            uninterrupted_runs[key] = folder / "run"
        shutil.copytree(uninterrupted_runs[key], data_folder / out)

    return put
