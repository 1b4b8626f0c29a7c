"""`glasshouse generate`: one streamed completion, prompts from stdin, or a chat session."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, cast

import typer

import glasshouse as gh
from glasshouse import pretrained
from glasshouse.cli import screen, texts
from glasshouse.cli.generation import chat_session, stdin_prompts, streaming
from glasshouse.cli.generation.streaming import sampling
from glasshouse.cli.model import MODEL_HELP, Device, Ignore, Revision
from glasshouse.generation.sampling_params import DEFAULTS

app = typer.Typer()

ESCAPES = {r"\n": "\n", r"\t": "\t", r"\r": "\r", r"\\": "\\"}


@app.command(epilog="Example: glasshouse generate runs/stdlib 'def main(' --temperature 0.8 --top-p 0.95")
def generate(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help=MODEL_HELP,
            show_default=pretrained.DEFAULT,
        ),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT",
            help="The text to continue or translate, or token ids such as '5 7 11' if the model has no tokenizer; - "
            "reads one per line from stdin; first message of a chat.",
        ),
    ] = None,
    max_new_tokens: Annotated[int, sampling("max_new_tokens")] = DEFAULTS["max_new_tokens"],
    min_new_tokens: Annotated[int, sampling("min_new_tokens")] = DEFAULTS["min_new_tokens"],
    temperature: Annotated[float, sampling("temperature")] = DEFAULTS["temperature"],
    top_k: Annotated[int | None, sampling("top_k", show_default="all")] = DEFAULTS["top_k"],
    top_p: Annotated[float | None, sampling("top_p", show_default="all")] = DEFAULTS["top_p"],
    min_p: Annotated[float | None, sampling("min_p", show_default="all")] = DEFAULTS["min_p"],
    repetition_penalty: Annotated[float, sampling("repetition_penalty")] = DEFAULTS["repetition_penalty"],
    frequency_penalty: Annotated[float, sampling("frequency_penalty")] = DEFAULTS["frequency_penalty"],
    stop: Annotated[
        list[str] | None,
        typer.Option(help=r"Stop string, not printed; \n, \t, \r and \\ are escapes. Can be repeated."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed of the first sample; each further one adds 1.")] = 0,
    n: Annotated[int, typer.Option("--n", min=1, help="Completions per prompt; needs --temperature or --beams.")] = 1,
    beams: Annotated[int, sampling("beams")] = DEFAULTS["beams"],
    length_penalty: Annotated[float, sampling("length_penalty")] = DEFAULTS["length_penalty"],
    slots: Annotated[
        int | None,
        typer.Option(min=1, help="Sequences generated at once.", show_default="as memory allows, at most 64"),
    ] = None,
    max_len: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Maximum tokens of prompt and completion together; of each, for an encoder-decoder.",
            show_default=f"as needed; with - and --chat the model's max_len, up to {streaming.ROOM}",
        ),
    ] = None,
    draft_model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Draft model for speculative decoding; needs the same vocabulary."),
    ] = None,
    prompt_lookup: Annotated[
        bool, typer.Option("--prompt-lookup", help="Speculative decoding with drafts from the text so far.")
    ] = False,
    draft_heads: Annotated[
        bool,
        typer.Option(
            "--draft-heads", help="Speculative decoding with the model's own draft heads (multi-token prediction)."
        ),
    ] = False,
    int8: Annotated[
        bool,
        typer.Option("--int8", help="Quantize the weights to 8 bits, on the CPU: less memory, slightly less exact."),
    ] = False,
    int4: Annotated[
        bool,
        typer.Option("--int4", help="Quantize the weights to 4 bits, on the CPU: faster still, and less exact."),
    ] = False,
    chat: Annotated[
        bool, typer.Option("--chat", help="Start a chat: one message per line, until Ctrl-D or the end of stdin.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="System message of a chat.")] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print one JSON object per line: prompt, text, ids, logprobs, finish_reason, score."
        ),
    ] = False,
    device: Device = "auto",
    revision: Revision = None,
    ignore: Ignore = None,
) -> None:
    r"""Generate a completion or a translation of a prompt, and stream it to stdout.

    A lone argument is the prompt, for the bundled model python-3m; with --chat it is the model.
    With - each line of stdin is a prompt; completions are printed in the same order, one per line, line breaks as \n.
    A prompt that is refused is reported on stderr and leaves its line empty; the exit code is then 1.
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
    model, prompt = _model_and_prompt(model, prompt, chat)
    if chat and n > 1:
        raise gh.InputError(f"n is {n}, but a chat has one reply per message; leave out --n.")
    if system is not None and not chat:
        raise gh.InputError("--system was given without --chat; add --chat.")
    drafts = {
        "--draft-model": draft_model is not None,
        "--prompt-lookup": prompt_lookup,
        "--draft-heads": draft_heads,
    }
    if len(given := [name for name, on in drafts.items() if on]) > 1:
        raise gh.InputError(f"{' and '.join(given[:2])} were both given; give one of them.")
    if int8 and int4:
        raise gh.InputError("--int8 and --int4 were both given; give one of them.")
    with screen.waiting("loading torch"):  # quantized weights run on the CPU only
        where = "cpu" if (int8 or int4) and device == "auto" else gh.device.resolve(device, "--device").type
    found, tok = _load(model, revision, ignore, where)
    speculator = _speculator(found if draft_heads else None, draft_model, prompt_lookup, where)
    translates = isinstance(found, gh.models.Seq2Seq)
    if chat and (translates or tok is None):
        kind = "is an encoder-decoder" if translates else "has no tokenizer"
        raise gh.InputError(f"{model!r} {kind}, so it cannot chat; leave out --chat.")
    if chat and tok is not None and tok.chat_template is None:
        raise gh.InputError(
            f"{model!r} has no chat template: it was not trained on conversations; leave out --chat, or fine-tune it "
            f"by `glasshouse train finetune-chat model.from={model}`."
        )
    prompt_bytes = b"" if prompt is None else os.fsencode(prompt)  # as typed, also if not UTF-8
    many = chat or prompt == texts.LINES
    if many:
        sequences = 1 if chat else gh.generation.MAX_SLOTS
        length = max_len or streaming.room(found.spec, options)
        source = length if translates else 0
    else:
        ids = streaming.encode(prompt_bytes, tok, found.spec)
        sequences = n if beams == 1 else 1
        length = max_len or gh.generation.required_lengths(found, [ids], options)[0]
        source = len(ids) if translates else 0
    gh.generation.check_beams(found, beams, length, source)
    rows = slots or max(beams, gh.generation.choose_slots(found, length, source, sequences * beams))
    engine = gh.Engine(
        found,
        tok,
        slots=rows,
        max_len=length,
        source_len=source,
        speculator=speculator,
        weights=_weights(int8, int4, many, options.max_new_tokens),
    )
    del found  # a quantized engine keeps none of its matrices, so this frees their memory
    if chat:
        assert tok is not None
        first = None if prompt in (None, texts.LINES) else prompt_bytes.decode(errors="replace")
        chat_session.chat(engine, tok, options, system, first, as_json)
    elif prompt == texts.LINES:
        stdin_prompts.generate_lines(engine, options, n, as_json)
    else:
        _complete(engine, prompt_bytes, ids, options, n, as_json)


