"""Texts that a command is given: files, folders, patterns, or a built-in set by its name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Literal

import typer

import glasshouse as gh

Progress = Callable[[str, int, int], None]

Paths = Annotated[
    list[str],
    typer.Argument(
        metavar="PATHS", help="Files, folders, quoted patterns such as 'data/**/*.txt', or a built-in set."
    ),
]
Field = Annotated[str, typer.Option(help="Where the text stands in jsonl, csv, tsv and parquet files.")]
Errors = Annotated[
    Literal["strict", "replace"], typer.Option(help="Stop at bytes that are not UTF-8, or put a mark in their place.")
]


def listed(names: Iterable[str] | None) -> tuple[str, ...]:
    """Return the names that an option was given, each alone or several with commas between.

    >>> listed(["en,de", "id"]), listed(None)
    (('en', 'de', 'id'), ())
    """
    return tuple(name.strip() for one in names or () for name in one.split(","))


def is_builtin(path: str) -> bool:
    """Say whether this is the name of a built-in set, and no file's."""
    return path in gh.data.builtin_datasets() and not Path(path).exists()


def read(
    paths: Iterable[str], field: str, errors: Literal["strict", "replace"], progress: Progress
) -> Iterator[bytes]:
    """Yield the texts of files first, then those that built-in sets give for training."""
    paths = list(paths)
    names = [path for path in paths if is_builtin(path)]
    if files := [path for path in paths if path not in names]:
        yield from gh.text.tokenizer_training.read_texts(files, field, errors, progress)
    for name in names:
        yield from _builtin(name, progress)


def _builtin(name: str, progress: Progress) -> Iterator[bytes]:
    found = gh.data.builtin_dataset(name)
    size = found.sizes()["train"]
    for done, item in enumerate(found.items("train"), 1):
        match found.kind:
            case "text" | "labelled":
                texts = [item[1] if found.kind == "text" else item[0]]
            case "pairs":
                texts = item
            case "chat":
                texts = [message["content"] for message in item]
        yield from (text.encode() for text in texts)
        progress(f"reading {name}", done, size)


def units(paths: Iterable[str]) -> dict[str, str]:
    """Return what the stages of reading count that do not count bytes."""
    return {f"reading {path}": "items" for path in paths if is_builtin(path)}
