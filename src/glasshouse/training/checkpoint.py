"""Checkpoints: model folders that load on their own, plus the training state needed to resume exactly.

A checkpoint is written under a temporary name, flushed and renamed; only then are older ones removed. Its manifest
has the size and hash of each file; a checkpoint that does not match is skipped for the one before it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from glasshouse import store
from glasshouse.errors import StoreError
from glasshouse.hub.run_checkpoints import (
    FORMAT,
    STATE,
    TENSORS,
    check_manifest,
    saved_steps,
    size_and_hash,
    step_folder_name,
    with_checksum,
)
from glasshouse.training.snapshots import SNAPSHOTS, Snapshots
from glasshouse.training.state import CheckpointData


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
