"""What the layers of a forward pass need in addition to their input."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from glasshouse.layers.attend.kernel import Backend
from glasshouse.layers.cache import CacheView
from glasshouse.layers.position import Rotate


@dataclass(frozen=True)
class Context:
    """Made for each forward pass by the stack, and read by every layer."""

    rotations: Mapping[int, Rotate]  # by the layer's window: the rotary embedding of queries and keys
    backends: Mapping[int, Backend]  # by the layer's window: the attention backend, with its mask
    positions: Tensor  # broadcasts to [B, S]
    ids: Tensor | None = None  # [B, S], for layers that embed the tokens themselves
    cache: CacheView | None = None
    # By the layer's window: where in its row of the cache each token is written.
    write_offsets: Mapping[int, Tensor | int] = field(default_factory=dict)
    memory: Tensor | None = None  # [B, source, D], the encoder's output; None if it is cached
    cross_backend: Backend | None = None  # that of cross-attention
