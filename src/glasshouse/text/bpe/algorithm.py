"""Byte-pair encoding, the algorithm itself: start from bytes, merge the most frequent pair of neighbours, repeat.

This is the readable reference implementation. `fast_bpe` does the same on whole corpora; tests compare the two.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from itertools import pairwise
from typing import TypeVar

from glasshouse.text.bpe.byte_level import INITIAL_ALPHABET

Pair = tuple[bytes, bytes]
Symbol = TypeVar("Symbol")


@dataclass(frozen=True, slots=True)
class Merge:
    """One merge: the pair that becomes a token, its count, and the next most frequent pairs."""

    pair: Pair
    count: int
    runners_up: tuple[tuple[Pair, int], ...] = ()


def learn(words: Mapping[bytes, int], vocab_size: int, runners_up: int = 0) -> Iterator[Merge]:
    """Yield the merges that give a vocabulary of `vocab_size`, from word counts.

    Each step merges the most frequent pair; ties go to the pair with the smaller ids.

    >>> for merge in learn({b"hug": 10, b"pug": 5, b"pun": 12, b"hugs": 5}, 258, runners_up=1):
    ...     print(merge)
    Merge(pair=(b'u', b'g'), count=20, runners_up=(((b'p', b'u'), 17),))
    Merge(pair=(b'h', b'ug'), count=15, runners_up=(((b'p', b'u'), 12),))
    """
    tokens = [bytes([byte]) for byte in INITIAL_ALPHABET]
    ids = {byte: number for number, byte in enumerate(INITIAL_ALPHABET)}
    spelled = [[ids[byte] for byte in word] for word in words]
    weights = list(words.values())
    counts: Counter[tuple[int, int]] = Counter()
    where = defaultdict(set)  # pair -> words that contain it, or did
    for number, word in enumerate(spelled):
        for pair in pairwise(word):
            counts[pair] += weights[number]
            where[pair].add(number)
    while len(tokens) < vocab_size and counts:
        best, *others = nsmallest(1 + runners_up, counts, key=lambda pair: (-counts[pair], pair))
        left, right = tokens[best[0]], tokens[best[1]]
        yield Merge((left, right), counts[best], tuple(((tokens[a], tokens[b]), counts[a, b]) for a, b in others))
        # No other pair made this token before: the same bytes always merge in the same way within a word.
        tokens.append(left + right)
        for number in where.pop(best):
            for pair in pairwise(spelled[number]):
                counts[pair] -= weights[number]
            spelled[number] = merge_pair(spelled[number], best, len(tokens) - 1)
            for pair in pairwise(spelled[number]):
                counts[pair] += weights[number]
                where[pair].add(number)
        counts = +counts  # drops pairs with count 0


def merge_pair(word: Sequence[Symbol], pair: tuple[Symbol, Symbol], token: Symbol) -> list[Symbol]:
    """Replace each occurrence of a pair, from left to right, by one token.

    >>> merge_pair("banana", ("a", "n"), "an")
    ['b', 'an', 'an', 'a']
    """
    merged: list[Symbol] = []
    rest = iter(range(len(word)))
    for i in rest:
        if tuple(word[i : i + 2]) == pair:
            merged.append(token)
            next(rest)
        else:
            merged.append(word[i])
    return merged


def merge_steps(word: bytes, ranks: Mapping[Pair, int]) -> Iterator[list[bytes]]:
    """Yield a word as bytes, then after each merge; the pair with the lowest rank is merged first.

    >>> list(merge_steps(b"hugs", {(b"u", b"g"): 0, (b"h", b"ug"): 1}))
    [[b'h', b'u', b'g', b's'], [b'h', b'ug', b's'], [b'hug', b's']]
    """
    tokens = [bytes([byte]) for byte in word]
    yield tokens
    while known := ranks.keys() & set(pairwise(tokens)):
        left, right = min(known, key=ranks.__getitem__)
        tokens = merge_pair(tokens, (left, right), left + right)
        yield tokens


def printable(token: bytes) -> str:
    r"""Return a printable form of a token: invalid UTF-8 and non-printing characters are escaped.

    >>> print(printable(b"caf\xc3\xa9\n\xff"))
    café\n\xff
    """
    text = token.decode(errors="backslashreplace")
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def merge_tree(token: bytes, ranks: Mapping[Pair, int], show: Callable[[bytes], str] = printable) -> list[str]:
    r"""Draw the merge tree of a token, one node per line.

    >>> print("\n".join(merge_tree(b"hug", {(b"u", b"g"): 0, (b"h", b"ug"): 1})))
    hug
    ├─ h
    └─ ug
       ├─ u
       └─ g
    """
    lines = [show(token)]
    if len(token) > 1 and (parts := find_merge(token, ranks)):
        for part, first, other in zip(parts, ("├─ ", "└─ "), ("│  ", "   "), strict=True):
            head, *rest = merge_tree(part, ranks, show)
            lines += [first + head, *(other + line for line in rest)]
    return lines


def find_merge(token: bytes, ranks: Mapping[Pair, int]) -> Pair | None:
    """Return the pair whose merge makes a token, or None."""
    *_, before, after = [[b""], *merge_steps(token, ranks)]
    return (before[0], before[1]) if after == [token] and len(before) == 2 else None
