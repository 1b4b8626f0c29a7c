"""Rows of JSON Lines, CSV, TSV and Parquet files: the values of the requested columns."""

from __future__ import annotations

import csv
import hashlib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from glasshouse.config import did_you_mean
from glasshouse.errors import GlasshouseError, InputError
from glasshouse.text.sources.file import BLOCK, SourceFile, extra_module, not_utf8, read_errors, too_long

TABULAR_SUFFIXES = (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet")
_ROW = 2**26  # bytes of a row that is a document, which is then chunked; JSON and CSV rows are parsed whole
_NAMES = 100  # column names that an error compares
_ROWS = 64  # rows of a Parquet file decoded at a time
# JSON escapes: a surrogate pair, a lone surrogate (the group), or any other.
_LONE = re.compile(r"(?as)\\(?:u(?i:d[89ab][\da-f]{2})\\u(?i:d[c-f][\da-f]{2})|(u(?i:d[89a-f][\da-f]{2}))|.)")


def texts(file: SourceFile, column: str) -> Iterator[tuple[bytes, bool]]:
    """Yield the text of each row as a whole document."""
    for number, (value,) in rows(file, [column], _ROW):
        if not isinstance(value, str):
            kind = "null" if value is None else type(value).__name__
            raise InputError(
                f"{_where(file, number)} has a value of type {kind} in {column!r}, but it must be a string; fix it "
                "or name another column."
            )
        yield value.encode(), True


def rows(file: SourceFile, columns: Sequence[str], max_bytes: int) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """Yield the line or row number, for error messages, and the values of the columns.

    A row (in Parquet, a value) longer than `max_bytes` is refused.
    """
    if file.kind == ".parquet":
        return _parquet_rows(file, columns, max_bytes)
    if file.kind in (".csv", ".tsv"):
        return _csv_rows(file, columns, max_bytes)
    return _json_rows(file, columns, max_bytes)


def columns(file: SourceFile) -> list[str]:
    """Return the column names: from the header, the schema, or the first JSON object.

    Empty if they cannot be read; reading the rows then raises the error.
    """
    try:
        if file.kind == ".parquet":
            with extra_module("pyarrow.parquet", "parquet").ParquetFile(file.path) as opened:
                return list(opened.schema_arrow.names)
        if file.kind in (".csv", ".tsv"):
            rows = csv.reader(_CsvLines(file, _ROW), delimiter="\t" if file.kind == ".tsv" else ",", strict=True)
            return next(filter(None, rows), [])
        line = next((line for line in file.lines(_ROW) if line.strip()), b"{}")
        first = json.loads(line)
        return list(first) if isinstance(first, dict) else []
    except Exception:  # from several libraries
        return []


def _where(file: SourceFile, number: int) -> str:
    return f"{'row' if file.kind == '.parquet' else 'line'} {number} of {str(file.path)!r}"


def _json_rows(file: SourceFile, columns: Sequence[str], max_bytes: int) -> Iterator[tuple[int, tuple[Any, ...]]]:
    for number, line in enumerate(file.lines(max_bytes), 1):
        if not line.strip():
            continue
        value = _json_value(file, number, line.decode())
        if not isinstance(value, dict):
            raise InputError(f"{_where(file, number)} is not a JSON object in {{}}; fix it.")
        _require_all(columns, value, _where(file, number))
        yield number, tuple(value[column] for column in columns)


def _json_value(file: SourceFile, number: int, line: str) -> Any:  # noqa: ANN401 - any JSON value
    # Only an escape can give a lone surrogate: the bytes themselves were validated.
    if "\\ud" in line or "\\uD" in line:
        if file.errors == "strict" and any(match[1] for match in _LONE.finditer(line)):
            raise InputError(
                f"{_where(file, number)} has a lone surrogate; fix it, or set errors (of a run, data.errors) to "
                "'replace'."
            )
        line = _LONE.sub(lambda match: r"\ufffd" if match[1] else match[0], line)
    try:
        return json.loads(line)
    except RecursionError:
        raise InputError(f"{_where(file, number)} is nested too deeply to be parsed; remove it.") from None
    except ValueError as error:  # a number with thousands of digits raises a plain ValueError
        reason = str(error).replace("line 1 column", "column")
        raise InputError(f"{_where(file, number)} is not valid JSON ({reason}); fix it.") from None


def _csv_rows(file: SourceFile, columns: Sequence[str], max_bytes: int) -> Iterator[tuple[int, tuple[str, ...]]]:
    csv.field_size_limit(2**31 - 1)  # the most that every platform accepts; Python's default is 128 KiB
    delimiter = "\t" if file.kind == ".tsv" else ","
    lines = _CsvLines(file, max_bytes)
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    number, header, indices = 1, list[str](), list[int]()
    try:
        for row in reader:
            if row and not header:
                _require_all(columns, row, repr(str(file.path)))
                for column in columns:
                    if (times := row.count(column)) > 1:
                        raise InputError(
                            f"{_where(file, number)} names the column {column!r} {times} times; rename the others."
                        )
                header, indices = row, [row.index(column) for column in columns]
            elif row and len(row) != len(header):
                cells = f"{len(row)} cells, but the header has {len(header)}"
                raise InputError(f"{_where(file, number)} has {cells}; fix it.")
            elif row:
                yield number, tuple(row[index] for index in indices)
            number, lines.size = reader.line_num + 1, 0
    except csv.Error as error:
        reason = str(error).partition(" - ")[0]
        raise InputError(f"{_where(file, number)} is not valid {file.kind[1:]} ({reason}); fix it.") from None


class _CsvLines:
    """The lines of a file; `size` counts the bytes of the current row, which may span several lines."""

    def __init__(self, file: SourceFile, max_bytes: int) -> None:
        self.file, self.max_bytes, self.size = file, max_bytes, 0

    def __iter__(self) -> Iterator[str]:
        for number, line in enumerate(self.file.lines(self.max_bytes), 1):
            if b"\0" in line:
                raise InputError(f"{_where(self.file, number)} has a NUL byte; save the file as UTF-8.")
            self.size += len(line) + 1
            if self.size > self.max_bytes:
                raise too_long(f"the row that ends after {_where(self.file, number)}", self.max_bytes)
            yield line.decode() + "\n"


def _parquet_rows(file: SourceFile, columns: Sequence[str], max_bytes: int) -> Iterator[tuple[int, tuple[Any, ...]]]:
    with read_errors(file.path):
        size, reported, number = file.path.stat().st_size, 0, 0
    for batch, share in _parquet_columns(file, columns, max_bytes):
        for values in zip(*batch, strict=True):
            number += 1
            yield number, values
        if file.on_bytes:
            file.on_bytes(int(share * size) - reported)
        reported = int(share * size)
    if file.on_bytes and reported < size:
        file.on_bytes(size - reported)  # there were no rows
    if file.on_hash:
        with read_errors(file.path), file.path.open("rb") as opened:
            file.on_hash(file.index, size, hashlib.file_digest(opened, "sha256").hexdigest())


def _parquet_columns(
    file: SourceFile, columns: Sequence[str], max_bytes: int
) -> Iterator[tuple[list[list[Any]], float]]:
    """Yield the columns of a few rows at a time, and the fraction of rows read so far."""
    done = 0
    try:
        with extra_module("pyarrow.parquet", "parquet").ParquetFile(file.path, buffer_size=BLOCK) as opened:
            _require_all(columns, opened.schema_arrow.names, repr(str(file.path)))
            for group in range(opened.num_row_groups):
                metadata = opened.metadata.row_group(group)
                count = max(1, min(_ROWS, _ROW * metadata.num_rows // max(1, metadata.total_byte_size)))
                for batch in opened.iter_batches(count, row_groups=[group], columns=list(columns)):
                    values = [_parquet_values(file, batch.column(column), done, max_bytes) for column in columns]
                    done += batch.num_rows
                    yield values, done / opened.metadata.num_rows
    except GlasshouseError:
        raise
    except Exception as error:  # pyarrow raises many types for a corrupt file
        if isinstance(error, OSError) and error.errno:  # from the operating system
            with read_errors(file.path):
                raise
        reason = str(error).partition("\n")[0]
        raise InputError(f"{str(file.path)!r} is not a valid Parquet file ({reason}); download it again.") from None


def _parquet_values(file: SourceFile, column: Any, done: int, max_bytes: int) -> list[Any]:  # noqa: ANN401 - a pyarrow array
    if str(column.type).startswith("dictionary"):
        return _dictionary_values(file, column, done, max_bytes)
    if str(column.type) not in ("string", "large_string", "string_view"):
        return column.to_pylist()
    values = column.cast("large_binary").to_pylist()  # pyarrow has not validated them as UTF-8
    for at, value in enumerate(values):
        if value is not None and len(value) > max_bytes:
            raise too_long(_where(file, done + at + 1), max_bytes)
        try:
            values[at] = value if value is None else value.decode(errors=file.errors)
        except UnicodeDecodeError as error:
            raise not_utf8(_where(file, done + at + 1), error.start) from None
    return values


def _dictionary_values(file: SourceFile, column: Any, done: int, max_bytes: int) -> list[Any]:  # noqa: ANN401
    """Decode a dictionary-encoded column, each distinct value once: a repeated value of megabytes shares memory."""
    decoded: dict[int | None, Any] = {None: None}
    indices = column.indices.to_pylist()
    for at, index in enumerate(indices):
        if index not in decoded:
            (decoded[index],) = _parquet_values(file, column.dictionary[index : index + 1], done + at, max_bytes)
    return [decoded[index] for index in indices]


def _require_all(columns: Iterable[str], known: Collection[str], where: str) -> None:
    for column in columns:
        if column not in known:
            some = [*islice(known, _NAMES)]  # comparing with millions would take hours
            advice = did_you_mean(column, some)
            listed = f" (it has {', '.join(some)})" if advice.startswith("did") else ""
            raise InputError(f"{where} has no column {column!r}{listed}; {advice}")
