"""Results rendered as self-contained HTML, for notebooks and for files to share."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence
from html import escape
from pathlib import Path

import torch
from torch import Tensor

from glasshouse.escaping import escape_control
from glasshouse.text import Tokenizer, visible_token

MAX_CELLS = 4096  # of a table; a larger one is drawn as an image, one pixel per cell
MAX_COLUMNS = 64
MAX_TEXTS = 4  # of a batch
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
.gh td.bar { min-width: 16em; text-align: left } .gh td.bar i { display: inline-block; height: .9em }
.gh img { image-rendering: pixelated; width: min(100%, 640px); border: 1px solid #8888 }
.gh figure { margin: 0 0 1em } .gh figcaption { font-weight: 600; padding: .4em 0 }
.gh .side { display: flex; flex-wrap: wrap; gap: 1em } .gh .side figure { width: 12em } .gh .side img { width: 100% }
"""


class HtmlDisplay:
    """A result that displays itself in a notebook, or as an HTML page."""

    def _html_body(self) -> str:
        """Return the body of the HTML."""
        raise NotImplementedError

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

    def save_html(self, path: str | Path) -> None:
        """Write a self-contained HTML page that loads no other file."""
        title = escape(type(self).__name__)
        head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
        page = f'<!doctype html><html lang="en"><head>{head}</head><body>{self._repr_html_()}</body></html>\n'
        Path(path).write_text(page, "utf-8")


def heatmap(
    values: Tensor,
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    caption: str = "",
    words: Sequence[Sequence[str]] | None = None,
) -> str:
    """Render values [R, C] as a table with shaded cells that contain numbers or words.

    A table too large to read becomes an image.

    >>> html = heatmap(torch.tensor([[0.5, 1.0]]), rows=["a"], columns=["<b>", "c"], caption="x & y")
    >>> "&lt;b&gt;" in html, "x &amp; y" in html, html.count("<td")
    (True, True, 2)
    """
    values = values.detach().double().cpu()
    if values.numel() > MAX_CELLS or (words is None and values.shape[1] > MAX_COLUMNS):
        return picture(values, caption=caption)
    top = float(values.nan_to_num(0, 0, 0).abs().max()) if values.numel() else 0.0
    kind = "" if words is None else ' class="word"'
    head = "".join(f"<th{kind}>{shown(name)}</th>" for name in columns)
    lines = [f"<tr><th></th>{head}</tr>"]
    for number, (name, line) in enumerate(zip(rows, values.tolist(), strict=True)):
        texts = [_number(value) for value in line] if words is None else words[number]
        cells = "".join(
            f'<td{kind} style="background:{_shade(value, top)}">{shown(text)}</td>'
            for value, text in zip(line, texts, strict=True)
        )
        lines.append(f"<tr><th>{shown(name)}</th>{cells}</tr>")
    return f"<table><caption>{escape(caption)}</caption>{''.join(lines)}</table>"


def picture(values: Tensor, *, caption: str = "") -> str:
    """Render values [R, C] as an image, one pixel each.

    >>> "a map, 2 by 3: from 0 to 1" in picture(torch.eye(2, 3), caption="a map")
    True
    """
    values = values.detach().double().cpu()
    size = f"{values.shape[0]} by {values.shape[1]}"
    low, high = values.nan_to_num(torch.inf).min(), values.nan_to_num(-torch.inf).max()
    label = escape(f"{caption}, {size}: from {low:.3g} to {high:.3g}".lstrip(", "))
    image = f'<img alt="{label}" src="data:image/png;base64,{base64.b64encode(_png(values)).decode()}">'
    return f"<figure><figcaption>{label}</figcaption>{image}</figure>"


def bars(values: Tensor, *, names: Sequence[str], caption: str = "") -> str:
    """Render values [N] as a bar chart, one bar per line, in the given order.

    >>> bars(torch.tensor([1.0, -2.0]), names=["up", "down"]).count("<tr>")
    2
    """
    numbers = values.detach().double().nan_to_num(0, 0, 0).cpu().tolist()
    top = max((abs(value) for value in numbers), default=0.0) or 1.0
    lines = ""
    for name, value in zip(names, numbers, strict=True):
        style = f"width:{15 * abs(value) / top:.2f}em;background:{_shade(value, abs(value))}"
        bar = f'<td class="bar"><i style="{style}"></i></td>'
        lines += f"<tr><th>{shown(name)}</th><td>{_number(value)}</td>{bar}</tr>"
    return f"<table><caption>{escape(caption)}</caption>{lines}</table>"


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


def _shade(value: float, top: float) -> str:
    share = min(1.0, abs(value) / top) if top and value == value else 0.0
    red, green, blue = POSITIVE if value >= 0 else NEGATIVE
    return f"rgba({red},{green},{blue},{0.75 * share:.3f})"


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
