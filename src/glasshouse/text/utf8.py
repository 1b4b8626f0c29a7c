"""Validation of text input: strings, or bytes, which need not be valid UTF-8."""

from __future__ import annotations

import re
from typing import TypeGuard

from glasshouse.errors import InputError

_INVALID = re.compile("([\udc80-\udcff])")  # an invalid byte, as Python's surrogateescape decodes it


def checked_text(text: str | bytes) -> str:
    """Return the text as a string; raise InputError if it is not valid."""
    if not isinstance(text, str | bytes):
        raise InputError(f"the text is of type {type(text).__name__}, but it must be a string or bytes.")
    try:
        if isinstance(text, bytes):
            return text.decode()
        text.encode()
    except UnicodeDecodeError as error:
        raise InputError(
            f"the text is not UTF-8 at byte {error.start}; decode the bytes with their own encoding first."
        ) from None
    except UnicodeEncodeError as error:
        raise InputError(f"the text has a lone surrogate at index {error.start}; replace it.") from None
    return text


def is_invalid_utf8(text: str | bytes) -> TypeGuard[bytes]:
    r"""Return whether these are bytes that are not valid UTF-8.

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
    r"""Split at invalid bytes: valid text at even indices, each invalid byte (surrogateescape) at odd ones.

    >>> split_invalid_utf8(b"caf\xe9!")
    ['caf', '\udce9', '!']
    """
    return _INVALID.split(text.decode(errors="surrogateescape"))
