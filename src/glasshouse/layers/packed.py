"""Linear maps with their matrices laid out for a CPU, in a second tree of modules around the same parameters.

A CPU that decodes several rows at once spends its time on reading matrices, and reads them fastest in an order of
its own. `share` makes the second tree, `pack` lays its matrices out; the model itself never notices.
"""

from __future__ import annotations

import copy
import functools
import platform
from collections.abc import Callable
from itertools import chain
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

FEWEST_ROWS = 4  # with fewer the plain product is as fast
FEWEST_NUMBERS = 2**19  # a smaller matrix stays in the caches anyway, and the call costs more than it saves

Tree = TypeVar("Tree", bound=nn.Module)


class PackedLinear(nn.Module):
    """A linear map that also holds its matrix in oneDNN's order, for products of four rows and more.

    Only float32 on the CPU without gradients takes that way; all else goes through the parameters as ever. The
    packed copy does not follow when they change. `can_pack` says whether this build of torch has what it needs.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 16)
        self.multiply = torch.ops.mkldnn._linear_pointwise.default

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., K] to [..., N]."""
        several = x.numel() >= FEWEST_ROWS * x.shape[-1]
        if several and x.dtype == torch.float32 and x.is_cpu and not torch.is_grad_enabled():
            product: Tensor = self.multiply(x, self.packed, self.bias, "none", [], "")
            return product
        return F.linear(x, self.weight, self.bias)


class Unembedding(nn.Module):
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


def share(tree: Tree) -> Tree:
    """Return a second tree of the same modules around the same parameters, to put other modules in.

    Hooks come along, so that what looks into a model or changes it does so in its twin.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    >>> twin = share(model)
    >>> twin[0].weight is model[0].weight, twin[0] is model[0]
    (True, False)
    """
    twin = copy.deepcopy(tree, {id(tensor): tensor for tensor in chain(tree.parameters(), tree.buffers())})
    for module in twin.modules():
        module._compiled_call_impl = None  # what was compiled is the other's
    return twin


def pack(tree: nn.Module) -> None:
    """Lay out, in a second tree, each matrix that gains by it; where torch cannot, the tree stays as it is.

    >>> model = nn.Sequential(nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 2))
    >>> twin = share(model)
    >>> pack(twin)
    >>> with torch.no_grad():
    ...     x = torch.randn(8, 1024)
    ...     torch.allclose(twin(x), model(x), atol=1e-5)
    True
    """
    if can_pack():
        swap(tree, lambda weight, bias: PackedLinear(weight, bias) if gains(weight) else None)


def gains(weight: Tensor) -> bool:
    """Whether a matrix is worth packing."""
    return weight.is_cpu and weight.dtype == torch.float32 and weight.numel() >= FEWEST_NUMBERS


def swap(tree: nn.Module, make: Callable[[Tensor, Tensor | None], nn.Module | None]) -> None:
    """Put what `make` returns for a weight and a bias in the place of each linear map and of the head's product."""
    for module in list(tree.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and (made := make(child.weight, child.bias)) is not None:
                setattr(module, name, made)
    model = cast(Any, tree)
    head: Any = getattr(tree, "head", None)
    if hasattr(head, "matrix") and (made := make(head.matrix(model.token.table.weight), head.bias)) is not None:
        model.head = Unembedding(head.transform, head.scale, made)


@functools.cache
def can_pack() -> bool:
    """Whether this build of torch packs matrices, tried once on a small one."""
    try:
        # Elsewhere the operators may be there with no more than a reference behind them, unless ARM's library is too.
        if platform.machine() not in ("x86_64", "AMD64") and not torch.ops.mkldnn._is_mkldnn_acl_supported():
            return False
        x, weight = torch.eye(FEWEST_ROWS, 16), torch.arange(256.0).view(16, 16)
        with torch.no_grad():
            return PackedLinear(weight)(x).equal(weight.T[:FEWEST_ROWS])
    except (AttributeError, RuntimeError):
        return False
