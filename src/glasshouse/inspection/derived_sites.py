"""Derived sites: activations that no module computes by itself, such as what one head writes to the residual stream.

Each is computed from a module's input; where it is edited, the module's output is computed from it.
"""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor

from glasshouse.inspection.sites import Site, unwrap_compiled
from glasshouse.layers.attention import MultiHeadAttention
from glasshouse.layers.norm import Norm
from glasshouse.layers.sublayer import Derived

DERIVED: tuple[Derived, ...] = get_args(Derived)


def derive(site: Site, x: Tensor) -> Tensor:
    """Return the activation for a module's input: a norm's scale [B, S], or what each head writes [B, H, S, D]."""
    module = unwrap_compiled(site.module)
    if isinstance(module, Norm):
        return module.scale(x)
    attention = site.model.get_submodule(site.path.rpartition(".")[0])
    assert isinstance(attention, MultiHeadAttention)
    n_heads = attention.n_heads
    own = torch.eye(n_heads, dtype=x.dtype, device=x.device)[..., None]  # [H, H, 1]
    heads = [(x.unflatten(-1, (n_heads, -1)) * one).flatten(-2) for one in own]
    # Through the projection itself, which may be quantized or have LoRA; not its hooks.
    bias = _bias(module, x)
    return torch.stack([module.forward(head) - bias for head in heads], 1)


def output_of(site: Site, x: Tensor, value: Tensor) -> Tensor:
    """Return the module's output for its input x and an activation that may have been edited."""
    module = unwrap_compiled(site.module)
    if isinstance(module, Norm):
        return module.rescaled(x, value)
    return value.sum(1) + _bias(module, x)


def _bias(projection: torch.nn.Module, x: Tensor) -> Tensor:
    return projection.forward(x.new_zeros(1, 1, x.shape[-1]))
