"""What a run works on: a tokenizer, ids to learn from and ids to be tried on, made once and kept in its folder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from glasshouse import data, store
from glasshouse.data.corpus import MANIFEST, Corpus, Kind, train_size, validation_mask
from glasshouse.data.dataset_reader import DatasetReader, is_builtin, open_reader
from glasshouse.errors import InputError
from glasshouse.hub.model_folder import TOKENIZER
from glasshouse.text import Tokenizer
from glasshouse.text.sources import Chunk, Record
from glasshouse.text.tokenizer_training import ProgressCallback
from glasshouse.training.run import Data

TOKENIZER_FILES = r"\.?(tokenizer(_config)?\.json|special_tokens_map\.json|chat_template\.jinja)(\.new)?"


@dataclass(frozen=True)
class Datasets:
    """A tokenizer and two corpora of its ids."""

    tok: Tokenizer
    train: Corpus
    validation: Corpus


def prepare_datasets(choice: Data, folder: Path, known: Tokenizer | None, progress: ProgressCallback) -> Datasets:
    """Make, or find in the folder, what a run needs; `known` is the tokenizer of the model that it starts from."""
    tok = _tokenizer(choice, folder / "tokenizer", known, progress)
    whole = _corpus(choice, choice.path, "train", tok, folder / "data" / "train", progress)
    if choice.validation:
        held = _corpus(choice, choice.validation, "validation", tok, folder / "data" / "validation", progress)
    elif is_builtin(choice.path):
        held = _corpus(choice, choice.path, "validation", tok, folder / "data" / "validation", progress)
    else:
        whole, held = whole.split(choice.val_fraction)
    if held.labels != whole.labels:
        raise InputError(
            f"the labels to learn are {', '.join(whole.labels)}, but those to be tried on are "
            f"{', '.join(held.labels)}; leave data.validation out, or give both sets the same labels."
        )
    if whole.kind == "labelled" and len(whole.labels) == 1:
        raise InputError(
            f"all labels are {whole.labels[0]!r}, so there is nothing to tell apart; give data with two or more."
        )
    return Datasets(tok, whole, held)


def open_datasets(choice: Data, folder: Path) -> tuple[Corpus, Corpus]:
    """Open what a run learned from and what it was tried on, from its folder alone."""
    places = []
    for name, path in (("train", choice.path), ("validation", choice.validation)):
        places.append(Path(path[0]) if _is_prepared(path) else folder / "data" / name)
    train, held = places
    if (held / MANIFEST).is_file():
        return Corpus.open(train), Corpus.open(held)
    return Corpus.open(train).split(choice.val_fraction)


def units_of(choice: Data) -> dict[str, str]:
    """Return what preparing the data counts where it does not count bytes."""
    return dict.fromkeys(("reading", "tokenizing"), "items") if is_builtin(choice.path) else {}


def with_kind(choice: Data, wanted: Kind | None) -> Data:
    """Return the choice of data with the kind that the model learns from, where it is left open."""
    if wanted is None or choice.kind is not None or is_builtin(choice.path) or _is_prepared(choice.path):
        return choice
    return replace(choice, kind=wanted)


def _is_prepared(path: tuple[str, ...]) -> bool:
    return len(path) == 1 and Path(path[0], MANIFEST).is_file()


def given_tokenizer(choice: Data) -> Tokenizer | None:
    """Load the tokenizer that the settings of the data name: its folder, or else that of a prepared corpus.

    >>> given_tokenizer(Data(path=("stdlib",))) is None
    True
    """
    if choice.tokenizer is not None:
        return Tokenizer.load(choice.tokenizer)
    return Corpus.open(choice.path[0], verify=False).tokenizer if _is_prepared(choice.path) else None


def _tokenizer(choice: Data, folder: Path, known: Tokenizer | None, progress: ProgressCallback) -> Tokenizer:
    if choice.tokenizer is None and known is not None:
        return known
    if given := given_tokenizer(choice):
        return given
    if (folder / TOKENIZER).is_file():  # not just the folder: earlier versions may have left half of one
        return Tokenizer.load(folder)
    tok = Tokenizer.train(texts=_texts(choice, progress), vocab_size=choice.vocab_size, progress=progress)
    store.replace_folder(folder, tok.save, TOKENIZER_FILES)
    return tok


def _texts(choice: Data, progress: ProgressCallback) -> Iterator[str | bytes]:
    """Yield all that will be learned from, as text."""
    feed = open_reader(
        choice.path, kind=choice.kind, columns=choice.columns, separator=choice.separator, errors=choice.errors
    )
    for entry in _learned(feed, choice, progress):
        if isinstance(entry, Chunk):
            yield entry.text
        elif feed.kind == "tagged":
            yield " ".join(entry.values[0])
        else:
            values = entry.values[:1] if feed.kind == "labelled" else entry.values
            for value in values:
                yield from _written(value)


def _learned(feed: DatasetReader, choice: Data, progress: ProgressCallback) -> Iterator[Chunk | Record]:
    """Yield what `Corpus.split` will not hold out, found by counting first: bytes of text, or items."""

    def read(stage: str) -> Iterator[Chunk | Record]:
        done = 0

        def on_bytes(number: int) -> None:
            nonlocal done
            done += number
            progress(stage, done, feed.size)

        return feed.read((0, 0), on_bytes, lambda number, size, sha256: None)

    if choice.validation or is_builtin(choice.path):
        yield from read("reading")
        return
    count = sum(len(entry.text) if isinstance(entry, Chunk) else 1 for entry in read("counting"))
    left, held = (
        train_size(count, choice.val_fraction),
        validation_mask(0 if feed.kind == "text" else count, choice.val_fraction),
    )
    for number, entry in enumerate(read("reading")):
        if not isinstance(entry, Chunk):
            if not held[number]:
                yield entry
        elif left > 0:
            text = entry.text if len(entry.text) <= left else entry.text[:left].decode(errors="ignore").encode()
            left -= len(entry.text)
            yield replace(entry, text=text)


def _written(value: object) -> Iterator[str]:
    """Yield the texts of a field: itself, or what the messages of a conversation say."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        yield from (str(message.get("content", "")) for message in value if isinstance(message, dict))


def _corpus(
    choice: Data, path: tuple[str, ...], split: str, tok: Tokenizer, folder: Path, progress: ProgressCallback
) -> Corpus:
    if _is_prepared(path):
        return Corpus.open(path[0], tokenizer=tok)
    return data.prepare(
        path,
        tok,
        folder,
        kind=choice.kind,
        columns=choice.columns,
        split=split,
        separator=choice.separator,
        errors=choice.errors,
        progress=progress,
    )
