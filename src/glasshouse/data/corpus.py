"""Ids on disk: a folder of memory-mapped shards, the tokenizer that made them, and a manifest that vouches for both.

A corpus is a list of items, and an item one part or two: a text; a source and its target; a text and its label; words
and, as a second part, 1 + the number of its tag at the first id of each word and 0 at all others; a conversation
and, as a second part, how many of its ids are context, answer, context, answer and so on. The ids of all parts stand
one after another; beside them stands where each part ends.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from glasshouse.data.shuffle import permute
from glasshouse.errors import InputError, StoreError
from glasshouse.text import Tokenizer

FORMAT = 2
MANIFEST, TOKENIZER = "manifest.json", "tokenizer"
STRETCH = 2**22  # ids that are looked at together
SHARD_ARRAYS = ("ids", "ends")  # what a shard is made of
ARRAYS_PER_ITEM = {"text": 1, "pairs": 2, "labelled": 2, "tagged": 2, "chat": 2}
TOKEN_ARRAYS_PER_ITEM = {
    "text": 1,
    "pairs": 2,
    "labelled": 1,
    "tagged": 1,
    "chat": 1,
}  # how many of the parts are text

Kind = Literal["text", "pairs", "labelled", "tagged", "chat"]
Ids = NDArray[np.integer[Any]]
IdArray = NDArray[np.int64]


class Corpus:
    """The ids of a corpus, as `prepare` wrote them; nothing is read from the disk before it is used.

    >>> import tempfile, glasshouse as gh
    >>> tok = gh.Tokenizer.train(texts=["to be or not to be"], vocab_size=263)
    >>> place = tempfile.mkdtemp()
    >>> _ = Path(f"{place}/hamlet.txt").write_text("to be or not to be")
    >>> corpus = gh.data.prepare(f"{place}/hamlet.txt", tok, f"{place}/corpus")
    >>> corpus
    Corpus(text, 1 item, 19 tokens)
    >>> corpus.tokenizer.decode(corpus.item(0)[0])
    'to be or not to be<|endoftext|>'
    """

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder, self.manifest = folder, manifest
        self.kind: Kind = manifest["kind"]
        self.arrays_per_item = ARRAYS_PER_ITEM[self.kind]
        self.labels: tuple[str, ...] = tuple(manifest["labels"])
        shards = manifest["shards"]
        self._ids = [_map(folder / shard["ids"]["file"], (np.uint16, np.uint32)) for shard in shards]
        self._starts = np.cumsum([0, *map(len, self._ids)])
        self._place, self._first = 0, 0  # the id and the item that a part of a corpus begins with
        self._chosen: NDArray[np.int64] | None = None  # the items that a part of a corpus has, if not all
        ends = [_map(folder / shard["ends"]["file"], (np.uint32,)) for shard in shards]
        self._ends = np.concatenate([[0], *(one + at for one, at in zip(ends, self._starts[:-1], strict=True))])
        whole = self._ends[-1] == self._starts[-1] and (len(self._ends) - 1) % self.arrays_per_item == 0
        whole = whole and sum(source["items"] for source in manifest["sources"]) == len(self)
        if not whole or np.any(np.diff(self._ends) < 0):
            raise StoreError(f"the ends of items in {str(folder)!r} do not fit its ids; prepare the text again.")

    @classmethod
    def open(cls, folder: str | Path, *, tokenizer: Tokenizer | None = None, verify: bool = True) -> Corpus:
        """Open a folder; `verify` compares all hashes, `tokenizer` has to be the one that made the ids."""
        folder = Path(folder)
        manifest = _read_manifest(folder / MANIFEST)
        if tokenizer is not None and tokenizer.fingerprint != manifest["tokenizer"]:
            raise StoreError(
                f"the ids in {str(folder)!r} were made by another tokenizer "
                f"({manifest['tokenizer'][:12]}, not {tokenizer.fingerprint[:12]}); prepare the text again."
            )
        for entry in (shard[part] for shard in manifest["shards"] for part in SHARD_ARRAYS):
            check_file(folder / entry["file"], entry, verify)
        corpus = cls(folder, manifest)
        if verify and corpus.kind in ("text", "pairs"):
            highest = max((int(ids.max()) for ids in corpus._ids if len(ids)), default=0)
            if highest >= manifest["vocab_size"]:
                raise StoreError(
                    f"{str(folder)!r} holds the id {highest}, which its tokenizer lacks; prepare it again."
                )
        return corpus

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the ids."""
        tokenizer = Tokenizer.load(self.folder / TOKENIZER)
        if tokenizer.fingerprint != self.manifest["tokenizer"]:
            raise StoreError(
                f"the tokenizer in {str(self.folder / TOKENIZER)!r} is not the one that made the ids; "
                "prepare the text again."
            )
        return tokenizer

    def __len__(self) -> int:
        return (len(self._ends) - 1) // self.arrays_per_item if self._chosen is None else len(self._chosen)

    def __repr__(self) -> str:
        items = "1 item" if len(self) == 1 else f"{len(self):,} items"
        return f"Corpus({self.kind}, {items}, {self.n_tokens:,} tokens)"

    def split(self, val_fraction: float) -> tuple[Corpus, Corpus]:
        """Return the corpus in two, the second about this share: the end of running text, or items here and there.

        Text is shared out by its bytes where tokens are bytes, so that the split does not depend on the tokenizer;
        else by tokens.

        >>> import tempfile, glasshouse as gh
        >>> tok = gh.Tokenizer.train(texts=["to be"], vocab_size=263)
        >>> place = tempfile.mkdtemp()
        >>> _ = Path(f"{place}/hamlet.txt").write_text("to be or not to be")
        >>> for part in gh.data.prepare(f"{place}/hamlet.txt", tok, f"{place}/corpus").split(0.25):
        ...     print(tok.decode(part.read(0, part.tokens)))
        to be or not t
        o be<|endoftext|>
        """
        if not 0 < val_fraction < 1:
            raise InputError(f"share is {val_fraction}, but it must be above 0 and below 1.")
        if self.kind == "text":
            cut = self._cut(val_fraction)
            return self._part(0, cut), self._part(cut, int(self._ends[-1]))
        held = validation_mask(len(self), val_fraction)
        return self._choose(~held), self._choose(held)

    def _cut(self, val_fraction: float) -> int:
        """Return the id at which the last share of running text begins; one that lies across is before it."""
        end = int(self._ends[-1])
        if not self.tokenizer.byte_level:
            return train_size(end, val_fraction)
        sizes = np.zeros(len(self.tokenizer), np.int64)
        for number in set(self.tokenizer.ids) - self.tokenizer.special_ids:
            sizes[number] = len(self.tokenizer.decode_bytes([number]))
        stretches = [(at, min(at + STRETCH, end)) for at in range(0, end, STRETCH)]
        totals = [int(sizes[self.read(*stretch)].sum()) for stretch in stretches]
        left = train_size(sum(totals), val_fraction)
        for (start, stop), total in zip(stretches, totals, strict=True):
            if left <= total:
                return start + int(np.searchsorted(np.cumsum(sizes[self.read(start, stop)]), left)) + 1
            left -= total
        return end

    def _view(self) -> Corpus:
        view = copy.copy(self)
        for name in ("tokens", "lengths"):
            view.__dict__.pop(name, None)
        return view

    def _part(self, start: int, stop: int) -> Corpus:
        view = self._view()
        inside = self._ends[(self._ends > start) & (self._ends < stop)]
        view._ends = np.concatenate([[start], inside, [stop]]) - start
        view._place, view._first = self._place + start, self._first + self.item_at(start)
        return view

    def _choose(self, wanted: NDArray[np.bool_]) -> Corpus:
        view = self._view()
        view._chosen = np.flatnonzero(wanted) if self._chosen is None else self._chosen[wanted]
        return view

    @cached_property
    def n_tokens(self) -> int:
        """How many tokens there are: all ids, but for labels, tags and what says where answers lie."""
        return int(self.lengths[:, : TOKEN_ARRAYS_PER_ITEM[self.kind]].sum())

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """How many ids each part of each item has, [items, parts]."""
        lengths = np.diff(self._ends).reshape(-1, self.arrays_per_item)
        return lengths if self._chosen is None else lengths[self._chosen]

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the ids from one place to another, across shards."""
        if not 0 <= start <= stop <= self._ends[-1]:
            raise InputError(f"ids {start} to {stop} were asked for, but there are {self._ends[-1]}.")
        start, stop = start + self._place, stop + self._place
        first, last = np.searchsorted(self._starts, (start, max(start, stop - 1)), side="right") - 1
        pieces = [
            self._ids[shard][max(0, start - self._starts[shard]) : stop - self._starts[shard]]
            for shard in range(first, min(last + 1, len(self._ids)))
        ]
        return np.concatenate(pieces).astype(np.int64) if pieces else np.empty(0, np.int64)

    def item(self, number: int) -> tuple[NDArray[np.int64], ...]:
        """Return the ids of each part of an item."""
        at = self._check_item(number)
        bounds = self._ends[at * self.arrays_per_item : (at + 1) * self.arrays_per_item + 1].tolist()
        return tuple(self.read(start, stop) for start, stop in pairwise(bounds))

    def gather(self, numbers: Sequence[int], part: int, most: int | None = None) -> tuple[IdArray, IdArray]:
        """Return the ids of one part of several items, one after the other, and how many each has, `most` at most."""
        items = np.asarray(numbers, np.int64) if self._chosen is None else self._chosen[numbers]
        starts = self._ends[items * self.arrays_per_item + part]
        lengths = (self._ends[items * self.arrays_per_item + part + 1] - starts).clip(max=most)
        before = np.cumsum(lengths) - lengths
        places = np.repeat(starts + self._place - before, lengths) + np.arange(lengths.sum())
        shards = np.searchsorted(self._starts, places, side="right") - 1
        ids = np.empty(len(places), np.int64)
        for shard in np.unique(shards).tolist():
            here = shards == shard
            ids[here] = self._ids[shard][places[here] - self._starts[shard]]
        return ids, lengths

    def _check_item(self, number: int) -> int:
        if not 0 <= number < len(self):
            raise InputError(f"item {number} was asked for, but there are {len(self)}, counted from 0.")
        return number if self._chosen is None else int(self._chosen[number])

    def item_at(self, place: int) -> int:
        """Return the number of the item that the id at a place belongs to."""
        return int(np.searchsorted(self._ends, place, side="right") - 1) // self.arrays_per_item

    def source_name(self, number: int) -> str:
        """Return the name of the file, or of the built-in set, that an item comes from."""
        at = self._first + self._check_item(number)
        counts = np.cumsum([source["items"] for source in self.manifest["sources"]])
        return str(self.manifest["sources"][int(np.searchsorted(counts, at, side="right"))]["name"])


def train_size(size: int, val_fraction: float) -> int:
    """Return how much of so many bytes, tokens or items stays if a share is held out.

    >>> kept(100, 0.05)
    95
    """
    return size - round(val_fraction * size)


def validation_mask(count: int, val_fraction: float) -> NDArray[np.bool_]:
    """Say of each of so many items whether it is held out: drawn, as a file may be in the order of its labels.

    >>> int(validation_mask(100, 0.05).sum())
    5
    """
    return permute(np.arange(count), count, seed=0, epoch=0) < count - train_size(count, val_fraction)


def read_json(path: Path) -> Any:  # noqa: ANN401 - whatever stands in the file
    """Read a JSON file that `prepare` wrote."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StoreError(f"there is no {str(path)!r}; give a folder that `glasshouse data prepare` wrote.") from None
    except (ValueError, RecursionError):
        raise StoreError(f"{str(path)!r} is damaged; prepare the text again.") from None


