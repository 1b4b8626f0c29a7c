"""Screenshots for look.md, taken in Chromium with the bundled models.

python docs/pictures.py [--chromium PATH]
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from urllib.parse import urlencode

from playwright.sync_api import sync_playwright

from glasshouse import pretrained
from glasshouse.page import ModelLoader, Server, TraceCache

CODE, DATE = pretrained.PROMPTS["python-3m"], pretrained.PROMPTS["dates-1m"]
EDITS = [
    {"kind": "scale", "site": "z.3[head=1]", "factor": 0},
    {"kind": "scale", "site": "ffn_out.2", "factor": 0.5},
]
PICTURES = {
    "tokens": ("python-3m", {"text": CODE}),
    "attention": ("python-3m", {"text": CODE, "view": "attention", "layer": 3, "head": 1}),
    "residual": ("python-3m", {"text": CODE, "view": "residual"}),
    "interventions": (
        "python-3m",
        {"text": CODE, "view": "interventions", "layer": 3, "head": 1, "edits": json.dumps(EDITS)},
    ),
    "walkthrough": (
        "python-3m",
        {"text": CODE, "view": "walkthrough", "layer": 1, "walkthrough_card": "attention:scores"},
    ),
    "seq2seq": ("dates-1m", {"text": DATE, "view": "seq2seq"}),
    "run": ("python-3m", {"text": CODE, "view": "run"}),
}


def main() -> None:
    """Take all screenshots."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chromium", default=shutil.which("chromium"))
    arguments = parser.parse_args()
    out = Path(__file__).parent / "pictures"
    out.mkdir(exist_ok=True)
    servers = {name: Server(TraceCache(ModelLoader(name))) for name in {name for name, _ in PICTURES.values()}}
    for server in servers.values():
        server.start()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=arguments.chromium, args=["--no-sandbox"])
        for name, (run, state) in PICTURES.items():
            page = browser.new_context(viewport={"width": 1180, "height": 1180}).new_page()
            page.goto(f"{servers[run].address}#{urlencode(state)}")
            page.wait_for_selector("body[data-busy=false] .view", timeout=60_000)
            page.wait_for_timeout(1000)  # curves and tiles settle
            page.screenshot(path=out / f"{name}.png")
            print(out / f"{name}.png")
            page.context.close()
        browser.close()
    for server in servers.values():
        server.close()


if __name__ == "__main__":
    main()
