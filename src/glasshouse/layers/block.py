"""Transformer blocks."""

from __future__ import annotations

from torch import Tensor, nn

from glasshouse import spec
from glasshouse.layers.attention import CrossAttention, make_attention
from glasshouse.layers.context import Context
from glasshouse.layers.feedforward import make_feedforward
from glasshouse.layers.residual import ParallelNorm, make_residual


class Block(nn.Module):
    """Self-attention, then feed-forward."""

    def __init__(self, s: spec.TransformerSpec, index: int) -> None:
        super().__init__()
        self.attention = make_residual(s, make_attention(s, index), first=index == 0)
        self.feedforward = make_residual(s, make_feedforward(s))

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """Apply the block to the residual stream x [B, S, D]."""
        return self.feedforward(self.attention(x, ctx), ctx)


class ParallelBlock(Block):
    """Self-attention and feed-forward side by side: both read the block's input."""

    def __init__(self, s: spec.TransformerSpec, index: int) -> None:
        super().__init__(s, index)
        self.feedforward = ParallelNorm(s, self.feedforward.layer)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """Apply the block to the residual stream x [B, S, D]."""
        return self.feedforward(self.attention(x, ctx), ctx, x)


class CrossBlock(nn.Module):
    """Self-attention, then cross-attention, then feed-forward."""

    def __init__(self, s: spec.TransformerSpec, index: int) -> None:
        super().__init__()
        self.attention = make_residual(s, make_attention(s, index), first=index == 0)
        self.cross = make_residual(s, CrossAttention(s, index))
        self.feedforward = make_residual(s, make_feedforward(s))

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """Apply the block to the residual stream x [B, T, D]."""
        return self.feedforward(self.cross(self.attention(x, ctx), ctx), ctx)


def make_block(s: spec.TransformerSpec, index: int, *, cross: bool) -> Block | CrossBlock:
    """Build a block, in a decoder that reads an encoder with cross-attention."""
    if cross:
        return CrossBlock(s, index)
    return ParallelBlock(s, index) if s.norm_placement == "parallel" else Block(s, index)
