"""Latency and memory of the page, on a GPT-2-small shape with random weights, in Chromium.

    python benchmarks/page.py [--rounds 5] [--parts open overview head ablation lens scroll notes] [--long 4096]
        [--threads 2] [--chromium PATH]

open: from navigation to the first paint and the tokens, and from a new text of 512 tokens to its first numbers,
compared with one forward pass of the model on as many tokens.
overview: from a new text of 64 tokens to its picture of the whole model.
head: from selecting another head to its map and its query-key view.
ablation: from ablating a head to the new numbers, in the first and in the last layer, compared with one forward pass.
lens: one window of the logit lens, and the server's memory meanwhile, compared with all logits.
scroll: frame times while a long map is scrolled and zoomed, tiles fetched, and the server's memory.
notes: from navigation to the first card with its figure, on the bundled python-3m; on the GPT-2-small shape, from
opening each card to its figure, compared with one forward pass on the notes' text.

All times are medians over the rounds with minimum and maximum; a frame is the time between two repaints. The server
runs in its own process.
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
from figures import add_save, record, save
from playwright.sync_api import Browser, Page, sync_playwright

import glasshouse as gh
from glasshouse import notes

LENGTH, SHORT = 512, 64
# Acts on the page and returns the time until everything is drawn.
UNTIL_DRAWN = """async (act) => {
  const frame = () => new Promise((done) => requestAnimationFrame(done));
  const start = performance.now();
  const old = act.replaced && document.querySelector(act.replaced);
  if (act.hash !== undefined) {
    const heard = new Promise((done) => addEventListener("popstate", done, { once: true }));
    location.hash = act.hash;
    await heard;
  }
  if (act.key) document.body.dispatchEvent(new KeyboardEvent("keydown", { key: act.key, bubbles: true }));
  if (act.replaced) {
    do await frame(); while ([old, null].includes(document.querySelector(act.replaced)));
    return performance.now() - start;
  }
  do await frame(); while (document.body.dataset.busy !== "false");
  return performance.now() - start;
}"""
TILES = """() => performance.getEntriesByType("resource")
  .filter((one) => one.name.endsWith("/api/tile")).map((one) => one.responseEnd - one.requestStart)"""
# In browser time, which starts with the navigation.
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


NOTES_TEXT = next(one.text for one in notes.EXAMPLES if one.text.startswith("Sarah"))


def make_model(folder: Path) -> None:
    """Save a GPT-2-small shape with a long context, and a tokenizer trained on the standard library."""
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
def served(folder: Path | str, threads: int) -> Iterator[tuple[str, int]]:
    """Serve a model with the command; yield its address and process id."""
    command = [sys.executable, "-c", "from glasshouse.cli import main; main()", "look", str(folder), "--no-browser"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    try:
        address = next(line for line in process.stdout if line.startswith("http")).strip()
        yield address.partition("#")[0], process.pid
    finally:
        process.terminate()
        process.wait()


def memory(pid: int, what: str = "VmRSS") -> float:
    """Return the resident memory of a process in MiB, or with VmHWM its peak."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what)) / 1024


def summary(times: list[float]) -> str:
    return f"{statistics.median(times):8.1f} ms  [{min(times):.1f} - {max(times):.1f}]"


def fragment(**state: object) -> str:
    return urllib.parse.urlencode(
        {name: one if isinstance(one, str) else json.dumps(one) for name, one in state.items()}
    )