def _read_manifest(path: Path) -> dict[str, Any]:
    manifest = read_json(path)
    match manifest:
        case {
            "format": int(version),
            "kind": str(kind),
            "tokenizer": str(),
            "vocab_size": int(size),
            "shards": list(shards),
            "labels": list(labels),
            "sources": list(sources),
            "start": start,
            "end": end,
        } if (
            version == FORMAT
            and kind in ARRAYS_PER_ITEM
            and is_list_of_shards(shards)
            and all(isinstance(label, str) for label in labels)
            and all(map(is_source, sources))
            and all(one is None or (type(one) is int and 0 <= one < size) for one in (start, end))
        ):
            return manifest
    raise StoreError(f"{str(path)!r} is no manifest that this version reads; prepare the text again.")


def is_source(source: object) -> bool:
    """Say whether this is a source as it is written down."""
    match source:
        case {"name": str(), "items": int(items)}:
            return items >= 0
    return False


def is_list_of_shards(shards: list[Any]) -> bool:
    """Say whether these are shards as they are written: each under its own name, beside the manifest."""
    return all(
        isinstance(shard, dict)
        and all(_is_entry(shard.get(part), f"{number:05}.{part}.npy") for part in SHARD_ARRAYS)
        for number, shard in enumerate(shards)
    )


