"""Keys and values of the tokens already seen, in tensors made once: the caller owns them, modules fill them."""

from __future__ import annotations

import torch
from torch import Tensor

from glasshouse import spec
from glasshouse.errors import InputError
from glasshouse.layers.layout import Layout


class Cache:
    """Room for `max_len` tokens in each row of a batch, and for `source_len` of an encoder's; rows may differ.

    Slot t + 1 of a row holds the token at position t, and slot 0 takes what padding writes. The shapes never change,
    so a compiled model runs on; there and on a GPU, a token too many is torch's own index error. Gradients do not
    pass through. Device and type are those of `like`.
    """

    def __init__(self, s: spec.Transformer, batch: int, max_len: int, source_len: int = 0, *, like: Tensor) -> None:
        device = like.device

        def rooms(length: int) -> list[Tensor]:
            shape = (batch, s.n_kv_heads, length, s.d_head)
            return [torch.zeros(shape, device=device, dtype=like.dtype) for _ in range(s.n_layers)]

        self.max_len = max_len
        self.lengths = torch.zeros(batch, dtype=torch.long, device=device)  # tokens held of each row
        self.keys, self.values = rooms(max_len + 1), rooms(max_len + 1)
        self.source_len = source_len
        self.heard = False  # whether a source was given yet
        self.source_real = torch.zeros(batch, source_len, dtype=torch.bool, device=device)
        self.source_keys, self.source_values = rooms(source_len), rooms(source_len)
        self._rows = torch.arange(batch, device=device)[:, None]
        if device.type == "cuda":
            self._stay_in_place()

    def _stay_in_place(self) -> None:
        """Promise that these tensors never move, so that a step that writes to them can be captured as a graph."""
        for tensor in (*self._rooms(), self.lengths, self.source_real):
            torch._dynamo.mark_static_address(tensor)

    def admit(self, layout: Layout) -> Tensor:
        """Return the slot of each token of a call, [B, S]; refuse a call that does not fit."""
        batch, length = len(self.lengths), layout.positions.shape[1]
        if layout.documents is not None:
            raise InputError("documents and cache were both given; a cached row is one document, so leave one out.")
        positions = layout.positions.expand(batch, length)
        slots = positions + 1 if layout.real is None else torch.where(layout.real, positions + 1, 0)
        if slots.is_cpu and not torch.compiler.is_compiling() and (fullest := int(slots.max())) > self.max_len:
            raise InputError(
                f"the cache has room for max_len = {self.max_len} tokens a row, but {fullest} would be in it; "
                "make a longer one."
            )
        return slots

    def extend(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values [B, H_kv, S, d] to their slots; return those of every position there is room for."""
        for room, fresh in ((self.keys[layer], k), (self.values[layer], v)):
            room[self._rows, :, slots] = fresh.detach().transpose(1, 2).to(room.dtype)
        return self.keys[layer][:, :, 1:], self.values[layer][:, :, 1:]

    def advance(self, layout: Layout) -> None:
        """Count the real tokens of a call as held, once every layer has written them."""
        self.lengths += layout.positions.shape[1] if layout.real is None else layout.real.sum(1)

    def held(self) -> Layout:
        """Return where the tokens in the slots stand."""
        return Layout(torch.arange(self.max_len, device=self.lengths.device)[None])

    def remember(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Keep the keys and values of an encoder's output for the calls to come."""
        self.source_keys[layer][:, :, : k.shape[2]] = k.detach()
        self.source_values[layer][:, :, : v.shape[2]] = v.detach()

    def recall(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return what `remember` kept."""
        return self.source_keys[layer], self.source_values[layer]

    def remember_layout(self, layout: Layout) -> None:
        """Keep which tokens of the source are real."""
        length = layout.positions.shape[1]
        if length > self.source_len:
            raise InputError(
                f"the source is {length} tokens long, but the cache has room for source_len = {self.source_len}; "
                "make a longer one."
            )
        self.heard = True
        self.source_real.zero_()
        self.source_real[:, :length] = True if layout.real is None else layout.real

    def recall_layout(self) -> Layout:
        """Return where the tokens of the source stand."""
        return Layout(torch.arange(self.source_len, device=self.lengths.device)[None], self.source_real)

    def _rooms(self) -> list[Tensor]:
        return [*self.keys, *self.values, *self.source_keys, *self.source_values]

    def __repr__(self) -> str:
        size = sum(room.numel() * room.element_size() for room in self._rooms())
        return f"Cache({len(self.lengths)} rows of {self.max_len} tokens, {size:,} bytes)"
