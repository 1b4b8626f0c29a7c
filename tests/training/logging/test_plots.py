"""Plots show the values of the journal, parsed from the files."""

from __future__ import annotations

import json
import math
import re
import struct
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
import numpy as np
import processes
import pytest
from hypothesis import given
from hypothesis import strategies as st

from glasshouse.training.logging.journal import Journal
from glasshouse.training.logging.plots import _downsampled, _smoothed, draw

pytestmark = pytest.mark.slow

SVG = "{http://www.w3.org/2000/svg}"


def journal_of(folder: Path, entries: list[dict[str, Any]]) -> Journal:
    journal = Journal(folder / "metrics.jsonl")
    journal.path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return journal


def texts(folder: Path) -> list[str]:
    return [node.text or "" for node in ElementTree.parse(folder / "plots.svg").iter(f"{SVG}text")]


def points(folder: Path, name: str) -> list[tuple[float, float]]:
    """Return where the points of a line stand on the page, in order; y grows downwards."""
    tree = ElementTree.parse(folder / "plots.svg")
    group = next(node for node in tree.iter(f"{SVG}g") if node.get("id") == name)
    paths = [path for path in group.findall(f"{SVG}path") if path.get("d")]
    return [(float(x), float(y)) for path in paths for x, y in re.findall(r"[ML] (\S+) (\S+)", path.get("d", ""))]


def test_plots_are_labelled(tmp_path: Path) -> None:
    entries: list[dict[str, Any]] = [
        {"step": s, "loss": 5.0 - s / 10, "lr": 0.001, "grad_norm": 0.9} for s in range(30)
    ]
    entries[10]["validation_loss"], entries[20]["validation_loss"], entries[29]["validation_loss"] = 4.2, 3.25, 3.5
    assert draw(journal_of(tmp_path, entries), tmp_path) == [tmp_path / "plots.png", tmp_path / "plots.svg"]
    labels = texts(tmp_path)
    assert {"loss", "learning rate", "gradient norm", "step", "training", "training, smoothed"} < set(labels)
    assert "validation, lowest 3.25 at step 20" in labels
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "plots.png", "plots.svg"]
    head = (tmp_path / "plots.png").read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", head[16:24]) == (1200, 1275)  # 8 by 8.5 inches at 150 to the inch


def test_points_are_in_proportion(tmp_path: Path) -> None:
    losses = [4.0, 3.0, 3.5, 2.0]
    steps = [0, 1, 2, 10]
    draw(journal_of(tmp_path, [{"step": s, "loss": v} for s, v in zip(steps, losses, strict=True)]), tmp_path)
    drawn = points(tmp_path, "training")
    (left, top), (right, bottom) = drawn[0], drawn[-1]
    for (x, y), step, loss in zip(drawn, steps, losses, strict=True):
        # the page is written to a millionth of a point
        assert (x - left) / (right - left) == pytest.approx(step / 10, abs=1e-6)
        assert (y - top) / (bottom - top) == pytest.approx((4.0 - loss) / 2.0, abs=1e-6)


def test_non_numbers_are_left_out(tmp_path: Path) -> None:
    entries: list[dict[str, Any]] = [{"step": s, "loss": 3.0, "lr": 0.1, "grad_norm": 1.0} for s in range(9)]
    entries[2]["loss"], entries[3]["loss"], entries[4]["loss"] = math.inf, math.nan, None
    del entries[5]["grad_norm"]
    entries[6]["lr"] = "fast"
    entries[1]["validation_loss"], entries[7]["validation_loss"] = 3.0, -math.inf
    draw(journal_of(tmp_path, entries), tmp_path)
    assert {name: len(points(tmp_path, name)) for name in ("training", "lr", "grad_norm", "validation")} == {
        "training": 5,  # the line with a word as lr is damaged and skipped
        "lr": 8,
        "grad_norm": 7,
        "validation": 1,
    }


@pytest.mark.long
def test_a_long_run_is_downsampled_and_keeps_its_spikes(tmp_path: Path) -> None:
    entries = [{"step": s, "loss": 2.0 + s % 2, "lr": 0.1, "grad_norm": 1.0} for s in range(30_000)]
    entries[17_777]["loss"] = 9.0
    draw(journal_of(tmp_path, entries), tmp_path)
    drawn = points(tmp_path, "training")
    assert 1000 <= len(drawn) <= 2000
    highest = min(drawn, key=lambda point: point[1])
    # from 2 to 9 the spike stands seven times as high as a loss of 3
    lowest, common = max(y for _, y in drawn), sorted(y for _, y in drawn)[1]
    assert lowest - highest[1] == pytest.approx(7 * (lowest - common), abs=1e-4)
    (left, _), (right, _) = drawn[0], drawn[-1]
    # the first and last point may be any of the thirty that share a stretch
    assert (highest[0] - left) / (right - left) == pytest.approx(17_777 / 29_999, abs=60 / 29_999)


