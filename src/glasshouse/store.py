"""Tensors on disk: safetensors files, and folders that are whole or not there at all.

The only code that reads or writes weights. A folder is written beside its place, flushed to the disk and then
renamed, so that a reader finds the old one or the new one and never half of either.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from glasshouse.errors import StoreError

FORMAT_VERSION = 2
MANIFEST = "manifest.json"
TENSORS = "tensors.safetensors"
HEADER_LIMIT = 8 * 2**20  # bytes; that of a model with 10,000 tensors has about one million


def write(folder: str | Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, Any]) -> None:
    """Write tensors and what is to be known about them (plain JSON values) as one folder, atomically.

    A folder written before is replaced; one that holds anything else is left alone.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as place:
    ...     write(f"{place}/two", {"a": torch.ones(2)}, {"colour": "green"})
    ...     tensors, about = read(f"{place}/two")
    >>> tensors["a"], about
    (tensor([1., 1.]), {'colour': 'green'})
    """

    def fill(place: Path) -> None:
        write_tensors(place / TENSORS, tensors)
        size = (place / TENSORS).stat().st_size
        manifest = {
            "format": FORMAT_VERSION,
            "bytes": size,
            "sha256": sha256(place / TENSORS),
            "metadata": dict(metadata),
        }
        (place / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")

    replace_folder(Path(folder), fill, rf"{MANIFEST}|{TENSORS}")


def read(folder: str | Path, *, verify: bool = True) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Read what `write` wrote, as memory-mapped tensors; `verify` compares the hashes first.

    A wrong size, a wrong hash, an unknown format or a missing file is a `StoreError` that names the file.
    """
    folder = surviving_folder(Path(folder))
    manifest = _manifest(folder / MANIFEST)
    path = folder / TENSORS
    _check_file(path, manifest, verify)
    return read_tensors(path), manifest["metadata"]


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors as one safetensors file, marked as torch's, as other readers expect."""
    try:
        save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path, {"format": "pt"})
    except SafetensorError as error:  # a full disk, in the library's own words
        raise OSError(f"{str(path)!r}: {error}") from None


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Map the tensors of a safetensors file into memory: none is read from the disk before it is used.

    Writing to one changes it in memory alone. A file that is damaged or pretends to be larger than it is, is refused.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
    if header > size - 8:
        raise StoreError(
            f"{str(path)!r} has {size} bytes and a header of {header}, so it was cut short; fetch it again."
        )
    if header > HEADER_LIMIT:
        raise StoreError(f"{str(path)!r} has a header of {header} bytes, which no real model needs; do not use it.")
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, TypeError) as error:  # the second for a shape that no tensor can have
        reason = str(error).partition("\n")[0]
        raise StoreError(f"{str(path)!r} is not a sound safetensors file ({reason}); fetch it again.") from None


def replace_folder(folder: Path, fill: Callable[[Path], None], ours: str) -> None:
    """Let `fill` write into a new folder, then put that in the place of `folder`.

    A folder that holds a file whose name the expression `ours` does not match is left alone. Between the two renames
    the old folder stands under another name, where `standing` finds it.
    """
    folder = folder.resolve()  # where a link leads, so that the link itself stays
    check_replaceable(folder, ours)
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh, old = folder.with_name(f".{folder.name}.new"), _backup_path(folder)
    shutil.rmtree(fresh, ignore_errors=True)  # left behind by a writer that was killed
    fresh.mkdir()
    try:
        fill(fresh)
        for path in (*fresh.rglob("*"), fresh):
            _flush(path)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    fresh.rename(folder)
    _flush(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def check_replaceable(folder: Path, ours: str) -> None:
    """Refuse what `replace_folder` would refuse, for those who would rather know before hours of work.

    >>> check_replaceable(Path("not there yet"), "config.json")
    """
    folder = folder.resolve()
    if folder.exists() and not folder.is_dir():
        raise StoreError(f"{str(folder)!r} is a file; choose another name for the folder.")
    if Path.cwd().is_relative_to(folder):
        raise StoreError(f"{str(folder)!r} is the folder you stand in, which cannot be replaced; choose another.")
    for path in folder.iterdir() if folder.is_dir() else ():
        if not re.fullmatch(ours, path.name):
            raise StoreError(
                f"{str(folder)!r} holds {path.name!r}, which would be lost; move it away or choose another folder."
            )


def _backup_path(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


def surviving_folder(folder: Path) -> Path:
    """Return the folder, or the one set aside by a writer that was killed while replacing it."""
    folder = folder.absolute()
    if not folder.exists() and _backup_path(folder).exists():
        return _backup_path(folder)
    return folder


def _flush(path: Path) -> None:
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
        raise StoreError(f"there is no {str(path)!r}; give a folder that glasshouse wrote.") from None
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
    """Return the hash of a file's contents."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
