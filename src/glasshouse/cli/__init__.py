"""The command line. Torch is imported lazily, so that --help is fast."""

from __future__ import annotations

import io
import sys
import warnings
from typing import Annotated

import typer

import glasshouse as gh
from glasshouse.cli import data, evaluation, generation, look, model, screen, tokenizer, training

app = typer.Typer(
    name="glasshouse",
    help="Grow transformers and see inside them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(tokenizer.app, name="tokenizer")
app.add_typer(data.app, name="data")
app.add_typer(training.app)
app.add_typer(evaluation.app)
app.add_typer(generation.app)
app.add_typer(look.app)
app.add_typer(model.app)


def _version(value: bool) -> None:
    if value:
        print(gh.__version__)
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Grow transformers and see inside them."""


def main() -> None:
    """Run a command; an input error is printed as one line, with exit code 1."""
    warnings.showwarning = screen.warn
    sys.stdout, sys.stderr = map(screen.outlive_terminal, (sys.stdout, sys.stderr))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # on an ASCII terminal, print escapes instead of failing
    try:
        app()
    except (gh.GlasshouseError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
