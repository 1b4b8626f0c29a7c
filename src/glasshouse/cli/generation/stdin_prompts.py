"""Many prompts, given or from standard input, one per line: prefetched, batched, and printed in order."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from queue import Empty, Queue
from threading import Thread

import typer

import glasshouse as gh
from glasshouse.cli import screen
from glasshouse.cli.generation import streaming

STDIN = 0
WINDOW = 8  # lines in memory per slot: those after a slow one complete while it runs


class GivenTexts:
    """Texts that are all known."""

    noun = "text"

    def __init__(self, texts: Sequence[bytes]) -> None:
        self.n_bytes = sum(map(len, texts))
        self._texts = deque(texts)

    def take(self, *, wait: bool) -> bytes | None:
        """Return the next text; None at the end."""
        return self._texts.popleft() if self._texts else None


class StdinLines:
    """The lines of stdin, prefetched by a thread, so that a slow writer delays no completion."""

    noun = "line"

    def __init__(self, limit: int) -> None:
        self.n_bytes = os.fstat(STDIN).st_size  # of a file; bytes from a pipe are counted as they are read
        self._queue: Queue[bytes | OSError | None] = Queue(limit)
        self._ended = False
        self._error: OSError | None = None
        Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        end, read = None, 0
        try:
            # Its own file object: at exit, the interpreter waits for the lock of sys.stdin.
            with os.fdopen(STDIN, "rb", closefd=False) as file:
                for line in file:
                    read += len(line)
                    self.n_bytes = max(self.n_bytes, read)
                    self._queue.put(line)
        except OSError as error:
            end = error
        self._queue.put(end)

    def take(self, *, wait: bool) -> bytes | None:
        """Return the next line; None at the end, or if none is available yet and not `wait`."""
        if not self._ended:
            try:
                line = self._queue.get(block=wait)
            except Empty:
                return None
            if isinstance(line, bytes):
                return line
            self._ended, self._error = True, line
        if self._error is not None and wait:
            raise self._error
        return None


@dataclass
class _Line:
    """A prompt from stdin, and its requests."""

    size: int  # bytes, line ending included
    prompt: bytes
    requests: list[gh.generation.Request] = field(default_factory=list)
    error: str = ""  # why it was refused

    def output(self, n: int, as_json: bool, tok: gh.Tokenizer | None) -> list[str]:
        """Return the lines of output: one per completion in JSON, else always `n`."""
        if as_json and self.error:
            return [json.dumps({"prompt": streaming.readable(self.prompt), "error": self.error})]
        found = [one for request in self.requests for one in request.completions()] if not self.error else []
        if as_json:
            return [streaming.as_json(self.prompt, one) for one in found]
        texts = [streaming.shown(one, tok).replace("\n", r"\n").replace("\r", r"\r") for one in found]
        return [*texts, *[""] * (n - len(texts))]


def generate_lines(
    engine: gh.Engine, options: gh.SamplingParams, n: int, as_json: bool, given: GivenTexts | None = None
) -> None:
    """Print the completions of each text or line of stdin, in order; an error in one does not stop the others."""
    began = time.perf_counter()
    out = sys.stdout  # a progress bar replaces sys.stdout
    lines = StdinLines(WINDOW * len(engine.slots)) if given is None else given
    count = failed = done = tokens = 0
    lengths = streaming.LengthWarnings(engine)
    with nullcontext(gh.text.bpe.training.no_progress) if out.isatty() else screen.progress() as progress:
        for count, line in enumerate(_in_order(engine, lines, options, n), 1):
            for text in line.output(n, as_json, engine.tok):
                print(streaming.fit(text), file=out)
            out.flush()
            if line.error:
                print(f"error: {lines.noun} {count}: {line.error}", file=sys.stderr)
                failed += 1
            done += line.size
            tokens += sum(len(request.ids) for request in line.requests)
            for request in line.requests:
                lengths.add(request)
            progress("generating", done, lines.n_bytes)
    refused = [f"{failed:,} of them refused"] if failed else []
    streaming.print_throughput(tokens, began, f"{count:,} {lines.noun}s", *refused, *streaming.acceptance(engine))
    lengths.show()
    if failed:
        raise typer.Exit(1)


def _in_order(
    engine: gh.Engine, prompts: StdinLines | GivenTexts, options: gh.SamplingParams, n: int
) -> Iterator[_Line]:
    """Yield each line once it and all before it are done, with a bounded window in memory."""
    window: deque[_Line] = deque()
    limit = WINDOW * len(engine.slots)
    while True:
        while len(window) < limit and (text := prompts.take(wait=not window)) is not None:
            line = _Line(len(text), text.removesuffix(b"\n").removesuffix(b"\r"))
            try:
                ids = streaming.encode(line.prompt, engine.tok, engine.spec)
                line.requests = streaming.submit(engine, ids, options, n)
            except gh.GlasshouseError as error:
                line.error = str(error)
            window.append(line)
        if not window:
            return
        engine.step()
        while window and all(request.done for request in window[0].requests):
            line = window.popleft()
            line.error = line.error or next((one.error for one in line.requests if one.error), "")
            yield line