def _unescaped(text: str) -> str:
    r"""Replace the escapes of control characters, which are hard to type in a shell.

    >>> _unescaped(r"one\ntwo, \\n and \boxed")
    'one\ntwo, \\n and \\boxed'
    """
    return re.sub(r"\\[ntr\\]", lambda escape: ESCAPES[escape[0]], text)


def _model_and_prompt(first: str | None, second: str | None, chat: bool) -> tuple[str, str | None]:
    """Return the model and the prompt: a lone argument is the prompt, and in a chat the model."""
    if chat:
        if first is None:
            raise gh.InputError("--chat was given without a model; give one that was trained on conversations.")
        return first, second
    if second is not None and first is not None:
        return first, second
    if first is None or Path(first).is_dir() or first in pretrained.names():  # a model, not a prompt
        raise gh.InputError(f"there is no prompt; give one, or {texts.LINES} to read them from stdin, or --chat.")
    print(
        f"model: {pretrained.DEFAULT}, a decoder of Python code; for another: generate MODEL PROMPT", file=sys.stderr
    )
    return pretrained.DEFAULT, first


def _check_count(n: int, options: gh.SamplingParams) -> None:
    if options.beams == 1 and n > 1 and options.temperature == 0:
        raise gh.InputError(
            f"n is {n}, but without --temperature or --beams all completions are the same; give one of them."
        )
    if 1 < options.beams < n:
        raise gh.InputError(
            f"n is {n}, but a search with {options.beams} beams returns at most that many; raise --beams."
        )


