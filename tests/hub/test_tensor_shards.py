"""Tensors in shards: a piece of any partition is that of the whole tensor; shards that do not fit are refused."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from examples import up_to
from hypothesis import given, settings
from hypothesis import strategies as st

from glasshouse import store
from glasshouse.errors import StoreError
from glasshouse.hub.tensor_shards import SavedTensors, TensorChunk, read_shards, shard_name, shard_names, write_shard


def write(folder: Path, shards: list[Mapping[str, TensorChunk]]) -> None:
    for number, chunks in enumerate(shards, 1):
        write_shard(folder / shard_name("model", number, len(shards)), chunks)


def read(folder: Path) -> SavedTensors:
    return read_shards(folder / name for name in shard_names(folder, "model"))


@settings(max_examples=up_to(200), deadline=None)
@given(st.data())
def test_any_piece_of_any_partition(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), max_size=3))
    whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    cuts = [sorted({0, size, *data.draw(st.lists(st.integers(0, size)))}) for size in shape]
    cells = list(itertools.product(*(pairwise(of_dim) for of_dim in cuts)))
    shards: list[dict[str, TensorChunk]] = [{} for _ in cells]
    for at, cell in zip(data.draw(st.permutations(range(len(cells)))), cells, strict=True):
        part = whole[tuple(slice(low, high) for low, high in cell)].clone()
        shards[at]["a"] = TensorChunk(part, tuple(low for low, _ in cell), tuple(shape))
    ends = [data.draw(st.integers(0, size)) for size in shape]
    starts = [data.draw(st.integers(0, end)) for end in ends]
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), shards)
        saved = read(Path(folder))
        assert saved["a"].equal(whole)
        sizes = [end - start for start, end in zip(starts, ends, strict=True)]
        expected = whole[tuple(slice(start, end) for start, end in zip(starts, ends, strict=True))]
        assert saved.read("a", starts, sizes).equal(expected)
        assert saved.on_meta()["a"].shape == whole.shape


HALF = TensorChunk(torch.ones(1, 2), (0, 0), (2, 2))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (TensorChunk(torch.ones(1, 2), (2, 0), (2, 2)), "shard-00002.*does not fit the other shards"),
        (TensorChunk(torch.ones(1, 2), (-1, 0), (2, 2)), "shard-00002.*does not fit the other shards"),
        (TensorChunk(torch.ones(1, 2), (1,), (2, 2)), "shard-00002.*does not fit the other shards"),
        (TensorChunk(torch.ones(1, 2), (1, 0), (3, 2)), "shard-00002.*does not fit the other shards"),
        (TensorChunk(torch.ones(1, 2).double(), (1, 0), (2, 2)), "shard-00002.*does not fit the other shards"),
        (TensorChunk(torch.ones(1, 1), (1, 0), (2, 2)), "the shards of a are not the whole tensor"),
    ],
)
def test_a_shard_that_does_not_fit_is_refused(other: TensorChunk, message: str, tmp_path: Path) -> None:
    write(tmp_path, [{"a": HALF}, {"a": other}])
    with pytest.raises(StoreError, match=message):
        read(tmp_path)


def test_a_file_without_offsets_is_refused(tmp_path: Path) -> None:
    write(tmp_path, [{"a": HALF}, {}])
    store.write_tensors(tmp_path / shard_name("model", 2, 2), {"a": torch.ones(1, 2)})
    with pytest.raises(StoreError, match=r"shard-00002.*does not fit the other shards"):
        read(tmp_path)


def test_a_missing_shard_is_refused(tmp_path: Path) -> None:
    write(tmp_path, [{"a": HALF}, {"a": TensorChunk(torch.ones(1, 2), (1, 0), (2, 2))}])
    (tmp_path / shard_name("model", 1, 2)).unlink()
    with pytest.raises(StoreError, match=r"shard-00001-of-00002\.safetensors' is missing"):
        read(tmp_path)
