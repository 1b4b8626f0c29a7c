"""Layer normalisation and RMS normalisation."""

from __future__ import annotations

from typing import assert_never

from torch import nn

from glasshouse import spec


def make_norm(choice: spec.Norm, width: int) -> nn.Module:
    """Build the norm of a spec over the last axis of size `width`.

    >>> make_norm(spec.RMSNorm(), 64)
    RMSNorm((64,), eps=1e-06, elementwise_affine=True)
    """
    match choice:
        case spec.LayerNorm(eps, bias):
            return nn.LayerNorm(width, eps=eps, bias=bias)
        case spec.RMSNorm(eps):
            return nn.RMSNorm(width, eps=eps)
        case _:
            assert_never(choice)
