"""Hashes of the weights files of a model folder, written when it is saved and compared when it is loaded."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from glasshouse.errors import StoreError
from glasshouse.hub.model_folder import CHECKSUMS, ModelFolder, write_json

CHUNK_BYTES = 2**24  # hashed by threads: one SHA-256 of 500 MB takes half a second to a second
MAX_THREADS = 4


def with_checksums(write: Callable[[Path], None]) -> Callable[[Path], None]:
    """Return a function that writes a model folder, then the hashes of its weights files."""

    def write_all(folder: Path) -> None:
        write(folder)
        files = sorted(folder.glob("*.safetensors"))
        write_json(folder / CHECKSUMS, {path.name: chunked_sha256(path) for path in files})

    return write_all


def check_weights(folder: ModelFolder) -> None:
    """Raise StoreError for a weights file that is not what was saved; a folder without hashes is not checked."""
    for name, expected in (folder.json(CHECKSUMS) or {}).items():
        path = folder.file(name)
        if path is not None and path.suffix == ".safetensors" and chunked_sha256(path) != expected:
            raise StoreError(
                f"{str(path)!r} is not what was saved: its hash is not the one in checksums.json; restore it, or "
                "delete checksums.json if it was changed on purpose."
            )


def chunked_sha256(path: Path) -> str:
    """Return the SHA-256 of the SHA-256 hashes of a file's chunks of 16 MiB, which threads compute.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "a")
    >>> _ = path.write_bytes(b"abc")
    >>> chunked_sha256(path) == hashlib.sha256(hashlib.sha256(b"abc").digest()).hexdigest()
    True
    """

    def hashed(start: int) -> bytes:
        with path.open("rb") as file:
            file.seek(start)
            return hashlib.sha256(file.read(CHUNK_BYTES)).digest()

    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool:
        digests = pool.map(hashed, range(0, path.stat().st_size, CHUNK_BYTES))
        return hashlib.sha256(b"".join(digests)).hexdigest()
