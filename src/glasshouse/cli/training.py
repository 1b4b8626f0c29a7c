"""`glasshouse train`: a run from a recipe or a file, its progress, and at the end what it came to."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import filesize
from rich.console import Console

import glasshouse as gh
from glasshouse.cli import evaluation, screen, texts
from glasshouse.visible import clean

if TYPE_CHECKING:
    from glasshouse.training.loop import Result
    from glasshouse.training.speed import Speed
    from glasshouse.training.update import Outcome

app = typer.Typer()

PROMPT = 40  # characters of a text to go on with
QUIET = 10.0  # seconds between lines off a terminal
QUICK = 0.1  # and between changes of the line on one


class Line:
    """Shows a run as one line that changes, or off a terminal as a line now and then."""

    def __init__(self, **units: str) -> None:
        self.live = sys.stderr.isatty()
        self._units = units  # of the stages that do not count bytes
        self._console = Console(stderr=True)
        self._bars = ExitStack()
        self._show: Any = None
        self._shown = 0.0
        self._began = time.perf_counter()
        self._first: int | None = None

    def stage(self, name: str, done: int, total: int) -> None:
        """Draw a bar for a preparation."""
        if self._show is None:
            self._show = self._bars.enter_context(screen.progress(**self._units))
        self._show(name, done, total)

    def _end_stages(self) -> None:
        self._bars.close()
        self._show = None

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._end_stages()
        self._clear()
        print(clean(text), file=sys.stderr, flush=True)

    def step(self, step: int, steps: int, outcome: Outcome, speed: Speed) -> None:
        """Show where the run is."""
        self._end_stages()
        now = time.perf_counter()
        if self._first is None:
            self._first, self._began = step, now
        elif step < steps and now - self._shown < (QUICK if self.live else QUIET):
            return
        self._shown = now
        left = (now - self._began) / max(1, step - self._first) * (steps - step)
        parts = [
            f"step {step:,} of {steps:,}",
            f"loss {outcome.loss:.4f}",
            f"{speed.tokens_per_second:,.0f} tokens/s",
            f"{_clock(left)} left" if step > self._first else "",
            filesize.decimal(speed.memory),
            f"{speed.share:.0%} of the matmul peak",
        ]
        parts = [part for part in parts if part]
        if self.live:
            self._clear()
            print(_fit(parts, self._console.width - 1), end="", file=sys.stderr, flush=True)
        else:
            print(_fit(parts), file=sys.stderr, flush=True)

    def evaluated(self, step: int, figures: dict[str, float]) -> None:
        """Print how the model fares on what is held out."""
        self.say(f"step {step:,}: held out, {_figures(figures)}")

    def _clear(self) -> None:
        if self.live:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)

    @contextmanager
    def open(self) -> Iterator[Line]:
        """Leave the terminal as it was."""
        try:
            yield self
        finally:
            self._end_stages()
            self._clear()


def _fit(parts: list[str], width: int | None = None) -> str:
    """Join as many parts as a line holds; of one that goes on in the next row, only the last row could be cleared."""
    line = " · ".join(parts)
    if width is None or len(line) <= width:
        return line
    return _fit(parts[:-1], width) if len(parts) > 1 else line[:width]


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _figures(figures: dict[str, float]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in figures.items())


@app.command(epilog="Example: glasshouse train stdlib train.steps=2000 model.n_layers=6 train.out=runs/longer")
def train(
    run: Annotated[
        str,
        typer.Argument(
            metavar="[RUN]",
            help="A TOML file, or a recipe: stdlib, dates, langid, masked, finetune-chat, finetune-labels or "
            "vaswani-base.",
        ),
    ] = "stdlib",
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings on top, such as train.steps=2000."),
    ] = None,
    start: Annotated[
        str | None,
        typer.Option("--from", metavar="MODEL", help="A folder or hub id of a model to start from: fine-tuning."),
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
    loaded = gh.Run.load(run, *given)
    if start is not None:
        if lost := [setting for setting in given if setting.startswith("model.")]:
            raise gh.InputError(f"--from is given, so {lost[0]} is not a choice any more; leave one of them out.")
        loaded = replace(loaded, model={"from": start})
    stopped: gh.training.StoppedError | None = None
    with Line(**_units(loaded)).open() as line:
        try:
            result = gh.train(loaded, line)
        except gh.training.StoppedError as error:
            stopped = error
        except KeyboardInterrupt:  # while the text was read: what is there is found again
            raise typer.Exit(130) from None
    if stopped is not None:
        print(f"saved after step {stopped.step:,}; the same command goes on from there.", file=sys.stderr)
        raise typer.Exit(128 + stopped.number)
    report(result, baselines)


def _units(run: gh.Run) -> dict[str, str]:
    units = {"merging": "tokens", "measuring": "rows", "writing": "tokens at most"}
    if len(run.data.path) == 1 and texts.is_builtin(run.data.path[0]):
        units |= {"reading": "items", "tokenizing": "items"}
    return units


def report(result: Result, baselines: bool) -> None:
    """Print what a run came to, something the model says, and what to try next."""
    bits = {}
    if baselines and "bits_per_byte" in result.report.figures:
        bits = gh.evaluation.baseline_bits(result.material.validation, result.material.train)
    print(f"{_heading(result)}:\n")
    evaluation.show(result.report, bits)
    print(f"\nthe run is in {result.folder}, the model in {result.folder / 'model'}; try:")
    for command in _next(result):
        print(f"  {command}")


def _heading(result: Result) -> str:
    """Say what the closing figures are of, and why those of the last evaluation differ."""
    steps = f"after {result.steps:,} step{'s' * (result.steps != 1)}"
    if result.kept != result.steps:
        steps += f", the model of step {result.kept:,}, which was the best"
    read, there = result.tried
    if read == there:
        return f"on what was held out, {steps}"
    return f"on all {there:,} samples that were held out (evaluations while training read {read:,}), {steps}"


def _next(result: Result) -> Iterator[str]:
    place = shlex.quote(str(result.folder / "model"))
    lines = (line for example in result.report.examples for line in example.read.splitlines())
    read = next(filter(str.strip, lines), "")
    match result.material.train.kind:
        case "text" if isinstance(result.model, gh.models.Decoder):
            yield f"glasshouse generate {place} {shlex.quote(read[:PROMPT])}"
        case "chat":
            yield f"glasshouse generate {place} --chat"
        case "pairs":
            yield f"glasshouse generate {place} {shlex.quote(read)}"
    yield f"glasshouse eval {place}"
    yield f"glasshouse look {shlex.quote(str(result.folder))}"
