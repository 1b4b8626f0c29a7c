"""The run folder: one process at a time, complete files, and a killed preparation can be repeated."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from runs import RecordingReporter, losses, table, write_data

import glasshouse as gh
from glasshouse import config
from glasshouse.errors import InputError, StoreError
from glasshouse.training import Run, train
from glasshouse.training.checkpoint.folder import lock_folder

pytestmark = pytest.mark.slow

# Forks a process for each round, so that torch is imported once. A round is [[settings, delay, event, how], ...]: its
# processes start together, each after its delay. One that leaves early is waited for by the other at its first step.
# Where an event is given, the process dies at, or its disk is full from, that write to its folder on; with an alarm
# it dies after so many seconds.
FORKS = """
import errno, json, os, signal, sys, time, traceback
import torch, torch._dynamo
from contextlib import suppress
with suppress(ImportError):
    import gigatoken  # as torch._dynamo, else imported by every process anew
torch.set_num_threads(1)
from glasshouse import device
from glasshouse.training import Run, train
from glasshouse.training.logging import plots, trackers
from glasshouse.training.logging.progress import SilentReporter

device.measure_peak_flops, plots.draw = (lambda *_, **__: 1e12), (lambda *_: [])
trackers.Trackers._open = lambda *_: None
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Events:
    def __init__(self, folder, event, how):
        self.folder, self.event, self.how, self.count, self.on = folder, event, how, 0, True
        self.took = 0.0
        fsync = os.fsync
        os.fsync = lambda handle: (self.happens(), fsync(handle))[1]
        sys.addaudithook(self.hook)

    def hook(self, name, args):
        if name == "open" and not (isinstance(args[2], int) and args[2] & WRITES):
            return
        if name in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"):
            if any(str(one).startswith(self.folder) for one in args):
                self.happens()

    def happens(self):
        if not self.on:
            return
        self.count += 1
        if self.event is None or self.count <= self.event:
            return
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "here")


def work(settings, delay, event, how, others):
    time.sleep(delay)
    if how == "alarm":
        signal.setitimer(signal.ITIMER_REAL, event)  # the kernel ends it: nobody listens
        event = None
    events, began = Events(settings["train"]["out"], event, how), time.monotonic()

    class Waits(SilentReporter):
        def on_step_end(self, step, *_):
            if step == 1:
                events.on, events.took = False, time.monotonic() - began
                end = time.monotonic() + 60
                while not all(os.path.exists(one) for one in others) and time.monotonic() < end:
                    time.sleep(0.01)

    try:
        train(Run.from_dict(settings), Waits())
        return {"code": 0, "events": events.count, "took": events.took}
    except (ValueError, OSError) as error:
        return {"code": 1, "message": str(error), "type": type(error).__name__}
    except BaseException:
        return {"code": 2, "message": traceback.format_exc()}


for number, line in enumerate(sys.stdin):
    processes = json.loads(line)
    marks = [os.path.join(sys.argv[1], f"{number}.{i}") for i in range(len(processes))]
    pids = []
    for i, process in enumerate(processes):
        pids.append(os.fork())
        if not pids[-1]:
            result = work(*process, [mark for j, mark in enumerate(marks) if j != i])
            with open(marks[i] + ".new", "w") as file:
                json.dump(result, file)
            os.rename(marks[i] + ".new", marks[i])
            os._exit(0)
    codes = [os.waitpid(pid, 0)[1] for pid in pids]
    print(json.dumps([json.load(open(m)) if not c else {"code": -c} for m, c in zip(marks, codes)]), flush=True)
