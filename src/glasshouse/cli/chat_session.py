"""A conversation: messages from a terminal or a pipe, and answers that remember what was said."""

from __future__ import annotations

import io
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace

import typer

import glasshouse as gh
from glasshouse.cli import screen, streaming

Message = dict[str, str]


@dataclass
class _Conversation:
    """What was said so far, and an engine that still has the keys and values of it."""

    engine: gh.Engine
    tok: gh.Tokenizer
    options: gh.SamplingParams
    opening: list[Message]
    as_json: bool
    history: list[Message] = field(default_factory=list)

    def answer(self, text: str, caught: list[int]) -> None:
        """Print the answer to a message, and remember both."""
        began = time.perf_counter()
        said = [*self.history, {"role": "user", "content": text}]
        ids, kept = self._within_room(said)
        request = self.engine.submit(ids, self.options)
        if forgotten := len(said) - len(kept):
            screen.warn(
                f"the conversation has outgrown its {self.engine.max_len:,} tokens, so its oldest {forgotten} "
                "messages are forgotten; --max-len makes more room."
            )
        pieces = streaming.pieces(self.engine, request, caught)
        if self.as_json:
            deque(pieces, maxlen=0)
            print(streaming.as_json(text.encode(), request.completions()[0]), flush=True)
        else:
            streaming.write(pieces)
        request.raise_on_error()
        if request.truncated and (sentence := gh.generation.length_warning(self.engine.spec, request)):
            screen.warn(sentence)
        self.history = [*kept, {"role": "assistant", "content": request.text}]
        streaming.report(len(request.ids), began, str(request.finish_reason))

    def _within_room(self, said: list[Message]) -> tuple[list[int], list[Message]]:
        """Return the ids of messages, and those of them that leave room for an answer: the oldest turns go first."""
        room = self.engine.max_len - min(self.options.max_new_tokens, self.engine.max_len // 2)
        while True:
            ids = self.tok.encode_chat([*self.opening, *said], add_generation_prompt=True).ids
            if len(ids) <= room or len(said) == 1:
                return ids, said
            said = said[2:]


def chat(
    engine: gh.Engine,
    tok: gh.Tokenizer,
    options: gh.SamplingParams,
    system: str | None,
    first: str | None,
    as_json: bool,
) -> None:
    """Answer the messages of a user until there are no more; one that cannot be answered ends nothing."""
    opening = [] if system is None else [{"role": "system", "content": system}]
    options = replace(options, stop_token_ids=_closing(tok, opening))
    conversation = _Conversation(engine, tok, options, opening, as_json)
    failed = False
    for text in _messages(first):
        with streaming.interrupts() as caught:
            try:
                conversation.answer(text, caught)
            except gh.GlasshouseError as error:
                print(f"error: {error}", file=sys.stderr)
                failed = True
        if caught and not sys.stdin.isatty():
            raise typer.Exit(streaming.INTERRUPTED)
    if failed:
        raise typer.Exit(1)


def _closing(tok: gh.Tokenizer, opening: list[Message]) -> tuple[int, ...]:
    """Return the token with which the template closes an answer: not every model names it among its end tokens."""
    asked: list[Message] = [*opening, {"role": "user", "content": "?"}]
    tok.encode_chat(
        asked, add_generation_prompt=True
    )  # a template that takes no system message says so before anyone types
    try:
        ids, answer = tok.encode_chat([*asked, {"role": "assistant", "content": "!"}])
    except gh.GlasshouseError:  # some templates rewrite an answer
        return ()
    written = [token for token, mine in zip(ids, answer, strict=True) if mine]
    return tuple(token for token in written[-1:] if token in tok.special_ids)


def _messages(first: str | None) -> Iterator[str]:
    """Yield what the user says: the first message, then each line that is not blank."""
    if first is not None:
        yield first
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    if not sys.stdin.isatty():
        yield from (text for line in sys.stdin if (text := line.rstrip("\n")).strip())
        return
    with suppress(ImportError):
        import readline  # noqa: F401 - gives input() the arrow keys, where there is one
    while True:
        try:
            text = input("> " if sys.stdout.isatty() else "")
        except KeyboardInterrupt:
            print("\nCtrl-D ends the conversation", file=sys.stderr)
        except EOFError:
            print(file=sys.stderr)
            return
        else:
            if text.strip():
                yield text
