"""The tokenizer and the tokenized training and validation sets of a run, prepared once and kept in its folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from rich import filesize

from glasshouse import data, store
from glasshouse.data.builtin import is_builtin
from glasshouse.data.corpus import MANIFEST, Corpus, Kind, train_size, validation_mask
from glasshouse.data.dataset_reader import DatasetReader, file_name, open_reader
from glasshouse.data.preparation import TEMPLATED
from glasshouse.errors import InputError
from glasshouse.hub.model_folder import TOKENIZER
from glasshouse.text import Tokenizer, sources
from glasshouse.text.bpe.training import ProgressCallback
from glasshouse.text.sources import Chunk, Record
from glasshouse.training.run import Data

TOKENIZER_FILES = r"\.?(tokenizer(_config)?\.json|special_tokens_map\.json|chat_template\.jinja)(\.new)?"
SHOWN = 5  # file suffixes that are listed


@dataclass(frozen=True)
class WeightedSource:
    """One of the paths of the training set, and how often an epoch reads its items."""

    path: str
    weight: int
    n_items: int  # of the training set, each counted once
    names: tuple[str, ...]  # of its files


@dataclass(frozen=True)
class Datasets:
    """A tokenizer, the training set and the validation set; `sources` are those that have weights."""

    tok: Tokenizer
    train: Corpus
    validation: Corpus
    sources: tuple[WeightedSource, ...] = ()


def prepare_datasets(choice: Data, folder: Path, known: Tokenizer | None, progress: ProgressCallback) -> Datasets:
    """Prepare the datasets of a run, or find them in its folder; `known` is a tokenizer that the model has."""
    if choice.weights and (is_builtin(choice.path) or _is_prepared(choice.path)):
        raise InputError(f"data.weights is {choice.weights}, but {choice.path[0]!r} is one source; leave it out.")
    tok = _tokenizer(choice, folder / "tokenizer", known, progress)
    train = _corpus(choice, choice.path, "train", tok, folder / "data" / "train", progress)
    if choice.validation:
        validation = _corpus(choice, choice.validation, "validation", tok, folder / "data" / "validation", progress)
    elif is_builtin(choice.path):
        validation = _corpus(choice, choice.path, "validation", tok, folder / "data" / "validation", progress)
    else:
        train, validation = train.split(choice.val_fraction)
    if validation.labels != train.labels:
        raise InputError(
            f"the labels of the training set are {', '.join(train.labels)}, but those of the validation set are "
            f"{', '.join(validation.labels)}; leave data.validation out, or give both sets the same labels."
        )
    if train.kind == "labelled" and len(train.labels) == 1:
        raise InputError(
            f"all labels are {train.labels[0]!r}, so there is nothing to classify; give data with two or more labels."
        )
    if train.kind in TEMPLATED and tok.chat_template is None:  # which the prepared conversations have
        tok = train.tokenizer
    if not choice.weights:
        return Datasets(tok, train, validation)
    names = _source_names(choice, train)
    weights = {name: weight for some, weight in zip(names, choice.weights, strict=True) for name in some}
    counts = train.items_by_source()
    weighted = tuple(
        WeightedSource(path, weight, sum(counts[name] for name in some), tuple(some))
        for path, weight, some in zip(choice.path, choice.weights, names, strict=True)
    )
    return Datasets(tok, train.weighted(weights), validation, weighted)


def _source_names(choice: Data, train: Corpus) -> list[list[str]]:
    """Return the names of the files of each path, of which none may be in two."""
    if train.kind == "pairs" and not train.manifest["columns"]:
        raise InputError(
            f"data.weights is {choice.weights}, but {' and '.join(choice.path)} are one source, as they are aligned; "
            "leave it out."
        )
    names = [list(map(file_name, sources.find_files(path))) for path in choice.path]
    if twice := [name for name, count in Counter(name for some in names for name in some).items() if count > 1]:
        raise InputError(f"{twice[0]!r} is in two of data.path, which have a weight each; name it in one.")
    return names


def open_datasets(choice: Data, folder: Path) -> tuple[Corpus, Corpus]:
    """Open the training and validation sets of a run from its folder."""
    folders = []
    for name, path in (("train", choice.path), ("validation", choice.validation)):
        folders.append(Path(path[0]) if _is_prepared(path) else folder / "data" / name)
    train, validation = folders
    if (validation / MANIFEST).is_file():
        return Corpus.open(train), Corpus.open(validation)
    return Corpus.open(train).split(choice.val_fraction)


def units_of(choice: Data) -> dict[str, str]:
    """Return the units of progress in data preparation, where they are not bytes."""
    return dict.fromkeys(("reading", "tokenizing"), "items") if is_builtin(choice.path) else {}


def describe_files(choice: Data) -> str:
    """Return what the training data are, known before they are prepared."""
    if is_builtin(choice.path):
        return f"{choice.path[0]}, a built-in dataset"
    if _is_prepared(choice.path):
        return f"{choice.path[0]}, already prepared"
    files, left = sources.find_files(choice.path), sources.skipped_files(choice.path)
    text = f"{len(files):,} file{'' if len(files) == 1 else 's'}, "
    text += filesize.decimal(sum(map(sources.file_size, files)))
    if left:
        kinds = Counter(path.suffix or "no suffix" for path in left).most_common(SHOWN)
        more = ", ..." if len({path.suffix for path in left}) > SHOWN else ""
        text += f"; {len(left):,} skipped: unknown file type ({', '.join(kind for kind, _ in kinds)}{more})"
    return text


def with_kind(choice: Data, kind: Kind | None) -> Data:
    """Return the data settings with the kind that the model needs, if none is set."""
    if kind is None or choice.kind is not None or is_builtin(choice.path) or _is_prepared(choice.path):
        return choice
    return replace(choice, kind=kind)


def _is_prepared(path: tuple[str, ...]) -> bool:
    return len(path) == 1 and Path(path[0], MANIFEST).is_file()


def given_tokenizer(choice: Data) -> Tokenizer | None:
    """Load the tokenizer of the data settings: data.tokenizer, or that of a prepared corpus.

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
    if (folder / TOKENIZER).is_file():  # the folder alone may be incomplete, left by an earlier version
        return Tokenizer.load(folder)
    tok = Tokenizer.train(texts=_texts(choice, progress), vocab_size=choice.vocab_size, progress=progress)
    store.replace_folder(folder, tok.save, TOKENIZER_FILES)
    return tok


