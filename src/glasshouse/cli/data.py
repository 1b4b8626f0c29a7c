"""Commands for data: text to ids on disk, and what a model would see of them at any step."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich import filesize

import glasshouse as gh
from glasshouse.cli import batch_view, screen, texts
from glasshouse.escaping import escape_control

app = typer.Typer(help="Turn texts into ids on disk, and look at what a model sees of them.", no_args_is_help=True)

CorpusArgument = Annotated[
    Path, typer.Argument(metavar="CORPUS", help="A folder that `glasshouse data prepare` wrote.")
]
Kind = Literal["text", "pairs", "labelled", "tagged", "chat"]
Split = Literal["train", "validation", "test"]

MANIFEST = "manifest.json"  # is written last
LARGEST = 10**12  # steps and seeds beyond that are slips of the hand


@app.command(epilog="Example: glasshouse data prepare 'books/**/*.txt' --tokenizer runs/tok --out runs/books")
def prepare(
    source: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE",
            help="Files, folders, quoted patterns such as 'data/**/*.txt', or one built-in set; two plain files of "
            "kind pairs belong together line by line.",
        ),
    ],
    tokenizer: Annotated[str, typer.Option(help="A folder that holds a tokenizer.json.")],
    out: Annotated[Path, typer.Option(help="The folder to write; one that was begun with the same is finished.")],
    kind: Annotated[Kind | None, typer.Option(help="What an item is.", show_default="as the columns tell")] = None,
    field: Annotated[
        list[str] | None,
        typer.Option(
            help="The columns of jsonl, csv, tsv and parquet files, as a,b; or one each time it is given.",
            show_default="text; source,target; text,label; words,tags; messages",
        ),
    ] = None,
    split: Annotated[Split, typer.Option(help="Which part of a built-in set.")] = "train",
    separator: Annotated[
        str | None, typer.Option(help="What stands between texts in one plain file.", show_default="a file is a text")
    ] = None,
    errors: texts.Errors = "strict",
) -> None:
    """Turn texts into ids on disk; called again, it goes on where it was stopped."""
    tok = gh.Tokenizer.load(tokenizer)
    before = (out / MANIFEST).exists()
    named = len(source) == 1 and texts.is_builtin(source[0])
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
            fields=texts.listed(field),
            split=split,
            separator=separator,
            errors=errors,
            progress=progress,
        )
    seconds = time.perf_counter() - began
    speed = f"{done / seconds:,.0f} items/s" if named else f"{filesize.decimal(int(done / seconds))}/s"
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    screen.table(
        [
            ("folder", f"{escape_control(str(out))}{', already complete' if before else ''}"),
            ("corpus", repr(corpus)),
            ("tokens", f"{corpus.n_tokens:,}"),
            ("items", f"{len(corpus):,}"),
            ("tokens per item", f"{corpus.n_tokens / max(1, len(corpus)):.1f}"),
            ("on disk", filesize.decimal(size)),
            ("engine", corpus.manifest["engine"]),
            *([] if before else [("speed", speed)]),
        ]
    )


@app.command("list", epilog="Example: glasshouse data list")
def list_() -> None:
    """List the built-in sets, which need no download."""
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
    screen.table(found, header=("name", "kind", "train", "validation", "test", "what it is"), right=(2, 3, 4))
    for hint in hints:
        print(f"- {hint}")


@app.command(epilog="Example: glasshouse data show runs/books --step 1000 --length 64 --rows 2")
def show(
    corpus: CorpusArgument,
    step: Annotated[int, typer.Option(min=0, max=LARGEST, help="Which step of a run.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows in a step, over all processes.")] = 8,
    length: Annotated[int, typer.Option(min=1, help="Tokens in a row; for items, at most.")] = 128,
    seed: Annotated[int, typer.Option(min=0, max=LARGEST, help="The seed of the run.")] = 0,
    masked: Annotated[bool, typer.Option("--masked", help="Hide some tokens, as an encoder is trained.")] = False,
    rank: Annotated[int, typer.Option(min=0, help="Which process of several.")] = 0,
    ranks: Annotated[int, typer.Option(min=1, help="How many processes.")] = 1,
    rows_: Annotated[
        int | None, typer.Option("--rows", min=0, help="Rows to print.", show_default="all of the batch")
    ] = None,
) -> None:
    """Print what the model sees at a step: each row's sample, where it comes from, its tokens, and what is asked."""
    opened = _open(corpus)
    samples = _samples(opened, batch_size, length, seed, masked)
    batches = gh.data.Batches(samples, batch_size, rank=rank, world_size=ranks)
    numbers, batch = batches.sample_indices(step), batches.at(step)
    process = f", process {rank} of {ranks}" if ranks > 1 else ""
    print(f"{opened!r}, step {step}{process}: samples {numbers[0]} to {numbers[-1]}")
    there = screen.console()
    there.print(batch_view.legend(opened.kind, masked))
    for row, number in list(enumerate(numbers))[:rows_]:
        print(f"sample {number}, epoch {number // len(samples)}, {escape_control(samples.origin(number))}")
        batch_view.draw(batch_view.lines(batch, row, opened, masked), there.print)
    print(batch_view.summary(batch))
    if left_out := getattr(samples, "n_too_long", 0):
        print(f"{left_out:,} of {len(opened):,} items are longer than {length} tokens and never seen")


def _open(folder: Path) -> gh.data.Corpus:
    """Open a corpus and its tokenizer, which is compared with what made the ids, before anything is printed."""
    corpus = gh.data.Corpus.open(folder)
    _ = corpus.tokenizer
    return corpus


def _samples(corpus: gh.data.Corpus, batch_size: int, length: int, seed: int, masked: bool) -> gh.data.Dataset:
    if masked:
        return gh.data.MaskedLMDataset(corpus, length, seed=seed)
    match corpus.kind:
        case "text":
            return gh.data.CausalLMDataset(corpus, length, seed=seed)
        case "pairs":
            return gh.data.Seq2SeqDataset(corpus, batch_size, max_len=length, seed=seed)
        case "labelled":
            return gh.data.ClassificationDataset(corpus, batch_size, max_len=length, seed=seed)
        case "tagged":
            return gh.data.TokenClassificationDataset(corpus, batch_size, max_len=length, seed=seed)
        case "chat":
            return gh.data.ChatDataset(corpus, batch_size, max_len=length, seed=seed)


@app.command(epilog="Example: glasshouse data verify runs/books")
def verify(corpus: CorpusArgument) -> None:
    """Compare a corpus with its hashes; exit 1 and one sentence if it is damaged."""
    opened = _open(corpus)
    shards = len(opened.manifest["shards"])
    print(f"ok: {opened!r}, {shards} {'shard' if shards == 1 else 'shards'}, made by {opened.tokenizer!r}")
