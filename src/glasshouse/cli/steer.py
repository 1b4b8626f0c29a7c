"""`glasshouse steer`: steering vectors from contrasting texts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import glasshouse as gh
from glasshouse.cli import screen
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
    texts = [_lines(path) for path in (positive, negative)]
    with screen.waiting("loading torch"):
        where = gh.device.resolve(device, "--device").type
    loaded, tok = gh.load(model, device=where, revision=revision)
    with screen.waiting("reading the texts"):
        made = gh.steering_vector(loaded, tok, *texts, site=None if layer is None else f"resid_post.{layer}")
    made.save(out)
    norm = float(made.vector.norm())
    print(f"{out}: {made.site}, norm {norm:.3g}, from {len(texts[0])} positive and {len(texts[1])} negative texts")


def _lines(path: Path) -> list[str]:
    r"""Return the texts of a file, one per line; `\n` in a line is a line break of its text."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise gh.InputError(f"the texts in {str(path)!r} cannot be read: {error}.") from None
    if not (found := [line.replace("\\n", "\n") for line in lines if line.strip()]):
        raise gh.InputError(f"{str(path)!r} has no texts; write one per line.")
    return found
