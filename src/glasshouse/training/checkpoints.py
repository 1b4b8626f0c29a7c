"""The checkpoints and snapshots in a run folder.

A checkpoint is a model folder that loads on its own, plus the training state needed to resume exactly. It is written
under a temporary name, flushed and renamed; only then are older ones removed. Its manifest has the size and hash of
each file; a checkpoint that does not match is skipped for the one before it.

A snapshot is what remains of an older checkpoint: its model. The checkpoint is renamed, its training state is
deleted, and it is renamed again to its final name, so that every snapshot is complete. No data are written, and when
the disk is full snapshots are deleted first.
"""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from glasshouse import store
from glasshouse.errors import StoreError
from glasshouse.hub.model_folder import CONFIG
from glasshouse.hub.run_checkpoints import (
    CHECKPOINTS,
    FORMAT,
    MODEL,
    STATE,
    TENSORS,
    check_manifest,
    saved_steps,
    size_and_hash,
    step_folder_name,
    with_checksum,
)

SNAPSHOTS = "snapshots"
MOVED = ".moved"
STATE_FILES = "training_state.*"  # of a checkpoint, in addition to its model
FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class CheckpointData:
    """Named tensors and JSON metadata of a checkpoint."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)


def write(folder: Path, fill_model: Callable[[Path], None], state: CheckpointData) -> None:
    """Write a checkpoint atomically."""

    def fill(temporary: Path) -> None:
        fill_model(temporary)
        store.write_tensors(temporary / TENSORS, state.tensors)
        files = {path.name: size_and_hash(path) for path in sorted(temporary.iterdir())}
        manifest = {"format": FORMAT, "files": files, "metadata": state.metadata}
        (temporary / STATE).write_text(json.dumps(with_checksum(manifest), indent=1) + "\n", encoding="utf-8")

    store.replace_folder(folder, fill, ".*")


def read(folder: Path) -> CheckpointData:
    """Load the training state of a checkpoint; a file that is damaged or missing is an error that names it."""
    manifest = check_manifest(folder)
    return CheckpointData(store.read_tensors(folder / TENSORS), manifest["metadata"])


class Checkpoints:
    """The checkpoints of a run: the latest and the best; others become weights-only snapshots."""

    def __init__(self, root: Path, keep: int = 2, keep_snapshots: int = 0) -> None:
        self.root, self.keep = root, keep
        self.snapshots = Snapshots(root.with_name(SNAPSHOTS), keep_snapshots)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        self._writing: Future[None] | None = None

    def steps(self) -> list[int]:
        """Return the steps with a checkpoint, newest first."""
        return saved_steps(self.root)[::-1]

    def folder(self, step: int) -> Path:
        """Return the folder of a checkpoint."""
        return self.root / step_folder_name(step)

    def newest(self) -> tuple[int, CheckpointData, list[str]] | None:
        """Return the newest intact checkpoint: its step, its state, and the errors of newer ones."""
        errors: list[str] = []
        for step in self.steps():
            try:
                return step, read(self.folder(step)), errors
            except StoreError as error:
                errors.append(str(error))
        if errors:
            raise StoreError(f"no checkpoint in {str(self.root)!r} is intact: {errors[0]}")
        return None

    def save(
        self, step: int, fill_model: Callable[[Path], None], state: CheckpointData, best: int | None = None
    ) -> None:
        """Write a checkpoint in the background; the arguments must not change meanwhile.

        An error of the previous write is raised here. The checkpoint of step `best` is always kept.
        """
        self.wait()
        self._writing = self._pool.submit(self._save, step, fill_model, state, best)

    def save_initial(self, fill_model: Callable[[Path], None]) -> None:
        """Write the initial model as a snapshot, in the background."""
        self.wait()
        self._writing = self._pool.submit(self.snapshots.save_initial, fill_model)

    def check(self) -> None:
        """Raise the error of a background write that has ended."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def wait(self) -> None:
        """Wait for the background write."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _save(self, step: int, fill_model: Callable[[Path], None], state: CheckpointData, best: int | None) -> None:
        self.snapshots.make_room(lambda: write(self.folder(step), fill_model, state))
        for old in reversed(self.steps()[self.keep :]):
            if old not in (step, best):
                self.snapshots.archive(self.folder(old))


def steps_to_drop(steps: Sequence[int], limit: int) -> list[int]:
    """Return which of the sorted steps to drop so that `limit` remain, evenly spaced.

    The oldest and the newest are kept; with a limit of 1, the newest.

    >>> steps_to_drop([0, 100, 110, 200, 300], limit=4)
    [110]
    """
    kept, dropped = list(steps), []
    while len(kept) > limit:
        # Without the step between gaps a and b, the squares of all gaps add up to 2ab more.
        inner = range(1, len(kept) - 1)
        at = min(inner, key=lambda at: (kept[at] - kept[at - 1]) * (kept[at + 1] - kept[at]), default=0)
        dropped.append(kept.pop(at))
    return dropped


class Snapshots:
    """At most `limit` snapshots."""

    def __init__(self, root: Path, limit: int) -> None:
        self.root, self.limit = root, limit

    def steps(self) -> list[int]:
        """Return the steps with a snapshot, oldest first."""
        return saved_steps(self.root)

    def folder(self, step: int) -> Path:
        """Return the folder of a snapshot."""
        return self.root / step_folder_name(step)

    def save_initial(self, fill_model: Callable[[Path], None]) -> None:
        """Save the initial model; skip it if the disk is full."""
        with suppress(OSError):
            store.replace_folder(self.folder(0), fill_model, ".*")

    def archive(self, checkpoint: Path) -> None:
        """Turn a checkpoint into a snapshot; if that fails, delete it."""
        if self.limit:
            with suppress(OSError):
                self.root.mkdir(exist_ok=True)
                checkpoint.rename(self.root / f".{checkpoint.name}{MOVED}")
            self._finish_moves()
        shutil.rmtree(checkpoint, ignore_errors=True)

    def make_room(self, work: Callable[[], object]) -> None:
        """Run work that writes to disk; while the disk is full, delete half of the snapshots and retry."""
        while True:
            try:
                work()
                return
            except OSError as error:
                if not _is_full(error):
                    raise
                count = len(self.steps())
                self._thin(count // 2)
                if len(self.steps()) == count:
                    raise

    def truncate(self, step: int) -> None:
        """Delete the snapshots from a step on, and finish moves that a killed run left incomplete."""
        if self.limit:
            self._finish_moves()
        for later in self.steps():
            if later >= step:
                self._drop(self.folder(later))
        for path in self.root.glob(".step-*"):
            shutil.rmtree(path, ignore_errors=True)

    def _finish_moves(self) -> None:
        """Delete the training state of moved checkpoints, rename them, and drop snapshots over the limit."""
        for moved in self.root.glob(f".step-*{MOVED}"):
            with suppress(OSError):
                for path in moved.glob(STATE_FILES):
                    path.unlink()
                final = moved.with_name(moved.name.removeprefix(".").removesuffix(MOVED))
                self._drop(final)  # from before the run rolled back
                moved.rename(final)
        self._thin(self.limit)

    def _thin(self, limit: int) -> None:
        for step in steps_to_drop(self.steps(), limit):
            self._drop(self.folder(step))

    def _drop(self, folder: Path) -> None:
        """Delete a folder atomically."""
        with suppress(OSError):
            gone = folder.with_name(f".{folder.name}.gone")
            shutil.rmtree(gone, ignore_errors=True)
            folder.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)


def _is_full(error: OSError) -> bool:
    # safetensors, written in Rust, has the error number only in its message.
    return error.errno in FULL or any(f"(os error {number})" in str(error) for number in FULL)


@dataclass(frozen=True)
class SavedCheckpoint:
    """Weights saved after a step, in a folder for `gh.load`.

    >>> SavedCheckpoint(100, "step 100", Path("runs/mine/snapshots/step-00000100")).name
    'step 100'
    """

    step: int
    name: str  # "step 100", or "final": the final model, which may be the best or the EMA
    folder: Path


def list_checkpoints(folder: str | Path) -> list[SavedCheckpoint]:
    """Return the saved checkpoints of a run, oldest first; empty if it has no weights yet.

    During training a folder may move or be deleted before it is loaded: list them again then.
    """
    folder = Path(folder).expanduser()
    # A checkpoint that becomes a snapshot meanwhile is found in the first folder, or in both.
    parents = {step: folder / name for name in (CHECKPOINTS, SNAPSHOTS) for step in saved_steps(folder / name)}
    found = [
        SavedCheckpoint(step, f"step {step}", parents[step] / step_folder_name(step)) for step in sorted(parents)
    ]
    if (folder / MODEL / CONFIG).is_file():
        found.append(SavedCheckpoint(max(parents, default=0), "final", folder / MODEL))
    return found
