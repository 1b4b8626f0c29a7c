"""Weights-only snapshots of deleted checkpoints, each a model folder that loads on its own.

A checkpoint is renamed, its training state is deleted, and it is renamed again to its final name, so that every
snapshot is complete. No data are written, and when the disk is full snapshots are deleted first.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from glasshouse import store
from glasshouse.hub.run_checkpoints import saved_steps, step_folder_name

SNAPSHOTS = "snapshots"
MOVED = ".moved"
STATE = "training_state.*"  # of a checkpoint, in addition to its model
FULL = (errno.ENOSPC, errno.EDQUOT)


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
                for path in moved.glob(STATE):
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
