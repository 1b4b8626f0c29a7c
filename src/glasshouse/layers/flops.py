"""FLOPs of the matrix products of a module, summed over its layers in the order of execution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor, nn


@runtime_checkable
class CountsFlops(Protocol):
    """A module that counts its own FLOPs: its children do not just run one after the other."""

    def add_flops(self, count: FlopCount, trained: bool) -> bool:
        """Add the FLOPs; return whether the output needs a gradient, as it does if the input is `trained`."""


@dataclass
class FlopCount:
    """FLOPs of a stack: per token, per query-key pair, and the same of cross-attention.

    A weight matrix costs 2 FLOPs per token and element in the forward pass, 2 more for its own gradient if it is
    trained, and 2 more for that of its input if anything before it is trained.
    """

    memory_trained: bool = False  # whether the encoder's output needs a gradient
    maps: int = 0  # FLOPs per token
    scores: int = 0  # per query and key
    cross_maps: int = 0  # per source token, for the keys and values of cross-attention
    cross_scores: int = 0  # per query and source token

    def add(self, module: nn.Module, trained: bool) -> bool:
        """Add a module; return whether its output needs a gradient, as it does if its input is `trained`."""
        match module:
            case CountsFlops():
                return module.add_flops(self, trained)
            case nn.Embedding():  # a lookup, not a product
                return trained or module.weight.requires_grad
            case _:
                return self.add_children(module, trained)

    def add_children(self, module: nn.Module, trained: bool) -> bool:
        """Add the children of a module, one after the other, and its own matrices."""
        for child in module.children():
            trained = self.add(child, trained)
        own = list(module.parameters(recurse=False))
        self.maps += sum(product(weight, trained) for weight in own if weight.dim() == 2)
        return trained or any(weight.requires_grad for weight in own)


def product(weight: Tensor, trained: bool) -> int:
    """Return the FLOPs of a weight matrix per token."""
    return weight.numel() * (2 + 2 * weight.requires_grad + 2 * trained)


def is_trained(module: nn.Module) -> bool:
    """Whether a module has a parameter that needs a gradient."""
    return any(weight.requires_grad for weight in module.parameters())
