"""A folder that several processes write together, and that is there once all of their files are on disk, or never.

Every process writes and flushes its files in a folder with a temporary name; when all have, the main one renames it.
An error of one process is raised in all, so that they go on, or stop, together.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from glasshouse import store
from glasshouse.errors import StoreError
from glasshouse.hub.run_checkpoints import size_and_hash
from glasshouse.training.processes import Processes

T = TypeVar("T")
Files = dict[str, list[int | str]]  # name -> size and hash


def together(processes: Processes, work: Callable[[], T]) -> list[T]:
    """Run work in every process, and return all results by rank; an OSError or StoreError of one is raised in all.

    >>> together(Processes(), lambda: 3)
    [3]
    """
    results: list[T] = []
    failed: OSError | StoreError | None = None
    try:
        results.append(work())
    except (OSError, StoreError) as error:
        failed = error
    code = (failed.errno or 0) if isinstance(failed, OSError) else None
    outcomes = processes.gather((results, str(failed), code))
    if failed is not None:
        raise failed
    for rank, (found, message, code) in enumerate(outcomes):
        if not found:
            raise StoreError(message) if code is None else OSError(code, f"rank {rank}: {message}")
    return [result for found, _, _ in outcomes for result in found]


def write_folder(
    folder: Path,
    fill: Callable[[Path], None],
    processes: Processes,
    finish: Callable[[Path, Files], None] = lambda folder, files: None,
) -> None:
    """Replace a folder by what `fill` writes in every process, under different names.

    `finish` gets the files of all, in the main process.
    """
    new, is_main = store.unfinished_folder(folder), processes.is_main
    try:
        together(processes, lambda: store.begin_folder(folder, ".*") if is_main else None)
        parts = together(processes, lambda: _write_part(new, fill, processes.rank))

        def commit() -> None:
            for rank, files in enumerate(parts):
                _check_visible(new, files, rank)
            finish(new, {name: described for files in parts for name, described in sorted(files.items())})
            store.commit_folder(folder)

        together(processes, lambda: commit() if is_main else None)
    except BaseException:
        if is_main:
            shutil.rmtree(new, ignore_errors=True)
        raise


def _write_part(new: Path, fill: Callable[[Path], None], rank: int) -> Files:
    """Write and flush the files of this process, and describe them."""
    own = new / f".rank-{rank}"  # where no other process writes its files, and temporary ones
    own.mkdir()
    fill(own)
    files: Files = {}
    for path in sorted(own.rglob("*")):
        store.flush(path)
        if path.is_file():
            files[path.relative_to(own).as_posix()] = size_and_hash(path)
    for path in own.iterdir():
        path.rename(new / path.name)
    own.rmdir()
    return files


def _check_visible(new: Path, files: Files, rank: int) -> None:
    for name, (size, _) in files.items():
        if not (new / name).is_file() or (new / name).stat().st_size != size:
            raise StoreError(
                f"rank {rank} wrote {name}, but the main process does not find it in {str(new.parent)!r}; choose a "
                "folder that all processes share by train.out."
            )
