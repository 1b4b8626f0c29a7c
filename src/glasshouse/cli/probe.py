"""`glasshouse probe`: linear probes of a model's activations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

import glasshouse as gh
from glasshouse.cli import screen, texts
from glasshouse.cli.model import Device, ModelArgument, Revision

app = typer.Typer(help="Fit linear probes of a model's activations, and score texts with them.", no_args_is_help=True)


@app.command(epilog="Example: glasshouse probe make python-3m sql.safetensors --positive sql.txt --negative code.txt")
def make(
    model: ModelArgument,
    out: Annotated[Path, typer.Argument(help="The file to write.")],
    positive: Annotated[Path, typer.Option(help="A file of texts with the property, one per line.")],
    negative: Annotated[Path, typer.Option(help="A file of texts without it, one per line.")],
    site: Annotated[
        str | None,
        typer.Option(
            help="The activation to read, such as resid_post.2.", show_default="resid_post of the middle layer"
        ),
    ] = None,
    revision: Revision = None,
    device: Device = "auto",
) -> None:
    """Fit a linear probe that tells two files of texts apart, and print its scores on a held-out fifth of them."""
    given = [texts.of_lines(path) for path in (positive, negative)]
    with screen.waiting("loading torch"):
        where = gh.device.resolve(device, "--device").type
    loaded, tok = gh.load(model, device=where, revision=revision)
    labels = [True] * len(given[0]) + [False] * len(given[1])
    with screen.waiting("reading the texts"):
        made = gh.probe(loaded, tok, given[0] + given[1], labels, site=site)
    made.save(out)
    counts = f"{len(given[0])} positive and {len(given[1])} negative texts"
    print(f"{out}: {made.site}, from {counts}, of which a fifth is held out")
    assert made.held_out_texts is not None  # every text has one label
    rows = [
        (name, f"{one.accuracy:.3f}", f"{one.auc:.3f}", f"{one.positive:,}", f"{one.negative:,}")
        for name, one in [("tokens", made.held_out), ("texts", made.held_out_texts)]
    ]
    screen.table(rows, header=("held out", "balanced accuracy", "AUC", "positive", "negative"), right=range(1, 5))


@app.command(epilog="Example: glasshouse probe show python-3m sql.safetensors 'SELECT name FROM users'")
def show(
    model: ModelArgument,
    probe: Annotated[Path, typer.Argument(help="A file that glasshouse probe make wrote.")],
    text: Annotated[str, typer.Argument(help="The text to score.")],
    revision: Revision = None,
    device: Device = "auto",
) -> None:
    """Print each token of a text with its score: above 0 is positive."""
    found = gh.inspection.LinearProbe.load(probe)
    with screen.waiting("loading torch"):
        where = gh.device.resolve(device, "--device").type
    loaded, tok = gh.load(model, device=where, revision=revision)
    found.check(loaded, f"the probe {str(probe)!r}")
    with gh.record(loaded, found.site, tok=tok, stop=True) as seen:
        gh.inspection.run(loaded, text, tok=tok)
    scores = found.scores(seen[found.site][0]).tolist()
    print(f"{found.site}, balanced accuracy {found.accuracy:.3f} and AUC {found.auc:.3f} on held-out tokens")
    rows = [
        [Text(cell, "cyan" if score > 0 else "yellow") for cell in (token, f"{score:+.2f}")]
        for token, score in zip(seen.str_tokens[0], scores, strict=True)
    ]
    screen.table(rows, header=("token", "score"), right=[1])
