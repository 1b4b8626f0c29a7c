"""The linear layer of our modules, whose weights a spec's init sets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

_LEFT_TO_SPEC = ContextVar("left_to_spec", default=False)


class Linear(nn.Linear):
    """nn.Linear that is initialized by the spec's init when `gh.build` makes it, and by torch otherwise.

    >>> Linear(2, 3).weight.isnan().any().item()
    False
    """

    def reset_parameters(self) -> None:
        if not is_left_to_spec(self.weight):
            super().reset_parameters()


def is_left_to_spec(weight: Tensor) -> bool:
    """Whether a module of ours leaves its weights to the spec; on the meta device torch would import for seconds."""
    return weight.is_meta or _LEFT_TO_SPEC.get()


def is_plain_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a module is a linear layer and nothing more, such as one with LoRA attached.

    >>> is_plain_linear(Linear(2, 3)), is_plain_linear(nn.Linear(2, 3)), is_plain_linear(nn.ReLU())
    (True, True, False)
    """
    return type(module) in (nn.Linear, Linear)


@contextmanager
def left_to_spec() -> Iterator[None]:
    """Leave the weights of our modules to the spec; all memory that nobody initializes is NaN.

    >>> with left_to_spec():
    ...     Linear(2, 1, bias=False).weight
    Parameter containing:
    tensor([[nan, nan]], requires_grad=True)
    """
    settings: Any = torch.utils.deterministic
    mode, fill = torch.get_deterministic_debug_mode(), settings.fill_uninitialized_memory
    token = _LEFT_TO_SPEC.set(True)
    torch.set_deterministic_debug_mode("warn")
    settings.fill_uninitialized_memory = True
    try:
        yield
    finally:
        _LEFT_TO_SPEC.reset(token)
        torch.set_deterministic_debug_mode(mode)
        settings.fill_uninitialized_memory = fill
