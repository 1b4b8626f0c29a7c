"""A stack of transformer blocks, from token embeddings to the hidden states that the head gets."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from glasshouse import spec
from glasshouse.layers.attend.backends import BACKENDS, Decode, choose_backend
from glasshouse.layers.attend.kernel import Attend, Backend, Situation
from glasshouse.layers.attend.layout import Layout
from glasshouse.layers.attend.mask import Mask, make_mask
from glasshouse.layers.block import make_block
from glasshouse.layers.cache import CacheView, KVShape
from glasshouse.layers.context import Context
from glasshouse.layers.norm import make_norm
from glasshouse.layers.position import Position, make_local_position, make_position
from glasshouse.layers.sublayer import Sublayer


class Stack(nn.Module):
    """Position embedding, blocks, final norm."""

    prompt_lengths: Tensor | None = None  # by row of an engine's cache, for edits of prompts or new tokens alone

    def __init__(self, s: spec.TransformerSpec, n_layers: int, *, causal: bool, cross: bool = False) -> None:
        super().__init__()
        self.causal = causal
        self.backends = BACKENDS  # the attention backends to choose from, most preferred first
        self.d_head = s.d_head
        self.group_size = s.n_heads // s.n_kv_heads
        self.softcap = s.attention_softcap
        self.attention_dropout = s.attention_dropout
        self.windows = sorted({s.window(index) for index in range(n_layers)})
        self.position = make_position(s, causal)
        self.local_position = make_local_position(s)
        self.embed_norm = make_norm(s.norm, s.d_model) if s.embed_norm else nn.Identity()
        self.drop = nn.Dropout(s.embed_dropout)
        self.blocks = nn.ModuleList(make_block(s, index, cross=cross) for index in range(n_layers))
        self.norm = make_norm(s.norm, s.d_model) if s.final_norm else nn.Identity()

    def forward(
        self,
        x: Tensor,
        layout: Layout,
        cache: CacheView | None = None,
        memory: Tensor | None = None,
        source: Layout | None = None,
    ) -> Tensor:
        """Map token embeddings x [B, S, D] to hidden states [B, S, D].

        Cross-attention attends to `memory`, or to the keys and values in the cache; `source` is their layout.
        """
        ctx = self.context(layout, x.dtype, cache, memory, source)
        x = self.drop(self.embed_norm(self.position.embed(x, layout.positions)))
        for block in self.blocks:
            x = block(x, ctx)
        if cache is not None:
            cache.advance(layout)
        return self.norm(x)

    def context(
        self,
        layout: Layout,
        dtype: torch.dtype,
        cache: CacheView | None = None,
        memory: Tensor | None = None,
        source: Layout | None = None,
    ) -> Context:
        """Return what the layers need of a forward pass, as in `forward`."""
        cross = None
        if source is not None:
            mask = make_mask(layout, source, causal=False)
            cross = self.backend(mask, layout, source, dtype, cached=cache is not None)
        offsets = {} if cache is None else cache.write_offsets(layout)
        rotate = self.position.rotation(layout.positions, dtype)
        local = rotate if self.local_position is None else self.local_position.rotation(layout.positions, dtype)
        rotations = {window: local if window else rotate for window in self.windows}
        backends = {}
        for window in self.windows:
            keys = layout if cache is None else cache.key_layout(layout, window)
            mask = self.mask(layout, keys, dtype, window, None if cache is None else cache.rows)
            backends[window] = self.backend(mask, layout, keys, dtype, cached=keys is not layout)
        return Context(rotations, backends, layout.positions, layout.ids, cache, offsets, memory, cross)

    def position_of(self, layer: int) -> Position:
        """Return the position encoding of a layer."""
        if self.local_position is not None and self.kv_shapes()[layer].window:
            return self.local_position
        return self.position

    def mask(
        self, queries: Layout, keys: Layout, dtype: torch.dtype, window: int, rows: Tensor | None = None
    ) -> Mask:
        """Return the attention mask of layers with this window, for scores of a `dtype`; `rows` as in `Mask`."""
        bias = self.position.bias(queries.positions, keys.positions)
        bias = None if bias is None else bias.to(dtype)
        return make_mask(queries, keys, causal=self.causal, window=window, bias=bias, rows=rows)

    def backend(self, mask: Mask, queries: Layout, keys: Layout, dtype: torch.dtype, *, cached: bool) -> Backend:
        """Return the attention backend of a call, with its mask."""
        s = self.situation(mask, queries, keys, dtype, cached=cached)
        return choose_backend(s, self.backends).prepare(s)

    def situation(self, mask: Mask, queries: Layout, keys: Layout, dtype: torch.dtype, *, cached: bool) -> Situation:
        """Return what the choice of a backend depends on."""
        return Situation(
            mask,
            n_queries=queries.positions.shape[1],
            n_keys=keys.positions.shape[1],
            device=queries.positions.device,
            dtype=dtype,
            d_head=self.d_head,
            group_size=self.group_size,
            softcap=self.softcap is not None,
            dropout=self.training and self.attention_dropout > 0,
            cached=cached,
        )

    def kv_shapes(self, part: Literal["attention", "cross"] = "attention") -> list[KVShape]:
        """Return the KV cache shape of the attention, or the cross-attention, of each layer."""
        return [layer.kv_shape for layer in self.attention_layers(part)]

    def attention_layers(self, part: Literal["attention", "cross"]) -> list[Any]:
        """Return the attention, or the cross-attention, of each block, found also where a module wraps it."""
        inside = (block.get_submodule(part).modules() for block in self.blocks)
        return [next(module for module in modules if isinstance(module, Sublayer)) for modules in inside]

    def supports_mixed_prefill(self, like: Tensor) -> bool:
        """Whether tokens of several sequences may be batched in one row: if the decode backend attends everywhere."""
        tokens = torch.zeros(1, 2, dtype=torch.long, device=like.device)
        queries, keys = Layout(tokens), Layout(tokens, ordered=True)
        for window in self.windows:
            mask = self.mask(queries, keys, like.dtype, window, rows=tokens)
            s = self.situation(mask, queries, keys, like.dtype, cached=True)
            if next((backend for backend in self.backends if backend.supports(s)), None) is not Decode:
                return False
        return all(type(layer) is Attend for layer in self.modules() if isinstance(layer, Attend))  # no edit
