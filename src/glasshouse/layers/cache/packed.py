"""Views of a KV cache for packed calls: one row of ids has tokens of several cache rows."""

from __future__ import annotations

import torch
from torch import Tensor

from glasshouse.layers.attend.layout import Layout
from glasshouse.layers.cache.cache import Cache
from glasshouse.layers.cache.storage import RingBuffer
from glasshouse.layers.cache.view import CacheView, check_offsets, check_one_document, find_offsets


class _TokenRows(CacheView):
    """Tokens that each have a cache row of their own, `rows` [B, S] or [B, 1]; [S] is one row."""

    def __init__(self, cache: Cache, rows: Tensor) -> None:
        self.cache = cache
        self.source = cache.source
        self._rows = self.cache_rows = rows if rows.dim() == 2 else rows[None]

    def update(self, layer: int, write_offsets: Tensor | int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values [B, H_kv, S, d] to their offsets; return those to attend to."""
        assert isinstance(write_offsets, Tensor)
        self.cache.write_kv(self.cache.keys[layer], self.cache.values[layer], self._rows, write_offsets, k, v)
        return k, v

    def advance(self, layout: Layout) -> None:
        """Raise the lengths to the last new token of each row."""
        lengths = self.cache.lengths
        lengths.copy_(torch.maximum(lengths, self._last_offsets(find_offsets(layout, len(self._rows)))))

    def _last_offsets(self, offsets: Tensor) -> Tensor:
        """Return the last new offset of each cache row; 0 for rows without one."""
        empty = torch.zeros_like(self.cache.lengths)
        return empty.scatter_reduce_(0, self._rows.expand_as(offsets).flatten(), offsets.flatten(), "amax")


class PackedPrefill(_TokenRows):
    """A prefill of new sequences: one in each row of ids, or several packed in a row as documents.

    `rows` [B, 1] is the cache row of each sequence, or [B, S] that of each token; [S] is one row. Tokens attend only
    to their own sequence.
    """

    def __init__(self, cache: Cache, rows: Tensor) -> None:
        super().__init__(cache, rows)
        self.rows = None

    def start_positions(self) -> Tensor | None:
        """Return None: each sequence starts at position 0."""
        return None

    def write_offsets(self, layout: Layout) -> dict[int, Tensor | int]:
        """Return the offset of each token, [B, S], by a layer's window; 0 for those that a later one overwrites."""
        offsets = find_offsets(layout, len(self._rows))
        check_offsets(offsets, self.cache.max_len)
        result: dict[int, Tensor | int] = {}
        for group in self.cache.groups:
            kept = offsets
            if isinstance(group, RingBuffer):  # which a call of a cache itself never fills
                kept = torch.where(offsets > self._last_offsets(offsets)[self._rows] - group.size, offsets, 0)
            result[group.window] = group.wrap(kept)
        return result

    def key_layout(self, layout: Layout, window: int) -> Layout:
        """Return the layout of the call, whose keys are the only ones."""
        return layout


class MixedBatch(_TokenRows):
    """A mixed batch: tokens of several cache rows, in any order, in one row of ids.

    `rows` [S] is the cache row of each token, `positions` [S] its position there. The model must have
    `Stack.supports_mixed_prefill`.
    """

    def __init__(self, cache: Cache, rows: Tensor, positions: Tensor) -> None:
        super().__init__(cache, rows)
        self.rows = self._rows
        self._positions = positions[None]

    def start_positions(self) -> Tensor | None:
        """Return the position of each token, [1, S]."""
        return self._positions

    def write_offsets(self, layout: Layout) -> dict[int, Tensor | int]:
        """Return the offset of each token, [1, S], by a layer's window."""
        check_one_document(layout)
        offsets = find_offsets(layout, 1)
        check_offsets(offsets, self.cache.max_len)
        return {group.window: group.wrap(offsets) for group in self.cache.groups}

    def key_layout(self, layout: Layout, window: int) -> Layout:
        """Return the layout of the keys in the cache."""
        return self.cache.key_layout(layout, window)

    def update(self, layer: int, write_offsets: Tensor | int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values [1, H_kv, S, d] to their offsets; return the keys and values of all cache rows."""
        super().update(layer, write_offsets, k, v)
        return self.cache.cached_kv(layer)
