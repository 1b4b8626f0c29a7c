"""Where a long document may be cut: where each part gives the same words as the whole.

That holds by the patterns of GPT-2, GPT-4 and GPT-4o after a newline, or else before a space, that stands alone
between characters that are not white space: no pattern has a word that goes on there, and none looks further. Where
`LONGEST` bytes have no such place, the document is cut all the same, after a newline or else between two characters,
so that memory is bounded whatever a file holds; the tokens at that cut may differ from those of the whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

MAX_CHUNK_BYTES = 2**24  # bytes of one document that are held at once

_MARGIN = 4  # bytes past the end of a piece that a decision to cut there looks at

_NARROW, _WIDE = rb"\t-\r\x1c- ", rb"\xe1\x9a\x80|\xe2\x80[\x80-\x8a\xa8\xa9\xaf]|\xe2\x81\x9f|\xe3\x80\x80"
_BEFORE = rb"(?<=[^" + _NARROW + rb"]%b)(?<!\xc2[\x85\xa0]%b)(?<!(?:" + _WIDE + rb")%b)"
_AFTER = rb"(?=[^" + _NARROW + rb"%b])(?!\xc2[\x85\xa0]|" + _WIDE + rb")"
_NEWLINE = b"\n" + _BEFORE % (b"\n", b"\n", b"\n") + _AFTER % b"/"  # GPT-4o: a sign takes newlines and / along
_SPACE = b" " + _BEFORE % (b" ", b" ", b" ") + _AFTER % b""
_EITHER = re.compile(_NEWLINE + b"|" + _SPACE)


def chunk(parts: Iterator[tuple[bytes, bool]], piece: int) -> Iterator[tuple[bytes, bool]]:
    """Yield pieces of documents that come in stretches; where those end makes no difference."""
    held: list[bytes] = []
    size, wanted = 0, piece + _MARGIN
    for part, ends in parts:
        held.append(part)
        size += len(part)
        if not ends and size < wanted:
            continue
        text, at = held[0] if len(held[0]) == size else b"".join(held), 0
        held.clear()
        while place := _place(text, at, piece, ends):
            yield text[at:place], False
            at = place
        text = text[at:]
        if ends and text:
            yield text, True
        elif text:
            held.append(text)
        size = 0 if ends else len(text)
        # Twice as much each time, so that what cannot be cut is not searched again at every block.
        wanted = max(piece + _MARGIN, min(2 * size, MAX_CHUNK_BYTES + _MARGIN))
        del text


def _place(text: bytes, at: int, piece: int, ends: bool) -> int:
    """Return where the piece that begins at `at` is cut off, or 0 where it is the last or more must be read."""
    left = len(text) - at
    if left <= piece if ends else left < piece + _MARGIN:
        return 0
    # The dot takes all it may and then goes back, so that the last place is found first.
    if found := re.compile(b"(?s:.{0,%d})%b" % (piece - 1, _NEWLINE)).match(text, at):
        return found.end()
    if found := re.compile(b"(?s:.{1,%d})%b" % (piece, _SPACE)).match(text, at):
        return found.end() - 1
    end = at + max(piece, MAX_CHUNK_BYTES)
    found = _EITHER.search(text, at + piece, end + _MARGIN)
    if found and (ends or found.end() + _MARGIN - 1 <= len(text)):
        place = found.end() if found[0] == b"\n" else found.start()
        if place <= end:
            return place
    if len(text) <= end if ends else len(text) < end + _MARGIN:
        return 0
    return text.rfind(b"\n", at, end) + 1 or _between_characters(text, end)


def _between_characters(text: bytes, place: int) -> int:
    while text[place] & 0xC0 == 0x80:  # inside a character
        place -= 1
    return place
