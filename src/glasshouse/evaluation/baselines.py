"""Baselines for language models in bits per byte: two compressors and a byte n-gram model.

A model that needs more bits per byte than these has learned less than counting does.
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

# An n-gram is one integer with its last byte as the lowest digit: n-grams that differ only in that byte are adjacent.
START = 256  # symbol before the first byte of every text
BASE = 257
HIGHEST = 6  # the largest order whose n-grams fit in 64 bits: 257**7 < 2**63 < 257**8

ORDER = 5  # of the n-gram baseline: about a word, and a few megabytes of text suffice
IDS = 1 << 20  # decoded at once

BLOCK = 1 << 22  # bytes counted at once
MOST = 1 << 24  # distinct n-grams of a model: 16 bytes each, for each order at most


def baseline_bits(corpus: Corpus, train: Corpus | None = None) -> dict[str, float]:
    """Return the bits per byte of running text by each baseline; n-grams are counted in `train`, if given.

    >>> import tempfile, glasshouse as gh
    >>> from pathlib import Path
    >>> folder = tempfile.mkdtemp()
    >>> _ = Path(f"{folder}/roses.txt").write_text("a rose is " * 1000)
    >>> tok = gh.Tokenizer.train(texts=["a rose"], vocab_size=263)
    >>> corpus = gh.data.prepare(f"{folder}/roses.txt", tok, f"{folder}/corpus")
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
    """Return the bytes of running text, concatenated, without special tokens.

    >>> import tempfile, glasshouse as gh
    >>> from pathlib import Path
    >>> tok = gh.Tokenizer.train(texts=["to be"], vocab_size=263)
    >>> folder = tempfile.mkdtemp()
    >>> _ = Path(f"{folder}/hamlet.txt").write_text("to be or not to be")
    >>> text_of(gh.data.prepare(f"{folder}/hamlet.txt", tok, f"{folder}/corpus"))
    b'to be or not to be'
    """
    if corpus.kind != "text":
        raise InputError(f"the corpus is of kind {corpus.kind}, but the baselines need running text; give text.")
    tok = corpus.tokenizer
    if not tok.byte_level:  # the bytes of a token depend on those before it
        texts = (corpus.item(number)[0].tolist() for number in range(len(corpus)))
        return b"".join(tok.decode_bytes(one for one in ids if one not in tok.special_ids) for ids in texts)
    token_bytes = {number: b"" if number in tok.special_ids else tok.decode_bytes([number]) for number in tok.ids}
    blocks = (corpus.read(at, min(at + IDS, corpus.n_tokens)).tolist() for at in range(0, corpus.n_tokens, IDS))
    return b"".join(token_bytes[number] for ids in blocks for number in ids)


def compressed_bits(data: bytes, by: Literal["gzip", "xz"]) -> float:
    """Return the bits per byte of `gzip -9` or `xz -9 --extreme`, header and checksum included.

    gzip turns one byte into 21: 10 of header, 3 of data (3 bits to start, 8 for the byte, 7 to end), 8 of trailer.

    >>> compressed_bits(b"a", by="gzip")
    168.0
    >>> compressed_bits(b"a rose is " * 1000, by="xz") < 0.2
    True
    """
    if not data:
        raise InputError("data is empty, and bits per byte need at least one byte; pass the text to measure.")
    if by == "gzip":
        size = len(gzip.compress(data, compresslevel=9))
    elif by == "xz":
        import lzma  # some Pythons are built without it

        size = len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))
    else:
        raise InputError(f"by is {by!r}, but it must be 'gzip' or 'xz'.")
    return 8 * size / len(data)


