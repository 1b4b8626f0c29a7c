"""Rows of JSON lines, CSV, TSV and Parquet files: the values of the fields that are asked for."""

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
_ROW = 2**26  # bytes of a row that is a document, which is then cut; JSON and CSV are only read whole
_NAMES = 100  # of fields that an error looks at
_ROWS = 64  # of a Parquet file, decoded at a time
# Escapes in JSON, one after the other: a pair of surrogates, a lone one (the group), any other.
_LONE = re.compile(r"(?as)\\(?:u(?i:d[89ab][\da-f]{2})\\u(?i:d[c-f][\da-f]{2})|(u(?i:d[89a-f][\da-f]{2}))|.)")


def texts(file: SourceFile, field: str) -> Iterator[tuple[bytes, bool]]:
    """Yield the text of each row as a document that ends."""
    for number, (value,) in rows(file, [field], _ROW):
        if not isinstance(value, str):
            kind = "null" if value is None else type(value).__name__
            raise InputError(
                f"{_where(file, number)} has a value of type {kind} in {field!r}, but it must be a string; mend it "
                "or name another field."
            )
        yield value.encode(), True


def rows(file: SourceFile, fields: Sequence[str], longest: int) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """Yield the values of the fields, with the number of the line or row for errors to name.

    A row (a value, in Parquet) beyond `longest` bytes is refused.
    """
    if file.kind == ".parquet":
        return _parquet_rows(file, fields, longest)
    return _csv_rows(file, fields, longest) if file.kind in (".csv", ".tsv") else _json_rows(file, fields, longest)


