"""Fixtures of all tests: what runs do around their steps and takes longer than these is shortened or left out."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from glasshouse import device
from glasshouse.training.logging import checkpoint_log, plots

PEAK, DRAW, NEW_TOKENS = device.measure_peak_flops, plots.draw, checkpoint_log.NEW_TOKENS


@pytest.fixture(scope="session", autouse=True)
def short_runs() -> Iterator[None]:
    """Measure no matmul peak, draw no plots and sample few tokens; all of them have tests of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "measure_peak_flops", lambda *_, **__: 1e12)
        patch.setattr(plots, "draw", lambda *_: [])
        patch.setattr(checkpoint_log, "NEW_TOKENS", 4)
        yield


@pytest.fixture
def whole_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have all of it, as a user does."""
    monkeypatch.setattr(device, "measure_peak_flops", PEAK)
    monkeypatch.setattr(plots, "draw", DRAW)
    monkeypatch.setattr(checkpoint_log, "NEW_TOKENS", NEW_TOKENS)
