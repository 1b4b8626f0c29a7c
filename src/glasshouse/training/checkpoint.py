"""Checkpoints: model folders that load by themselves, with all that training needs to go on as if never stopped.

A checkpoint is written beside its place, flushed and renamed, and only then are older ones removed. It lists the size
and hash of each of its files, and one that does not match is passed over for the one before it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from glasshouse import store
from glasshouse.errors import StoreError
from glasshouse.training.history import HISTORY, History, name_of, steps_in
from glasshouse.training.state import State

FORMAT = 1
TENSORS, ABOUT = "training.safetensors", "training.json"  # which a history does without


def write(folder: Path, fill_model: Callable[[Path], None], state: State) -> None:
    """Write a checkpoint whole or not at all."""

    def fill(place: Path) -> None:
        fill_model(place)
        store.write_tensors(place / TENSORS, state.tensors)
        files = {path.name: _measure(path) for path in sorted(place.iterdir())}
        table = {"format": FORMAT, "files": files, "about": state.about}
        (place / ABOUT).write_text(json.dumps(_sealed(table), indent=1) + "\n", encoding="utf-8")

    store.replace_folder(folder, fill, ".*")


def read(folder: Path) -> State:
    """Read the training state of a checkpoint whose files are all as they were written; else name one that is not."""
    try:
        table = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        sound = table == _sealed({name: value for name, value in table.items() if name != "sha256"})
        sound = sound and {"format", "files", "about"} <= table.keys()
    except FileNotFoundError:
        raise StoreError(f"{str(folder / ABOUT)!r} is missing, so this is no whole checkpoint.") from None
    except (ValueError, AttributeError, RecursionError):
        sound = False
    if not sound:
        raise StoreError(f"{str(folder / ABOUT)!r} is damaged; use another checkpoint.")
    if table["format"] != FORMAT:
        raise StoreError(
            f"{str(folder / ABOUT)!r} is of format {table['format']!r}, but this version reads format {FORMAT}."
        )
    for name, expected in table["files"].items():
        if not (folder / name).is_file():
            raise StoreError(f"{str(folder / name)!r} is missing; use another checkpoint.")
        if _measure(folder / name) != expected:
            raise StoreError(f"{str(folder / name)!r} is not what was written; use another checkpoint.")
    return State(store.read_tensors(folder / TENSORS), table["about"])


class Checkpoints:
    """The checkpoints of a run: the last few, and the best; the models of others become its history."""

    def __init__(self, place: Path, keep: int = 2, history: int = 0) -> None:
        self.place, self.keep = place, keep
        self.history = History(place.with_name(HISTORY), history)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        self._writing: Future[None] | None = None

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, the newest first."""
        return steps_in(self.place)[::-1]

    def folder(self, step: int) -> Path:
        """Return where the checkpoint of a step is."""
        return self.place / name_of(step)

    def newest(self) -> tuple[int, State, list[str]] | None:
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

    def save(self, step: int, fill_model: Callable[[Path], None], state: State, best: int | None = None) -> None:
        """Write the checkpoint of a step while training goes on; what is given must not change meanwhile.

        A failure of the one before is raised here. `best` is a step whose checkpoint is kept, whatever comes.
        """
        self.wait()
        self._writing = self._pool.submit(self._save, step, fill_model, state, best)

    def begin(self, fill_model: Callable[[Path], None]) -> None:
        """Write the model that the history begins with, likewise while training goes on."""
        self.wait()
        self._writing = self._pool.submit(self.history.begin, fill_model)

    def check(self) -> None:
        """Raise what went wrong with a checkpoint that was being written, if it is known by now."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def wait(self) -> None:
        """Wait until what is being written is there."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _save(self, step: int, fill_model: Callable[[Path], None], state: State, best: int | None) -> None:
        self.history.make_room(lambda: write(self.folder(step), fill_model, state))
        for old in reversed(self.steps()[self.keep :]):
            if old not in (step, best):
                self.history.take(self.folder(old))


def _measure(path: Path) -> list[int | str]:
    return [path.stat().st_size, store.sha256(path)]


def _sealed(table: dict[str, Any]) -> dict[str, Any]:
    """Return a table with the hash of what it says, so that a changed letter is found."""
    return {**table, "sha256": hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()}
