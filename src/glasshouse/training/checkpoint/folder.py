"""The folder of a run: file names, lock, and the settings a run may resume with."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from glasshouse import config, store
from glasshouse.errors import InputError, StoreError
from glasshouse.hub import serialization
from glasshouse.hub.adapters import peft
from glasshouse.hub.run_checkpoints import CHECKPOINTS, MODEL, RUN, is_run, saved_steps, step_folder_name
from glasshouse.training.run import CHOSEN, Run, default_schedule

try:
    import fcntl
except ImportError:  # Windows, where runs are not locked
    fcntl = None  # type: ignore[assignment]

METRICS, ADAPTER, NONFINITE = "metrics.jsonl", "adapter", "nonfinite.json"
PROBES, SAMPLES, LOCK = "probes.jsonl", "samples.jsonl", ".lock"
NEW_RUN = f".{RUN}.new"
LOCK_ATTEMPTS = 10  # the page locks the folder briefly to see whether a run is active


def run_folder(run: Run) -> Path:
    """Return the folder of a run."""
    return Path(run.train.out).expanduser()


@contextmanager
def lock_run(run: Run) -> Iterator[Path]:
    """Lock the folder of a run, new or its own, during training; nothing is written to a folder that is refused."""
    folder = run_folder(run)
    _check_own(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from None
    with lock_folder(folder):
        _check_own(folder)  # again: another process may have filled it before the lock
        store.check_replaceable(folder / MODEL, serialization.MODEL_FILES)
        if run.train.lora is not None:
            store.check_replaceable(folder / ADAPTER, peft.ADAPTER_FILES)
        _adopt(run, folder)
        yield folder


def _check_own(folder: Path) -> None:
    """Refuse a folder that is not empty and not a run folder."""
    # Listed before checking for run.toml: a run that starts meanwhile writes that file first.
    found = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if found - {LOCK, NEW_RUN} and not is_run(folder):
        raise InputError(f"{str(folder)!r} is not empty and not a run folder; choose another folder by train.out.")


def _adopt(run: Run, folder: Path) -> None:
    """Write run.toml, if the checkpoints in the folder can be resumed with these settings."""
    path = folder / RUN
    if path.is_file():
        old = Run.from_dict(config.read(path))
        if steps := saved_steps(folder / CHECKPOINTS):
            _check_resumable(old, run, folder, steps[-1])
        elif any(not difference.startswith("train.") for difference in old.differences(run)):  # no checkpoint yet
            for made in ("tokenizer", "data/train", "data/validation"):
                _drop(folder / made)
    write_run(run, folder)


def write_run(run: Run, folder: Path) -> None:
    """Write run.toml, atomically."""
    new = folder / NEW_RUN  # keep the old one if the disk is full
    try:
        new.write_text(config.to_toml(run.to_dict()), encoding="utf-8")
        new.replace(folder / RUN)
    except OSError as error:
        with suppress(OSError):
            new.unlink()
        raise _unwritable(folder, error) from None


def with_choice(run: Run) -> Run:
    """Return a run with what train.minutes has chosen for it before, which the run.toml in its folder has.

    After the decay has begun, that has the steps and no minutes.
    """
    path = run_folder(run) / RUN
    if run.unchosen is None or not path.is_file():
        return run
    old = Run.from_dict(config.read(path))
    if old.unchosen is not None or old.train.steps is None:
        return run
    before, given = old.to_dict(), run.to_dict()
    model = {key: value for key, value in given["model"].items() if key != "depth"}
    chosen = {key: value for key, value in before["train"].items() if key in CHOSEN}
    train, notes = {**chosen, **given["train"]}, run.notes
    if old.train.minutes is None:
        minutes = train.pop("minutes")
        note = f"train.minutes is {minutes:g}, but the steps of the run in {str(path.parent)!r} are decided"
        notes = (*notes, f"{note}: {old.train.steps:,}; train.steps raises them, train.out starts a new run")
    table = {"model": {**before["model"], **model}, "data": given["data"], "train": train}
    return replace(Run.from_dict(table), notes=notes)


def _drop(folder: Path) -> None:
    """Delete a folder atomically."""
    gone = folder.with_name(f".{folder.name}.gone")
    shutil.rmtree(gone, ignore_errors=True)
    with suppress(FileNotFoundError):
        folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def _check_resumable(old: Run, run: Run, folder: Path, taken: int) -> None:
    """Refuse settings that would have changed the steps already taken."""
    before, after = old.train.steps, run.train.steps
    differences = old.differences(run)
    if any(not difference.startswith(("train.steps ", "train.minutes ")) for difference in differences):
        raise InputError(
            f"the run in {str(folder)!r} was started with other settings: {'; '.join(differences)}; "
            "give the old ones to resume, or train.out=FOLDER to start a new run."
        )
    if before is None or after is None:  # given as epochs, which are the same
        return
    if after < taken:
        raise InputError(
            f"train.steps is {after}, but the run in {str(folder)!r} has taken {taken} steps; give at least as many, "
            "or train.out=FOLDER to start a new run."
        )
    schedule = old.train.schedule or default_schedule(before)
    if (step := schedule.first_difference(before, after, taken)) is not None:
        raise InputError(
            f"train.steps was {before} and is {after}, but of the {taken} steps that the run in {str(folder)!r} has "
            f"taken, those from step {step + 1} on would have had other learning rates under its {schedule.kind} "
            f"schedule (constant, inverse_sqrt, and wsd before its decay can be extended); give "
            f"train.steps={before} to resume, or start a new run from these weights by "
            f"model.from={folder / CHECKPOINTS / step_folder_name(taken)} train.out=FOLDER."
        )


def _unwritable(folder: Path, error: OSError) -> StoreError:
    return StoreError(
        f"the run cannot be written to {str(folder)!r} ({error.strerror}); choose another folder by train.out."
    )


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock a run folder against other processes; the lock of a killed process is released."""
    path = folder / LOCK
    try:
        lock = path.open("a")  # leaves the lock file of another process unchanged
    except IsADirectoryError:
        raise StoreError(f"{str(path)!r} is a folder, but must be a file to lock; remove it.") from None
    except OSError as error:
        raise _unwritable(folder, error) from None
    with lock:
        if fcntl is not None:
            for attempts_left in reversed(range(LOCK_ATTEMPTS)):
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if not attempts_left:
                        raise StoreError(f"another process is training in {str(folder)!r}; wait for it.") from None
                    time.sleep(0.02)
                except OSError as error:
                    raise StoreError(
                        f"{str(path)!r} cannot be locked ({error.strerror}); choose a folder on another disk by "
                        "train.out."
                    ) from None
        yield
