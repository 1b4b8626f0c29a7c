"""Items to ids: what each kind of data becomes, in parts that stand one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glasshouse.data.dataset_reader import DatasetReader
from glasshouse.errors import GlasshouseError, InputError
from glasshouse.text import Tokenizer
from glasshouse.text.corpus_encoder import CorpusEncoder, Ends
from glasshouse.text.sources import Chunk, Record

Encoded = tuple[NDArray[np.unsignedinteger[Any]], Ends]  # the ids of all parts, and where each part ends
LONGEST_RUN = 2**16 - 1  # what the smallest type of id can say


def start_id(tokenizer: Tokenizer) -> int | None:
    """Return the id that starts a text, by whatever role the tokenizer has for it."""
    first = tokenizer.special_id("bos")
    return tokenizer.special_id("cls") if first is None else first


def end_id(tokenizer: Tokenizer) -> int | None:
    """Return the id that ends a text, by whatever role the tokenizer has for it."""
    last = tokenizer.special_id("eos")
    return tokenizer.special_id("sep") if last is None else last


def make_encoder(
    feed: DatasetReader, tokenizer: Tokenizer, bulk: CorpusEncoder, dtype: type[np.unsignedinteger[Any]], inside: bool
) -> Callable[[list[Any]], Encoded]:
    """Return what encodes a batch of this feed; `inside` says that it begins in the middle of a text."""
    match feed.kind:
        case "text":
            return _Texts(tokenizer, bulk, dtype, inside)
        case "pairs":
            return lambda records: bulk.encode([_text(value, one, feed) for one in records for value in one.values])
        case "labelled":
            return _Labelled(bulk, feed)
        case "tagged":
            return _Tagged(tokenizer, bulk, feed)
        case "chat":
            return lambda records: _join(part for one in records for part in _conversation(one, tokenizer, feed))


class _Texts:
    """Encodes pieces of texts, with a token at the end of each text, and one at its start if that is another."""

    def __init__(
        self, tokenizer: Tokenizer, bulk: CorpusEncoder, dtype: type[np.unsignedinteger[Any]], inside: bool
    ) -> None:
        self.bulk, self.dtype, self.inside = bulk, dtype, inside
        start, end = start_id(tokenizer), end_id(tokenizer)
        if end is None:
            raise InputError("the tokenizer has no token that ends a text (eos or sep); choose one that has.")
        self.before = np.array([] if start in (None, end) else [start], np.uint32)
        self.after = np.array([end], np.uint32)

    def __call__(self, pieces: list[Chunk]) -> Encoded:
        ids, stops = self.bulk.encode([piece.text for piece in pieces])
        rows: list[Any] = []
        ends: list[int] = []
        length = 0
        for piece, (start, stop) in zip(pieces, pairwise([0, *stops.tolist()]), strict=True):
            if not self.inside:
                rows.append(self.before)
                length += len(self.before)
            rows.append(ids[start:stop])
            length += stop - start
            if piece.ends_document:
                rows.append(self.after)
                length += len(self.after)
                ends.append(length)
            self.inside = not piece.ends_document
        return np.concatenate(rows, dtype=self.dtype, casting="same_kind"), np.array(ends, np.int64)


class _Labelled:
    """Encodes texts, each followed by the number of its label as a part of its own."""

    def __init__(self, bulk: CorpusEncoder, feed: DatasetReader) -> None:
        self.bulk, self.feed = bulk, feed
        self.numbers = {label: number for number, label in enumerate(feed.labels)}

    def __call__(self, records: list[Record]) -> Encoded:
        ids, stops = self.bulk.encode([_text(one.values[0], one, self.feed) for one in records])
        texts = (ids[start:stop] for start, stop in pairwise([0, *stops.tolist()]))
        labels = ([self.numbers[str(one.values[1])]] for one in records)
        return _join(part for both in zip(texts, labels, strict=True) for part in both)


class _Tagged:
    """Encodes words one by one, and as a second part says at which ids which tag is asked for."""

    def __init__(self, tokenizer: Tokenizer, bulk: CorpusEncoder, feed: DatasetReader) -> None:
        self.bulk = bulk
        self.numbers = {tag: number for number, tag in enumerate(feed.labels, 1)}  # 0 is for what is not asked
        # A tokenizer that marks the start of a text as that of a word would take a space of ours for one more.
        apart = "a a" in tokenizer.decode(tokenizer.encode("a", add_special_tokens=False) * 2)
        self.between = "" if apart else " "

    def __call__(self, records: list[Record]) -> Encoded:
        words = [one.values[0] for one in records]
        pieces = [f"{self.between if at else ''}{word}".encode() for row in words for at, word in enumerate(row)]
        ids, stops = self.bulk.encode(pieces)
        starts = np.concatenate([[0], stops[:-1]])
        tags = np.zeros(len(ids), np.uint32)
        given = np.array([self.numbers[tag] for one in records for tag in one.values[1]], np.uint32)
        there = starts < stops  # what a tokenizer drops has no id to ask at
        tags[starts[there]] = given[there]
        ends = stops[np.cumsum([len(row) for row in words]) - 1].tolist()
        return _join(part[start:stop] for start, stop in pairwise([0, *ends]) for part in (ids, tags))


def _conversation(record: Record, tokenizer: Tokenizer, feed: DatasetReader) -> tuple[list[int], list[int]]:
    """Return the ids of a conversation, and how many are context, answer, context, answer and so on."""
    try:
        match record.values:
            case (messages,):
                ids, answer = tokenizer.encode_chat(messages)
            case (prompt, completion) if tokenizer.chat_template is not None:
                turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
                ids, answer = tokenizer.encode_chat(turns)
            case (prompt, completion):
                before, after = (
                    tokenizer.encode(_text(value, record, feed), False) for value in (prompt, completion)
                )
                end = end_id(tokenizer)
                after += [] if end is None else [end]
                ids, answer = before + after, [False] * len(before) + [True] * len(after)
        if not any(answer):
            raise InputError("it holds no answer of an assistant, so there is nothing to learn; leave it out.")
    except GlasshouseError as error:
        raise InputError(f"{_where(record, feed)}: {error}") from None
    return ids, _runs(answer)


def _runs(answer: list[bool]) -> list[int]:
    """Return the lengths of runs of False, True, False, True and so on.

    >>> _runs([True, True, False, True])
    [0, 2, 1, 1]
    """
    runs = [] if not answer or not answer[0] else [0]
    for _, run in groupby(answer):
        length = len(list(run))
        while length > LONGEST_RUN:
            runs += [LONGEST_RUN, 0]
            length -= LONGEST_RUN
        runs.append(length)
    return runs


def _join(parts: Iterable[Any]) -> Encoded:
    arrays = [np.asarray(part, np.uint32) for part in parts]
    return np.concatenate(arrays), np.cumsum([len(array) for array in arrays])


def _text(value: object, record: Record, feed: DatasetReader) -> bytes:
    if not isinstance(value, str):
        raise InputError(f"{_where(record, feed)} holds {value!r} where a text belongs; mend it.")
    return value.encode()


def _where(record: Record, feed: DatasetReader) -> str:
    return f"record {record.index + 1} of {feed.file_names[record.file_index]!r}"