"""

Process = tuple[dict[str, Any], float, float | None, str]


class Forks:
    """Runs rounds of processes, one round after another."""

    def __init__(self, data_folder: Path) -> None:
        self.data_folder = data_folder
        write_data(data_folder)
        (data_folder / "marks").mkdir()
        command = [sys.executable, "-c", FORKS, str(data_folder / "marks")]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __call__(self, *processes: Process) -> list[dict[str, Any]]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(processes) + "\n")
        self.process.stdin.flush()
        results: list[dict[str, Any]] = json.loads(self.process.stdout.readline())
        return results

    def train(self, out: str, vocab_size: int = 270, event: float | None = None, how: str = "kill") -> dict[str, Any]:
        """Train in a process of its own."""
        return self((brief(self.data_folder, out, vocab_size), 0.0, event, how))[0]

    def made(self, out: str) -> tuple[dict[str, bytes], dict[int, float]]:
        """Return the files of a run, and its losses."""
        return contents(self.data_folder / out), losses(self.data_folder, out)

    @cached_property
    def counted(self) -> dict[int, dict[str, Any]]:
        """Results of undisturbed runs, by vocabulary size."""
        return {size: self.train(f"alone-{size}", size) for size in (270, 275)}

    @cached_property
    def alone(self) -> dict[int, tuple[dict[str, bytes], dict[int, float]]]:
        """Their files and losses."""
        return {size: self.made(f"alone-{size}") for size in self.counted}


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    forks = Forks(tmp_path_factory.mktemp("forks"))
    yield forks
    forks.process.kill()
    forks.process.wait()


def brief(data_folder: Path, out: str, vocab_size: int = 270, **choices: Any) -> dict[str, Any]:  # noqa: ANN401
    few = {"steps": 3, "save_every": 1, "eval_every": 3, "probes": [], "sample_prompts": 0, "keep_snapshots": 1}
    settings = table(data_folder, out=out, **few, **choices)
    settings["data"]["vocab_size"] = vocab_size
    return settings


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a run, except those that depend on time and path, or are leftovers."""
    unlike = (
        "run.toml",
        "metrics.jsonl",
        "training_state.json",
        "training_state.safetensors",
        ".lock",
        "progress.json",
    )
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in unlike)
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def stamps(folder: Path) -> dict[str, tuple[int, bytes]]:
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in paths}


# One process at a time


def test_a_second_process_changes_nothing(data_folder: Path) -> None:
    """With other settings and before the first checkpoint, when a folder could still be started anew."""
    other = table(data_folder)
    other["data"]["vocab_size"] = 300

    def again() -> None:
        before = stamps(data_folder / "run")
        for settings in (table(data_folder), other):
            with pytest.raises(StoreError, match="another process is training in"):
                train(Run.from_dict(settings))
        assert stamps(data_folder / "run") == before

    train(Run.from_dict(table(data_folder, keep_snapshots=0, steps=2)), RecordingReporter(1, again))
    assert sorted(losses(data_folder)) == [1, 2]
    assert len(gh.Tokenizer.load(data_folder / "run" / "tokenizer")) == 270


def check_races(forks: Forks, rounds: int) -> None:
    """Two processes at random times in one folder: one trains as if alone, the other stops with an error."""
    rng = random.Random(rounds)
    for number in range(rounds):
        out = f"run-{rounds}-{number}"
        sizes = rng.choice([(270, 270), (270, 275), (275, 270)])
        delays = rng.choice([(0.0, 0.0), (0.0, rng.uniform(0, 0.1)), (0.0, rng.uniform(0, 1.0))])
        two = zip(sizes, delays, strict=True)
        results = forks(*((brief(forks.data_folder, out, size), delay, None, "") for size, delay in two))
        assert sorted(one["code"] for one in results) == [0, 1], results
        winner = [one["code"] for one in results].index(0)
        message = f"another process is training in {str(forks.data_folder / out)!r}; wait for it."
        assert results[1 - winner] == {"code": 1, "message": message, "type": "StoreError"}
        assert forks.made(out) == forks.alone[sizes[winner]]
        assert config.read(forks.data_folder / out / "run.toml")["data"]["vocab_size"] == sizes[winner]


@pytest.mark.long
def test_two_processes_at_random_times(forks: Forks) -> None:
    check_races(forks, 3)


@pytest.mark.long
def test_two_processes_at_fifty_random_times(forks: Forks) -> None:
    check_races(forks, 50)


def test_waits_for_a_short_lock(tmp_path: Path) -> None:
    """As the page locks it to see whether a run is active."""
    with lock_folder(tmp_path):
        entered = threading.Event()

        def wait() -> None:
            with lock_folder(tmp_path):
                entered.set()

        thread = threading.Thread(target=wait)
        thread.start()
        assert not entered.wait(0.03)
    thread.join()
    assert entered.is_set()


def test_a_lock_that_is_a_folder_is_an_error(data_folder: Path) -> None:
    (data_folder / "run" / ".lock").mkdir(parents=True)
    with pytest.raises(StoreError, match=r"\.lock' is a folder, but must be a file"):
        train(Run.from_dict(table(data_folder)))


