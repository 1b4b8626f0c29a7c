"""`glasshouse train`: a run from a recipe or a file, its progress, and at the end what it came to."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import glasshouse as gh
from glasshouse.cli import evaluation, screen

if TYPE_CHECKING:
    from glasshouse.training.loop import Result

app = typer.Typer()

PROMPT = 40  # characters of a text to go on with


@app.command(epilog="Example: glasshouse train stdlib train.steps=2000 model.n_layers=6 train.out=runs/longer")
def train(
    run: Annotated[
        str,
        typer.Argument(
            metavar="[RUN]",
            help="A TOML file, the folder of a run, or a recipe: stdlib, dates, langid, masked, finetune-chat, "
            "finetune-labels or vaswani-base.",
        ),
    ] = "stdlib",
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings on top, such as train.steps=2000."),
    ] = None,
    start: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="MODEL", help="A model to start from, fine-tuning: a folder, a run or a hub id."
        ),
    ] = None,
    baselines: Annotated[
        bool, typer.Option(help="At the end, compare with gzip, xz and counts of bytes on the same text.")
    ] = True,
) -> None:
    """Train a model; the same command again goes on where it was stopped.

    Without an argument it trains a small decoder on Python's own library, about five minutes on two cores.

    Ctrl-C saves and stops, twice stops at once.
    """
    given = [*(settings or [])]
    if "=" in run and not Path(run).exists():  # settings alone
        run, given = "stdlib", [run, *given]
    if start is not None:
        given.append(f"model.from={json.dumps(start)}")
    with screen.waiting("loading torch"):
        loaded = gh.Run.load(run, *given)
    stopped: gh.training.StoppedError | None = None
    with gh.training.Display(gh.training.units_of(loaded.data)).open() as display:
        try:
            result = gh.train(loaded, display)
            bits = _baselines(result, display) if baselines else {}
        except gh.training.StoppedError as error:
            stopped = error
        except KeyboardInterrupt:  # while the text was read: what is there is found again
            display.log("stopped before the first step; the same command goes on with what is prepared.")
            raise typer.Exit(130) from None
    if stopped is not None:
        print(f"saved after step {stopped.step:,}; the same command goes on from there.", file=sys.stderr)
        raise typer.Exit(128 + stopped.number)
    report(result, bits)


def _baselines(result: Result, display: gh.training.Display) -> dict[str, float]:
    if "bits_per_byte" not in result.report.metrics:
        return {}
    display.stage("comparing with gzip, xz and counts of bytes", 0, 0)
    return gh.evaluation.baseline_bits(result.datasets.validation, result.datasets.train)


def report(result: Result, bits: Mapping[str, float]) -> None:
    """Print what a run came to, beside the baselines' bits a byte, something the model says, and what to try next."""
    print(f"{_heading(result)}:\n")
    evaluation.show(result.report, bits)
    print(f"\nthe run is in {result.folder}, the model in {result.folder / 'model'}; try:")
    for command in _next(result):
        print(f"  {command}")


def _heading(result: Result) -> str:
    """Say what the closing figures are of, and why those of the last evaluation differ."""
    steps = f"after {result.steps:,} step{'s' * (result.steps != 1)}"
    if result.saved_step != result.steps:
        steps += f", the model of step {result.saved_step:,}, which was the best"
    read, there = result.val_coverage
    if read == there:
        return f"on what was held out, {steps}"
    return f"on all {there:,} samples that were held out (evaluations while training read {read:,}), {steps}"


def _next(result: Result) -> Iterator[str]:
    place = shlex.quote(str(result.folder))
    lines = (line for example in result.report.examples for line in example.input.splitlines())
    read = next(filter(str.strip, lines), "")
    match result.datasets.train.kind:
        case "text" if isinstance(result.model, gh.models.Decoder):
            yield f"glasshouse generate {place} {shlex.quote(read[:PROMPT])}"
        case "chat":
            yield f"glasshouse generate {place} --chat"
        case "pairs":
            yield f"glasshouse generate {place} {shlex.quote(read)}"
    yield f"glasshouse eval {place}"
    yield f"glasshouse look {place}"
