"""Dates as people write them in sixty languages and countries, and the same dates in ISO form.

Every answer is determined by its text. All years have four digits and are Gregorian, also where another calendar is
in daily use (Thai, Persian). Where the text alone is ambiguous, it is prefixed with the locale:

- a numeric month, `en-US: 3/4/2021`, since other locales put the day first;
- a month name with another meaning elsewhere: `listopada` is October in Croatian and November in Polish.

Digits are 0 to 9 in every script, as in Babel.
"""

from __future__ import annotations

import datetime
import functools
import random
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from glasshouse.data.builtin import cldr
from glasshouse.data.builtin.splits import SPLITS, item_rng, split_of

FIRST, LAST = datetime.date(1900, 1, 1), datetime.date(2099, 12, 31)

LOCALES = tuple(
    "en-US en-GB de nl af sv da nb is fr es ca gl pt-BR pt-PT it ro eu cy ga "  # noqa: SIM905 - sixty lines otherwise
    "pl cs sk sl hr sr mk bg ru uk lt lv et fi hu el tr az kk ka hy he ar fa ur "
    "hi mr bn ta te kn th vi id ms sw ko ja zh zh-Hant".split()
)

_STYLES = ("short", "medium", "long", "full")
_SKELETONS = ("yMd", "yMEd", "yMMMd", "yMMMEd", "yMMMMd", "yMMMMEd")


@dataclass(frozen=True)
class DateFormat:
    """A date format: a locale and a pattern, with the names that the pattern needs."""

    locale: str
    pattern: str
    months: tuple[Mapping[str, str], ...]
    weekdays: tuple[Mapping[str, str], ...]
    ambiguous_months: frozenset[int]

    def write(self, date: datetime.date) -> str:
        """Format a date, prefixed with the locale if it is ambiguous without."""
        numbers = {"y": str(date.year), "d": str(date.day), "dd": f"{date.day:02}"}
        text = self.pattern % {**numbers, **self.months[date.month - 1], **self.weekdays[date.weekday()]}
        return f"{self.locale}: {text}" if date.month in self.ambiguous_months else text


def item(split: str, index: int) -> tuple[str, str]:
    """Return a written date and its ISO form; no date is in two splits.

    >>> item("train", 9)
    ('tisdag 24 oktober 2023', '2023-10-24')
    """
    return draw(item_rng("dates", split, index), split)


def draw(rng: random.Random, split: str) -> tuple[str, str]:
    """Draw a date of a split and a format; return the text and the ISO date."""
    date = datetime.date.fromordinal(rng.choice(_days()[split]))
    return rng.choice(formats()[rng.choice(LOCALES)]).write(date), date.isoformat()


@functools.cache
def formats() -> Mapping[str, tuple[DateFormat, ...]]:
    """Return all formats, by locale.

    >>> [one.write(datetime.date(2021, 3, 4)) for one in formats()["de"]][:3]
    ['de: 04.03.2021', '4. März 2021', 'Donnerstag, 4. März 2021']
    """
    ambiguous = _ambiguous_names()
    return {code: tuple(_format(code, pattern, ambiguous) for pattern in _patterns(code)) for code in LOCALES}


def _patterns(code: str) -> list[str]:
    own = cldr.locale(code)
    known = [own.date_formats[style] for style in _STYLES]
    known += [own.datetime_skeletons[key] for key in _SKELETONS if key in own.datetime_skeletons]
    patterns = dict.fromkeys(re.sub(r"%\(y+\)s", "%(y)s", cldr.plain(pattern.format)) for pattern in known)
    # A locale may contradict itself: Kannada has d/M/y alone and M/d/y after a weekday. The first one counts.
    orders = {pattern: pattern.index("%(d") < pattern.index("%(M") for pattern in patterns if _is_numeric(pattern)}
    first = next(iter(orders.values()), True)
    return [pattern for pattern in patterns if orders.get(pattern, first) == first]


def _is_numeric(pattern: str) -> bool:
    return re.search(r"%\(MM?\)s(?!月)", pattern) is not None


def _format(code: str, pattern: str, ambiguous: frozenset[str]) -> DateFormat:
    from babel.dates import DateTimeFormat

    fields = [field for field in re.findall(r"%\((\w+)\)s", pattern) if field[0] not in "yd"]

    def named(date: datetime.date, weekday: bool) -> Mapping[str, str]:
        texts = DateTimeFormat(date, cldr.locale(code))
        return {field: cldr.plain(texts[field]) for field in fields if (field[0] in "Ec") == weekday}

    months = tuple(named(datetime.date(2001, month, 1), weekday=False) for month in range(1, 13))
    weekdays = tuple(named(datetime.date(2001, 1, day), weekday=True) for day in range(1, 8))  # the 1st is a Monday
    ambiguous_months = frozenset(
        month
        for month, texts in enumerate(months, start=1)
        if _is_numeric(pattern) or any(_bare(text) in ambiguous for text in texts.values())
    )
    return DateFormat(code, pattern, months, weekdays, ambiguous_months)


def _ambiguous_names() -> frozenset[str]:
    meanings = defaultdict(set)
    for code in LOCALES:
        for widths in cldr.locale(code).months.values():
            for width in ("wide", "abbreviated"):
                for month, name in widths[width].items():
                    meanings[_bare(name)].add(month)
    return frozenset(name for name, months in meanings.items() if len(months) > 1)


def _bare(name: str) -> str:
    return name.casefold().rstrip(".")


@functools.cache
def _days() -> Mapping[str, tuple[int, ...]]:
    days: dict[str, list[int]] = {split: [] for split in SPLITS}
    for day in range(FIRST.toordinal(), LAST.toordinal() + 1):
        days[split_of(datetime.date.fromordinal(day).isoformat())].append(day)
    return {split: tuple(ordinals) for split, ordinals in days.items()}
