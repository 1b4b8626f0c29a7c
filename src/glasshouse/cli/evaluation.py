"""`glasshouse eval`: evaluate a model on data, with compression baselines."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import glasshouse as gh
from glasshouse.cli import screen, texts
from glasshouse.cli.data import Kind, Split
from glasshouse.cli.model import Device, Ignore, ModelArgument, Revision
from glasshouse.escaping import escape_control, show_whitespace

if TYPE_CHECKING:
    from glasshouse.evaluation import TaskReport
    from glasshouse.inspection.editing import Edit

app = typer.Typer()

LONGEST = 160  # characters of a text to print

FORMATS = {
    "loss": ("loss", "{:.4f}", "nats per {unit}"),
    "perplexity": ("perplexity", "{:,.2f}", "per {unit}"),
    "accuracy": ("accuracy", "{:.2%}", "of {unit}s"),
    "margin": ("margin", "{:.4f}", "of the reward of the chosen answer over that of the rejected one"),
    "chosen_loss": ("chosen answers", "{:.4f}", "nats per token"),
    "rejected_loss": ("rejected answers", "{:.4f}", "nats per token"),
    "teacher_loss": ("teacher's loss", "{:.4f}", "nats per {unit}"),
    "bits_per_byte": ("bits per byte", "{:.4f}", ""),
    "acceptance_rate": ("acceptance", "{:.2%}", "of drafts, which the model itself would have written"),
    "recall_at_1": ("recall at 1", "{:.2%}", "of texts find their match among {count:,}"),
    "exact_match": ("exact match", "{:.2%}", "of {texts}"),
    "f1": ("F1", "{:.4f}", "macro average, 0 to 1"),
    "bleu": ("BLEU", "{:.2f}", "0 to 100, over {texts}, {signature}"),
    "chrf": ("chrF", "{:.2f}", "0 to 100, over {texts}, {signature}"),
}
UNITS = {"labelled": "label", "tagged": "label", "preferences": "pair"}  # what a target is, if not a token


# Options of an evaluation on data, by parameter, which tasks settle themselves, and the other way round.
OF_DATA = ("kind", "column", "split", "errors", "seq_len", "batch_size", "generate", "beams", "n_best", "baselines")
OF_TASKS = ("include_path", "num_fewshot")


@app.command(
    "eval",
    epilog="Example: glasshouse eval runs/stdlib 'books/*.txt' --baselines, or glasshouse eval runs/stdlib --tasks "
    "arc_easy,hellaswag --ablate 'z.3[head=5]'",
)
def evaluate(
    ctx: typer.Context,
    model: ModelArgument,
    data: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="DATA",
            help="Files, folders, quoted globs such as 'data/**/*.txt', a built-in dataset, or a folder written by "
            "`glasshouse data prepare`.",
            show_default="the validation set of the model's run",
        ),
    ] = None,
    kind: Annotated[
        Kind | None, typer.Option(help="The kind of data.", show_default="inferred from the model and the columns")
    ] = None,
    column: texts.Columns = None,
    split: Annotated[Split, typer.Option(help="The split of a built-in dataset.")] = "validation",
    errors: texts.Errors = "strict",
    seq_len: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens per sequence of text; maximum for other kinds of data.",
            show_default="the model's max_len",
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences per forward pass.")] = 32,
    limit: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Samples to evaluate, a fixed random subset; of each task, its first ones.",
            show_default="all",
        ),
    ] = None,
    generate: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Texts to generate for exact match, BLEU and chrF, with pairs and chat; 0 skips these metrics.",
            show_default="all",
        ),
    ] = None,
    beams: Annotated[int, typer.Option(min=1, help="Beam width of generation; 1 is greedy.")] = 1,
    n_best: Annotated[int, typer.Option(min=1, help="Beam search hypotheses to print in each example.")] = 1,
    baselines: Annotated[
        bool,
        typer.Option(
            "--baselines", help="Add bits per byte of gzip, xz and n-gram counts from the run's training set."
        ),
    ] = False,
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            help="Tasks of lm-eval instead of data, as a,b: names, groups or quoted patterns such as 'mmlu_*'; can "
            "be repeated."
        ),
    ] = None,
    include_path: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="A folder with task files of your own, for --tasks.")
    ] = None,
    num_fewshot: Annotated[
        int | None, typer.Option(min=0, help="Examples in each prompt of a task.", show_default="the task's")
    ] = None,
    ablate: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SITE",
            help="A site to set to zero in every forward pass, such as 'z.3[head=5]' or ffn_out.2; can be repeated.",
        ),
    ] = None,
    steer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE=SCALE",
            help="A steering vector of `glasshouse steer make` to add at all positions, times a scale; can be "
            "repeated.",
        ),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print one JSON object: metrics, signatures, n_targets, n_items, n_evaluated, examples ...; with "
            "--tasks metrics, n_fewshot, n_items and n_evaluated of each task by its name.",
        ),
    ] = False,
    device: Device = "auto",
    revision: Revision = None,
    ignore: Ignore = None,
) -> None:
    """Evaluate a model on data (loss, perplexity, accuracy, bits per byte, scores of text) or on tasks of lm-eval."""
    _check_alone(ctx, tasks is not None)
    if tasks is not None:
        os.environ.setdefault("TQDM_DISABLE", "1")  # before tqdm is imported: the bars of lm-eval and datasets
        loaded, tok = _load(model, device, revision, ignore)
        with gh.edit(loaded, _edits(loaded, ablate or (), steer or ())):
            _on_tasks(loaded, tok, tasks, include_path, limit, num_fewshot, as_json=as_json)
        return
    run, train_corpus, val_corpus = _run(model)
    source = data or val_corpus
    if source is None:
        raise gh.InputError("there is no data to evaluate on; name files, a prepared corpus or a built-in dataset.")
    loaded, tok = _load(model, device, revision, ignore)
    units = {"tokenizing": "items"} if data and gh.data.is_builtin(data) else {}
    with (
        screen.progress(**units, evaluating="samples", generating="tokens at most") as progress,
        gh.evaluation.opened(
            source,
            tok,
            loaded.spec,
            kind=kind,
            objective=None if run is None or kind else run.train.objective,
            columns=texts.listed(column),
            split=split,
            errors=errors,
            progress=progress,
        ) as corpus,
        gh.edit(loaded, _edits(loaded, ablate or (), steer or ())),
    ):
        if kind is None and data and corpus.manifest.get("columns"):
            print(f"the data are of kind {described(corpus)}", file=sys.stderr)
        if corpus.kind == "preferences":
            print("without the reference of training: by the model's own log-probabilities", file=sys.stderr)
        on_train = (
            train_corpus is not None
            and corpus is not val_corpus
            and corpus.folder.resolve() == train_corpus.folder.resolve()
        )
        bits = gh.evaluation.baseline_bits(corpus, None if on_train else train_corpus) if baselines else {}
        chosen = None if run is None else run.train.objective
        report = gh.evaluate(
            loaded,
            tok,
            corpus,
            objective=chosen if chosen is not None and chosen.data_kind == corpus.kind else None,
            seq_len=seq_len,
            batch_size=batch_size,
            limit=limit,
            generate=generate,
            beams=beams,
            n_best=n_best,
            progress=progress,
        )
    if as_json:
        table = asdict(report) | {"metrics": _finite(report.metrics)}
        print(json.dumps(table | ({"baselines": bits} if baselines else {}), ensure_ascii=False))
    else:
        show(report, bits)


def _load(
    model: str, device: Device, revision: str | None, ignore: list[str] | None
) -> tuple[gh.models.Model, gh.Tokenizer]:
    with screen.waiting("loading torch"):
        where = gh.device.resolve(device, "--device").type
    loaded, tok = gh.load(model, revision=revision, device=where, ignore=texts.listed(ignore))
    if tok is None:
        raise gh.InputError(f"{model!r} has no tokenizer; add its tokenizer.json to the folder.")
    return loaded, tok


def _check_alone(ctx: typer.Context, on_tasks: bool) -> None:
    """Raise for options that the evaluation on tasks, or the one on data, would ignore."""
    given = [name for name in ctx.params if getattr(ctx.get_parameter_source(name), "name", "") == "COMMANDLINE"]
    if on_tasks and "data" in given:
        raise gh.InputError("both data and --tasks were given; give one of them.")
    if wrong := [f"--{name.replace('_', '-')}" for name in given if name in (OF_DATA if on_tasks else OF_TASKS)]:
        advice = "for evaluations on data; leave out it or --tasks" if on_tasks else "for tasks; add --tasks"
        raise gh.InputError(f"{wrong[0]} is {advice}.")


def _edits(model: gh.models.Model, ablate: Sequence[str], steer: Sequence[str]) -> dict[str, Edit | Sequence[Edit]]:
    """Return the edits of --ablate and --steer, as gh.edit takes them."""
    edits: dict[str, list[Edit]] = {}
    for argument in steer:
        path, separator, number = argument.rpartition("=")
        try:
            scale = float(number if separator else "")
        except ValueError:
            raise gh.InputError(
                f"--steer is {argument!r}, but it must be FILE=SCALE, such as yes.safetensors=4."
            ) from None
        vector = gh.inspection.SteeringVector.load(path)
        vector.check(model, f"the steering vector {path!r}")
        edits.setdefault(vector.site, []).append(gh.inspection.add(scale * vector.vector))
    for site in ablate:
        edits.setdefault(site, []).append(0.0)
    return dict(edits)


def _on_tasks(
    model: gh.models.Model,
    tok: gh.Tokenizer,
    tasks: Sequence[str],
    include_path: Path | None,
    limit: int | None,
    num_fewshot: int | None,
    *,
    as_json: bool,
) -> None:
    """Evaluate on tasks of lm-eval, and print their metrics."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    with screen.waiting("loading lm-eval"):
        evaluate_tasks = gh.evaluation.evaluate_tasks
    with screen.progress(scoring="texts", generating="tokens at most") as progress:
        reports = evaluate_tasks(
            model,
            tok,
            texts.listed(tasks),
            include_path=include_path,
            limit=limit,
            num_fewshot=num_fewshot,
            progress=progress,
        )
    if as_json:
        found = {name: asdict(report) | {"metrics": _finite(report.metrics)} for name, report in reports.items()}
        print(json.dumps(found, ensure_ascii=False))
    else:
        show_tasks(reports)


