"""A second tree of modules around the parameters of a model, in which others may take their place.

An engine holds its matrices in an order of its own; the model itself never notices.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import chain
from typing import Any, TypeVar, cast

from torch import Tensor, nn

Tree = TypeVar("Tree", bound=nn.Module)
HOOK_ATTRIBUTES = (  # what torch keeps of those that are called around a module's forward pass
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
MakeLinear = Callable[
    [Tensor, Tensor | None], nn.Module | None
]  # a linear map of a weight and a bias; None: leave it


class SwappedUnembedding(nn.Module):
    """The head over a vocabulary in a second tree: its matrix product is a module of its own."""

    def __init__(self, transform: nn.Module, scale: float, product: nn.Module) -> None:
        super().__init__()
        self.transform = transform
        self.scale = scale
        self.product = product

    def forward(self, x: Tensor, layout: object, table: Tensor) -> Tensor:
        """Map vectors x [B, S, D] to logits [B, S, V]; the token table at hand is not read."""
        x = self.transform(x)
        return self.product(x if self.scale == 1.0 else x * self.scale)


def clone_sharing_parameters(tree: Tree) -> Tree:
    """Return a second tree of the same modules around the same parameters, to put other modules in.

    Hooks come along, so that what looks into a model or changes it does so in its twin.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    >>> clone = clone_sharing_parameters(model)
    >>> clone[0].weight is model[0].weight, clone[0] is model[0]
    (True, False)
    """
    twin = copy.deepcopy(tree, {id(tensor): tensor for tensor in chain(tree.parameters(), tree.buffers())})
    for module in twin.modules():
        module._compiled_call_impl = None  # what was compiled is the other's
    return twin


def swap_linears(tree: nn.Module, make: MakeLinear) -> None:
    """Put what `make` returns for a weight and a bias in the place of each linear map and of the head's product."""
    for module in list(tree.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and (made := make(child.weight, child.bias)) is not None:
                replace_module(module, name, made)
    model = cast(Any, tree)
    head: Any = getattr(tree, "head", None)
    if (
        hasattr(head, "unembedding")
        and (made := make(head.unembedding(model.token_embedding.table.weight), head.bias)) is not None
    ):
        replace_module(tree, "head", SwappedUnembedding(head.transform, head.scale, made))


def replace_module(module: nn.Module, name: str, heir: nn.Module) -> None:
    """Put a module that takes and gives the same in the place of a child, hooks and all."""
    child = module.get_submodule(name)
    for hooks in HOOK_ATTRIBUTES:
        getattr(heir, hooks).update(getattr(child, hooks))
    setattr(module, name, heir)


def has_hooks(module: nn.Module) -> bool:
    """Whether someone has put a hook on a module."""
    return any(getattr(module, hooks) for hooks in HOOK_ATTRIBUTES)
