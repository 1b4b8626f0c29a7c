"""Rows of tabular files, the values of the requested columns: JSON, CSV and TSV, and what `columnar` reads."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from glasshouse.errors import InputError
from glasshouse.text.sources import columnar
from glasshouse.text.sources.column_names import nested_names, nested_value, no_column
from glasshouse.text.sources.file import SourceFile, place, too_long
from glasshouse.text.sources.json_values import json_values

TABULAR_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", *columnar.SUFFIXES)
_ROW = 2**26  # bytes of a row that is a document, which is then chunked; JSON and CSV rows are parsed whole
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

    A row (in Parquet and Arrow, a value) longer than `max_bytes` is refused. `translation.de` is a field of a column,
    and numbers are the columns of a CSV or TSV file without a header, from 1.
    """
    if file.kind in columnar.SUFFIXES:
        return columnar.rows(file, columns, max_bytes)
    if file.kind in (".csv", ".tsv"):
        return _csv_rows(file, columns, max_bytes)
    return _json_rows(file, columns, max_bytes)


def columns(file: SourceFile) -> list[str]:
    """Return the column names, with those of fields: from the header, the schema, or the first JSON object.

    Empty if they cannot be read; reading the rows then raises the error.
    """
    try:
        if file.kind in columnar.SUFFIXES:
            return columnar.column_names(file)
        if file.kind in (".csv", ".tsv"):
            rows = csv.reader(_CsvLines(file, _ROW), delimiter="\t" if file.kind == ".tsv" else ",", strict=True)
            return next(filter(None, rows), [])
        first = json.loads(next(_json_texts(file, _ROW))[1])
        return [*nested_names(first)] if isinstance(first, dict) else []
    except Exception:  # from several libraries
        return []


def _where(file: SourceFile, number: int) -> str:
    return place(file.path, number)


def _json_rows(file: SourceFile, columns: Sequence[str], max_bytes: int) -> Iterator[tuple[int, tuple[Any, ...]]]:
    for number, text in _json_texts(file, max_bytes):
        value = _json_value(file, number, text)
        if not isinstance(value, dict):
            raise InputError(f"{_where(file, number)} is not a JSON object in {{}}; fix it.")
        try:
            values = tuple(nested_value(value, column) for column in columns)
        except KeyError as missing:
            raise no_column(_where(file, number), missing.args[0], nested_names(value)) from None
        yield number, values


def _json_texts(file: SourceFile, max_bytes: int) -> Iterator[tuple[int, str]]:
    """Yield the number and the text of each value: of the lines that are not empty, or of what a .json file holds."""
    if file.kind == ".json":
        return json_values(file, max_bytes)
    return ((number, line.decode()) for number, line in enumerate(file.lines(max_bytes), 1) if line.strip())


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
    number, indices, width = 1, list[int](), 0
    try:
        for row in reader:
            if row and not width:
                indices, width = _cells(file, row, columns, number), len(row)
                if numbered(columns):
                    yield number, tuple(row[index] for index in indices)
            elif row and len(row) != width:
                cells = f"{len(row)} cells, but the {'first line' if numbered(columns) else 'header'} has {width}"
                raise InputError(f"{_where(file, number)} has {cells}; fix it.")
            elif row:
                yield number, tuple(row[index] for index in indices)
            number, lines.size = reader.line_num + 1, 0
    except csv.Error as error:
        reason = str(error).partition(" - ")[0]
        raise InputError(f"{_where(file, number)} is not valid {file.kind[1:]} ({reason}); fix it.") from None


def numbered(columns: Sequence[str]) -> bool:
    """Return whether these are numbers of columns, counted from 1, of a file without a header.

    >>> numbered(["1", "2"]), numbered(["de", "en"]), numbered(["0"])
    (True, False, False)
    """
    return all(column.isdecimal() and column.isascii() and column[0] != "0" for column in columns)


def _cells(file: SourceFile, first: list[str], columns: Sequence[str], number: int) -> list[int]:
    """Return which cells of a row the columns are, by the first row: a header, or what tells how many there are."""
    where = _where(file, number)
    if not numbered(columns):
        for column in columns:
            if column not in first:
                raise no_column(repr(str(file.path)), column, first, "; without a header, columns are numbers: 1,2.")
            if (times := first.count(column)) > 1:
                raise InputError(f"{where} names the column {column!r} {times} times; rename the others.")
        return [first.index(column) for column in columns]
    if set(columns) <= set(first):
        raise InputError(
            f"{where} has the cells {', '.join(columns)}, which may be names of columns or data, as numbers are the "
            "columns of a file without a header; give it a header of other names."
        )
    if highest := next((column for column in columns if int(column) > len(first)), None):
        raise InputError(f"{where} has {len(first)} cells, so there is no column {highest}; name those that it has.")
    return [int(column) - 1 for column in columns]


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