def columns(file: SourceFile) -> list[str]:
    """Return the names of a table's columns: those of its header or schema, or the fields of its first object.

    Where they cannot be read there are none: reading the rows says what is wrong.
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
    except Exception:  # of many libraries
        return []


def _where(file: SourceFile, number: int) -> str:
    return f"{'row' if file.kind == '.parquet' else 'line'} {number} of {str(file.path)!r}"


def _json_rows(file: SourceFile, fields: Sequence[str], longest: int) -> Iterator[tuple[int, tuple[Any, ...]]]:
    for number, line in enumerate(file.lines(longest), 1):
        if not line.strip():
            continue
        value = _json_value(file, number, line.decode())
        if not isinstance(value, dict):
            raise InputError(f"{_where(file, number)} is not an object with fields in {{}}; mend it.")
        _require_all(fields, value, _where(file, number))
        yield number, tuple(value[field] for field in fields)


def _json_value(file: SourceFile, number: int, line: str) -> Any:  # noqa: ANN401 - whatever JSON can say
    # Only an escape can spell half a character: the bytes themselves were checked.
    if "\\ud" in line or "\\uD" in line:
        if file.errors == "strict" and any(match[1] for match in _LONE.finditer(line)):
            raise InputError(
                f"{_where(file, number)} holds half a character (a surrogate); mend it, or set errors (of a "
                "run, data.errors) to 'replace'."
            )
        line = _LONE.sub(lambda match: r"\ufffd" if match[1] else match[0], line)
    try:
        return json.loads(line)
    except RecursionError:
        raise InputError(f"{_where(file, number)} is nested too deeply to be read; take it out.") from None
    except ValueError as error:  # the plain kind for a number of thousands of digits
        reason = str(error).replace("line 1 column", "column")
        raise InputError(f"{_where(file, number)} is not sound JSON ({reason}); mend it.") from None


def _csv_rows(file: SourceFile, fields: Sequence[str], longest: int) -> Iterator[tuple[int, tuple[str, ...]]]:
    csv.field_size_limit(2**31 - 1)  # the most that every machine takes; Python itself stops at 128 KiB
    delimiter = "\t" if file.kind == ".tsv" else ","
    lines = _CsvLines(file, longest)
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    number, header, places = 1, list[str](), list[int]()
    try:
        for row in reader:
            if row and not header:
                _require_all(fields, row, repr(str(file.path)))
                for field in fields:
                    if (times := row.count(field)) > 1:
                        raise InputError(
                            f"{_where(file, number)} names the column {field!r} {times} times; rename those that are "
                            "not meant."
                        )
                header, places = row, [row.index(field) for field in fields]
            elif row and len(row) != len(header):
                cells = f"{len(row)} cells, but the header has {len(header)}"
                raise InputError(f"{_where(file, number)} has {cells}; mend it.")
            elif row:
                yield number, tuple(row[place] for place in places)
            number, lines.size = reader.line_num + 1, 0
    except csv.Error as error:
        reason = str(error).partition(" - ")[0]
        raise InputError(f"{_where(file, number)} is not sound {file.kind[1:]} ({reason}); mend it.") from None


class _CsvLines:
    """The lines of a file; `size` counts the bytes of a row, which may have several."""

    def __init__(self, file: SourceFile, longest: int) -> None:
        self.file, self.longest, self.size = file, longest, 0

    def __iter__(self) -> Iterator[str]:
        for number, line in enumerate(self.file.lines(self.longest), 1):
            if b"\0" in line:
                raise InputError(f"{_where(self.file, number)} holds a NUL byte, as no text does; write it as UTF-8.")
            self.size += len(line) + 1
            if self.size > self.longest:
                raise too_long(f"the row that ends after {_where(self.file, number)}", self.longest)
            yield line.decode() + "\n"


def _parquet_rows(file: SourceFile, fields: Sequence[str], longest: int) -> Iterator[tuple[int, tuple[Any, ...]]]:
    with read_errors(file.path):
        size, told, number = file.path.stat().st_size, 0, 0
    for columns, share in _parquet_columns(file, fields, longest):
        for values in zip(*columns, strict=True):
            number += 1
            yield number, values
        if file.on_bytes:
            file.on_bytes(int(share * size) - told)
        told = int(share * size)
    if file.on_bytes and told < size:
        file.on_bytes(size - told)  # there were no rows
    if file.on_hash:
        with read_errors(file.path), file.path.open("rb") as opened:
            file.on_hash(file.source, size, hashlib.file_digest(opened, "sha256").hexdigest())


def _parquet_columns(
    file: SourceFile, fields: Sequence[str], longest: int
) -> Iterator[tuple[list[list[Any]], float]]:
    """Yield the columns of a few rows at a time, and what share of the rows has been read with them."""
    done = 0
    try:
        with extra_module("pyarrow.parquet", "parquet").ParquetFile(file.path, buffer_size=BLOCK) as opened:
            _require_all(fields, opened.schema_arrow.names, repr(str(file.path)))
            for group in range(opened.num_row_groups):
                about = opened.metadata.row_group(group)
                count = max(1, min(_ROWS, _ROW * about.num_rows // max(1, about.total_byte_size)))
                for batch in opened.iter_batches(count, row_groups=[group], columns=list(fields)):
                    columns = [_parquet_values(file, batch.column(field), done, longest) for field in fields]
                    done += batch.num_rows
                    yield columns, done / opened.metadata.num_rows
    except GlasshouseError:
        raise
    except Exception as error:  # of a damaged file pyarrow says so by many types
        if isinstance(error, OSError) and error.errno:  # and this is what the system says
            with read_errors(file.path):
                raise
        reason = str(error).partition("\n")[0]
        raise InputError(f"{str(file.path)!r} is not a sound Parquet file ({reason}); fetch it again.") from None


def _parquet_values(file: SourceFile, column: Any, done: int, longest: int) -> list[Any]:  # noqa: ANN401 - an array of pyarrow's
    if str(column.type).startswith("dictionary"):
        return _parquet_words(file, column, done, longest)
    if str(column.type) not in ("string", "large_string", "string_view"):
        return column.to_pylist()
    values = column.cast("large_binary").to_pylist()  # as nobody has checked yet that they are UTF-8
    for at, value in enumerate(values):
        if value is not None and len(value) > longest:
            raise too_long(_where(file, done + at + 1), longest)
        try:
            values[at] = value if value is None else value.decode(errors=file.errors)
        except UnicodeDecodeError as error:
            raise not_utf8(_where(file, done + at + 1), error.start) from None
    return values


def _parquet_words(file: SourceFile, column: Any, done: int, longest: int) -> list[Any]:  # noqa: ANN401
    """Return values that are written once each, by their numbers; spelled out, one of megabytes would be many."""
    words: dict[int | None, Any] = {None: None}
    numbers = column.indices.to_pylist()
    for at, number in enumerate(numbers):
        if number not in words:
            (words[number],) = _parquet_values(file, column.dictionary[number : number + 1], done + at, longest)
    return [words[number] for number in numbers]


def _require_all(fields: Iterable[str], known: Collection[str], where: str) -> None:
    for field in fields:
        if field not in known:
            some = [*islice(known, _NAMES)]  # to compare with millions would take hours
            advice = did_you_mean(field, some)
            listed = f" (it has {', '.join(some)})" if advice.startswith("did") else ""
            raise InputError(f"{where} has no field {field!r}{listed}; {advice}")
