"""Short runs, without the slow parts."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import write_data

from glasshouse import device
from glasshouse.training import plots


@pytest.fixture
def data_folder(tmp_path: Path) -> Path:
    """A folder with data."""
    write_data(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def _skip_peak_and_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the matmul peak and the plots: they have tests of their own, and tests/cli runs them in full."""
    monkeypatch.setattr(device, "measure_peak_flops", lambda *_, **__: 1e12)
    monkeypatch.setattr(plots, "draw", lambda *_: [])
