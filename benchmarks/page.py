"""What the page costs, on a GPT-2-small shape with random weights: served by its own process, seen in Chromium.

    python benchmarks/page.py [--rounds 5] [--parts open head off lens scroll] [--long 4096] [--threads 2]
        [--chromium PATH]

open: from the navigation to the shell and the tokens, and from a new text of 512 tokens to its first numbers,
beside one forward pass of the model on as many tokens.
head: from choosing another head to its map and its query-key view.
off: from switching a head off to the new numbers, in the first and in the last layer, beside one forward pass.
lens: one window of the lens table, and what the server holds meanwhile, beside all logits there are.
scroll: frames while a long map is scrolled and zoomed, tiles fetched, and the server's memory.

All times are medians over the rounds with the least and the most; a frame is what the browser draws between two
repaints. The server has its own process, so its memory is its own.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from playwright.sync_api import Browser, Page, sync_playwright

import glasshouse as gh

LENGTH = 512
# What is done in the page, and how long until everything that follows from it is drawn.
UNTIL_DRAWN = """async (act) => {
  const frame = () => new Promise((done) => requestAnimationFrame(done));
  const start = performance.now();
  if (act.hash !== undefined) {
    const heard = new Promise((done) => addEventListener("popstate", done, { once: true }));
    location.hash = act.hash;
    await heard;
  }
  if (act.key) document.body.dispatchEvent(new KeyboardEvent("keydown", { key: act.key, bubbles: true }));
  if (act.until) {
    const node = document.querySelector(act.until);
    await new Promise((done) => new MutationObserver(done).observe(node, { childList: true, subtree: true }));
    return performance.now() - start;
  }
  do await frame(); while (document.body.dataset.busy !== "false");
  return performance.now() - start;
}"""
TILES = """() => performance.getEntriesByType("resource")
  .filter((one) => one.name.endsWith("/api/tile")).map((one) => one.responseEnd - one.requestStart)"""
# By the browser's own clock, which starts with the navigation.
WATCH = """
window.seen = {};
new MutationObserver(() => {
  for (const [name, what] of [["shell", ".tabs button"], ["tokens", "[data-testid=strip-text] .token"]]) {
    if (!(name in window.seen) && document.querySelector(what)) window.seen[name] = performance.now();
  }
}).observe(document, { childList: true, subtree: true });
"""
SCROLL = """async () => {
  const map = document.querySelector("[data-testid=map]");
  const frame = () => new Promise((done) => requestAnimationFrame(done));
  for (let i = 0; i < 12; i += 1) { document.querySelector("[data-testid=zoom-in]").click(); await frame(); }
  const times = [];
  let last = performance.now();
  const sizes = [map.scrollWidth - map.clientWidth, map.scrollHeight - map.clientHeight];
  for (let i = 0; i < 300; i += 1) {
    const there = Math.sin((i / 300) * Math.PI);
    map.scrollTo(sizes[0] * there, sizes[1] * there);
    await frame();
    const now = performance.now();
    times.push(now - last);
    last = now;
  }
  return times;
}"""


def make_model(folder: Path) -> None:
    """Write a GPT-2-small shape with room for long texts, and a tokenizer learned from the standard library."""
    sources = [Path(json.__file__), Path(argparse.__file__), Path(subprocess.__file__), Path(tempfile.__file__)]
    tok = gh.Tokenizer.train(files=[str(path) for path in sources], vocab_size=4096)
    gh.save(gh.build(gh.preset("gpt2", max_len=8192)), tok, folder)


def text_of(tok: gh.Tokenizer, length: int, number: int = 0) -> str:
    """Return a text of so many tokens, another for each number."""
    source = Path(argparse.__file__).read_text() + Path(subprocess.__file__).read_text()
    ids = tok.encode(source[number * 397 :])[: length + 8]
    while len(tok.encode(tok.decode(ids))) > length:
        ids = ids[:-1]
    return tok.decode(ids)


@contextmanager
def served(folder: Path, threads: int) -> Iterator[tuple[str, int]]:
    """Serve a model as the command does; yield its address and the number of its process."""
    command = [sys.executable, "-c", "from glasshouse.cli import main; main()", "look", str(folder), "--no-browser"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    try:
        yield next(line for line in process.stdout if line.startswith("http")).strip(), process.pid
    finally:
        process.terminate()
        process.wait()


def memory(pid: int, what: str = "VmRSS") -> float:
    """Return MiB that a process holds, or with VmHWM the most it has held."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what)) / 1024


def said(times: list[float]) -> str:
    return f"{statistics.median(times):8.1f} ms  [{min(times):.1f} - {max(times):.1f}]"


def fragment(**state: object) -> str:
    return urllib.parse.urlencode(
        {name: one if isinstance(one, str) else json.dumps(one) for name, one in state.items()}
    )


