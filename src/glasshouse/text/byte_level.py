"""GPT-2's alphabet: each of the 256 bytes as one printable character, as a tokenizer.json writes tokens."""

from __future__ import annotations

_PRINTED = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]  # these bytes stand for themselves
_OTHERS = sorted({*range(256)}.difference(_PRINTED))  # the others are the characters from 256 on
BYTE_TO_UNICODE = {byte: chr(byte) for byte in _PRINTED} | {byte: chr(256 + n) for n, byte in enumerate(_OTHERS)}
UNICODE_TO_BYTE = {character: byte for byte, character in BYTE_TO_UNICODE.items()}

# The bytes in the order of their characters: the first 256 tokens of a vocabulary, and what decides a tie.
INITIAL_ALPHABET = tuple(byte for _, byte in sorted(UNICODE_TO_BYTE.items()))


def bytes_to_unicode(token: bytes) -> str:
    r"""Return a token's bytes as a tokenizer.json writes them.

    >>> written(b" caf\xc3\xa9")
    'ĠcafÃ©'
    """
    return "".join(BYTE_TO_UNICODE[byte] for byte in token)


def unicode_to_bytes(token: str) -> bytes:
    r"""Return the bytes of a token; what is not in the alphabet stands for itself, as in the tokenizers library.

    >>> spelled("ĠcafÃ©")
    b' caf\xc3\xa9'
    """
    return bytes(map(UNICODE_TO_BYTE.__getitem__, token)) if UNICODE_TO_BYTE.keys() >= set(token) else token.encode()
