"""The command that generates: one prompt as it is written, prompts by lines, or a conversation."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from typing import Annotated, cast

import typer

import glasshouse as gh
from glasshouse.cli import chat_session, screen, stdin_prompts, streaming, texts
from glasshouse.cli.model import Device, Ignore, ModelArgument, Revision, find_device

app = typer.Typer()

LINES = "-"  # the prompt that stands for those on standard input
ROOM = 4096  # tokens that a line or a chat may have unless more are asked for: memory is taken for all of them
ESCAPES = {r"\n": "\n", r"\t": "\t", r"\r": "\r", r"\\": "\\"}


@app.command(epilog="Example: glasshouse generate runs/first 'Once upon a time' --temperature 0.8 --top-p 0.95")
def generate(
    model: ModelArgument,
    prompt: Annotated[
        str | None,
        typer.Argument(help="The text to continue or translate; - for one a line of stdin; a chat's first message."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 64,
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
            show_default=f"as needed; for - and --chat what the model was made for, up to {ROOM}",
        ),
    ] = None,
    draft: Annotated[
        str | None, typer.Option(metavar="MODEL", help="A small model of the same vocabulary that writes ahead.")
    ] = None,
    lookup: Annotated[
        bool, typer.Option("--lookup", help="Write ahead what followed the last tokens before.")
    ] = False,
    int8: Annotated[
        bool,
        typer.Option("--int8", help="Hold the weights in a byte each, on the CPU: less memory, a little less exact."),
    ] = False,
    chat: Annotated[
        bool, typer.Option("--chat", help="Hold a conversation: a message a line, until Ctrl-D or the end of stdin.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="What the system says before a conversation.")] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print an object a line: prompt, text, ids, logprobs, finish_reason, score."),
    ] = False,
    device: Device = "auto",
    revision: Revision = None,
    ignore: Ignore = None,
) -> None:
    r"""Continue a prompt, or translate it, and write the completion alone, as it comes.

    With - each line of stdin is a prompt; completions come in the order of the lines, one a line, a line break in one
    as \n. A prompt that cannot be taken is named on stderr and leaves its line empty; the exit code is then 1.
    """
    options = gh.SamplingParams(
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
    where = "cpu" if int8 and device == "auto" else find_device(device)  # int8 has no other place
    found, tok = _load(model, revision, ignore, where)
    speculator = _speculator(draft, lookup, where)
    translates = isinstance(found, gh.models.Seq2Seq)
    if chat and (translates or tok.chat_template is None):
        kind = "is an encoder-decoder" if translates else "has no chat template"
        raise gh.InputError(f"{model!r} {kind}, so it holds no conversation; leave out --chat.")
    said = b"" if prompt is None else os.fsencode(prompt)  # as it was typed, whatever the bytes
    lasts = chat or prompt == LINES
    if lasts:
        sequences = 1 if chat else gh.generation.MAX_SLOTS
        limit = found.spec.position_limit
        length = max_len or min(found.spec.max_len + options.max_new_tokens if limit is None else limit, ROOM)
        source = length if translates else 0
    else:
        ids = gh.generation.validation.encode_prompt(said, tok, found.spec)
        sequences = n if beams == 1 else 1
        length = max_len or gh.generation.required_lengths(found, [ids], options)[0]
        source = len(ids) if translates else 0
    gh.generation.validation.check_beams(found, beams, length, source)
    rows = slots or max(beams, gh.generation.choose_slots(found, length, source, sequences * beams))
    engine = gh.Engine(
        found,
        tok,
        slots=rows,
        max_len=length,
        source_len=source,
        speculator=speculator,
        weights="int8" if int8 else "copy" if lasts else gh.generation.choose_weights(options.max_new_tokens),
    )
    del found  # an int8 engine holds none of its matrices, so their memory is free from here on
    if chat:
        first = None if prompt in (None, LINES) else said.decode(errors="replace")
        chat_session.chat(engine, tok, options, system, first, as_json)
    elif prompt == LINES:
        stdin_prompts.generate_lines(engine, options, n, as_json)
    else:
        _answer(engine, said, options, n, as_json)


def _unescaped(text: str) -> str:
    r"""Return a text with its escapes read, which a shell cannot type.

    >>> _unescaped(r"one\ntwo, \\n and \boxed")
    'one\ntwo, \\n and \\boxed'
    """
    return re.sub(r"\\[ntr\\]", lambda escape: ESCAPES[escape[0]], text)


def _check_count(n: int, options: gh.SamplingParams) -> None:
    if options.beams == 1 and n > 1 and options.temperature == 0:
        raise gh.InputError(f"n is {n}, but without --temperature or --beams all are the same; give one of them.")
    if 1 < options.beams < n:
        raise gh.InputError(
            f"n is {n}, but a search of {options.beams} beams finds no more than these; raise --beams."
        )


def _load(
    place: str, revision: str | None, ignore: Sequence[str] | None, device: str
) -> tuple[gh.models.Decoder | gh.models.Seq2Seq, gh.Tokenizer]:
    model, tok = gh.load(place, revision=revision, device=device, ignore=texts.listed(ignore))
    gh.generation.validation.check_model(model)
    if tok is None:
        raise gh.InputError(f"{place!r} has no tokenizer, so it reads no text; put its tokenizer.json there.")
    return cast("gh.models.Decoder | gh.models.Seq2Seq", model), tok


def _speculator(draft: str | None, lookup: bool, device: str) -> gh.generation.speculation.Speculator | None:
    if draft is not None:
        small, _ = gh.load(draft, device=device)
        return gh.generation.DraftModel(cast("gh.models.Decoder", small))  # which refuses another kind itself
    return gh.generation.PromptLookup() if lookup else None


def _answer(engine: gh.Engine, prompt: bytes, options: gh.SamplingParams, n: int, as_json: bool) -> None:
    """Print what continues one prompt: samples as they are written; in JSON, or from a search, at the end."""
    began = time.perf_counter()
    requests = streaming.submit(engine, prompt, options, n)
    interrupted = False
    if options.beams == 1 and not as_json:
        interrupted = _stream(engine, requests)
    else:
        _wait(engine, options.max_new_tokens)
        found = [one for request in requests for one in request.completions()]
        for number, one in enumerate(found, 1):
            if as_json:
                print(streaming.as_json(prompt, one))
            else:
                _head(number, len(found), one.score)
                print(streaming.fit(one.text))
    reasons = dict.fromkeys(request.finish_reason for request in requests if request.finish_reason)
    streaming.report(sum(len(request.ids) for request in requests), began, *reasons)
    lengths = streaming.LengthWarnings(engine)
    for request in requests:
        request.raise_on_error()
        lengths.look(request)
    lengths.tell()
    if interrupted:
        raise typer.Exit(streaming.INTERRUPTED)


def _stream(engine: gh.Engine, requests: Sequence[gh.generation.Request]) -> bool:
    """Print one sample after the other, though all are written at once; say whether Ctrl-C ended it."""
    with streaming.interrupts() as caught:
        for number, request in enumerate(requests, 1):
            if not caught:
                _head(number, len(requests))
                streaming.write(streaming.pieces(engine, request, caught))
    return bool(caught)


def _head(number: int, count: int, score: float | None = None) -> None:
    """Print the line between two completions; those of a search have one each, with the score."""
    if score is not None and count > 1:
        print(f"--- {number} of {count}, score {score:.4f}")
    elif number > 1:
        print(f"--- {number} of {count}")


def _wait(engine: gh.Engine, most: int) -> None:
    """Let all requests end, with a bar."""
    with screen.progress(generating="steps") as progress:
        done = 0
        while engine.step():
            done = min(done + 1, most)  # steps that read the prompt come on top
            progress("generating", done, most)
