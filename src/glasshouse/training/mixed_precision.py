"""Mixed precision: a copy of the model in bfloat16 computes, the model itself keeps float32 master weights."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from glasshouse.layers.float8 import convert_to_float8
from glasshouse.models.heads import DeferredHead, LMHead


class LowPrecisionCopy:
    """A copy of a model in low precision, for the forward and the backward pass.

    The weights are cast once per step, and not in every forward pass as by autocast, and activations are in low
    precision from the embedding on. Gradients are summed over micro-batches in the precision of the master weights.
    With `float8`, linear layers multiply in fp8.

    >>> import glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder"))
    >>> low = LowPrecisionCopy(model, torch.bfloat16)
    >>> low.model(torch.tensor([[1, 2, 3]])).sum().backward()
    >>> low.add_gradients()
    >>> model.head.weight.grad.dtype
    torch.float32
    """

    def __init__(
        self, master: nn.Module, dtype: torch.dtype, *, defer_logits: bool = False, float8: bool = False
    ) -> None:
        self.model = copy.deepcopy(master).to(dtype).train()
        if float8:
            convert_to_float8(self.model)
        self._master: list[Tensor] = [weight for weight in master.parameters() if weight.requires_grad]
        self._low: list[Tensor] = [weight for weight in self.model.parameters() if weight.requires_grad]
        head = getattr(self.model, "head", None)
        if defer_logits and isinstance(head, LMHead):
            self.model.head = DeferredHead(head)

    @torch.no_grad()
    def update(self) -> None:
        """Copy the master weights, after they have changed."""
        torch._foreach_copy_(self._low, self._master)

    @torch.no_grad()
    def add_gradients(self) -> None:
        """Move the gradients of one backward pass to the master weights, added to those that are there."""
        sums, terms = list[Tensor](), list[Tensor]()
        first, copies = list[Tensor](), list[Tensor]()
        for master, low in zip(self._master, self._low, strict=True):
            if low.grad is None:
                continue
            if master.grad is None:
                master.grad = torch.empty_like(master)
                first.append(master.grad)
                copies.append(low.grad)
            else:
                sums.append(master.grad)
                terms.append(low.grad)
            low.grad = None
        if first:
            torch._foreach_copy_(first, copies)
        if sums:
            torch._foreach_add_(sums, terms)
