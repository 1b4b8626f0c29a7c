"""Tensors saved in shards: one safetensors file per process, with the chunks of the tensors that it owns.

The header of a file has the offsets of its chunks in the format of torch.distributed.checkpoint, so torch's
HuggingFaceStorageReader loads these files, too. The shape of the whole tensor, which that reader infers from the
chunks it finds, is added to it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from glasshouse import store
from glasshouse.errors import StoreError

CHUNKS = "DCP_SHARDING_INFO"  # the key of torch.distributed.checkpoint in the header
SHARD = re.compile(r"(\w+)\.shard-(\d+)-of-(\d+)\.safetensors")


@dataclass(frozen=True)
class TensorChunk:
    """A rectangular piece of a tensor.

    >>> TensorChunk(torch.zeros(2, 3), (4, 0), (8, 3)).is_whole
    False
    """

    tensor: Tensor
    offsets: tuple[int, ...]  # of its first element in the whole tensor
    shape: tuple[int, ...]  # of the whole tensor

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole tensor."""
        return tuple(self.tensor.shape) == self.shape

    @classmethod
    def of(cls, tensor: Tensor) -> TensorChunk:
        """Return a whole tensor as its only chunk."""
        return cls(tensor, (0,) * tensor.dim(), tuple(tensor.shape))


def shard_name(stem: str, number: int, count: int) -> str:
    """Return the file name of a shard; numbers begin at 1.

    >>> shard_name("model", 2, 4)
    'model.shard-00002-of-00004.safetensors'
    """
    return f"{stem}.shard-{number:05}-of-{count:05}.safetensors"


def shard_names(folder: Path, stem: str) -> list[str]:
    """Return the file names of all shards that a folder must have, [] if it has none.

    >>> shard_names(Path("no such folder"), "model")
    []
    """
    found = (SHARD.fullmatch(path.name) for path in folder.glob(f"{stem}.shard-*"))
    count = max((int(match[3]) for match in found if match), default=0)
    return [shard_name(stem, number, count) for number in range(1, count + 1)]


def write_shard(path: Path, chunks: Mapping[str, TensorChunk]) -> None:
    """Write the chunks that one process owns.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for number in (1, 2):
    ...         chunk = TensorChunk(torch.full((1, 2), float(number)), (number - 1, 0), (2, 2))
    ...         write_shard(Path(folder, shard_name("model", number, 2)), {"a": chunk})
    ...     saved = read_shards(Path(folder, name) for name in shard_names(Path(folder), "model"))
    >>> saved["a"], saved.read("a", offsets=(0, 1), sizes=(2, 1))
    (tensor([[1., 1.],
            [2., 2.]]), tensor([[1.],
            [2.]]))
    """
    table = {
        name: {"saved_offsets": list(chunk.offsets), "global_shape": list(chunk.shape)}
        for name, chunk in chunks.items()
    }
    tensors = {name: chunk.tensor for name, chunk in chunks.items()}
    store.write_tensors(path, tensors, {CHUNKS: json.dumps(table), "DCP_VERSION": "1.0"})


def read_shards(paths: Iterable[Path]) -> SavedTensors:
    """Memory-map the tensors of all shards; a shard that is missing or does not fit the others is an error."""
    chunks: dict[str, list[TensorChunk]] = {}
    for path in paths:
        if not path.is_file():
            raise StoreError(f"the shard {str(path)!r} is missing; restore it or use another checkpoint.")
        damaged = StoreError(f"the shard {str(path)!r} does not fit the other shards; use another checkpoint.")
        try:
            table = json.loads(store.read_metadata(path)[CHUNKS])
            for name, tensor in store.read_tensors(path).items():
                chunk = TensorChunk(tensor, tuple(table[name]["saved_offsets"]), tuple(table[name]["global_shape"]))
                first = chunks.setdefault(name, [chunk])[0]
                if not _fits(chunk, first):
                    raise damaged
                if chunk is not first:
                    chunks[name].append(chunk)
        except (KeyError, TypeError, ValueError, RecursionError):
            raise damaged from None
    for name, found in chunks.items():
        if sum(chunk.tensor.numel() for chunk in found) != math.prod(found[0].shape):
            raise StoreError(f"the shards of {name} are not the whole tensor; use another checkpoint.")
    return SavedTensors(chunks)


def _fits(chunk: TensorChunk, first: TensorChunk) -> bool:
    sizes = chunk.tensor.shape
    return (
        (chunk.shape, chunk.tensor.dtype) == (first.shape, first.tensor.dtype)
        and len(chunk.offsets) == len(sizes) == len(chunk.shape)
        and all(
            0 <= offset <= offset + size <= whole
            for offset, size, whole in zip(chunk.offsets, sizes, chunk.shape, strict=True)
        )
    )


class SavedTensors(Mapping[str, Tensor]):
    """Saved tensors by name, memory-mapped; one in several chunks is put together on each access.

    >>> saved = SavedTensors.of({"a": torch.arange(4.0)})
    >>> saved["a"], saved.read("a", offsets=(1,), sizes=(2,)), saved.shape("a")
    (tensor([0., 1., 2., 3.]), tensor([1., 2.]), (4,))
    """

    def __init__(self, chunks: Mapping[str, Sequence[TensorChunk]]) -> None:
        self._chunks = chunks

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> SavedTensors:
        """Return whole tensors as saved ones."""
        return cls({name: [TensorChunk.of(tensor)] for name, tensor in tensors.items()})

    def __getitem__(self, name: str) -> Tensor:
        shape = self.shape(name)
        return self.read(name, (0,) * len(shape), shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._chunks)

    def __len__(self) -> int:
        return len(self._chunks)

    def on_meta(self) -> dict[str, Tensor]:
        """Return tensors of the same shapes and dtypes, without data."""
        return {name: torch.empty(self.shape(name), dtype=self.dtype(name), device="meta") for name in self}

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a whole tensor."""
        return self._chunks[name][0].shape

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        return self._chunks[name][0].tensor.dtype

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Return a rectangular piece; of the files only the pages are read that it needs."""
        found = self._chunks[name]
        wanted = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
        if found[0].is_whole:
            return found[0].tensor[wanted]  # a view of the file, without a copy
        piece = torch.zeros(tuple(sizes), dtype=self.dtype(name))
        for chunk in found:
            here, there = [], []
            for asked, start, size in zip(wanted, chunk.offsets, chunk.tensor.shape, strict=True):
                low, high = max(asked.start, start), min(asked.stop, start + size)
                here.append(slice(low - asked.start, max(low, high) - asked.start))
                there.append(slice(low - start, max(low, high) - start))
            piece[tuple(here)] = chunk.tensor[tuple(there)]
        return piece