class ByteModel:
    """A byte n-gram model: predicts each byte from the `order` bytes before it.

    Interpolated Witten-Bell smoothing: if `n` bytes of `kinds` distinct values followed a context, then
    p(byte) = (count + kinds * shorter) / (n + kinds), where `shorter` is its probability after the context without
    its first byte. After an unseen context it is `shorter`, and below order 0 it is 1/256. The start of a text is a
    context too.

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
        self._ngrams = _empty(), _empty()  # n-grams of order + 1 bytes, sorted, and their counts
        self._tables: list[tuple[Integers, Integers]] = []  # by order; built from the n-grams on first use

    def train(self, texts: Iterable[bytes]) -> None:
        """Add the n-grams of the texts to the counts.

        Memory grows with the number of distinct n-grams, not with the length of the texts. On an error the model is
        unchanged.
        """
        runs, counts = self._ngrams
        for block in _blocks(texts, self.order):
            found, often = _count(block, self.order)
            runs, counts = _add_up(np.concatenate([runs, found]), np.concatenate([counts, often]))
            if len(runs) > MOST:
                raise InputError(
                    f"the texts have more than {MOST} distinct runs of {self.order + 1} bytes; "
                    "train on less text or use a lower order."
                )
        self._ngrams, self._tables = (runs, counts), []

    def bits(self, data: bytes) -> float:
        """Return the bits per byte of a text."""
        if isinstance(data, bytes) and not data:
            raise InputError("data is empty, and bits per byte need at least one byte; pass the text to measure.")
        total = 0.0
        for block in _blocks([data], self.order):
            runs, counts = _count(block, self.order)
            total -= float(counts @ np.log2(self._look_up(runs)))
        return total / len(data)

    def probabilities(self, after: bytes) -> NDArray[np.float64]:
        """Return the probability of each of the 256 bytes after the start `after` of a text."""
        context = 0
        for symbol in [*[START] * self.order, *after][len(after) :]:
            context = context * BASE + symbol
        return self._look_up(context * BASE + np.arange(256))

    def _look_up(self, runs: Integers) -> NDArray[np.float64]:
        """Return the probability of the last byte of each n-gram given the bytes before it."""
        if not self._tables:
            self._tables = _every_order(*self._ngrams, self.order)
        probability = np.full(len(runs), 1 / 256)
        for order, (known, before) in enumerate(self._tables):
            run = runs % BASE ** (order + 1)
            context = run - run % BASE
            first, last = np.searchsorted(known, context), np.searchsorted(known, context + BASE)
            kinds, n = last - first, before[last] - before[first]
            count = before[np.searchsorted(known, run, side="right")] - before[np.searchsorted(known, run)]
            np.divide(count + kinds * probability, n + kinds, out=probability, where=kinds > 0)
        return probability


def _empty() -> Integers:
    return np.zeros(0, np.int64)


def _blocks(texts: Iterable[bytes], order: int) -> Iterator[NDArray[np.uint16]]:
    """Yield the texts, each after start symbols, in blocks that overlap by `order` symbols."""
    if isinstance(texts, (bytes, str)):
        raise InputError(f"texts is one {type(texts).__name__}, but it must be a list of texts; pass [text].")
    start = np.full(order, START, np.uint16)
    chunks, size = [], 0
    for text in texts:
        if not isinstance(text, bytes):
            raise InputError(f"a text is of type {type(text).__name__}, but it must be bytes; call text.encode().")
        chunks.append(start)
        for at in range(0, len(text), BLOCK):
            chunks.append(np.frombuffer(text[at : at + BLOCK], np.uint8).astype(np.uint16))
            size += order + len(chunks[-1])
            if size >= BLOCK:
                block = np.concatenate(chunks)
                yield block
                chunks, size = [block[len(block) - order :]], 0
    if size:
        yield np.concatenate(chunks)


def _count(block: NDArray[np.uint16], order: int) -> tuple[Integers, Integers]:
    """Return the distinct n-grams of order + 1 bytes, sorted, and their counts."""
    ends = block[order:]
    runs = np.zeros(len(ends), np.int64)
    for i in range(order + 1):
        runs = runs * BASE + block[i : i + len(ends)]
    return np.unique(runs[ends != START], return_counts=True)


def _add_up(runs: Integers, counts: Integers) -> tuple[Integers, Integers]:
    """Return the distinct n-grams, sorted, with the sums of their counts."""
    order = np.argsort(runs, kind="stable")  # merges two sorted halves in one pass
    runs = runs[order]
    first = np.flatnonzero(np.diff(runs, prepend=-1))
    return runs[first], np.add.reduceat(counts[order], first)


def _every_order(runs: Integers, counts: Integers, order: int) -> list[tuple[Integers, Integers]]:
    """Return for each order from 0 the distinct n-grams and the cumulative counts before each and after the last."""
    tables = []
    for n in range(order, -1, -1):
        runs, counts = _add_up(runs % BASE ** (n + 1), counts)
        tables.append((runs, np.concatenate([[0], np.cumsum(counts)])))
    return tables[::-1]
