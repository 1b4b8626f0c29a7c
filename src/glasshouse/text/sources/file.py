"""A text file as it is read: from the disk, unpacked, checked as UTF-8, in blocks or lines."""

from __future__ import annotations

import codecs
import hashlib
import importlib
import itertools
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from glasshouse.errors import InputError

BLOCK = 2**20  # bytes read from a file at a time
_STEP = 2**13  # bytes unpacked at a time, as each can stand for 32,768 others

Errors = Literal["strict", "replace"]
OnBytes = Callable[[int], None]  # bytes read from the disk since the last call
OnHash = Callable[[int, int, str], None]  # a file read from beginning to end: its number, size and SHA-256 on disk


@dataclass(frozen=True, slots=True)
class File:
    """One source of text: where it lies, what kind it is, how it is packed, and who wants to know of its reading."""

    path: Path
    kind: str
    packing: str
    source: int
    errors: Errors
    on_bytes: OnBytes | None
    on_hash: OnHash | None

    def raw(self) -> Iterator[bytes]:
        """Yield the file as it lies on the disk."""
        digest, size = hashlib.sha256(), 0
        with self.path.open("rb", buffering=0) as file:
            # A small file is read by one call; one that does not know its size, such as a pipe, says 0.
            step = min(max(os.fstat(file.fileno()).st_size, 4096) + 1, BLOCK)
            while block := file.read(step):
                size += len(block)
                if self.on_hash:
                    digest.update(block)
                if self.on_bytes:
                    self.on_bytes(len(block))
                yield block
        if self.on_hash:
            self.on_hash(self.source, size, digest.hexdigest())

    def unpacked(self) -> Iterator[bytes]:
        """Yield what was packed; a file may be several streams, one after the other."""
        stream: Any = None
        for block in self.raw():
            for at in range(0, len(block), _STEP):
                data = block[at : at + _STEP]
                while data:
                    stream = stream or self.unpacker()
                    try:
                        text = stream.decompress(data)
                    except Exception as error:  # each library has its own
                        raise InputError(f"{str(self.path)!r} is damaged ({error}); fetch it again.") from None
                    data = b""
                    if stream.eof:
                        data, stream = stream.unused_data, None
                    if text:
                        yield text
        if stream:
            raise InputError(f"{str(self.path)!r} was cut short; fetch it again.")

    def unpacker(self) -> Any:  # noqa: ANN401 - the two are alike, but have no type in common
        if self.packing == ".gz":
            return zlib.decompressobj(wbits=31)
        return extra_module("zstandard", "zstd").ZstdDecompressor().decompressobj()

    def blocks(self) -> Iterator[bytes]:
        """Yield the text as sound UTF-8, in whole characters, without a byte order mark."""
        rest, offset, begins = b"", 0, True
        for block in itertools.chain(self.unpacked() if self.packing else self.raw(), (b"",)):
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

    def lines(self) -> Iterator[bytes]:
        """Yield the lines without their newlines; nothing else ends a line."""
        begun: list[bytes] = []
        for block in self.blocks():
            first, *others = block.split(b"\n")
            begun.append(first)
            if others:
                yield b"".join(begun)
                yield from others[:-1]
                begun = others[-1:]
        if last := b"".join(begun):
            yield last


def extra_module(module: str, extra: str) -> Any:  # noqa: ANN401 - a module, which need not be there to check types against
    """Import a library that comes with an extra of the package."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise InputError(f"{extra} files need {module}; install it by pip install 'glasshouse[{extra}]'.") from None


def not_utf8(where: str, offset: int) -> InputError:
    """Return the error for bytes that are no text, by where they stand."""
    return InputError(
        f"{where} is not UTF-8 at byte {offset}; mend it, or set errors (of a run, data.errors) to 'replace'."
    )
