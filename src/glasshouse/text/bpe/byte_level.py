"""GPT-2's byte-to-unicode table: each of the 256 bytes as one printable character, as in a tokenizer.json."""

from __future__ import annotations

_PRINTED = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]  # bytes that map to themselves
_OTHERS = sorted({*range(256)}.difference(_PRINTED))  # the others map to U+0100 and up
BYTE_TO_UNICODE = {byte: chr(byte) for byte in _PRINTED} | {byte: chr(256 + n) for n, byte in enumerate(_OTHERS)}
UNICODE_TO_BYTE = {character: byte for byte, character in BYTE_TO_UNICODE.items()}

# Bytes ordered by character: the first 256 tokens of a vocabulary; the order also breaks ties between merges.
INITIAL_ALPHABET = tuple(byte for _, byte in sorted(UNICODE_TO_BYTE.items()))


def bytes_to_unicode(token: bytes) -> str:
    r"""Return a token's bytes in the tokenizer.json spelling.

    >>> bytes_to_unicode(b" caf\xc3\xa9")
    'ĠcafÃ©'
    """
    return "".join(BYTE_TO_UNICODE[byte] for byte in token)


def unicode_to_bytes(token: str) -> bytes:
    r"""Return the bytes of a token; one with characters outside the table is UTF-8, as in the tokenizers library.

    >>> unicode_to_bytes("ĠcafÃ©")
    b' caf\xc3\xa9'
    """
    return bytes(map(UNICODE_TO_BYTE.__getitem__, token)) if UNICODE_TO_BYTE.keys() >= set(token) else token.encode()
