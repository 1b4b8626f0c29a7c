"""Transformer blocks."""

from __future__ import annotations

from torch import Tensor, nn

from glasshouse import spec
from glasshouse.layers.attention import CrossAttention, make_attention
from glasshouse.layers.context import Context
from glasshouse.layers.feedforward import make_feedforward
from glasshouse.layers.residual import make_residual


class Block(nn.Module):
    """Self-attention, then feed-forward."""

    def __init__(self, s: spec.TransformerSpec, index: int) -> None:
        super().__init__()
        self.attention = make_residual(s, make_attention(s, index))
        self.feedforward = make_residual(s, make_feedforward(s))

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """Apply the block to the residual stream x [B, S, D]."""
        return self.feedforward(self.attention(x, ctx), ctx)


class CrossBlock(nn.Module):
    """Self-attention, then cross-attention, then feed-forward."""

    def __init__(self, s: spec.TransformerSpec, index: int) -> None:
        super().__init__()
        self.attention = make_residual(s, make_attention(s, index))
        self.cross = make_residual(s, CrossAttention(s, index))
        self.feedforward = make_residual(s, make_feedforward(s))

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """Apply the block to the residual stream x [B, T, D]."""
        return self.feedforward(self.cross(self.attention(x, ctx), ctx), ctx)
