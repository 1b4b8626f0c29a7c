"""The Python standard library as text: a few hundred to a few thousand documents on every machine."""

from __future__ import annotations

import codecs
import functools
import hashlib
import os
import sysconfig
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path

from glasshouse.data.builtin.splits import SPLITS, split_of
from glasshouse.errors import InputError

_FEWEST = 50
_NOT_OURS = ("site-packages", "dist-packages", "__pycache__")


def count(split: str) -> int:
    """Count the documents of a split.

    >>> count("train") > count("test") > 0
    True
    """
    return len(_files()[split])


def item(split: str, index: int) -> tuple[str, str]:
    """Return a document: its path within the library, and its text, with Unix newlines.

    >>> name, text = item("train", 0)
    >>> name
    '__future__.py'
    """
    name = _files()[split][index]
    return name, _read(_library() / name)


def _library() -> Path:
    return Path(sysconfig.get_path("stdlib"))


@functools.cache
def _files() -> Mapping[str, tuple[str, ...]]:
    files: dict[str, list[str]] = {split: [] for split in SPLITS}
    seen = set()
    library = _library()
    for path in sorted(_python_files(library)):
        try:
            text = _read(library / path)
        except (SyntaxError, UnicodeDecodeError, OSError):
            continue  # the library's tests include undecodable files; a link may be broken
        digest = hashlib.sha256(text.encode()).digest()
        if text.strip() and digest not in seen:  # a copy could be in another split
            seen.add(digest)
            files[split_of(path)].append(path)
    if len(seen) < _FEWEST:
        raise InputError(
            f"the standard library in {str(library)!r} has {len(seen)} Python files, too few for a corpus; "
            "use a Python that comes with its sources, or another dataset."
        )
    return {split: tuple(paths) for split, paths in files.items()}


def _python_files(library: Path) -> Iterator[str]:
    for folder, below, names in os.walk(library):
        below[:] = (name for name in below if name not in _NOT_OURS)
        for name in names:
            if name.endswith(".py"):
                yield (Path(folder) / name).relative_to(library).as_posix()


def _read(path: Path) -> str:
    with tokenize.open(path) as file:
        if codecs.lookup(file.encoding).name not in ("utf-8", "utf-8-sig"):
            raise SyntaxError(f"{path} is encoded as {file.encoding}")
        return file.read()
