"""Language identification: five names of places, languages, scripts or currencies, to the language they are in.

A name is often spelled alike in several languages, so a sample has five, drawn until no other language has them all.
Names that English shares with another language are excluded from both: they carry no information, and some are just
not translated. A name in the training split is in no other split, in any language.
"""

from __future__ import annotations

import functools
import random
from collections import Counter, defaultdict
from collections.abc import Mapping

from glasshouse.data.builtin import cldr
from glasshouse.data.builtin.splits import SPLITS, item_rng, split_of

LANGUAGES = tuple(
    "en de nl sv da nb is ga fr es ca it pt ro eu pl cs sk sl hr "  # noqa: SIM905 - sixty-four lines otherwise
    "sr mk bg ru uk be lt lv et fi hu sq el tr az kk mn ka hy he ar am "
    "fa ur hi ne mr gu pa bn ta te kn ml si th my vi id sw zu zh ja ko".split()
)

_IN_A_SAMPLE = 5


def item(split: str, index: int) -> tuple[str, str]:
    """Return five names and the code of their language.

    >>> text, language = item("train", 2)
    >>> language, len(text.split(", "))
    ('is', 5)
    """
    return draw(item_rng("langid", split, index), split)


def draw(rng: random.Random, split: str) -> tuple[str, str]:
    """Draw a language and five names of a split that no other language has together."""
    language = rng.choice(LANGUAGES)
    while True:
        sample = rng.sample(names()[split][language], _IN_A_SAMPLE)
        if len(frozenset.intersection(*(_languages_by_name()[name] for name in sample))) == 1:
            return ", ".join(sample), language


def bayes_accuracy(split: str) -> float:
    """Return the accuracy of the Bayes-optimal classifier on single names.

    With five names as drawn here it is 1, since no other language has them all. With one it is lower: many names are
    spelled alike in several languages. A language is drawn uniformly, then one of its names, so a name most likely
    comes from the language with the fewest names among those that have it.

    >>> 0.5 < bayes_accuracy("test") < 1
    True
    """
    known = names()[split]
    guess: dict[str, str] = {}
    for language in sorted(known, key=lambda code: len(known[code]), reverse=True):
        guess |= dict.fromkeys(known[language], language)  # the language with the fewest names comes last and wins
    right = Counter(guess.values())
    return sum(right[code] / len(every) for code, every in known.items()) / len(known)


@functools.cache
def names() -> Mapping[str, Mapping[str, tuple[str, ...]]]:
    """Return the names of each split, by language.

    >>> "Allemagne" in names()[split_of("territory:DE")]["fr"]
    True
    """
    found: dict[str, dict[str, dict[str, None]]] = {split: {code: {} for code in LANGUAGES} for split in SPLITS}
    for language, known in _known().items():
        for key, name in known.items():
            shared_with_english = "en" in _languages_by_name()[name] and len(_languages_by_name()[name]) > 1
            if split_by_name()[name.casefold()] == split_of(key) and not shared_with_english:
                found[split_of(key)][language][name] = None
    return {split: {code: tuple(every) for code, every in by.items()} for split, by in found.items()}


@functools.cache
def split_by_name() -> Mapping[str, str]:
    """Return the split of every lowercase name; one with two meanings has the split of the first.

    >>> split_by_name()["arabic"] == split_of("language:ar")  # a script has the same name
    True
    """
    found: dict[str, str] = {}
    for known in _known().values():
        for key, name in known.items():
            found.setdefault(name.casefold(), split_of(key))
    return found


@functools.cache
def _known() -> Mapping[str, Mapping[str, str]]:
    return {language: cldr.names(language) for language in LANGUAGES}


@functools.cache
def _languages_by_name() -> Mapping[str, frozenset[str]]:
    found = defaultdict(set)
    for language, known in _known().items():
        for name in known.values():
            found[name].add(language)
    return {name: frozenset(languages) for name, languages in found.items()}
