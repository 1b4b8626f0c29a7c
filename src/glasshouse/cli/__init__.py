"""The command line. Torch is imported lazily, so that --help is fast."""

from __future__ import annotations

import io
import sys
import warnings
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import glasshouse as gh
from glasshouse import hints
from glasshouse.cli import (
    classification,
    data,
    demo,
    doctor,
    evaluation,
    look,
    model,
    notes,
    plan,
    probe,
    screen,
    serve,
    steer,
    sweep,
    training,
    translation,
)
from glasshouse.cli.generation import command as generation
from glasshouse.cli.tokenizer import command as tokenizer


class _Commands(TyperGroup):
    """The commands; an option under another tool's name is an error that gives ours."""

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401 - click's context, of the copy that typer brings or of another
        try:
            return super().invoke(ctx)
        except Exception as error:
            if type(error).__name__ == "NoSuchOption":
                _name_ours(error)
            raise


def _name_ours(error: Any) -> None:  # noqa: ANN401 - click's error
    """Say what an option of another tool is called here: a setting of `train`, or another option."""
    command, name = error.ctx.info_name, error.option_name.lstrip("-").replace("-", "_")
    if command == "train":
        settings = {**{key: f"model.{ours}" for key, ours in hints.SPEC.items()}, **hints.RUN}
        settings |= {ours.partition(",")[0].rpartition(".")[2]: ours for ours in settings.values()}
        ours = settings.get(name, "").partition(",")[0]
        ours += "=VALUE, a setting without dashes" if ours else ""
    else:
        ours = hints.GENERATION.get(name, "")
        ours = f"--{ours.replace('_', '-')}"
        known = [flag for option in error.ctx.command.params for flag in option.opts]
        ours = ours if ours.partition(",")[0] in known else ""
    if ours:
        error.message, error.possibilities = hints.renamed(error.option_name, ours), None


app = typer.Typer(
    name="glasshouse",
    cls=_Commands,
    help="Train transformers and look inside them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(tokenizer.app, name="tokenizer")
app.add_typer(data.app, name="data")
app.add_typer(steer.app, name="steer")
app.add_typer(probe.app, name="probe")
app.add_typer(training.app)
app.add_typer(sweep.app)
app.add_typer(plan.app)
app.add_typer(evaluation.app)
app.add_typer(generation.app)
app.add_typer(translation.app)
app.add_typer(classification.app)
app.add_typer(look.app)
app.add_typer(notes.app)
app.add_typer(serve.app)
app.add_typer(demo.app)
app.add_typer(model.app)
app.add_typer(doctor.app)


def _version(value: bool) -> None:
    if value:
        try:
            import torch

            machine = f"torch {torch.__version__}, {gh.device.describe(gh.device.fastest())}"
        except (ImportError, OSError):
            machine = "torch cannot be imported: see glasshouse doctor"
        print(f"glasshouse {gh.__version__}, {machine}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print versions and device, and exit."),
    ] = False,
) -> None:
    """Train transformers and look inside them."""


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