def _texts(choice: Data, progress: ProgressCallback) -> Iterator[str | bytes]:
    """Yield the text of the training set."""
    reader = open_reader(
        choice.path, kind=choice.kind, columns=choice.columns, separator=choice.separator, errors=choice.errors
    )
    for entry in _training_part(reader, choice, progress):
        if isinstance(entry, Chunk):
            yield entry.text
        elif reader.kind == "tagged":
            yield " ".join(entry.values[0])
        else:
            values = entry.values[:1] if reader.kind == "labelled" else entry.values
            for value in values:
                yield from _texts_in(value)


def _training_part(reader: DatasetReader, choice: Data, progress: ProgressCallback) -> Iterator[Chunk | Record]:
    """Yield what `Corpus.split` puts in the training set, after a first pass that counts bytes of text, or items."""

    def read(stage: str) -> Iterator[Chunk | Record]:
        done = 0

        def on_bytes(number: int) -> None:
            nonlocal done
            done += number
            progress(stage, done, reader.size)

        return reader.read((0, 0), None, on_bytes, lambda number, size, sha256: None)

    if choice.validation or is_builtin(choice.path):
        yield from read("reading")
        return
    count = sum(len(entry.text) if isinstance(entry, Chunk) else 1 for entry in read("counting"))
    left, in_validation = (
        train_size(count, choice.val_fraction),
        validation_mask(0 if reader.kind == "text" else count, choice.val_fraction),
    )
    for number, entry in enumerate(read("reading")):
        if not isinstance(entry, Chunk):
            if not in_validation[number]:
                yield entry
        elif left > 0:
            text = entry.text if len(entry.text) <= left else entry.text[:left].decode(errors="ignore").encode()
            left -= len(entry.text)
            yield replace(entry, text=text)


def _texts_in(value: object) -> Iterator[str]:
    """Yield the texts of a field: itself, or the contents of its chat messages."""
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
