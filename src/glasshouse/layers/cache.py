"""The KV cache: preallocated keys and values, owned by the caller and written by the modules."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from glasshouse import spec
from glasshouse.errors import InputError
from glasshouse.layers.layout import Layout


class Cache:
    """A KV cache for `max_len` tokens per sequence, and `source_len` tokens of an encoder; lengths may differ.

    Slot t + 1 of a row has the token at position t, and slot 0 takes the writes of padding. A sliding-window layer
    needs no more than its window: if no call has more than `chunk` tokens, its slots are a ring buffer of the size of
    the window plus a chunk. Shapes never change, so a compiled model does not recompile; there and on a GPU, a token
    too many raises torch's own index error. Gradients do not flow through. Device and dtype are those of `like`.
    """

    def __init__(
        self,
        s: spec.TransformerSpec,
        batch: int,
        max_len: int,
        source_len: int = 0,
        *,
        chunk: int | None = None,
        like: Tensor,
    ) -> None:
        device = like.device
        windows = [s.window(index) for index in range(s.n_layers)]

        def make_pool(layers: int, length: int) -> Tensor:  # keys, then values
            # One contiguous tensor per layer: torch.compile cannot tell strided views of one tensor apart, and would
            # copy all of it at each write.
            shape = (2, layers, batch, s.n_kv_heads, length, s.d_head)
            return torch.zeros(shape, device=device, dtype=like.dtype)

        self.max_len = max_len
        self.chunk = max_len if chunk is None else chunk
        self.ring_sizes = {w: min(max_len, w + self.chunk) if w else max_len for w in windows}  # by window
        self.lengths = torch.zeros(batch, dtype=torch.long, device=device)  # cached tokens of each row
        self._layer_pools = [(window, windows[:index].count(window)) for index, window in enumerate(windows)]
        self._pools = {window: make_pool(windows.count(window), size + 1) for window, size in self.ring_sizes.items()}
        self.source_len = source_len
        self.has_source = False  # whether an encoder output is cached
        self.source_mask = torch.zeros(batch, source_len, dtype=torch.bool, device=device)
        self._source_pool = make_pool(s.n_layers, source_len)
        self.packed_prefill = False  # tokens of a call attend only to each other
        self.token_positions: Tensor | None = None  # [1, S], in a mixed batch
        self._rows = torch.arange(batch, device=device)[:, None]  # [B, 1] or, packed, [1, S]
        self._make_views()
        if device.type == "cuda":
            self._mark_static()

    def _make_views(self) -> None:
        """Make the views of each layer, [B, H_kv, slots, d]."""
        self.keys, self.values = ([self._pools[window][kv, i] for window, i in self._layer_pools] for kv in (0, 1))
        self.source_keys, self.source_values = ([*half.unbind()] for half in self._source_pool.unbind())

    def _mark_static(self) -> None:
        """Mark the tensors as static, so that CUDA graphs can capture writes to them."""
        tensors = (*self.keys, *self.values, *self.source_keys, *self.source_values)
        for tensor in (*tensors, self.lengths, self.source_mask):
            torch._dynamo.mark_static_address(tensor)

    def narrow(self, rows: slice, max_len: int | None = None, source_len: int | None = None) -> Cache:
        """Return a view of these rows and of the first positions."""
        view = copy.copy(self)
        view.max_len = self.max_len if max_len is None else min(max_len, self.max_len)
        view.ring_sizes = {window: min(size, view.max_len) for window, size in self.ring_sizes.items()}
        view.source_len = self.source_len if source_len is None else source_len
        view.lengths = self.lengths[rows]
        view.source_mask = self.source_mask[rows, : view.source_len]
        view._pools = {window: pool[:, :, rows, :, : view.max_len + 1] for window, pool in self._pools.items()}
        view._source_pool = self._source_pool[:, :, rows, :, : view.source_len]
        view._rows = self._rows[: len(view.lengths)]
        view._make_views()
        return view

    def for_packed_prefill(self, rows: Tensor) -> Cache:
        """Return a view for a packed prefill: new sequences one after the other in one row of ids.

        `rows` [S] is the cache row of each token; tokens attend only to their own sequence.
        """
        view = copy.copy(self)
        view.packed_prefill = True
        view._rows = rows[None]
        return view

    def for_mixed_batch(self, rows: Tensor, positions: Tensor) -> Cache:
        """Return a view for a mixed batch: tokens of several cache rows, in any order, in one row of ids.

        `rows` [S] is the cache row of each token, `positions` [S] its position there. The model must have
        `Stack.supports_mixed_prefill`.
        """
        view = copy.copy(self)
        view.token_positions = positions[None]
        view._rows = rows[None]
        return view

    @property
    def rows(self) -> Tensor:
        """The cache row of each row of a call, [B]; or of each token in a mixed batch, [1, S]."""
        return self._rows[:, 0] if self.token_positions is None else self._rows

    def start_positions(self) -> Tensor | None:
        """Return the position of the next token of each row, [B]; or of each token in a mixed batch, [1, S]."""
        if self.packed_prefill:
            return None
        return self.lengths if self.token_positions is None else self.token_positions

    def slot_mapping(self, layout: Layout) -> dict[int, Tensor | int]:
        """Return the slot of each token of a call, [B, S] or one for all, by a layer's window.

        Raises if the call does not fit.
        """
        length = layout.positions.shape[1]
        if layout.documents is not None and not self.packed_prefill:
            raise InputError("documents and cache were both given; a cached row is one document; leave one out.")
        positions = layout.positions.expand(len(self._rows), length)
        slots = positions + 1 if layout.real is None else torch.where(layout.real, positions + 1, 0)
        same = False
        if slots.is_cpu and not torch.compiler.is_compiling():
            lowest, fullest = (int(slot) for slot in slots.aminmax())
            if fullest > self.max_len:
                raise InputError(
                    f"the cache has max_len = {self.max_len} tokens per row, but {fullest} are needed; "
                    "make a longer one."
                )
            same = lowest == fullest and length == 1 and not self.packed_prefill and self.token_positions is None
        if not self.packed_prefill and self.token_positions is None and length > self.chunk:
            raise InputError(
                f"this call has {length} tokens per row, but the cache was made for chunk = {self.chunk}; pass fewer."
            )
        wrapped = {window: self._wrap(slots, size) for window, size in self.ring_sizes.items()}
        return {window: int(slot[0, 0]) for window, slot in wrapped.items()} if same else dict(wrapped)

    def _wrap(self, slot_mapping: Tensor, ring_size: int) -> Tensor:
        """Map slots to a ring buffer; 0 for tokens that a later token of the call overwrites."""
        if ring_size == self.max_len:
            return slot_mapping
        kept = slot_mapping > 0
        if self.packed_prefill:  # else a call is shorter than the ring
            kept = kept & (slot_mapping > self._last(slot_mapping)[self._rows] - ring_size)
        return torch.where(kept, (slot_mapping - 1) % ring_size + 1, 0)

    def _last(self, slot_mapping: Tensor) -> Tensor:
        """Return the last new slot of each cache row."""
        rows = self._rows.expand_as(slot_mapping)
        return torch.zeros_like(self.lengths).scatter_reduce_(0, rows.flatten(), slot_mapping.flatten(), "amax")

    def update(self, layer: int, slot_mapping: Tensor | int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values [B, H_kv, S, d] to their slots; return those to attend to."""
        for pool, new in ((self.keys[layer], k), (self.values[layer], v)):
            if isinstance(slot_mapping, int):  # a slice, far cheaper than an index
                pool[:, :, slot_mapping] = new.detach()[:, :, 0]
            else:
                pool[self._rows, :, slot_mapping] = new.detach().transpose(1, 2).to(pool.dtype)
        if self.packed_prefill:
            return k, v
        return self.keys[layer][:, :, 1:], self.values[layer][:, :, 1:]

    def advance(self, layout: Layout) -> None:
        """Add the real tokens of a call to the lengths, once every layer has written them."""
        if self.packed_prefill or self.token_positions is not None:
            slots = layout.positions + 1 if layout.real is None else torch.where(layout.real, layout.positions + 1, 0)
            self.lengths.copy_(torch.maximum(self.lengths, self._last(slots.expand(len(self._rows), -1))))
        else:
            self.lengths += layout.positions.shape[1] if layout.real is None else layout.real.sum(1)

    def key_layout(self, layout: Layout, window: int) -> Layout:
        """Return the layout of the keys of a layer with this window, those of the call included."""
        if self.packed_prefill:
            return layout
        ring_size = self.ring_sizes[window]
        slots = torch.arange(ring_size, device=self.lengths.device)[None]
        if ring_size == self.max_len:
            return Layout(slots, ordered=True)
        length = layout.positions.shape[1] if layout.real is None else layout.real.sum(1)
        last = (self.lengths + length)[:, None] - 1
        positions = last - (last - slots) % ring_size  # the latest token of each slot
        return Layout(positions.clamp(min=0), positions >= 0)

    def copy_row(self, source: int, target: int, start: int, stop: int) -> None:
        """Copy row `source` up to position `stop` to row `target`, which has the same tokens up to `start`."""
        for window, pool in self._pools.items():
            # In a ring buffer any slot may be needed; and a GPU copies whole rows of all layers in one kernel, but
            # parts of rows in one per layer.
            whole = pool.is_cuda or self.ring_sizes[window] != self.max_len
            _copy(pool, source, target, slice(None) if whole else slice(start + 1, stop + 1))
        self.lengths[target] = stop
        if self.source_len:
            self.source_mask[target] = self.source_mask[source]
            _copy(self._source_pool, source, target, slice(None))

    def clear_row(self, row: int, start: int = 0) -> None:
        """Set a row to zero from position `start` on."""
        for window, pool in self._pools.items():
            if start == 0:
                pool[:, :, row] = 0
            elif self.ring_sizes[window] == self.max_len:  # in a ring buffer any slot may be in use
                pool[:, :, row, :, start + 1 :] = 0
        if start == 0:
            self._source_pool[:, :, row] = 0
        self.lengths[row] = start

    def store_source(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store the keys and values of an encoder's output for later calls."""
        self.source_keys[layer][:, :, : k.shape[2]] = k.detach()
        self.source_values[layer][:, :, : v.shape[2]] = v.detach()

    def source_kv(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the stored keys and values of the source."""
        return self.source_keys[layer], self.source_values[layer]

    def store_source_layout(self, layout: Layout) -> None:
        """Store the padding mask of the source."""
        length = layout.positions.shape[1]
        if length > self.source_len:
            raise InputError(
                f"the source is {length} tokens long, but the cache has source_len = {self.source_len}; "
                "make a longer one."
            )
        self.has_source = True
        self.source_mask.zero_()
        self.source_mask[:, :length] = True if layout.real is None else layout.real

    def source_layout(self) -> Layout:
        """Return the layout of the source."""
        return Layout(torch.arange(self.source_len, device=self.lengths.device)[None], self.source_mask)

    @property
    def n_bytes(self) -> int:
        """Size of the keys and values in bytes."""
        return sum(pool.numel() * pool.element_size() for pool in (*self._pools.values(), self._source_pool))

    def __repr__(self) -> str:
        return f"Cache({len(self.lengths)} rows of {self.max_len} tokens, {self.n_bytes:,} bytes)"


def _copy(pool: Tensor, source: int, target: int, span: slice) -> None:
    """Copy a row in all layers."""
    if pool.is_cuda:  # one index over a pool beyond 32-bit indexing would be many kernels
        layers = pool.flatten(0, 1)
        torch._foreach_copy_(layers[:, target, :, span].unbind(), layers[:, source, :, span].unbind())
    else:
        pool[:, :, target, :, span] = pool[:, :, source, :, span]
