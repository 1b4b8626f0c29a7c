"""Dataset readers: text, tabular files, two line-aligned files, or a built-in dataset; each can resume anywhere."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from glasshouse.config import did_you_mean
from glasshouse.data import chat_formats
from glasshouse.data.builtin import BuiltinDataset, builtin_dataset, is_builtin
from glasshouse.data.corpus import ARRAYS_PER_ITEM, Kind
from glasshouse.errors import InputError
from glasshouse.text import sources
from glasshouse.text.sources import TABULAR_SUFFIXES, Chunk, Errors, OnBytes, OnHash, Record

CHUNK_BYTES = 2**20  # bytes of a long text that one worker encodes at a time
SHOWN = 60  # characters of a value in an error
WORDS = 3  # a column name of more is a sentence of a file without a header

Cursor = tuple[int, int]  # file index, and index of the chunk or record in it
DEFAULT_COLUMNS: dict[Kind, tuple[str, ...]] = {
    "text": ("text",),
    "pairs": ("source", "target"),
    "labelled": ("text", "label"),
    "tagged": ("words", "tags"),
    "chat": ("messages",),
    "preferences": ("prompt", "chosen", "rejected"),
}


@dataclass(frozen=True)
class DatasetReader:
    """A reproducible stream of chunks of text, or of records."""

    kind: Kind
    file_names: tuple[str, ...]
    fingerprint: str  # of the files' names, sizes and times
    sizes: tuple[int, ...]  # in bytes of each file, of two aligned files together, or in items of a built-in dataset
    size_before: Callable[[Cursor], int]  # size that is not read again when resuming there
    read: Callable[[Cursor, int | None, OnBytes, OnHash], Iterator[Chunk | Record]]  # to before a file, or to the end
    labels: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()  # columns that are read, of tabular files
    files: tuple[Path, ...] = ()  # none of a built-in dataset

    @property
    def size(self) -> int:
        """The total size."""
        return sum(self.sizes)


def open_reader(
    source: str | Path | Iterable[str | Path],
    *,
    kind: Kind | None = None,
    columns: tuple[str, ...] = (),
    split: str = "train",
    separator: str | None = None,
    errors: Errors = "strict",
) -> DatasetReader:
    """Open a built-in dataset, or files, folders and globs; two plain text files are pairs, line by line.

    `kind` and `columns` are inferred from the columns of the first file if they are not given.

    >>> open_reader("dates").kind
    'pairs'
    """
    paths = [source] if isinstance(source, str | Path) else list(source)
    if is_builtin(paths):
        return _from_builtin(builtin_dataset(str(paths[0])), kind, split)
    if kind is not None and kind not in ARRAYS_PER_ITEM:
        raise InputError(f"kind is {kind!r}, which does not exist; {did_you_mean(kind, ARRAYS_PER_ITEM)}")
    first = sources.find_files(paths)[0]
    available = sources.columns(first)
    kind = kind or infer_kind(columns or available or ())
    columns = columns or _choose(kind, available or (), first)
    aligned = (
        kind == "pairs" and len(paths) == 2 and all(Path(path).is_file() and not _is_table(path) for path in paths)
    )
    if aligned:
        files = [Path(path) for path in paths]
        read: Callable[..., Iterator[Chunk | Record]] = partial(sources.read_parallel, *files, errors=errors)
    elif kind == "text":
        if len(columns) != 1:
            raise InputError(
                f"columns is {columns}, but text has one; name one, or give the kind of data that has two."
            )
        files = sources.find_files(paths)
        read = partial(
            sources.read_chunks, files, column=columns[0], separator=separator, errors=errors, chunk_bytes=CHUNK_BYTES
        )
    else:
        if available is None:
            more = ", or two plain text files, line by line" if kind == "pairs" else ""
            raise InputError(
                f"{str(first)!r} is plain text, which is of kind text, not {kind}: give a jsonl, csv, tsv, "
                f"parquet or arrow file{more}."
            )
        files = sources.find_files(paths)
        read = partial(_read_chats if kind == "chat" else sources.read_records, files, columns, errors=errors)
        count = len(DEFAULT_COLUMNS[kind])
        if len(columns) != count and not (kind == "chat" and len(columns) in (2, 3)):
            number = {2: "two", 3: "three"}.get(count, "one, two or three")
            raise InputError(
                f"columns is {columns}, but {kind} has {number}, such as {DEFAULT_COLUMNS[kind]}; name them."
            )
    labels: tuple[str, ...] = ()
    if kind == "labelled":
        labels = _labels(files, columns[1], errors)
    elif kind == "tagged":
        labels = _tags(files, columns, errors)

    def start(cursor: Cursor, stop: int | None, on_bytes: OnBytes, on_hash: OnHash) -> Iterator[Chunk | Record]:
        if aligned:
            return read(start=cursor, on_bytes=on_bytes, on_hash=on_hash)
        return read(start=cursor, stop=stop, on_bytes=on_bytes, on_hash=on_hash)

    sizes = list(map(sources.file_size, files))
    states = repr(
        [(os.fsencode(path), size, path.stat().st_mtime_ns) for path, size in zip(files, sizes, strict=True)]
    )
    fingerprint = hashlib.sha256(states.encode()).hexdigest()
    return DatasetReader(
        kind,
        tuple(map(file_name, files)),
        fingerprint,
        (sum(sizes),) if aligned else tuple(sizes),
        lambda cursor: sum(sizes[: cursor[0]]),
        start,
        labels,
        columns if available else (),
        tuple(files),
    )


def file_name(path: Path) -> str:
    """Return the name of a file in a manifest, which is UTF-8; a file's name need not be.

    >>> file_name(Path("data/a.txt"))
    'data/a.txt'
    """
    return os.fsencode(path).decode(errors="backslashreplace")


def infer_kind(columns: Collection[str]) -> Kind:
    """Infer the kind of data from column names.

    >>> infer_kind(["id", "source", "target"]), infer_kind(["text", "label"])
    ('pairs', 'text')
    """
    if "text" not in columns:
        if chat_formats.find_format(columns):
            return "chat"
        for kind, names in DEFAULT_COLUMNS.items():
            if set(names) <= set(columns):
                return kind
    return "text"


def _choose(kind: Kind, columns: tuple[str, ...], file: Path) -> tuple[str, ...]:
    """Return the columns to read: those with the default names, or both if there are two."""
    usual = DEFAULT_COLUMNS[kind]
    if kind == "chat" and columns:
        if found := chat_formats.find_format(columns):
            return found
        raise InputError(
            f"{str(file)!r} has the columns {', '.join(columns)}, but chat needs messages, conversations, prompt and "
            "completion, or instruction, input and output; name one column of messages, or those of a prompt and its "
            "answer, with columns (of a run, data.columns)."
        )
    if len(usual) != 2 or not columns or set(usual) <= set(columns):
        return usual
    if titled := [name for name in columns if len(name.split()) > WORDS or name.endswith((".", "!", "?"))]:
        raise InputError(
            f"{str(file)!r} has {_shortened(titled[0])} where the names of its columns would be; without a header, "
            "give their numbers as columns (of a run, data.columns=1,2)."
        )
    if len(columns) != 2:
        raise InputError(
            f"{str(file)!r} has the columns {', '.join(columns)}, but {kind} needs two, by default "
            f"{' and '.join(usual)}; name the two with columns."
        )
    # One of the two may have its default name.
    return columns[::-1] if columns[0] == usual[1] or columns[1] == usual[0] else columns


def _is_table(path: str | Path) -> bool:
    return any(suffix in TABULAR_SUFFIXES for suffix in Path(path).suffixes)


def _read_chats(files: list[Path], columns: tuple[str, ...], **choices: Any) -> Iterator[Record]:  # noqa: ANN401
    for record in sources.read_records(files, columns, **choices):
        yield replace(record, values=chat_formats.normalize(record.values, _where(record, files)))


def _labels(files: list[Path], column: str, errors: Errors) -> tuple[str, ...]:
    """Read and check all labels first, so that label ids do not depend on the order of items."""
    found: dict[object, Record] = {}  # by value and by text, so that 1, 1.0, True and "1" collide
    for record in sources.read_records(files, [column], errors=errors):
        label = record.values[0]
        nonfinite = isinstance(label, float) and not math.isfinite(label)
        if nonfinite or not isinstance(label, str | int | float) or not str(label).strip():
            raise InputError(
                f"{_where(record, files)} has the label {_shortened(label)}, but a label is a number or a non-empty "
                "string; fix it, or remove the line."
            )
        for key in (label, str(label)):
            other = found.setdefault(key, record)
            if type(other.values[0]) is not type(label):
                raise InputError(
                    f"{_where(record, files)} has the label {_shortened(label)}, and {_where(other, files)} has "
                    f"{_shortened(other.values[0])}, which may or may not be the same; use one type for all labels."
                )
    return tuple(sorted(key for key in found if isinstance(key, str)))


def _where(record: Record, files: list[Path]) -> str:
    return sources.place(files[record.file_index], record.line)


def _tags(files: list[Path], columns: tuple[str, ...], errors: Errors) -> tuple[str, ...]:
    """Read and check all tags first, like labels, before anything is written."""
    found: set[str] = set()
    for record in sources.read_records(files, columns, errors=errors):
        where = f"record {record.index + 1} of {str(files[record.file_index])!r}"
        for value, column in zip(record.values, columns, strict=True):
            if not isinstance(value, list) or not value or not all(isinstance(one, str) and one for one in value):
                raise InputError(
                    f"{where} has {_shortened(value)} in {column!r}, but it must be a list of non-empty strings; "
                    "fix it."
                )
        words, tags = record.values
        if len(words) != len(tags):
            raise InputError(f"{where} has {len(words)} words, but {len(tags)} tags; give each word one tag.")
        found.update(tags)
    return tuple(sorted(found))


def _shortened(value: object) -> str:
    """Return the repr of a value, shortened."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _from_builtin(found: BuiltinDataset, kind: Kind | None, split: str) -> DatasetReader:
    if kind not in (None, found.kind):
        raise InputError(f"{found.name} is of kind {found.kind}, not {kind}; do not give a kind.")

    def read(cursor: Cursor, stop: int | None, on_bytes: OnBytes, on_hash: OnHash) -> Iterator[Chunk | Record]:
        for index, item in enumerate(found.items(split, cursor[1]), cursor[1]):
            on_bytes(1)
            if found.kind == "text":
                yield Chunk(item[1].encode(), 0, index, ends_document=True)
            else:
                yield Record((item,) if found.kind == "chat" else item, 0, index)

    found.items(split)  # checks the name of the split
    name = f"{found.name} ({split})"
    return DatasetReader(
        found.kind, (name,), name, (found.sizes()[split],), lambda cursor: cursor[1], read, found.labels
    )
