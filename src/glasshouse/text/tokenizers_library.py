"""Wrappers of the tokenizers library: our errors, truncation that keeps special tokens, bytes that are not UTF-8."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import tokenizers

from glasshouse.errors import GlasshouseError
from glasshouse.text.tokenizer_json import BYTE_FALLBACK
from glasshouse.text.utf8 import split_invalid_utf8

_MARK = 0x10FF00  # the last private-use characters stand for bytes while a text is decoded


@contextmanager
def library_errors(kind: type[GlasshouseError], problem: str) -> Iterator[None]:
    """Convert exceptions of the tokenizers library into one of ours."""
    try:
        yield
    except BaseException as error:
        # A panic in Rust is not an Exception; neither is KeyboardInterrupt, which must propagate.
        if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
            raise
        raise kind(f"{problem}: {' '.join(str(error).split())}.") from None


def truncate(encoding: tokenizers.Encoding, max_len: int) -> list[int]:
    """Return the first ids of a text, with all special tokens around it."""
    limit = max_len - sum(encoding.special_tokens_mask)
    content = iter(range(len(encoding)))
    return [
        number
        for number, special in zip(encoding.ids, encoding.special_tokens_mask, strict=True)
        if special or next(content) < limit
    ]


def encode_invalid_utf8(encoder: tokenizers.Tokenizer, text: bytes, byte_ids: Sequence[int]) -> list[int]:
    """Encode a text with invalid bytes: each as its own token, the parts between them as text."""
    parts = split_invalid_utf8(text)
    between = list(dict.fromkeys(parts[::2]))
    encodings = encoder.encode_batch(between, add_special_tokens=False)
    ids = {part: one.ids for part, one in zip(between, encodings, strict=True)}
    ids |= {chr(0xDC00 + byte): [byte_ids[byte]] for byte in range(0x80, 0x100)}
    return [number for part in parts for number in ids[part]]


def decode_byte_fallback(decoder: tokenizers.decoders.Decoder, tokens: Iterable[str]) -> bytes:
    """Decode tokens with byte fallback to bytes, which the library would replace where they are not valid UTF-8."""
    text = decoder.decode([_marked(token) for token in tokens])
    return b"".join(bytes([ord(c) - _MARK]) if ord(c) >= _MARK else c.encode() for c in text)


def _marked(token: str) -> str:
    byte = BYTE_FALLBACK.fullmatch(token)
    return chr(_MARK + int(byte[1], 16)) if byte else token
