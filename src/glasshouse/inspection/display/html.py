"""Results rendered as self-contained HTML, for notebooks and for files to share, and as SVG pictures."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import torch
from torch import Tensor

from glasshouse.errors import InputError
from glasshouse.escaping import escape_control
from glasshouse.inspection.display import svg
from glasshouse.inspection.display.svg import Fragment
from glasshouse.text import Tokenizer, visible_token

MAX_CELLS = 4096  # of a table; a larger one is drawn as an image, one pixel per cell
MAX_COLUMNS = 64
MAX_TEXTS = 4  # of a batch
CELL = 1.2  # height and width, in em, of a pixel of an image with names
POSITIVE, NEGATIVE = (38, 118, 214), (214, 93, 38)  # distinguishable with red-green colour blindness

STYLE = """
.gh { font: 13px/1.4 system-ui, sans-serif; color-scheme: light dark; overflow-x: auto }
.gh table { border-collapse: collapse; margin: 0 0 1em }
.gh caption { text-align: left; font-weight: 600; padding: .4em 0; white-space: nowrap }
.gh th { font-weight: 400; padding: 2px 6px; text-align: right; white-space: pre; max-width: 16em; overflow: hidden;
  text-overflow: ellipsis; unicode-bidi: isolate }
.gh td { padding: 2px 6px; text-align: right; white-space: pre; unicode-bidi: isolate;
  font-variant-numeric: tabular-nums }
