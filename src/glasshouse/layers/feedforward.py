"""The feed-forward layer (MLP), applied at each position."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from glasshouse import registry, spec
from glasshouse.layers.context import Context
from glasshouse.layers.flops import FlopCount
from glasshouse.layers.linear.linear import Linear
from glasshouse.layers.sublayer import NEURONS, LayerSite, Sublayer


class FeedForward(Sublayer):
    """Two linear layers with an activation between."""

    residual_input = "hidden"

    def __init__(self, s: spec.TransformerSpec, activation: nn.Module) -> None:
        super().__init__()
        self.up = Linear(s.d_model, s.d_ff, bias=s.ffn_bias)
        self.activation = activation
        self.down = Linear(s.d_ff, s.d_model, bias=s.ffn_bias)
        self.kind = kind_of(s.feedforward)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """Map x [B, S, D] to [B, S, D]."""
        return self.down(self.activation(self.up(x)))

    @property
    def residual_projection(self) -> nn.Linear:
        """The projection down."""
        return self.down

    def sites(self) -> list[LayerSite]:
        """Return the neurons before and after the activation."""
        return [LayerSite("hidden_pre", NEURONS, "activation", 0), LayerSite("hidden", NEURONS, "down", 0)]

    def stored_bytes(self, itemsize: int) -> int:
        """Return the neurons before and after the activation; a ReLU needs only where they were negative."""
        before = 1 if self.kind == "relu" else itemsize
        return (before + itemsize) * self.up.out_features


GATED_SITES = (
    LayerSite("gate", NEURONS, "activation", 0),
    LayerSite("hidden_pre", NEURONS, "up", "output"),
    LayerSite("hidden", NEURONS, "down", 0),
)


class GatedFeedForward(FeedForward):
    """A gated linear unit: act(gate(x)) * up(x), projected down."""

    shared_input = ("gate", "up")

    def __init__(self, s: spec.TransformerSpec, activation: nn.Module) -> None:
        nn.Module.__init__(self)
        self.gate = Linear(s.d_model, s.d_ff, bias=s.ffn_bias)
        self.up = Linear(s.d_model, s.d_ff, bias=s.ffn_bias)
        self.activation = activation
        self.down = Linear(s.d_ff, s.d_model, bias=s.ffn_bias)
        self.kind = kind_of(s.feedforward)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """Map x [B, S, D] to [B, S, D]."""
        return self.down(self.activation(self.gate(x)) * self.up(x))

    def sites(self) -> list[LayerSite]:
        """Return the gate before its activation, what it multiplies, and the neurons."""
        return list(GATED_SITES)

    def fused(self, project: nn.Module) -> nn.Module:
        """Return the layer with one projection for gate and up."""
        return FusedGateUpFeedForward(self, project)

    def add_flops(self, count: FlopCount, trained: bool) -> bool:
        """Add the FLOPs of the layer: gate and up have the same input."""
        gate, up = count.add(self.gate, trained), count.add(self.up, trained)
        return count.add(self.down, gate or up)

    def stored_bytes(self, itemsize: int) -> int:
        """Return gate, up and their product; the activation of the gate is recomputed."""
        return 3 * itemsize * self.up.out_features


class FusedGateUpFeedForward(FeedForward):
    """A gated feed-forward layer with a fused gate and up projection, for inference."""

    def __init__(self, layer: GatedFeedForward, project: nn.Module) -> None:
        nn.Module.__init__(self)
        self.gate_up = project
        self.up = nn.Identity()  # type: ignore[assignment]  # for hooks
        self.activation, self.down, self.kind = layer.activation, layer.down, layer.kind

    def sites(self) -> list[LayerSite]:
        """Return the gate before its activation, what it multiplies, and the neurons."""
        return list(GATED_SITES)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """Map x [B, S, D] to [B, S, D]."""
        gate, up = self.gate_up(x)
        return self.down(self.activation(gate) * self.up(up))


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
    return nn.GELU()  # in the head of an encoder whose feed-forward layer was registered: BERT's


def kind_of(choice: spec.FeedForward) -> str:
    """Return the kind, and whether its activation is approximated by tanh."""
    return choice.kind + ("_tanh" if getattr(choice, "tanh", False) else "")


def make_feedforward(s: spec.TransformerSpec) -> Sublayer:
    """Build the feed-forward layer of a spec."""
    if (layer := registry.build(s.feedforward, Sublayer, s)) is not None:
        return layer
    activation = make_activation(s.feedforward)
    return GatedFeedForward(s, activation) if s.feedforward.gated else FeedForward(s, activation)
