"""Trackers, checked with TensorBoard's reader, fakes of wandb and MLflow, and MLflow itself where it is installed."""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import glasshouse as gh
from glasshouse.errors import InputError
from glasshouse.training.logging.trackers import (
    MetricsLogger,
    MLflow,
    TensorBoard,
    TrackedRun,
    Tracker,
    Trackers,
    Wandb,
)


def shown(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return what TensorBoard would show of each name: steps and values."""
    reader = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    reader.Reload()
    return {tag: [(event.step, event.value) for event in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


BOTH = (TensorBoard(), Wandb())


def opened(folder: Path, *choices: Tracker, start: int = 0) -> Trackers:
    """Open trackers, by default those of a run that names none."""
    return Trackers(choices or None, TrackedRun(folder, "tiny", start, {"train": {"steps": 9, "lr": 0.1}}))


class FakeWandb(ModuleType):
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
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    module = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_tensorboard_has_the_metrics_by_name(tmp_path: Path) -> None:
    trackers = opened(tmp_path)
    # these are exact in the 32 bits that TensorBoard keeps
    trackers.log(0, {"loss": 5.5, "n_targets": 4096, "note": "started", "averaged": True, "parts": [1], "best": None})
    trackers.log(3, {"loss": 4.25, "validation_loss": 4.5, "validation_bits_per_byte": 1.5, "lost_validation_": 2})
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
    trackers = opened(tmp_path)
    for step in range(3):
        trackers.log(step, {"loss": 1.0 + step})
    assert shown(tmp_path) == {"loss": [(0, 1.0), (1, 2.0), (2, 3.0)]}
    trackers.close()


def test_infinity_is_written(tmp_path: Path) -> None:
    trackers = opened(tmp_path)
    trackers.log(0, {"grad_norm": math.inf})
    trackers.close()
    assert shown(tmp_path) == {"grad_norm": [(0, math.inf)]}


@pytest.mark.few(1)
@pytest.mark.parametrize("start", [0, 3, 5])
def test_a_resumed_run_shows_each_step_once(start: int, tmp_path: Path) -> None:
    first = opened(tmp_path)
    for step in range(5):
        first.log(step, {"loss": float(step)})
    first.close()
    time.sleep(1.1)  # TensorBoard orders files by the second they were created in
    second = opened(tmp_path, start=start)
    for step in range(start, 7):
        second.log(step, {"loss": 100.0 + step})
    second.close()
    assert shown(tmp_path) == {"loss": [(s, float(s) if s < start else 100.0 + s) for s in range(7)]}


def test_wandb_has_the_metrics_on_request(tmp_path: Path, wandb: FakeWandb) -> None:
    trackers = opened(tmp_path, *BOTH)
    trackers.log(7, {"loss": 5.1, "validation_loss": 5.2, "note": "x"})
    trackers.close()
    trackers.log(8, {"loss": 5.0})  # after the end it goes nowhere
    assert wandb.logged == [(7, {"loss": 5.1, "validation/loss": 5.2})]
    assert wandb.finished == 1
    assert [(one["dir"], one["name"]) for one in wandb.inits] == [(tmp_path, "tiny")]
    assert wandb.inits[0]["config"] == {"train": {"steps": 9, "lr": 0.1}}
    assert "mode" not in wandb.inits[0]  # left to wandb's environment variables
    assert shown(tmp_path).keys() == {"loss", "validation/loss"}


def test_a_resumed_run_keeps_its_wandb_id(tmp_path: Path, wandb: FakeWandb) -> None:
    (tmp_path / "other").mkdir()
    for folder, start in ((tmp_path, 1), (tmp_path, 5), (tmp_path / "other", 1)):
        opened(folder, *BOTH, start=start).close()
    first, second, other = (one["id"] for one in wandb.inits)
    assert first == second != other
    assert {one["resume"] for one in wandb.inits} == {"allow"}


def test_wandb_is_not_used_by_default(tmp_path: Path, wandb: FakeWandb) -> None:
    trackers = opened(tmp_path)
    trackers.log(0, {"loss": 1.0})
    trackers.close()
    assert wandb.inits == []
    assert [path.name for path in tmp_path.iterdir()] == ["tensorboard"]


def test_wandb_requested_but_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(InputError, match=r"not installed; run pip install 'glasshouse\[wandb\]'"):
        opened(tmp_path, *BOTH)
    assert list(tmp_path.iterdir()) == []


def test_without_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    trackers = opened(tmp_path)
    trackers.log(0, {"loss": 1.0})
    trackers.close()
    assert list(tmp_path.iterdir()) == []


def test_a_failing_tracker_warns_once_and_the_other_continues(tmp_path: Path, wandb: FakeWandb) -> None:
    trackers = opened(tmp_path, *BOTH)
    trackers.log(0, {"loss": 1.0})
    wandb.broken = True
    with pytest.warns(UserWarning, match="tracker wandb failed .ConnectionError: the network is gone.") as caught:
        trackers.log(1, {"loss": 2.0})
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trackers.log(2, {"loss": 3.0})
        trackers.close()
    assert wandb.logged == [(0, {"loss": 1.0})]
    assert shown(tmp_path) == {"loss": [(0, 1.0), (1, 2.0), (2, 3.0)]}


def test_tensorboard_that_cannot_open_its_folder(tmp_path: Path, wandb: FakeWandb) -> None:
    (tmp_path / "tensorboard").write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match="tracker tensorboard failed") as caught:
        trackers = opened(tmp_path, *BOTH)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trackers.log(0, {"loss": 1.0})
        trackers.close()
    assert wandb.logged == [(0, {"loss": 1.0})]


def test_a_tracker_that_fails_to_open_or_close(
    tmp_path: Path, wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    trackers = opened(tmp_path, *BOTH)
    wandb.broken = True
    with pytest.warns(UserWarning, match="tracker wandb failed"):
        trackers.close()

    def refused(**settings: object) -> None:
        raise PermissionError("no key")

    monkeypatch.setattr(wandb, "init", refused)
    with pytest.warns(UserWarning, match="tracker wandb failed .PermissionError: no key."):
        opened(tmp_path, *BOTH).close()


# MLflow


class FakeClient:
    """The methods of MLflow's client that are called, with what MLflow refuses."""

    def __init__(self, store: FakeMLflow) -> None:
        self.store = store

    def get_experiment_by_name(self, name: str) -> SimpleNamespace | None:
        return SimpleNamespace(experiment_id=name) if name in self.store.experiments else None

    def create_experiment(self, name: str) -> str:
        assert name not in self.store.experiments
        self.store.experiments.append(name)
        return name

    def create_run(self, experiment_id: str, run_name: str) -> SimpleNamespace:
        number = f"run{len(self.store.runs)}"
        self.store.runs[number] = SimpleNamespace(
            of=experiment_id, name=run_name, params={}, metrics=[], status="RUNNING"
        )
        return SimpleNamespace(info=SimpleNamespace(run_id=number))

    def log_batch(self, run_id: str, metrics: Sequence[Any] = (), params: Sequence[Any] = ()) -> None:
        run = self.store.runs[run_id]
        assert run.status == "RUNNING"
        assert len(params) <= 100
        assert not {name for name, _ in params} & run.params.keys()  # cannot be changed
        run.params |= dict(params)
        run.metrics += [(step, name, value) for name, value, timestamp, step in metrics if timestamp > 10**12]

    def update_run(self, run_id: str, status: str) -> None:
        self.store.runs[run_id].status = status

    def set_terminated(self, run_id: str) -> None:
        self.store.runs[run_id].status = "FINISHED"


class FakeMLflow(ModuleType):
    def __init__(self) -> None:
        super().__init__("mlflow")
        self.experiments: list[str] = []
        self.runs: dict[str, SimpleNamespace] = {}
        self.entities = SimpleNamespace(Metric=lambda *row: row, Param=lambda *row: row)

    def MlflowClient(self) -> FakeClient:  # noqa: N802 - its name
        return FakeClient(self)


def test_mlflow_has_the_metrics_and_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FakeMLflow()
    monkeypatch.setitem(sys.modules, "mlflow", store)
    many = TrackedRun(tmp_path, "tiny", 0, {f"table{i}": {"key": i, "names": ["a"]} for i in range(120)})
    trackers = Trackers([MLflow(experiment="mine")], many)
    trackers.log(7, {"loss": 5.1, "validation_loss": 5.2, "note": "x"})
    trackers.close()
    run = store.runs["run0"]
    assert run.metrics == [(7, "loss", 5.1), (7, "validation/loss", 5.2)]
    assert (run.of, run.name, run.status, store.experiments) == ("mine", "tiny", "FINISHED", ["mine"])
    assert len(run.params) == 240
    assert (run.params["table3.key"], run.params["table3.names"]) == ("3", "['a']")
    # Resumed, it goes on in the same run, whose settings stay; another folder is another run.
    again = Trackers([MLflow("mine")], replace(many, start=8, settings={"table3": {"key": 5}}))
    again.log(8, {"loss": 5.0})
    assert (run.status, run.metrics[-1]) == ("RUNNING", (8, "loss", 5.0))
    again.close()
    (tmp_path / "other").mkdir()
    Trackers([MLflow("mine")], replace(many, folder=tmp_path / "other")).close()
    assert [*store.runs] == ["run0", "run1"]
    assert store.experiments == ["mine"]


def test_mlflow_itself_takes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    run = TrackedRun(tmp_path, "tiny", 0, {"train": {"steps": 9, "schedule": {"kind": "cosine"}}})
    for step in (1, 2):
        trackers = Trackers([MLflow()], run)
        trackers.log(step, {"loss": 5.0 - step, "validation_loss": math.inf, "grad_norm": math.nan})
        trackers.close()
    client = mlflow.MlflowClient()
    number = (tmp_path / "mlflow.id").read_text()
    assert [(one.step, one.value) for one in client.get_metric_history(number, "loss")] == [(1, 4.0), (2, 3.0)]
    assert client.get_run(number).data.params == {"train.steps": "9", "train.schedule.kind": "cosine"}
    assert client.get_run(number).info.status == "FINISHED"


# A tracker of others


@dataclass(frozen=True)
class Kept(Tracker):
    kind: ClassVar[str] = "kept"
    only: str = "loss"


class KeptLogger(MetricsLogger):
    kept: ClassVar[list[tuple[str, int, float]]] = []

    def __init__(self, settings: Kept, run: TrackedRun) -> None:
        self.settings, self.run = settings, run

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.kept.append((self.run.name, step, metrics[self.settings.only]))


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tracker, "kinds", dict(Tracker.kinds))
    monkeypatch.setattr(KeptLogger, "kept", [])
    gh.register(Kept, KeptLogger)


