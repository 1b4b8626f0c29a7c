"""Layer normalisation and RMS normalisation."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from glasshouse import registry, spec


class Norm(nn.Module):
    """Base class of norms, which inspection linearizes by `frozen`; gains start at 1 and biases at 0 by default.

    A norm with `scale` and `rescaled` has a site for its scale.
    """

    def scale(self, x: Tensor) -> Tensor:
        """Return what x [..., D] is divided by, [...]."""
        raise NotImplementedError

    def rescaled(self, x: Tensor, scale: Tensor) -> Tensor:
        """Normalise x [..., D] with a given scale [...]."""
        raise NotImplementedError

    def frozen(self, x: Tensor, direction: Tensor) -> tuple[Tensor, Tensor | float]:
        """Return a direction [B, D] after the norm as one before it, and a constant, frozen as it is for x [B, D].

        A vector v that is a part of x then adds v . direction to the product with the norm's output.
        """
        raise NotImplementedError


class LayerNorm(nn.LayerNorm, Norm):
    """Layer normalisation."""

    def scale(self, x: Tensor) -> Tensor:
        """Return the standard deviation."""
        return (_exact(x).var(-1, correction=0) + self.eps).sqrt()

    def rescaled(self, x: Tensor, scale: Tensor) -> Tensor:
        """Subtract the mean and divide by a given standard deviation [...]."""
        x = _exact(x)
        y = (x - x.mean(-1, keepdim=True)) / scale[..., None] * self.weight
        return y if self.bias is None else y + self.bias

    def frozen(self, x: Tensor, direction: Tensor) -> tuple[Tensor, Tensor | float]:
        """Freeze mean and variance."""
        scaled = direction * self.weight
        constant = 0.0 if self.bias is None else (direction * self.bias).sum(-1)
        return (scaled - scaled.mean(-1, keepdim=True)) / self.scale(x)[..., None], constant


class RMSNorm(nn.RMSNorm, Norm):
    """RMS normalisation."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., D]."""
        # Under autocast, queries and keys are in low precision; torch's fused kernel wants gain and input alike.
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)

    def scale(self, x: Tensor) -> Tensor:
        """Return the root mean square."""
        assert self.eps is not None  # a spec always sets it
        return (_exact(x).square().mean(-1) + self.eps).sqrt()

    def rescaled(self, x: Tensor, scale: Tensor) -> Tensor:
        """Divide by a given root mean square [...]."""
        return _exact(x) / scale[..., None] * self.weight

    def frozen(self, x: Tensor, direction: Tensor) -> tuple[Tensor, Tensor | float]:
        """Freeze the root mean square."""
        return direction * self.weight / self.scale(x)[..., None], 0.0


def _exact(x: Tensor) -> Tensor:
    """Return x in float32 at least, in which kernels normalise too: squares of float16 overflow above 256."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def make_norm(choice: spec.Norm, width: int) -> nn.Module:
    """Build the norm of a spec over the last axis of size `width`.

    >>> make_norm(spec.RMSNorm(), 64)
    RMSNorm((64,), eps=1e-06, elementwise_affine=True)
    """
    if (norm := registry.build(choice, Norm, choice, width)) is not None:
        return norm
    match choice:
        case spec.LayerNorm(eps, bias):
            return LayerNorm(width, eps=eps, bias=bias)
        case spec.RMSNorm(eps):
            return RMSNorm(width, eps=eps)
    raise AssertionError(choice)
