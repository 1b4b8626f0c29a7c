"""The command line: arguments in, one call, an answer that people and scripts can read. Torch loads when needed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

import glasshouse as gh

app = typer.Typer(
    name="glasshouse",
    help="Grow transformers and see inside them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="A model's folder, or its id on the Hugging Face hub.")
]
Ignore = Annotated[
    list[str] | None, typer.Option(help="A key of config.json to take as harmless; may be given several times.")
]
Revision = Annotated[str | None, typer.Option(help="A branch, tag or commit of a hub repository.")]


def _version(wanted: bool) -> None:
    if wanted:
        print(gh.__version__)
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Grow transformers and see inside them."""


@app.command(epilog="Example: glasshouse export runs/first/model published")
def export(
    model: ModelArgument,
    folder: Annotated[Path, typer.Argument(help="The folder to write; one written before is replaced.")],
    revision: Revision = None,
    ignore: Ignore = None,
) -> None:
    """Write a folder that transformers loads, or say which field of the spec stands in the way."""
    loaded, tok = gh.load(model, revision=revision, dtype="stored", ignore=ignore or ())
    kind = gh.hub.export(loaded, tok, folder)
    print(f"{folder}: a model of type {kind}, {'with' if tok else 'without'} a tokenizer")


@app.command(epilog="Example: glasshouse verify runs/first/model")
def verify(model: ModelArgument, revision: Revision = None, ignore: Ignore = None) -> None:
    """Run a model in every way there is, compare, and write verified.json beside its weights; exit 1 on a failure."""
    checks = gh.evaluation.verify(model, revision=revision, ignore=ignore or ())
    table = Table("check", "largest difference", "limit", "", box=None, pad_edge=False)
    for check in checks:
        if check.difference is None:
            table.add_row(check.name, "not compared", "", check.reason)
        else:
            table.add_row(
                check.name, f"{check.difference:.1e}", f"{check.limit:.0e}", "ok" if check.passed else "FAILED"
            )
    Console().print(table)
    if not all(check.passed for check in checks):
        raise typer.Exit(1)


def main() -> None:
    """Run a command; what is wrong with the input is one sentence and exit code 1."""
    try:
        app()
    except (gh.GlasshouseError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
