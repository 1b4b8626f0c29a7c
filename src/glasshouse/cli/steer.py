"""`glasshouse steer`: steering vectors from contrasting texts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import glasshouse as gh
from glasshouse.cli import screen, texts
from glasshouse.cli.model import Device, ModelArgument, Revision

app = typer.Typer()


@app.callback()
def _steer() -> None:
    """Make steering vectors, which a server adds to a model by request."""


@app.command(
    epilog="Example: glasshouse steer make python-3m --positive yes.txt --negative no.txt --out yes.safetensors"
)
def make(
    model: ModelArgument,
    positive: Annotated[Path, typer.Option(help="A file of texts to steer towards, one per line.")],
    negative: Annotated[Path, typer.Option(help="A file of texts to steer away from, one per line.")],
    out: Annotated[Path, typer.Option(help="The file to write.")],
    layer: Annotated[
        int | None, typer.Option(help="The layer after which it is added.", min=0, show_default="the middle one")
    ] = None,
    revision: Revision = None,
    device: Device = "auto",
) -> None:
    """Make a steering vector: the mean of the residual stream over one file of texts, minus that over another."""
    given = [texts.of_lines(path) for path in (positive, negative)]
    with screen.waiting("loading torch"):
        where = gh.device.resolve(device, "--device").type
    loaded, tok = gh.load(model, device=where, revision=revision)
    with screen.waiting("reading the texts"):
        made = gh.steering_vector(loaded, tok, *given, site=None if layer is None else f"resid_post.{layer}")
    made.save(out)
    norm = float(made.vector.norm())
    print(f"{out}: {made.site}, norm {norm:.3g}, from {len(given[0])} positive and {len(given[1])} negative texts")
