"""Text made visible: signs for white space, codes for what does not print, so that nothing acts and nothing hides."""

from __future__ import annotations

SPACE, NEWLINE, TAB = "␣⏎⇥"
DOCUMENT_BREAK, REPLACED_MARK = "¶←"  # between documents; before what stood in a token's place
_SIGNS = {" ": SPACE, "\n": NEWLINE, "\t": TAB, "\\": r"\\"}
_TAKEN = frozenset({SPACE, NEWLINE, TAB, DOCUMENT_BREAK, REPLACED_MARK})


def escape_control(text: str) -> str:
    r"""Return a text with its control characters spelled out; a byte that is no character is \xNN.

    >>> print(escape_control("plain \x1b[31mred"))
    plain \x1b[31mred
    """
    return "".join(c if c.isprintable() else _code(c) for c in text)


def show_whitespace(text: str | bytes) -> str:
    r"""Return a text in which white space can be seen, too, and each sign has one meaning.

    >>> print(show_whitespace(b"to be\n\xff \\n \x1b"))
    to␣be⏎\xff␣\\n␣\x1b
    """
    if isinstance(text, bytes):
        text = text.decode(errors="surrogateescape")
    return "".join(_SIGNS[c] if c in _SIGNS else c if c.isprintable() and c not in _TAKEN else _code(c) for c in text)


def _code(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # how Python holds a byte that is no UTF-8
        code -= 0xDC00
        return f"\\x{code:02x}"
    return f"\\x{code:02x}" if code < 0x80 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
