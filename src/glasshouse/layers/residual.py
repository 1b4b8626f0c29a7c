"""Residual connections: by where their norms are, and which stream the sublayer reads."""

from __future__ import annotations

from typing import assert_never

from torch import Tensor, nn

from glasshouse import spec
from glasshouse.layers.context import Context
from glasshouse.layers.norm import make_norm


class PreNorm(nn.Module):
    """Pre-norm: the residual stream itself is not normalised."""

    def __init__(self, s: spec.TransformerSpec, layer: nn.Module) -> None:
        super().__init__()
        self.norm = make_norm(s.norm, s.d_model)
        self.layer = layer
        self.drop = nn.Dropout(s.dropout)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """Add the layer's output to the residual stream x [B, S, D]."""
        return x + self.drop(self.layer(self.norm(x), ctx))


class NoNorm(PreNorm):
    """Pre-norm without the norm: the layer reads the residual stream itself."""

    def __init__(self, s: spec.TransformerSpec, layer: nn.Module) -> None:
        super().__init__(s, layer)
        self.norm = nn.Identity()


class PostNorm(nn.Module):
    """Post-norm, as in the original transformer: norm after the sum."""

    def __init__(self, s: spec.TransformerSpec, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.drop = nn.Dropout(s.dropout)
        self.norm = make_norm(s.norm, s.d_model)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """Add the layer's output to the residual stream x [B, S, D], then normalise."""
        return self.norm(x + self.drop(self.layer(x, ctx)))


class SandwichNorm(nn.Module):
    """Sandwich norm: norm before the layer and on its output."""

    def __init__(self, s: spec.TransformerSpec, layer: nn.Module) -> None:
        super().__init__()
        self.norm = make_norm(s.norm, s.d_model)
        self.layer = layer
        self.norm_out = make_norm(s.norm, s.d_model)
        self.drop = nn.Dropout(s.dropout)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """Add the layer's normalised output to the residual stream x [B, S, D]."""
        return x + self.drop(self.norm_out(self.layer(self.norm(x), ctx)))


class OutputNorm(nn.Module):
    """Norm on the layer's output alone, as in OLMo 2: the layer reads the residual stream itself."""

    def __init__(self, s: spec.TransformerSpec, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.norm_out = make_norm(s.norm, s.d_model)
        self.drop = nn.Dropout(s.dropout)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """Add the layer's normalised output to the residual stream x [B, S, D]."""
        return x + self.drop(self.norm_out(self.layer(x, ctx)))


class ParallelNorm(PreNorm):
    """Pre-norm of a layer beside another, as in GPT-NeoX: it does not read what the other added."""

    def forward(self, x: Tensor, ctx: Context, before: Tensor) -> Tensor:  # type: ignore[override]
        """Add to the residual stream x [B, S, D] the layer's output for the stream `before` the other layer."""
        return x + self.drop(self.layer(self.norm(before), ctx))


Residual = PreNorm | PostNorm | SandwichNorm | OutputNorm


def make_residual(s: spec.TransformerSpec, layer: nn.Module, *, first: bool = False) -> Residual:
    """Wrap a sublayer, the `first` one of a stack or another, in the residual connection of the spec."""
    if first and not s.first_norm:
        return NoNorm(s, layer)
    match s.norm_placement:
        case "pre" | "parallel":  # of which `ParallelBlock` changes the second
            return PreNorm(s, layer)
        case "post":
            return PostNorm(s, layer)
        case "sandwich":
            return SandwichNorm(s, layer)
        case "output":
            return OutputNorm(s, layer)
        case _:
            assert_never(s.norm_placement)