def show_tasks(reports: Mapping[str, TaskReport]) -> None:
    """Print the metrics of tasks, each beside its standard error."""
    rows = []
    for name, report in reports.items():
        for key, value in report.metrics.items():
            metric, _, filtered = key.partition(",")
            if metric.endswith("_stderr"):
                continue
            error = report.metrics.get(f"{metric}_stderr,{filtered}")
            label = metric if filtered == "none" else f"{metric}, {filtered}"
            items = f"{report.n_evaluated:,}" + f" of {report.n_items:,}" * (report.n_evaluated < report.n_items)
            shots = "" if report.n_fewshot is None else str(report.n_fewshot)
            rows.append((name, label, f"{value:.4f}", "" if error is None else f"{error:.4f}", shots, items))
    screen.table(rows, header=("task", "metric", "value", "stderr", "few-shot", "items"), right=(2, 3, 4, 5))


def _run(model: str) -> tuple[gh.Run | None, gh.data.Corpus | None, gh.data.Corpus | None]:
    """Return the run that a model is in, and its training and validation sets; None for what is not there."""
    here = Path(model).expanduser().resolve()
    folder = next((path for path in (here, *here.parents[:2]) if gh.training.is_run(path)), None)
    if folder is None:
        return None, None, None
    run = gh.Run.load(folder / "run.toml")
    if not (folder / "data").is_dir():  # a run that was copied without its data, such as a bundled model
        return run, None, None
    return run, *gh.training.open_datasets(run.data, folder)


