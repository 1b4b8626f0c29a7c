"""Built-in datasets, which need no download: each item is a function of its split and index."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from glasshouse.config import did_you_mean
from glasshouse.data.builtin import chat, dates, langid, paraphrases, preferences, stdlib
from glasshouse.data.builtin.splits import SPLITS
from glasshouse.errors import InputError

__all__ = ["SPLITS", "BuiltinDataset", "builtin_dataset", "builtin_datasets", "is_builtin"]

Kind = Literal["text", "pairs", "labelled", "chat", "preferences"]


@dataclass(frozen=True)
class BuiltinDataset:
    """A built-in dataset."""

    name: str
    kind: Kind
    description: str
    count: Callable[[str], int]
    item: Callable[[str, int], Any]
    labels: tuple[str, ...] = ()

    def sizes(self) -> Mapping[str, int]:
        """Count the items of each split.

        >>> builtin_dataset("dates").sizes()
        {'train': 50000, 'validation': 2000, 'test': 2000}
        """
        return {split: self.count(split) for split in SPLITS}

    def items(self, split: str = "train", start: int = 0) -> Iterator[Any]:
        """Yield the items of a split from index `start` on, without generating those before it.

        An item of kind text is (name, text), of pairs (source, target), of labelled (text, label), of chat a list of
        {"role": ..., "content": ...}, of preferences (prompt, chosen, rejected).

        >>> next(builtin_dataset("dates").items("train", start=9))
        ('tisdag 24 oktober 2023', '2023-10-24')
        """
        if split not in SPLITS:
            raise InputError(f"there is no split {split!r} of {self.name}; {did_you_mean(split, SPLITS)}")
        if start < 0:
            raise InputError(f"start is {start}, but it must be 0 or more.")
        return (self.item(split, index) for index in range(start, self.count(split)))


_GENERATED = {"train": 50_000, "validation": 2_000, "test": 2_000}
_PREFERENCES = {**_GENERATED, "train": 5_000}  # two sequences each, and far fewer are needed

_BUILTINS = {
    each.name: each
    for each in (
        BuiltinDataset(
            "stdlib",
            "text",
            "The Python standard library of this interpreter, one document per file.",
            stdlib.count,
            stdlib.item,
        ),
        BuiltinDataset(
            "dates",
            "pairs",
            "Dates as written in sixty languages and countries, to ISO dates.",
            _GENERATED.__getitem__,
            dates.item,
        ),
        BuiltinDataset(
            "langid",
            "labelled",
            "Five names of places, languages, scripts or currencies, to the one of sixty-four languages they are in.",
            _GENERATED.__getitem__,
            langid.item,
            langid.LANGUAGES,
        ),
        BuiltinDataset(
            "chat",
            "chat",
            "Short conversations about words, lists, languages and dates, with correct answers.",
            _GENERATED.__getitem__,
            chat.item,
        ),
        BuiltinDataset(
            "paraphrases",
            "pairs",
            "Two sentences with the same meaning, in other words and in another order.",
            {**_GENERATED, "validation": 1_000, "test": 1_000}.__getitem__,
            paraphrases.item,
        ),
        BuiltinDataset(
            "preferences",
            "preferences",
            "Questions as in chat with two correct answers, of which the result alone is preferred to a sentence.",
            _PREFERENCES.__getitem__,
            preferences.item,
        ),
    )
}


def builtin_datasets() -> tuple[str, ...]:
    """List the names that `builtin_dataset` takes.

    >>> builtin_datasets()
    ('stdlib', 'dates', 'langid', 'chat', 'paraphrases', 'preferences')
    """
    return tuple(_BUILTINS)


def is_builtin(paths: Sequence[str | Path]) -> bool:
    """Return whether this is the name of a built-in dataset, and not of a file.

    >>> is_builtin(["dates"]), is_builtin(["dates.tsv"])
    (True, False)
    """
    return len(paths) == 1 and str(paths[0]) in _BUILTINS and not Path(paths[0]).exists()


def builtin_dataset(name: str, **sizes: int) -> BuiltinDataset:
    """Return a dataset by name; `sizes` changes the sizes of a generated one.

    A larger dataset starts with the items of a smaller one.

    >>> builtin_dataset("langid", train=200_000).sizes()["train"]
    200000
    >>> builtin_dataset("date")
    Traceback (most recent call last):
    ...
    glasshouse.errors.InputError: there is no built-in dataset 'date'; did you mean dates?
    """
    if name not in _BUILTINS:
        raise InputError(f"there is no built-in dataset {name!r}; {did_you_mean(name, _BUILTINS)}")
    found = _BUILTINS[name]
    if not sizes:
        return found
    if found.count is stdlib.count:
        raise InputError("stdlib has a fixed size; give no sizes for it.")
    for split, size in sizes.items():
        if split not in SPLITS:
            raise InputError(f"there is no split {split!r} of {name}; {did_you_mean(split, SPLITS)}")
        if size < 0:
            raise InputError(f"{split} is {size}, but a size must be 0 or more.")
    return dataclasses.replace(found, count={**found.sizes(), **sizes}.__getitem__)
