"""Copies of a module tree that share the parameters, in which modules can be replaced.

An engine stores its weights in its own memory layout; the model itself does not change.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import chain
from typing import Any, TypeVar, cast

from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from glasshouse.layers.attend.kernel import Attend
from glasshouse.layers.linear.linear import is_plain_linear
from glasshouse.layers.softcap import softcap

Tree = TypeVar("Tree", bound=nn.Module)
HOOK_ATTRIBUTES = (  # where torch stores the forward hooks of a module
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
MakeLinear = Callable[[Tensor, Tensor | None], nn.Module | None]  # weight and bias -> a linear layer; None: keep it


class SwappedUnembedding(nn.Module):
    """A language-model head whose matmul is a module of its own."""

    def __init__(self, transform: nn.Module, scale: float, matmul: nn.Module, cap: float | None) -> None:
        super().__init__()
        self.transform = transform
        self.scale = scale
        self.matmul = matmul
        self.softcap = cap

    def forward(self, x: Tensor, layout: object, table: Tensor) -> Tensor:
        """Map vectors x [B, S, D] to logits [B, S, V]; the token table is not used."""
        x = self.transform(x)
        return softcap(self.matmul(x if self.scale == 1.0 else x * self.scale), self.softcap)


def clone_sharing_parameters(tree: Tree) -> Tree:
    """Return a copy of a module tree that shares its parameters and buffers.

    Hooks are copied too, so that recordings and edits of a model apply to its copy.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    >>> clone = clone_sharing_parameters(model)
    >>> clone[0].weight is model[0].weight, clone[0] is model[0]
    (True, False)
    """
    clone = copy.deepcopy(tree, {id(tensor): tensor for tensor in chain(tree.parameters(), tree.buffers())})
    for module in clone.modules():
        module._compiled_call_impl = None  # the compiled code is the original's
    return clone


def swap_linears(tree: nn.Module, make: MakeLinear) -> None:
    """Replace each linear layer, and the matmul of the head, by what `make` returns for its weight and bias."""
    for module in list(tree.modules()):
        for name, child in list(module.named_children()):
            if is_plain_linear(child) and (made := make(child.weight, child.bias)) is not None:
                replace_module(module, name, made)
    model = cast(Any, tree)
    head: Any = getattr(tree, "head", None)
    if (
        hasattr(head, "unembedding")
        and (made := make(head.unembedding(model.token_embedding.table.weight), head.bias)) is not None
    ):
        replace_module(tree, "head", SwappedUnembedding(head.transform, head.scale, made, head.softcap))


def replace_module(module: nn.Module, name: str, replacement: nn.Module) -> None:
    """Replace a child by a module of the same signature, and copy its hooks."""
    child = module.get_submodule(name)
    for hooks in HOOK_ATTRIBUTES:
        getattr(replacement, hooks).update(getattr(child, hooks))
    setattr(module, name, replacement)


def is_own_code(tree: nn.Module) -> bool:
    """Return whether all modules are this package's or torch's: each pass runs the same code.

    None has hooks, its own or those of all modules, or a forward function in place of its class's.

    >>> layer = nn.Linear(2, 3)
    >>> is_own_code(layer)
    True
    >>> _ = layer.register_forward_hook(print)
    >>> is_own_code(layer)
    False
    """
    return not _has_any_global_hook() and not any(
        has_hooks(module)
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in vars(module)
        or type(module).__module__.partition(".")[0] not in ("glasshouse", "torch")
        or (isinstance(module, Attend) and type(module) is not Attend)  # whose scores are recorded or edited
        for module in tree.modules()
    )


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has forward hooks."""
    return any(getattr(module, hooks) for hooks in HOOK_ATTRIBUTES)
