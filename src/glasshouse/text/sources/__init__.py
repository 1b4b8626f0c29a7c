"""Text files in, documents out, as a stream that holds one piece of one document at a time.

Plain text, JSON lines, CSV, TSV and Parquet, each but the last also packed by gzip or zstd; files, folders, patterns.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, get_args

from glasshouse.config import require
from glasshouse.errors import InputError
from glasshouse.text.sources.chunking import MAX_CHUNK_BYTES as MAX_CHUNK_BYTES
from glasshouse.text.sources.chunking import chunk
from glasshouse.text.sources.file import Errors as Errors
from glasshouse.text.sources.file import OnBytes as OnBytes
from glasshouse.text.sources.file import OnHash as OnHash
from glasshouse.text.sources.file import SourceFile, extra_module, read_errors, require_file
from glasshouse.text.sources.tabular import TABULAR_SUFFIXES as TABULAR_SUFFIXES
from glasshouse.text.sources.tabular import columns as columns_of
from glasshouse.text.sources.tabular import rows, texts

CHUNK_BYTES = MAX_CHUNK_BYTES  # bytes of one document that are given at once
# What is taken from a folder; a file of any other kind has to be named, or matched by a pattern.
_PROSE = "txt text md markdown rst tex org adoc html htm xml srt vtt"
_CODE = "py c h cc cpp hpp cs cu rs go java kt scala swift js jsx ts tsx css php rb pl lua r jl hs ml ex sql sh toml"
TEXT = (*(f".{name}" for name in f"{_PROSE} {_CODE}".split()), *TABULAR_SUFFIXES)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A document, or a part of a long one.

    >>> Piece(b"a whole document", source=0, number=0, ends=True).text
    b'a whole document'
    """

    text: bytes  # UTF-8, checked
    file_index: int  # which file, counted in the order of `find`
    index: int  # counted within the file, from 0
    ends_document: bool  # the document ends with this piece


@dataclass(frozen=True, slots=True)
class Record:
    """The values of the fields that were asked for, from one row of one file.

    >>> Record(("good", 1), source=0, number=0).values
    ('good', 1)
    """

    values: tuple[Any, ...]
    file_index: int
    index: int
    line: int = field(default=0, compare=False)  # of the file, or its row in Parquet, counted from 1; 0: unknown


def find_files(paths: str | Path | Iterable[str | Path]) -> list[Path]:
    """Return the files that files, folders and patterns name: each once, sorted by name, the same on every machine.

    From a folder come the files whose suffix is in `TEXT`, from those below it too; a pattern takes any file. Neither
    takes what is hidden by a leading dot, nor follows a link to a folder.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> for name in ("b.txt", "a.jsonl.gz", "picture.png"):
    ...     _ = (folder / name).write_bytes(b"")
    >>> [path.name for path in find(folder)]
    ['a.jsonl.gz', 'b.txt']
    >>> [path.name for path in find(f"{folder}/**/*.p*")]
    ['picture.png']
    """
    named = [paths] if isinstance(paths, str | Path) else list(paths)
    given = [Path(path) for path in named]
    if not given or "" in named:
        raise InputError("no paths were given; give files, folders or patterns such as 'data/**/*.txt'.")
    found: dict[str, Path] = {}
    for path in given:
        with read_errors(path):
            found |= {file.as_posix(): file for file in _matches(path)}
    for file in found.values():
        file_size(file)  # which refuses what is no file
    return [found[name] for name in sorted(found)]


def columns(path: Path) -> tuple[str, ...] | None:
    r"""Return the names of the columns of a jsonl, csv, tsv or parquet file; None for a file of plain text.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "pairs.tsv")
    >>> _ = path.write_text("de\ten\nja\tyes\n")
    >>> columns(path), columns(Path("hamlet.txt"))
    (('de', 'en'), None)
    """
    kind, packing = _suffixes(path.name)
    if kind not in TABULAR_SUFFIXES or not path.is_file():
        return None
    return tuple(columns_of(SourceFile(path, kind, packing, 0, "replace", None, None)))


def skipped_files(paths: str | Path | Iterable[str | Path]) -> list[Path]:
    """Return the files below folders that `find` leaves out because their suffix is not in `TEXT`.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> for name in ("b.txt", "picture.png"):
    ...     _ = (folder / name).write_bytes(b"")
    >>> [path.name for path in skipped(folder)]
    ['picture.png']
    """
    named = [paths] if isinstance(paths, str | Path) else paths
    return sorted(file for path in map(Path, named) if path.is_dir() for file in _walk(path, known=False))


