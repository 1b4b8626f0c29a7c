"""The KV cache of a batch of sequences."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from glasshouse.errors import InputError
from glasshouse.layers.attend.layout import Layout
from glasshouse.layers.cache.source import SourceCache
from glasshouse.layers.cache.storage import Contiguous, KVShape, LayerGroups, RingBuffer, write_kv
from glasshouse.layers.cache.view import CacheView, check_offsets, check_one_document, find_offsets


class Cache(CacheView):
    """A KV cache for `max_len` tokens per sequence, for attention layers of these shapes; lengths may differ.

    A sliding-window layer needs no more than its window: if no call has more than `chunk` tokens, its offsets are a
    ring buffer of the size of the window plus a chunk. Shapes never change, so a compiled model does not recompile.
    Gradients do not flow through. Device and dtype are those of `like`.
    """

    rows: Tensor

    def __init__(
        self,
        shapes: Sequence[KVShape],
        batch: int,
        max_len: int,
        *,
        chunk: int | None = None,
        source: SourceCache | None = None,
        like: Tensor,
    ) -> None:
        self.max_len = max_len
        self.chunk = max_len if chunk is None else chunk
        self.source = source
        self.lengths = torch.zeros(batch, dtype=torch.long, device=like.device)  # cached tokens of each row
        self.rows = torch.arange(batch, device=like.device)[:, None]
        self.cache_rows = self.rows
        self._layers = LayerGroups(shapes)
        self.groups = [self._make_group(shape, batch, like) for shape in self._layers.shapes]
        self.write_kv = write_kv  # an engine has a kernel of its own
        self._make_views()
        if like.is_cuda:
            self._mark_static()

    def _make_group(self, shape: KVShape, batch: int, like: Tensor) -> Contiguous:
        needed = shape.window + self.chunk if shape.window else self.max_len
        kind = RingBuffer if needed < self.max_len else Contiguous
        return kind(shape.window, self._layers.make_pool(shape, batch, min(needed, self.max_len) + 1, like))

    def _make_views(self) -> None:
        """Make the views of each layer, [B, H_kv, offsets, d]."""
        self.keys, self.values = self._layers.layer_views([group.pool for group in self.groups])

    def _mark_static(self) -> None:
        """Mark the tensors as static, so that CUDA graphs can capture writes to them."""
        tensors = [*self.keys, *self.values, self.lengths]
        if self.source is not None:
            tensors += [*self.source.keys, *self.source.values, self.source.mask]
        for tensor in tensors:
            torch._dynamo.mark_static_address(tensor)

    def narrow(self, rows: slice, max_len: int | None = None, source_len: int | None = None) -> Cache:
        """Return a view of these rows and of the first positions."""
        view = copy.copy(self)
        view.max_len = self.max_len if max_len is None else min(max_len, self.max_len)
        view.lengths = self.lengths[rows]
        view.rows = self.rows[: len(view.lengths)]
        view.cache_rows = self.cache_rows[rows]
        view.groups = [group.narrow(rows, view.max_len) for group in self.groups]
        view.source = None if self.source is None else self.source.narrow(rows, source_len)
        view._make_views()
        return view

    def start_positions(self) -> Tensor | None:
        """Return the position of the next token of each row, [B]."""
        return self.lengths

    def write_offsets(self, layout: Layout) -> dict[int, Tensor | int]:
        """Return the offset of each token of a call, [B, S] or one for all, by a layer's window.

        Raises if the call does not fit.
        """
        check_one_document(layout)
        length = layout.positions.shape[1]
        offsets = find_offsets(layout, len(self.rows))
        ends = check_offsets(offsets, self.max_len)
        if length > self.chunk:
            raise InputError(
                f"this call has {length} tokens per row, but the cache was made for chunk = {self.chunk}; pass fewer."
            )
        wrapped = {group.window: group.wrap(offsets) for group in self.groups}
        if length == 1 and ends is not None and ends[0] == ends[1]:
            return {window: int(offset[0, 0]) for window, offset in wrapped.items()}
        return dict(wrapped)

    def key_layout(self, layout: Layout, window: int) -> Layout:
        """Return the layout of the keys of a layer with this window, including the keys of this call."""
        group = next(group for group in self.groups if group.window == window)
        return group.key_layout(layout, self.lengths)

    def update(self, layer: int, write_offsets: Tensor | int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values [B, H_kv, S, d] to their offsets; return those to attend to."""
        if isinstance(write_offsets, int):  # a slice, far cheaper than an index
            self.keys[layer][:, :, write_offsets] = k.detach()[:, :, 0]
            self.values[layer][:, :, write_offsets] = v.detach()[:, :, 0]
        else:
            self.write_kv(self.keys[layer], self.values[layer], self.rows, write_offsets, k, v)
        return self.cached_kv(layer)

    def cached_kv(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a layer, without the offset of padding."""
        return self.keys[layer][:, :, 1:], self.values[layer][:, :, 1:]

    def advance(self, layout: Layout) -> None:
        """Add the real tokens of a call to the lengths, once every layer has written them."""
        self.lengths += layout.positions.shape[1] if layout.real is None else layout.real.sum(1)

    def copy_row(self, source: int, target: int, start: int, stop: int) -> None:
        """Copy row `source` up to position `stop` to row `target`, which has the same tokens up to `start`."""
        for group in self.groups:
            group.copy_row(source, target, start, stop)
        self.lengths[target] = stop
        if self.source is not None:
            self.source.copy_row(source, target)

    def clear_row(self, row: int, start: int = 0) -> None:
        """Set a row to zero from position `start` on."""
        for group in self.groups:
            group.clear_row(row, start)
        if self.source is not None and start == 0:
            self.source.clear_row(row)
        self.lengths[row] = start

    @property
    def max_rollback(self) -> float:
        """How many cached tokens a row can drop and still have the windows before them in its ring buffers."""
        return self.chunk if any(isinstance(group, RingBuffer) for group in self.groups) else math.inf

    @property
    def n_bytes(self) -> int:
        """Size of the keys and values in bytes."""
        own = sum(group.pool.nbytes for group in self.groups)
        return own if self.source is None else own + self.source.n_bytes

    def __repr__(self) -> str:
        return f"Cache({len(self.lengths)} rows of {self.max_len} tokens, {self.n_bytes:,} bytes)"
