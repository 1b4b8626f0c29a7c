"""Streams documents from text files, with one chunk of one document in memory at a time.

Plain text, JSON, JSON Lines, CSV, TSV, Parquet and Arrow, all but the last two also compressed with gzip or zstd.
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
from glasshouse.text.sources.columnar import SUFFIXES as COLUMNAR
from glasshouse.text.sources.file import Errors as Errors
from glasshouse.text.sources.file import OnBytes as OnBytes
from glasshouse.text.sources.file import OnHash as OnHash
from glasshouse.text.sources.file import SourceFile, extra_module, read_errors, require_file
from glasshouse.text.sources.file import place as place
from glasshouse.text.sources.saved_dataset import data_files
from glasshouse.text.sources.tabular import TABULAR_SUFFIXES as TABULAR_SUFFIXES
from glasshouse.text.sources.tabular import columns as columns_of
from glasshouse.text.sources.tabular import rows, texts

CHUNK_BYTES = MAX_CHUNK_BYTES  # default size of a chunk
# Files read from a folder; a file with another suffix must be named, or matched by a glob.
_PROSE = "txt text md markdown rst tex org adoc html htm xml srt vtt"
_CODE = "py c h cc cpp hpp cs cu rs go java kt scala swift js jsx ts tsx css php rb pl lua r jl hs ml ex sql sh toml"
_TABLES = (suffix for suffix in TABULAR_SUFFIXES if suffix != ".json")  # which in a folder is mostly settings
TEXT_SUFFIXES = (*(f".{name}" for name in f"{_PROSE} {_CODE}".split()), *_TABLES)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A document, or a part of a long one.

    >>> Chunk(b"a whole document", file_index=0, index=0, ends_document=True).text
    b'a whole document'
    """

    text: bytes  # valid UTF-8
    file_index: int  # in the order of `find_files`
    index: int  # within the file, from 0
    ends_document: bool  # this is the last chunk of its document


@dataclass(frozen=True, slots=True)
class Record:
    """The values of the requested columns, from one row of one file.

    >>> Record(("good", 1), file_index=0, index=0).values
    ('good', 1)
    """

    values: tuple[Any, ...]
    file_index: int
    index: int
    line: int = field(default=0, compare=False)  # line of the file, or row in Parquet and Arrow, from 1; 0: unknown


def find_files(paths: str | Path | Iterable[str | Path]) -> list[Path]:
    """Return the files that files, folders and globs name: each once, sorted by name, the same on every machine.

    Folders are searched recursively for files with a suffix in `TEXT_SUFFIXES`, but one that `datasets` saved has the
    files that it lists; a glob matches any file. Neither
    includes hidden files (leading dot) or follows links to folders.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> for name in ("b.txt", "a.jsonl.gz", "picture.png"):
    ...     _ = (folder / name).write_bytes(b"")
    >>> [path.name for path in find_files(folder)]
    ['a.jsonl.gz', 'b.txt']
    >>> [path.name for path in find_files(f"{folder}/**/*.p*")]
    ['picture.png']
    """
    given = [paths] if isinstance(paths, str | Path) else list(paths)
    if not given or "" in given:
        raise InputError("no paths were given; give files, folders or globs such as 'data/**/*.txt'.")
    found: dict[str, Path] = {}
    for path in map(Path, given):
        with read_errors(path):
            found |= {file.as_posix(): file for file in _matches(path)}
    for file in found.values():
        file_size(file)  # refuses what is not a regular file
    return [found[name] for name in sorted(found)]


def columns(path: Path) -> tuple[str, ...] | None:
    r"""Return the column names of a tabular file, such as jsonl; None for plain text.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "pairs.tsv")
    >>> _ = path.write_text("de\ten\nja\tyes\n")
    >>> columns(path), columns(Path("hamlet.txt"))
    (('de', 'en'), None)
    """
    kind, compression = _suffixes(path.name)
    if kind not in TABULAR_SUFFIXES or not path.is_file():
        return None
    return tuple(columns_of(SourceFile(path, kind, compression, 0, "replace", None, None)))


def skipped_files(paths: str | Path | Iterable[str | Path]) -> list[Path]:
    """Return the files in folders that `find_files` skips because their suffix is not in `TEXT_SUFFIXES`.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> for name in ("b.txt", "picture.png"):
    ...     _ = (folder / name).write_bytes(b"")
    >>> [path.name for path in skipped_files(folder)]
    ['picture.png']
    """
    named = [paths] if isinstance(paths, str | Path) else paths
    folders = (path for path in map(Path, named) if path.is_dir() and data_files(path) is None)
    return sorted(file for path in folders for file in _walk(path, known=False))


