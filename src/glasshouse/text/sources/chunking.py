"""Splits long documents into chunks where pre-tokenization gives the same words as on the whole.

With the patterns of GPT-2, GPT-4 and GPT-4o that is after a single newline, or else before a single space, between
characters that are not white space: no word of these patterns crosses it, and no lookahead reaches further. Where
`MAX_CHUNK_BYTES` bytes have no such position, the document is split anyway, after a newline or else between two
characters, so that memory is bounded; the tokens there may differ from those of the whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

MAX_CHUNK_BYTES = 2**24  # bytes of one document in memory at once

_MARGIN = 4  # bytes of lookahead past the end of a chunk

_NARROW, _WIDE = rb"\t-\r\x1c- ", rb"\xe1\x9a\x80|\xe2\x80[\x80-\x8a\xa8\xa9\xaf]|\xe2\x81\x9f|\xe3\x80\x80"
_BEFORE = rb"(?<=[^" + _NARROW + rb"]%b)(?<!\xc2[\x85\xa0]%b)(?<!(?:" + _WIDE + rb")%b)"
_AFTER = rb"(?=[^" + _NARROW + rb"%b])(?!\xc2[\x85\xa0]|" + _WIDE + rb")"
_NEWLINE = (
    b"\n" + _BEFORE % (b"\n", b"\n", b"\n") + _AFTER % b"/"
)  # GPT-4o: punctuation takes following newlines and /
_SPACE = b" " + _BEFORE % (b" ", b" ", b" ") + _AFTER % b""
_EITHER = re.compile(_NEWLINE + b"|" + _SPACE)


def chunk(blocks: Iterator[tuple[bytes, bool]], chunk_bytes: int) -> Iterator[tuple[bytes, bool]]:
    """Yield chunks of documents that arrive in blocks; the block boundaries make no difference."""
    buffer: list[bytes] = []
    size, needed = 0, chunk_bytes + _MARGIN
    for block, ends in blocks:
        buffer.append(block)
        size += len(block)
        if not ends and size < needed:
            continue
        text, at = buffer[0] if len(buffer[0]) == size else b"".join(buffer), 0
        buffer.clear()
        while end := _chunk_end(text, at, chunk_bytes, ends):
            yield text[at:end], False
            at = end
        text = text[at:]
        if ends and text:
            yield text, True
        elif text:
            buffer.append(text)
        size = 0 if ends else len(text)
        # Twice as much each time, so that text without a boundary is not searched again at every block.
        needed = max(chunk_bytes + _MARGIN, min(2 * size, MAX_CHUNK_BYTES + _MARGIN))
        del text


def _chunk_end(text: bytes, at: int, chunk_bytes: int, ends: bool) -> int:
    """Return the end of the chunk that starts at `at`, or 0 if it is the last or more input is needed."""
    left = len(text) - at
    if left <= chunk_bytes if ends else left < chunk_bytes + _MARGIN:
        return 0
    # The dot is greedy, so that the last boundary is found first.
    if found := re.compile(b"(?s:.{0,%d})%b" % (chunk_bytes - 1, _NEWLINE)).match(text, at):
        return found.end()
    if found := re.compile(b"(?s:.{1,%d})%b" % (chunk_bytes, _SPACE)).match(text, at):
        return found.end() - 1
    end = at + max(chunk_bytes, MAX_CHUNK_BYTES)
    found = _EITHER.search(text, at + chunk_bytes, end + _MARGIN)
    if found and (ends or found.end() + _MARGIN - 1 <= len(text)):
        boundary = found.end() if found[0] == b"\n" else found.start()
        if boundary <= end:
            return boundary
    if len(text) <= end if ends else len(text) < end + _MARGIN:
        return 0
    return text.rfind(b"\n", at, end) + 1 or _between_characters(text, end)


def _between_characters(text: bytes, position: int) -> int:
    while text[position] & 0xC0 == 0x80:  # inside a character
        position -= 1
    return position