.gh .word { text-align: left; max-width: 10em; overflow: hidden; text-overflow: ellipsis }
.gh td.bar { min-width: 16em; text-align: left } .gh td.bar i { display: block; height: .9em; box-sizing: border-box }
.gh img { image-rendering: pixelated; width: min(100%, 640px); border: 1px solid #8888 }
.gh figure { margin: 0 0 1em } .gh figcaption { font-weight: 600; padding: .4em 0 }
.gh .side { display: flex; flex-wrap: wrap; gap: 1em } .gh .side figure { width: 12em } .gh .side img { width: 100% }
.gh .side .map { width: auto } .gh .map img { display: block; border: 0; outline: 1px solid #8888 }
.gh .map th { padding: 0 4px; height: 1.2em; line-height: 1.2em; max-width: 10em } .gh .map td { padding: 0 }
.gh .map .up { writing-mode: vertical-rl; transform: rotate(180deg); padding: 0; text-indent: 4px; height: auto;
  max-height: 10em; min-width: 1.2em; max-width: 1.2em; text-align: left; vertical-align: bottom }
"""


class Drawing:
    """A heatmap, an image, bars or a table: as HTML, and as elements of an SVG picture."""

    def html(self) -> str:
        """Return the HTML."""
        raise NotImplementedError

    def svg(self) -> Fragment:
        """Return the elements of a picture, from the origin on, with their size."""
        raise NotImplementedError


class HtmlDisplay:
    """A result that displays itself in a notebook, as an HTML page or as an SVG picture."""

    def _drawings(self) -> list[Drawing]:
        """Return what the result shows, in order."""
        raise NotImplementedError

    def _html_body(self) -> str:
        """Return the body of the HTML."""
        return "".join(one.html() for one in self._drawings())

    def __repr__(self) -> str:
        """Name the tensors with their shapes: in a terminal the values would be pages."""
        shown = []
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                shown.append(f"{name} {list(value.shape) if value.ndim else f'{value.item():.4g}'}")
            elif isinstance(value, str):
                shown.append(f"{name} {value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"

    def _repr_html_(self) -> str:
        return f'<div class="gh"><style>{STYLE}</style>{self._html_body()}</div>'

    def save(self, path: str | Path, *, caption: str = "") -> None:
        """Write a picture, `.svg`, for slides and papers, or a self-contained page, `.html`.

        Below the picture stand the caption, such as the name of the model, and the texts where the result knows them.
        """
        match Path(path).suffix.lower():
            case ".svg":
                page = svg.document([one.svg() for one in self._drawings()], [caption, *self._texts()])
            case ".html":
                title = f"<title>{escape(caption or type(self).__name__)}</title>"
                head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width">{title}'
                body = self._repr_html_() + (f"<p>{shown(caption)}</p>" if caption else "")
                page = f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>\n'
            case _:
                raise InputError(
                    f"{type(self).__name__} cannot be saved as {Path(path).name!r}; name a file .svg, for slides and "
                    "papers, or .html."
                )
        Path(path).write_text(page, "utf-8")

    def _texts(self) -> list[str]:
        """Return the texts that the result is about, where it knows its tokens."""
        ids, tok = getattr(self, "ids", None), getattr(self, "tok", None)
        if not isinstance(ids, Tensor) or not isinstance(tok, Tokenizer):
            return []
        rows = ids if ids.ndim == 2 else ids[None]
        return [f"text {number}: {''.join(labels(row, tok))}" for number, row in enumerate(rows[:MAX_TEXTS])]


@dataclass(frozen=True)
class Heatmap(Drawing):
    """Values [R, C] as a table with shaded cells that contain numbers or words; one too large to read is an image.

    >>> html = Heatmap(torch.tensor([[0.5, 1.0]]), rows=["a"], columns=["<b>", "c"], caption="x & y").html()
    >>> "&lt;b&gt;" in html, "x &amp; y" in html, html.count("<td")
    (True, True, 2)
    """

    values: Tensor
    rows: Sequence[str]
    columns: Sequence[str]
    caption: str = ""
    words: Sequence[Sequence[str]] | None = None

    @property
    def _is_large(self) -> bool:
        return self.values.numel() > MAX_CELLS or (self.words is None and self.values.shape[1] > MAX_COLUMNS)

    def _cells(self) -> list[list[tuple[float, str]]]:
        values = self.values.detach().double().cpu().tolist()
        texts = [[_number(value) for value in line] for line in values] if self.words is None else self.words
        return [list(zip(line, said, strict=True)) for line, said in zip(values, texts, strict=True)]

    def html(self) -> str:
        """Return a table, or an image."""
        if self._is_large:
            return Picture(self.values, self.caption).html()
        top = _largest(self.values)
        kind = "" if self.words is None else ' class="word"'
        head = "".join(f"<th{kind}>{shown(name)}</th>" for name in self.columns)
        lines = [f"<tr><th></th>{head}</tr>"]
        for name, line in zip(self.rows, self._cells(), strict=True):
            cells = "".join(
                f'<td{kind} style="background:{_shade(value, top)}">{shown(text)}</td>' for value, text in line
            )
            lines.append(f"<tr><th>{shown(name)}</th>{cells}</tr>")
        return f"<table><caption>{escape(self.caption)}</caption>{''.join(lines)}</table>"

    def svg(self) -> Fragment:
        """Return rectangles with text, or an image."""
        if self._is_large:
            return Picture(self.values, self.caption).svg()
        top = _largest(self.values)
        cells = [
            [(text, svg.blend(_ink(value), 0.75 * _share(value, top))) for value, text in line]
            for line in self._cells()
        ]
        return svg.grid(self.caption, self.rows, self.columns, cells)


@dataclass(frozen=True)
class Picture(Drawing):
    """Values [R, C] as an image, one pixel each, with the names of its rows and columns where there are any.

    >>> "a map, 2 by 3: from 0 to 1" in Picture(torch.eye(2, 3), "a map").html()
    True
    >>> Picture(torch.eye(2, 1), "a map", rows=["to", "be"], columns=["to"]).html().count("<th")
    4
    """

    values: Tensor
    caption: str = ""
    rows: Sequence[str] = ()
    columns: Sequence[str] = ()

    @property
    def label(self) -> str:
        """The caption with the size and the range of the values."""
        values = self.values.detach().double().cpu()
        low, high = values.nan_to_num(torch.inf).min(), values.nan_to_num(-torch.inf).max()
        size = f"{values.shape[0]} by {values.shape[1]}"
        return f"{self.caption}, {size}: from {low:.3g} to {high:.3g}".lstrip(", ")

    @property
    def _source(self) -> str:
        return f"data:image/png;base64,{base64.b64encode(_png(self.values.detach().double().cpu())).decode()}"

    def html(self) -> str:
        """Return an image with its label."""
        label = escape(self.label)
        if not self.rows or not self.columns:
            return f'<figure><figcaption>{label}</figcaption><img alt="{label}" src="{self._source}"></figure>'
        n_rows, n_columns = self.values.shape
        size = f"width:{CELL * n_columns:.1f}em;height:{CELL * n_rows:.1f}em"
        image = f'<img alt="{label}" style="{size}" src="{self._source}">'
        lines = [f"<th>{shown(name)}</th>" for name in self.rows]
        lines[0] += f'<td rowspan="{n_rows}" colspan="{n_columns}">{image}</td>'
        head = "".join(f'<th class="up">{shown(name)}</th>' for name in self.columns)
        body = "".join(f"<tr>{line}</tr>" for line in ["<th></th>" + head, *lines])
        return f'<figure class="map"><figcaption>{label}</figcaption><table>{body}</table></figure>'

    def svg(self) -> Fragment:
        """Return an image with its names, or the numbers of its first and last row and column."""
        n_rows, n_columns = self.values.shape
        return svg.image(self.label, self._source, n_rows, n_columns, self.rows, self.columns)


@dataclass(frozen=True)
class Bars(Drawing):
    """Values [N] as a bar chart, one bar per line, in the given order; negative ones go left from the line at 0.

    >>> Bars(torch.tensor([1.0, -2.0]), names=["up", "down"]).html().count("<tr>")
    2
    """

    values: Tensor
    names: Sequence[str]
    caption: str = ""

    def _rows(self) -> tuple[list[tuple[str, float, float, float]], float]:
        """Return name, value, start and length of each bar, and where 0 is, as shares of the whole width."""
        numbers = self.values.detach().double().nan_to_num(0, 0, 0).cpu().tolist()
        low, high = min([0.0, *numbers]), max([0.0, *numbers])
        span = high - low or 1.0
        rows = [
            (name, value, (min(value, 0.0) - low) / span, abs(value) / span)
            for name, value in zip(self.names, numbers, strict=True)
        ]
        return rows, -low / span

    def html(self) -> str:
        """Return a table with bars."""
        lines, (rows, _) = "", self._rows()
        for name, value, start, share in rows:
            place = f"margin-left:{15 * start:.2f}em;width:{15 * share:.2f}em"
            line = f"border-{'right' if value < 0 else 'left'}:1px solid #888"  # one below the other, the line at 0
            bar = f'<td class="bar"><i style="{place};{line};background:{_shade(value, abs(value))}"></i></td>'
            lines += f"<tr><th>{shown(name)}</th><td>{_number(value)}</td>{bar}</tr>"
        return f"<table><caption>{escape(self.caption)}</caption>{lines}</table>"

    def svg(self) -> Fragment:
        """Return a rectangle for each bar, with its name and value."""
        rows, zero = self._rows()
        bars = [
            svg.Bar(name, _number(value), start, length, svg.blend(_ink(value), 0.75))
            for name, value, start, length in rows
        ]
        return svg.bars(self.caption, bars, zero)


@dataclass(frozen=True)
class Table(Drawing):
    """Named texts, one in a line."""

    values: Mapping[str, str]
    caption: str = ""

    def html(self) -> str:
        """Return a table."""
        lines = "".join(
            f"<tr><th>{shown(name)}</th><td>{shown(text)}</td></tr>" for name, text in self.values.items()
        )
        return f"<table><caption>{shown(self.caption)}</caption>{lines}</table>"

    def svg(self) -> Fragment:
        """Return the names and texts."""
        return svg.grid(self.caption, list(self.values), [""], [[(text, "#ffffff")] for text in self.values.values()])


def not_drawn(**left: int) -> str:
    """Return a note of how many items are not drawn.

    >>> not_drawn(positions=0, texts=3), not_drawn(positions=-2)
    (' (3 more texts not drawn)', '')
    """
    more = " and ".join(f"{count} more {what}" for what, count in left.items() if count > 0)
    return f" ({more} not drawn)" if more else ""


def labels(ids: Tensor, tok: Tokenizer | None) -> list[str]:
    """Return a label for each of ids [S]: the token's text with visible spaces, or its id."""
    if tok is None:
        return [str(number) for number in ids.tolist()]
    known = tok.ids  # the vocabulary of a model may be padded with ids that no token has
    return [visible_token(tok, number) if number in known else str(number) for number in ids.tolist()]


def shown(text: str) -> str:
    r"""Return a text as escaped HTML with control characters made visible.

    >>> shown("<b>\x1b")
    '&lt;b&gt;\\x1b'
    """
    return escape(escape_control(text[:80]) + ("…" if len(text) > 80 else ""))


def _number(value: float) -> str:
    return "" if value != value else f"{value:.2f}" if 0.01 <= abs(value) < 1000 or value == 0 else f"{value:.1e}"


def _largest(values: Tensor) -> float:
    return float(values.detach().double().nan_to_num(0, 0, 0).abs().max()) if values.numel() else 0.0


def _share(value: float, top: float) -> float:
    return min(1.0, abs(value) / top) if top and value == value else 0.0


def _ink(value: float) -> tuple[int, int, int]:
    return POSITIVE if value >= 0 else NEGATIVE


def _shade(value: float, top: float) -> str:
    red, green, blue = _ink(value)
    return f"rgba({red},{green},{blue},{0.75 * _share(value, top):.3f})"


def _png(values: Tensor) -> bytes:
    """Return values [R, C] as a PNG image, one pixel each."""
    values = values.nan_to_num(0, 0, 0)
    share = (values.abs() / values.abs().max().clamp(min=1e-30))[..., None]
    ink = torch.where(values[..., None] >= 0, torch.tensor(POSITIVE), torch.tensor(NEGATIVE))
    pixels = (255 + (ink - 255) * share).to(torch.uint8)
    lines = b"".join(b"\0" + bytes(line.flatten().tolist()) for line in pixels)
    header = struct.pack(">IIBBBBB", values.shape[1], values.shape[0], 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
