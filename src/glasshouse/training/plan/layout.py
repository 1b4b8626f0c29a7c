"""How a model is spread over GPUs: replicas, shards, tensor parallelism, and what a step then communicates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from glasshouse.config import require
from glasshouse.errors import ConfigError
from glasshouse.training.plan.hardware import Gpu

Kind = Literal["auto", "replicate", "shard", "hybrid"]
STATE_BYTES = 16  # per parameter: weight, gradient and two averages of AdamW, in float32
STATE_SHARE = 0.25  # of the memory for them; with more, few activations fit


@dataclass(frozen=True)
class Layout:
    """A mesh of replicas, of shards in each, and of GPUs that share each matrix product.

    >>> Layout("hybrid", replicas=8, shards=8, tensor=1, per_node=8).gpus
    64
    """

    kind: str
    replicas: int = 1
    shards: int = 1
    tensor: int = 1
    per_node: int = 8
    why: str = ""

    @property
    def gpus(self) -> int:
        """All GPUs."""
        return self.replicas * self.shards * self.tensor

    @property
    def data_parallel(self) -> int:
        """The number of GPUs that have data of their own."""
        return self.replicas * self.shards


SINGLE = Layout("replicate", per_node=1, why="there is one GPU")


def choose_layout(kind: Kind, gpus: int, per_node: int, tensor: int, n_parameters: int, memory: int) -> Layout:
    """Return the layout of a kind; "auto": the fewest shards with which the state fits well into the memory.

    >>> choose_layout("auto", 64, 8, 1, n_parameters=7_000_000_000, memory=80 * 2**30).kind
    'hybrid'
    """
    for name, value in {"gpus": gpus, "per_node": per_node, "tensor": tensor}.items():
        require(value > 0, name, value, "at least 1")
    local = min(per_node, gpus)
    if local % tensor or gpus % local:
        raise ConfigError(
            f"{gpus} GPUs, {local} a node, do not split into groups of tensor = {tensor}; choose a tensor that "
            "divides the GPUs of a node, and whole nodes."
        )
    if gpus == 1:
        return SINGLE
    size, inside = gpus // tensor, local // tensor
    shards = {"replicate": 1, "hybrid": inside, "shard": size}
    need = STATE_BYTES * n_parameters / tensor
    limit = STATE_SHARE * memory
    why = "it was asked for"
    if kind == "auto":
        order: list[Kind] = ["replicate", "hybrid"] if 1 < inside < size else ["replicate"]
        kind = next((name for name in order if need / shards[name] <= limit), "shard")
        state = need / shards[kind] / 2**30
        why = f"weights, gradients and optimizer state of {state:,.1f} GiB"
        fits = state * 2**30 <= limit
        why += f" a GPU are {'within' if fits else 'above'} {STATE_SHARE:.0%} of its memory"
        if kind != "replicate":
            why += f", those of a whole replica, {need / 2**30:,.1f} GiB, are not"
    return Layout(kind, size // shards[kind], shards[kind], tensor, local, why)


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
