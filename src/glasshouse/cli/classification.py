"""`glasshouse classify`: the labels of texts."""

from __future__ import annotations

import json
import sys
from itertools import islice
from typing import Annotated

import typer

import glasshouse as gh
from glasshouse.cli import screen, texts
from glasshouse.cli.model import Device, Ignore, ModelArgument, Revision
from glasshouse.escaping import escape_control

app = typer.Typer()


@app.command(epilog="Example: glasshouse classify runs/reviews 'a fine book' 'a dull book'")
def classify(
    model: ModelArgument,
    text: texts.Given = None,
    every: Annotated[bool, typer.Option("--all", help="Print every label, the most probable first.")] = False,
    batch_size: Annotated[int, typer.Option(min=1, help="Texts per forward pass.")] = 32,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print one JSON object per line: text, label, probability; with --all probabilities."
        ),
    ] = False,
    device: Device = "auto",
    revision: Revision = None,
    ignore: Ignore = None,
) -> None:
    """Print the label of each text and its probability, in the order of the texts.

    A text longer than the model's max_len is truncated, with a warning.
    """
    with screen.waiting("loading torch"):
        where = gh.device.resolve(device, "--device").type
    loaded, tok = gh.load(model, revision=revision, device=where, ignore=texts.listed(ignore))
    gh.classify(loaded, tok, [])  # a model without labels fails before stdin is waited for
    given = texts.given_or_lines(text)
    at_once = 1 if sys.stdin.isatty() and text in (None, [texts.LINES]) else batch_size
    count = truncated = 0
    while batch := list(islice(given, at_once)):
        for one, found in zip(
            batch, gh.classify(loaded, tok, batch, batch_size=batch_size, truncate=True), strict=True
        ):
            if as_json:
                table = {"text": one, "label": found.label, "probability": found.probability}
                print(json.dumps(table | ({"probabilities": found.probabilities} if every else {})))
            else:
                shown = found.probabilities if every else {found.label: found.probability}
                print("\n" * (every and count > 0), end="")
                print("\n".join(f"{escape_control(label)}\t{value:.4f}" for label, value in shown.items()))
            count += 1
            truncated += found.truncated
        sys.stdout.flush()
    if truncated:
        screen.warn(
            f"{truncated:,} of {count:,} texts are longer than the model's max_len of {loaded.spec.max_len} tokens "
            "and were truncated to it."
        )
