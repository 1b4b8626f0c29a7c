"""`glasshouse train`: train from a recipe or a run file, with progress and a final evaluation."""

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
    from glasshouse.training import Result

app = typer.Typer()

MINUTES = 10  # of a run that is given no more than text
LENGTHS = ("train.steps", "train.epochs", "train.minutes")
PROMPT = 40  # characters of a suggested prompt


@app.command(epilog="Example: glasshouse train stdlib train.steps=2000 model.n_layers=6 train.out=runs/longer")
def train(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="A TOML file, a run folder, or the name of a recipe.",
        ),
    ] = "stdlib",
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Settings to override, such as train.steps=2000."),
    ] = None,
    start: Annotated[
        str | None,
        typer.Option("--from", metavar="MODEL", help="A model to fine-tune: a model or run folder, or a hub id."),
    ] = None,
    baselines: Annotated[
        bool,
        typer.Option(
            help="At the end, compare with gzip, xz and byte n-gram counts on the same text; not with train.minutes."
        ),
    ] = True,
) -> None:
    """Train a model; the same command resumes an interrupted run.

    Without an argument it trains a small decoder on Python's standard library, in about five minutes on two cores.

    With no more than data.path it trains on your text for ten minutes (train.minutes=10), by a model of the size that
    reaches the lowest loss in that time.

    Ctrl-C saves a checkpoint and stops; a second Ctrl-C stops at once.

    Recipes, each with data of its own unless data.path names yours:

    \b
    stdlib               a decoder: the next token of Python code, or of your text
    translate            an encoder-decoder for 10,000 pairs of yours or more
    dates                an encoder-decoder: dates to ISO, or few pairs of yours
    classify             an encoder: a label for each text; also called langid, its data
    masked-lm            an encoder: masked tokens of Python code, or of your text
    paraphrases          an encoder: vectors of sentences, for gh.embed
    finetune-chat        a decoder of yours: conversations
    dpo                  a decoder of yours: preferred answers
    finetune-classifier  an encoder of yours: a label for each text, or a tag for each word
    vaswani-base         the encoder-decoder of the paper, for millions of pairs
    modern-base          the decoder that learns fastest, for a GPU and some hundred million tokens of yours
    python-3m            the bundled decoder of Python code, for a GPU
    english-4m           the bundled decoder of English, for a GPU; its text comes from benchmarks/english_text.py
    demo                 the decoder that glasshouse demo trains, in three minutes
    """  # noqa: D301 - click's mark of lines that it is not to wrap
    given = [*(settings or [])]
    if "=" in run and not Path(run).exists():  # settings alone
        run, given = "stdlib", [run, *given]
        if start is None and _names_only_data(given):
            given.append(f"train.minutes={MINUTES}")
    if start is not None:
        given.append(f"model.from={json.dumps(start)}")
    with screen.waiting("loading torch"):
        loaded = gh.Run.load(run, *given)
    baselines &= loaded.train.minutes is None  # whose time they would exceed
    if not gh.training.is_main_process():
        _train_silently(loaded)
        return
    stopped: gh.training.StoppedError | None = None
    with gh.training.Display(gh.training.units_of(loaded.data)).open() as display:
        try:
            result = gh.train(loaded, display)
            bits = _baselines(result, display) if baselines else {}
        except gh.training.StoppedError as error:
            stopped = error
        except KeyboardInterrupt:  # while preparing the data, which is not lost
            display.log("stopped before the first step; the same command resumes preparing the data.")
            raise typer.Exit(130) from None
    if stopped is not None:
        print(f"saved after step {stopped.step:,}; the same command resumes from there.", file=sys.stderr)
        raise typer.Exit(128 + stopped.number)
    print_summary(result, bits)


def _names_only_data(settings: list[str]) -> bool:
    """Whether settings are of a text of the user's, and leave its model and the length of the run open."""
    keys = {setting.partition("=")[0].strip() for setting in settings}
    return "data.path" in keys and not keys & {"model.preset", "model.kind", "model.from", "model.depth", *LENGTHS}


def _train_silently(run: gh.Run) -> None:
    """Train as one of several processes, of which the first shows everything."""
    try:
        gh.train(run, progress=False)
    except gh.training.StoppedError as error:
        raise typer.Exit(128 + error.number) from None


def _baselines(result: Result, display: gh.training.Display) -> dict[str, float]:
    if "bits_per_byte" not in result.report.metrics:
        return {}
    display.stage("comparing with gzip, xz and byte n-gram counts", 0, 0)
    assert isinstance(result.datasets, gh.training.Datasets)  # a command has no others
    return gh.evaluation.baseline_bits(result.datasets.validation, result.datasets.train)


def print_summary(result: Result, bits: Mapping[str, float]) -> None:
    """Print the final metrics, the baselines in bits per byte, examples, and commands to try next."""
    print(f"{_heading(result)}:\n")
    evaluation.show(result.report, bits)
    print(f"\nthe run is in {result.folder}, the model in {result.folder / 'model'}; try:")
    for command in _next(result):
        print(f"  {command}")


def _heading(result: Result) -> str:
    """Describe what the final metrics are of, and why those of the last validation differ."""
    steps = f"after {result.steps:,} step{'s' * (result.steps != 1)}"
    if result.saved_step != result.steps:
        steps += f", the best model, of step {result.saved_step:,}"
    evaluated, total = result.val_coverage
    if evaluated == total:
        return f"on the validation set, {steps}"
    if result.report.n_evaluated < result.report.n_items:  # so that a budget of minutes was kept
        return f"on {result.report.n_evaluated:,} of {total:,} validation samples, {steps}"
    return (
        f"on the whole validation set of {total:,} samples (validation during training used {evaluated:,}), {steps}"
    )


def _next(result: Result) -> Iterator[str]:
    folder = shlex.quote(str(result.folder))
    lines = (line for example in result.report.examples for line in example.input.splitlines())
    prompt = next(filter(str.strip, lines), "")
    assert isinstance(result.datasets, gh.training.Datasets)
    match result.datasets.train.kind:
        case "text" if isinstance(result.model, gh.models.Decoder):
            left = result.model.spec.max_len - len(result.datasets.tok.encode(prompt[:PROMPT]))
            count = min(gh.SamplingParams().max_new_tokens, max(1, left))
            yield f"glasshouse generate {folder} {shlex.quote(prompt[:PROMPT])} --max-new-tokens {count}"
        case "chat" | "preferences":
            yield f"glasshouse generate {folder} --chat"
        case "pairs" if isinstance(result.model, gh.models.Encoder):
            yield f"glasshouse serve {folder}"
        case "pairs":
            yield f"glasshouse translate {folder} {shlex.quote(prompt)}"
        case "labelled":
            yield f"glasshouse classify {folder} {shlex.quote(prompt)}"
    yield f"glasshouse eval {folder}"
    yield f"glasshouse look {folder}"
