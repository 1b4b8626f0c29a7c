"""The files of the page: scripts, styles, and its HTML with the manifest that the scripts read."""

from __future__ import annotations

from pathlib import Path

from glasshouse.page import serialization
from glasshouse.page.manifest import VIEWS
from glasshouse.page.url_state import DEFAULTS

STATIC = Path(__file__).parent / "static"


def static_files() -> dict[str, bytes]:
    """Return the files of the page by their path below /static/."""
    return {path.relative_to(STATIC).as_posix(): path.read_bytes() for path in sorted(STATIC.rglob("*.*"))}


def index_page(*, served: bool = False) -> str:
    """Return the HTML of the page, with the style sheets of the views and the manifest.

    Where it is served beside an API, it opens with the chat.
    """
    files = static_files()
    sheets = [name for view in VIEWS if (name := f"views/{view}/view.css") in files]
    styles = "".join(f'<link rel="stylesheet" href="/static/{name}">\n' for name in sheets)
    manifest = {
        "views": [{"name": view.name, "title": view.title} for view in VIEWS.values()],
        "state": DEFAULTS | ({"view": "chat"} if served else {}),
        "served": served,
    }
    return files["index.html"].decode().replace("</head>", f"{styles}{data_script('manifest', manifest)}</head>")


def data_script(name: str, data: object) -> str:
    r"""Return a script element with JSON that the page finds by its id.

    >>> data_script("saved", {"text": "</script>"})
    '<script type="application/json" id="saved">{"text":"\\u003c/script>"}</script>\n'
    """
    # Text must not close the script element that contains it.
    held = serialization.to_json(data).decode().replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{held}</script>\n'