def file_size(path: Path) -> int:
    """Return the size of a file on disk, in bytes; refuse what is not a regular file."""
    with read_errors(path):
        try:
            state = path.stat()
        except FileNotFoundError:
            raise InputError(f"{str(path)!r} does not exist, or is a broken link; fix or remove it.") from None
    require_file(path, state)
    return state.st_size


def _matches(path: Path) -> list[Path]:
    if path.is_dir():
        saved = data_files(path)
        found = list(_walk(path)) if saved is None else saved
        problem = f"{str(path)!r} has no file of a known kind (.txt, .jsonl, ...); name files, or give a glob."
    elif path.exists():
        found, problem = [path], ""
    elif any(map(_is_pattern, path.parts)):
        fixed = Path(*itertools.takewhile(lambda part: not _is_pattern(part), path.parts))
        pattern = path.relative_to(fixed)
        if pattern.name == "**":
            pattern /= "*"  # a final ** matches files in Python 3.13, but only folders before
        try:
            found = [file for file in fixed.glob(str(pattern)) if not file.is_dir()]
        except ValueError as error:
            raise InputError(f"{str(path)!r} is not a valid glob ({error}); fix it.") from None
        found = [file for file in found if not any(part[0] == "." for part in file.relative_to(fixed).parts)]
        problem = f"the glob {str(path)!r} matches no file; fix it."
    else:
        found, problem = [], f"there is no {str(path)!r}; give a file, a folder or a glob such as 'data/**/*.txt'."
    if not found:
        raise InputError(problem)
    return found


def _is_pattern(part: str) -> bool:
    return not {*"*?["}.isdisjoint(part)


def _walk(folder: Path, known: bool = True) -> Iterator[Path]:
    """Yield the files of known kinds in a folder, recursively, or those of other kinds."""

    def stop(error: OSError) -> NoReturn:  # os.walk would silently skip an unreadable folder
        with read_errors(Path(error.filename or folder)):
            raise error

    for current, folders, files in os.walk(folder, onerror=stop):
        folders[:] = [name for name in folders if name[0] != "."]
        here = Path(current)
        names = (name for name in files if name[0] != ".")
        yield from (here / name for name in names if (_suffixes(name)[0] in TEXT_SUFFIXES) is known)


def _suffixes(name: str) -> tuple[str, str]:
    """Return the kind and the compression of a file, from its suffixes."""
    stem, suffix = os.path.splitext(name.lower())  # noqa: PTH122 - creating many thousands of Paths is slow
    return (os.path.splitext(stem)[1], suffix) if suffix in (".gz", ".zst") else (suffix, "")  # noqa: PTH122


def read_chunks(
    files: Sequence[Path],
    *,
    column: str = "text",
    separator: str | None = None,
    errors: Errors = "strict",
    start: tuple[int, int] = (0, 0),
    stop: int | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    on_bytes: OnBytes | None = None,
    on_hash: OnHash | None = None,
) -> Iterator[Chunk]:
    r"""Yield the documents of files, in chunks of up to `chunk_bytes` bytes; empty documents are skipped.

    Chunks end where pre-tokenization allows it, else at `MAX_CHUNK_BYTES` bytes.

    A plain text file is one document, or several with a `separator` between them. In the other formats each row is
    one, in the column `column`. `start` resumes at a file and a chunk of it, `stop` ends before a file; the others
    are not read.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "two.txt")
    >>> _ = path.write_text("one\ntwo\n\nthree")
    >>> for part in read_chunks([path], separator="\n\n", chunk_bytes=4):
    ...     print(part.index, part.text, part.ends_document)
    0 b'one\n' False
    1 b'two' True
    2 b'three' True
    """
    require(0 < chunk_bytes < 2**31, "chunk_bytes", chunk_bytes, "from 1 to 2**31 - 1 bytes")
    require(separator != "", "separator", separator, "at least one character, or None")
    found = False
    for file in _open(files, start, stop, errors, on_bytes, on_hash):
        blocks = texts(file, column) if file.kind in TABULAR_SUFFIXES else _split(file.blocks(), separator)
        for index, (text, ends) in enumerate(chunk(blocks, chunk_bytes)):
            found = True
            if (file.index, index) >= start:
                yield Chunk(text, file.index, index, ends)
    if not found and start == (0, 0) and stop is None:
        raise _empty(files, "text")


