"""Chat session: messages from a terminal or a pipe, and replies with the conversation as context."""

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
from glasshouse.cli import screen
from glasshouse.cli.generation import streaming

Message = dict[str, str]


@dataclass
class _Conversation:
    """The messages so far, and an engine whose KV cache has them."""

    engine: gh.Engine
    tok: gh.Tokenizer
    options: gh.SamplingParams
    opening: list[Message]
    as_json: bool
    history: list[Message] = field(default_factory=list)

    def reply(self, text: str, caught: list[int]) -> None:
        """Print the reply to a message, and add both to the history."""
        began = time.perf_counter()
        messages = [*self.history, {"role": "user", "content": text}]
        ids, kept = self._fit(messages)
        request = self.engine.submit(ids, self.options)
        if dropped := len(messages) - len(kept):
            screen.warn(
                f"the conversation is longer than max_len ({self.engine.max_len:,} tokens), so its oldest {dropped} "
                "messages were dropped; raise --max-len."
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
        streaming.print_throughput(len(request.ids), began, str(request.finish_reason))

    def _fit(self, messages: list[Message]) -> tuple[list[int], list[Message]]:
        """Drop the oldest turns until a reply fits into max_len; return the ids and the remaining messages."""
        limit = self.engine.max_len - min(self.options.max_new_tokens, self.engine.max_len // 2)
        while True:
            ids = self.tok.encode_chat([*self.opening, *messages], add_generation_prompt=True).ids
            if len(ids) <= limit or len(messages) == 1:
                return ids, messages
            messages = messages[2:]


def chat(
    engine: gh.Engine,
    tok: gh.Tokenizer,
    options: gh.SamplingParams,
    system: str | None,
    first: str | None,
    as_json: bool,
) -> None:
    """Reply to messages until there are no more; an error in one does not end the session."""
    opening = [] if system is None else [{"role": "system", "content": system}]
    options = replace(options, stop_token_ids=gh.models.prompt.end_of_turn_ids(tok, opening))
    conversation = _Conversation(engine, tok, options, opening, as_json)
    failed = False
    for text in _messages(first):
        with streaming.interrupts() as caught:
            try:
                conversation.reply(text, caught)
            except gh.GlasshouseError as error:
                print(f"error: {error}", file=sys.stderr)
                failed = True
        if caught and not sys.stdin.isatty():
            raise typer.Exit(streaming.INTERRUPTED)
    if failed:
        raise typer.Exit(1)


def _messages(first: str | None) -> Iterator[str]:
    """Yield the user's messages: the first one, then each line that is not blank."""
    if first is not None:
        yield first
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    if not sys.stdin.isatty():
        yield from (text for line in sys.stdin if (text := line.rstrip("\n")).strip())
        return
    with suppress(ImportError):
        import readline  # noqa: F401 - gives input() line editing, if available
    while True:
        try:
            text = input("> " if sys.stdout.isatty() else "")
        except KeyboardInterrupt:
            print("\nCtrl-D ends the chat", file=sys.stderr)
        except EOFError:
            print(file=sys.stderr)
            return
        else:
            if text.strip():
                yield text
