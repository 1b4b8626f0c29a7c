"""The weights of a model as they are saved, and their way into modules that were built without them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


def first_names(model: nn.Module) -> dict[str, str]:
    """Return, for every weight by name, the first name of the same one: its own, unless modules share it.

    Weights are parameters, and buffers that are saved.

    >>> model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    >>> model[1].weight = model[0].weight
    >>> first_names(model)
    {'0.weight': '0.weight', '1.weight': '0.weight'}
    """
    first: dict[Tensor, str] = {}
    return {name: first.setdefault(weight, name) for name, weight in model.state_dict(keep_vars=True).items()}


@torch.no_grad()
def assign_weights(model: nn.Module, weights: Mapping[str, Tensor], *, buffers_of: nn.Module | None = None) -> None:
    """Give a model its weights, without copying them; what its modules share stays shared.

    Buffers that are not saved are copied from another model, if one is given.

    >>> with torch.device("meta"):
    ...     model = nn.Linear(1, 1)
    >>> assign_weights(model, {"weight": torch.ones(1, 1), "bias": torch.zeros(1)})
    >>> model(torch.tensor([[3.0]])).item()
    3.0
    """
    names = first_names(model)
    model.load_state_dict({name: weights[first] for name, first in names.items()}, assign=True)
    for name, first in names.items():
        if name != first:
            _set(model, name, dict(model.state_dict(keep_vars=True))[first])
    if buffers_of is not None:
        device = next(iter(weights.values())).device
        for name, buffer in buffers_of.named_buffers():
            if name not in names:
                _set(model, name, buffer.to(device, copy=True))


def _set(model: nn.Module, name: str, tensor: Tensor) -> None:
    above, _, last = name.rpartition(".")
    setattr(model.get_submodule(above), last, tensor)
