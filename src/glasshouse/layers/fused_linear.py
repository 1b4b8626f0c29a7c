"""Maps that read the same vectors, as one matrix product: fewer and larger, for a model that only writes.

Joined layers hold copies of the weights in an order of their own; they are for a tree of modules made to generate.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from glasshouse.layers.attention import Attention, merge_heads, split_heads
from glasshouse.layers.context import Context
from glasshouse.layers.feedforward import GatedFeedForward
from glasshouse.layers.module_swap import MakeLinear, has_hooks, replace_module


class FusedLinear(nn.Module):
    """Several linear maps of one input; the outputs come apart again."""

    def __init__(self, maps: Sequence[nn.Linear], make: MakeLinear) -> None:
        super().__init__()
        self.sizes = [one.out_features for one in maps]
        weight = torch.cat([one.weight.detach() for one in maps])
        biases = [one.bias.detach() for one in maps if one.bias is not None]
        bias = torch.cat(biases) if biases else None
        self.map = make(weight, bias) or linear_from_tensors(weight, bias)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Map x [B, S, D] to the output of each map."""
        return torch.split(self.map(x), self.sizes, -1)


class FusedQKVAttention(Attention):
    """Self-attention whose queries, keys and values come from one product."""

    def __init__(self, layer: Attention, make: MakeLinear) -> None:
        nn.Module.__init__(self)
        self.index, self.window, self.d_head = layer.index, layer.window, layer.d_head
        self.project = FusedLinear([layer.query, layer.key, layer.value], make)
        self.q_norm, self.k_norm, self.attend, self.out = layer.q_norm, layer.k_norm, layer.attend, layer.out

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """Map x [B, S, D] to what each position gathered from those it sees, [B, S, D]."""
        q, k, v = (split_heads(part, self.d_head) for part in self.project(x))
        return self.out(merge_heads(self.attend_heads(q, k, v, ctx)))


class FusedGateUpFeedForward(nn.Module):
    """A gated feed-forward layer whose two maps up are one product."""

    def __init__(self, layer: GatedFeedForward, make: MakeLinear) -> None:
        super().__init__()
        self.maps = FusedLinear([layer.gate, layer.up], make)
        self.activation, self.down = layer.activation, layer.down

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """Map x [B, S, D] to [B, S, D]."""
        gate, up = self.maps(x)
        return self.down(self.activation(gate) * up)


def linear_from_tensors(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Return a linear map of given tensors."""
    count, width = weight.shape
    made = nn.Linear(width, count, bias=bias is not None, device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias, requires_grad=False)
    return made


def fuse_linears(tree: nn.Module, make: MakeLinear = linear_from_tensors) -> None:
    """Join, in a tree of modules made to generate, what can be, and have `make` turn each large matrix into a map.

    Maps stay apart where someone watches one of them, or where another kind has taken the place of one.
    """
    for module in list(tree.modules()):
        for name, child in list(module.named_children()):
            if type(child) is Attention and _can_join(child.query, child.key, child.value):
                replace_module(module, name, FusedQKVAttention(child, make))
            elif type(child) is GatedFeedForward and _can_join(child.gate, child.up):
                replace_module(module, name, FusedGateUpFeedForward(child, make))


def _can_join(*maps: nn.Module) -> bool:
    return all(type(one) is nn.Linear and not has_hooks(one) for one in maps)
