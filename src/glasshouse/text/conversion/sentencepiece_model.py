"""Reads a SentencePiece model file, a protocol buffer: the few fields that determine ids.

The file is untrusted: each length is checked against what is left, and number and size of pieces are bounded.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn

from glasshouse.errors import StoreError
from glasshouse.text.tokenizer_folder import read_bytes
from glasshouse.text.untrusted.expansion import MAX_PIECE_CHARS

MAX_BYTES = 8 * 2**20  # XLM-RoBERTa's has 5 MB
MAX_PIECES = 2**20  # Gemma 3 has 262,144
UNIGRAM, BPE = 1, 2  # of trainer_spec.model_type; words and single characters are the others
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # of SentencePiece.type
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types

# Numbers of fields, from sentencepiece_model.proto.
PIECES, TRAINER, NORMALIZER = 1, 2, 3
PIECE_TEXT, PIECE_SCORE, PIECE_TYPE = 1, 2, 3
MODEL_TYPE, WHITESPACE_SUFFIX = 3, 24
CHARSMAP, DUMMY_PREFIX, EXTRA_WHITESPACES = 2, 3, 4

Field = tuple[int, int | bytes]


class Piece(NamedTuple):
    """An entry of the vocabulary; its id is its place."""

    text: str
    score: float = 0.0
    kind: int = NORMAL


@dataclass(frozen=True)
class SentencePieceModel:
    """The vocabulary of a SentencePiece model, and how it prepares a text."""

    pieces: list[Piece]
    model_type: int = UNIGRAM
    charsmap: bytes = b""  # the compiled rules of normalization
    add_dummy_prefix: bool = True  # a space before every text
    remove_extra_whitespaces: bool = True

    @classmethod
    def read(cls, path: Path) -> SentencePieceModel:
        """Read a model file."""
        return cls.parse(read_bytes(path, MAX_BYTES), str(path))

    @classmethod
    def parse(cls, data: bytes, source: str) -> SentencePieceModel:
        r"""Parse the bytes of a model file; `source` is named in errors.

        >>> SentencePieceModel.parse(b"\x0a\x08\x0a\x01a\x15\x00\x00\x80\xbf", "a.model").pieces
        [Piece(text='a', score=-1.0, kind=1)]
        >>> SentencePieceModel.parse(b"\x0a\x09a", "a.model")
        Traceback (most recent call last):
        ...
        glasshouse.errors.StoreError: 'a.model' is not a SentencePiece model: it ends early; download it again.
        """
        pieces: list[Piece] = []
        trainer: dict[int, int | bytes] = {}
        normalizer: dict[int, int | bytes] = {}
        for number, value in _fields(data, source):
            if not isinstance(value, bytes):
                continue
            if number == PIECES:
                if len(pieces) == MAX_PIECES:
                    raise StoreError(f"{source!r} has more than {MAX_PIECES} pieces; find another.")
                pieces.append(_piece(value, source))
            elif number == TRAINER:
                trainer |= dict(_fields(value, source))
            elif number == NORMALIZER:
                normalizer |= dict(_fields(value, source))
        _check_pieces(pieces, source)
        if trainer.get(WHITESPACE_SUFFIX):
            raise StoreError(f"{source!r} marks a space after each word, which is not supported; find another.")
        model_type, charsmap = trainer.get(MODEL_TYPE, UNIGRAM), normalizer.get(CHARSMAP, b"")
        return cls(
            pieces,
            model_type if isinstance(model_type, int) else _refuse(source, "its model_type is no number"),
            charsmap if isinstance(charsmap, bytes) else _refuse(source, "its charsmap is no bytes"),
            bool(normalizer.get(DUMMY_PREFIX, True)),
            bool(normalizer.get(EXTRA_WHITESPACES, True)),
        )


def _piece(message: bytes, source: str) -> Piece:
    text, score, kind = "", 0.0, NORMAL
    for number, value in _fields(message, source):
        if number == PIECE_TEXT and isinstance(value, bytes):
            try:
                text = value.decode()
            except UnicodeDecodeError:
                _refuse(source, f"its piece {value[:20]!r} is not UTF-8")
        elif number == PIECE_SCORE and isinstance(value, bytes) and len(value) == 4:
            (score,) = struct.unpack("<f", value)
        elif number == PIECE_TYPE and isinstance(value, int):
            kind = value
    if not math.isfinite(score):
        _refuse(source, f"its piece {text[:20]!r} has the score {score}")
    if not 0 < len(text) <= MAX_PIECE_CHARS:
        _refuse(source, f"a piece has {len(text)} characters, but 1 to {MAX_PIECE_CHARS} are allowed")
    return Piece(text, score, kind)


def _check_pieces(pieces: list[Piece], source: str) -> None:
    if not pieces:
        _refuse(source, "it has no pieces")
    seen: set[str] = set()
    for piece in pieces:
        if piece.text in seen:
            _refuse(source, f"it has the piece {piece.text!r} twice")
        seen.add(piece.text)


def _fields(message: bytes, source: str) -> Iterator[Field]:
    """Yield the number and the value of each field: an integer, or bytes of fixed or given length."""
    position, end = 0, len(message)
    while position < end:
        key = message[position]
        position += 1
        if key >= 0x80:
            key, position = _varint(message, position - 1, source)
        number, wire_type = key >> 3, key & 7
        if wire_type == VARINT:
            value, position = _varint(message, position, source)
            yield number, value
            continue
        if wire_type == BYTES:
            if position < end and message[position] < 0x80:  # nearly all lengths, and this loop takes seconds
                length, position = message[position], position + 1
            else:
                length, position = _varint(message, position, source)
        elif wire_type in (FIXED32, FIXED64):
            length = 4 if wire_type == FIXED32 else 8
        else:
            _refuse(source, f"it has a field of wire type {wire_type}")
        if length > end - position:
            _refuse(source, "it ends early")
        yield number, message[position : position + length]
        position += length


def _varint(message: bytes, position: int, source: str) -> tuple[int, int]:
    """Return an integer, seven bits a byte, and the position after it."""
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(message):
            _refuse(source, "it ends early")
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    return _refuse(source, "it has a number of more than 64 bits")


def _refuse(source: str, reason: str) -> NoReturn:
    raise StoreError(f"{source!r} is not a SentencePiece model: {reason}; download it again.")
