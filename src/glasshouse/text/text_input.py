"""What a caller gives as text: a string, or bytes, which need not be UTF-8."""

from __future__ import annotations

import re
from typing import TypeGuard

from glasshouse.errors import InputError

_STRAY = re.compile("([\udc80-\udcff])")  # a byte that is no UTF-8, as Python's surrogateescape writes it


def checked_text(text: str | bytes) -> str:
    """Return a text as a string, or say why it is none."""
    if not isinstance(text, str | bytes):
        raise InputError(f"the text is of type {type(text).__name__}, but it must be a string or bytes.")
    try:
        if isinstance(text, bytes):
            return text.decode()
        text.encode()
    except UnicodeDecodeError as error:
        raise InputError(f"the text is not UTF-8 at byte {error.start}; give the text that the bytes mean.") from None
    except UnicodeEncodeError as error:
        raise InputError(f"the text holds half a character at {error.start} (a surrogate); replace it.") from None
    return text


def is_invalid_utf8(text: str | bytes) -> TypeGuard[bytes]:
    r"""Say whether these are bytes that are no UTF-8.

    >>> is_invalid_utf8(b"caf\xe9"), is_invalid_utf8("café".encode())
    (True, False)
    """
    if not isinstance(text, bytes) or text.isascii():
        return False
    try:
        text.decode()
    except UnicodeDecodeError:
        return True
    return False


def split_invalid_utf8(text: bytes) -> list[str]:
    r"""Return the stretches of text and, between them, each stray byte as Python's surrogateescape writes it.

    >>> split_invalid_utf8(b"caf\xe9!")
    ['caf', '\udce9', '!']
    """
    return _STRAY.split(text.decode(errors="surrogateescape"))
