"""How a sublayer joins the residual stream, and the blocks made of sublayers so joined."""

from __future__ import annotations

from torch import Tensor, nn

from glasshouse import spec
from glasshouse.layers.attention import Attention, CrossAttention
from glasshouse.layers.context import Context
from glasshouse.layers.feedforward import make_feedforward
from glasshouse.layers.norm import make_norm


class PreNorm(nn.Module):
    """Norm before the layer: the stream itself is never normalised."""

    def __init__(self, s: spec.Transformer, layer: nn.Module) -> None:
        super().__init__()
        self.norm = make_norm(s.norm, s.d_model)
        self.layer = layer
        self.drop = nn.Dropout(s.dropout)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """Add the layer's output to the stream x [B, S, D]."""
        return x + self.drop(self.layer(self.norm(x), ctx))


class PostNorm(nn.Module):
    """Norm after the sum, as in the original."""

    def __init__(self, s: spec.Transformer, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.drop = nn.Dropout(s.dropout)
        self.norm = make_norm(s.norm, s.d_model)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """Add the layer's output to the stream x [B, S, D], then normalise."""
        return self.norm(x + self.drop(self.layer(x, ctx)))


class SandwichNorm(nn.Module):
    """Norm before the layer and on what it adds."""

    def __init__(self, s: spec.Transformer, layer: nn.Module) -> None:
        super().__init__()
        self.norm = make_norm(s.norm, s.d_model)
        self.layer = layer
        self.norm_out = make_norm(s.norm, s.d_model)
        self.drop = nn.Dropout(s.dropout)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """Add the layer's normalised output to the stream x [B, S, D]."""
        return x + self.drop(self.norm_out(self.layer(self.norm(x), ctx)))


RESIDUALS = {"before": PreNorm, "after": PostNorm, "sandwich": SandwichNorm}


class Block(nn.Module):
    """Attention, then feed-forward."""

    def __init__(self, s: spec.Transformer, layer: int) -> None:
        super().__init__()
        residual = RESIDUALS[s.norm_order]
        self.attention = residual(s, Attention(s, layer))
        self.feedforward = residual(s, make_feedforward(s))

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """Pass the stream x [B, S, D] on."""
        return self.feedforward(self.attention(x, ctx), ctx)


class CrossBlock(nn.Module):
    """Attention, then a look at the encoder's output, then feed-forward."""

    def __init__(self, s: spec.Transformer, layer: int) -> None:
        super().__init__()
        residual = RESIDUALS[s.norm_order]
        self.attention = residual(s, Attention(s, layer))
        self.cross = residual(s, CrossAttention(s, layer))
        self.feedforward = residual(s, make_feedforward(s))

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """Pass the stream x [B, T, D] on."""
        return self.feedforward(self.cross(self.attention(x, ctx), ctx), ctx)
