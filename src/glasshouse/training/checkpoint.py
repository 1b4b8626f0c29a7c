"""Checkpoints: model folders that load by themselves, with all that training needs to go on as if never stopped.

A checkpoint is written beside its place, flushed and renamed, and only then are older ones removed. It lists the size
and hash of each of its files, and one that does not match is passed over for the one before it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from glasshouse import store
from glasshouse.errors import StoreError
from glasshouse.hub.run_folder import (
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
    """Write a checkpoint whole or not at all."""

    def fill(place: Path) -> None:
        fill_model(place)
        store.write_tensors(place / TENSORS, state.tensors)
        files = {path.name: size_and_hash(path) for path in sorted(place.iterdir())}
        table = {"format": FORMAT, "files": files, "metadata": state.metadata}
        (place / STATE).write_text(json.dumps(with_checksum(table), indent=1) + "\n", encoding="utf-8")

    store.replace_folder(folder, fill, ".*")


def read(folder: Path) -> CheckpointData:
    """Read the training state of a checkpoint whose files are all as they were written; else name one that is not."""
    table = check_manifest(folder)
    return CheckpointData(store.read_tensors(folder / TENSORS), table["metadata"])


class Checkpoints:
    """The checkpoints of a run: the last few, and the best; the models of others become its history."""

    def __init__(self, place: Path, keep: int = 2, history: int = 0) -> None:
        self.place, self.keep = place, keep
        self.history = Snapshots(place.with_name(SNAPSHOTS), history)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        self._writing: Future[None] | None = None

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, the newest first."""
        return saved_steps(self.place)[::-1]

    def folder(self, step: int) -> Path:
        """Return where the checkpoint of a step is."""
        return self.place / step_folder_name(step)

    def newest(self) -> tuple[int, CheckpointData, list[str]] | None:
        """Return the newest checkpoint that is intact: its step, its state, and what is wrong with newer ones."""
        wrong: list[str] = []
        for step in self.steps():
            try:
                return step, read(self.folder(step)), wrong
            except StoreError as error:
                wrong.append(str(error))
        if wrong:
            raise StoreError(f"no checkpoint in {str(self.place)!r} is intact: {wrong[0]}")
        return None

    def save(
        self, step: int, fill_model: Callable[[Path], None], state: CheckpointData, best: int | None = None
    ) -> None:
        """Write the checkpoint of a step while training goes on; what is given must not change meanwhile.

        A failure of the one before is raised here. `best` is a step whose checkpoint is kept, whatever comes.
        """
        self.wait()
        self._writing = self._pool.submit(self._save, step, fill_model, state, best)

    def begin(self, fill_model: Callable[[Path], None]) -> None:
        """Write the model that the history begins with, likewise while training goes on."""
        self.wait()
        self._writing = self._pool.submit(self.history.save_initial, fill_model)

    def check(self) -> None:
        """Raise what went wrong with a checkpoint that was being written, if it is known by now."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def wait(self) -> None:
        """Wait until what is being written is there."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _save(self, step: int, fill_model: Callable[[Path], None], state: CheckpointData, best: int | None) -> None:
        self.history.make_room(lambda: write(self.folder(step), fill_model, state))
        for old in reversed(self.steps()[self.keep :]):
            if old not in (step, best):
                self.history.archive(self.folder(old))