def _is_entry(entry: object, name: str) -> bool:
    match entry:
        case {"file": str(file), "bytes": int(), "sha256": str()}:
            return file == name
    return False


def check_file(path: Path, entry: dict[str, Any], verify: bool) -> None:
    """Compare a file with its size, and if asked to with its hash."""
    if not path.is_file() or path.is_symlink():
        raise StoreError(f"{str(path)!r} is missing; prepare the text again.")
    if (size := path.stat().st_size) != entry["bytes"]:
        raise StoreError(f"{str(path)!r} has {size} bytes instead of {entry['bytes']}; prepare the text again.")
    if verify:
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != entry["sha256"]:
                raise StoreError(f"{str(path)!r} does not match its hash, so it is damaged; prepare the text again.")


def _map(path: Path, types: tuple[type[np.unsignedinteger[Any]], ...]) -> Ids:
    """Map an array into memory, if it is a plain row of whole numbers."""
    damaged = StoreError(f"{str(path)!r} is no array that `glasshouse data prepare` writes; prepare the text again.")
    try:
        array: Ids = np.lib.format.open_memmap(path, mode="r")
    except (ValueError, TypeError, OSError, SyntaxError, OverflowError):
        raise damaged from None
    if array.ndim != 1 or array.dtype not in types:
        raise damaged
    return array
