"""What a step communicates, and how long that takes."""

from __future__ import annotations

from dataclasses import dataclass

from glasshouse.training.distributed.layout import Layout
from glasshouse.training.plan.hardware import Gpu


@dataclass(frozen=True)
class Traffic:
    """Bytes that each GPU sends in a step, and as many that it receives, by collective."""

    all_gather: int = 0  # of weights, over the shards
    reduce_scatter: int = 0  # of gradients, over the shards
    all_reduce: int = 0  # of gradients, over the replicas
    tensor: int = 0  # all-reduces of activations, which no computation hides

    @property
    def total(self) -> int:
        """All of them."""
        return self.all_gather + self.reduce_scatter + self.all_reduce + self.tensor

    def seconds(self, layout: Layout, gpu: Gpu) -> tuple[float, float]:
        """Return how long the collectives take that computation can hide, and those that it cannot."""
        inside = layout.per_node // layout.tensor  # GPUs of a node with data of their own
        # What leaves a node does so through the adapters of all GPUs of the group in it, and its links pass it on.
        shards_rate = gpu.link if layout.shards <= inside else min(gpu.link, inside * gpu.network)
        together = max(1, inside // layout.shards)  # replicas in a node
        replicas_rate = gpu.link if layout.replicas <= together else min(gpu.link, together * gpu.network)
        over_shards = (self.all_gather + self.reduce_scatter) / shards_rate
        return over_shards + self.all_reduce / replicas_rate, self.tensor / gpu.link


def step_traffic(
    layout: Layout,
    *,
    in_blocks: int,
    outside: int,
    itemsize: int,
    grad_accum: int,
    activations: int = 0,
    momentum: int = 0,
) -> Traffic:
    """Return the traffic of a step, by rings: a GPU sends all shards of a tensor but one.

    Blocks are gathered for the forward and again for the backward pass of each micro-batch, what is `outside` once;
    gradients, in float32, are reduced with the last micro-batch. `activations` are the bytes, over all micro-batches
    of a step, that tensor parallelism sums; `momentum` is what Muon gathers, to orthogonalize whole
    matrices.

    >>> four = Layout("shard", shards=4)
    >>> step_traffic(four, in_blocks=1000, outside=200, itemsize=2, grad_accum=1)
    Traffic(all_gather=3300, reduce_scatter=3600, all_reduce=0, tensor=0)
    """
    shards, replicas, tensor = layout.shards, layout.replicas, layout.tensor
    gathered = grad_accum * itemsize * (2 * in_blocks + outside) // tensor + momentum
    gradients = 4 * (in_blocks + outside) // tensor
    return Traffic(
        all_gather=gathered * (shards - 1) // shards,
        reduce_scatter=gradients * (shards - 1) // shards,
        all_reduce=2 * gradients * (replicas - 1) // (shards * replicas),
        tensor=2 * activations * (tensor - 1) // tensor,
    )
