"""Encodes the items of each kind of data as concatenated arrays of ids."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glasshouse.data.dataset_reader import DatasetReader
from glasshouse.errors import GlasshouseError, InputError
from glasshouse.spec import Spec
from glasshouse.text import Tokenizer
from glasshouse.text.corpus_encoder import CorpusEncoder, Ends
from glasshouse.text.sources import Chunk, Record

Encoded = tuple[NDArray[np.unsignedinteger[Any]], Ends]  # concatenated ids, and the end offset of each array
LONGEST_RUN = 2**16 - 1  # the largest value of the smallest id type


def start_id(tokenizer: Tokenizer) -> int | None:
    """Return the id that starts a text: bos, else cls."""
    first = tokenizer.special_id("bos")
    return tokenizer.special_id("cls") if first is None else first


def end_id(tokenizer: Tokenizer) -> int | None:
    """Return the id that ends a text: eos, else sep."""
    last = tokenizer.special_id("eos")
    return tokenizer.special_id("sep") if last is None else last


def classifier_ends(s: Spec, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the ids before and after a text that a model classifies.

    They are a start and an end token. A decoder that reads the last token gets the text as the tokenizer encodes it,
    with no other tokens, as transformers gives it.

    >>> import glasshouse as gh
    >>> tok = Tokenizer.train(texts=["to be"], vocab_size=263)
    >>> head = {"kind": "sequence_classification", "n_labels": 2}
    >>> classifier_ends(gh.preset("tiny-encoder", head=head), tok) == ([tok.special_id("eos")],) * 2
    True
    >>> classifier_ends(gh.preset("tiny-decoder", head={**head, "pooling": "last"}), tok)
    ([], [])
    """
    if s.kind == "decoder" and getattr(s.head, "pooling", None) == "last":
        return tokenizer.prefix_suffix_ids
    start, end = start_id(tokenizer), end_id(tokenizer)
    if end is None:
        raise InputError("the tokenizer has no end token (eos or sep), which ends a text; choose one that has.")
    return [end if start is None else start], [end]


def make_encoder(
    reader: DatasetReader,
    tokenizer: Tokenizer,
    encoder: CorpusEncoder,
    dtype: type[np.unsignedinteger[Any]],
    mid_document: bool,
) -> Callable[[list[Any]], Encoded]:
    """Return the function that encodes a batch of this reader; `mid_document`: it resumes within a document."""
    match reader.kind:
        case "text":
            return _Texts(tokenizer, encoder, dtype, mid_document)
        case "pairs":
            return lambda records: encoder.encode(
                [_text(value, one, reader) for one in records for value in one.values]
            )
        case "labelled":
            return _Labelled(encoder, reader)
        case "tagged":
            return _Tagged(tokenizer, encoder, reader)
        case "chat":
            return lambda records: _join(part for one in records for part in _conversation(one, tokenizer, reader))
        case "preferences":
            return lambda records: _join(part for one in records for part in _preference(one, tokenizer, reader))


class _Texts:
    """Encodes chunks of text, with an end token after each document, and a start token before if it differs."""

    def __init__(
        self, tokenizer: Tokenizer, encoder: CorpusEncoder, dtype: type[np.unsignedinteger[Any]], mid_document: bool
    ) -> None:
        self.encoder, self.dtype, self.mid_document = encoder, dtype, mid_document
        start, end = start_id(tokenizer), end_id(tokenizer)
        if end is None:
            raise InputError("the tokenizer has no end token (eos or sep); choose one that has.")
        self.before = np.array([] if start in (None, end) else [start], np.uint32)
        self.after = np.array([end], np.uint32)

    def __call__(self, chunks: list[Chunk]) -> Encoded:
        ids, stops = self.encoder.encode([chunk.text for chunk in chunks])
        arrays: list[Any] = []
        ends: list[int] = []
        length = 0
        for chunk, (start, stop) in zip(chunks, pairwise([0, *stops.tolist()]), strict=True):
            if not self.mid_document:
                arrays.append(self.before)
                length += len(self.before)
            arrays.append(ids[start:stop])
            length += stop - start
            if chunk.ends_document:
                arrays.append(self.after)
                length += len(self.after)
                ends.append(length)
            self.mid_document = not chunk.ends_document
        return np.concatenate(arrays, dtype=self.dtype, casting="same_kind"), np.array(ends, np.int64)


class _Labelled:
    """Encodes texts, each followed by an array with its label id."""

    def __init__(self, encoder: CorpusEncoder, reader: DatasetReader) -> None:
        self.encoder, self.reader = encoder, reader
        self.numbers = {label: number for number, label in enumerate(reader.labels)}

    def __call__(self, records: list[Record]) -> Encoded:
        ids, stops = self.encoder.encode([_text(one.values[0], one, self.reader) for one in records])
        texts = (ids[start:stop] for start, stop in pairwise([0, *stops.tolist()]))
        labels = ([self.numbers[str(one.values[1])]] for one in records)
        return _join(part for both in zip(texts, labels, strict=True) for part in both)


