"""Views of a KV cache for tokens of several of its rows in one row of ids."""

from __future__ import annotations

import torch
from torch import Tensor

from glasshouse.layers.attend.layout import Layout
from glasshouse.layers.cache.cache import Cache
from glasshouse.layers.cache.storage import RingBuffer, write_slots
from glasshouse.layers.cache.view import CacheView, check_one_document, check_slots, find_slots


class _TokenRows(CacheView):
    """Tokens that each have a cache row of their own, `rows` [B, S] or [B, 1]; [S] is one row."""

    def __init__(self, cache: Cache, rows: Tensor) -> None:
        self.cache = cache
        self.source = cache.source
        self._rows = self.slots = rows if rows.dim() == 2 else rows[None]

    def update(self, layer: int, slot_mapping: Tensor | int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values [B, H_kv, S, d] to their slots; return those to attend to."""
        assert isinstance(slot_mapping, Tensor)
        write_slots(self.cache.keys[layer], self._rows, slot_mapping, k)
        write_slots(self.cache.values[layer], self._rows, slot_mapping, v)
        return k, v

    def advance(self, layout: Layout) -> None:
        """Raise the lengths to the last new token of each row."""
        lengths = self.cache.lengths
        lengths.copy_(torch.maximum(lengths, self._last_slots(find_slots(layout, len(self._rows)))))

    def _last_slots(self, slots: Tensor) -> Tensor:
        """Return the last new slot of each cache row; 0 for rows without one."""
        empty = torch.zeros_like(self.cache.lengths)
        return empty.scatter_reduce_(0, self._rows.expand_as(slots).flatten(), slots.flatten(), "amax")


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

    def slot_mapping(self, layout: Layout) -> dict[int, Tensor | int]:
        """Return the slot of each token, [B, S], by a layer's window; 0 for those that a later one overwrites."""
        slots = find_slots(layout, len(self._rows))
        check_slots(slots, self.cache.max_len)
        result: dict[int, Tensor | int] = {}
        for group in self.cache.groups:
            kept = slots
            if isinstance(group, RingBuffer):  # which a call of a cache itself never fills
                kept = torch.where(slots > self._last_slots(slots)[self._rows] - group.size, slots, 0)
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

    def slot_mapping(self, layout: Layout) -> dict[int, Tensor | int]:
        """Return the slot of each token, [1, S], by a layer's window."""
        check_one_document(layout)
        slots = find_slots(layout, 1)
        check_slots(slots, self.cache.max_len)
        return {group.window: group.wrap(slots) for group in self.cache.groups}

    def key_layout(self, layout: Layout, window: int) -> Layout:
        """Return the layout of the keys in the cache."""
        return self.cache.key_layout(layout, window)

    def update(self, layer: int, slot_mapping: Tensor | int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values [1, H_kv, S, d] to their slots; return those of all cache rows."""
        super().update(layer, slot_mapping, k, v)
        return self.cache.cached_kv(layer)
