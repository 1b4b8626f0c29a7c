"""Check of a sequence length against the positions that a model has."""

from __future__ import annotations

from glasshouse.errors import InputError, check_count
from glasshouse.spec import Spec


def check_length(s: Spec, length: int | None, name: str = "max_len", owner: str = "the model") -> int:
    """Return the maximum sequence length, which only a table of learned positions limits; by default max_len.

    >>> from glasshouse.spec import preset
    >>> check_length(preset("tiny-decoder", max_len=64, position="rotary"), 100)
    100
    >>> check_length(preset("tiny-decoder", max_len=64, position="learned"), 100)
    Traceback (most recent call last):
    ...
    glasshouse.errors.InputError: max_len is 100, but the model has positions for 64; reduce it.
    """
    if length is None:
        return s.max_len
    if s.position_limit is not None and check_count(name, length) > s.position_limit:
        raise InputError(f"{name} is {length}, but {owner} has positions for {s.position_limit}; reduce it.")
    return check_count(name, length)