def test_log_scale_for_a_wide_range(tmp_path: Path) -> None:
    entries = [{"step": s, "loss": 10.0**s, "lr": 0.1, "grad_norm": 5.0 + s} for s in range(4)]
    draw(journal_of(tmp_path, entries), tmp_path)
    heights = [y for _, y in points(tmp_path, "training")]
    assert np.diff(heights) == pytest.approx([heights[1] - heights[0]] * 3, abs=1e-4)
    norms = [y for _, y in points(tmp_path, "grad_norm")]
    assert np.diff(norms) == pytest.approx([norms[1] - norms[0]] * 3, abs=1e-4)


@given(values=st.lists(st.floats(-1e6, 1e6), max_size=200), twice=st.booleans())
def test_smoothing_against_a_slow_reference(values: list[float], twice: bool) -> None:
    values = values * 2 if twice else values
    steps, smooth = _smoothed((np.arange(len(values)) * 3.0, np.array(values)))
    radius = max(1, len(values) // 50)
    expected = []
    for i in range(len(values)):
        around = sorted(values[max(0, i - radius) : i + min(i, radius) + 1])
        half = len(around) // 2
        expected.append(around[half] if len(around) % 2 else (around[half - 1] + around[half]) / 2)
    assert steps.tolist() == [3.0 * i for i in range(len(values))]
    assert smooth.tolist() == pytest.approx(expected)


@given(count=st.integers(0, 9000), seed=st.integers(0, 99))
def test_downsampling_keeps_order_and_extremes(count: int, seed: int) -> None:
    steps, values = np.arange(count) * 2.0, np.random.default_rng(seed).normal(size=count)
    kept, course = _downsampled((steps, values))
    assert len(kept) <= 2000
    assert (np.diff(kept) > 0).all()
    assert (values[(kept / 2).astype(int)] == course).all()
    if count:
        assert course.min() == values.min()
        assert course.max() == values.max()


@pytest.mark.parametrize("count", [0, 1])
def test_nothing_to_draw(count: int, tmp_path: Path) -> None:
    assert draw(journal_of(tmp_path, [{"step": 0, "loss": 1.0}] * count), tmp_path) == []
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_lines_without_any_number_are_drawn_empty(tmp_path: Path) -> None:
    assert len(draw(journal_of(tmp_path, [{"step": 0}, {"step": 1}]), tmp_path)) == 2


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = journal_of(tmp_path, [{"step": 0, "loss": 1.0}, {"step": 1, "loss": 1.0}])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert draw(journal, tmp_path) == []


@pytest.mark.long
def test_the_same_journal_gives_the_same_bytes_and_settings_stay(tmp_path: Path) -> None:
    journal = journal_of(tmp_path, [{"step": s, "loss": 3.0, "lr": 0.1, "grad_norm": 1.0} for s in range(5)])
    before = dict(matplotlib.rcParams)
    first = [path.read_bytes() for path in draw(journal, tmp_path)]
    assert [path.read_bytes() for path in draw(journal, tmp_path)] == first
    assert dict(matplotlib.rcParams) == before


def test_a_failed_plot_keeps_the_previous_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = journal_of(tmp_path, [{"step": s, "loss": 3.0} for s in range(5)])
    before = [path.read_bytes() for path in draw(journal, tmp_path)]

    def torn(self: object, path: Path, **settings: object) -> None:
        path.write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", torn)
    with pytest.raises(OSError, match="No space"):
        draw(journal, tmp_path)
    assert [(tmp_path / f"plots.{kind}").read_bytes() for kind in ("png", "svg")] == before


@pytest.mark.long
def test_pyplot_is_not_touched(tmp_path: Path) -> None:
    """In a process of its own, since another test may have imported it."""
    code = f"""
import sys
from pathlib import Path
from glasshouse.training.logging import plots
from glasshouse.training.logging.journal import Journal
assert "matplotlib" not in sys.modules
journal = Journal(Path({str(tmp_path)!r}) / "metrics.jsonl")
journal.write(0, loss=1.0)
journal.write(1, loss=1.0)
assert len(plots.draw(journal, Path({str(tmp_path)!r}))) == 2
assert "matplotlib.pyplot" not in sys.modules
"""
    assert processes.run(exec, code) == 0
