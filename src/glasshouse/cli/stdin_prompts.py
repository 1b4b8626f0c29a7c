"""A prompt on each line of standard input: read ahead, answered side by side, written in order."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from queue import Empty, Queue
from threading import Thread

import typer

import glasshouse as gh
from glasshouse.cli import screen, streaming

STDIN = 0
WINDOW = 8  # lines in memory for each slot: those behind a slow one are finished while it is waited for


class _Lines:
    """The lines of stdin, which a thread reads ahead, so that whoever writes them slowly holds up no completion."""

    def __init__(self, most: int) -> None:
        self.n_bytes = os.fstat(STDIN).st_size  # of a file; what comes through a pipe is counted as it is read
        self._queue: Queue[bytes | OSError | None] = Queue(most)
        self._ended = False
        self._error: OSError | None = None
        Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        end, read = None, 0
        try:
            # A file of its own: a program that ends waits for the lock of sys.stdin.
            with os.fdopen(STDIN, "rb", closefd=False) as file:
                for line in file:
                    read += len(line)
                    self.n_bytes = max(self.n_bytes, read)
                    self._queue.put(line)
        except OSError as error:
            end = error
        self._queue.put(end)

    def take(self, *, wait: bool) -> bytes | None:
        """Return the next line; None at the end, or where none is there yet and it is not to be waited for."""
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
    """A prompt on stdin, and what became of it."""

    size: int  # bytes with its end
    prompt: bytes
    requests: list[gh.generation.Request] = field(default_factory=list)
    error: str = ""  # why it could not be taken

    def output(self, n: int, as_json: bool) -> list[str]:
        """Return its lines of output: in JSON one for each completion, else `n`, whatever there is."""
        if as_json and self.error:
            return [json.dumps({"prompt": streaming.readable(self.prompt), "error": self.error})]
        found = [one for request in self.requests for one in request.completions()] if not self.error else []
        if as_json:
            return [streaming.as_json(self.prompt, one) for one in found]
        texts = [one.text.replace("\n", r"\n").replace("\r", r"\r") for one in found]
        return [*texts, *[""] * (n - len(texts))]


def generate_lines(engine: gh.Engine, options: gh.SamplingParams, n: int, as_json: bool) -> None:
    """Print what continues each line of stdin, in their order; a line that cannot be taken stops no other."""
    began = time.perf_counter()
    out = sys.stdout  # while there is a bar, sys.stdout is its
    lines = _Lines(WINDOW * len(engine.slots))
    count = failed = done = tokens = 0
    lengths = streaming.LengthWarnings(engine)
    with nullcontext(gh.text.tokenizer_training.no_progress) if out.isatty() else screen.progress() as progress:
        for count, line in enumerate(_in_order(engine, lines, options, n), 1):
            for text in line.output(n, as_json):
                print(streaming.fit(text), file=out)
            out.flush()
            if line.error:
                print(f"error: line {count}: {line.error}", file=sys.stderr)
                failed += 1
            done += line.size
            tokens += sum(len(request.ids) for request in line.requests)
            for request in line.requests:
                lengths.look(request)
            progress("generating", done, lines.n_bytes)
    streaming.report(tokens, began, f"{count:,} lines", *([f"{failed:,} of them refused"] if failed else []))
    lengths.tell()
    if failed:
        raise typer.Exit(1)


def _in_order(engine: gh.Engine, prompts: _Lines, options: gh.SamplingParams, n: int) -> Iterator[_Line]:
    """Yield each line once it and all before it are done; only a window of them is in memory."""
    window: deque[_Line] = deque()
    most = WINDOW * len(engine.slots)
    while True:
        while len(window) < most and (text := prompts.take(wait=not window)) is not None:
            line = _Line(len(text), text.removesuffix(b"\n").removesuffix(b"\r"))
            try:
                line.requests = streaming.submit(engine, line.prompt, options, n)
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
