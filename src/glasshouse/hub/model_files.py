"""Files beside the weights of a model folder: checksums.json and verified.json."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from glasshouse.errors import StoreError
from glasshouse.hub.model_folder import CHECKSUMS, CONFIG, VERIFIED, ModelFolder, write_json

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


def describe(folder: ModelFolder) -> str | None:
    """Return the result in one line, None if there is none; a damaged file is no error.

    For example `verified 2026-11-15, largest differences: cached 2.4e-07, round trip 0.0e+00`.
    """
    if folder.file(VERIFIED) is None:
        return None
    try:
        table = folder.json(VERIFIED) or {}
        (date,) = re.findall(r"^\d{4}-\d\d-\d\d$", table["date"], re.ASCII)
        compared = {name: float(value) for name, value in table["differences"].items() if value is not None}
        listed = ", ".join(f"{name} {value:.1e}" for name, value in compared.items())
    except (StoreError, LookupError, TypeError, ValueError, AttributeError, OverflowError):
        return f"{VERIFIED} is damaged; run `glasshouse verify` again"
    if not compared or not listed.isprintable() or "nan" in listed or "inf" in listed:
        return f"{VERIFIED} is damaged; run `glasshouse verify` again"
    if table.get("files") != fingerprints(folder.path):
        return f"{VERIFIED} is of other weights or another config; run `glasshouse verify` again"
    return f"verified {date}, largest differences: {listed}"


def fingerprints(folder: Path) -> dict[str, str]:
    """Hash the config and each weights file: only its size, beginning, middle and end, for speed."""
    return {path.name: _fingerprint(path) for path in (folder / CONFIG, *sorted(folder.glob("*.safetensors")))}


def _fingerprint(path: Path, length: int = 2**16) -> str:
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for start in (0, size // 2, max(0, size - length)):
            file.seek(start)
            digest.update(file.read(length))
    return digest.hexdigest()
