"""Trackers, checked with TensorBoard's reader and a fake wandb."""

from __future__ import annotations

import math
import sys
import time
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from glasshouse.errors import InputError
from glasshouse.training.logging.trackers import Trackers


def shown(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return what TensorBoard would show of each name: steps and values."""
    reader = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    reader.Reload()
    return {tag: [(event.step, event.value) for event in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


class Wandb(ModuleType):
    """Records its calls; it keeps one run, as wandb does for an id."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.inits: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.finished = 0
        self.broken = False

    def init(self, **settings: Any) -> SimpleNamespace:  # noqa: ANN401 (whatever it is reporter)
        self.inits.append(settings)
        return SimpleNamespace(log=self._log, finish=self._finish)

    def _log(self, numbers: dict[str, float], step: int) -> None:
        if self.broken:
            raise ConnectionError("the network is gone")
        self.logged.append((step, numbers))

    def _finish(self) -> None:
        if self.broken:
            raise ConnectionError("the network is gone")
        self.finished += 1


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Wandb:
    module = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_tensorboard_has_the_metrics_by_name(tmp_path: Path) -> None:
    trackers = Trackers(tmp_path, name="tiny")
    # these are exact in the 32 bits that TensorBoard keeps
    trackers.write(
        0, {"loss": 5.5, "n_targets": 4096, "note": "started", "averaged": True, "parts": [1], "best": None}
    )
    trackers.write(3, {"loss": 4.25, "validation_loss": 4.5, "validation_bits_per_byte": 1.5, "lost_validation_": 2})
    trackers.close()
    assert shown(tmp_path) == {
        "loss": [(0, 5.5), (3, 4.25)],
        "n_targets": [(0, 4096.0)],
        "validation/loss": [(3, 4.5)],
        "validation/bits_per_byte": [(3, 1.5)],
        "lost_validation_": [(3, 2.0)],
    }


def test_metrics_are_flushed_before_close(tmp_path: Path) -> None:
    """As it is for a run that is killed."""
    trackers = Trackers(tmp_path, name="tiny")
    for step in range(3):
        trackers.write(step, {"loss": 1.0 + step})
    assert shown(tmp_path) == {"loss": [(0, 1.0), (1, 2.0), (2, 3.0)]}
    trackers.close()


def test_infinity_is_written(tmp_path: Path) -> None:
    trackers = Trackers(tmp_path, name="tiny")
    trackers.write(0, {"grad_norm": math.inf})
    trackers.close()
    assert shown(tmp_path) == {"grad_norm": [(0, math.inf)]}


@pytest.mark.few(1)
@pytest.mark.parametrize("start", [0, 3, 5])
def test_a_resumed_run_shows_each_step_once(start: int, tmp_path: Path) -> None:
    first = Trackers(tmp_path, name="tiny")
    for step in range(5):
        first.write(step, {"loss": float(step)})
    first.close()
    time.sleep(1.1)  # TensorBoard orders files by the second they were created in
    second = Trackers(tmp_path, name="tiny", start=start)
    for step in range(start, 7):
        second.write(step, {"loss": 100.0 + step})
    second.close()
    assert shown(tmp_path) == {"loss": [(s, float(s) if s < start else 100.0 + s) for s in range(7)]}


def test_wandb_has_the_metrics_on_request(tmp_path: Path, wandb: Wandb) -> None:
    trackers = Trackers(tmp_path, wandb=True, name="tiny")
    trackers.write(7, {"loss": 5.1, "validation_loss": 5.2, "note": "x"})
    trackers.close()
    trackers.write(8, {"loss": 5.0})  # after the end it goes nowhere
    assert wandb.logged == [(7, {"loss": 5.1, "validation/loss": 5.2})]
    assert wandb.finished == 1
    assert [(one["dir"], one["name"]) for one in wandb.inits] == [(tmp_path, "tiny")]
    assert "mode" not in wandb.inits[0]  # left to wandb's environment variables
    assert shown(tmp_path).keys() == {"loss", "validation/loss"}


def test_a_resumed_run_keeps_its_wandb_id(tmp_path: Path, wandb: Wandb) -> None:
    (tmp_path / "other").mkdir()
    for folder, start in ((tmp_path, 1), (tmp_path, 5), (tmp_path / "other", 1)):
        Trackers(folder, wandb=True, name="tiny", start=start).close()
    first, second, other = (one["id"] for one in wandb.inits)
    assert first == second != other
    assert {one["resume"] for one in wandb.inits} == {"allow"}


def test_wandb_is_not_used_by_default(tmp_path: Path, wandb: Wandb) -> None:
    trackers = Trackers(tmp_path, name="tiny")
    trackers.write(0, {"loss": 1.0})
    trackers.close()
    assert wandb.inits == []
    assert [path.name for path in tmp_path.iterdir()] == ["tensorboard"]


def test_wandb_requested_but_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(InputError, match=r"not installed; run pip install 'glasshouse\[wandb\]'"):
        Trackers(tmp_path, wandb=True, name="tiny")
    assert list(tmp_path.iterdir()) == []


def test_without_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    trackers = Trackers(tmp_path, name="tiny")
    trackers.write(0, {"loss": 1.0})
    trackers.close()
    assert list(tmp_path.iterdir()) == []


def test_a_failing_tracker_warns_once_and_the_other_continues(tmp_path: Path, wandb: Wandb) -> None:
    trackers = Trackers(tmp_path, wandb=True, name="tiny")
    trackers.write(0, {"loss": 1.0})
    wandb.broken = True
    with pytest.warns(UserWarning, match="wandb failed .ConnectionError: the network is gone.") as caught:
        trackers.write(1, {"loss": 2.0})
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trackers.write(2, {"loss": 3.0})
        trackers.close()
    assert wandb.logged == [(0, {"loss": 1.0})]
    assert shown(tmp_path) == {"loss": [(0, 1.0), (1, 2.0), (2, 3.0)]}


def test_tensorboard_that_cannot_open_its_folder(tmp_path: Path, wandb: Wandb) -> None:
    (tmp_path / "tensorboard").write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match="TensorBoard failed") as caught:
        trackers = Trackers(tmp_path, wandb=True, name="tiny")
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trackers.write(0, {"loss": 1.0})
        trackers.close()
    assert wandb.logged == [(0, {"loss": 1.0})]


def test_a_tracker_that_fails_to_open_or_close(tmp_path: Path, wandb: Wandb, monkeypatch: pytest.MonkeyPatch) -> None:
    trackers = Trackers(tmp_path, wandb=True, name="tiny")
    wandb.broken = True
    with pytest.warns(UserWarning, match="wandb failed"):
        trackers.close()

    def refused(**settings: object) -> None:
        raise PermissionError("no key")

    monkeypatch.setattr(wandb, "init", refused)
    with pytest.warns(UserWarning, match="wandb failed .PermissionError: no key."):
        Trackers(tmp_path, wandb=True, name="tiny").close()
