"""Exponential moving average (EMA) of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from glasshouse.errors import InputError


class EMA:
    """Exponential moving average of a model's weights, updated after each step.

    The decay is at most (1 + n) / (10 + n) after n updates, so that the initial weights are forgotten quickly.

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
            raise InputError(f"the decay of the EMA is {decay}, but it must be at least 0 and below 1.")
        self.model, self.decay, self.updates = model, decay, 0
        self.weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}

    @torch.no_grad()
    def update(self) -> None:
        """Update the average with the current weights."""
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        current = dict(self.model.named_parameters())
        torch._foreach_lerp_(
            list(self.weights.values()), [current[name].detach() for name in self.weights], 1 - decay
        )

    def restore(self, weights: dict[str, Tensor], updates: int) -> None:
        """Restore a saved average."""
        self.updates = updates
        for name, weight in self.weights.items():
            weight.copy_(weights[name])

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Swap the average into the model while the context is open."""
        own = {name: weight.detach().clone() for name, weight in self.model.named_parameters()}
        self._copy_to_model(self.weights)
        try:
            yield
        finally:
            self._copy_to_model(own)

    @torch.no_grad()
    def _copy_to_model(self, weights: dict[str, Tensor]) -> None:
        for name, weight in self.model.named_parameters():
            weight.copy_(weights[name])