def file_size(path: Path) -> int:
    """Return how many bytes a file has on the disk; what is no file is refused."""
    with read_errors(path):
        try:
            state = path.stat()
        except FileNotFoundError:
            raise InputError(f"{str(path)!r} is gone, or a link that leads nowhere; mend or remove it.") from None
    require_file(path, state)
    return state.st_size


def _matches(path: Path) -> list[Path]:
    if path.is_dir():
        found = list(_walk(path))
        problem = f"{str(path)!r} holds no file of a known kind (.txt, .jsonl, ...); name files, or give a pattern."
    elif path.exists():
        found, problem = [path], ""
    elif any(map(_is_pattern, path.parts)):
        fixed = Path(*itertools.takewhile(lambda part: not _is_pattern(part), path.parts))
        pattern = path.relative_to(fixed)
        if pattern.name == "**":
            pattern /= "*"  # or else Python 3.13 finds files, and those before it folders alone
        try:
            found = [file for file in fixed.glob(str(pattern)) if not file.is_dir()]
        except ValueError as error:
            raise InputError(f"{str(path)!r} is not a pattern ({error}); mend it.") from None
        found = [file for file in found if not any(part[0] == "." for part in file.relative_to(fixed).parts)]
        problem = f"the pattern {str(path)!r} matches no file; mend it."
    else:
        found, problem = [], f"there is no {str(path)!r}; give a file, a folder or a pattern such as 'data/**/*.txt'."
    if not found:
        raise InputError(problem)
    return found


def _is_pattern(part: str) -> bool:
    return not {*"*?["}.isdisjoint(part)


def _walk(folder: Path, known: bool = True) -> Iterator[Path]:
    """Yield the files of known kinds below a folder, or those of others."""

    def stop(error: OSError) -> NoReturn:  # a folder that may not be read would be left out without a word
        with read_errors(Path(error.filename or folder)):
            raise error

    for place, folders, files in os.walk(folder, onerror=stop):
        folders[:] = [name for name in folders if name[0] != "."]
        here = Path(place)
        yield from (here / name for name in files if name[0] != "." and (_suffixes(name)[0] in TEXT) is known)


def _suffixes(name: str) -> tuple[str, str]:
    """Return what kind of file it is and how it is packed, by the ends of its name."""
    stem, suffix = os.path.splitext(name.lower())  # noqa: PTH122 - a Path for each of many thousands takes its time
    return (os.path.splitext(stem)[1], suffix) if suffix in (".gz", ".zst") else (suffix, "")  # noqa: PTH122


def read_chunks(
    files: Sequence[Path],
    *,
    field: str = "text",
    separator: str | None = None,
    errors: Errors = "strict",
    start: tuple[int, int] = (0, 0),
    chunk_bytes: int = CHUNK_BYTES,
    on_bytes: OnBytes | None = None,
    on_hash: OnHash | None = None,
) -> Iterator[Chunk]:
    r"""Yield the documents of files, in pieces of up to `piece` bytes where they can be cut; empty ones are left out.

    What cannot be cut so that the words stay the same is cut at `LONGEST` bytes all the same.

    A plain text is one document, or several with a `separator` between them. In the other formats each row is one, in
    the column `field`. `start` goes on at a file and a piece of it; files before that are not read.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "two.txt")
    >>> _ = path.write_text("one\ntwo\n\nthree")
    >>> for part in pieces([path], separator="\n\n", piece=4):
    ...     print(part.number, part.text, part.ends)
    0 b'one\n' False
    1 b'two' True
    2 b'three' True
    """
    require(0 < chunk_bytes < 2**31, "piece", chunk_bytes, "from 1 to 2**31 - 1 bytes")
    require(separator != "", "separator", separator, "at least one character, or None")
    found = False
    for file in _open(files, start, errors, on_bytes, on_hash):
        parts = texts(file, field) if file.kind in TABULAR_SUFFIXES else _split(file.blocks(), separator)
        for number, (text, ends) in enumerate(chunk(parts, chunk_bytes)):
            found = True
            if (file.source, number) >= start:
                yield Chunk(text, file.source, number, ends)
    if not found and start == (0, 0):
        raise _empty(files, "text")