class Bench:
    """One server, one browser, and the forward pass that everything is measured by."""

    def __init__(self, folder: Path, address: str, pid: int, browser: Browser, rounds: int, long: int) -> None:
        self.model, tok = gh.load(folder)
        assert tok is not None
        self.tok, self.address, self.pid, self.browser = tok, address, pid, browser
        self.rounds, self.long = rounds, long

    def forward(self, length: int = LENGTH) -> list[float]:
        """Return the milliseconds of single passes in this process, after one to warm up."""
        ids = torch.tensor([self.tok.encode(text_of(self.tok, length))[:length]])
        times = []
        for _ in range(self.rounds + 1):
            start = time.perf_counter()
            with torch.no_grad():
                self.model(ids)
            times.append(1000 * (time.perf_counter() - start))
        return times[1:]

    def page(self, **state: object) -> Page:
        page = self.browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
        page.set_default_timeout(180_000)
        page.goto(f"{self.address}#{fragment(**state)}")
        page.wait_for_selector("body[data-busy=false] .view")
        return page

    def open(self) -> None:
        one = self.forward()
        shell, tokens, first = [], [], []
        for number in range(self.rounds):
            page = self.browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
            page.add_init_script(WATCH)
            page.goto(f"{self.address}#{fragment(text=text_of(self.tok, LENGTH, 100 + number))}")
            page.wait_for_selector("body[data-busy=false] .view", timeout=60_000)
            seen = page.evaluate("window.seen")
            shell.append(seen["shell"])
            tokens.append(seen["tokens"])
            hash_ = fragment(text=text_of(self.tok, LENGTH, 200 + number))
            first.append(page.evaluate(UNTIL_DRAWN, {"hash": hash_, "until": "[data-testid=next]"}))
            page.wait_for_selector("body[data-busy=false] .view", timeout=60_000)
            page.context.close()
        print(f"one forward pass, {LENGTH} tokens      {said(one)}")
        print(f"the shell is there after           {said(shell)}")
        print(f"the tokens are there after         {said(tokens)}    wanted: 1,000 ms")
        ratio = statistics.median(first) / statistics.median(one)
        print(f"the first numbers of a new text    {said(first)}    {ratio:.2f} forward passes, wanted: 1.3")

    def head(self) -> None:
        page = self.page(text=text_of(self.tok, LENGTH), view="attention")
        times = [page.evaluate(UNTIL_DRAWN, {"key": "."}) for _ in range(self.rounds + 1)][1:]
        layers = [page.evaluate(UNTIL_DRAWN, {"key": "]"}) for _ in range(self.rounds)]
        tiles = page.evaluate(TILES)
        print(f"another head                       {said(times)}    wanted: 100 ms")
        print(f"  of which one tile of its map     {said(tiles)}    from the request to its last byte")
        print(f"another layer                      {said(layers)}")
        page.context.close()

    def off(self) -> None:
        one = statistics.median(self.forward())
        text = text_of(self.tok, LENGTH)
        page = self.page(text=text)
        for layer in (0, self.model.spec.n_layers - 1):
            times = []
            for head in range(self.rounds):
                edits = [{"kind": "scale", "site": f"z.{layer}[head={head}]", "by": 0}]
                times.append(page.evaluate(UNTIL_DRAWN, {"hash": fragment(text=text, edits=edits)}))
            ratio = statistics.median(times) / one
            print(f"a head of layer {layer:2d} switched off      {said(times)}    {ratio:.2f} forward passes")
        page.context.close()

    def lens(self) -> None:
        page = self.page(text=text_of(self.tok, LENGTH))
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")  # the most it has held is counted from here
        before = memory(self.pid)
        times = []
        for number in range(self.rounds):
            state = fragment(text=text_of(self.tok, LENGTH), view="stream", token=32 * number)
            times.append(page.evaluate(UNTIL_DRAWN, {"hash": state}))
        s = self.model.spec
        whole = (s.n_layers + 1) * LENGTH * s.vocab_size * 4 / 2**20
        grown = memory(self.pid, "VmHWM") - before
        print(f"a window of the lens table         {said(times)}")
        print(f"the server grew by at most         {grown:8.1f} MiB   all logits would be {whole:,.0f} MiB")
        page.context.close()

    def scroll(self) -> None:
        page = self.page(text=text_of(self.tok, self.long), view="attention")
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url) if request.url.endswith("/tile") else None)
        before = memory(self.pid)
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")
        frames = [one for _ in range(self.rounds) for one in page.evaluate(SCROLL)]
        ordered = sorted(frames)
        late = ordered[int(0.95 * len(ordered))]
        share = sum(one < 34 for one in frames) / len(frames)
        print(f"a frame while scrolling {self.long} tokens {said(frames)}    95% below {late:.1f} ms")
        print(
            f"frames in less than 34 ms          {share:8.1%}    {len(asked)} tiles fetched in {self.rounds} rounds"
        )
        print(f"the server's memory                {before:8.0f} MiB before, {memory(self.pid, 'VmHWM'):.0f} at most")
        page.context.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parts", nargs="+", default=["open", "head", "off", "lens", "scroll"])
    parser.add_argument("--long", type=int, default=4096, help="tokens of the map that is scrolled")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--chromium", default=shutil.which("chromium"))
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    with tempfile.TemporaryDirectory() as place, sync_playwright() as playwright:
        folder = Path(place) / "gpt2-small"
        make_model(folder)
        browser = playwright.chromium.launch(executable_path=given.chromium, args=["--no-sandbox", "--disable-gpu"])
        with served(folder, given.threads) as (address, pid):
            bench = Bench(folder, address, pid, browser, given.rounds, given.long)
            for part in given.parts:
                getattr(bench, part)()
        browser.close()


if __name__ == "__main__":
    main()
