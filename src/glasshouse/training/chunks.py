"""Which chunk of a tensor a process saves, and which it reads: with DTensors, its shard.

A DTensor is recognized by its `to_local`: the type takes a second to import, which one process need not wait for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from glasshouse.hub.tensor_shards import Chunk, SavedTensors


def is_split(tensors: Iterable[Any]) -> bool:
    """Return whether one of the tensors is split over processes; the answer is the same in all of them.

    >>> is_split([torch.ones(2)])
    False
    """
    return any(
        size > 1 and not placement.is_replicate()
        for tensor in tensors
        if hasattr(tensor, "to_local")
        for placement, size in zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    )


def owned_chunks(tensors: Mapping[str, Any], *, is_main: bool) -> dict[str, Chunk]:
    """Copy to the CPU what this process saves: of replicas the first one's shards, and plain tensors if it is main.

    >>> owned_chunks({"a": torch.ones(2)}, is_main=True)
    {'a': Chunk(tensor=tensor([1., 1.]), offsets=(0,), shape=(2,))}
    >>> owned_chunks({"a": torch.ones(2)}, is_main=False)
    {}
    """
    found = {}
    for name, tensor in tensors.items():
        if not hasattr(tensor, "to_local"):
            if is_main:
                found[name] = Chunk.of(tensor.detach().to("cpu", copy=True))
            continue
        shard = tensor.detach().to_local()
        if _is_first_replica(tensor) and shard.numel() > 0:
            offsets, _ = _place(tensor)
            found[name] = Chunk(shard.to("cpu", copy=True), offsets, tuple(tensor.shape))
    return found


def read_like(tensor: Any, saved: SavedTensors, name: str) -> Tensor:  # noqa: ANN401 - a DTensor, or a plain one
    """Return a saved tensor on the device of another and split like it; only this process's chunk is read.

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
    """Copy saved tensors into those of the same names, plain or split; names that were not saved stay as they are.

    >>> weights = {"a": torch.zeros(2)}
    >>> load(weights, SavedTensors.of({"ema.a": torch.ones(2)}), "ema.")
    >>> weights["a"]
    tensor([1., 1.])
    """
    for name, tensor in tensors.items():
        if prefix + name in saved:
            tensor.copy_(read_like(tensor, saved, prefix + name))


def _place(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:  # noqa: ANN401 - a DTensor
    """Return the offsets and the sizes of this process's shard."""
    (chunk,) = tensor.__create_chunk_list__()
    return tuple(chunk.offsets), tuple(chunk.sizes)


def _is_first_replica(tensor: Any) -> bool:  # noqa: ANN401 - a DTensor
    mesh = tensor.device_mesh
    at = zip(mesh.get_coordinate(), tensor.placements, strict=True)
    # With tensor parallelism, norms are on several meshes without that dimension: one of them has rank 0.
    return 0 in mesh.mesh and all(index == 0 for index, placement in at if placement.is_replicate())
