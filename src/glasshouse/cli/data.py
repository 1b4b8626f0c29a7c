"""`glasshouse data`: tokenize datasets to disk, and show the batches that training sees."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich import filesize

import glasshouse as gh
from glasshouse.cli import batch_view, screen, texts
from glasshouse.escaping import escape_control

app = typer.Typer(help="Tokenize datasets to disk, and inspect the batches of a run.", no_args_is_help=True)

CorpusArgument = Annotated[
    Path, typer.Argument(metavar="CORPUS", help="A folder written by `glasshouse data prepare`.")
]
Kind = Literal["text", "pairs", "labelled", "tagged", "chat", "preferences"]
Split = Literal["train", "validation", "test"]

MANIFEST = "manifest.json"  # written last
LARGEST = 10**12  # larger steps and seeds are typing errors


@app.command(epilog="Example: glasshouse data prepare 'books/**/*.txt' --tokenizer runs/tok --out runs/books")
def prepare(
    source: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE",
            help="Files, folders, quoted globs such as 'data/**/*.txt', or one built-in dataset; for kind pairs, two "
            "plain text files are aligned line by line.",
        ),
    ],
    tokenizer: Annotated[str, typer.Option(help="A folder with a tokenizer.json.")],
    out: Annotated[Path, typer.Option(help="The folder to write; an interrupted job in it resumes.")],
    kind: Annotated[
        Kind | None, typer.Option(help="The kind of data.", show_default="inferred from the columns")
    ] = None,
    column: texts.Columns = None,
    split: Annotated[Split, typer.Option(help="The split of a built-in dataset.")] = "train",
    separator: Annotated[
        str | None,
        typer.Option(help="Separator between documents in a plain text file.", show_default="one document per file"),
    ] = None,
    errors: texts.Errors = "strict",
    part: Annotated[
        str | None,
        typer.Option(
            metavar="K/N",
            help="Prepare only the k-th of n parts, into a folder of its own in --out: one part per machine, then "
            "`glasshouse data join`.",
            show_default="everything",
        ),
    ] = None,
) -> None:
    """Tokenize a dataset to disk; run again, it resumes where it stopped."""
    numbers = None if part is None else _parse_part(part)
    if numbers and not Path(tokenizer).exists():
        raise gh.InputError(
            f"there is no tokenizer in {tokenizer!r}, and all parts need the same one; train it first, on one "
            f"machine, with `glasshouse tokenizer train FILES --out {tokenizer}`."
        )
    tok = gh.Tokenizer.load(tokenizer)
    written = gh.data.part_folder(out, numbers) if numbers else out
    before = (written / MANIFEST).exists()
    named = gh.data.is_builtin(source)
    done = 0
    began = time.perf_counter()
    with screen.progress(**{"tokenizing": "items"} if named else {}) as show_progress:

        def progress(stage: str, so_far: int, total: int) -> None:
            nonlocal done
            done = so_far
            show_progress(stage, so_far, total)

        corpus = gh.data.prepare(
            source,
            tok,
            out,
            kind=kind,
            columns=texts.listed(column),
            split=split,
            separator=separator,
            errors=errors,
            part=numbers,
            progress=progress,
        )
    seconds = time.perf_counter() - began
    speed = f"{done / seconds:,.0f} items/s" if named else f"{filesize.decimal(int(done / seconds))}/s"
    _report(corpus, before, ("throughput", speed))


def _parse_part(text: str) -> tuple[int, int]:
    if not (found := re.fullmatch(r"([0-9]{1,5})/([0-9]{1,5})", text)):
        raise gh.InputError(f"--part is {text!r}, but it must be a number and the number of parts, such as 3/64.")
    return int(found[1]), int(found[2])


def _report(corpus: gh.data.Corpus, before: bool, *more: tuple[str, str]) -> None:
    size = sum(path.stat().st_size for path in corpus.folder.rglob("*") if path.is_file())
    screen.table(
        [
            ("folder", f"{escape_control(str(corpus.folder))}{', already complete' if before else ''}"),
            ("corpus", repr(corpus)),
            ("tokens", f"{corpus.n_tokens:,}"),
            ("items", f"{len(corpus):,}"),
            ("tokens per item", f"{corpus.n_tokens / max(1, len(corpus)):.1f}"),
            ("on disk", filesize.decimal(size)),
            ("backend", corpus.manifest["backend"]),
            *([] if before else more),
        ]
    )


@app.command(epilog="Example: glasshouse data join parts --out ids")
def join(
    parts: Annotated[Path, typer.Argument(metavar="PARTS", help="The folder that parts were prepared into.")],
    out: Annotated[Path, typer.Option(help="The folder to write; an interrupted job in it resumes.")],
) -> None:
    """Join parts into one corpus, equal byte for byte to one that was prepared at once."""
    before = (out / MANIFEST).exists()
    with screen.progress(joining="tokens") as progress:
        corpus = gh.data.join(parts, out, progress=progress)
    _report(corpus, before)


@app.command("list", epilog="Example: glasshouse data list")
def list_() -> None:
    """List the built-in datasets, which need no download."""
    hints: dict[str, None] = {}
    found = []
    for name in gh.data.builtin_datasets():
        one = gh.data.builtin_dataset(name)
        try:
            sizes = [f"{size:,}" for size in one.sizes().values()]
        except gh.GlasshouseError as error:
            sizes = ["-"] * 3
            hints[str(error)] = None
        found.append((name, one.kind, *sizes, one.description))
    screen.table(found, header=("name", "kind", "train", "validation", "test", "description"), right=(2, 3, 4))
    for hint in hints:
        print(f"- {hint}")


@app.command(epilog="Example: glasshouse data show runs/books --step 1000 --seq-len 64 --limit 2")
def show(
    corpus: CorpusArgument,
    step: Annotated[int, typer.Option(min=0, max=LARGEST, help="The training step, from 0.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences per step, over all processes.")] = 8,
    seq_len: Annotated[
        int, typer.Option(min=1, help="Tokens per sequence of text; maximum for other kinds of data.")
    ] = 128,
    seed: Annotated[int, typer.Option(min=0, max=LARGEST, help="The seed of the run.")] = 0,
    masked: Annotated[bool, typer.Option("--masked", help="Mask tokens, as in masked language modelling.")] = False,
    rank: Annotated[int, typer.Option(min=0, help="The rank of the process, from 0.")] = 0,
    world_size: Annotated[int, typer.Option(min=1, help="The number of processes.")] = 1,
    limit: Annotated[int | None, typer.Option(min=0, help="Sequences to print.", show_default="all")] = None,
) -> None:
    """Print the batch of a training step: each sequence's sample, origin, tokens and loss mask."""
    opened = _open(corpus)
    objective = gh.objectives.MaskedLM() if masked else gh.objectives.objectives_on(opened.kind)[0]
    dataset = objective.make_dataset(opened, batch_size=batch_size, seq_len=seq_len, seed=seed)
    batches = gh.data.Batches(dataset, batch_size, rank=rank, world_size=world_size)
    indices, batch = batches.sample_indices(step), batches.at(step)
    process = f", rank {rank} of {world_size}" if world_size > 1 else ""
    print(f"{opened!r}, step {step}{process}: samples {indices[0]} to {indices[-1]}")
    console = screen.console()
    console.print(batch_view.legend(opened.kind, masked))
    for row, index in list(enumerate(indices))[:limit]:
        print(f"sample {index}, epoch {index // len(dataset)}, {escape_control(dataset.origin(index))}")
        batch_view.draw(batch_view.lines(batch, row, opened, masked), console.print)
    print(batch_view.summary(batch))
    if too_long := getattr(dataset, "n_too_long", 0):
        print(f"{too_long:,} of {len(opened):,} items are longer than {seq_len} tokens and skipped")


def _open(folder: Path) -> gh.data.Corpus:
    """Open a corpus and check its tokenizer, before anything is printed."""
    corpus = gh.data.Corpus.open(folder)
    _ = corpus.tokenizer
    return corpus


@app.command(epilog="Example: glasshouse data verify runs/books")
def verify(corpus: CorpusArgument) -> None:
    """Verify the checksums of a corpus; exit with 1 if it is corrupt."""
    opened = _open(corpus)
    shards = len(opened.manifest["shards"])
    print(f"ok: {opened!r}, {shards} {'shard' if shards == 1 else 'shards'}, encoded with {opened.tokenizer!r}")
