"""`glasshouse sweep`: a run with every combination of some settings, in one table and one plot."""

from __future__ import annotations

import math
import os
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import glasshouse as gh
from glasshouse.cli import screen

if TYPE_CHECKING:
    from glasshouse.training.sweep import Outcome

app = typer.Typer()

PLOT = "sweep.svg"
TRAIN = "glasshouse train --no-baselines"  # which would take longer than many a trial


@app.command(epilog="Example: glasshouse sweep run.toml train.lr=1e-3,3e-3 train.seed=0,1,2 --out runs/rates")
def sweep(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A TOML file or the name of a recipe.")],
    settings: Annotated[
        list[str],
        typer.Argument(metavar="KEY=VALUE[,VALUE...]", help="Settings; each with several values is tried with all."),
    ],
    out: Annotated[Path, typer.Option(help="The folder of the trials, each in one of its own.")] = Path("runs/sweep"),
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Trials at once (default: one on each GPU, otherwise one).")
    ] = None,
) -> None:
    """Train every combination of settings, and show which reached the lowest validation loss.

    Commas separate the values to try; a value that is a list is written in brackets, as data.columns=["en","de"].
    Trials that differ in train.seed alone are one row, with their mean and standard deviation.

    The same command goes on where it was interrupted: trials that have ended are not trained again.
    """
    with screen.waiting("loading torch"):
        for trial in (trials := gh.training.sweep.trials(settings)):
            gh.Run.load(run, *trial.settings)  # a mistake in one is found before the first is trained
        gpus = _gpus()
    at_once = min(len(trials), jobs or max(1, len(gpus)))
    devices = [gpus[number % len(gpus)] if len(gpus) > 1 else "" for number in range(at_once)]
    ended: list[Outcome] = []

    def on_end(outcome: Outcome) -> None:
        ended.append(outcome)
        said = outcome.error or f"validation loss {outcome.last:.4f}"
        print(f"{len(ended)}/{len(trials)} {outcome.trial.name}: {said}, {outcome.seconds:.0f} s", file=sys.stderr)

    command = [sys.executable, "-m", *TRAIN.split(), run]
    outcomes = gh.training.sweep.sweep(command, settings, out, devices, on_end)
    _print(outcomes)
    if gh.training.sweep.draw(outcomes, out / PLOT):
        print(f"curves: {out / PLOT}")
    if any(one.error for one in outcomes):
        raise typer.Exit(1)


def _gpus() -> list[str]:
    """Return what CUDA_VISIBLE_DEVICES calls each GPU."""
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    numbers = [str(number) for number in range(torch.cuda.device_count())]
    return visible.split(",")[: len(numbers)] if visible else numbers


def _print(outcomes: list[Outcome]) -> None:
    groups = gh.training.sweep.by_settings(outcomes)
    keys = list(groups[0][0])
    several = any(len(found) > 1 for _, found in groups)
    rows = []
    for swept, found in groups:
        last = [one.last for one in found]
        step, lowest = min((one.lowest for one in found), key=lambda one: one[1])
        spread = f"{statistics.stdev(last):.4f}" if len(last) > 1 and all(map(math.isfinite, last)) else ""
        shown = [f"{statistics.fmean(last):.4f}", *([spread] if several else []), f"{lowest:.4f}", f"{step:,}"]
        rows.append([*(swept[key] for key in keys), *shown])
    figures = ["validation loss", *(["sd over seeds"] if several else []), "lowest", "at step"]
    screen.table(rows, [*keys, *figures], right=range(len(keys), len(keys) + len(figures)))
