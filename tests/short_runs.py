"""Fixtures of all tests: runs measure no matmul peak and draw no plots, which would take longer than their steps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from glasshouse import device
from glasshouse.training import plots

PEAK, DRAW = device.measure_peak_flops, plots.draw


@pytest.fixture(scope="session", autouse=True)
def short_runs() -> Iterator[None]:
    """Leave both out of every run; they have tests of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "measure_peak_flops", lambda *_, **__: 1e12)
        patch.setattr(plots, "draw", lambda *_: [])
        yield


@pytest.fixture
def whole_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have both, as a user does."""
    monkeypatch.setattr(device, "measure_peak_flops", PEAK)
    monkeypatch.setattr(plots, "draw", DRAW)
