"""A browser on the page, and small models trained for it, one of each kind."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlencode

import chromium
import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

import glasshouse as gh
from glasshouse.page.model_loader import ModelLoader
from glasshouse.page.server import Server
from glasshouse.page.trace import TraceCache

SCREENS = Path(__file__).parents[2] / "build" / "screens"
POEM = """the cat sat on the mat and the dog sat on the rug.
the cat saw the dog and the dog saw the cat.
a bird sang in the tree, and the cat heard the bird sing.
the dog ran to the tree and the bird flew to the house.
"""

POLL_SOONER = """{
  const { setInterval } = window;
  window.setInterval = (poll, pause, ...rest) => setInterval(poll, pause < 1000 ? pause : pause / 10, ...rest);
}"""

WAIT = 60_000  # milliseconds: what is waited for comes at once on an idle machine and late on a busy one
expect.set_options(timeout=WAIT)

Trained = tuple[gh.models.Model, gh.Tokenizer]
Visit = Callable[..., Page]

# What is the same for all kinds is tried on one; `make page` tries the others.
ONE_KIND = ["decoder", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("encoder", "pair"))]


def _train(folder: Path, table: dict[str, dict[str, object]]) -> Path:
    table["train"] |= {"out": str(folder / "run"), "device": "cpu", "compile": "no", "workers": 0}
    gh.train(gh.Run.from_dict(table))
    return folder / "run"


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run: a decoder that learned a small text."""
    folder = tmp_path_factory.mktemp("decoder")
    (folder / "text.txt").write_text(POEM * 30)
    return _train(
        folder,
        {
            "model": {"preset": "tiny-decoder"},
            "data": {"path": str(folder / "text.txt"), "seq_len": 48, "vocab_size": 300},
            "train": {"steps": 60, "batch_tokens": 384, "lr": 5e-3, "save_every": 20, "eval_every": 20},
        },
    )


@pytest.fixture(scope="session")
def decoder(run_folder: Path) -> Trained:
    return _loaded(run_folder)


@pytest.fixture(scope="session")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """An encoder that fills in what is hidden."""
    folder = tmp_path_factory.mktemp("encoder")
    (folder / "text.txt").write_text(POEM * 30)
    return _loaded(
        _train(
            folder,
            {
                "model": {"preset": "tiny-encoder"},
                "data": {"path": str(folder / "text.txt"), "seq_len": 48, "vocab_size": 300},
                "train": {
                    "steps": 60,
                    "batch_tokens": 384,
                    "eval_every": 60,
                    "lr": 5e-3,
                    "probes": [],
                    "sample_prompts": 0,
                    "keep_snapshots": 0,
                },
            },
        )
    )


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """An encoder-decoder that translates a few words."""
    folder = tmp_path_factory.mktemp("pair")
    english, german = (
        ["one", "two", "three", "four", "five", "six"],
        ["eins", "zwei", "drei", "vier", "fünf", "sechs"],
    )
    lines = ["source\ttarget"]
    for a in range(6):
        for b in range(6):
            for c in range(6):
                lines.append(" ".join(english[i] for i in (a, b, c)) + "\t" + " ".join(german[i] for i in (a, b, c)))
    (folder / "pairs.tsv").write_text("\n".join(lines * 3) + "\n")
    return _loaded(
        _train(
            folder,
            {
                "model": {"preset": "tiny-seq2seq"},
                "data": {"path": str(folder / "pairs.tsv"), "kind": "pairs", "seq_len": 24, "vocab_size": 300},
                "train": {
                    "steps": 80,
                    "batch_tokens": 384,
                    "eval_every": 80,
                    "lr": 5e-3,
                    "probes": [],
                    "sample_prompts": 0,
                    "keep_snapshots": 0,
                },
            },
        )
    )


def _loaded(run: Path) -> Trained:
    model, tok = gh.load(run / "model")
    assert tok is not None
    return model, tok


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    found = chromium.find()
    if found is None:
        (pytest.fail if chromium.is_required() else pytest.skip)(chromium.MISSING)
    with sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu", "--in-process-gpu"]
        browser = playwright.chromium.launch(executable_path=found, args=flags)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def servers() -> Iterator[dict[gh.models.Model, Server]]:
    """One server for each model, which all visits share; they share its forward passes too."""
    started: dict[gh.models.Model, Server] = {}
    yield started
    for server in started.values():
        server.close()


@pytest.fixture
def visit(browser: Browser, servers: dict[gh.models.Model, Server]) -> Iterator[Visit]:
    """Open the page on a model, or on a folder, at a state; what goes wrong in the browser fails the test."""
    troubles: list[str] = []
    closing: list[Callable[[], None]] = []

    def open_page(
        what: Trained | Path | str,
        *,
        width: int = 1280,
        height: int = 900,
        dark: bool = False,
        wait: bool = True,
        traces: TraceCache | None = None,
        **state: object,
    ) -> Page:
        if isinstance(what, tuple) and traces is None:
            if what[0] not in servers:
                servers[what[0]] = started(TraceCache(ModelLoader.from_model(*what)))
            server = servers[what[0]]
        else:
            server = started(traces or TraceCache(ModelLoader(what)))
            closing.append(threading.Thread(target=server.close).start)  # takes a tenth of a second
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light"
        )
        closing.append(context.close)
        context.add_init_script(POLL_SOONER)
        page = context.new_page()
        page.set_default_timeout(WAIT)
        own = f"http://127.0.0.1:{server.port}/"

        def asked(url: str) -> None:
            if not url.startswith((own, "data:", "blob:")):
                troubles.append(f"a request left the page: {url}")

        page.on("request", lambda request: asked(request.url))
        page.on("pageerror", lambda error: troubles.append(f"an error in the page: {error}"))
        page.on("console", lambda line: troubles.append(line.text) if is_trouble(line) else None)
        page.goto(f"{server.address}#{fragment(state)}")
        if wait:
            settle(page)
        return page

    yield open_page
    for close in reversed(closing):
        close()
    assert not troubles, troubles


def started(traces: TraceCache) -> Server:
    server = Server(traces)
    server.start()
    return server


def is_trouble(line: ConsoleMessage) -> bool:
    """Tell what is wrong with the page from what is wrong with a text, which it says itself."""
    said = any(one in line.text for one in ("status of 400", "net::ERR_INTERNET_DISCONNECTED"))
    return line.type in ("error", "warning") and not said


def fragment(state: dict[str, object]) -> str:
    """Return a state as the page's address has it."""
    return urlencode({name: one if isinstance(one, str) else json.dumps(one) for name, one in state.items()})


def settle(page: Page) -> None:
    """Wait until the page has drawn all that it was asked for."""
    page.wait_for_selector(".view")
    page.wait_for_selector("body[data-busy=false]")


@pytest.fixture
def picture() -> Callable[[Page, str], Path]:
    """Keep a picture of a page, for people to look at."""

    def take(page: Page, name: str) -> Path:
        SCREENS.mkdir(parents=True, exist_ok=True)
        path = SCREENS / f"{name}.png"
        page.evaluate("scrollTo(0, 0)")  # what sticks to the top stays there
        page.screenshot(path=path, full_page=True)
        return path

    return take