class Bench:
    """One server, one browser, and the forward pass as the reference."""

    def __init__(self, folder: Path, address: str, pid: int, browser: Browser, rounds: int, long: int) -> None:
        self.model, tok = gh.load(folder)
        assert tok is not None
        self.tok, self.address, self.pid, self.browser = tok, address, pid, browser
        self.rounds, self.long = rounds, long

    def forward(self, length: int = LENGTH) -> list[float]:
        """Return the milliseconds of forward passes in this process, after a warm-up."""
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
            page.goto(f"{self.address}#{fragment(view='tokens', text=text_of(self.tok, LENGTH, 100 + number))}")
            page.wait_for_selector("body[data-busy=false] .view", timeout=60_000)
            seen = page.evaluate("window.seen")
            shell.append(seen["shell"])
            tokens.append(seen["tokens"])
            hash_ = fragment(view="tokens", text=text_of(self.tok, LENGTH, 200 + number))
            first.append(page.evaluate(UNTIL_DRAWN, {"hash": hash_, "replaced": "[data-testid=next] > *"}))
            page.wait_for_selector("body[data-busy=false] .view", timeout=60_000)
            page.context.close()
        print(f"one forward pass, {LENGTH} tokens      {summary(one)}")
        print(f"first paint                        {summary(shell)}")
        print(f"tokens                             {summary(tokens)}    target: 1,000 ms")
        record("page.shell", shell, 0, "ms")
        record("page.tokens", tokens, 0, "ms")
        ratio = statistics.median(first) / statistics.median(one)
        print(f"first numbers of a new text        {summary(first)}    {ratio:.2f} forward passes, target: 1.3")
        record("page.first", ratio, 2)

    def overview(self) -> None:
        one = statistics.median(self.forward(SHORT))
        page = self.page(text=text_of(self.tok, SHORT))
        times = []
        for number in range(self.rounds):
            hash_ = fragment(text=text_of(self.tok, SHORT, 300 + number))
            times.append(page.evaluate(UNTIL_DRAWN, {"hash": hash_, "replaced": ".overview-picture"}))
            page.wait_for_selector("body[data-busy=false] .view", timeout=60_000)
        passes = f"{statistics.median(times) / one:.2f} forward passes"
        print(f"the overview of {SHORT} tokens          {summary(times)}    {passes}, target: 1,000 ms")
        record("page.overview", times, 0, "ms")
        page.context.close()

    def head(self) -> None:
        page = self.page(text=text_of(self.tok, LENGTH), view="attention")
        times = [page.evaluate(UNTIL_DRAWN, {"key": "."}) for _ in range(self.rounds + 1)][1:]
        layers = [page.evaluate(UNTIL_DRAWN, {"key": "]"}) for _ in range(self.rounds)]
        tiles = page.evaluate(TILES)
        print(f"another head                       {summary(times)}    target: 100 ms")
        record("page.head", times, 0, "ms")
        print(f"  of which one tile of its map     {summary(tiles)}    from request to last byte")
        print(f"another layer                      {summary(layers)}")
        page.context.close()

    def ablation(self) -> None:
        one = statistics.median(self.forward())
        text = text_of(self.tok, LENGTH)
        page = self.page(view="tokens", text=text)
        for layer in (0, self.model.spec.n_layers - 1):
            times = []
            for head in range(self.rounds):
                edits = [{"kind": "scale", "site": f"z.{layer}[head={head}]", "factor": 0}]
                times.append(page.evaluate(UNTIL_DRAWN, {"hash": fragment(view="tokens", text=text, edits=edits)}))
            ratio = statistics.median(times) / one
            print(f"a head of layer {layer:2d} ablated           {summary(times)}    {ratio:.2f} forward passes")
        page.context.close()

    def lens(self) -> None:
        page = self.page(text=text_of(self.tok, LENGTH))
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")  # reset the peak
        before = memory(self.pid)
        times = []
        for number in range(self.rounds):
            state = fragment(text=text_of(self.tok, LENGTH), view="residual", token=32 * number)
            times.append(page.evaluate(UNTIL_DRAWN, {"hash": state}))
        s = self.model.spec
        whole = (s.n_layers + 1) * LENGTH * s.vocab_size * 4 / 2**20
        grown = memory(self.pid, "VmHWM") - before
        print(f"a window of the logit lens         {summary(times)}")
        print(f"peak growth of server memory       {grown:8.1f} MiB   all logits would be {whole:,.0f} MiB")
        page.context.close()

    def scroll(self) -> None:
        page = self.page(text=text_of(self.tok, self.long), view="attention")
        tiles: list[str] = []
        page.on("request", lambda request: tiles.append(request.url) if request.url.endswith("/tile") else None)
        before = memory(self.pid)
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")
        frames = [one for _ in range(self.rounds) for one in page.evaluate(SCROLL)]
        ordered = sorted(frames)
        late = ordered[int(0.95 * len(ordered))]
        share = sum(one < 34 for one in frames) / len(frames)
        print(f"a frame while scrolling {self.long} tokens {summary(frames)}    95% below {late:.1f} ms")
        record("page.frame", frames, 0, "ms")
        print(
            f"frames under 34 ms                 {share:8.1%}    {len(tiles)} tiles fetched in {self.rounds} rounds"
        )
        print(f"server memory                      {before:8.0f} MiB before, {memory(self.pid, 'VmHWM'):.0f} peak")
        page.context.close()

    def notes(self) -> None:
        with served("python-3m", torch.get_num_threads()) as (address, _):
            first = []
            for _ in range(self.rounds):
                page = self.browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
                page.goto(f"{address}#notes/T1")
                page.wait_for_selector(".card.open .figure-box .piece")
                first.append(page.evaluate("performance.now()"))
                page.context.close()
        print(f"first card of the notes, python-3m {summary(first)}    target: 1,000 ms")
        record("page.notes", first, 0, "ms")
        one = self.forward(len(self.tok.encode(NOTES_TEXT)))
        page = self.page(text=NOTES_TEXT, view="notes")
        page.evaluate(UNTIL_DRAWN, {"hash": "notes/V3"})
        times = {}
        for statement in (card for part in notes.parts() for card in part.statements):
            drawn = page.evaluate(UNTIL_DRAWN, {"hash": f"notes/{statement.number}"})
            times[statement.number] = drawn / statistics.median(one)
        within = sum(ratio <= 3 for ratio in times.values())
        print(f"one forward pass, the notes' text   {summary(one)}")
        print(f"cards drawn within 3 of them       {within} of {len(times)}; the slowest, in forward passes:")
        slowest = sorted(times.items(), key=lambda item: -item[1])[:10]
        print("  " + ", ".join(f"{number} {ratio:.1f}" for number, ratio in slowest))
        page.context.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--parts", nargs="+", default=["open", "overview", "head", "ablation", "lens", "scroll", "notes"]
    )
    parser.add_argument("--long", type=int, default=4096, help="tokens of the scrolled map")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--chromium", default=shutil.which("chromium"))
    add_save(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as directory, sync_playwright() as playwright:
        folder = Path(directory) / "gpt2-small"
        make_model(folder)
        browser = playwright.chromium.launch(
            executable_path=arguments.chromium, args=["--no-sandbox", "--disable-gpu"]
        )
        with served(folder, arguments.threads) as (address, pid):
            bench = Bench(folder, address, pid, browser, arguments.rounds, arguments.long)
            for part in arguments.parts:
                getattr(bench, part)()
        browser.close()
    save(arguments.save)


if __name__ == "__main__":
    main()
