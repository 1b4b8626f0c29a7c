"""Fused projections for inference: linear layers of the same input as one matmul.

Fused layers have copies of the weights, so they are for the inference copy of a model.
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
    """Several linear layers of one input as one; the outputs are split again."""

    def __init__(self, linears: Sequence[nn.Linear], make: MakeLinear) -> None:
        super().__init__()
        self.sizes = [one.out_features for one in linears]
        weight = torch.cat([one.weight.detach() for one in linears])
        biases = [one.bias.detach() for one in linears if one.bias is not None]
        bias = torch.cat(biases) if biases else None
        self.linear = make(weight, bias) or linear_from_tensors(weight, bias)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Map x [B, S, D] to the output of each layer."""
        return torch.split(self.linear(x), self.sizes, -1)


class FusedQKVAttention(Attention):
    """Self-attention with a fused QKV projection."""

    def __init__(self, layer: Attention, make: MakeLinear) -> None:
        nn.Module.__init__(self)
        self.index, self.window, self.d_head = layer.index, layer.window, layer.d_head
        self.kv_shape = layer.kv_shape
        self.project = FusedLinear([layer.query, layer.key, layer.value], make)
        self.q_norm, self.k_norm, self.attend, self.out = layer.q_norm, layer.k_norm, layer.attend, layer.out

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """Apply self-attention to x [B, S, D]."""
        q, k, v = (split_heads(one, self.d_head) for one in self.project(x))
        return self.out(merge_heads(self.attend_heads(q, k, v, ctx)))


class FusedGateUpFeedForward(nn.Module):
    """A gated feed-forward layer with a fused gate and up projection."""

    def __init__(self, layer: GatedFeedForward, make: MakeLinear) -> None:
        super().__init__()
        self.gate_up = FusedLinear([layer.gate, layer.up], make)
        self.activation, self.down = layer.activation, layer.down

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """Map x [B, S, D] to [B, S, D]."""
        gate, up = self.gate_up(x)
        return self.down(self.activation(gate) * up)


def linear_from_tensors(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Return an nn.Linear with the given tensors."""
    count, width = weight.shape
    made = nn.Linear(width, count, bias=bias is not None, device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias, requires_grad=False)
    return made


def fuse_linears(tree: nn.Module, make: MakeLinear = linear_from_tensors) -> None:
    """Fuse QKV and gate/up projections in an inference copy; `make` builds the layer of each fused weight.

    Layers with hooks, and layers that are no plain nn.Linear, are not fused.
    """
    for module in list(tree.modules()):
        for name, child in list(module.named_children()):
            if type(child) is Attention and _can_fuse(child.query, child.key, child.value):
                replace_module(module, name, FusedQKVAttention(child, make))
            elif type(child) is GatedFeedForward and _can_fuse(child.gate, child.up):
                replace_module(module, name, FusedGateUpFeedForward(child, make))


def _can_fuse(*linears: nn.Module) -> bool:
    return all(type(one) is nn.Linear and not has_hooks(one) for one in linears)
