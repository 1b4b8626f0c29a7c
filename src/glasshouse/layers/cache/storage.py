"""Storage of keys and values: a pool of layers that cache the same shape, contiguous or as a ring buffer.

Offset 0 of a row takes the writes of padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from glasshouse.layers.attend.layout import Layout
from glasshouse.layers.cache import kernels


@dataclass(frozen=True)
class KVShape:
    """The KV cache shape of an attention layer: a key and a value per token and KV head, of width d_head."""

    n_kv_heads: int
    d_head: int
    window: int = 0  # no query attends to tokens further back; 0: all


class LayerGroups:
    """Layers grouped by the shape of their KV cache; a group shares one pool."""

    def __init__(self, shapes: Sequence[KVShape]) -> None:
        self.shapes = list(dict.fromkeys(shapes))
        self.places = [(self.shapes.index(shape), shapes[:layer].count(shape)) for layer, shape in enumerate(shapes)]

    def make_pool(self, shape: KVShape, batch: int, length: int, like: Tensor) -> Tensor:
        """Allocate [2, layers, B, H_kv, offsets, d] for the layers of a shape: keys, then values."""
        # One contiguous tensor per layer: torch.compile cannot tell strided views of one tensor apart, and would copy
        # all of it at each write.
        n_layers = sum(self.shapes[group] == shape for group, _ in self.places)
        size = (2, n_layers, batch, shape.n_kv_heads, length, shape.d_head)
        return torch.zeros(size, device=like.device, dtype=like.dtype)

    def layer_views(self, pools: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the keys of each layer, and the values, [B, H_kv, offsets, d]."""
        return [pools[group][0, i] for group, i in self.places], [pools[group][1, i] for group, i in self.places]


class Contiguous:
    """Offset t + 1 of a row has the token at position t."""

    def __init__(self, window: int, pool: Tensor) -> None:
        self.window = window  # of its layers
        self.pool = pool  # [2, layers, B, H_kv, 1 + size, d]
        self.size = pool.shape[4] - 1

    def narrow(self, rows: slice, max_len: int) -> Contiguous:
        """Return a view of these rows and of the first positions."""
        return Contiguous(self.window, self.pool[:, :, rows, :, : max_len + 1])

    def wrap(self, offsets: Tensor) -> Tensor:
        """Map the offsets of an unbounded row, position + 1 or 0 for padding, to those here."""
        return offsets

    def key_layout(self, layout: Layout, lengths: Tensor) -> Layout:
        """Return the layout of the keys, given that of a call and the lengths [B] before it."""
        return Layout(torch.arange(self.size, device=lengths.device)[None], ordered=True)

    def copy_row(self, source: int, target: int, start: int, stop: int) -> None:
        """Copy positions `start` to `stop` of a row."""
        copy_row(self.pool, source, target, start + 1, stop + 1)

    def clear_row(self, row: int, start: int) -> None:
        """Set a row to zero from position `start` on."""
        self.pool[:, :, row, :, start + 1 if start else 0 :] = 0


class RingBuffer(Contiguous):
    """The latest tokens of a row: the one at position t is in offset t % size + 1."""

    def narrow(self, rows: slice, max_len: int) -> Contiguous:
        """Return a view of these rows; one of no more positions than offsets needs no ring."""
        if max_len <= self.size:
            return super().narrow(rows, max_len)
        return RingBuffer(self.window, self.pool[:, :, rows])

    def wrap(self, offsets: Tensor) -> Tensor:
        """Map the offsets of an unbounded row, position + 1 or 0 for padding, to those here."""
        return torch.where(offsets > 0, (offsets - 1) % self.size + 1, 0)

    def key_layout(self, layout: Layout, lengths: Tensor) -> Layout:
        """Return the layout of the keys: the latest token at each offset, including the tokens of this call."""
        offsets = torch.arange(self.size, device=lengths.device)[None]
        length = layout.positions.shape[1] if layout.real is None else layout.real.sum(1)
        last = (lengths + length)[:, None] - 1
        positions = last - (last - offsets) % self.size
        return Layout(positions.clamp(min=0), positions >= 0)

    def copy_row(self, source: int, target: int, start: int, stop: int) -> None:
        """Copy a whole row: any offset may be in use."""
        copy_row(self.pool, source, target, 0, self.pool.shape[-2])

    def clear_row(self, row: int, start: int) -> None:
        """Set a whole row to zero; not a part of it, as any offset may be in use."""
        if start == 0:
            super().clear_row(row, start)


def copy_row(pool: Tensor, source: int, target: int, start: int, stop: int) -> None:
    """Copy offsets `start` to `stop` of a row in all layers."""
    if pool.is_cuda and kernels.available:  # torch would copy each layer by itself
        kernels.copy_row(pool, source, target, start, stop)
    else:
        pool[:, :, target, :, start:stop] = pool[:, :, source, :, start:stop]


def write_kv(keys: Tensor, values: Tensor, rows: Tensor, offsets: Tensor, k: Tensor, v: Tensor) -> None:
    """Write k and v [B, H_kv, S, d] of a layer to offsets [B, S] of rows that broadcast to [B, S]."""
    for cached, new in ((keys, k), (values, v)):
        cached[rows, :, offsets] = new.detach().transpose(1, 2).to(cached.dtype)
