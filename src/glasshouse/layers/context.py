"""What the layers of one call need to know beyond their input."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from glasshouse.layers.cache import Cache
from glasshouse.layers.mask import Mask
from glasshouse.layers.position import Rotate


@dataclass(frozen=True)
class Context:
    """Made anew for each pass through a stack, owned by the stack, read by every layer."""

    rotate: Rotate  # what positions do to queries and keys
    masks: Mapping[int, Mask]  # by the layer's window
    cache: Cache | None = None
    slot_mapping: Mapping[int, Tensor | int] = field(
        default_factory=dict
    )  # by window: where in the cache the tokens go
    memory: Tensor | None = None  # [B, source, D], the encoder's output; None where the cache remembers it
    memory_mask: Mask | None = None
