"""What a model of text has to beat: two compressors, and counts of which byte follows which.

A model that needs more bits a byte than these has learned less than counting does.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Iterator
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from glasshouse.data import Corpus
from glasshouse.errors import ConfigError, InputError

Integers = NDArray[np.int64]

# A run of bytes is one number, its last byte the lowest digit: runs that differ in that byte alone are neighbours.
START = 256  # stands before the first byte of every text
BASE = 257
HIGHEST = 6  # the largest order whose runs are numbers of 64 bits: 257**7 < 2**63 < 257**8

ORDER = 5  # of the counts that models are set beside: about a word, and a few megabytes of text hold enough of them
IDS = 1 << 20  # turned into text at once

BLOCK = 1 << 22  # bytes counted at once
MOST = 1 << 24  # distinct runs a model may hold: 16 bytes each, for each order at most


def baseline_bits(corpus: Corpus, train: Corpus | None = None) -> dict[str, float]:
    """Return the bits a byte of running text by each baseline; counts are of `train`, and left out without it.

    >>> import tempfile, glasshouse as gh
    >>> from pathlib import Path
    >>> place = tempfile.mkdtemp()
    >>> _ = Path(f"{place}/roses.txt").write_text("a rose is " * 1000)
    >>> tok = gh.Tokenizer.train(texts=["a rose"], vocab_size=263)
    >>> corpus = gh.data.prepare(f"{place}/roses.txt", tok, f"{place}/corpus")
    >>> sorted(baseline_bits(corpus)), sorted(baseline_bits(corpus, train=corpus))
    (['gzip', 'xz'], ['byte 5-gram', 'gzip', 'xz'])
    """
    text = text_of(corpus)
    found = {"gzip": compressed_bits(text, by="gzip"), "xz": compressed_bits(text, by="xz")}
    if train is not None:
        model = ByteModel(ORDER)
        model.train([text_of(train)])
        found[f"byte {ORDER}-gram"] = model.bits(text)
    return found


def text_of(corpus: Corpus) -> bytes:
    """Return the bytes that running text is made of, one text after the other, without special tokens.

    >>> import tempfile, glasshouse as gh
    >>> from pathlib import Path
    >>> tok = gh.Tokenizer.train(texts=["to be"], vocab_size=263)
    >>> place = tempfile.mkdtemp()
    >>> _ = Path(f"{place}/hamlet.txt").write_text("to be or not to be")
    >>> text_of(gh.data.prepare(f"{place}/hamlet.txt", tok, f"{place}/corpus"))
    b'to be or not to be'
    """
    if corpus.kind != "text":
        raise InputError(f"the corpus is of kind {corpus.kind}, but bytes are counted in running text; give text.")
    tok = corpus.tokenizer
    if not tok.byte_level:  # what a token spells depends on those before it
        texts = (corpus.item(number)[0].tolist() for number in range(len(corpus)))
        return b"".join(tok.decode_bytes(one for one in ids if one not in tok.special_ids) for ids in texts)
    spelled = {number: b"" if number in tok.special_ids else tok.decode_bytes([number]) for number in tok.ids}
    blocks = (corpus.read(at, min(at + IDS, corpus.n_tokens)).tolist() for at in range(0, corpus.n_tokens, IDS))
    return b"".join(spelled[number] for ids in blocks for number in ids)


def compressed_bits(data: bytes, by: Literal["gzip", "xz"]) -> float:
    """Return the bits a byte of `gzip -9` or `xz -9 --extreme`, header and checksum included.

    One byte becomes 21 by gzip: 10 of header, 3 that hold it (3 bits to begin, 8 for the byte, 7 to end), 8 to check.

    >>> compressed_bits(b"a", by="gzip")
    168.0
    >>> compressed_bits(b"a rose is " * 1000, by="xz") < 0.2
    True
    """
    if not data:
        raise InputError("data is empty, and bits a byte need a byte; pass the text that is measured.")
    if by == "gzip":
        size = len(gzip.compress(data, compresslevel=9))
    elif by == "xz":
        import lzma  # some Pythons are built without it

        size = len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))
    else:
        raise InputError(f"by is {by!r}, but it must be 'gzip' or 'xz'.")
    return 8 * size / len(data)


class ByteModel:
    """Counts which byte follows the `order` bytes before it, and so how many bits other text would take.

    Every byte has a probability, by interpolated Witten-Bell smoothing: where `n` bytes followed a context, of
    `kinds` different values, p(byte) = (count + kinds * shorter) / (n + kinds), `shorter` being its probability after
    the context less its first byte. After a context never seen it is `shorter` itself, and below order 0 it is 1/256.
    The beginning of a text is a context too.

    Training on a, b: p(a) = (1 + 2/256) / (2 + 2).

    >>> model = ByteModel(order=0)
    >>> model.bits(b"abba")
    8.0
    >>> model.train([b"a", b"b"])
    >>> float(model.probabilities(after=b"")[ord("a")]) == (1 + 2/256) / (2 + 2)
    True
    >>> model.bits(b"abba") < 2
    True
    """

    def __init__(self, order: int) -> None:
        if not 0 <= order <= HIGHEST:
            raise ConfigError(f"order is {order}, but it must be a number of bytes from 0 to {HIGHEST}.")
        self.order = order
        self._runs = _none(), _none()  # those of order + 1 bytes in rising order, and how often each was read
        self._tables: list[tuple[Integers, Integers]] = []  # by order; made from the runs when first asked

    def train(self, texts: Iterable[bytes]) -> None:
        """Count the bytes of the texts, in addition to what was counted before.

        Memory grows with the distinct runs of order + 1 bytes, never with the length of the texts. Whatever is wrong
        with a text, the model stays as it was.
        """
        runs, counts = self._runs
        for block in _blocks(texts, self.order):
            found, often = _count(block, self.order)
            runs, counts = _add_up(np.concatenate([runs, found]), np.concatenate([counts, often]))
            if len(runs) > MOST:
                raise InputError(
                    f"the texts hold more than {MOST} different runs of {self.order + 1} bytes; "
                    "train on less text or take a lower order."
                )
        self._runs, self._tables = (runs, counts), []

    def bits(self, data: bytes) -> float:
        """Return the bits a byte of another text, from its beginning."""
        if isinstance(data, bytes) and not data:
            raise InputError("data is empty, and bits a byte need a byte; pass the text that is measured.")
        total = 0.0
        for block in _blocks([data], self.order):
            runs, counts = _count(block, self.order)
            total -= float(counts @ np.log2(self._look_up(runs)))
        return total / len(data)

    def probabilities(self, after: bytes) -> NDArray[np.float64]:
        """Return the probability of each of the 256 bytes as the next of a text that begins with `after`."""
        context = 0
        for symbol in [*[START] * self.order, *after][len(after) :]:
            context = context * BASE + symbol
        return self._look_up(context * BASE + np.arange(256))

    def _look_up(self, runs: Integers) -> NDArray[np.float64]:
        """Return the probability of the last byte of each run after those before it."""
        if not self._tables:
            self._tables = _every_order(*self._runs, self.order)
        chance = np.full(len(runs), 1 / 256)
        for order, (known, before) in enumerate(self._tables):
            run = runs % BASE ** (order + 1)
            context = run - run % BASE
            first, last = np.searchsorted(known, context), np.searchsorted(known, context + BASE)
            kinds, n = last - first, before[last] - before[first]
            count = before[np.searchsorted(known, run, side="right")] - before[np.searchsorted(known, run)]
            np.divide(count + kinds * chance, n + kinds, out=chance, where=kinds > 0)
        return chance


def _none() -> Integers:
    return np.zeros(0, np.int64)


def _blocks(texts: Iterable[bytes], order: int) -> Iterator[NDArray[np.uint16]]:
    """Yield the texts with their beginnings marked, in blocks that each repeat the last `order` of the one before."""
    if isinstance(texts, (bytes, str)):
        raise InputError(f"texts is one {type(texts).__name__}, but it must be several texts; pass [text].")
    begin = np.full(order, START, np.uint16)
    held, size = [], 0
    for text in texts:
        if not isinstance(text, bytes):
            raise InputError(
                f"a text is of type {type(text).__name__}, but it must be bytes; text.encode() gives them."
            )
        held.append(begin)
        for at in range(0, len(text), BLOCK):
            held.append(np.frombuffer(text[at : at + BLOCK], np.uint8).astype(np.uint16))
            size += order + len(held[-1])
            if size >= BLOCK:
                block = np.concatenate(held)
                yield block
                held, size = [block[len(block) - order :]], 0
    if size:
        yield np.concatenate(held)


def _count(block: NDArray[np.uint16], order: int) -> tuple[Integers, Integers]:
    """Return the distinct runs of order + 1 bytes in rising order, and how often each occurs."""
    ends = block[order:]
    runs = np.zeros(len(ends), np.int64)
    for i in range(order + 1):
        runs = runs * BASE + block[i : i + len(ends)]
    return np.unique(runs[ends != START], return_counts=True)


def _add_up(runs: Integers, counts: Integers) -> tuple[Integers, Integers]:
    """Return each run once, in rising order, with all of its counts."""
    rising = np.argsort(runs, kind="stable")  # which takes two sorted halves in one pass
    runs = runs[rising]
    first = np.flatnonzero(np.diff(runs, prepend=-1))
    return runs[first], np.add.reduceat(counts[rising], first)


def _every_order(runs: Integers, counts: Integers, order: int) -> list[tuple[Integers, Integers]]:
    """Return for orders from 0 up the distinct runs, and how much was counted before each and after the last."""
    tables = []
    for n in range(order, -1, -1):
        runs, counts = _add_up(runs % BASE ** (n + 1), counts)
        tables.append((runs, np.concatenate([[0], np.cumsum(counts)])))
    return tables[::-1]
