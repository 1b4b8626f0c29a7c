"""Text to words and how often each occurs, which is all that training a tokenizer needs to know of a corpus."""

from __future__ import annotations

import secrets
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

import regex  # type: ignore[import-untyped]

from glasshouse.config import did_you_mean
from glasshouse.errors import InputError
from glasshouse.text.gigatoken_backend import gigatoken, in_forked_child, suppress_stderr
from glasshouse.text.prefetch import prefetch_map

# How a text is split into words before bytes are merged: a merge never crosses the border of a word.
PATTERNS: Mapping[str, str] = {
    "gpt2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "gpt4": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
}
BATCH = 2**24  # bytes counted at a time
CHECK_BYTES = 2**18  # bytes on which the fast counter has to agree with the slow one
MAX_WORDS = 750_000  # distinct words held, each of which takes about a kilobyte in all
LENGTH = 64  # bytes that those have on average at most: a text without a space is one word of megabytes

Counts = Mapping[bytes, int]


@dataclass(frozen=True)
class WordCounts:
    """The words of a corpus, and what of it had to be left out to hold no more than the limit."""

    counts: Counts
    n_bytes: int
    dropped: int  # occurrences of words too rare to be held

    @property
    def total(self) -> int:
        """How many words the corpus has, with those left out."""
        return sum(self.counts.values()) + self.dropped


def split(text: str, pattern: str) -> list[str]:
    """Split a text into words by a pattern's name.

    >>> split("It's 12345 o'clock", "gpt2")
    ['It', "'s", ' 12345', ' o', "'", 'clock']
    >>> split("It's 12345 o'clock", "gpt4")
    ['It', "'s", ' ', '123', '45', ' o', "'clock"]
    """
    return regex.findall(expression(pattern), text)


def expression(pattern: str) -> str:
    """Return the regular expression of a pattern's name."""
    if pattern not in PATTERNS:
        raise InputError(f"pattern is {pattern!r}, which is no pattern; {did_you_mean(pattern, PATTERNS)}")
    return PATTERNS[pattern]


def count(texts: Iterable[bytes], pattern: str = "gpt2", limit: int = MAX_WORDS) -> WordCounts:
    """Count the words of texts in UTF-8, holding at most `limit` distinct ones: beyond that the rarer half goes.

    So it does beyond `LENGTH` times `limit` bytes, which ordinary text does not reach.

    >>> sorted(count([b"to be or not", b" to be"]).counts.items())
    [(b' be', 2), (b' not', 1), (b' or', 1), (b' to', 1), (b'to', 1)]
    """
    if limit < 256:
        raise InputError(f"the limit on distinct words is {limit}, but it must be at least 256.")
    counts: Counter[bytes] = Counter()
    size = left_out = held = 0
    engine: list[_Engine] = []

    def work(batch: list[bytes]) -> Iterable[tuple[bytes, int]]:
        if not engine:
            engine.append(_choose(batch, pattern))
        return engine[0](batch)

    for batch, found in prefetch_map(work, batches(texts, BATCH)):
        size += sum(map(len, batch))
        words = iter(found)
        while some := list(islice(words, limit // 8)):
            for word, number in some:
                if word not in counts:
                    held += len(word)
                counts[word] += number
            if len(counts) > limit or held > limit * LENGTH:
                rare = _rare(counts, limit // 2)
                held -= sum(map(len, rare))
                left_out += sum(map(counts.pop, rare))
    return WordCounts(counts, size, left_out)


def _rare(counts: Counts, most: int) -> list[bytes]:
    """Return what is not among the `most` frequent words that together have no more bytes than so many may."""
    rare, room = [], most * LENGTH
    for place, word in enumerate(sorted(counts, key=lambda word: (-counts[word], word))):
        if place < most and len(word) <= room:
            room -= len(word)
        else:
            rare.append(word)
    return rare


_Engine = Callable[[list[bytes]], Iterable[tuple[bytes, int]]]


def batches(texts: Iterable[bytes], enough: int) -> Iterator[list[bytes]]:
    """Put texts together until there are enough bytes.

    >>> list(batches([b"to", b"be", b"or"], 3))
    [[b'to', b'be'], [b'or']]
    """
    batch, size = [], 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= enough:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _choose(batch: list[bytes], pattern: str) -> _Engine:
    """Return the fast counter where it is there, knows the pattern, and proves right on the start of the corpus."""
    compiled = regex.compile(expression(pattern))

    def slow(texts: list[bytes]) -> Iterable[tuple[bytes, int]]:
        words = Counter(word for text in texts for word in compiled.findall(text.decode()))
        return ((word.encode(), number) for word, number in words.items())

    if gigatoken is None or pattern != "gpt2" or in_forked_child.is_set():
        return slow
    sample = take_bytes(batch, CHECK_BYTES)
    if dict(_fast(sample)) != dict(slow(sample)):
        warnings.warn("gigatoken splits this text in another way, so words are counted without it.", stacklevel=4)
        return slow
    return _fast


def _fast(texts: list[bytes]) -> Iterable[tuple[bytes, int]]:
    border = secrets.token_bytes(16).hex().encode()  # in no text but by a chance of 2^-128
    with suppress_stderr:
        return gigatoken.pretokenized_counts(border.join(texts), border)


def take_bytes(texts: Iterable[bytes], size: int) -> list[bytes]:
    r"""Return the first `size` bytes of texts, whole characters only.

    >>> start(["über".encode(), b"alles"], 5)
    [b'\xc3\xbcber']
    >>> start(["über".encode(), b"alles"], 1)
    []
    """
    taken = []
    for text in texts:
        if size <= 0:
            break
        taken.append(text[:size].decode(errors="ignore").encode())
        size -= len(text)
    return [text for text in taken if text]
