"""Reads a text file: from disk, decompressed, validated as UTF-8, in blocks or lines."""

from __future__ import annotations

import codecs
import hashlib
import importlib
import itertools
import os
import stat
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, Literal

from glasshouse.errors import InputError

BLOCK = 2**20  # bytes read from a file at a time
_STEP = 2**11  # bytes decompressed at a time, as each can expand to 32,768

Errors = Literal["strict", "replace"]
OnBytes = Callable[[int], None]  # bytes read from disk since the last call
OnHash = Callable[[int, int, str], None]  # called at the end of a file: its index, size and SHA-256 on disk


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A source file: its path, kind and compression, and the callbacks for reading it."""

    path: Path
    kind: str
    compression: str
    index: int
    errors: Errors
    on_bytes: OnBytes | None
    on_hash: OnHash | None

    def raw(self) -> Iterator[bytes]:
        """Yield the bytes of the file on disk."""
        digest, size = hashlib.sha256(), 0
        with read_errors(self.path):
            file = FileIO(self.path, opener=_open)
        with file:
            state = os.fstat(file.fileno())
            require_file(self.path, state)
            # A small file is read in one call; files in /proc report size 0.
            step = min(max(state.st_size, 4096) + 1, BLOCK)
            while block := self.read(file, step):
                size += len(block)
                if self.on_hash:
                    digest.update(block)
                if self.on_bytes:
                    self.on_bytes(len(block))
                yield block
        if self.on_hash:
            self.on_hash(self.index, size, digest.hexdigest())

    def read(self, file: FileIO, size: int) -> bytes | None:
        with read_errors(self.path):
            return file.read(size)

    def decompressed(self) -> Iterator[bytes]:
        """Yield the decompressed bytes; a file may be several concatenated streams."""
        stream: Any = None
        padding = b""
        for block in self.raw():
            for at in range(0, len(block), _STEP):
                data = block[at : at + _STEP]
                while data:
                    if stream is None and not (data := data.lstrip(padding)):
                        break
                    stream = stream or self.decompressor()
                    try:
                        text = stream.decompress(data)
                    except Exception as error:  # each library has its own types
                        raise InputError(f"{str(self.path)!r} is corrupt ({error}); download it again.") from None
                    data = b""
                    if stream.eof:
                        data, stream = stream.unused_data, None
                        padding = b"\0" if self.compression == ".gz" else b""  # padding on tapes, which gzip accepts
                    if text:
                        yield text
        if stream:
            raise InputError(f"{str(self.path)!r} is truncated; download it again.")

    def decompressor(self) -> Any:  # noqa: ANN401 - the two have no common type
        if self.compression == ".gz":
            return zlib.decompressobj(wbits=31)
        return extra_module("zstandard", "zstd").ZstdDecompressor().decompressobj()

    def blocks(self) -> Iterator[bytes]:
        """Yield the text as valid UTF-8, in whole characters, without a byte order mark."""
        rest, offset, at_start = b"", 0, True
        for block in itertools.chain(self.decompressed() if self.compression else self.raw(), (b"",)):
            data = rest + block
            valid, rest = data, b""
            if not data.isascii():
                try:
                    text, used = codecs.utf_8_decode(data, self.errors, not block)
                except UnicodeDecodeError as error:
                    raise not_utf8(repr(str(self.path)), offset + error.start) from None
                valid, rest = data[:used] if self.errors == "strict" else text.encode(), data[used:]
            offset += len(data) - len(rest)
            if at_start and valid:
                valid, at_start = valid.removeprefix(codecs.BOM_UTF8), False
            if valid:
                yield valid

    def lines(self, max_bytes: int) -> Iterator[bytes]:
        r"""Yield the lines without their \n, the only line ending; refuse one longer than `max_bytes`."""
        partial: list[bytes] = []
        number, size = 1, 0
        for block in self.blocks():
            first, *others = block.split(b"\n")
            partial.append(first)
            size += len(first)
            if size > max_bytes:
                raise too_long(f"line {number} of {str(self.path)!r}", max_bytes)
            if others:
                yield b"".join(partial)
                yield from others[:-1]
                partial = others[-1:]
                number, size = number + len(others), len(others[-1])
        if last := b"".join(partial):
            yield last


def _open(path: str, flags: int) -> int:
    """Open a file, without blocking on a pipe that has no writer."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def require_file(path: Path, state: os.stat_result) -> None:
    """Refuse what is not a regular file: a pipe can block forever, and a device such as /dev/zero has no end."""
    if not stat.S_ISREG(state.st_mode):
        kinds = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder"}
        kind = kinds.get(stat.S_IFMT(state.st_mode), "a device")
        link = f", through a link to {os.fspath(path.resolve())!r}" if path.is_symlink() else ""
        raise InputError(f"{str(path)!r} is {kind}{link}, but text is read from files; write it to one first.")


@contextmanager
def read_errors(path: Path) -> Iterator[None]:
    """Convert an OSError into an InputError that names the file."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"{str(path)!r} cannot be read ({error.strerror or error}); check the file, its permissions and the disk."
        ) from None


def place(path: Path, number: int) -> str:
    """Return where a record is: the line of a file, or the row or object of one that need not have lines.

    >>> place(Path("a.tsv"), 3), place(Path("a.parquet"), 3), place(Path("a.json.gz"), 3)
    ("line 3 of 'a.tsv'", "row 3 of 'a.parquet'", "object 3 of 'a.json.gz'")
    """
    nouns = {".parquet": "row", ".arrow": "row", ".json": "object"}
    noun = next((nouns[suffix] for suffix in map(str.lower, path.suffixes) if suffix in nouns), "line")
    return f"{noun} {number} of {str(path)!r}"


def extra_module(module: str, extra: str, files: str = "") -> Any:  # noqa: ANN401 - a module that may not be installed
    """Import a library that an extra of the package installs, to read `files`; if not given, they have its name."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise InputError(
            f"{files or extra} files need {module}; install it with pip install 'glasshouse[{extra}]'."
        ) from None


def too_long(where: str, max_bytes: int) -> InputError:
    """Return the error for a line or value that exceeds the limit."""
    return InputError(f"{where} is longer than the limit of {max_bytes} bytes; split it, or remove it.")


def not_utf8(where: str, offset: int) -> InputError:
    """Return the error for invalid UTF-8."""
    return InputError(
        f"{where} is not UTF-8 at byte {offset}; fix it, or set errors (of a run, data.errors) to 'replace'."
    )
