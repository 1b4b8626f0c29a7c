"""Pre-tokenization: split text into words and count them, which is all that BPE training needs from a corpus."""

from __future__ import annotations

import re
import secrets
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

import regex  # type: ignore[import-untyped]

from glasshouse.config import did_you_mean
from glasshouse.errors import InputError
from glasshouse.text.gigatoken_backend import gigatoken, in_forked_child, suppress_stderr
from glasshouse.text.prefetch import prefetch_map

# How text is split into words before BPE; a merge never crosses a word boundary.
PATTERNS: Mapping[str, str] = {
    "gpt2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "gpt4": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
}
# A word never crosses this space, and splits the same with and without the text on its other side. Unicode's spaces
# start with the bytes C2 and E1 to E3: before those a space may belong to the one before it.
SPACE = re.compile(rb" (?=[^\s\xc2\xe1-\xe3])")
BATCH = 2**24  # bytes counted at a time
CHECK_BYTES = 2**18  # bytes on which the fast backend must agree with the slow one
MAX_WORDS = 750_000  # distinct words kept in memory, about 1 kB each
MEAN_WORD_BYTES = 64  # maximum mean length of a kept word: text without spaces is one word of megabytes

Counts = Mapping[bytes, int]


@dataclass(frozen=True)
class WordCounts:
    """The word counts of a corpus, and how much was dropped to stay within the limit."""

    counts: Counts
    n_bytes: int
    dropped: int  # occurrences of words dropped because they are too rare

    @property
    def total(self) -> int:
        """Number of words in the corpus, dropped ones included."""
        return sum(self.counts.values()) + self.dropped


def split(text: str, pattern: str) -> list[str]:
    """Split a text into words with a named pattern.

    >>> split("It's 12345 o'clock", "gpt2")
    ['It', "'s", ' 12345', ' o', "'", 'clock']
    >>> split("It's 12345 o'clock", "gpt4")
    ['It', "'s", ' ', '123', '45', ' o', "'clock"]
    """
    return regex.findall(expression(pattern), text)


def expression(pattern: str) -> str:
    """Return the regular expression of a named pattern."""
    if pattern not in PATTERNS:
        raise InputError(f"pattern is {pattern!r}, which does not exist; {did_you_mean(pattern, PATTERNS)}")
    return PATTERNS[pattern]


def count(texts: Iterable[bytes], pattern: str = "gpt2", limit: int = MAX_WORDS) -> WordCounts:
    """Count the words of UTF-8 texts, keeping at most `limit` distinct ones; beyond that the rarer half is dropped.

    The same happens beyond `limit * MEAN_WORD_BYTES` bytes of words, which ordinary text does not reach.

    >>> sorted(count([b"to be or not", b" to be"]).counts.items())
    [(b' be', 2), (b' not', 1), (b' or', 1), (b' to', 1), (b'to', 1)]
    """
    if limit < 256:
        raise InputError(f"the limit on distinct words is {limit}, but it must be at least 256.")
    counts: Counter[bytes] = Counter()
    size = dropped = kept_bytes = 0
    counter: list[_WordCounter] = []

    def work(batch: list[bytes]) -> Iterable[tuple[bytes, int]]:
        if not counter:
            counter.append(_choose(batch, pattern))
        return counter[0](batch)

    for batch, found in prefetch_map(work, batches(texts, BATCH)):
        size += sum(map(len, batch))
        words = iter(found)
        while some := list(islice(words, limit // 8)):
            for word, number in some:
                if word not in counts:
                    kept_bytes += len(word)
                counts[word] += number
            if len(counts) > limit or kept_bytes > limit * MEAN_WORD_BYTES:
                rare = _rare(counts, limit // 2)
                kept_bytes -= sum(map(len, rare))
                dropped += sum(map(counts.pop, rare))
    return WordCounts(counts, size, dropped)


def _rare(counts: Counts, limit: int) -> list[bytes]:
    """Return all words but the `limit` most frequent, which are also limited to `MEAN_WORD_BYTES` on average."""
    rare, bytes_left = [], limit * MEAN_WORD_BYTES
    for rank, word in enumerate(sorted(counts, key=lambda word: (-counts[word], word))):
        if rank < limit and len(word) <= bytes_left:
            bytes_left -= len(word)
        else:
            rare.append(word)
    return rare


_WordCounter = Callable[[list[bytes]], Iterable[tuple[bytes, int]]]


def batches(texts: Iterable[bytes], min_bytes: int) -> Iterator[list[bytes]]:
    """Group texts into batches of at least `min_bytes` bytes; the last may be smaller.

    >>> list(batches([b"to", b"be", b"or"], 3))
    [[b'to', b'be'], [b'or']]
    """
    batch, size = [], 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= min_bytes:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _choose(batch: list[bytes], pattern: str) -> _WordCounter:
    """Return the fast counter if it is installed, knows the pattern, and agrees on the start of the corpus."""
    slow = _RegexCounter(pattern)
    if gigatoken is None or pattern != "gpt2" or in_forked_child.is_set():
        return slow
    sample = take_bytes(batch, CHECK_BYTES)
    if dict(_fast(sample)) != dict(slow(sample)):
        warnings.warn("gigatoken splits this text differently, so words are counted without it.", stacklevel=4)
        return slow
    return _fast


class _RegexCounter:
    """Counts words by regular expressions: cuts texts at spaces, and splits only one of equal pieces."""

    def __init__(self, pattern: str) -> None:
        unicode = expression(pattern)
        self.unicode = regex.compile(unicode)
        # On ASCII the standard library's expressions do the same, twice as fast.
        ascii_ = unicode.replace(r"\p{L}\p{N}]", r"A-Za-z\d]").replace(r"\p{L}", "[A-Za-z]").replace(r"\p{N}", r"\d")
        self.ascii = re.compile(ascii_.encode())

    def __call__(self, texts: list[bytes]) -> Iterable[tuple[bytes, int]]:
        """Return the words of texts with their counts."""
        words: Counter[bytes] = Counter()
        pieces: Counter[bytes] = Counter()
        for text in texts:
            first, *rest = SPACE.split(text)
            words.update(self.split(first))
            pieces.update(rest)
        equal: dict[tuple[int, bool], list[bytes]] = defaultdict(lambda: [b""])  # the pieces that occur as often
        for piece, number in pieces.items():
            equal[number, piece.isascii()].append(piece)
        for (number, _), some in equal.items():
            for word, times in Counter(self.split(b" ".join(some))).items():
                words[word] += number * times
        return words.items()

    def split(self, text: bytes) -> list[bytes]:
        """Split a text into words."""
        if text.isascii():
            return self.ascii.findall(text)
        return [word.encode() for word in self.unicode.findall(text.decode())]


def _fast(texts: list[bytes]) -> Iterable[tuple[bytes, int]]:
    separator = secrets.token_bytes(16).hex().encode()  # occurs in a text with probability 2^-128
    with suppress_stderr:
        return gigatoken.pretokenized_counts(separator.join(texts), separator)


def take_bytes(texts: Iterable[bytes], size: int) -> list[bytes]:
    r"""Return the first `size` bytes of texts, whole characters only.

    >>> take_bytes(["über".encode(), b"alles"], 5)
    [b'\xc3\xbcber']
    >>> take_bytes(["über".encode(), b"alles"], 1)
    []
    """
    taken = []
    for text in texts:
        if size <= 0:
            break
        taken.append(text[:size].decode(errors="ignore").encode())
        size -= len(text)
    return [text for text in taken if text]
