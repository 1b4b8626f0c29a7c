"""A KV cache that is an input and an output of each call: for graphs, which write to no tensor of their caller."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from glasshouse.layers.attend.layout import Layout
from glasshouse.layers.cache.view import CacheView


class ConcatenatedCache(CacheView):
    """The keys and values [B, H_kv, P, d] of each layer, all rows of the same length; `update` appends to copies.

    Layers with a sliding window keep all keys too: their mask hides those outside of it.
    """

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        self.keys, self.values = [*keys], [*values]
        self.rows, self.source = None, None
        self.cache_rows = torch.arange(keys[0].shape[0], device=keys[0].device)[:, None]
        self.length = keys[0].shape[2]

    def start_positions(self) -> Tensor | None:
        """Return the number of cached tokens, [B]."""
        first = self.keys[0]
        return torch.full((first.shape[0],), self.length, dtype=torch.long, device=first.device)

    def write_offsets(self, layout: Layout) -> dict[int, Tensor | int]:
        """Return an offset for every window, which `update` does not use."""
        return _AnyWindow()

    def key_layout(self, layout: Layout, window: int) -> Layout:
        """Return the layout of all keys."""
        n_keys = self.length + layout.positions.shape[1]
        return Layout(torch.arange(n_keys, device=layout.positions.device)[None], ordered=True)

    def update(self, layer: int, write_offsets: Tensor | int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values [B, H_kv, S, d]; return all of the layer."""
        self.keys[layer] = torch.cat([self.keys[layer], k], 2)
        self.values[layer] = torch.cat([self.values[layer], v], 2)
        return self.keys[layer], self.values[layer]

    def advance(self, layout: Layout) -> None:
        """Count the tokens of a call."""
        self.length += layout.positions.shape[1]


class _AnyWindow(dict[int, Tensor | int]):
    def __missing__(self, window: int) -> int:
        return 0
