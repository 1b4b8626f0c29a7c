"""Runs of a few steps, without what would take longer than they do."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_loop import write_data

from glasshouse import device
from glasshouse.training import plots


@pytest.fixture
def data_folder(tmp_path: Path) -> Path:
    """A folder with data."""
    write_data(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def _brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure no peak and draw no plots: what they are is tried by themselves, that they are made in tests/cli."""
    monkeypatch.setattr(device, "measure_peak_flops", lambda *_, **__: 1e12)
    monkeypatch.setattr(plots, "draw", lambda *_: [])
