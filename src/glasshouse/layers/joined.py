"""Maps that read the same vectors, as one matrix product: fewer and larger, for a model that only writes.

Joined layers hold copies of the weights in an order of their own; they are for a tree of modules made to generate.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from glasshouse.layers.attention import Attention, join_heads, split_heads
from glasshouse.layers.context import Context
from glasshouse.layers.feedforward import GatedFeedForward


class Joined(nn.Module):
    """Several linear maps of one input; the outputs come apart again."""

    def __init__(self, maps: list[nn.Linear]) -> None:
        super().__init__()
        self.sizes = [one.out_features for one in maps]
        self.weight = torch.cat([one.weight.detach() for one in maps])
        biases = [one.bias.detach() for one in maps if one.bias is not None]
        self.bias = torch.cat(biases) if biases else None

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Map x [B, S, D] to the output of each map."""
        return torch.split(F.linear(x, self.weight, self.bias), self.sizes, -1)


class JoinedAttention(Attention):
    """Self-attention whose queries, keys and values come from one product."""

    def __init__(self, layer: Attention) -> None:
        nn.Module.__init__(self)
        self.index, self.window, self.d_head = layer.index, layer.window, layer.d_head
        self.project = Joined([layer.query, layer.key, layer.value])
        self.q_norm, self.k_norm, self.attend, self.out = layer.q_norm, layer.k_norm, layer.attend, layer.out

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """Map x [B, S, D] to what each position gathered from those it sees, [B, S, D]."""
        q, k, v = (split_heads(part, self.d_head) for part in self.project(x))
        return self.out(join_heads(self.gather(q, k, v, ctx)))


class JoinedFeedForward(nn.Module):
    """A gated feed-forward layer whose two maps up are one product."""

    def __init__(self, layer: GatedFeedForward) -> None:
        super().__init__()
        self.maps = Joined([layer.gate, layer.up])
        self.activation, self.down = layer.activation, layer.down

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """Map x [B, S, D] to [B, S, D]."""
        gate, up = self.maps(x)
        return self.down(self.activation(gate) * up)


def join(tree: nn.Module) -> None:
    """Join, in a tree of modules made to generate, what can be."""
    for module in list(tree.modules()):
        for name, child in module.named_children():
            if type(child) is Attention:
                setattr(module, name, JoinedAttention(child))
            elif type(child) is GatedFeedForward:
                setattr(module, name, JoinedFeedForward(child))
