"""How a sublayer joins the residual stream: with its norm before, after, or on both sides."""

from __future__ import annotations

from typing import assert_never

from torch import Tensor, nn

from glasshouse import spec
from glasshouse.layers.context import Context
from glasshouse.layers.norm import make_norm


class PreNorm(nn.Module):
    """Norm before the layer: the stream itself is never normalised."""

    def __init__(self, s: spec.TransformerSpec, layer: nn.Module) -> None:
        super().__init__()
        self.norm = make_norm(s.norm, s.d_model)
        self.layer = layer
        self.drop = nn.Dropout(s.dropout)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """Add the layer's output to the stream x [B, S, D]."""
        return x + self.drop(self.layer(self.norm(x), ctx))


class PostNorm(nn.Module):
    """Norm after the sum, as in the original."""

    def __init__(self, s: spec.TransformerSpec, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.drop = nn.Dropout(s.dropout)
        self.norm = make_norm(s.norm, s.d_model)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """Add the layer's output to the stream x [B, S, D], then normalise."""
        return self.norm(x + self.drop(self.layer(x, ctx)))


class SandwichNorm(nn.Module):
    """Norm before the layer and on what it adds."""

    def __init__(self, s: spec.TransformerSpec, layer: nn.Module) -> None:
        super().__init__()
        self.norm = make_norm(s.norm, s.d_model)
        self.layer = layer
        self.norm_out = make_norm(s.norm, s.d_model)
        self.drop = nn.Dropout(s.dropout)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """Add the layer's normalised output to the stream x [B, S, D]."""
        return x + self.drop(self.norm_out(self.layer(self.norm(x), ctx)))


def make_residual(s: spec.TransformerSpec, layer: nn.Module) -> PreNorm | PostNorm | SandwichNorm:
    """Wrap a sublayer as the spec's order of norms says."""
    match s.norm_placement:
        case "pre":
            return PreNorm(s, layer)
        case "post":
            return PostNorm(s, layer)
        case "sandwich":
            return SandwichNorm(s, layer)
        case _:
            assert_never(s.norm_placement)
