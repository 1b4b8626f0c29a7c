"""Keys and values of the tokens already seen, in tensors made once: the caller owns them, modules fill them."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from glasshouse import spec
from glasshouse.errors import InputError
from glasshouse.layers.layout import Layout


class Cache:
    """Room for `max_len` tokens in each row of a batch, and for `source_len` of an encoder's; rows may differ.

    Slot t + 1 of a row holds the token at position t, and slot 0 takes what padding writes. A layer that sees a
    window needs no more than the window: where no call brings more than `chunk` tokens, its slots are used in turn,
    as many as the window and a chunk. The shapes never change, so a compiled model runs on; there and on a GPU, a
    token too many is torch's own index error. Gradients do not pass through. Device and type are those of `like`.
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

        def rooms(layers: int, length: int) -> Tensor:  # of keys, then of values
            # What a layer holds lies together: were it strewn, torch's compiler, which cannot tell such tensors
            # apart, would copy all of it at each write.
            shape = (2, layers, batch, s.n_kv_heads, length, s.d_head)
            return torch.zeros(shape, device=device, dtype=like.dtype)

        self.max_len = max_len
        self.chunk = max_len if chunk is None else chunk
        self.ring_sizes = {w: min(max_len, w + self.chunk) if w else max_len for w in windows}  # slots, by window
        self.lengths = torch.zeros(batch, dtype=torch.long, device=device)  # tokens held of each row
        self._homes = [(window, windows[:index].count(window)) for index, window in enumerate(windows)]
        self._pools = {window: rooms(windows.count(window), turn + 1) for window, turn in self.ring_sizes.items()}
        self.source_len = source_len
        self.has_source = False  # whether a source was given yet
        self.source_mask = torch.zeros(batch, source_len, dtype=torch.bool, device=device)
        self._source_pool = rooms(s.n_layers, source_len)
        self.packed_prefill = False  # whether the tokens of a call see none but each other
        self.token_positions: Tensor | None = None  # [1, S], the position of each token of a call that mixes rows
        self._rows = torch.arange(batch, device=device)[:, None]  # [B, 1] or, packed, [1, S]
        self._open()
        if device.type == "cuda":
            self._stay_in_place()

    def _open(self) -> None:
        """Make the view of each layer's room, [B, H_kv, slots, d]."""
        self.keys, self.values = ([self._pools[window][part, i] for window, i in self._homes] for part in (0, 1))
        self.source_keys, self.source_values = ([*half.unbind()] for half in self._source_pool.unbind())

    def _stay_in_place(self) -> None:
        """Promise that these tensors never move, so that a step that writes to them can be captured as a graph."""
        rooms = (*self.keys, *self.values, *self.source_keys, *self.source_values)
        for tensor in (*rooms, self.lengths, self.source_mask):
            torch._dynamo.mark_static_address(tensor)

    def narrow(self, rows: slice, max_len: int | None = None, source_len: int | None = None) -> Cache:
        """Return the same memory as a cache of these rows and of the first positions alone."""
        part = copy.copy(self)
        part.max_len = self.max_len if max_len is None else min(max_len, self.max_len)
        part.ring_sizes = {window: min(turn, part.max_len) for window, turn in self.ring_sizes.items()}
        part.source_len = self.source_len if source_len is None else source_len
        part.lengths = self.lengths[rows]
        part.source_mask = self.source_mask[rows, : part.source_len]
        part._pools = {window: pool[:, :, rows, :, : part.max_len + 1] for window, pool in self._pools.items()}
        part._source_pool = self._source_pool[:, :, rows, :, : part.source_len]
        part._rows = self._rows[: len(part.lengths)]
        part._open()
        return part

    def for_packed_prefill(self, rows: Tensor) -> Cache:
        """Return the same memory for a call of one row in which new texts stand one after the other.

        `rows` [S] names the row of the cache that each token goes to; they see none but those of their own text.
        """
        part = copy.copy(self)
        part.packed_prefill = True
        part._rows = rows[None]
        return part

    def for_mixed_batch(self, rows: Tensor, positions: Tensor) -> Cache:
        """Return the same memory for a call of one row in which tokens of several rows stand, in any order.

        `rows` [S] names the row of the cache that each token goes to and looks at, `positions` [S] its place there.
        It asks for a model whose `Stack.mixes`.
        """
        part = copy.copy(self)
        part.token_positions = positions[None]
        part._rows = rows[None]
        return part

    @property
    def rows(self) -> Tensor:
        """The row of this memory that each row of a call is, [B]; or, where a call mixes them, each token, [1, S]."""
        return self._rows[:, 0] if self.token_positions is None else self._rows

    def start_positions(self) -> Tensor | None:
        """Return the position at which each row goes on, [B]; or where each token stands, [1, S]."""
        if self.packed_prefill:
            return None
        return self.lengths if self.token_positions is None else self.token_positions

    def slot_mapping(self, layout: Layout) -> dict[int, Tensor | int]:
        """Return the slot of each token of a call, [B, S] or one for all, by a layer's window.

        A call that does not fit is refused.
        """
        length = layout.positions.shape[1]
        if layout.documents is not None and not self.packed_prefill:
            raise InputError("documents and cache were both given; a cached row is one document, so leave one out.")
        positions = layout.positions.expand(len(self._rows), length)
        slots = positions + 1 if layout.real is None else torch.where(layout.real, positions + 1, 0)
        same = False
        if slots.is_cpu and not torch.compiler.is_compiling():
            least, fullest = (int(slot) for slot in slots.aminmax())
            if fullest > self.max_len:
                raise InputError(
                    f"the cache has room for max_len = {self.max_len} tokens a row, but {fullest} would be in it; "
                    "make a longer one."
                )
            same = least == fullest and length == 1 and not self.packed_prefill and self.token_positions is None
        if not self.packed_prefill and self.token_positions is None and length > self.chunk:
            raise InputError(
                f"this call has {length} tokens a row, but the cache was made for chunk = {self.chunk}; give fewer."
            )
        places = {window: self._wrap(slots, turn) for window, turn in self.ring_sizes.items()}
        return {window: int(place[0, 0]) for window, place in places.items()} if same else dict(places)

    def _wrap(self, slot_mapping: Tensor, turn: int) -> Tensor:
        """Return slots that begin again after `turn`, 0 for tokens whose slot another token of the call takes."""
        if turn == self.max_len:
            return slot_mapping
        kept = slot_mapping > 0
        if self.packed_prefill:  # else a call is shorter than a turn
            kept = kept & (slot_mapping > self._last(slot_mapping)[self._rows] - turn)
        return torch.where(kept, (slot_mapping - 1) % turn + 1, 0)

    def _last(self, slot_mapping: Tensor) -> Tensor:
        """Return the last of the new slots of each row of the cache."""
        rows = self._rows.expand_as(slot_mapping)
        return torch.zeros_like(self.lengths).scatter_reduce_(0, rows.flatten(), slot_mapping.flatten(), "amax")

    def update(self, layer: int, slot_mapping: Tensor | int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values [B, H_kv, S, d] to their slots; return those that the call may look at."""
        for room, new in ((self.keys[layer], k), (self.values[layer], v)):
            if isinstance(slot_mapping, int):  # a copy, far cheaper than an index
                room[:, :, slot_mapping] = new.detach()[:, :, 0]
            else:
                room[self._rows, :, slot_mapping] = new.detach().transpose(1, 2).to(room.dtype)
        if self.packed_prefill:
            return k, v
        return self.keys[layer][:, :, 1:], self.values[layer][:, :, 1:]

    def advance(self, layout: Layout) -> None:
        """Count the real tokens of a call as held, once every layer has written them."""
        if self.packed_prefill or self.token_positions is not None:
            slots = layout.positions + 1 if layout.real is None else torch.where(layout.real, layout.positions + 1, 0)
            self.lengths.copy_(torch.maximum(self.lengths, self._last(slots.expand(len(self._rows), -1))))
        else:
            self.lengths += layout.positions.shape[1] if layout.real is None else layout.real.sum(1)

    def key_layout(self, layout: Layout, window: int) -> Layout:
        """Return where the tokens in the slots of a layer with this window stand, those of the call included."""
        if self.packed_prefill:
            return layout
        turn = self.ring_sizes[window]
        slots = torch.arange(turn, device=self.lengths.device)[None]
        if turn == self.max_len:
            return Layout(slots, ordered=True)
        length = layout.positions.shape[1] if layout.real is None else layout.real.sum(1)
        last = (self.lengths + length)[:, None] - 1
        positions = last - (last - slots) % turn  # the latest that such a slot can hold
        return Layout(positions.clamp(min=0), positions >= 0)

    def copy_row(self, source: int, target: int, start: int, stop: int) -> None:
        """Make row `target`, which has the same tokens up to `start`, hold those of row `source` up to `stop`."""
        for window, pool in self._pools.items():
            # Where slots are used in turn, any of them may be among those asked for; and a GPU copies whole rows by
            # one kernel for all layers, but parts of them by one for each.
            whole = pool.is_cuda or self.ring_sizes[window] != self.max_len
            _copy(pool, source, target, slice(None) if whole else slice(start + 1, stop + 1))
        self.lengths[target] = stop
        if self.source_len:
            self.source_mask[target] = self.source_mask[source]
            _copy(self._source_pool, source, target, slice(None))

    def clear_row(self, row: int, start: int = 0) -> None:
        """Overwrite what a row has room for from position `start` on with zeros."""
        for window, pool in self._pools.items():
            if start == 0:
                pool[:, :, row] = 0
            elif self.ring_sizes[window] == self.max_len:  # else any slot may hold a token that counts
                pool[:, :, row, :, start + 1 :] = 0
        if start == 0:
            self._source_pool[:, :, row] = 0
        self.lengths[row] = start

    def store_source(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Keep the keys and values of an encoder's output for the calls to come."""
        self.source_keys[layer][:, :, : k.shape[2]] = k.detach()
        self.source_values[layer][:, :, : v.shape[2]] = v.detach()

    def source_kv(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return what `remember` kept."""
        return self.source_keys[layer], self.source_values[layer]

    def store_source_layout(self, layout: Layout) -> None:
        """Keep which tokens of the source are real."""
        length = layout.positions.shape[1]
        if length > self.source_len:
            raise InputError(
                f"the source is {length} tokens long, but the cache has room for source_len = {self.source_len}; "
                "make a longer one."
            )
        self.has_source = True
        self.source_mask.zero_()
        self.source_mask[:, :length] = True if layout.real is None else layout.real

    def source_layout(self) -> Layout:
        """Return where the tokens of the source stand."""
        return Layout(torch.arange(self.source_len, device=self.lengths.device)[None], self.source_mask)

    @property
    def n_bytes(self) -> int:
        """How much memory the keys and values take."""
        return sum(pool.numel() * pool.element_size() for pool in (*self._pools.values(), self._source_pool))

    def __repr__(self) -> str:
        return f"Cache({len(self.lengths)} rows of {self.max_len} tokens, {self.n_bytes:,} bytes)"


def _copy(pool: Tensor, source: int, target: int, span: slice) -> None:
    """Copy a row of all layers."""
    if pool.is_cuda:  # where one index over a large pool is many kernels: its places do not fit in 32 bits
        layers = pool.flatten(0, 1)
        torch._foreach_copy_(layers[:, target, :, span].unbind(), layers[:, source, :, span].unbind())
    else:
        pool[:, :, target, :, span] = pool[:, :, source, :, span]
