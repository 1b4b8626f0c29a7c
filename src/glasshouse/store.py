"""Tensors on disk: safetensors files, and folders that are written atomically.

The only code that reads or writes weights. A folder is written under a temporary name, flushed to disk and renamed,
so that a reader finds the old one or the new one, never a partial one.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from glasshouse.errors import StoreError

FORMAT_VERSION = 2
MANIFEST = "manifest.json"
TENSORS = "tensors.safetensors"
HEADER_LIMIT = 8 * 2**20  # bytes; a model with 10,000 tensors has about one million


def write(folder: str | Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, Any]) -> None:
    """Write tensors and metadata (plain JSON values) as one folder, atomically.

    A folder written before is replaced; one with other files is an error.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write(f"{folder}/two", {"a": torch.ones(2)}, {"colour": "green"})
    ...     tensors, metadata = read(f"{folder}/two")
    >>> tensors["a"], metadata
    (tensor([1., 1.]), {'colour': 'green'})
    """

    def fill(path: Path) -> None:
        write_tensors(path / TENSORS, tensors)
        size = (path / TENSORS).stat().st_size
        manifest = {
            "format": FORMAT_VERSION,
            "bytes": size,
            "sha256": sha256(path / TENSORS),
            "metadata": dict(metadata),
        }
        (path / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")

    replace_folder(Path(folder), fill, rf"{MANIFEST}|{TENSORS}")


def read(folder: str | Path, *, verify: bool = True) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Load a folder of `write`, as memory-mapped tensors; `verify` checks the hash first.

    A wrong size, a wrong hash, an unknown format or a missing file is a `StoreError` that names the file.
    """
    folder = surviving_folder(Path(folder))
    manifest = _manifest(folder / MANIFEST)
    path = folder / TENSORS
    _check_file(path, manifest, verify)
    return read_tensors(path), manifest["metadata"]


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors as one safetensors file, marked as PyTorch's, as other readers expect, with metadata."""
    header = {"format": "pt", **(metadata or {})}
    try:
        save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path, header)
    except SafetensorError as error:  # for example a full disk
        raise OSError(f"{str(path)!r}: {error}") from None


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Memory-map the tensors of a safetensors file; each is read from disk when first used.

    Writes do not change the file. A file that is damaged, or whose header claims more than its size, is an error.
    """
    with _opened(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def read_metadata(path: Path) -> dict[str, str]:
    """Return the metadata in the header of a safetensors file."""
    with _opened(path) as file:
        return file.metadata() or {}


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file after checking the size of its header."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
    if header > size - 8:
        raise StoreError(
            f"{str(path)!r} has {size} bytes and a header of {header}, so it is truncated; fetch it again."
        )
    if header > HEADER_LIMIT:
        raise StoreError(f"{str(path)!r} has a header of {header} bytes, which no real model needs; do not use it.")
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, TypeError) as error:  # TypeError: an impossible shape
        reason = str(error).partition("\n")[0]
        raise StoreError(f"{str(path)!r} is not a valid safetensors file ({reason}); fetch it again.") from None


def replace_folder(folder: Path, fill: Callable[[Path], None], ours: str) -> None:
    """Let `fill` write a new folder, then rename it to `folder`.

    A folder with a file whose name does not match the expression `ours` is left alone. Between the two renames the
    old folder has another name, where `surviving_folder` finds it.
    """
    new = begin_folder(folder, ours)
    try:
        fill(new)
        for path in new.rglob("*"):
            flush(path)
        commit_folder(folder)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise


def begin_folder(folder: Path, ours: str) -> Path:
    """Make the empty folder that is filled, flushed file by file, and renamed by `commit_folder`."""
    check_replaceable(folder, ours)
    new = unfinished_folder(folder)
    new.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(new, ignore_errors=True)  # left by a process that was killed
    new.mkdir()
    return new


def commit_folder(folder: Path) -> None:
    """Rename a folder that was filled to its name, in place of an older one."""
    folder = folder.resolve()  # the target of a link, so that the link itself stays
    new, old = unfinished_folder(folder), _backup_path(folder)
    flush(new)
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    new.rename(folder)
    flush(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def check_replaceable(folder: Path, ours: str) -> None:
    """Raise what `replace_folder` would raise, before hours of work.

    >>> check_replaceable(Path("not there yet"), "config.json")
    """
    folder = folder.resolve()
    if folder.exists() and not folder.is_dir():
        raise StoreError(f"{str(folder)!r} is a file; choose another name for the folder.")
    if Path.cwd().is_relative_to(folder):
        raise StoreError(f"{str(folder)!r} is the current folder, which cannot be replaced; choose another.")
    for path in folder.iterdir() if folder.is_dir() else ():
        if not re.fullmatch(ours, path.name):
            raise StoreError(
                f"{str(folder)!r} contains {path.name!r}, which would be lost; move it away or choose another folder."
            )


def unfinished_folder(folder: Path) -> Path:
    """Return the folder that `replace_folder` fills and then renames.

    >>> unfinished_folder(Path("runs/step-00000100")).name
    '.step-00000100.new'
    """
    folder = folder.resolve()
    return folder.with_name(f".{folder.name}.new")


def _backup_path(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


def surviving_folder(folder: Path) -> Path:
    """Return the folder, or its backup if a process was killed while replacing it."""
    folder = folder.absolute()
    if not folder.exists() and _backup_path(folder).exists():
        return _backup_path(folder)
    return folder


def flush(path: Path) -> None:
    """Flush a file or a folder to disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows has no handle to flush a folder with
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _manifest(path: Path) -> dict[str, Any]:
    damaged = StoreError(f"{str(path)!r} is damaged; restore it or write the folder again.")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StoreError(f"there is no {str(path)!r}; give a folder written by glasshouse.") from None
    except (ValueError, RecursionError):
        raise damaged from None
    if not isinstance(manifest, dict) or "format" not in manifest:
        raise damaged
    if manifest["format"] != FORMAT_VERSION:
        raise StoreError(
            f"{str(path)!r} is of format {manifest['format']!r}, but this version reads format {FORMAT_VERSION}; "
            "use the version of glasshouse that wrote it."
        )
    match manifest:
        case {"bytes": int(), "sha256": str(), "metadata": dict()}:
            return manifest
    raise damaged


def _check_file(path: Path, manifest: Mapping[str, Any], verify: bool) -> None:
    if not path.is_file():
        raise StoreError(f"{str(path)!r} is missing; restore it or write the folder again.")
    size = path.stat().st_size
    if size != manifest["bytes"]:
        raise StoreError(f"{str(path)!r} has {size} bytes instead of {manifest['bytes']}; write it again.")
    if verify and sha256(path) != manifest["sha256"]:
        raise StoreError(f"{str(path)!r} does not match its hash, so its contents changed; write it again.")


def sha256(path: Path) -> str:
    """Return the SHA-256 hash of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
