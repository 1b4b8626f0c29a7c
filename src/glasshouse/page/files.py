"""The files of the page: scripts, styles, and its HTML with the manifest that the scripts read."""

from __future__ import annotations

import re
from pathlib import Path

from glasshouse.page.manifest import views
from glasshouse.page.url_state import DEFAULTS
from glasshouse.web import to_json

IMPORT = re.compile(r'^import \{([^}]*)\} from "glasshouse/([^"]+)";$', re.MULTILINE)
EXPORT = re.compile(r"^export (?:const|class|function) (\w+)", re.MULTILINE)
STATIC = Path(__file__).parent / "static"


def static_files() -> dict[str, bytes]:
    """Return the files of the page by their path below /static/, with those of views of installed packages."""
    files = {path.relative_to(STATIC).as_posix(): path for path in sorted(STATIC.rglob("*.*"))}
    for view in views().values():
        if view.static is not None:
            scripts = sorted(path for suffix in ("js", "css") for path in view.static.rglob(f"*.{suffix}"))
            files |= {f"views/{view.name}/{path.relative_to(view.static).as_posix()}": path for path in scripts}
    return {name: path.read_bytes() for name, path in files.items()}


def is_page_script(name: str) -> bool:
    """Whether a file is a script of the page itself, not of the worker of a live page."""
    return name.endswith(".js") and not name.startswith("live/")


def worker_script() -> str:
    """Return the scripts of the worker of a live page as one: a page opened from disk lets its worker import nothing.

    Each becomes a function that returns what the script exports, after those of the scripts that it imports.
    """
    texts = {name: text.decode() for name, text in static_files().items() if name.startswith("live/")}
    linked: dict[str, str] = {}

    def link(name: str) -> None:
        for imported in IMPORT.findall(texts[name]):
            if imported[1] not in linked:
                link(imported[1])
        body = IMPORT.sub(r'const {\1} = modules["\2"];', texts[name])
        exported = ", ".join(EXPORT.findall(body))
        linked[name] = f'modules["{name}"] = (() => {{\n{body}\nreturn {{ {exported} }};\n}})();\n'

    link("live/worker.js")
    return '"use strict";\nconst modules = {};\n' + re.sub(
        "^export ", "", "".join(linked.values()), flags=re.MULTILINE
    )


def index_page(*, served: bool = False) -> str:
    """Return the HTML of the page, with the style sheets of the views and the manifest.

    Where it is served beside an API, it opens with the chat.
    """
    files = static_files()
    sheets = [name for view in views() if (name := f"views/{view}/view.css") in files]
    styles = "".join(f'<link rel="stylesheet" href="/static/{name}">\n' for name in sheets)
    manifest = {
        "views": [{"name": view.name, "title": view.title} for view in views().values()],
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
    held = to_json(data).decode().replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{held}</script>\n'
