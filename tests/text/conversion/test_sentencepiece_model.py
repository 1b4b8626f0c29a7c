"""The reader of SentencePiece's files: it reads what SentencePiece reads, and hostile files are a sentence."""

from __future__ import annotations

import random
import resource
import time
from contextlib import suppress
from pathlib import Path

import pytest
import sentencepiece
from examples import up_to
from hypothesis import given, settings
from hypothesis import strategies as st
from text.conversion.folders import GEMMA, LLAMA, T5, XLM_ROBERTA, sentencepiece_model

from glasshouse.errors import StoreError
from glasshouse.text.conversion import sentencepiece as conversion
from glasshouse.text.conversion import sentencepiece_model as reader
from glasshouse.text.conversion.sentencepiece_model import BPE, Piece, SentencePieceModel


@pytest.mark.parametrize("trained", [LLAMA, GEMMA, T5, XLM_ROBERTA], ids=["Llama", "Gemma", "T5", "XLM-RoBERTa"])
def test_pieces_are_those_that_sentencepiece_reads(trained: dict[str, object]) -> None:
    data = sentencepiece_model(**trained)
    ours, theirs = SentencePieceModel.parse(data, "a"), sentencepiece.SentencePieceProcessor(model_proto=data)
    ids = range(theirs.get_piece_size())
    assert [piece.text for piece in ours.pieces] == [theirs.id_to_piece(number) for number in ids]
    assert [piece.score for piece in ours.pieces] == [theirs.get_score(number) for number in ids]
    kinds = {reader.UNKNOWN: theirs.is_unknown, reader.CONTROL: theirs.is_control, reader.BYTE: theirs.is_byte}
    for kind, is_of_kind in kinds.items():
        assert [piece.kind == kind for piece in ours.pieces] == [is_of_kind(number) for number in ids]
    assert ours.model_type == (BPE if trained["model_type"] == "bpe" else reader.UNIGRAM)
    assert ours.add_dummy_prefix == trained.get("add_dummy_prefix", True)
    assert ours.remove_extra_whitespaces == trained.get("remove_extra_whitespaces", True)
    assert bool(ours.charsmap) == (trained.get("normalization_rule_name") != "identity")


def varint(number: int) -> bytes:
    """Seven bits a byte, the lowest first; the highest bit says that more follow."""
    low, rest = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + varint(rest) if rest else bytes([low])


def field(number: int, content: bytes | int) -> bytes:
    if isinstance(content, int):
        return varint(number << 3) + varint(content)
    return varint(number << 3 | 2) + varint(len(content)) + content


def piece(text: bytes, score: bytes = b"\0\0\0\0") -> bytes:
    return field(1, field(1, text) + b"\x15" + score)


A = piece(b"a")
HOSTILE = {
    "nothing": (b"", "it has no pieces"),
    "text": (b"a plain text", "it has a field of wire type 1|ends early|wire type"),
    "a length beyond the end": (b"\x0a\x7fa", "it ends early"),
    "a length of 2**62": (b"\x0a" + varint(2**62) + b"a", "it ends early"),
    "a length without its end": (b"\x0a\xff", "it ends early"),
    "a number without its end": (A + b"\x08\x80", "it ends early"),
    "a number of eleven bytes": (b"\x08" + b"\xff" * 10 + b"\x01", "more than 64 bits"),
    "a key of eleven bytes": (b"\xff" * 11, "more than 64 bits"),
    "half a score": (field(1, field(1, b"a") + b"\x15\0\0"), "it ends early"),
    "a group": (b"\x0b", "wire type 3"),
    "a wire type that is none": (b"\x0f", "wire type 7"),
    "not UTF-8": (piece(b"\xff\xfe"), r"piece b'\\xff\\xfe' is not UTF-8"),
    "half a character": (piece(b"\xed\xa0\x80"), "is not UTF-8"),
    "an empty piece": (piece(b""), "a piece has 0 characters, but 1 to 256"),
    "a piece of nothing": (field(1, b""), "a piece has 0 characters"),
    "a long piece": (piece(b"a" * 257), "a piece has 257 characters"),
    "twice the same": (A + A, "has the piece 'a' twice"),
    "a score of NaN": (piece(b"a", b"\0\0\xc0\x7f"), "piece 'a' has the score nan"),
    "an infinite score": (piece(b"a", b"\0\0\x80\x7f"), "piece 'a' has the score inf"),
    "a model_type of bytes": (A + field(2, field(3, b"a")), "its model_type is no number"),
    "a charsmap of a number": (A + field(3, field(2, 5)), "its charsmap is no bytes"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_one_sentence(name: str) -> None:
    data, reason = HOSTILE[name]
    with pytest.raises(StoreError, match=rf"^'a\.model' is not a SentencePiece model: .*({reason}).*; download it"):
        SentencePieceModel.parse(data, "a.model")


def test_spaces_after_words_are_refused_by_name() -> None:
    with pytest.raises(StoreError, match="marks a space after each word"):
        SentencePieceModel.parse(A + field(2, field(24, 1)), "a.model")


def test_what_a_file_does_not_say_is_as_sentencepiece_has_it() -> None:
    assert SentencePieceModel.parse(A, "a.model") == SentencePieceModel([Piece("a", 0.0, reader.NORMAL)])


def test_size_and_number_of_pieces_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.model"
    with path.open("wb") as file:
        file.truncate(reader.MAX_BYTES + 1)  # a hole, which takes no room on the disk
    with pytest.raises(StoreError, match=f"has {reader.MAX_BYTES + 1} bytes, but at most {reader.MAX_BYTES}"):
        SentencePieceModel.read(path)
    monkeypatch.setattr(reader, "MAX_PIECES", 2)
    with pytest.raises(StoreError, match="more than 2 pieces"):
        SentencePieceModel.parse(A + piece(b"b") + piece(b"c"), "a.model")
    monkeypatch.setattr(conversion, "MAX_MERGES", 2)
    pieces = [Piece("a" * length) for length in range(1, 9)]
    with pytest.raises(StoreError, match="leads to more than 2 merges"):
        conversion.merges(SentencePieceModel(pieces, BPE), path)


@pytest.mark.long
def test_the_largest_hostile_files_take_seconds_and_megabytes() -> None:
    """As many pieces, and as many splits into two pieces, as fit into the limits."""
    rng = random.Random(0)
    long_pieces = {bytes(rng.choices(b"ab", k=240)) for _ in range(reader.MAX_BYTES // 260)}
    pairs = {format(number, f"0{length}b").encode() for length in range(1, 18) for number in range(2**length)}
    small = [b"%05x" % number for number in range(reader.MAX_BYTES // 15)]
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    for texts in (long_pieces, pairs, small):
        data = b"".join(map(piece, texts))
        assert reader.MAX_BYTES * 0.7 < len(data) < reader.MAX_BYTES
        with suppress(StoreError):  # too many merges
            conversion.merges(SentencePieceModel.parse(data, "a.model"), Path("a.model"))
    assert time.monotonic() - start < 200  # some 20 s
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 3 * 2**20  # kB


@settings(max_examples=up_to(2000), deadline=None)
@given(st.data())
def test_a_damaged_file_is_read_or_refused(data: st.DataObject) -> None:
    original = sentencepiece_model(**LLAMA)
    damaged = bytearray(original[: data.draw(st.integers(0, len(original)))])
    for position, byte in data.draw(st.lists(st.tuples(st.integers(0, len(original)), st.integers(0, 255)))):
        if position < len(damaged):
            damaged[position] = byte
    with suppress(StoreError):
        assert SentencePieceModel.parse(bytes(damaged), "a.model").pieces
