"""The command that measures a model on data, beside what compressing and counting give."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

import glasshouse as gh
from glasshouse.cli import screen, texts
from glasshouse.cli.data import Kind, Split
from glasshouse.cli.model import Device, Ignore, ModelArgument, Revision, find_device
from glasshouse.escaping import escape_control, show_whitespace

app = typer.Typer()

LONGEST = 160  # characters of a text that are shown

FORMATS = {
    "loss": ("loss", "{:.4f}", "nats a {unit}"),
    "perplexity": ("perplexity", "{:,.2f}", "{unit}s to choose among"),
    "accuracy": ("accuracy", "{:.2%}", "of {unit}s"),
    "bits_per_byte": ("bits per byte", "{:.4f}", ""),
    "exact_match": ("exact match", "{:.2%}", "of {texts}"),
    "f1": ("F1", "{:.4f}", "mean over labels, 0 to 1"),
    "bleu": ("BLEU", "{:.2f}", "0 to 100, over {texts}, {signature}"),
    "chrf": ("chrF", "{:.2f}", "0 to 100, over {texts}, {signature}"),
}


@app.command("eval", epilog="Example: glasshouse eval runs/first 'books/*.txt' --baselines")
def evaluate(
    model: ModelArgument,
    data: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="DATA",
            help="Files, folders, quoted patterns such as 'data/**/*.txt', a built-in set, or a folder that "
            "`glasshouse data prepare` wrote.",
            show_default="what the model's run was tried on",
        ),
    ] = None,
    kind: Annotated[
        Kind | None, typer.Option(help="What an item is.", show_default="as the model and the columns tell")
    ] = None,
    field: Annotated[
        list[str] | None,
        typer.Option(
            help="The columns of jsonl, csv, tsv and parquet files, as a,b; or one each time it is given.",
            show_default="text; source,target; text,label; words,tags; messages",
        ),
    ] = None,
    split: Annotated[Split, typer.Option(help="Which part of a built-in set.")] = "validation",
    errors: texts.Errors = "strict",
    length: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens in a row; for items, at most.", show_default="the model's max_len"),
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Rows that are read at a time.")] = 32,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Rows or items to use, a fixed random sample.", show_default="all")
    ] = None,
    written: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Of pairs and chat, answers to write for exact match, BLEU and chrF; 0 leaves these out.",
            show_default="all",
        ),
    ] = None,
    beams: Annotated[int, typer.Option(min=1, help="Write answers by a beam search of this width.")] = 1,
    n: Annotated[
        int, typer.Option("--n", min=1, help="Show so many of the best texts of a search in each example.")
    ] = 1,
    baselines: Annotated[
        bool,
        typer.Option(
            "--baselines", help="Add what gzip, xz and counts of the run's own bytes need for the whole text."
        ),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print one object: figures, signatures, items, measured, written, examples ..."),
    ] = False,
    device: Device = "auto",
    revision: Revision = None,
    ignore: Ignore = None,
) -> None:
    """Measure how well a model does on data: what its tokens or labels cost, and how many it gets right."""
    learned, tried = _corpora(model)
    source = data or tried
    if source is None:
        raise gh.InputError("there is no data to measure on; name files, a prepared corpus or a built-in set.")
    loaded, tok = gh.load(model, revision=revision, device=find_device(device), ignore=texts.listed(ignore))
    if tok is None:
        raise gh.InputError(f"{model!r} has no tokenizer, so it reads no text; put its tokenizer.json there.")
    named = {"tokenizing": "items"} if data and len(data) == 1 and texts.is_builtin(data[0]) else {}
    with (
        screen.progress(**named, measuring="rows", writing="tokens at most") as progress,
        gh.evaluation.opened(
            source,
            tok,
            loaded.spec,
            kind=kind,
            fields=texts.listed(field),
            split=split,
            errors=errors,
            progress=progress,
        ) as corpus,
    ):
        if kind is None and data and corpus.manifest.get("columns"):
            print(f"the data are of kind {described(corpus)}", file=sys.stderr)
        itself = learned is not None and corpus is not tried and corpus.folder.resolve() == learned.folder.resolve()
        beside = gh.evaluation.baseline_bits(corpus, None if itself else learned) if baselines else {}
        report = gh.evaluate(
            loaded,
            tok,
            corpus,
            seq_len=length,
            batch_size=rows,
            limit=limit,
            generate=written,
            beams=beams,
            n=n,
            progress=progress,
        )
    if as_json:
        table = asdict(report) | {"figures": _finite(report.metrics)}
        print(json.dumps(table | ({"baselines": beside} if baselines else {}), ensure_ascii=False))
    else:
        show(report, beside)


def _corpora(model: str) -> tuple[gh.data.Corpus, gh.data.Corpus] | tuple[None, None]:
    """Return what the run that a model lies in learned from, and what it was tried on; nothing if it lies in none."""
    here = Path(model).expanduser().resolve()
    folder = next((place for place in (here, *here.parents[:2]) if gh.training.is_run(place)), None)
    if folder is None:
        return None, None
    run = gh.Run.load(folder / "run.toml")
    return gh.training.open_datasets(run.data, folder)


def described(corpus: gh.data.Corpus) -> str:
    """Return the kind of a corpus, and the columns that it was read from."""
    fields = corpus.manifest.get("columns")
    return f"{corpus.kind}, in the columns {escape_control(', '.join(fields))}" if fields else corpus.kind


def _finite(figures: Mapping[str, float]) -> dict[str, float | None]:
    """Return figures as JSON can say them, which knows neither infinity nor what is no number."""
    return {name: value if math.isfinite(value) else None for name, value in figures.items()}


def show(report: gh.evaluation.Report, beside: Mapping[str, float]) -> None:
    """Print figures and examples."""
    unit = "label" if report.kind in ("labelled", "tagged") else "token"
    texts = f"{report.n_generated:,} texts"
    if report.n_generated < report.n_items:
        texts = f"{report.n_generated:,} of {report.n_items:,} texts"
    rows = []
    for name, value in report.metrics.items():
        shown, form, of = FORMATS[name]
        told = of.format(unit=unit, texts=texts, signature=report.signatures.get(name, ""))
        rows.append((shown, form.format(value), told))
    if report.kind == "pairs" and report.n_generated and "bleu" not in report.metrics:
        rows.append(("BLEU", "-", "is computed by sacrebleu: pip install 'glasshouse[translation]'"))
    rows += [(name, f"{value:.4f}", "bits per byte") for name, value in beside.items()]
    part = "rows" if report.kind == "text" else "items"
    among = f", in {report.n_evaluated:,} of {report.n_items:,} {part}" * (report.n_evaluated < report.n_items)
    rows.append(("asked for", f"{report.n_targets:,}", f"{unit}s{among}"))
    if report.n_too_long:
        rows.append(("left out", f"{report.n_too_long:,}", "items that are longer than a row"))
    screen.table(rows, right=(1,))
    for number, example in enumerate(report.examples, 1):
        print(f"\nexample {number}")
        lines = [(name, _shorten(getattr(example, name))) for name in ("read", "expected", "said")]
        lines += [
            (f"best {rank}", f"{score:.4f}  {_shorten(text)}") for rank, (score, text) in enumerate(example.n_best, 1)
        ]
        screen.table(lines)


def _shorten(text: str) -> str:
    """Return a text as it can be shown, both its ends if it is long."""
    half = LONGEST // 2
    parts = [text] if len(text) <= LONGEST else [text[:half], text[-half:]]
    return " … ".join(map(show_whitespace, parts))
