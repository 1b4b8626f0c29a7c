"""Errors that a user can fix: each is one sentence that says what is wrong, the value, and what to do."""

from __future__ import annotations

import re
from numbers import Integral

SHOWN_DIGITS = 12  # of a fingerprint


class GlasshouseError(ValueError):
    r"""Base class of these errors; a command prints the message instead of a traceback.

    A message may quote untrusted files, so control characters are escaped, and words longer than a path are
    truncated.

    >>> print(GlasshouseError("a key is \x1b[31mred, and " + "long" * 100))
    a key is \x1b[31mred, and longlonglonglonglonglonglonglonglonglong...
    """

    def __init__(self, message: str) -> None:
        printable = "".join(c if c.isprintable() else repr(c)[1:-1] for c in message)
        super().__init__(re.sub(r"\S{300,}", lambda long: f"{long[0][:40]}...", printable)[:2000])


class ConfigError(GlasshouseError):
    """A setting has an unknown name, a wrong type or an invalid value."""


class InputError(GlasshouseError):
    """The arguments of a call do not fit the model or each other."""


class StoreError(GlasshouseError):
    """A folder on disk is missing, damaged, or of an unsupported format."""


def distinct(one: str, other: str) -> tuple[str, str]:
    """Shorten two different fingerprints to text that differs too: their beginnings, or where they come apart.

    >>> distinct("d6235d361af3" * 4, "d6235d361af3" * 4 + "x")
    ('...1af3', '...1af3x')
    """
    apart = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    if apart < SHOWN_DIGITS:
        return one[:SHOWN_DIGITS], other[:SHOWN_DIGITS]
    shown = slice(apart - 4, apart + 8)
    return f"...{one[shown]}", f"...{other[shown]}"


def check_count(name: str, value: int) -> int:
    """Return an integer; raise if it is below 1.

    >>> check_count("slots", 8)
    8
    """
    if not isinstance(value, Integral) or isinstance(value, bool) or int(value) < 1:
        raise InputError(f"{name} is {value!r}, but it must be a whole number of at least 1.")
    return int(value)
