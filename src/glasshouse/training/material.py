"""What a run works on: a tokenizer, ids to learn from and ids to be tried on, made once and kept in its folder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from glasshouse import data, store
from glasshouse.data.corpus import MANIFEST, Corpus
from glasshouse.data.feed import open_feed
from glasshouse.errors import InputError
from glasshouse.hub.folder import TOKENIZER
from glasshouse.text import Tokenizer
from glasshouse.text.sources import Piece
from glasshouse.text.training import Progress
from glasshouse.training.run import Data

TOKENIZER_FILES = r"\.?(tokenizer(_config)?\.json|special_tokens_map\.json|chat_template\.jinja)(\.new)?"


@dataclass(frozen=True)
class Material:
    """A tokenizer and two corpora of its ids."""

    tok: Tokenizer
    train: Corpus
    validation: Corpus


def gather(choice: Data, folder: Path, known: Tokenizer | None, progress: Progress) -> Material:
    """Make, or find in the folder, what a run needs; `known` is the tokenizer of the model that it starts from."""
    tok = _tokenizer(choice, folder / "tokenizer", known, progress)
    whole = _corpus(choice, choice.path, "train", tok, folder / "data" / "train", progress)
    if choice.validation:
        held = _corpus(choice, choice.validation, "validation", tok, folder / "data" / "validation", progress)
    elif _is_builtin(choice.path):
        held = _corpus(choice, choice.path, "validation", tok, folder / "data" / "validation", progress)
    else:
        whole, held = whole.split(choice.hold_out)
    if held.labels != whole.labels:
        raise InputError(
            f"the labels to learn are {', '.join(whole.labels)}, but those to be tried on are "
            f"{', '.join(held.labels)}; leave data.validation out, or give both sets the same labels."
        )
    if whole.kind == "labelled" and len(whole.labels) == 1:
        raise InputError(
            f"all labels are {whole.labels[0]!r}, so there is nothing to tell apart; give data with two or more."
        )
    return Material(tok, whole, held)


def reopen(choice: Data, folder: Path) -> tuple[Corpus, Corpus]:
    """Open what a run learned from and what it was tried on, from its folder alone."""
    places = []
    for name, path in (("train", choice.path), ("validation", choice.validation)):
        places.append(Path(path[0]) if _is_prepared(path) else folder / "data" / name)
    train, held = places
    if (held / MANIFEST).is_file():
        return Corpus.open(train), Corpus.open(held)
    return Corpus.open(train).split(choice.hold_out)


def _is_builtin(path: tuple[str, ...]) -> bool:
    return len(path) == 1 and path[0] in data.builtins() and not Path(path[0]).exists()


def _is_prepared(path: tuple[str, ...]) -> bool:
    return len(path) == 1 and Path(path[0], MANIFEST).is_file()


def _tokenizer(choice: Data, folder: Path, known: Tokenizer | None, progress: Progress) -> Tokenizer:
    if choice.tokenizer is not None:
        return Tokenizer.load(choice.tokenizer)
    if known is not None:
        return known
    if _is_prepared(choice.path):
        return Corpus.open(choice.path[0], verify=False).tokenizer
    if (folder / TOKENIZER).is_file():  # not just the folder: earlier versions may have left half of one
        return Tokenizer.load(folder)
    tok = Tokenizer.train(texts=_texts(choice, progress), vocab_size=choice.vocab_size, progress=progress)
    store.replace_folder(folder, tok.save, TOKENIZER_FILES)
    return tok


def _texts(choice: Data, progress: Progress) -> Iterator[str | bytes]:
    """Yield all that will be encoded, as text."""
    feed = open_feed(choice.path, kind=choice.kind, fields=choice.fields, separator=choice.separator)
    done = 0

    def on_bytes(number: int) -> None:
        nonlocal done
        done += number
        progress("reading", done, feed.size)

    for entry in feed.read((0, 0), on_bytes, lambda number, size, sha256: None):
        if isinstance(entry, Piece):
            yield entry.text
        elif feed.kind == "tagged":
            yield " ".join(entry.values[0])
        else:
            values = entry.values[:1] if feed.kind == "labelled" else entry.values
            for value in values:
                yield from _written(value)


def _written(value: object) -> Iterator[str]:
    """Yield the texts of a field: itself, or what the messages of a conversation say."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        yield from (str(message.get("content", "")) for message in value if isinstance(message, dict))


def _corpus(
    choice: Data, path: tuple[str, ...], split: str, tok: Tokenizer, folder: Path, progress: Progress
) -> Corpus:
    if _is_prepared(path):
        return Corpus.open(path[0], tokenizer=tok)
    return data.prepare(
        path,
        tok,
        folder,
        kind=choice.kind,
        fields=choice.fields,
        split=split,
        separator=choice.separator,
        progress=progress,
    )
