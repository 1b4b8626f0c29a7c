"""Counter-based random numbers: each is a function of a seed, a step and a purpose, without state.

So a request samples the same tokens alone and in any batch, in any row of it.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # 2**64 over the golden ratio, as a signed number


class DrawPurpose(IntEnum):
    """What a random number is used for; each purpose has its own stream, so that draws stay independent."""

    SAMPLE = 0  # a token of the target model
    ACCEPT = 1  # whether to accept a draft token
    DRAFT = 2  # a draft token


def seed_state(seed: int) -> int:
    """Return the start of a seed on the SplitMix64 cycle; neighbouring seeds start at unrelated points."""
    return int(_mix(torch.tensor(seed) + GOLDEN))


def uniforms(streams: Tensor, steps: Tensor, purpose: DrawPurpose) -> Tensor:
    """Return a uniform random number in [0, 1) for each stream and step; the two are broadcast.

    They are float64 with 53 random bits, or float32 with 24 where the device has no float64 (Apple's).

    >>> one = uniforms(torch.tensor([seed_state(7)]), torch.tensor([3]), DrawPurpose.SAMPLE)
    >>> many = uniforms(torch.tensor([[seed_state(0)], [seed_state(7)]]), torch.arange(5), DrawPurpose.SAMPLE)
    >>> many.shape, bool(many[1, 3] == one)
    (torch.Size([2, 5]), True)
    """
    # SplitMix64 adds a constant and mixes, so its k-th number needs none of those before it.
    numbers = _mix(streams + (steps * len(DrawPurpose) + (purpose + 1)) * GOLDEN)
    bits, dtype = (24, torch.float32) if numbers.device.type == "mps" else (53, torch.float64)
    return _shifted(numbers, 64 - bits).to(dtype) * 2.0**-bits


def sample_categorical(weights: Tensor, numbers: Tensor) -> Tensor:
    """Sample ids [...] in proportion to weights [..., V] by inverse CDF, from uniform numbers in [0, 1) [...].

    Weights need not sum to 1. An id of weight 0 is never drawn; where all weights are 0, the first id is.

    >>> weights = torch.tensor([[0.0, 1.0, 3.0, 0.0]]).expand(3, 4)
    >>> sample_categorical(weights, torch.tensor([0.0, 0.25, 0.999])).tolist()
    [1, 2, 2]
    """
    sums = weights.cumsum(-1, dtype=numbers.dtype)
    ids = torch.searchsorted(sums, numbers[..., None] * sums[..., -1:], right=True)
    ids = ids.clamp(max=weights.shape[-1] - 1)
    # On a GPU rounding can make the sum grow at an id of weight 0: the argmax is taken then.
    real = weights.gather(-1, ids) > 0
    return torch.where(real, ids, weights.argmax(-1, keepdim=True)).squeeze(-1)


def _mix(x: Tensor) -> Tensor:
    """Apply the finalizer of SplitMix64, in integers that wrap around."""
    x = (x ^ _shifted(x, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ _shifted(x, 27)) * (0x94D049BB133111EB - 2**64)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift to the right and fill with zeros; torch's >> would fill with the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
