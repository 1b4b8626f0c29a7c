"""Values of a .json file, an array of them or one after the other, parsed one at a time in bounded memory."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator

from glasshouse.errors import InputError
from glasshouse.text.sources.file import SourceFile, place, too_long

_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()


def json_values(file: SourceFile, max_bytes: int) -> Iterator[tuple[int, str]]:
    """Yield the number, from 1, and the text of each value; one longer than `max_bytes` is refused."""
    text, number, opened, expected = "", 1, False, "[value"
    for block in itertools.chain(file.blocks(), (b"",)):
        text, at = text + block.decode(), 0
        while (at := _SPACE.match(text, at).end()) < len(text):  # type: ignore[union-attr]
            mark = text[at]
            if mark in "[,]" and mark in expected:
                opened = opened or mark == "["
                expected = {"[": "value]", ",": "value", "]": ""}[mark]
                at += 1
            elif not expected.startswith(("value", "[value")):
                wanted = "a comma or the end of the array" if expected else "nothing, as the array has ended"
                raise InputError(
                    f"{place(file.path, number - 1)} is followed by {mark!r}, but must be by {wanted}; fix it."
                )
            else:
                end = _end_of_value(file, number, text, at, max_bytes, whole=not block)
                if end == 0:
                    break
                yield number, text[at:end]
                at, number, expected = end, number + 1, ",]" if opened else "value"
        text = text[at:]
    if opened and expected:
        raise InputError(f"{str(file.path)!r} ends before its array does; download it again.")


def _end_of_value(file: SourceFile, number: int, text: str, at: int, max_bytes: int, *, whole: bool) -> int:
    """Return where a value ends; 0 if more text is needed to know."""
    try:
        _, end = _DECODER.raw_decode(text, at)
    except RecursionError:
        raise InputError(f"{place(file.path, number)} is nested too deeply to be parsed; remove it.") from None
    except ValueError as error:  # it is not valid, or not yet whole
        if not whole and len(text) - at <= max_bytes:
            return 0
        reason = str(error).partition(": line")[0]
        raise InputError(f"{place(file.path, number)} is not valid JSON ({reason}); fix it.") from None
    if end - at > max_bytes:
        raise too_long(place(file.path, number), max_bytes)
    return end