def _load(
    path_or_repo_id: str, revision: str | None, ignore: Sequence[str] | None, device: str
) -> tuple[gh.models.Decoder | gh.models.Seq2Seq, gh.Tokenizer | None]:
    model, tok = gh.load(path_or_repo_id, revision=revision, device=device, ignore=texts.listed(ignore))
    return gh.generation.validation.check_model(model), tok


def _weights(int8: bool, int4: bool, many: bool, max_new_tokens: int) -> Literal["own", "copy", "int8", "int4"]:
    if int8:
        return "int8"
    if int4:
        return "int4"
    return "copy" if many else gh.generation.choose_weights(max_new_tokens)


def _speculator(
    own: gh.models.Decoder | gh.models.Seq2Seq | None, draft_model: str | None, prompt_lookup: bool, device: str
) -> gh.generation.speculation.Speculator | None:
    if own is not None:
        return gh.generation.DraftHeads(cast("gh.models.Decoder", own))
    if draft_model is not None:
        model, _ = gh.load(draft_model, device=device)
        return gh.generation.DraftModel(cast("gh.models.Decoder", model))  # refuses other kinds itself
    return gh.generation.PromptLookup() if prompt_lookup else None


def _complete(
    engine: gh.Engine, prompt: bytes, ids: list[int], options: gh.SamplingParams, n: int, as_json: bool
) -> None:
    """Print the completions of one prompt: samples are streamed; JSON and beam search are printed at the end."""
    began = time.perf_counter()
    requests = streaming.submit(engine, ids, options, n)
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
                print(streaming.fit(streaming.shown(one, engine.tok)))
    reasons = dict.fromkeys(request.finish_reason for request in requests if request.finish_reason)
    tokens = sum(len(request.ids) for request in requests)
    streaming.print_throughput(tokens, began, *streaming.acceptance(engine), *reasons)
    lengths = streaming.LengthWarnings(engine)
    for request in requests:
        request.raise_on_error()
        lengths.add(request)
    lengths.show()
    if interrupted:
        raise typer.Exit(streaming.INTERRUPTED)


def _stream(engine: gh.Engine, requests: Sequence[gh.generation.Request]) -> bool:
    """Print one sample after the other, though all are generated at once; return whether Ctrl-C interrupted."""
    with streaming.interrupts() as caught:
        for number, request in enumerate(requests, 1):
            if not caught:
                _head(number, len(requests))
                streaming.write(streaming.pieces(engine, request, caught))
    return bool(caught)


def _head(number: int, count: int, score: float | None = None) -> None:
    """Print the line between two completions; with beam search, one before each, with the score."""
    if score is not None and count > 1:
        print(f"--- {number} of {count}, score {score:.4f}")
    elif number > 1:
        print(f"--- {number} of {count}")


def _wait(engine: gh.Engine, steps: int) -> None:
    """Run all requests to the end, with a progress bar."""
    with screen.progress(generating="steps") as progress:
        done = 0
        while engine.step():
            done = min(done + 1, steps)  # prefill steps come on top
            progress("generating", done, steps)
