"""SVG of rectangles, texts and images alone, which browsers, Inkscape and PowerPoint read alike."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape, quoteattr

from glasshouse.escaping import escape_control

SIZE = 13  # pixels of a letter
LETTER = 0.61 * SIZE  # and of its width, of which a wide one takes two
LINE = 22  # of a row
MARGIN = 16
LONGEST = 24  # letters of a name or a cell
WIDTH = 110  # letters of a line of a caption
TRACK = 320  # pixels of the bars, from the least to the largest
SIDE = 480  # of an image
MONO = "DejaVu Sans Mono, Menlo, Consolas, monospace"
SANS = "DejaVu Sans, Helvetica, Arial, sans-serif"


class Fragment(NamedTuple):
    """Elements that begin at the origin, and their size."""

    elements: list[str]
    width: float
    height: float


class Bar(NamedTuple):
    """A bar with its name and value; start and length are shares of the track."""

    name: str
    value: str
    start: float
    length: float
    colour: str


def document(parts: Sequence[Fragment], captions: Sequence[str]) -> str:
    """Return a picture: parts below each other, then captions, dark on white.

    >>> page = document([bars("two", [Bar("a", "1", 0, 0.5, "#2676d6")], 0)], ["of <a> model"])
    >>> page.startswith("<svg xmlns="), "of &lt;a&gt; model" in page, page.count("<rect")
    (True, True, 3)
    """
    drawn, y = [], float(MARGIN)
    for part in parts:
        drawn += [f'<g transform="translate({MARGIN} {y:g})">', *part.elements, "</g>"]
        y += part.height + MARGIN
    lines = [line for caption in captions if caption for line in _wrapped(caption)]
    for line in lines:
        drawn.append(text(MARGIN, y + 0.8 * SIZE, line, colour="#444444"))
        y += 1.4 * SIZE
    width = max([part.width for part in parts] + [LETTER * _letters(line) for line in lines] + [0]) + 2 * MARGIN
    size = f'width="{width:g}" height="{y + MARGIN:g}" viewBox="0 0 {width:g} {y + MARGIN:g}"'
    paper = '<rect width="100%" height="100%" fill="#ffffff"/>'
    title = f"<title>{_escaped(' '.join(lines))}</title>"
    body = "\n".join([title, paper, *drawn])
    names = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    return f"<svg {names} {size}>\n{body}\n</svg>\n"


def grid(
    caption: str, rows: Sequence[str], columns: Sequence[str], cells: Sequence[Sequence[tuple[str, str]]]
) -> Fragment:
    """Return rows of named cells, each a text on a colour."""
    left = _room(rows)
    wide = [_room([name, *(line[number][0] for line in cells)]) for number, name in enumerate(columns)]
    starts = [left + sum(wide[:number]) for number in range(len(wide))]
    drawn, top = _heading(caption)
    named = any(columns)
    for x, width, name in zip(starts, wide, columns, strict=True):
        drawn.append(text(x + width / 2, top + 15, _cut(name), anchor="middle", mono=True))
    top += LINE if named else 0
    for y, (name, line) in enumerate(zip(rows, cells, strict=True)):
        at = top + y * LINE
        drawn.append(text(left - 8, at + 15, _cut(name), anchor="end", mono=True))
        for x, width, (said, colour) in zip(starts, wide, line, strict=True):
            drawn.append(f'<rect x="{x:g}" y="{at:g}" width="{width - 1:g}" height="{LINE - 1}" fill="{colour}"/>')
            drawn.append(text(x + width / 2, at + 15, _cut(said), anchor="middle", mono=True))
    return Fragment(drawn, max(left + sum(wide), _extent(caption)), top + LINE * len(rows))


def bars(caption: str, rows: Sequence[Bar], zero: float) -> Fragment:
    """Return bars below each other, and a line at 0, whose place is a share of the track."""
    left, wide = _room([one.name for one in rows]), _room([one.value for one in rows])
    drawn, top = _heading(caption)
    for y, one in enumerate(rows):
        at = top + y * LINE
        drawn.append(text(left - 8, at + 15, _cut(one.name), anchor="end", mono=True))
        drawn.append(text(left + wide - 8, at + 15, one.value, anchor="end", mono=True))
        x, size = left + wide + TRACK * one.start, f'width="{TRACK * one.length:.6g}" height="{LINE - 6}"'
        drawn.append(f'<rect x="{x:.6g}" y="{at + 3:g}" {size} fill="{one.colour}"/>')
    line = f'x="{left + wide + TRACK * zero - 0.5:.6g}" y="{top:g}" width="1" height="{LINE * len(rows)}"'
    drawn.append(f'<rect {line} fill="#888888"/>')
    return Fragment(drawn, max(left + wide + TRACK, _extent(caption)), top + LINE * len(rows))


def image(
    caption: str,
    source: str,
    rows: int,
    columns: int,
    row_names: Sequence[str] = (),
    column_names: Sequence[str] = (),
) -> Fragment:
    """Return an image of so many rows and columns, with their names, or the numbers of the first and the last."""
    drawn, top = _heading(caption)
    pixel = SIDE / max(rows, columns)
    if row_names and column_names:
        pixel = max(pixel, 1.2 * SIZE)  # so that names do not overlap
        left, top = _room(row_names), top + _room(column_names)
        for number, name in enumerate(column_names):
            x = left + (number + 0.5) * pixel + 0.35 * SIZE
            drawn.append(text(x, top - 8, _cut(name), mono=True, turned=True))
        for number, name in enumerate(row_names):
            y = top + (number + 0.5) * pixel + 0.35 * SIZE
            drawn.append(text(left - 8, y, _cut(name), anchor="end", mono=True))
    else:
        left, top = _room([str(rows - 1)]), top + LINE
        for number in (0, columns - 1):
            drawn.append(text(left + (number + 0.5) * pixel, top - 6, str(number), anchor="middle", mono=True))
        for number in (0, rows - 1):
            y = top + (number + 0.5) * pixel + 0.35 * SIZE
            drawn.append(text(left - 8, y, str(number), anchor="end", mono=True))
    wide, tall = pixel * columns, pixel * rows
    place = f'x="{left:g}" y="{top:g}" width="{wide:g}" height="{tall:g}" preserveAspectRatio="none"'
    # Older programs read the address under the first name only, newer ones under the second.
    drawn.append(f'<image {place} style="image-rendering:pixelated" xlink:href="{source}" href="{source}"/>')
    return Fragment(drawn, max(left + wide, _extent(caption)), top + tall)


def text(
    x: float,
    y: float,
    said: str,
    *,
    anchor: str = "start",
    colour: str = "#17221d",
    mono: bool = False,
    turned: bool = False,
) -> str:
    """Return a text at its baseline, which goes upwards if `turned`."""
    font = f'font-family={quoteattr(MONO if mono else SANS)} font-size="{SIZE}"'
    place = f'x="{x:g}" y="{y:g}"' + (f' transform="rotate(-90 {x:g} {y:g})"' if turned else "")
    return f'<text {place} {font} text-anchor="{anchor}" fill="{colour}">{_escaped(said)}</text>'


def blend(ink: tuple[int, int, int], share: float) -> str:
    """Return a colour between white and an ink.

    >>> blend((0, 0, 255), 0.0), blend((0, 0, 255), 1.0)
    ('#ffffff', '#0000ff')
    """
    return "#" + "".join(f"{round(255 + (one - 255) * share):02x}" for one in ink)


def _heading(caption: str) -> tuple[list[str], float]:
    if not caption:
        return [], 0.0
    lines = _wrapped(caption)
    drawn = [text(0, 0.8 * SIZE + 1.4 * SIZE * number, line) for number, line in enumerate(lines)]
    return [one.replace("<text ", '<text font-weight="600" ') for one in drawn], 1.4 * SIZE * len(lines) + 6


def _wrapped(said: str) -> list[str]:
    lines = [""]
    for letter in escape_control(said):
        if len(lines[-1]) >= WIDTH:
            lines.append("")
        lines[-1] += letter
    return lines[:3]


def _extent(caption: str) -> float:
    return LETTER * max(_letters(line) for line in _wrapped(caption))


def _room(names: Sequence[str]) -> float:
    return 16 + LETTER * max((_letters(_cut(name)) for name in names), default=0)


def _cut(name: str) -> str:
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…"


def _letters(said: str) -> int:
    """Count letters, those of double width twice."""
    return sum(2 if unicodedata.east_asian_width(one) in "WF" else 1 for one in said)


def _escaped(said: str) -> str:
    """Return a text that is valid in XML, which has no control characters, surrogates or non-characters."""
    visible = escape_control(said)
    return escape("".join(one if _is_allowed(ord(one)) else "�" for one in visible))


def _is_allowed(code: int) -> bool:
    return code >= 32 and not 0xD800 <= code <= 0xDFFF and code & 0xFFFE != 0xFFFE
