"""The interface of a KV cache in a forward pass."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from glasshouse.errors import InputError
from glasshouse.layers.attend.layout import Layout
from glasshouse.layers.cache.source import SourceCache
from glasshouse.layers.host_reads import can_read


class CacheView(ABC):
    """A KV cache in one forward pass: where its tokens are written, and which keys they attend to."""

    rows: Tensor | None  # broadcasts to [B, S]: the cache row that a token attends to; None: only to its own call
    cache_rows: Tensor  # broadcasts to [B, S]: the row of the whole cache that a token belongs to
    source: SourceCache | None  # of cross-attention

    @abstractmethod
    def start_positions(self) -> Tensor | None:
        """Return the position of the first token of each row, [B], or of each token, [B, S]; None: 0."""

    @abstractmethod
    def write_offsets(self, layout: Layout) -> dict[int, Tensor | int]:
        """Return the offset of each token of a call, [B, S] or one for all, by a layer's window.

        Raises if the call does not fit.
        """

    @abstractmethod
    def key_layout(self, layout: Layout, window: int) -> Layout:
        """Return the layout of the keys of a layer with this window, including the keys of this call."""

    @abstractmethod
    def update(self, layer: int, write_offsets: Tensor | int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values [B, H_kv, S, d] to their offsets; return those to attend to."""

    @abstractmethod
    def advance(self, layout: Layout) -> None:
        """Add the real tokens of a call to the lengths, once every layer has written them."""


def find_offsets(layout: Layout, batch: int) -> Tensor:
    """Return the offset of each token of a call in an unbounded row, [B, S]: position + 1, or 0 for padding."""
    positions = layout.positions.expand(batch, layout.positions.shape[1])
    return positions + 1 if layout.real is None else torch.where(layout.real, positions + 1, 0)


def check_offsets(offsets: Tensor, max_len: int) -> tuple[int, int] | None:
    """Raise if a token does not fit; return the lowest and the highest offset, or None where they are not read.

    Where they are not, a token too many raises torch's own index error.
    """
    if not can_read(offsets):
        return None
    lowest, highest = (int(offset) for offset in offsets.aminmax())
    if highest > max_len:
        raise InputError(
            f"the cache has max_len = {max_len} tokens per row, but {highest} are needed; make a longer one."
        )
    return lowest, highest


def check_one_document(layout: Layout) -> None:
    """Raise if rows are packed: a cached row is one document."""
    if layout.documents is not None:
        raise InputError("documents and cache were both given; a cached row is one document; leave one out.")