def test_files_that_would_be_lost_are_an_error_before_training(data_folder: Path) -> None:
    settings = table(data_folder, steps=1)
    train(Run.from_dict(settings))
    (data_folder / "run" / "model" / "notes.txt").write_text("by hand")
    before = stamps(data_folder / "run")
    with pytest.raises(StoreError, match=r"model' contains 'notes\.txt', which would be lost; move it away"):
        train(Run.from_dict(settings))
    assert stamps(data_folder / "run") == before
    (data_folder / "other" / "model").mkdir(parents=True)
    (data_folder / "other" / "run.toml").write_bytes((data_folder / "run" / "run.toml").read_bytes())
    (data_folder / "other" / "adapter").write_text("a file")
    settings = table(data_folder, steps=1, out="other", lora={"rank": 1})
    settings["model"] = {"from": str(data_folder / "run" / "checkpoints" / "step-00000001")}
    with pytest.raises(StoreError, match="adapter' is a file"):
        train(Run.from_dict(settings))


# Killed during preparation


def check_kills(forks: Forks, how: str, moments: int | None = None) -> None:
    """Kill a run while it prepares its folder, tokenizer and ids: the same command then gives the same result.

    At every write or some of them, or at random times.
    """
    counted = forks.counted[270]
    assert counted["events"] > 30
    rng, events = random.Random(0), list(range(counted["events"]))
    if how == "alarm":
        events = [rng.uniform(0, counted["took"]) for _ in range(moments or 50)]
    for event in events if moments is None else rng.sample(events, moments):
        out = f"{how}-{event}-{moments}"
        died = forks.train(out, event=event, how=how)
        # On a full disk snapshots are dropped and training continues; an alarm, and the last writes, made by a
        # thread, may come after the first step.
        assert died["code"] in {"kill": [-signal.SIGKILL, 0], "alarm": [-signal.SIGALRM, 0], "full disk": [0, 1]}[how]
        result = forks.train(out)
        assert result["code"] == 0, (event, result)
        assert forks.made(out) == forks.alone[270], event


@pytest.mark.long
@pytest.mark.parametrize(("how", "moments"), [("kill", 1), ("alarm", 1), ("full disk", 1)])
def test_killed_or_disk_full_during_preparation(how: str, moments: int, forks: Forks) -> None:
    check_kills(forks, how, moments)


@pytest.mark.long
@pytest.mark.parametrize("how", ["kill", "alarm", "full disk"])
def test_killed_or_disk_full_at_every_write_during_preparation(how: str, forks: Forks) -> None:
    check_kills(forks, how)


def test_an_incomplete_tokenizer_is_trained_again(data_folder: Path) -> None:
    """As earlier versions left it when killed."""
    settings = table(data_folder, steps=1)
    train(Run.from_dict(settings))
    expected = contents(data_folder / "run" / "tokenizer")
    for name in ("checkpoints", "data", "snapshots", "model"):
        (data_folder / "run" / name).rename(data_folder / name)
    (data_folder / "run" / "tokenizer" / "tokenizer.json").rename(
        data_folder / "run" / "tokenizer" / ".tokenizer.json.new"
    )
    train(Run.from_dict(settings))
    assert contents(data_folder / "run" / "tokenizer") == expected


def test_killed_while_deleting_the_data_of_other_settings(data_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first checkpoint a run may start anew, and then get its old settings again."""
    settings = table(data_folder, steps=1)
    train(Run.from_dict(settings))
    (data_folder / "run" / "checkpoints").rename(data_folder / "checkpoints")
    real = shutil.rmtree

    def rmtree(path: Path, **rest: Any) -> None:  # noqa: ANN401
        if path.exists():
            next(one for one in sorted(path.rglob("*.json"))).unlink()
            raise KeyboardInterrupt
        real(path, **rest)

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    other = table(data_folder, steps=1)
    other["data"]["vocab_size"] = 275
    with pytest.raises(KeyboardInterrupt):
        train(Run.from_dict(other))
    monkeypatch.undo()
    train(Run.from_dict(settings))
    assert len(gh.Tokenizer.load(data_folder / "run" / "tokenizer")) == 270


def test_a_folder_with_only_leftovers_of_a_killed_start_is_used(data_folder: Path) -> None:
    (data_folder / "run").mkdir()
    (data_folder / "run" / ".lock").touch()
    (data_folder / "run" / ".run.toml.new").write_text("[mod")
    train(Run.from_dict(table(data_folder, steps=1)))
    (data_folder / "other").mkdir()
    (data_folder / "other" / ".run.toml.new").touch()
    (data_folder / "other" / "thesis.txt").touch()
    with pytest.raises(InputError, match="not a run folder"):
        train(Run.from_dict(table(data_folder, out="other")))
    assert not (data_folder / "other" / ".lock").exists()
