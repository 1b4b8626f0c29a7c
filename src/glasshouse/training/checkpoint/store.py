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
from collections.abc import Callable, Mapping, Sequence
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
    STATE_STEM,
    TENSORS,
    check_manifest,
    saved_steps,
    step_folder_name,
    with_checksum,
)
from glasshouse.hub.tensor_shards import SavedTensors, TensorChunk, read_shards, shard_name, shard_names, write_shard
from glasshouse.training.checkpoint.shards import Files, together, write_folder
from glasshouse.training.distributed.processes import Processes

SNAPSHOTS = "snapshots"
MOVED = ".moved"
STATE_FILES = "training_state.*"  # of a checkpoint, in addition to its model
FULL = (errno.ENOSPC, errno.EDQUOT)
SINGLE = Processes()


@dataclass(frozen=True)
class CheckpointData:
    """Named tensors and JSON metadata of a checkpoint."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    shard: Mapping[str, TensorChunk] | None = None  # what this process writes instead, if tensors are sharded

    @property
    def saved(self) -> SavedTensors:
        """The tensors, of which each process reads what it needs."""
        return self.tensors if isinstance(self.tensors, SavedTensors) else SavedTensors.of(self.tensors)


def write(
    folder: Path, fill_model: Callable[[Path], None], state: CheckpointData, processes: Processes = SINGLE
) -> None:
    """Write a checkpoint atomically: every process its part of model and state, and the main one the manifest."""

    def fill(temporary: Path) -> None:
        fill_model(temporary)
        if state.shard is not None:
            name = shard_name(STATE_STEM, processes.rank + 1, processes.world_size)
            write_shard(temporary / name, state.shard)
        elif processes.is_main:
            store.write_tensors(temporary / TENSORS, state.tensors)

    def write_manifest(temporary: Path, files: Files) -> None:
        manifest = {"format": FORMAT, "files": files, "metadata": state.metadata}
        text = json.dumps(with_checksum(manifest), indent=1) + "\n"
        (temporary / STATE).write_text(text, encoding="utf-8")
        store.flush(temporary / STATE)

    write_folder(folder, fill, processes, write_manifest)


def read(folder: Path, processes: Processes = SINGLE) -> CheckpointData:
    """Load the training state of a checkpoint; a file that is damaged or missing is an error that names it.

    Every process verifies its share of the files, and an error of one is raised in all.
    """
    share = slice(processes.rank, None, processes.world_size)
    manifest, *_ = together(processes, lambda: check_manifest(folder, share=share))
    shards = [folder / name for name in shard_names(folder, STATE_STEM)]
    tensors = read_shards(shards) if shards else SavedTensors.of(store.read_tensors(folder / TENSORS))
    return CheckpointData(tensors, manifest["metadata"])


class Checkpoints:
    """The checkpoints of a run: the latest and the best; others become weights-only snapshots."""

    def __init__(self, root: Path, keep: int = 2, keep_snapshots: int = 0, processes: Processes = SINGLE) -> None:
        self.root, self.keep = root, keep
        # Saving happens in a thread, which must not share a group with the main one.
        self.processes, self._saving = processes, processes.with_own_group()
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
        for step in self.processes.gather(self.steps())[0]:
            try:
                return step, read(self.folder(step), self.processes), errors
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
        """Write the initial model as a snapshot, in the background; skip it if the disk is full."""
        self.wait()
        self._writing = self._pool.submit(self._save_initial, fill_model)

    def _save_initial(self, fill_model: Callable[[Path], None]) -> None:
        with suppress(OSError):
            write_folder(self.snapshots.folder(0), fill_model, self._saving)

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
        self.snapshots.make_room(lambda: write(self.folder(step), fill_model, state, self._saving), self._saving)
        for old in reversed(self.steps()[self.keep :]) if self._saving.is_main else ():
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

    def archive(self, checkpoint: Path) -> None:
        """Turn a checkpoint into a snapshot; if that fails, delete it."""
        if self.limit:
            with suppress(OSError):
                self.root.mkdir(exist_ok=True)
                checkpoint.rename(self.root / f".{checkpoint.name}{MOVED}")
            self._finish_moves()
        shutil.rmtree(checkpoint, ignore_errors=True)

    def make_room(self, work: Callable[[], object], processes: Processes = SINGLE) -> None:
        """Run work that writes to disk; while the disk is full, delete half of the snapshots and retry.

        Processes that work together get the same error, and the first one deletes.
        """
        while True:
            try:
                work()
                return
            except OSError as error:
                if not _is_full(error) or not processes.gather(processes.is_main and self._halve())[0]:
                    raise

    def _halve(self) -> bool:
        """Delete half of the snapshots; return whether there are fewer now."""
        count = len(self.steps())
        self._thin(count // 2)
        return len(self.steps()) < count

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
