"""Fused projections for inference: linear layers of the same input as one matmul.

Fused layers have copies of the weights, so they are for the inference copy of a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from glasshouse.layers.linear.linear import is_plain_linear
from glasshouse.layers.module_swap import MakeLinear, has_hooks, replace_module
from glasshouse.layers.sublayer import Sublayer


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


def linear_from_tensors(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Return an nn.Linear with the given tensors."""
    count, width = weight.shape
    made = nn.Linear(width, count, bias=bias is not None, device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias, requires_grad=False)
    return made


def fuse_linears(tree: nn.Module, make: MakeLinear = linear_from_tensors) -> None:
    """Fuse projections of one input in an inference copy; `make` builds the layer of each fused weight.

    Layers with hooks, and layers that are no plain nn.Linear, are not fused.
    """
    for module in list(tree.modules()):
        for name, child in list(module.named_children()):
            # Only if its own class names them: one that is derived from it may use them in another way.
            if isinstance(child, Sublayer) and (names := vars(type(child)).get("shared_input")):
                linears = [cast(nn.Linear, child.get_submodule(one)) for one in names]
                if all(is_plain_linear(one) and not has_hooks(one) for one in linears):
                    replace_module(module, name, child.fused(FusedLinear(linears, make)))
