"""Value embeddings: what a token is, added to the values that attention moves."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from glasshouse import spec
from glasshouse.layers.context import Context
from glasshouse.layers.embedding import Embedding
from glasshouse.layers.flops import FlopCount
from glasshouse.layers.linear.linear import Linear


class ValueTable(Embedding):
    """The table of a value embedding, which `FanIn` initializes otherwise than the token embedding."""


class ValueEmbedding(nn.Module):
    """An embedding of the token for each KV head, times a gate from 0 to 2 that reads the layer's input.

    The gate starts at 1 for every token.
    """

    def __init__(self, s: spec.TransformerSpec) -> None:
        super().__init__()
        self.table = ValueTable(s.vocab_size, s.n_kv_heads * s.d_head)
        self.gate = Linear(s.d_model, s.n_kv_heads, bias=False)

    def forward(self, v: Tensor, x: Tensor, ctx: Context) -> Tensor:
        """Add to the values v [B, H_kv, S, d] of the layer's input x [B, S, D]."""
        gate = 2 * torch.sigmoid(self.gate(x)).transpose(1, 2)  # [B, H_kv, S]
        vectors = self.table(ctx.ids).unflatten(-1, (-1, v.shape[-1])).transpose(1, 2)
        return v + (gate[..., None] * vectors).to(v.dtype)

    def add_flops(self, count: FlopCount, trained: bool) -> bool:
        """Add the FLOPs of the gate; return whether the output needs a gradient."""
        return count.add(self.gate, trained) or self.table.weight.requires_grad


class NoValueEmbedding(nn.Module):
    """Takes the place of `ValueEmbedding` in layers without one."""

    def forward(self, v: Tensor, x: Tensor, ctx: Context) -> Tensor:
        """Return v."""
        return v

    def add_flops(self, count: FlopCount, trained: bool) -> bool:
        """Add nothing."""
        return trained
