"""The history of a run: the weights of checkpoints that have left, each a model folder that loads by itself.

A checkpoint that leaves is renamed, stripped of what training alone needs, and renamed to its place, so that what
stands there is whole. Nothing is written but names, and where the disk is full the history gives way.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from glasshouse import store
from glasshouse.hub.run_folder import saved_steps, step_folder_name

SNAPSHOTS = "snapshots"
MOVED = ".moved"
STATE = "training_state.*"  # what a checkpoint holds beside its model
FULL = (errno.ENOSPC, errno.EDQUOT)


def steps_to_drop(steps: Sequence[int], limit: int) -> list[int]:
    """Return which of the steps, in order, to give up so that `most` stay, as evenly apart as can be.

    The oldest and the newest stay, or if it is one, the newest.

    >>> steps_to_drop([0, 100, 110, 200, 300], limit=4)
    [110]
    """
    kept, given_up = list(steps), []
    while len(kept) > limit:
        # Without the step between gaps a and b, the squares of all gaps add up to 2ab more.
        inner = range(1, len(kept) - 1)
        at = min(inner, key=lambda at: (kept[at] - kept[at - 1]) * (kept[at + 1] - kept[at]), default=0)
        given_up.append(kept.pop(at))
    return given_up


class Snapshots:
    """At most so many sets of weights."""

    def __init__(self, root: Path, limit: int) -> None:
        self.root, self.limit = root, limit

    def steps(self) -> list[int]:
        """Return the steps whose weights are there, the oldest first."""
        return saved_steps(self.root)

    def folder(self, step: int) -> Path:
        """Return where the weights of a step are."""
        return self.root / step_folder_name(step)

    def save_initial(self, fill_model: Callable[[Path], None]) -> None:
        """Write the model that a run begins with; where there is no room for it, do without."""
        with suppress(OSError):
            store.replace_folder(self.folder(0), fill_model, ".*")

    def archive(self, checkpoint: Path) -> None:
        """Keep the model of a checkpoint that leaves; where that fails, remove it."""
        if self.limit:
            with suppress(OSError):
                self.root.mkdir(exist_ok=True)
                checkpoint.rename(self.root / f".{checkpoint.name}{MOVED}")
            self._settle()
        shutil.rmtree(checkpoint, ignore_errors=True)

    def make_room(self, work: Callable[[], object]) -> None:
        """Do work that writes; where the disk is full, give up what is here, half at a time, and do it again."""
        while True:
            try:
                work()
                return
            except OSError as error:
                if not _is_full(error):
                    raise
                there = len(self.steps())
                self._thin(there // 2)
                if len(self.steps()) == there:
                    raise

    def truncate(self, step: int) -> None:
        """Forget the weights of a step and all after it, and finish what a run that was killed left half done."""
        if self.limit:
            self._settle()
        for later in self.steps():
            if later >= step:
                self._drop(self.folder(later))
        for path in self.root.glob(".step-*"):
            shutil.rmtree(path, ignore_errors=True)

    def _settle(self) -> None:
        """Strip what has been moved here, put it in its place, and thin out what is there."""
        for moved in self.root.glob(f".step-*{MOVED}"):
            with suppress(OSError):
                for path in moved.glob(STATE):
                    path.unlink()
                place = moved.with_name(moved.name.removeprefix(".").removesuffix(MOVED))
                self._drop(place)  # of a time before the run went back
                moved.rename(place)
        self._thin(self.limit)

    def _thin(self, limit: int) -> None:
        for step in steps_to_drop(self.steps(), limit):
            self._drop(self.folder(step))

    def _drop(self, folder: Path) -> None:
        """Remove a folder, of which nobody is to see a half."""
        with suppress(OSError):
            gone = folder.with_name(f".{folder.name}.gone")
            shutil.rmtree(gone, ignore_errors=True)
            folder.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)


def _is_full(error: OSError) -> bool:
    # The writer of tensors, which is written in Rust, tells the number in its words alone.
    return error.errno in FULL or any(f"(os error {number})" in str(error) for number in FULL)
