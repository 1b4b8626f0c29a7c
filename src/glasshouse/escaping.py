"""Escaping of text for display: control characters as codes, whitespace as symbols."""

from __future__ import annotations

SPACE, NEWLINE, TAB = "␣⏎⇥"
DOCUMENT_BREAK, REPLACED_MARK = "¶←"  # between documents; before the original token
_SYMBOLS = {" ": SPACE, "\n": NEWLINE, "\t": TAB, "\\": r"\\"}
_RESERVED = frozenset({SPACE, NEWLINE, TAB, DOCUMENT_BREAK, REPLACED_MARK})


def escape_control(text: str) -> str:
    r"""Return a text with control characters escaped; an invalid byte is \xNN.

    >>> print(escape_control("plain \x1b[31mred"))
    plain \x1b[31mred
    """
    return "".join(c if c.isprintable() else _code(c) for c in text)


def show_whitespace(text: str | bytes) -> str:
    r"""Return a text with whitespace visible as well; each symbol has one meaning.

    >>> print(show_whitespace(b"to be\n\xff \\n \x1b"))
    to␣be⏎\xff␣\\n␣\x1b
    """
    if isinstance(text, bytes):
        text = text.decode(errors="surrogateescape")
    return "".join(
        _SYMBOLS[c] if c in _SYMBOLS else c if c.isprintable() and c not in _RESERVED else _code(c) for c in text
    )


def _code(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # Python's surrogate escape of an invalid byte
        code -= 0xDC00
        return f"\\x{code:02x}"
    return f"\\x{code:02x}" if code < 0x80 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
