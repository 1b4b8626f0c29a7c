"""GPT-2's alphabet: each of the 256 bytes as one printable character, as a tokenizer.json writes tokens."""

from __future__ import annotations

_PRINTED = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]  # these bytes stand for themselves
_OTHERS = sorted({*range(256)}.difference(_PRINTED))  # the others are the characters from 256 on
CHARACTER = {byte: chr(byte) for byte in _PRINTED} | {byte: chr(256 + n) for n, byte in enumerate(_OTHERS)}
BYTE = {character: byte for byte, character in CHARACTER.items()}

# The bytes in the order of their characters: the first 256 tokens of a vocabulary, and what decides a tie.
ORDER = tuple(byte for _, byte in sorted(BYTE.items()))


def written(token: bytes) -> str:
    r"""Return a token's bytes as a tokenizer.json writes them.

    >>> written(b" caf\xc3\xa9")
    'ĠcafÃ©'
    """
    return "".join(CHARACTER[byte] for byte in token)


def spelled(token: str) -> bytes:
    r"""Return the bytes of a token; what is not in the alphabet stands for itself, as in the tokenizers library.

    >>> spelled("ĠcafÃ©")
    b' caf\xc3\xa9'
    """
    return bytes(map(BYTE.__getitem__, token)) if BYTE.keys() >= set(token) else token.encode()
