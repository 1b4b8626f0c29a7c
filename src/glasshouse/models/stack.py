"""A stack of transformer blocks, from token embeddings to the hidden states that the head gets."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from glasshouse import spec
from glasshouse.layers import decode_attention
from glasshouse.layers.attend import Explicit
from glasshouse.layers.block import Block, CrossBlock
from glasshouse.layers.cache import Cache
from glasshouse.layers.context import Context
from glasshouse.layers.layout import Layout
from glasshouse.layers.mask import Mask, make_mask
from glasshouse.layers.norm import make_norm
from glasshouse.layers.position import make_position


class Stack(nn.Module):
    """Position embedding, blocks, final norm."""

    def __init__(self, s: spec.TransformerSpec, n_layers: int, *, causal: bool, cross: bool = False) -> None:
        super().__init__()
        self.causal = causal
        self.softcap = s.attention_softcap
        self.flex_capable = s.attention_softcap is None and s.d_head >= 16
        self.queries_per_kv_head = s.n_heads // s.n_kv_heads
        self.attention_dropout = s.attention_dropout
        self.windows = sorted({s.window(index) for index in range(n_layers)})
        self.position = make_position(s.position, s.d_model, s.d_head, s.n_heads, s.max_len, causal)
        self.embed_norm = make_norm(s.norm, s.d_model) if s.embed_norm else nn.Identity()
        self.drop = nn.Dropout(s.embed_dropout)
        block = CrossBlock if cross else Block
        self.blocks = nn.ModuleList(block(s, index) for index in range(n_layers))
        self.norm = make_norm(s.norm, s.d_model) if s.final_norm else nn.Identity()

    def forward(
        self,
        x: Tensor,
        layout: Layout,
        cache: Cache | None = None,
        memory: Tensor | None = None,
        memory_mask: Mask | None = None,
    ) -> Tensor:
        """Map token embeddings x [B, S, D] to hidden states [B, S, D]."""
        slots = {} if cache is None else cache.slot_mapping(layout)
        rotate = self.position.rotation(layout.positions, x.dtype)
        ctx = Context(rotate, self.masks(layout, cache, x.dtype), cache, slots, memory, memory_mask)

        x = self.drop(self.embed_norm(self.position.embed(x, layout.positions)))
        for block in self.blocks:
            x = block(x, ctx)
        if cache is not None:
            cache.advance(layout)
        return self.norm(x)

    def masks(self, layout: Layout, cache: Cache | None, dtype: torch.dtype) -> dict[int, Mask]:
        """Return the attention mask of each sliding-window size in this stack."""
        masks = {}
        for window in self.windows:
            keys = layout if cache is None else cache.key_layout(layout, window)
            bias = self.position.bias(layout.positions, keys.positions)
            masks[window] = make_mask(
                layout,
                keys,
                causal=self.causal,
                dtype=dtype,
                window=window,
                bias=None if bias is None else bias.to(dtype),
                flex=keys is layout and self.supports_flex(dtype),
                cache_rows=None if cache is None else self.decode_kernel_rows(cache, layout.positions, dtype),
            )
        return masks

    def decode_kernel_rows(self, cache: Cache, positions: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return the rows of the cache if the decode kernel can be used, else None.

        It takes a few queries per sequence and supports no soft-cap.
        """
        queries = self.queries_per_kv_head * (1 if cache.token_positions is not None else positions.shape[1])
        return (
            cache.rows
            if self.softcap is None and decode_attention.is_supported(positions.device, dtype, queries)
            else None
        )

    def supports_mixed_prefill(self, like: Tensor) -> bool:
        """Whether tokens of several sequences may be batched in one row: with no window and no position bias."""
        position = torch.zeros(1, 1, dtype=torch.long, device=like.device)
        plain = self.windows == [0] and self.position.bias(position, position) is None
        fused = not any(isinstance(layer, Explicit) for layer in self.modules())
        return plain and fused and decode_attention.is_supported(like.device, like.dtype, self.queries_per_kv_head)

    def supports_flex(self, dtype: torch.dtype) -> bool:
        """Whether FlexAttention can be used: it supports no narrow heads, no float64 and no dropout."""
        return self.flex_capable and dtype != torch.float64 and not (self.training and self.attention_dropout > 0)
