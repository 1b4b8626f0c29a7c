"""Which language is this: five names of places, languages, scripts or currencies, as one language writes them.

One name is often spelled alike in several languages, so a sample has five, drawn until no other language here has
them all. Names that English shares with another language are left out of both: they tell nothing, and some are only
there because nobody has translated them. A name that train shows is in no other split, in any language.
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


def draw(dice: random.Random, split: str) -> tuple[str, str]:
    """Draw a language, and five names of a split that no other language shares."""
    language = dice.choice(LANGUAGES)
    while True:
        sample = dice.sample(names()[split][language], _IN_A_SAMPLE)
        if len(frozenset.intersection(*(_writers()[name] for name in sample))) == 1:
            return ", ".join(sample), language


def bayes_accuracy(split: str) -> float:
    """Return how often the best guesser is right who is shown one name alone, and knows who writes what.

    For five names as they are drawn here that is always, since no other language has them all. For one it is less:
    many are written alike in several languages. A language is drawn evenly, then one of its names, so a name is most
    likely to come from the language with the fewest names of all that write it.

    >>> 0.5 < ceiling("test") < 1
    True
    """
    known = names()[split]
    guess: dict[str, str] = {}
    for language in sorted(known, key=lambda code: len(known[code]), reverse=True):
        guess |= dict.fromkeys(known[language], language)  # the fewest names come last, and stay
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
            shared_with_english = "en" in _writers()[name] and len(_writers()[name]) > 1
            if split_by_name()[name.casefold()] == split_of(key) and not shared_with_english:
                found[split_of(key)][language][name] = None
    return {split: {code: tuple(every) for code, every in by.items()} for split, by in found.items()}


@functools.cache
def split_by_name() -> Mapping[str, str]:
    """Return the split of every name in small letters; one with two meanings has that of the first.

    >>> home()["arabic"] == split_of("language:ar")  # a script has the same name
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
def _writers() -> Mapping[str, frozenset[str]]:
    writers = defaultdict(set)
    for language, known in _known().items():
        for name in known.values():
            writers[name].add(language)
    return {name: frozenset(languages) for name, languages in writers.items()}
