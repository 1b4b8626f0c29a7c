"""Writes live pages of the bundled models beside the documentation, into build/site/live; `make site` runs it.

Each is one file with the model inside (docs/live.md), for any static host or for opening from disk.
"""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

import glasshouse as gh
from glasshouse import pretrained
from glasshouse.errors import InputError

SITE = Path(__file__).parents[1] / "build" / "site"
LIMIT = 40_000_000  # bytes of all pages: free hosts have a few times that
MODELS = {
    "python-3m": "a decoder of Python code",
    "english-4m": "a decoder of plain English",
    "dates-1m": "an encoder-decoder that reads dates",
}
INDEX = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Glasshouse: live pages</title>
<style>
body {{ font: 1.1rem/1.6 system-ui, sans-serif; max-width: 40rem; margin: 3rem auto; padding: 0 1rem; }}
</style>
</head>
<body>
<h1>Small transformers, alive in your browser</h1>
<p>Each page is one file with a trained model inside. Type a text, let it write, ablate heads, look at every number.
Nothing is installed, and nothing is sent.</p>
<ul>
{items}</ul>
<p><a href="../index.html">Glasshouse</a> trained them, and makes such a page of your own model.</p>
</body>
</html>
"""


def write_pages(folder: Path) -> int:
    """Write a page for each model, and one that lists them; return the bytes of all."""
    folder.mkdir(parents=True, exist_ok=True)
    items = ""
    for name, what in MODELS.items():
        path = folder / f"{name}.html"
        model, tok = gh.load(name)
        loader = gh.page.ModelLoader.from_model(model, tok, name=name)
        gh.page.Look(gh.page.TraceCache(loader), {"text": pretrained.PROMPTS[name]}).save(path, live=True)
        items += f'<li><a href="{name}.html">{name}</a>, {escape(what)} ({path.stat().st_size / 1e6:.0f} MB)</li>\n'
    (folder / "index.html").write_text(INDEX.format(items=items), encoding="utf-8")
    size = sum(path.stat().st_size for path in folder.iterdir())
    if size > LIMIT:
        raise InputError(f"the live pages have {size:,} bytes, but the limit is {LIMIT:,}; leave out a model.")
    return size


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else SITE / "live"
    print(f"{folder / 'index.html'}: {write_pages(folder):,} bytes")
