"""Tensors on disk: safetensors and a JSON manifest in one folder, whole or not there at all.

The only code that reads or writes weights. A folder is written beside its place, flushed to the disk and then
renamed, so that a reader finds the old one or the new one and never half of either.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from glasshouse.errors import StoreError

FORMAT = 1
MANIFEST = "manifest.json"
TENSORS = "tensors.safetensors"


def write(folder: str | Path, tensors: Mapping[str, torch.Tensor], about: Mapping[str, Any]) -> None:
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
        save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, place / TENSORS)
        size = (place / TENSORS).stat().st_size
        manifest = {"format": FORMAT, "bytes": size, "sha256": _sha256(place / TENSORS), "about": dict(about)}
        (place / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")

    folder = Path(folder)
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name not in (MANIFEST, TENSORS):
            raise StoreError(f"{str(folder)!r} holds {path.name!r}, which would be lost; choose another folder.")
    replace_folder(folder, fill)


def read(folder: str | Path, *, verify: bool = True) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Read what `write` wrote, as memory-mapped tensors; `verify` compares the hashes first.

    A wrong size, a wrong hash, an unknown format or a missing file is a `StoreError` that names the file.
    """
    folder = _standing(Path(folder))
    manifest = _manifest(folder / MANIFEST)
    path = folder / TENSORS
    _check_file(path, manifest, verify)
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, manifest["about"]  # noqa: SIM118
    except SafetensorError as error:
        raise StoreError(f"{str(path)!r} is not a safetensors file ({error}); write it again.") from None


def replace_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write into a new folder, then put that in the place of `folder`.

    Between the two renames the old folder stands under another name, where `read` still finds it.
    """
    folder = folder.absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh, old = folder.with_name(f".{folder.name}.new"), _aside(folder)
    shutil.rmtree(fresh, ignore_errors=True)  # left behind by a writer that was killed
    fresh.mkdir()
    try:
        fill(fresh)
        for path in (*fresh.iterdir(), fresh):
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


def _aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


def _standing(folder: Path) -> Path:
    folder = folder.absolute()
    if not folder.exists() and _aside(folder).exists():
        return _aside(folder)
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
    except ValueError:
        raise damaged from None
    if not isinstance(manifest, dict) or "format" not in manifest:
        raise damaged
    if manifest["format"] != FORMAT:
        raise StoreError(
            f"{str(path)!r} is of format {manifest['format']!r}, but this version reads format {FORMAT}; "
            "use the version of glasshouse that wrote it."
        )
    if not {"bytes", "sha256", "about"} <= manifest.keys():
        raise damaged
    return manifest


def _check_file(path: Path, manifest: Mapping[str, Any], verify: bool) -> None:
    if not path.is_file():
        raise StoreError(f"{str(path)!r} is missing; restore it or write the folder again.")
    size = path.stat().st_size
    if size != manifest["bytes"]:
        raise StoreError(f"{str(path)!r} has {size} bytes instead of {manifest['bytes']}; write it again.")
    if verify and _sha256(path) != manifest["sha256"]:
        raise StoreError(f"{str(path)!r} does not match its hash, so its contents changed; write it again.")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
