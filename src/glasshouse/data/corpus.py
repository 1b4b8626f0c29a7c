"""A tokenized corpus on disk: memory-mapped shards, the tokenizer that encoded them, and a manifest with checksums.

A corpus is a list of items, and an item is one array to three: a text; a source and its target; a text and its label
id; words and, as a second array, 1 + the tag id at the first id of each word and 0 elsewhere; a conversation and, as
a second array, the lengths of its alternating context and assistant runs; a prompt, the answer that is preferred and
the one that is not. The arrays are concatenated; the end offset
of each is stored next to them.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from glasshouse.data.shuffle import permute
from glasshouse.errors import InputError, StoreError, distinct
from glasshouse.text import Tokenizer

FORMAT = 2
MANIFEST, TOKENIZER = "manifest.json", "tokenizer"
BLOCK_IDS = 2**22  # ids processed at a time
SHARD_ARRAYS = ("ids", "ends")  # the files of a shard
ARRAYS_PER_ITEM = {"text": 1, "pairs": 2, "labelled": 2, "tagged": 2, "chat": 2, "preferences": 3}
TOKEN_ARRAYS_PER_ITEM = {"text": 1, "pairs": 2, "labelled": 1, "tagged": 1, "chat": 1, "preferences": 3}

Kind = Literal["text", "pairs", "labelled", "tagged", "chat", "preferences"]
Ids = NDArray[np.integer[Any]]
IdArray = NDArray[np.int64]


class Corpus:
    """A tokenized corpus that `prepare` wrote, memory-mapped.

    >>> import tempfile, glasshouse as gh
    >>> tok = gh.Tokenizer.train(texts=["to be or not to be"], vocab_size=263)
    >>> folder = tempfile.mkdtemp()
    >>> _ = Path(f"{folder}/hamlet.txt").write_text("to be or not to be")
    >>> corpus = gh.data.prepare(f"{folder}/hamlet.txt", tok, f"{folder}/corpus")
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
        self._offset, self._first = 0, 0  # the first id and the first item of a split of text
        self._selected: NDArray[np.int64] | None = None  # the items of a split of other kinds, which can be repeated
        self._pieces: tuple[IdArray, IdArray, IdArray] | None = None  # of repeated text: starts, first ids, items
        ends = [_map(folder / shard["ends"]["file"], (np.uint32,)) for shard in shards]
        self._ends = np.concatenate([[0], *(one + at for one, at in zip(ends, self._starts[:-1], strict=True))])
        whole = self._ends[-1] == self._starts[-1] and (len(self._ends) - 1) % self.arrays_per_item == 0
        whole = whole and sum(source["items"] for source in manifest["sources"]) == len(self)
        if not whole or np.any(np.diff(self._ends) < 0):
            raise StoreError(f"the item ends in {str(folder)!r} do not match its ids; prepare the text again.")

    @classmethod
    def open(cls, folder: str | Path, *, tokenizer: Tokenizer | None = None, verify: bool = True) -> Corpus:
        """Open a folder; `verify` compares all hashes, `tokenizer` must be the one that encoded the corpus."""
        folder = Path(folder)
        manifest = _read_manifest(folder / MANIFEST)
        if tokenizer is not None and tokenizer.fingerprint != manifest["tokenizer"]:
            found, own = distinct(manifest["tokenizer"], tokenizer.fingerprint)
            raise StoreError(
                f"{str(folder)!r} was encoded with another tokenizer ({found}, not {own}); prepare the text again."
            )
        for entry in (shard[part] for shard in manifest["shards"] for part in SHARD_ARRAYS):
            check_file(folder / entry["file"], entry, verify)
        corpus = cls(folder, manifest)
        if verify and corpus.kind in ("text", "pairs"):
            highest = max((int(ids.max()) for ids in corpus._ids if len(ids)), default=0)
            if highest >= manifest["vocab_size"]:
                raise StoreError(
                    f"{str(folder)!r} has the id {highest}, which its tokenizer lacks; prepare it again."
                )
        return corpus

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that encoded the corpus."""
        tokenizer = Tokenizer.load(self.folder / TOKENIZER)
        if tokenizer.fingerprint != self.manifest["tokenizer"]:
            raise StoreError(
                f"the tokenizer in {str(self.folder / TOKENIZER)!r} is not the one that encoded the corpus; "
                "prepare the text again."
            )
        return tokenizer

    def __len__(self) -> int:
        return (len(self._ends) - 1) // self.arrays_per_item if self._selected is None else len(self._selected)

    def __repr__(self) -> str:
        items = "1 item" if len(self) == 1 else f"{len(self):,} items"
        return f"Corpus({self.kind}, {items}, {self.n_tokens:,} tokens)"

    def split(self, val_fraction: float) -> tuple[Corpus, Corpus]:
        """Return the training and validation splits: the end of a text is validation, or random items of other kinds.

        Text is split by bytes if the tokenizer is byte-level, so that the split does not depend on the tokenizer;
        else by tokens.

        >>> import tempfile, glasshouse as gh
        >>> tok = gh.Tokenizer.train(texts=["to be"], vocab_size=263)
        >>> folder = tempfile.mkdtemp()
        >>> _ = Path(f"{folder}/hamlet.txt").write_text("to be or not to be")
        >>> for part in gh.data.prepare(f"{folder}/hamlet.txt", tok, f"{folder}/corpus").split(0.25):
        ...     print(tok.decode(part.read(0, part.n_tokens)))
        to be or not t
        o be<|endoftext|>
        """
        if not 0 < val_fraction < 1:
            raise InputError(f"val_fraction is {val_fraction}, but it must be above 0 and below 1.")
        if self.kind == "text":
            boundary = self._val_start(val_fraction)
            return self._slice(0, boundary), self._slice(boundary, int(self._ends[-1]))
        mask = validation_mask(len(self), val_fraction)
        return self._select(~mask), self._select(mask)

    def _val_start(self, val_fraction: float) -> int:
        """Return the first id of the validation split; a token across the boundary belongs to training."""
        end = int(self._ends[-1])
        if not self.tokenizer.byte_level:
            return train_size(end, val_fraction)
        sizes = np.zeros(len(self.tokenizer), np.int64)
        for number in set(self.tokenizer.ids) - self.tokenizer.special_ids:
            sizes[number] = len(self.tokenizer.decode_bytes([number]))
        blocks = [(at, min(at + BLOCK_IDS, end)) for at in range(0, end, BLOCK_IDS)]
        totals = [int(sizes[self.read(*block)].sum()) for block in blocks]
        left = train_size(sum(totals), val_fraction)
        for (start, stop), total in zip(blocks, totals, strict=True):
            if left <= total:
                return start + int(np.searchsorted(np.cumsum(sizes[self.read(start, stop)]), left)) + 1
            left -= total
        return end

    def _view(self) -> Corpus:
        view = copy.copy(self)
        for name in ("n_tokens", "lengths"):
            view.__dict__.pop(name, None)
        return view

    def _slice(self, start: int, stop: int) -> Corpus:
        view = self._view()
        inside = self._ends[(self._ends > start) & (self._ends < stop)]
        view._ends = np.concatenate([[start], inside, [stop]]) - start
        view._offset, view._first = self._offset + start, self._first + self.item_at(start)
        return view

    def _select(self, mask: NDArray[np.bool_]) -> Corpus:
        view = self._view()
        view._selected = np.flatnonzero(mask) if self._selected is None else self._selected[mask]
        return view

    def items_by_source(self) -> dict[str, int]:
        """Return how many items are from each file, by its name."""
        sources = self.manifest["sources"]
        found = np.bincount(self.source_indices(), minlength=len(sources))
        return {source["name"]: count for source, count in zip(sources, found.tolist(), strict=True)}

    def source_indices(self) -> NDArray[np.int64]:
        """Return the file of each item, as its place in the manifest's sources."""
        items = np.arange(len(self)) if self._selected is None else self._selected
        if self._pieces is not None:
            items = self._pieces[2]
        counts = np.cumsum([source["items"] for source in self.manifest["sources"]])
        return np.searchsorted(counts, self._first + items, side="right")

    def weighted(self, weights: Mapping[str, int]) -> Corpus:
        """Return the items of each source, by its name, as often as its weight says: all of them once an epoch.

        >>> import tempfile, glasshouse as gh
        >>> tok = gh.Tokenizer.train(texts=["to be"], vocab_size=263)
        >>> folder = tempfile.mkdtemp()
        >>> for name in ("a", "b"):
        ...     _ = Path(folder, f"{name}.txt").write_text(name)
        >>> corpus = gh.data.prepare(folder, tok, f"{folder}/corpus")
        >>> twice = corpus.weighted({f"{folder}/a.txt": 1, f"{folder}/b.txt": 2})
        >>> tok.decode(twice.read(0, twice.n_tokens), skip_special_tokens=True)
        'abb'
        """
        counts = [source["items"] for source in self.manifest["sources"]]
        times = [weights[source["name"]] for source in self.manifest["sources"]]
        view = self._view()
        if self.kind != "text":
            items = np.arange(len(self)) if self._selected is None else self._selected
            view._selected = np.repeat(items, np.repeat(times, counts)[items])
            return view
        bounds = (np.cumsum([0, *counts]) - self._first).clip(0, len(self)).tolist()
        pieces = [piece for piece, count in zip(pairwise(bounds), times, strict=True) for _ in range(count)]
        items = np.concatenate([np.arange(*piece) for piece in pieces])
        starts, stops = (self._ends[np.array(side)] for side in zip(*pieces, strict=True))
        view._ends = np.concatenate([[0], np.cumsum(np.diff(self._ends)[items])])
        view._pieces = (np.cumsum(stops - starts) - (stops - starts), starts, items)
        return view

    @cached_property
    def n_tokens(self) -> int:
        """Number of tokens: all ids except labels, tags and run lengths."""
        return int(self.token_counts.sum())

    @property
    def token_counts(self) -> NDArray[np.int64]:
        """The number of tokens of each item."""
        return self.lengths[:, : TOKEN_ARRAYS_PER_ITEM[self.kind]].sum(1)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """The length of each array of each item, [items, arrays_per_item]."""
        lengths = np.diff(self._ends).reshape(-1, self.arrays_per_item)
        return lengths if self._selected is None else lengths[self._selected]

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the ids from `start` to `stop`, across shards."""
        if not 0 <= start <= stop <= self._ends[-1]:
            raise InputError(f"ids {start} to {stop} were requested, but there are {self._ends[-1]}.")
        if self._pieces is None:
            return self._read(start, stop)
        begins, firsts, _ = self._pieces
        found = [np.empty(0, np.int64)]
        while start < stop:
            piece = int(np.searchsorted(begins, start, side="right")) - 1
            end = min(stop, int(begins[piece + 1])) if piece + 1 < len(begins) else stop
            found.append(
                self._read(int(firsts[piece] + start - begins[piece]), int(firsts[piece] + end - begins[piece]))
            )
            start = end
        return np.concatenate(found)

    def _read(self, start: int, stop: int) -> NDArray[np.int64]:
        start, stop = start + self._offset, stop + self._offset
        first, last = np.searchsorted(self._starts, (start, max(start, stop - 1)), side="right") - 1
        slices = [
            self._ids[shard][max(0, start - self._starts[shard]) : stop - self._starts[shard]]
            for shard in range(first, min(last + 1, len(self._ids)))
        ]
        return np.concatenate(slices).astype(np.int64) if slices else np.empty(0, np.int64)

    def blocks(self) -> Iterator[tuple[IdArray, IdArray]]:
        """Yield all ids, some millions at a time, and the end offsets of the arrays that end in each block."""
        ends, low, total = self._ends[1:], 0, int(self._ends[-1])
        for start in range(0, max(1, total), BLOCK_IDS):
            stop = min(start + BLOCK_IDS, total)
            high = int(np.searchsorted(ends, stop, side="right"))
            yield self.read(start, stop), ends[low:high] - start
            low = high

    def item(self, index: int) -> tuple[NDArray[np.int64], ...]:
        """Return the arrays of an item."""
        at = self._check_item(index)
        bounds = self._ends[at * self.arrays_per_item : (at + 1) * self.arrays_per_item + 1].tolist()
        return tuple(self.read(start, stop) for start, stop in pairwise(bounds))

    def gather(self, indices: Sequence[int], array: int, max_len: int | None = None) -> tuple[IdArray, IdArray]:
        """Return one array of several items, concatenated, and the length of each, truncated to `max_len`."""
        items = np.asarray(indices, np.int64) if self._selected is None else self._selected[indices]
        starts = self._ends[items * self.arrays_per_item + array]
        lengths = (self._ends[items * self.arrays_per_item + array + 1] - starts).clip(max=max_len)
        before = np.cumsum(lengths) - lengths
        positions = np.repeat(starts + self._offset - before, lengths) + np.arange(lengths.sum())
        shards = np.searchsorted(self._starts, positions, side="right") - 1
        ids = np.empty(len(positions), np.int64)
        for shard in np.unique(shards).tolist():
            here = shards == shard
            ids[here] = self._ids[shard][positions[here] - self._starts[shard]]
        return ids, lengths

    def _check_item(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise InputError(f"item {index} was requested, but there are {len(self)}, counted from 0.")
        return index if self._selected is None else int(self._selected[index])

    def item_at(self, position: int) -> int:
        """Return the index of the item that the id at a position belongs to."""
        return int(np.searchsorted(self._ends, position, side="right") - 1) // self.arrays_per_item

    def source_name(self, index: int) -> str:
        """Return the name of the file, or of the built-in dataset, that an item comes from."""
        at = self._check_item(index)
        at = self._first + (at if self._pieces is None else int(self._pieces[2][at]))
        counts = np.cumsum([source["items"] for source in self.manifest["sources"]])
        return str(self.manifest["sources"][int(np.searchsorted(counts, at, side="right"))]["name"])


def train_size(size: int, val_fraction: float) -> int:
    """Return the size of the training split, in bytes, tokens or items.

    >>> train_size(100, 0.05)
    95
    """
    return size - round(val_fraction * size)


def validation_mask(count: int, val_fraction: float) -> NDArray[np.bool_]:
    """Return which items belong to the validation split, at random: a file may be sorted by label.

    >>> int(validation_mask(100, 0.05).sum())
    5
    """
    return permute(np.arange(count), count, seed=0, epoch=0) < count - train_size(count, val_fraction)


def read_json(path: Path) -> Any:  # noqa: ANN401 - any JSON value
    """Read a JSON file that `prepare` wrote."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StoreError(f"there is no {str(path)!r}; give a folder that `glasshouse data prepare` wrote.") from None
    except (ValueError, RecursionError):
        raise StoreError(f"{str(path)!r} is corrupt; prepare the text again.") from None


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
            "start_id": start_id,
            "end_id": end_id,
        } if (
            version == FORMAT
            and kind in ARRAYS_PER_ITEM
            and is_list_of_shards(shards)
            and all(isinstance(label, str) for label in labels)
            and all(map(is_source, sources))
            and all(one is None or (type(one) is int and 0 <= one < size) for one in (start_id, end_id))
        ):
            return manifest
    raise StoreError(f"{str(path)!r} is not a manifest that this version supports; prepare the text again.")


