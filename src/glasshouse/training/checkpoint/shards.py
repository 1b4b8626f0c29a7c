"""Sharded checkpoints: each rank writes and reads its own chunks of the tensors.

A DTensor is recognized by its `to_local`, as importing the class takes a second, also where there is one process.
Every rank writes and fsyncs its files in a temporary folder, which the main process renames once all have written.
An error of one rank is raised on all: none is left waiting in a collective.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from glasshouse import store
from glasshouse.errors import StoreError
from glasshouse.hub.run_checkpoints import size_and_hash
from glasshouse.hub.tensor_shards import SavedTensors, TensorChunk
from glasshouse.training.distributed.processes import Processes


def is_split(tensors: Iterable[Any]) -> bool:
    """Return whether one of the tensors is split over ranks; the result is the same on all of them.

    >>> is_split([torch.ones(2)])
    False
    """
    return any(
        size > 1 and not placement.is_replicate()
        for tensor in tensors
        if hasattr(tensor, "to_local")
        for placement, size in zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    )


def owned_chunks(tensors: Mapping[str, Any], *, is_main: bool) -> dict[str, TensorChunk]:
    """Copy to the CPU what this rank saves: its shards if it is in the first replica, plain tensors if it is main.

    >>> owned_chunks({"a": torch.ones(2)}, is_main=True)
    {'a': TensorChunk(tensor=tensor([1., 1.]), offsets=(0,), shape=(2,))}
    >>> owned_chunks({"a": torch.ones(2)}, is_main=False)
    {}
    """
    found = {}
    for name, tensor in tensors.items():
        if not hasattr(tensor, "to_local"):
            if is_main:
                found[name] = TensorChunk.of(tensor.detach().to("cpu", copy=True))
            continue
        shard = tensor.detach().to_local()
        if _is_first_replica(tensor) and shard.numel() > 0:
            offsets, _ = _place(tensor)
            found[name] = TensorChunk(shard.to("cpu", copy=True), offsets, tuple(tensor.shape))
    return found


def read_like(tensor: Any, saved: SavedTensors, name: str) -> Tensor:  # noqa: ANN401 - a DTensor, or a plain one
    """Read a saved tensor with the device and the placements of another; only this rank's chunk is read.

    >>> read_like(torch.zeros(2), SavedTensors.of({"a": torch.ones(2)}), "a")
    tensor([1., 1.])
    """
    if not hasattr(tensor, "to_local"):
        return saved[name].to(tensor.device)
    from torch.distributed.tensor import DTensor

    shard = saved.read(name, *_place(tensor)).to(tensor.device)
    layout = {"shape": tensor.shape, "stride": tensor.stride(), "run_check": False}
    return DTensor.from_local(shard, tensor.device_mesh, tensor.placements, **layout)


@torch.no_grad()
def load(tensors: Mapping[str, Tensor], saved: SavedTensors, prefix: str = "") -> None:
    """Copy saved tensors in place into tensors of the same names, plain or DTensors; others are left unchanged.

    >>> weights = {"a": torch.zeros(2)}
    >>> load(weights, SavedTensors.of({"ema.a": torch.ones(2)}), "ema.")
    >>> weights["a"]
    tensor([1., 1.])
    """
    for name, tensor in tensors.items():
        if prefix + name in saved:
            tensor.copy_(read_like(tensor, saved, prefix + name))


def _place(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:  # noqa: ANN401 - a DTensor
    """Return the offsets and the sizes of this rank's shard."""
    (chunk,) = tensor.__create_chunk_list__()
    return tuple(chunk.offsets), tuple(chunk.sizes)


def _is_first_replica(tensor: Any) -> bool:  # noqa: ANN401 - a DTensor
    mesh = tensor.device_mesh
    at = zip(mesh.get_coordinate(), tensor.placements, strict=True)
    # With tensor parallelism, norms are on several meshes without that dimension: one of them has rank 0.
    return 0 in mesh.mesh and all(index == 0 for index, placement in at if placement.is_replicate())


T = TypeVar("T")
Files = dict[str, list[int | str]]  # name -> size and hash


def together(processes: Processes, work: Callable[[], T]) -> list[T]:
    """Run work on every rank, and return all results by rank; an OSError or StoreError of one is raised on all.

    >>> together(Processes(), lambda: 3)
    [3]
    """
    results: list[T] = []
    failed: OSError | StoreError | None = None
    try:
        results.append(work())
    except (OSError, StoreError) as error:
        failed = error
    code = (failed.errno or 0) if isinstance(failed, OSError) else None
    outcomes = processes.gather((results, str(failed), code))
    if failed is not None:
        raise failed
    for rank, (found, message, code) in enumerate(outcomes):
        if not found:
            raise StoreError(message) if code is None else OSError(code, f"rank {rank}: {message}")
    return [result for found, _, _ in outcomes for result in found]


def write_folder(
    folder: Path,
    fill: Callable[[Path], None],
    processes: Processes,
    finish: Callable[[Path, Files], None] = lambda folder, files: None,
) -> None:
    """Replace a folder by what `fill` writes in every process, under different names.

    `finish` gets the files of all, in the main process.
    """
    new, is_main = store.unfinished_folder(folder), processes.is_main
    try:
        together(processes, lambda: store.begin_folder(folder, ".*") if is_main else None)
        parts = together(processes, lambda: _write_part(new, fill, processes.rank))

        def commit() -> None:
            for rank, files in enumerate(parts):
                _check_visible(new, files, rank)
            finish(new, {name: described for files in parts for name, described in sorted(files.items())})
            store.commit_folder(folder)

        together(processes, lambda: commit() if is_main else None)
    except BaseException:
        if is_main:
            shutil.rmtree(new, ignore_errors=True)
        raise


def _write_part(new: Path, fill: Callable[[Path], None], rank: int) -> Files:
    """Write and flush the files of this process, and describe them."""
    own = new / f".rank-{rank}"  # where no other process writes its files, and temporary ones
    own.mkdir()
    fill(own)
    files: Files = {}
    for path in sorted(own.rglob("*")):
        store.flush(path)
        if path.is_file():
            files[path.relative_to(own).as_posix()] = size_and_hash(path)
    for path in own.iterdir():
        path.rename(new / path.name)
    own.rmdir()
    return files


def _check_visible(new: Path, files: Files, rank: int) -> None:
    for name, (size, _) in files.items():
        if not (new / name).is_file() or (new / name).stat().st_size != size:
            raise StoreError(
                f"rank {rank} wrote {name}, but the main process does not find it in {str(new.parent)!r}; choose a "
                "folder that all processes share by train.out."
            )
