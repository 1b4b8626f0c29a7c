"""Rows of Parquet files and of Arrow files, which Hugging Face `datasets` writes; a few rows in memory at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from glasshouse.errors import GlasshouseError, InputError
from glasshouse.text.sources.column_names import no_column
from glasshouse.text.sources.file import BLOCK, SourceFile, extra_module, not_utf8, place, read_errors, too_long

SUFFIXES = {".parquet": "Parquet", ".arrow": "Arrow"}  # and what the formats are called
_BYTES = 2**26  # bytes of the rows decoded at a time
_ROWS = 64  # rows decoded at a time
_FILE_MAGIC = b"ARROW1"  # the start of Arrow's file format; `datasets` writes its stream format
_STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"


def column_names(file: SourceFile) -> list[str]:
    """Return the names of the columns; of a column of structs, those of its fields."""
    with _errors(file):
        if file.kind == ".parquet":
            with _parquet(file) as opened:
                return _schema_names(opened.schema_arrow)
        with _arrow(file) as (opened, _):
            return _schema_names(opened.schema)


def rows(file: SourceFile, columns: Sequence[str], max_bytes: int) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """Yield the row number and the values of the columns; a value longer than `max_bytes` is refused."""
    with read_errors(file.path):
        size, reported, number = file.path.stat().st_size, 0, 0
    for found, share in _decoded(file, columns, max_bytes):
        for values in zip(*found, strict=True):
            number += 1
            yield number, values
        if file.on_bytes and (read := int(share * size) - reported) > 0:
            file.on_bytes(read)
            reported += read
    if file.on_bytes and reported < size:
        file.on_bytes(size - reported)  # there were no rows
    if file.on_hash:
        with read_errors(file.path), file.path.open("rb") as opened:
            file.on_hash(file.index, size, hashlib.file_digest(opened, "sha256").hexdigest())


def _decoded(file: SourceFile, columns: Sequence[str], max_bytes: int) -> Iterator[tuple[list[list[Any]], float]]:
    """Yield the columns of a few rows at a time, and the fraction of the file read so far."""
    done = 0
    with _errors(file):
        for batch, share in (_parquet_batches if file.kind == ".parquet" else _arrow_batches)(file, columns):
            yield [_values(file, _column(batch, column), done, max_bytes) for column in columns], share
            done += batch.num_rows


@contextmanager
def _errors(file: SourceFile) -> Iterator[None]:
    """Convert what pyarrow raises for a corrupt file, which are many types."""
    try:
        yield
    except GlasshouseError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno:  # from the operating system
            with read_errors(file.path):
                raise
        reason = str(error).partition("\n")[0]
        raise InputError(
            f"{str(file.path)!r} is not a valid {SUFFIXES[file.kind]} file ({reason}); download it again."
        ) from None


def _parquet(file: SourceFile) -> Any:  # noqa: ANN401 - a pyarrow file
    return extra_module("pyarrow.parquet", "parquet").ParquetFile(file.path, buffer_size=BLOCK)


def _parquet_batches(file: SourceFile, columns: Sequence[str]) -> Iterator[tuple[Any, float]]:
    done = 0
    with _parquet(file) as opened:
        _require_all(file, columns, opened.schema_arrow)
        for group in range(opened.num_row_groups):
            metadata = opened.metadata.row_group(group)
            count = max(1, min(_ROWS, _BYTES * metadata.num_rows // max(1, metadata.total_byte_size)))
            for batch in opened.iter_batches(count, row_groups=[group], columns=list(columns)):
                done += batch.num_rows
                yield batch, done / opened.metadata.num_rows


@contextmanager
def _arrow(file: SourceFile) -> Iterator[tuple[Any, Any]]:
    """Open an Arrow file or stream, memory-mapped; yield it and the map."""
    pyarrow = extra_module("pyarrow", "parquet", "arrow")
    with pyarrow.memory_map(str(file.path)) as source:
        is_file = source.read(len(_FILE_MAGIC)) == _FILE_MAGIC
        if not is_file and source.size():
            source.seek(max(0, source.size() - len(_STREAM_END)))
            if source.read() != _STREAM_END:  # it would be read as a shorter one
                raise InputError(f"{str(file.path)!r} is truncated, or not an Arrow stream; download it again.")
        source.seek(0)
        with (pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream)(source) as opened:
            yield opened, source


def _arrow_batches(file: SourceFile, columns: Sequence[str]) -> Iterator[tuple[Any, float]]:
    with _arrow(file) as (opened, source):
        _require_all(file, columns, opened.schema)
        count = getattr(opened, "num_record_batches", None)  # of a file, which a stream does not know
        for number, batch in enumerate(opened if count is None else map(opened.get_batch, range(count)), 1):
            share = source.tell() / source.size() if count is None else number / count
            rows_each = max(1, min(_ROWS, _BYTES * batch.num_rows // max(1, batch.nbytes)))
            for start in range(0, batch.num_rows, rows_each):
                some = batch.slice(start, rows_each)
                some.validate(full=True)  # offsets beyond the data would crash the process
                yield some, share if start + rows_each >= batch.num_rows else 0.0


def _require_all(file: SourceFile, columns: Sequence[str], schema: Any) -> None:  # noqa: ANN401 - a pyarrow schema
    known = _schema_names(schema)
    for column in columns:
        if column not in schema.names and not any(f"{name}.".startswith(f"{column}.") for name in known):
            raise no_column(repr(str(file.path)), column, known)


def _schema_names(schema: Any) -> list[str]:  # noqa: ANN401 - a pyarrow schema
    """Return the names of the columns; of a column of structs, those of its fields."""
    found, left = list[str](), [(field.name, field.type) for field in reversed(schema)]
    while left:
        name, kind = left.pop()
        if getattr(kind, "num_fields", 0) and str(kind).startswith("struct"):
            left += [
                (f"{name}.{kind.field(at).name}", kind.field(at).type) for at in reversed(range(kind.num_fields))
            ]
        else:
            found.append(name)
    return found


def _column(batch: Any, name: str) -> Any:  # noqa: ANN401 - a pyarrow batch and array
    """Return a column of a batch, or a field of a column of structs, which is null where its struct is."""
    if name in batch.schema.names:
        return batch.column(name)
    column, *fields = name.split(".")
    return extra_module("pyarrow.compute", "parquet").struct_field(batch.column(column), fields)


def _values(file: SourceFile, column: Any, done: int, max_bytes: int) -> list[Any]:  # noqa: ANN401 - a pyarrow array
    if str(column.type).startswith("dictionary"):
        return _dictionary_values(file, column, done, max_bytes)
    if str(column.type) not in ("string", "large_string", "string_view"):
        return column.to_pylist()
    values = column.cast("large_binary").to_pylist()  # pyarrow has not validated them as UTF-8
    for at, value in enumerate(values):
        if value is not None and len(value) > max_bytes:
            raise too_long(place(file.path, done + at + 1), max_bytes)
        try:
            values[at] = value if value is None else value.decode(errors=file.errors)
        except UnicodeDecodeError as error:
            raise not_utf8(place(file.path, done + at + 1), error.start) from None
    return values


def _dictionary_values(file: SourceFile, column: Any, done: int, max_bytes: int) -> list[Any]:  # noqa: ANN401
    """Decode a dictionary-encoded column, each distinct value once: a repeated value of megabytes shares memory."""
    decoded: dict[int | None, Any] = {None: None}
    indices = column.indices.to_pylist()
    for at, index in enumerate(indices):
        if index not in decoded:
            (decoded[index],) = _values(file, column.dictionary[index : index + 1], done + at, max_bytes)
    return [decoded[index] for index in indices]
