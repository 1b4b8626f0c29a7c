"""What the layers of a forward pass need in addition to their input."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from glasshouse.layers.cache import Cache
from glasshouse.layers.mask import Mask
from glasshouse.layers.position import Rotate


@dataclass(frozen=True)
class Context:
    """Made for each forward pass by the stack, and read by every layer."""

    rotate: Rotate  # the rotary embedding of queries and keys
    masks: Mapping[int, Mask]  # by the layer's window
    cache: Cache | None = None
    slot_mapping: Mapping[int, Tensor | int] = field(default_factory=dict)  # by window: cache slot of each token
    memory: Tensor | None = None  # [B, source, D], the encoder's output; None if it is cached
    memory_mask: Mask | None = None