def described(corpus: gh.data.Corpus) -> str:
    """Return the kind of a corpus, and its columns."""
    columns = corpus.manifest.get("columns")
    return f"{corpus.kind}, in the columns {escape_control(', '.join(columns))}" if columns else corpus.kind


def _finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Replace NaN and infinity, which JSON lacks, by None."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


def show(report: gh.evaluation.Report, baseline_bits: Mapping[str, float]) -> None:
    """Print metrics, baselines and examples."""
    unit = "pair" if "recall_at_1" in report.metrics else UNITS.get(report.kind, "token")
    texts = f"{report.n_generated:,} texts"
    if report.n_generated < report.n_items:
        texts = f"{report.n_generated:,} of {report.n_items:,} texts"
    rows = []
    for name, value in report.metrics.items():
        label, form, note = FORMATS.get(name, (name, "{:.4f}", ""))
        signature = report.signatures.get(name, "")
        note = note.format(unit=unit, texts=texts, count=report.n_evaluated, signature=signature)
        rows.append((label, form.format(value), note))
    if report.kind == "pairs" and report.n_generated and "bleu" not in report.metrics:
        rows.append(("BLEU", "-", "needs sacrebleu: pip install 'glasshouse[translation]'"))
    rows += [(name, f"{value:.4f}", "bits per byte") for name, value in baseline_bits.items()]
    kind = "sequences" if report.kind == "text" else "items"
    among = f", in {report.n_evaluated:,} of {report.n_items:,} {kind}" * (report.n_evaluated < report.n_items)
    rows.append(("evaluated on", f"{report.n_targets:,}", f"{unit}s{among}"))
    if report.n_too_long:
        rows.append(("skipped", f"{report.n_too_long:,}", "items longer than seq_len"))
    screen.table(rows, right=(1,))
    for number, example in enumerate(report.examples, 1):
        print(f"\nexample {number}")
        lines = [(name, _shorten(getattr(example, name))) for name in ("input", "reference", "prediction")]
        lines += [
            (f"best {rank}", f"{score:.4f}  {_shorten(text)}") for rank, (score, text) in enumerate(example.n_best, 1)
        ]
        screen.table(lines)


def _shorten(text: str) -> str:
    """Return a printable form of a text; of a long one, its start and end."""
    half = LONGEST // 2
    parts = [text] if len(text) <= LONGEST else [text[:half], text[-half:]]
    return " … ".join(map(show_whitespace, parts))
