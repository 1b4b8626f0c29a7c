"""`glasshouse translate`: texts by an encoder-decoder, with beam search."""

from __future__ import annotations

import os
from typing import Annotated

import typer

import glasshouse as gh
from glasshouse.cli import screen, texts
from glasshouse.cli.generation import stdin_prompts
from glasshouse.cli.generation.streaming import room, sampling
from glasshouse.cli.model import Device, Ignore, ModelArgument, Revision
from glasshouse.generation.sampling_params import DEFAULTS

app = typer.Typer()


@app.command(epilog="Example: glasshouse translate dates-1m '3. März 2021' 'May 4, 1999'")
def translate(
    model: ModelArgument,
    text: texts.Given = None,
    beams: Annotated[int, sampling("beams")] = 4,
    max_new_tokens: Annotated[int, sampling("max_new_tokens")] = 256,
    length_penalty: Annotated[float, sampling("length_penalty")] = DEFAULTS["length_penalty"],
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
    r"""Translate each text with an encoder-decoder, and print one line for each, in their order; line breaks as \n.

    A text that is refused is reported on stderr and leaves its line empty; the exit code is then 1. Sampling and
    other options are those of glasshouse generate.
    """
    options = gh.SamplingParams(beams=beams, max_new_tokens=max_new_tokens, length_penalty=length_penalty)
    with screen.waiting("loading torch"):
        where = gh.device.resolve(device, "--device").type
    loaded, tok = gh.load(model, revision=revision, device=where, ignore=texts.listed(ignore))
    if not isinstance(loaded, gh.models.Seq2Seq):
        other = "generate" if isinstance(loaded, gh.models.Decoder) else "look"
        raise gh.InputError(
            f"{model!r} is of kind {loaded.spec.kind}, but a translation needs an encoder-decoder; give one, such as "
            f"dates-1m, or use `glasshouse {other}`."
        )
    found = gh.generation.validation.check_model(loaded)
    length = room(found.spec, options)
    gh.generation.check_beams(found, beams, length, length)
    lines = not text or text == [texts.LINES]
    sequences = gh.generation.MAX_SLOTS if lines else len(text or ())
    engine = gh.Engine(
        found,
        tok,
        slots=max(beams, gh.generation.choose_slots(found, length, length, sequences * beams)),
        max_len=length,
        source_len=length,
        weights="copy" if lines else "own",
    )
    given = None if lines else stdin_prompts.GivenTexts([os.fsencode(one) for one in text or ()])
    stdin_prompts.generate_lines(engine, options, 1, as_json, given)
