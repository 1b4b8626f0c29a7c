"""Where items come from: texts, tables, two files line by line, or a built-in set; each can start anywhere."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from glasshouse.config import did_you_mean
from glasshouse.data.builtin import BuiltinDataset, builtin_dataset, builtin_datasets
from glasshouse.data.corpus import ARRAYS_PER_ITEM, Kind
from glasshouse.errors import InputError
from glasshouse.text import sources
from glasshouse.text.sources import TABULAR_SUFFIXES, Chunk, Errors, OnBytes, OnHash, Record

PIECE = 2**20  # bytes of a long text encoded as one, so that all cores have some
GLIMPSE = 60  # letters of a value in an error

Cursor = tuple[int, int]  # which source, and which piece or record of it
DEFAULT_FIELDS: dict[Kind, tuple[str, ...]] = {
    "text": ("text",),
    "pairs": ("source", "target"),
    "labelled": ("text", "label"),
    "tagged": ("words", "tags"),
    "chat": ("messages",),
}
PROMPT_COMPLETION = ("prompt", "completion")  # the other columns that a chat can have


@dataclass(frozen=True)
class DatasetReader:
    """A stream of pieces of text, or of records, that is the same each time it is read."""

    kind: Kind
    file_names: tuple[str, ...]  # of the sources
    fingerprint: str  # changes when a source does
    size: int  # how much there is to read, in bytes, or in items of a built-in set
    size_before: Callable[[Cursor], int]  # how much of it is not read again by one that starts there
    read: Callable[[Cursor, OnBytes, OnHash], Iterator[Chunk | Record]]
    labels: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()  # the columns that were read, of tables


def is_builtin(paths: Sequence[str | Path]) -> bool:
    """Say whether this is the name of a built-in set, and not of a file.

    >>> is_builtin(["dates"]), is_builtin(["dates.tsv"])
    (True, False)
    """
    return len(paths) == 1 and str(paths[0]) in builtin_datasets() and not Path(paths[0]).exists()


def open_reader(
    source: str | Path | Iterable[str | Path],
    *,
    kind: Kind | None = None,
    fields: tuple[str, ...] = (),
    split: str = "train",
    separator: str | None = None,
    errors: Errors = "strict",
) -> DatasetReader:
    """Find what `source` names: a built-in set, or files, folders and globs; two plain files are pairs, line by line.

    Without a `kind`, the columns of the first file tell it; without `fields`, they are chosen from its columns.

    >>> open_reader("dates").kind
    'pairs'
    """
    paths = [source] if isinstance(source, str | Path) else list(source)
    if is_builtin(paths):
        return _from_builtin(builtin_dataset(str(paths[0])), kind, split)
    if kind is not None and kind not in ARRAYS_PER_ITEM:
        raise InputError(f"kind is {kind!r}, which is no kind of data; {did_you_mean(kind, ARRAYS_PER_ITEM)}")
    first = sources.find_files(paths)[0]
    there = sources.columns(first)
    kind = kind or infer_kind(fields or there or ())
    fields = fields or _choose(kind, there or (), first)
    if kind == "pairs" and len(paths) == 2 and all(Path(path).is_file() and not _is_table(path) for path in paths):
        files = [Path(path) for path in paths]
        read: Callable[..., Iterator[Chunk | Record]] = partial(sources.read_parallel, *files, errors=errors)
    elif kind == "text":
        if len(fields) != 1:
            raise InputError(
                f"fields is {fields}, but running text has one; name it alone, or give the kind of data that has two."
            )
        files = sources.find_files(paths)
        read = partial(
            sources.read_chunks, files, field=fields[0], separator=separator, errors=errors, chunk_bytes=PIECE
        )
    else:
        if there is None:
            beside = ", or two plain files, line by line" if kind == "pairs" else ""
            raise InputError(
                f"{str(first)!r} is plain text, which is of kind text, but {kind} are wanted: give a jsonl, csv, tsv "
                f"or parquet file{beside}."
            )
        files = sources.find_files(paths)
        read = partial(sources.read_records, files, fields, errors=errors)
        if len(fields) != 2 and not (kind == "chat" and len(fields) == 1):
            raise InputError(f"fields is {fields}, but {kind} has two, such as {DEFAULT_FIELDS[kind]}; name them.")
    labels: tuple[str, ...] = ()
    if kind == "labelled":
        labels = _labels(files, fields[1], errors)
    elif kind == "tagged":
        labels = _tags(files, fields, errors)

    def start(place: Cursor, on_bytes: OnBytes, on_hash: OnHash) -> Iterator[Chunk | Record]:
        return read(start=place, on_bytes=on_bytes, on_hash=on_hash)

    sizes = list(map(sources.file_size, files))
    # A name need not be UTF-8, and what is written down has to be.
    names = tuple(os.fsencode(path).decode(errors="backslashreplace") for path in files)
    stamp = repr(
        [(os.fsencode(path), size, path.stat().st_mtime_ns) for path, size in zip(files, sizes, strict=True)]
    )
    digest = hashlib.sha256(stamp.encode()).hexdigest()
    return DatasetReader(
        kind, names, digest, sum(sizes), lambda place: sum(sizes[: place[0]]), start, labels, fields if there else ()
    )


def infer_kind(columns: Collection[str]) -> Kind:
    """Return the kind of data that a table with these columns holds, by their names.

    >>> infer_kind(["id", "source", "target"]), infer_kind(["text", "label"])
    ('pairs', 'text')
    """
    if "text" not in columns:
        if set(PROMPT_COMPLETION) <= set(columns):
            return "chat"
        for kind, names in DEFAULT_FIELDS.items():
            if set(names) <= set(columns):
                return kind
    return "text"


def _choose(kind: Kind, columns: tuple[str, ...], file: Path) -> tuple[str, ...]:
    """Return the columns to read: those with the usual names, or all where there are as many as it takes."""
    usual = DEFAULT_FIELDS[kind]
    if kind == "chat" and set(PROMPT_COMPLETION) <= set(columns) and "messages" not in columns:
        return PROMPT_COMPLETION
    if len(usual) != 2 or not columns or set(usual) <= set(columns):
        return usual
    if len(columns) != 2:
        raise InputError(
            f"{str(file)!r} has the columns {', '.join(columns)}, of which {kind} take two, by their names "
            f"{' and '.join(usual)}; give the two as fields."
        )
    # One of the two may have its usual name.
    return columns[::-1] if columns[0] == usual[1] or columns[1] == usual[0] else columns


def _is_table(path: str | Path) -> bool:
    return any(suffix in TABULAR_SUFFIXES for suffix in Path(path).suffixes)


def _labels(files: list[Path], field: str, errors: Errors) -> tuple[str, ...]:
    """Read all labels first, so that their numbers do not depend on the order of items, and refuse what is none."""
    found: dict[object, Record] = {}  # by value and as written, so that 1, 1.0, True and "1" meet
    for record in sources.read_records(files, [field], errors=errors):
        label = record.values[0]
        endless = isinstance(label, float) and not math.isfinite(label)
        if endless or not isinstance(label, str | int | float) or not str(label).strip():
            raise InputError(
                f"{_place(record, files)} has the label {_glimpse(label)}, but a label is a number, or a text that "
                "is not empty; correct it, or leave the line out."
            )
        for key in (label, str(label)):
            other = found.setdefault(key, record)
            if type(other.values[0]) is not type(label):
                raise InputError(
                    f"{_place(record, files)} has the label {_glimpse(label)}, and {_place(other, files)} has "
                    f"{_glimpse(other.values[0])}, which may or may not be the same; write all labels alike."
                )
    return tuple(sorted(key for key in found if isinstance(key, str)))


def _place(record: Record, files: list[Path]) -> str:
    path = files[record.file_index]
    return f"{'row' if path.suffix == '.parquet' else 'line'} {record.line} of {str(path)!r}"


def _tags(files: list[Path], fields: tuple[str, ...], errors: Errors) -> tuple[str, ...]:
    """Read all tags first, as labels are, and refuse a record that is amiss before anything is written."""
    found: set[str] = set()
    for record in sources.read_records(files, fields, errors=errors):
        where = f"record {record.index + 1} of {str(files[record.file_index])!r}"
        for value, field in zip(record.values, fields, strict=True):
            if not isinstance(value, list) or not value or not all(isinstance(one, str) and one for one in value):
                raise InputError(
                    f"{where} holds {_glimpse(value)} in {field!r}, where a list of strings, none of them empty, "
                    "belongs; mend it."
                )
        words, tags = record.values
        if len(words) != len(tags):
            raise InputError(f"{where} has {len(words)} words, but {len(tags)} tags; give each word one tag.")
        found.update(tags)
    return tuple(sorted(found))


def _glimpse(value: object) -> str:
    """Return how a value is written, its beginning if that is long."""
    written = repr(value)
    return written if len(written) <= GLIMPSE else f"{written[:GLIMPSE]}..."


def _from_builtin(found: BuiltinDataset, kind: Kind | None, split: str) -> DatasetReader:
    if kind not in (None, found.kind):
        raise InputError(f"{found.name} is of kind {found.kind}, not {kind}; leave the kind out.")

    def read(place: Cursor, on_bytes: OnBytes, on_hash: OnHash) -> Iterator[Chunk | Record]:
        for number, item in enumerate(found.items(split, place[1]), place[1]):
            on_bytes(1)
            if found.kind == "text":
                yield Chunk(item[1].encode(), 0, number, ends_document=True)
            else:
                yield Record((item,) if found.kind == "chat" else item, 0, number)

    found.items(split)  # which knows what is no split
    size = found.sizes()[split]
    name = f"{found.name} ({split})"
    return DatasetReader(found.kind, (name,), name, size, lambda place: place[1], read, found.labels)
