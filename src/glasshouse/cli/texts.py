"""Text arguments of commands: files, folders, globs, a built-in dataset, or the texts themselves."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Literal

import typer

import glasshouse as gh

Progress = Callable[[str, int, int], None]

Paths = Annotated[
    list[str],
    typer.Argument(
        metavar="PATHS", help="Files, folders, quoted globs such as 'data/**/*.txt', or a built-in dataset."
    ),
]
Column = Annotated[str, typer.Option(help="The text column of json, jsonl, csv, tsv, parquet and arrow files.")]
Columns = Annotated[
    list[str] | None,
    typer.Option(
        help="Columns of json, jsonl, csv, tsv, parquet and arrow files, as a,b; t.a is a field of t, and 1,2 are "
        "columns of a file without a header; can be repeated.",
        show_default="text; source,target; text,label; words,tags; messages; prompt,chosen,rejected",
    ),
]
LINES = "-"  # texts are read from standard input
Given = Annotated[
    list[str] | None,
    typer.Argument(metavar="TEXT", help="Texts; without any, or with -, each line of stdin is one."),
]
Errors = Annotated[Literal["strict", "replace"], typer.Option(help="Stop at invalid UTF-8, or replace it by U+FFFD.")]


def given_or_lines(texts: list[str] | None) -> Iterator[str]:
    """Yield the texts of the command line, or without any the lines of stdin as they arrive."""
    if texts and texts != [LINES]:
        yield from (text.encode(errors="surrogateescape").decode(errors="replace") for text in texts)
        return
    for line in sys.stdin.buffer:
        yield line.decode(errors="replace").removesuffix("\n").removesuffix("\r")


def of_lines(path: Path) -> list[str]:
    r"""Return the texts of a file, one per line; `\n` in a line is a line break of its text."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise gh.InputError(f"the texts in {str(path)!r} cannot be read: {error}.") from None
    if not (found := [line.replace("\\n", "\n") for line in lines if line.strip()]):
        raise gh.InputError(f"{str(path)!r} has no texts; write one per line.")
    return found


def listed(names: Iterable[str] | None) -> tuple[str, ...]:
    """Return the names given to an option, repeated or separated by commas.

    >>> listed(["en,de", "id"]), listed(None)
    (('en', 'de', 'id'), ())
    """
    return tuple(name.strip() for one in names or () for name in one.split(","))


def read(
    paths: Iterable[str], column: str, errors: Literal["strict", "replace"], progress: Progress
) -> Iterator[bytes]:
    """Yield the texts of files, then those of the training splits of built-in datasets."""
    paths = list(paths)
    names = [path for path in paths if gh.data.is_builtin([path])]
    if files := [path for path in paths if path not in names]:
        yield from gh.text.bpe.training.read_texts(files, column, errors, progress)
    for name in names:
        yield from _builtin(name, progress)


def _builtin(name: str, progress: Progress) -> Iterator[bytes]:
    found = gh.data.builtin_dataset(name)
    size = found.sizes()["train"]
    for done, item in enumerate(found.items("train"), 1):
        match found.kind:
            case "text" | "labelled":
                texts = [item[1] if found.kind == "text" else item[0]]
            case "pairs" | "preferences":
                texts = item
            case "chat":
                texts = [message["content"] for message in item]
        yield from (text.encode() for text in texts)
        progress(f"reading {name}", done, size)


def units(paths: Iterable[str]) -> dict[str, str]:
    """Return the units of the reading stages that do not count bytes."""
    return {f"reading {path}": "items" for path in paths if gh.data.is_builtin([path])}
