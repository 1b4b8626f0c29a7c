"""The parallel layout of a model over GPUs: replicas, shards and tensor parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from glasshouse.config import require
from glasshouse.errors import ConfigError

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
    why = "set explicitly"
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
