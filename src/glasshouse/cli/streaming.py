"""What every way to generate needs: requests to an engine, their text as it comes, Ctrl-C, and how it went."""

from __future__ import annotations

import json
import signal
import sys
import time
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console

import glasshouse as gh
from glasshouse.cli import screen
from glasshouse.escaping import escape_control

INTERRUPTED = 130  # what shells call the end by Ctrl-C


def submit(engine: gh.Engine, prompt: bytes, options: gh.SamplingParams, n: int) -> list[gh.generation.Request]:
    """Ask for `n` completions of a prompt: a sample is a request of its own, a search is one for all."""
    if options.beams > 1:
        return [engine.submit(prompt, options, n_best=n)]
    return [engine.submit(prompt, one) for one in options.with_seeds(n)]


def write(text: Iterable[str]) -> None:
    """Print a text as it comes, and a newline whatever happens."""
    try:
        for piece in text:
            print(fit(piece), end="", flush=True)
    finally:
        print(flush=True)


def pieces(engine: gh.Engine, request: gh.generation.Request, caught: list[int]) -> Iterator[str]:
    """Yield the text of a request as it comes; Ctrl-C cancels it after a step, so that the engine can go on."""
    while not request.done:
        engine.step()
        if caught:
            engine.cancel(request)
        yield request.take_text()
    yield request.take_text()


class LengthWarnings:
    """Collects which completions were cut short, or outgrew the model, and says so in one line."""

    def __init__(self, engine: gh.Engine) -> None:
        self._spec = engine.spec
        self._first = ""
        self._count = self._of = 0

    def look(self, request: gh.generation.Request) -> None:
        """Count a request that is done."""
        sentence = gh.generation.length_warning(self._spec, request)
        self._first = self._first or sentence or ""
        self._count += sentence is not None
        self._of += 1

    def tell(self) -> None:
        """Print the line, if there is anything to say."""
        if self._first:
            more = "" if self._of == 1 else f"{self._count:,} of {self._of:,} completions, such as this: "
            screen.warn(more + self._first)


@contextmanager
def interrupts() -> Iterator[list[int]]:
    """Collect Ctrl-C instead of stopping at once; a second one does stop, and one that is ignored stays so."""
    caught: list[int] = []

    def catch(number: int, frame: object) -> None:
        if caught:
            raise KeyboardInterrupt
        caught.append(number)

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, catch)
    try:
        yield caught
    finally:
        signal.signal(signal.SIGINT, before)


def fit(text: str) -> str:
    """Return a text as stdout may have it: a terminal gets no control characters but line breaks and tabs."""
    if not sys.stdout.isatty():
        return text
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else escape_control(c) for c in text)


def as_json(prompt: bytes, one: gh.Completion) -> str:
    """Return a completion as a line of JSON; a score is there if a search gave one."""
    table = {
        "prompt": readable(prompt),
        "text": one.text,
        "ids": one.ids,
        "logprobs": one.logprobs,
        "finish_reason": one.finish_reason,
    }
    return json.dumps(table if one.score is None else {**table, "score": one.score})


def readable(prompt: bytes) -> str:
    r"""Return a prompt as a text, a byte that is no character as \xNN.

    >>> print(readable(b"caf\xe9"))
    caf\xe9
    """
    return prompt.decode(errors="backslashreplace")


def report(tokens: int, began: float, *more: str) -> None:
    """Say at a terminal how much was written, how fast, and what else there is to say."""
    if not sys.stderr.isatty():
        return
    speed = tokens / (time.perf_counter() - began)
    line = ", ".join((f"{tokens:,} {'token' if tokens == 1 else 'tokens'}", f"{speed:,.1f} tokens/s", *more))
    there = Console(stderr=True, highlight=False)
    there.print(line, style="" if there.no_color else "dim")
