"""The feed-forward layer (MLP), applied at each position."""

from __future__ import annotations

from typing import assert_never

from torch import Tensor, nn
from torch.nn import functional as F

from glasshouse import spec
from glasshouse.layers.context import Context


class FeedForward(nn.Module):
    """Two linear layers with an activation between."""

    def __init__(self, d_model: int, d_ff: int, activation: nn.Module, bias: bool) -> None:
        super().__init__()
        self.up = nn.Linear(d_model, d_ff, bias=bias)
        self.activation = activation
        self.down = nn.Linear(d_ff, d_model, bias=bias)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """Map x [B, S, D] to [B, S, D]."""
        return self.down(self.activation(self.up(x)))


class GatedFeedForward(nn.Module):
    """A gated linear unit: act(gate(x)) * up(x), projected down."""

    def __init__(self, d_model: int, d_ff: int, activation: nn.Module, bias: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(d_model, d_ff, bias=bias)
        self.up = nn.Linear(d_model, d_ff, bias=bias)
        self.activation = activation
        self.down = nn.Linear(d_ff, d_model, bias=bias)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """Map x [B, S, D] to [B, S, D]."""
        return self.down(self.activation(self.gate(x)) * self.up(x))


class SquaredReLU(nn.Module):
    """Squared ReLU: max(x, 0) ** 2."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply it elementwise."""
        return F.relu(x).square()


def make_activation(choice: spec.FeedForward) -> nn.Module:
    """Build the activation of a feed-forward layer."""
    match choice:
        case spec.Relu():
            return nn.ReLU()
        case spec.ReluSquared():
            return SquaredReLU()
        case spec.Gelu(tanh) | spec.GeGLU(tanh):
            return nn.GELU("tanh" if tanh else "none")
        case spec.Silu() | spec.SwiGLU():
            return nn.SiLU()
        case _:
            assert_never(choice)


def make_feedforward(s: spec.TransformerSpec) -> FeedForward | GatedFeedForward:
    """Build the feed-forward layer of a spec."""
    gated = isinstance(s.feedforward, spec.SwiGLU | spec.GeGLU)
    kind = GatedFeedForward if gated else FeedForward
    return kind(s.d_model, s.d_ff, make_activation(s.feedforward), s.ffn_bias)
