"""A running average of the weights, which is often better than where they stand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from glasshouse.errors import InputError


class EMA:
    """The exponential average of a model's weights: after each update, so much of the old and the rest of the new.

    At first it forgets faster, as if the weights at the start had never been: after n updates it keeps at most
    (1 + n) / (10 + n).

    >>> model = nn.Linear(1, 1, bias=False)
    >>> nn.init.zeros_(model.weight).item()
    0.0
    >>> ema = EMA(model, decay=0.5)
    >>> for value in (4.0, 8.0):
    ...     _ = nn.init.constant_(model.weight, value)
    ...     ema.update()
    >>> with ema.applied():
    ...     print(round(model.weight.item(), 3))
    6.818
    >>> model.weight.item()
    8.0
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        if not 0 <= decay < 1:
            raise InputError(f"the decay of the average is {decay}, but it must be from 0 to below 1.")
        self.model, self.decay, self.updates = model, decay, 0
        self.weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights as they are now into account."""
        self.updates += 1
        kept = min(self.decay, (1 + self.updates) / (10 + self.updates))
        now = dict(self.model.named_parameters())
        torch._foreach_lerp_(list(self.weights.values()), [now[name].detach() for name in self.weights], 1 - kept)

    def restore(self, weights: dict[str, Tensor], updates: int) -> None:
        """Go on with weights that were averaged before."""
        self.updates = updates
        for name, weight in self.weights.items():
            weight.copy_(weights[name])

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Let the model have the average for a while."""
        own = {name: weight.detach().clone() for name, weight in self.model.named_parameters()}
        self._put(self.weights)
        try:
            yield
        finally:
            self._put(own)

    @torch.no_grad()
    def _put(self, weights: dict[str, Tensor]) -> None:
        for name, weight in self.model.named_parameters():
            weight.copy_(weights[name])
