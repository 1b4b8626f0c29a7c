"""Names of columns: `translation.de` is the field `de` of the column `translation`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from glasshouse.config import did_you_mean
from glasshouse.errors import InputError

_NAMES = 100  # column names that an error compares


def nested_names(row: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of the columns of a row; of a column that holds a dictionary, those of its fields.

    >>> [*nested_names({"id": 1, "translation": {"de": "ja", "en": "yes"}, "meta": {}})]
    ['id', 'translation.de', 'translation.en', 'meta']
    """
    left: list[tuple[str, Any]] = [*row.items()][::-1]
    while left:
        name, value = left.pop()
        if isinstance(value, Mapping) and value:
            left += [(f"{name}.{field}", inner) for field, inner in [*value.items()][::-1]]
        else:
            yield name


def nested_value(row: Mapping[str, Any], name: str) -> Any:  # noqa: ANN401 - any JSON value
    """Return the value of a column, or of a field of it; a column whose name has a dot comes before a field.

    >>> nested_value({"translation": {"de": "ja"}}, "translation.de")
    'ja'
    """
    if name in row:
        return row[name]
    value: Any = row
    for field in name.split("."):
        if not isinstance(value, Mapping) or field not in value:
            raise KeyError(name)
        value = value[field]
    return value


def no_column(where: str, column: str, known: Iterable[str], more: str = "") -> InputError:
    """Return the error for a column that is missing; `more` is added to it."""
    some = [*islice(known, _NAMES)]  # comparing with millions would take hours
    advice = did_you_mean(column, some)
    listed = f" (it has {', '.join(some)})" if advice.startswith("did") else ""
    return InputError(
        f"{where} has no column {column!r}{listed}; {advice.removesuffix('.') + more if more else advice}"
    )