class _Tagged:
    """Encodes words one by one, followed by an array with the tag of each id."""

    def __init__(self, tokenizer: Tokenizer, encoder: CorpusEncoder, reader: DatasetReader) -> None:
        self.encoder = encoder
        self.numbers = {tag: number for number, tag in enumerate(reader.labels, 1)}  # 0: no tag
        # A tokenizer that marks the start of a text as the start of a word needs no space between words.
        separates = "a a" in tokenizer.decode(tokenizer.encode("a", add_special_tokens=False) * 2)
        self.between = "" if separates else " "

    def __call__(self, records: list[Record]) -> Encoded:
        words = [one.values[0] for one in records]
        texts = [f"{self.between if at else ''}{word}".encode() for row in words for at, word in enumerate(row)]
        ids, stops = self.encoder.encode(texts)
        starts = np.concatenate([[0], stops[:-1]])
        tags = np.zeros(len(ids), np.uint32)
        given = np.array([self.numbers[tag] for one in records for tag in one.values[1]], np.uint32)
        nonempty = starts < stops  # a word that the tokenizer drops has no id to tag
        tags[starts[nonempty]] = given[nonempty]
        ends = stops[np.cumsum([len(row) for row in words]) - 1].tolist()
        return _join(part[start:stop] for start, stop in pairwise([0, *ends]) for part in (ids, tags))


def _conversation(record: Record, tokenizer: Tokenizer, reader: DatasetReader) -> tuple[list[int], list[int]]:
    """Return the ids of a conversation, and the lengths of its alternating context and assistant runs."""
    try:
        match record.values:
            case (messages,):
                ids, assistant_mask = tokenizer.encode_chat(messages)
            case (prompt, completion):
                ids, assistant_mask = _answered(prompt, completion, tokenizer)
        if not any(assistant_mask):
            raise InputError("it has no assistant message to train on; remove it.")
    except GlasshouseError as error:
        raise InputError(f"{_where(record, reader)}: {error}") from None
    return ids, _runs(assistant_mask)


def _answered(prompt: object, answer: object, tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """Return the ids of a prompt and its answer, texts or messages, and which of them are the assistant's.

    Without a chat template two texts follow each other, and an end token them; an answer of several messages is the
    whole conversation.
    """
    if tokenizer.chat_template is None and isinstance(prompt, str) and isinstance(answer, str):
        before, after = (tokenizer.encode(text, add_special_tokens=False) for text in (prompt, answer))
        end = end_id(tokenizer)
        after += [] if end is None else [end]
        return before + after, [False] * len(before) + [True] * len(after)
    if isinstance(answer, list) and len(answer) > 1:
        return tokenizer.encode_chat(answer)
    before_it = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    turns = answer if isinstance(answer, list) else [{"role": "assistant", "content": answer}]
    return tokenizer.encode_chat([*before_it, *turns])


def _preference(record: Record, tokenizer: Tokenizer, reader: DatasetReader) -> list[list[int]]:
    """Return the ids of a prompt, of the answer that is preferred and of the one that is not."""
    prompt, *answers = record.values
    try:
        sides = []
        for name, answer in zip(("chosen", "rejected"), answers, strict=True):
            if answer is None or not str(_content(answer)).strip():
                raise InputError(f"its {name} answer is empty; write one, or remove the record.")
            sides.append(_split_answer(*_answered(prompt, answer, tokenizer)))
        (before, chosen), (other, rejected) = sides
        if before != other:
            raise InputError("its chosen and rejected answers have different prompts; give both the same.")
        if chosen == rejected:
            raise InputError("its chosen and rejected answers are the same; remove the record.")
    except GlasshouseError as error:
        raise InputError(f"{_where(record, reader)}: {error}") from None
    return [before, chosen, rejected]


def _content(answer: object) -> object:
    """Return the text of an answer, or that of its last message."""
    match answer:
        case [*_, {"content": content}]:
            return content
        case []:
            return ""
    return answer


def _split_answer(ids: list[int], assistant_mask: list[bool]) -> tuple[list[int], list[int]]:
    """Return what is before the last answer of a conversation, and that answer.

    >>> _split_answer([5, 6, 7, 8, 9, 4], [False, True, False, True, True, False])
    ([5, 6, 7], [8, 9])
    """
    stop = len(assistant_mask)
    while stop and not assistant_mask[stop - 1]:
        stop -= 1
    start = stop
    while start and assistant_mask[start - 1]:
        start -= 1
    if start == stop:
        raise InputError("it has no assistant message to train on; remove it.")
    if start == 0:
        raise InputError("its prompt is empty; write one, or remove the record.")
    return ids[:start], ids[start:stop]


def _runs(mask: list[bool]) -> list[int]:
    """Return the lengths of runs of False, True, False, True and so on.

    >>> _runs([True, True, False, True])
    [0, 2, 1, 1]
    """
    runs = [] if not mask or not mask[0] else [0]
    for _, run in groupby(mask):
        length = len(list(run))
        while length > LONGEST_RUN:
            runs += [LONGEST_RUN, 0]
            length -= LONGEST_RUN
        runs.append(length)
    return runs


def _join(values: Iterable[Any]) -> Encoded:
    arrays = [np.asarray(value, np.uint32) for value in values]
    return np.concatenate(arrays), np.cumsum([len(array) for array in arrays])


def _text(value: object, record: Record, reader: DatasetReader) -> bytes:
    if not isinstance(value, str):
        raise InputError(f"{_where(record, reader)} has {value!r}, but it must be a string; fix it.")
    return value.encode()


def _where(record: Record, reader: DatasetReader) -> str:
    return f"record {record.index + 1} of {reader.file_names[record.file_index]!r}"
