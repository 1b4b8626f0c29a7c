"""Shared by `translate` and all modes of `generate`: options, requests, streamed output, Ctrl-C, and throughput."""

from __future__ import annotations

import json
import signal
import sys
import time
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console

import glasshouse as gh
from glasshouse.cli import screen
from glasshouse.escaping import escape_control
from glasshouse.generation.sampling_params import HELP

ROOM = 4096  # default limit on max_len for stdin prompts and chat: the KV cache is allocated for it
INTERRUPTED = 130  # exit code after Ctrl-C


def sampling(name: str, **more: Any) -> Any:  # noqa: ANN401 - typer's own types
    """Return the option of a sampling parameter, with its help text."""
    return typer.Option(help=HELP[name], **more)


def room(s: gh.spec.Spec, options: gh.SamplingParams) -> int:
    """Return the tokens to allocate for each sequence, where the prompts are not known yet."""
    limit = s.position_limit
    return min(s.max_len + options.max_new_tokens if limit is None else limit, ROOM)


def submit(engine: gh.Engine, ids: list[int], options: gh.SamplingParams, n: int) -> list[gh.generation.Request]:
    """Submit requests for `n` completions of an encoded prompt: one per sample, or one for beam search."""
    if options.beams > 1:
        return [engine.submit_ids(ids, options, n_best=n)]
    return [engine.submit_ids(ids, one) for one in options.with_seeds(n)]


def encode(prompt: bytes, tok: gh.Tokenizer | None, spec: gh.spec.Spec) -> list[int]:
    """Return the ids of a prompt as it was typed; without a tokenizer, those written in it."""
    given = gh.models.prompt.written_ids(readable(prompt)) if tok is None else prompt
    return gh.models.prompt.encode_prompt(given, tok, spec)


def shown(one: gh.Completion, tok: gh.Tokenizer | None) -> str:
    """Return the text of a completion; without a tokenizer, its ids."""
    return " ".join(map(str, one.ids)) if tok is None else one.text


def write(text: Iterable[str]) -> None:
    """Stream a text to stdout, ended by a newline even on an error."""
    try:
        for piece in text:
            print(fit(piece), end="", flush=True)
    finally:
        print(flush=True)


def pieces(engine: gh.Engine, request: gh.generation.Request, caught: list[int]) -> Iterator[str]:
    """Yield the text of a request as it is generated; Ctrl-C cancels it after a step, so the engine stays usable."""
    written = 0

    def take() -> str:
        nonlocal written
        if engine.tok is not None:
            return request.take_text()
        new, first = request.ids[written:], written == 0
        written += len(new)
        return " ".join([*([] if first else [""]), *map(str, new)]) if new else ""

    while not request.done:
        engine.step()
        if caught:
            engine.cancel(request)
        yield take()
    yield take()


class LengthWarnings:
    """Collects completions that were truncated, or exceed the model's max_len, for one warning."""

    def __init__(self, engine: gh.Engine) -> None:
        self._spec = engine.spec
        self._first = ""
        self._count = self._total = 0

    def add(self, request: gh.generation.Request) -> None:
        """Add a finished request."""
        message = gh.generation.length_warning(self._spec, request)
        self._first = self._first or message or ""
        self._count += message is not None
        self._total += 1

    def show(self) -> None:
        """Print the warning, if there is one."""
        if self._first:
            more = "" if self._total == 1 else f"{self._count:,} of {self._total:,} completions, the first: "
            screen.warn(more + self._first)


@contextmanager
def interrupts() -> Iterator[list[int]]:
    """Collect Ctrl-C instead of stopping; a second one stops. SIGINT stays ignored if it was."""
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
    """Escape control characters except newlines and tabs, if stdout is a terminal."""
    if not sys.stdout.isatty():
        return text
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else escape_control(c) for c in text)


def as_json(prompt: bytes, one: gh.Completion) -> str:
    """Return a completion as a line of JSON, with a score if it is from beam search."""
    table = {
        "prompt": readable(prompt),
        "text": one.text,
        "ids": one.ids,
        "logprobs": one.logprobs,
        "finish_reason": one.finish_reason,
    }
    return json.dumps(table if one.score is None else {**table, "score": one.score})


def readable(prompt: bytes) -> str:
    r"""Decode a prompt, with invalid bytes as \xNN.

    >>> print(readable(b"caf\xe9"))
    caf\xe9
    """
    return prompt.decode(errors="backslashreplace")


def acceptance(engine: gh.Engine) -> tuple[str, ...]:
    """Return how far drafts were accepted, if any were made."""
    found = engine.speculation
    if not found.n_drafts:
        return ()
    return f"{found.tokens_per_pass:.2f} tokens per pass", f"{found.acceptance_rate:.0%} of drafts accepted"


def print_throughput(tokens: int, began: float, *more: str) -> None:
    """Print the number of tokens, the throughput and more, on a terminal."""
    if not sys.stderr.isatty():
        return
    speed = tokens / (time.perf_counter() - began)
    line = ", ".join((f"{tokens:,} {'token' if tokens == 1 else 'tokens'}", f"{speed:,.1f} tokens/s", *more))
    stderr = Console(stderr=True, highlight=False)
    stderr.print(line, style="" if stderr.no_color else "dim")