def read_records(
    files: Sequence[Path],
    fields: Sequence[str],
    *,
    errors: Errors = "strict",
    start: tuple[int, int] = (0, 0),
    on_bytes: OnBytes | None = None,
    on_hash: OnHash | None = None,
) -> Iterator[Record]:
    r"""Yield the values of `fields` from each row of JSON lines, CSV, TSV and Parquet files, whatever their types.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "pairs.tsv")
    >>> _ = path.write_text("de\ten\nja\tyes\nnein\tno\n")
    >>> [record.values for record in records([path], ["en", "de"])]
    [('yes', 'ja'), ('no', 'nein')]
    """
    found = False
    opened = _open(files, start, errors, on_bytes, on_hash)
    for file in opened:
        if file.kind not in TABULAR_SUFFIXES:
            raise InputError(f"{str(file.path)!r} is plain text; records need jsonl, csv, tsv or parquet.")
    for file in opened:
        for number, (line, values) in enumerate(rows(file, fields, MAX_CHUNK_BYTES)):
            found = True
            if (file.source, number) >= start:
                yield Record(values, file.source, number, line)
    if not found and start == (0, 0):
        raise _empty(files, "records")


def read_parallel(
    left: Path,
    right: Path,
    *,
    errors: Errors = "strict",
    start: tuple[int, int] = (0, 0),
    on_bytes: OnBytes | None = None,
    on_hash: OnHash | None = None,
) -> Iterator[Record]:
    r"""Yield each line of one text file with the same line of another, without their ends; all are of source 0.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "de").write_text("ja\nnein\n"), (folder / "en").write_text("yes\nno\n")
    >>> [record.values for record in parallel(folder / "de", folder / "en")]
    [('ja', 'yes'), ('nein', 'no')]
    """
    sides = [file.lines(MAX_CHUNK_BYTES) for file in _open((left, right), (0, 0), errors, on_bytes, on_hash)]
    found = False
    for number, pair in enumerate(itertools.zip_longest(*sides)):
        found = True
        if None in pair:
            counts, longer = [number, number], 1 - pair.index(None)
            counts[longer] += 1 + sum(1 for _ in sides[longer])
            raise InputError(
                f"{str(left)!r} has {counts[0]} lines, but {str(right)!r} has {counts[1]}; line n of one must belong "
                "to line n of the other."
            )
        if (0, number) >= start:
            yield Record(tuple(line.removesuffix(b"\r").decode() for line in pair), 0, number)
    if not found:
        raise _empty((left, right), "text")


def _empty(files: Sequence[Path], what: str) -> InputError:
    named = " to ".join(repr(str(path)) for path in dict.fromkeys((*files[:1], *files[-1:]))) or "an empty list"
    return InputError(f"{named} ({len(files)} in all) holds no {what}; give files with some in them.")


def _open(
    files: Sequence[Path], start: tuple[int, int], errors: Errors, on_bytes: OnBytes | None, on_hash: OnHash | None
) -> list[SourceFile]:
    """Refuse what can be refused before anything is read, so that it does not come up hours later."""
    require(errors in get_args(Errors), "errors", errors, "'strict' or 'replace'")
    opened = []
    for source, path in enumerate(files):
        kind, packing = _suffixes(path.name)
        if kind == ".json":
            raise InputError(f"{str(path)!r} is one JSON value; write it as jsonl, one object a line.")
        if kind == ".parquet" and packing:
            raise InputError(f"{str(path)!r} is Parquet, which is packed in itself; unpack it.")
        if kind == ".parquet":
            extra_module("pyarrow", "parquet")
        if packing == ".zst":
            extra_module("zstandard", "zstd")
        if source >= start[0]:
            opened.append(SourceFile(path, kind, packing, source, errors, on_bytes, on_hash))
    return opened


def _split(blocks: Iterator[bytes], separator: str | None) -> Iterator[tuple[bytes, bool]]:
    """Yield stretches of text, and whether the document ends after each."""
    if separator is None:
        yield from ((block, False) for block in blocks)
        yield b"", True
        return
    rest, mark = b"", separator.encode()
    for block in blocks:
        *whole, rest = (rest + block).split(mark)
        yield from ((text, True) for text in whole)
        free = max(0, len(rest) - len(mark) + 1)  # what follows may be the beginning of a separator
        yield rest[:free], False
        rest = rest[free:]
    yield rest, True
