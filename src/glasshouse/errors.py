"""The errors a user can mend: each is one sentence that names what is wrong, its value, and what to do."""

from __future__ import annotations

import re


class GlasshouseError(ValueError):
    r"""The base of them all; a command prints its sentence instead of a traceback.

    What a sentence quotes may come from anyone's file, so it is made fit to print: control characters are spelled
    out, and what is longer than a path is cut.

    >>> print(GlasshouseError("a key is \x1b[31mred, and " + "long" * 100))
    a key is \x1b[31mred, and longlonglonglonglonglonglonglonglonglonglonglonglonglonglonglong...
    """

    def __init__(self, sentence: str) -> None:
        printable = "".join(c if c.isprintable() else repr(c)[1:-1] for c in sentence)
        super().__init__(re.sub(r"\S{300,}", lambda long: f"{long[0][:64]}...", printable)[:2000])


class ConfigError(GlasshouseError):
    """A setting has an unknown name, a wrong type or a value that makes no model."""


class InputError(GlasshouseError):
    """A call was given ids, lengths or masks that do not fit the model or each other."""


class StoreError(GlasshouseError):
    """A folder on disk is missing, damaged, or of a format this version does not read."""
