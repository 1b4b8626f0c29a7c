"""A text file as it is read: from the disk, unpacked, checked as UTF-8, in blocks or lines."""

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
_STEP = 2**11  # bytes unpacked at a time, as each can stand for 32,768 others

Errors = Literal["strict", "replace"]
OnBytes = Callable[[int], None]  # bytes read from the disk since the last call
OnHash = Callable[[int, int, str], None]  # a file read from beginning to end: its number, size and SHA-256 on disk


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One source of text: where it lies, what kind it is, how it is packed, and who wants to know of its reading."""

    path: Path
    kind: str
    compression: str
    source: int
    errors: Errors
    on_bytes: OnBytes | None
    on_hash: OnHash | None

    def raw(self) -> Iterator[bytes]:
        """Yield the file as it lies on the disk."""
        digest, size = hashlib.sha256(), 0
        with read_errors(self.path):
            file = FileIO(self.path, opener=_open)
        with file:
            state = os.fstat(file.fileno())
            require_file(self.path, state)
            # A small file is read by one call; one that does not know its size, such as those of /proc, says 0.
            step = min(max(state.st_size, 4096) + 1, BLOCK)
            while block := self.read(file, step):
                size += len(block)
                if self.on_hash:
                    digest.update(block)
                if self.on_bytes:
                    self.on_bytes(len(block))
                yield block
        if self.on_hash:
            self.on_hash(self.source, size, digest.hexdigest())

    def read(self, file: FileIO, size: int) -> bytes | None:
        with read_errors(self.path):
            return file.read(size)

    def decompressed(self) -> Iterator[bytes]:
        """Yield what was packed; a file may be several streams, one after the other."""
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
                    except Exception as error:  # each library has its own
                        raise InputError(f"{str(self.path)!r} is damaged ({error}); fetch it again.") from None
                    data = b""
                    if stream.eof:
                        data, stream = stream.unused_data, None
                        padding = b"\0" if self.compression == ".gz" else b""  # as tapes have it, and gzip takes it
                    if text:
                        yield text
        if stream:
            raise InputError(f"{str(self.path)!r} was cut short; fetch it again.")

    def decompressor(self) -> Any:  # noqa: ANN401 - the two are alike, but have no type in common
        if self.compression == ".gz":
            return zlib.decompressobj(wbits=31)
        return extra_module("zstandard", "zstd").ZstdDecompressor().decompressobj()

    def blocks(self) -> Iterator[bytes]:
        """Yield the text as sound UTF-8, in whole characters, without a byte order mark."""
        rest, offset, begins = b"", 0, True
        for block in itertools.chain(self.decompressed() if self.compression else self.raw(), (b"",)):
            data = rest + block
            sound, rest = data, b""
            if not data.isascii():
                try:
                    text, used = codecs.utf_8_decode(data, self.errors, not block)
                except UnicodeDecodeError as error:
                    raise not_utf8(repr(str(self.path)), offset + error.start) from None
                sound, rest = data[:used] if self.errors == "strict" else text.encode(), data[used:]
            offset += len(data) - len(rest)
            if begins and sound:
                sound, begins = sound.removeprefix(codecs.BOM_UTF8), False
            if sound:
                yield sound

    def lines(self, max_bytes: int) -> Iterator[bytes]:
        """Yield the lines without their newlines; nothing else ends a line. One beyond `longest` bytes is refused."""
        begun: list[bytes] = []
        number, size = 1, 0
        for block in self.blocks():
            first, *others = block.split(b"\n")
            begun.append(first)
            size += len(first)
            if size > max_bytes:
                raise too_long(f"line {number} of {str(self.path)!r}", max_bytes)
            if others:
                yield b"".join(begun)
                yield from others[:-1]
                begun = others[-1:]
                number, size = number + len(others), len(others[-1])
        if last := b"".join(begun):
            yield last


def _open(path: str, flags: int) -> int:
    """Open a file, or anything else that is there, without waiting for a process at the other end of a pipe."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def require_file(path: Path, state: os.stat_result) -> None:
    """Refuse what is no file: a pipe waits for ever, and a device such as /dev/zero does not end."""
    if not stat.S_ISREG(state.st_mode):
        kinds = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder"}
        kind = kinds.get(stat.S_IFMT(state.st_mode), "a device")
        link = f", by a link to {os.fspath(path.resolve())!r}" if path.is_symlink() else ""
        raise InputError(f"{str(path)!r} is {kind}{link}, but text is read from files; write it to one first.")


@contextmanager
def read_errors(path: Path) -> Iterator[None]:
    """Turn what the system says about a file that cannot be read into one sentence that names it."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"{str(path)!r} cannot be read ({error.strerror or error}); check the file, its permissions and the disk."
        ) from None


def extra_module(module: str, extra: str) -> Any:  # noqa: ANN401 - a module, which need not be there to check types against
    """Import a library that comes with an extra of the package."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise InputError(f"{extra} files need {module}; install it by pip install 'glasshouse[{extra}]'.") from None


def too_long(where: str, max_bytes: int) -> InputError:
    """Return the error for a line or a value that would have to be held whole."""
    return InputError(
        f"{where} is longer than {max_bytes} bytes, the most that is read as one; split it, or take it out."
    )


def not_utf8(where: str, offset: int) -> InputError:
    """Return the error for bytes that are no text, by where they stand."""
    return InputError(
        f"{where} is not UTF-8 at byte {offset}; mend it, or set errors (of a run, data.errors) to 'replace'."
    )