def is_source(source: object) -> bool:
    """Return whether this is a valid source entry."""
    match source:
        case {"name": str(), "items": int(items)}:
            return items >= 0
    return False


def is_list_of_shards(shards: list[Any]) -> bool:
    """Return whether these are valid shard entries, with their own file names."""
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
    """Compare a file with its recorded size and, with `verify`, its hash."""
    if not path.is_file() or path.is_symlink():
        raise StoreError(f"{str(path)!r} is missing; prepare the text again.")
    if (size := path.stat().st_size) != entry["bytes"]:
        raise StoreError(f"{str(path)!r} has {size} bytes instead of {entry['bytes']}; prepare the text again.")
    if verify:
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != entry["sha256"]:
                raise StoreError(f"{str(path)!r} does not match its hash, so it is corrupt; prepare the text again.")


def _map(path: Path, types: tuple[type[np.unsignedinteger[Any]], ...]) -> Ids:
    """Memory-map an array, if it is one-dimensional and of an expected type."""
    corrupt = StoreError(f"{str(path)!r} is not an array of a corpus; prepare the text again.")
    try:
        array: Ids = np.lib.format.open_memmap(path, mode="r")
    except (ValueError, TypeError, OSError, SyntaxError, OverflowError):
        raise corrupt from None
    if array.ndim != 1 or array.dtype not in types:
        raise corrupt
    return array
