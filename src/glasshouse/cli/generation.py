"""The command that generates: one prompt as it is written, prompts by lines, or a conversation."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import sys
import time
import unicodedata
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from queue import Empty, Queue
from threading import Thread
from typing import Annotated, Literal, cast

import typer
from rich.console import Console

import glasshouse as gh
from glasshouse.cli import screen
from glasshouse.cli.model import Ignore, ModelArgument, Revision

app = typer.Typer()

STDIN = 0
LINES = "-"  # the prompt that stands for those on standard input
WINDOW = 8  # lines in memory for each slot: those behind a slow one are finished while it is waited for
ROOM = 4096  # tokens that a line or a chat may have unless more are asked for: memory is taken for all of them
INTERRUPTED = 130  # what shells call the end by Ctrl-C
ESCAPES = {r"\n": "\n", r"\t": "\t", r"\r": "\r", r"\\": "\\"}

Message = dict[str, str]


@app.command(epilog="Example: glasshouse generate runs/first/model 'Once upon a time' --temperature 0.8 --top-p 0.95")
def generate(
    model: ModelArgument,
    prompt: Annotated[
        str | None,
        typer.Argument(help="The text to continue or translate; - for one a line of stdin; a chat's first message."),
    ] = None,
    # A screen of text; the 64 of the library end most sentences too soon, and Ctrl-C ends what is too long.
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to write at most.")] = 256,
    min_new_tokens: Annotated[int, typer.Option(help="Tokens to write at least.")] = 0,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token; above, tokens are drawn.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Draw from so many tokens.", show_default="all")] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Draw from the likeliest tokens that together reach this probability.", show_default="all"),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(help="Draw from tokens at least this share as likely as the likeliest.", show_default="all"),
    ] = None,
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1, tokens that were there before become less likely.")
    ] = 1.0,
    frequency_penalty: Annotated[
        float, typer.Option(help="Taken off a token's logit for each time it was written.")
    ] = 0.0,
    stop: Annotated[
        list[str] | None,
        typer.Option(help=r"A text that ends it, not written; \n, \t, \r and \\ are escapes. May be given again."),
    ] = None,
    seed: Annotated[
        int, typer.Option(help="What is drawn depends on it alone; a further sample takes the next.")
    ] = 0,
    n: Annotated[
        int, typer.Option("--n", min=1, help="Completions of each prompt; needs a temperature or beams.")
    ] = 1,
    beams: Annotated[int, typer.Option(help="Texts searched side by side for the likeliest.")] = 1,
    length_penalty: Annotated[
        float, typer.Option(help="A searched text scores its log-probability over its length to this power.")
    ] = 1.0,
    slots: Annotated[
        int | None,
        typer.Option(min=1, help="Sequences that run side by side.", show_default="as memory allows, at most 64"),
    ] = None,
    max_len: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens of prompt and completion at most; of an encoder-decoder, of either.",
            show_default=f"as needed; the model's, up to {ROOM}, for - and --chat",
        ),
    ] = None,
    draft: Annotated[
        str | None, typer.Option(metavar="MODEL", help="A small model of the same vocabulary that writes ahead.")
    ] = None,
    lookup: Annotated[
        bool, typer.Option("--lookup", help="Write ahead what followed the last tokens before.")
    ] = False,
    chat: Annotated[
        bool, typer.Option("--chat", help="Hold a conversation: a message a line, until Ctrl-D or the end of stdin.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="What the system says before a conversation.")] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print an object a line: prompt, text, ids, logprobs, finish_reason, score."),
    ] = False,
    device: Annotated[
        Literal["auto", "cpu", "cuda", "mps"], typer.Option(help="Where to compute; auto takes the fastest.")
    ] = "auto",
    revision: Revision = None,
    ignore: Ignore = None,
) -> None:
    r"""Continue a prompt, or translate it, and write the completion alone, as it comes.

    With - each line of stdin is a prompt; completions come in the order of the lines, one a line, a line break in one
    as \n. A prompt that cannot be taken is named on stderr and leaves its line empty; the exit code is then 1.
    """
    options = gh.Options(
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        frequency_penalty=frequency_penalty,
        stop=tuple(map(_unescaped, stop or ())),
        seed=seed,
        beams=beams,
        length_penalty=length_penalty,
    )
    _check_count(n, options)
    if prompt is None and not chat:
        raise gh.InputError(f"there is no prompt; give one, or {LINES} to read them from stdin, or --chat.")
    if chat and n > 1:
        raise gh.InputError(f"n is {n}, but a conversation goes on from one answer; leave out --n.")
    if system is not None and not chat:
        raise gh.InputError("--system was given, but it begins a conversation; give --chat, too.")
    if draft is not None and lookup:
        raise gh.InputError("--draft and --lookup were both given; give one of them.")
    where = _device(device)
    found, tok = _load(model, revision, ignore, where)
    speculator = _speculator(draft, lookup, where)

    def engine(sequences: int, length: int, source: int) -> gh.Engine:
        rows = slots or max(beams, gh.generation.calls.slots_for(found, length, source, sequences * beams))
        return gh.Engine(found, tok, slots=rows, max_len=length, source_len=source, speculator=speculator)

    room = max_len or min(found.spec.max_len, ROOM)
    said = b"" if prompt is None else os.fsencode(prompt)  # as it was typed, whatever the bytes
    if chat:
        if isinstance(found, gh.models.Seq2Seq) or tok.chat_template is None:
            kind = "is an encoder-decoder" if isinstance(found, gh.models.Seq2Seq) else "has no chat template"
            raise gh.InputError(f"{model!r} {kind}, so it holds no conversation; leave out --chat.")
        opening = [] if system is None else [{"role": "system", "content": system}]
        first = None if prompt in (None, LINES) else said.decode(errors="replace")
        _converse(engine(1, room, 0), tok, options, opening, first, as_json)
    elif prompt == LINES:
        source = room if isinstance(found, gh.models.Seq2Seq) else 0
        _answer_lines(engine(gh.generation.calls.MOST_SLOTS, room, source), options, n, as_json)
    else:
        ids = gh.generation.admission.read_prompt(said, tok, found.spec)
        length = max_len or gh.generation.calls.lengths_for(found, [ids], options)[0]
        source = len(ids) if isinstance(found, gh.models.Seq2Seq) else 0
        _answer(engine(n if beams == 1 else 1, length, source), said, ids, options, n, as_json)


def _unescaped(text: str) -> str:
    r"""Return a text with its escapes read, which a shell cannot type.

    >>> _unescaped(r"one\ntwo, \\n and \boxed")
    'one\ntwo, \\n and \\boxed'
    """
    return re.sub(r"\\[ntr\\]", lambda escape: ESCAPES[escape[0]], text)


def _check_count(n: int, options: gh.Options) -> None:
    if options.beams == 1 and n > 1 and options.temperature == 0:
        raise gh.InputError(f"n is {n}, but without --temperature or --beams all are the same; give one of them.")
    if 1 < options.beams < n:
        raise gh.InputError(
            f"n is {n}, but a search of {options.beams} beams finds no more than these; raise --beams."
        )


def _device(name: str) -> str:
    best = gh.device.best().type
    if name in ("cuda", "mps") and name != best:
        raise gh.InputError(f"device is {name}, but this machine has none; leave it out to use {best}.")
    return best if name == "auto" else name


def _load(
    place: str, revision: str | None, ignore: Sequence[str] | None, device: str
) -> tuple[gh.models.Decoder | gh.models.Seq2Seq, gh.Tokenizer]:
    model, tok = gh.load(place, revision=revision, device=device, ignore=ignore or ())
    gh.generation.admission.check_model(model)
    if tok is None:
        raise gh.InputError(f"{place!r} has no tokenizer, so it reads no text; put its tokenizer.json there.")
    return cast("gh.models.Decoder | gh.models.Seq2Seq", model), tok


def _speculator(draft: str | None, lookup: bool, device: str) -> gh.generation.speculation.Speculator | None:
    if draft is not None:
        small, _ = gh.load(draft, device=device)
        return gh.generation.DraftModel(cast("gh.models.Decoder", small))  # which refuses another kind itself
    return gh.generation.NGrams() if lookup else None


def _submit(engine: gh.Engine, prompt: bytes | list[int], options: gh.Options, n: int) -> list[gh.generation.Request]:
    if options.beams > 1:
        return [engine.submit(prompt, options, n_best=n)]
    return [engine.submit(prompt, one) for one in options.with_seeds(n)]


def _answer(engine: gh.Engine, prompt: bytes, ids: list[int], options: gh.Options, n: int, as_json: bool) -> None:
    """Print what continues one prompt: samples as they are written; in JSON, or from a search, at the end."""
    began = time.perf_counter()
    requests = _submit(engine, ids, options, n)
    interrupted = False
    if options.beams == 1 and not as_json:
        interrupted = _stream(engine, requests)
    else:
        _wait(engine, options.max_new_tokens)
        found = [one for request in requests for one in request.completions()]
        for number, one in enumerate(found, 1):
            if as_json:
                print(_as_json(prompt, one))
            else:
                _head(number, len(found))
                print(_fit(one.text))
    reasons = dict.fromkeys(request.finish_reason for request in requests if request.finish_reason)
    _report(sum(len(request.ids) for request in requests), began, *reasons)
    if interrupted:
        raise typer.Exit(INTERRUPTED)


def _stream(engine: gh.Engine, requests: Sequence[gh.generation.Request]) -> bool:
    """Print one sample after the other, though all are written at once; say whether Ctrl-C ended it."""
    with _interrupts() as caught:
        for number, request in enumerate(requests, 1):
            if not caught:
                _head(number, len(requests))
                _write(_pieces(engine, request, caught))
    return bool(caught)


def _head(number: int, count: int) -> None:
    """Print the line between two completions."""
    if number > 1:
        print(f"--- {number} of {count}")


def _wait(engine: gh.Engine, most: int) -> None:
    """Let all requests end, with a bar."""
    with screen.progress(generating="steps") as progress:
        done = 0
        while engine.step():
            done = min(done + 1, most)  # steps that read the prompt come on top
            progress("generating", done, most)


def _write(pieces: Iterable[str]) -> None:
    """Print a text as it comes, and a newline whatever happens."""
    try:
        for piece in pieces:
            print(_fit(piece), end="", flush=True)
    finally:
        print(flush=True)


def _pieces(engine: gh.Engine, request: gh.generation.Request, caught: list[int]) -> Iterator[str]:
    """Yield the text of a request as it comes; Ctrl-C cancels it after a step, so that the engine can go on."""
    while not request.done:
        engine.step()
        if caught:
            engine.cancel(request)
        yield request.take()
    yield request.take()


@contextmanager
def _interrupts() -> Iterator[list[int]]:
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


def _fit(text: str) -> str:
    """Return a text as stdout may have it: a terminal gets no control characters but line breaks and tabs."""
    if not sys.stdout.isatty():
        return text
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else screen.clean(c) for c in text)


def _as_json(prompt: bytes, one: gh.Completion) -> str:
    table = {
        "prompt": _readable(prompt),
        "text": one.text,
        "ids": one.ids,
        "logprobs": one.logprobs,
        "finish_reason": one.finish_reason,
    }
    return json.dumps(table if one.score is None else {**table, "score": one.score})


def _readable(prompt: bytes) -> str:
    return prompt.decode(errors="backslashreplace")


def _report(tokens: int, began: float, *more: str) -> None:
    """Say at a terminal how much was written, how fast, and what else there is to say."""
    if not sys.stderr.isatty():
        return
    speed = tokens / (time.perf_counter() - began)
    line = ", ".join((f"{tokens:,} {'token' if tokens == 1 else 'tokens'}", f"{speed:,.1f} tokens/s", *more))
    there = Console(stderr=True, highlight=False)
    there.print(line, style="" if there.no_color else "dim")


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
        found = [one for request in self.requests for one in request.completions()]
        if as_json and self.error:
            return [json.dumps({"prompt": _readable(self.prompt), "error": self.error})]
        if as_json:
            return [_as_json(self.prompt, one) for one in found]
        texts = [one.text.replace("\n", r"\n").replace("\r", r"\r") for one in found]
        return [*texts, *[""] * (n - len(texts))]


def _answer_lines(engine: gh.Engine, options: gh.Options, n: int, as_json: bool) -> None:
    """Print what continues each line of stdin, in their order; a line that cannot be taken stops no other."""
    began = time.perf_counter()
    out = sys.stdout  # while there is a bar, sys.stdout is its
    lines = _Lines(WINDOW * len(engine.slots))
    count = failed = done = tokens = 0
    with nullcontext(gh.text.training.silent) if out.isatty() else screen.progress() as progress:
        for count, line in enumerate(_in_order(engine, lines, options, n), 1):
            for text in line.output(n, as_json):
                print(_fit(text), file=out)
            out.flush()
            if line.error:
                print(f"error: line {count}: {line.error}", file=sys.stderr)
                failed += 1
            done += line.size
            tokens += sum(len(request.ids) for request in line.requests)
            progress("generating", done, lines.n_bytes)
    _report(tokens, began, f"{count:,} lines", *([f"{failed:,} of them refused"] if failed else []))
    if failed:
        raise typer.Exit(1)


def _in_order(engine: gh.Engine, lines: _Lines, options: gh.Options, n: int) -> Iterator[_Line]:
    """Yield each line once it and all before it are done; only a window of them is in memory."""
    window: deque[_Line] = deque()
    most = WINDOW * len(engine.slots)
    while True:
        while len(window) < most and (text := lines.take(wait=not window)) is not None:
            line = _Line(len(text), text.removesuffix(b"\n").removesuffix(b"\r"))
            try:
                line.requests = _submit(engine, line.prompt, options, n)
            except gh.GlasshouseError as error:
                line.error = str(error)
            window.append(line)
        if not window:
            return
        engine.step()
        while window and all(request.done for request in window[0].requests):
            yield window.popleft()


@dataclass
class _Conversation:
    """What was said so far, and an engine that still has the keys and values of it."""

    engine: gh.Engine
    tok: gh.Tokenizer
    options: gh.Options
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
        pieces = _pieces(self.engine, request, caught)
        if self.as_json:
            deque(pieces, maxlen=0)
            print(_as_json(text.encode(), request.completions()[0]), flush=True)
        else:
            _write(pieces)
        self.history = [*kept, {"role": "assistant", "content": request.text}]
        _report(len(request.ids), began, str(request.finish_reason))

    def _within_room(self, said: list[Message]) -> tuple[list[int], list[Message]]:
        """Return the ids of messages, and those of them that leave room for an answer: the oldest turns go first."""
        room = self.engine.max_len - min(self.options.max_new_tokens, self.engine.max_len // 2)
        while True:
            ids = self.tok.encode_chat([*self.opening, *said], prompt=True).ids
            if len(ids) <= room or len(said) == 1:
                return ids, said
            said = said[2:]


def _converse(
    engine: gh.Engine,
    tok: gh.Tokenizer,
    options: gh.Options,
    opening: list[Message],
    first: str | None,
    as_json: bool,
) -> None:
    """Answer the messages of a user until there are no more; one that cannot be answered ends nothing."""
    options = replace(options, stop_ids=_closing(tok, opening))
    conversation = _Conversation(engine, tok, options, opening, as_json)
    failed = False
    for text in _messages(first):
        with _interrupts() as caught:
            try:
                conversation.answer(text, caught)
            except gh.GlasshouseError as error:
                print(f"error: {error}", file=sys.stderr)
                failed = True
        if caught and not sys.stdin.isatty():
            raise typer.Exit(INTERRUPTED)
    if failed:
        raise typer.Exit(1)


def _closing(tok: gh.Tokenizer, opening: list[Message]) -> tuple[int, ...]:
    """Return the token with which the template closes an answer: not every model names it among its end tokens."""
    asked: list[Message] = [*opening, {"role": "user", "content": "?"}]
    tok.encode_chat(asked, prompt=True)  # a template that takes no system message says so before anyone types
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