def read_records(
    files: Sequence[Path],
    columns: Sequence[str],
    *,
    errors: Errors = "strict",
    start: tuple[int, int] = (0, 0),
    stop: int | None = None,
    on_bytes: OnBytes | None = None,
    on_hash: OnHash | None = None,
) -> Iterator[Record]:
    r"""Yield the values of `columns` from each row of tabular files, of any type.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "pairs.tsv")
    >>> _ = path.write_text("de\ten\nja\tyes\nnein\tno\n")
    >>> [record.values for record in read_records([path], ["en", "de"])]
    [('yes', 'ja'), ('no', 'nein')]
    """
    found = False
    opened = _open(files, start, stop, errors, on_bytes, on_hash)
    for file in opened:
        if file.kind not in TABULAR_SUFFIXES:
            raise InputError(f"{str(file.path)!r} is plain text; records need jsonl, csv, tsv, parquet or arrow.")
    for file in opened:
        for index, (line, values) in enumerate(rows(file, columns, MAX_CHUNK_BYTES)):
            found = True
            if (file.index, index) >= start:
                yield Record(values, file.index, index, line)
    if not found and start == (0, 0) and stop is None:
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
    r"""Yield each line of one text file with the same line of another, without newlines; file_index is 0.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "de").write_text("ja\nnein\n"), (folder / "en").write_text("yes\nno\n")
    >>> [record.values for record in read_parallel(folder / "de", folder / "en")]
    [('ja', 'yes'), ('nein', 'no')]
    """
    sides = [file.lines(MAX_CHUNK_BYTES) for file in _open((left, right), (0, 0), None, errors, on_bytes, on_hash)]
    found = False
    for index, pair in enumerate(itertools.zip_longest(*sides)):
        found = True
        if None in pair:
            counts, longer = [index, index], 1 - pair.index(None)
            counts[longer] += 1 + sum(1 for _ in sides[longer])
            raise InputError(
                f"{str(left)!r} has {counts[0]} lines, but {str(right)!r} has {counts[1]}, from line {index + 1} on "
                "alone; line n of one must belong to line n of the other."
            )
        if (0, index) >= start:
            yield Record(tuple(line.removesuffix(b"\r").decode() for line in pair), 0, index)
    if not found:
        raise _empty((left, right), "text")


def _empty(files: Sequence[Path], what: str) -> InputError:
    named = " to ".join(repr(str(path)) for path in dict.fromkeys((*files[:1], *files[-1:]))) or "an empty list"
    return InputError(f"{named} ({len(files)} in all) contains no {what}; give files that are not empty.")


def _open(
    files: Sequence[Path],
    start: tuple[int, int],
    stop: int | None,
    errors: Errors,
    on_bytes: OnBytes | None,
    on_hash: OnHash | None,
) -> list[SourceFile]:
    """Check all files before anything is read, so that errors do not appear hours later."""
    require(errors in get_args(Errors), "errors", errors, "'strict' or 'replace'")
    opened = []
    for index, path in enumerate(files):
        kind, compression = _suffixes(path.name)
        if kind in COLUMNAR and compression:
            raise InputError(f"{str(path)!r} is {COLUMNAR[kind]}, which has its own compression; decompress it.")
        if kind in COLUMNAR:
            extra_module("pyarrow", "parquet", kind[1:])
        if compression == ".zst":
            extra_module("zstandard", "zstd")
        if start[0] <= index and (stop is None or index < stop):
            opened.append(SourceFile(path, kind, compression, index, errors, on_bytes, on_hash))
    return opened


def _split(blocks: Iterator[bytes], separator: str | None) -> Iterator[tuple[bytes, bool]]:
    """Yield blocks of text, and whether the document ends after each."""
    if separator is None:
        yield from ((block, False) for block in blocks)
        yield b"", True
        return
    rest, mark = b"", separator.encode()
    for block in blocks:
        *whole, rest = (rest + block).split(mark)
        yield from ((text, True) for text in whole)
        safe = max(0, len(rest) - len(mark) + 1)  # the remaining bytes may start a separator
        yield rest[:safe], False
        rest = rest[safe:]
    yield rest, True
