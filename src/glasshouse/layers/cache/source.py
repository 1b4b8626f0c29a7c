"""The cache of cross-attention: keys and values of an encoder's output."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from glasshouse.errors import InputError
from glasshouse.layers.attend.layout import Layout
from glasshouse.layers.cache.storage import KVShape, LayerGroups, copy_row


class SourceCache:
    """Keys and values of up to `source_len` source tokens per row, for cross-attention layers of these shapes."""

    def __init__(self, shapes: Sequence[KVShape], batch: int, source_len: int, *, like: Tensor) -> None:
        self.source_len = source_len
        self.filled = False  # whether an encoder output is cached
        self.mask = torch.zeros(batch, source_len, dtype=torch.bool, device=like.device)
        self._groups = LayerGroups(shapes)
        self.pools = [self._groups.make_pool(shape, batch, source_len, like) for shape in self._groups.shapes]
        self.keys, self.values = self._groups.layer_views(self.pools)
        self._rows: Tensor | slice = slice(None)  # those that a call stores

    def at(self, rows: Tensor) -> SourceCache:
        """Return a view whose calls store these rows [B]."""
        view = copy.copy(self)
        view._rows = rows
        return view

    def narrow(self, rows: slice, source_len: int | None = None) -> SourceCache:
        """Return a view of these rows and of the first tokens."""
        view = copy.copy(self)
        view.source_len = self.source_len if source_len is None else source_len
        view.mask = self.mask[rows, : view.source_len]
        view.pools = [pool[:, :, rows, :, : view.source_len] for pool in self.pools]
        view.keys, view.values = self._groups.layer_views(view.pools)
        return view

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store the keys and values of an encoder's output for later calls."""
        self.keys[layer][self._rows, :, : k.shape[2]] = k.detach()
        self.values[layer][self._rows, :, : v.shape[2]] = v.detach()

    def store_layout(self, layout: Layout) -> None:
        """Store the padding mask of the source."""
        length = layout.positions.shape[1]
        if length > self.source_len:
            raise InputError(
                f"the source is {length} tokens long, but the cache has source_len = {self.source_len}; "
                "make a longer one."
            )
        self.filled = True
        mask = self.mask.new_zeros(1 if layout.real is None else len(layout.real), self.source_len)
        mask[:, :length] = True if layout.real is None else layout.real
        self.mask[self._rows] = mask

    def layout(self) -> Layout:
        """Return the layout of the source."""
        return Layout(torch.arange(self.source_len, device=self.mask.device)[None], self.mask)

    def copy_row(self, source: int, target: int) -> None:
        """Copy a row."""
        self.mask[target] = self.mask[source]
        for pool in self.pools:
            copy_row(pool, source, target, 0, pool.shape[-2])

    def clear_row(self, row: int) -> None:
        """Set a row to zero."""
        for pool in self.pools:
            pool[:, :, row] = 0

    @property
    def n_bytes(self) -> int:
        """Size of the keys and values in bytes."""
        return sum(pool.nbytes for pool in self.pools)
