"""The folder of a run: what lies in it, and whose it is."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from glasshouse import config
from glasshouse.errors import InputError, StoreError
from glasshouse.hub.runs import CHECKPOINTS, RUN
from glasshouse.training.checkpoint import Checkpoints
from glasshouse.training.run import Run

try:
    import fcntl
except ImportError:  # Windows, where nobody keeps two runs apart
    fcntl = None  # type: ignore[assignment]

METRICS, ADAPTER, TROUBLE = "metrics.jsonl", "adapter", "trouble.json"
PROBES, SAMPLES, LOCK = "probes.jsonl", "samples.jsonl", ".lock"


def is_run(folder: str | Path) -> bool:
    """Say whether a folder is that of a run.

    >>> is_run("no such folder")
    False
    """
    return (Path(folder).expanduser() / RUN).is_file()


def claim(run: Run) -> Path:
    """Make the folder of a run, or make sure that it is this run's."""
    folder = Path(run.train.out).expanduser()
    path = folder / RUN
    if path.is_file():
        differences = Run.parse(config.read(path)).differences(run)
        if differences and Checkpoints(folder / CHECKPOINTS).steps():
            raise InputError(
                f"the run in {str(folder)!r} was begun with other settings: {'; '.join(differences)}; "
                "give it the old ones to go on, or train.out=FOLDER to begin another."
            )
        if any(not difference.startswith("train.") for difference in differences):  # nothing was learned from it
            for made in ("tokenizer", "data/train", "data/validation"):
                shutil.rmtree(folder / made, ignore_errors=True)
    elif folder.is_dir() and any(folder.iterdir()):
        raise InputError(f"{str(folder)!r} holds something that is no run; choose another folder by train.out.")
    new = folder / f".{RUN}.new"  # a disk that is full must not cost the old one
    try:
        folder.mkdir(parents=True, exist_ok=True)
        new.write_text(config.to_toml(run.table()), encoding="utf-8")
        new.replace(path)
    except OSError as error:
        with suppress(OSError):
            new.unlink()
        raise StoreError(
            f"the run cannot be written to {str(folder)!r} ({error.strerror}); choose another folder by train.out."
        ) from None
    return folder


@contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Keep other processes out of a run's folder; one that is killed lets go."""
    with (folder / LOCK).open("w") as lock:
        if fcntl is not None:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise StoreError(f"another process is training in {str(folder)!r}; wait for it.") from None
        yield