@pytest.mark.usefixtures("registered")
def test_a_registered_tracker_gets_the_metrics_by_its_settings(tmp_path: Path) -> None:
    train = gh.config.parse(gh.training.Train, {"trackers": ["kept", {"kind": "kept", "only": "lr"}]}, "train")
    assert gh.config.parse(gh.training.Train, gh.config.dump(train), "train") == train
    trackers = opened(tmp_path, *(train.trackers or ()))
    trackers.log(3, {"loss": 1.5, "lr": 0.1})
    with pytest.warns(UserWarning, match="tracker kept failed .KeyError: 'lr'.") as caught:
        trackers.log(4, {"loss": 1.25})
    assert len(caught) == 1  # of the two, the other stays
    trackers.log(5, {"loss": 1.0})
    trackers.close()
    assert KeptLogger.kept == [("tiny", 3, 1.5), ("tiny", 3, 0.1), ("tiny", 4, 1.25), ("tiny", 5, 1.0)]


@pytest.mark.usefixtures("registered")
def test_trackers_are_named_on_the_command_line(tmp_path: Path) -> None:
    run = gh.Run.load("stdlib", "train.trackers=tensorboard,kept")
    assert run.train.trackers == (TensorBoard(), Kept())
    assert gh.Run.load("stdlib", "train.trackers=").train.trackers == ()
    assert gh.Run.load("stdlib").train.trackers is None
    with pytest.raises(gh.ConfigError, match=r"train.trackers\[0\].kind is 'comet', but it must be one of .*mlflow"):
        gh.Run.load("stdlib", "train.trackers=comet")
    with pytest.raises(gh.ConfigError, match=r"train.wandb is called train.trackers here, such as wandb,mlflow"):
        gh.Run.load("stdlib", "train.wandb=true")


def test_no_trackers_write_nothing(tmp_path: Path) -> None:
    trackers = Trackers((), TrackedRun(tmp_path))
    trackers.log(0, {"loss": 1.0})
    trackers.close()
    assert list(tmp_path.iterdir()) == []


def test_what_is_built_must_be_a_logger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tracker, "kinds", dict(Tracker.kinds))
    gh.register(Kept, lambda settings, run: object())
    with pytest.warns(UserWarning, match="'kept' was built as .*, but it must be a .*MetricsLogger"):
        opened(tmp_path, Kept())
