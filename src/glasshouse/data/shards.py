"""Writes a corpus shard by shard, so that an interrupted writer resumes after the last complete shard.

All shards but the last have exactly `shard_tokens` ids, so that where they end depends on the ids alone.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glasshouse.data.corpus import MANIFEST, Ids, check_file, is_list_of_shards, read_json
from glasshouse.errors import GlasshouseError, InputError, StoreError

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

PROGRESS, LOCK = "progress.json", ".lock"
SHARD_TOKENS = 2**24  # ids


def _temporary_name(name: str) -> str:
    """Return the name under which a file is written before it replaces the old one."""
    return f".{name}.new"


EARLY = {LOCK, _temporary_name(PROGRESS)}  # files that exist before the first progress.json


@contextmanager
def write_errors(folder: Path) -> Iterator[None]:
    """Convert an OSError into a StoreError that names the folder."""
    try:
        yield
    except GlasshouseError:
        raise
    except (OSError, ValueError) as error:  # the latter for a name with a NUL character
        reason = getattr(error, "strerror", None) or error
        raise StoreError(
            f"{str(folder)!r} cannot be written to ({reason}); free disk space or choose another folder; the same "
            "call resumes after the last complete shard."
        ) from None


class ShardWriter:
    """Writes the shards of one job into a folder; `state` is what the job needs to resume."""

    def __init__(
        self,
        folder: Path,
        job: dict[str, Any],
        dtype: type[np.unsignedinteger[Any]],
        shard_tokens: int = SHARD_TOKENS,
    ) -> None:
        if shard_tokens < 1:
            raise InputError(f"shard_tokens is {shard_tokens}, but it must be at least 1.")
        self.folder, self.job, self.dtype, self.shard_tokens = folder, job, dtype, shard_tokens
        self.shards: list[dict[str, Any]] = []
        self.state: dict[str, Any] = {}
        self.skip = (0, 0)  # ids and ends that are added again after `state`, and are written already
        self._ids: list[Ids] = []
        self._ends: list[NDArray[np.int64]] = []
        self._length = 0
        with write_errors(folder):
            self.complete = (folder / MANIFEST).exists()

    def __enter__(self) -> ShardWriter:
        """Lock the folder, and resume from the shards in it."""
        folder = self.folder
        with write_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        if self.complete:
            self._resume(folder / MANIFEST)
            return self
        if not (folder / PROGRESS).exists() and {path.name for path in folder.iterdir()} - EARLY:
            raise StoreError(f"{str(folder)!r} contains other files; choose a folder that is new or empty.")
        with write_errors(folder):
            self._lock = (folder / LOCK).open("w")
        if fcntl is not None:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released when a process is killed
            except OSError:
                raise StoreError(f"another process is writing into {str(folder)!r}; wait for it.") from None
        if (folder / PROGRESS).exists():
            self._resume(folder / PROGRESS)
        self._put_progress()
        return self

    def __exit__(self, *_: object) -> None:
        if not self.complete:
            (self.folder / LOCK).unlink(missing_ok=True)
            self._lock.close()

    def _resume(self, path: Path) -> None:
        """Take over the shards listed in a file, if they belong to this job and match their hashes."""
        found = read_json(path)
        match found:
            case {"job": dict(job), "shards": list(shards)} if is_list_of_shards(shards):
                state = found.get("state")
            case _:
                raise StoreError(f"{str(path)!r} is corrupt; delete the folder and prepare the text again.")
        if not shards:
            return  # nothing is lost by starting over
        for key in sorted({*job, *self.job}):
            if job.get(key) != self.job.get(key):
                raise StoreError(
                    f"{str(self.folder)!r} was started with different {key}, or {key} changed since; delete "
                    f"{str(self.folder)!r} to prepare it again, or choose another folder."
                )
        if not self.complete:
            for entry in (shard[part] for shard in shards for part in ("ids", "ends")):
                check_file(self.folder / entry["file"], entry, verify=True)
        self.shards, self.state = shards, state if isinstance(state, dict) else {}
        match self.state.get("skip", [0, 0]):
            case [int(ids), int(ends)] if ids >= 0 and ends >= 0:
                self.skip = (ids, ends)
            case _:
                raise StoreError(f"{str(path)!r} is corrupt; delete the folder and prepare the text again.")

    def add(self, ids: Ids, ends: NDArray[np.int64], state: Callable[[], dict[str, Any]]) -> None:
        """Add ids and the end offsets of complete arrays; `state` returns the state to resume from before them."""
        at, end = min(self.skip[0], len(ids)), min(self.skip[1], len(ends))
        self.skip = (self.skip[0] - at, self.skip[1] - end)
        while self._length + len(ids) - at > self.shard_tokens:
            cut = at + self.shard_tokens - self._length
            last = int(np.searchsorted(ends, cut, side="right"))  # empty arrays at the cut belong before it
            self._append(ids[at:cut], ends[end:last] - at)
            at, end = cut, last
            self._flush({**state(), "skip": [at, end]})
        self._append(ids[at:], ends[end:] - at)

    def _append(self, ids: Ids, ends: NDArray[np.int64]) -> None:
        if len(ids) and int(ids.max()) > np.iinfo(self.dtype).max:
            raise StoreError(f"the number {int(ids.max())} is too large for {np.dtype(self.dtype)}; report this.")
        self._ids.append(ids.astype(self.dtype, copy=False))
        self._ends.append(ends + self._length)
        self._length += len(ids)

    def _flush(self, state: dict[str, Any]) -> None:
        name = f"{len(self.shards):05}"
        ids = self._write(f"{name}.ids.npy", self._ids, self.dtype)
        ends = self._write(f"{name}.ends.npy", self._ends, np.uint32)
        self.shards.append({"ids": ids, "ends": ends})
        self._ids, self._ends, self._length = [], [], 0
        self.state = state
        self._put_progress()

    def finish(self, state: dict[str, Any], manifest: dict[str, Any]) -> None:
        """Write the last shard and the manifest, which completes the corpus."""
        if self._length or not self.shards:
            self._flush({**state, "skip": [0, 0]})
        self._put(MANIFEST, {**manifest, "job": self.job, "shards": self.shards})
        (self.folder / PROGRESS).unlink(missing_ok=True)

    def _write(self, name: str, arrays: list[Any], dtype: type[np.integer[Any]]) -> dict[str, Any]:
        """Write arrays as one .npy file; return its name, size and hash."""
        length = sum(map(len, arrays))
        digest = hashlib.sha256()
        with write_errors(self.folder), (self.folder / name).open("wb") as file:
            header = {"descr": np.dtype(dtype).newbyteorder("<").str, "fortran_order": False, "shape": (length,)}
            np.lib.format.write_array_header_1_0(file, header)
            file.flush()
            digest.update((self.folder / name).read_bytes())
            for array in arrays:
                data = array.astype(np.dtype(dtype).newbyteorder("<"), copy=False).data
                digest.update(data)
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
            return {"file": name, "bytes": file.tell(), "sha256": digest.hexdigest()}

    def _put_progress(self) -> None:
        self._put(PROGRESS, {"job": self.job, "shards": self.shards, "state": self.state})

    def _put(self, name: str, table: dict[str, Any]) -> None:
        temporary = self.folder / _temporary_name(name)
        with write_errors(self.folder), temporary.open("w", encoding="utf-8") as file:
            # One line per key: readable, and with many sources a hundred times faster than json's indentation.
            lines = (f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in table.items())
            file.write("{\n" + ",\n".join(lines) + "\n}\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.folder / name)
