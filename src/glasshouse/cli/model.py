"""Commands for models: to transformers and back, and whether all ways of running one agree."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

import glasshouse as gh
from glasshouse.cli import screen, texts

app = typer.Typer()

ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="The folder of a model or of a run, or an id on the Hugging Face hub.")
]
Ignore = Annotated[
    list[str] | None, typer.Option(help="Keys of config.json to take as harmless, as a,b; may be given again.")
]
Revision = Annotated[str | None, typer.Option(help="A branch, tag or commit of a hub repository.")]


Device = Annotated[
    Literal["auto", "cpu", "cuda", "mps"], typer.Option(help="Where to compute; auto takes the fastest.")
]


def find_device(name: str) -> str:
    """Return the device that an option names, if this machine has it."""
    return gh.device.resolve(name, "--device").type


@app.command(epilog="Example: glasshouse export runs/first published")
def export(
    model: ModelArgument,
    folder: Annotated[Path, typer.Argument(help="The folder to write; one written before is replaced.")],
    revision: Revision = None,
    ignore: Ignore = None,
) -> None:
    """Write a folder that transformers loads, or say which field of the spec stands in the way."""
    loaded, tok = gh.load(model, revision=revision, dtype="stored", ignore=texts.listed(ignore))
    kind = gh.hub.export(loaded, tok, folder)
    print(f"{folder}: a model of type {kind}, {'with' if tok else 'without'} a tokenizer")


@app.command(epilog="Example: glasshouse verify runs/first")
def verify(model: ModelArgument, revision: Revision = None, ignore: Ignore = None) -> None:
    """Run a model in every way there is, compare, and write verified.json beside its weights; exit 1 on a failure."""
    checks = gh.evaluation.verify(model, revision=revision, ignore=texts.listed(ignore))
    rows = [
        (check.name, "not compared", "", check.reason)
        if check.difference is None
        else (check.name, f"{check.difference:.1e}", f"{check.limit:.0e}", "ok" if check.passed else "FAILED")
        for check in checks
    ]
    screen.table(rows, header=("check", "largest difference", "limit", ""))
    if not all(check.passed for check in checks):
        raise typer.Exit(1)
