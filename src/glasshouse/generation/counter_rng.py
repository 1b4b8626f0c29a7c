"""Chance without a state: the number behind a draw follows from a seed, a step and a use, and from nothing else.

So a request draws the same tokens alone and in any batch, in any row of it, today and tomorrow.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # 2**64 over the golden ratio, as a signed number


class DrawPurpose(IntEnum):
    """What a number is drawn for; each use has its own, as a number used twice would tie two draws together."""

    SAMPLE = 0  # a token of the model's own
    ACCEPT = 1  # whether a draft stays
    DRAFT = 2  # a draft


def seed_state(seed: int) -> int:
    """Return where a seed's numbers start on the one cycle of SplitMix64: neighbouring seeds, at unrelated places."""
    return int(_mix(torch.tensor(seed) + GOLDEN))


def uniforms(streams: Tensor, steps: Tensor, use: DrawPurpose) -> Tensor:
    """Return a number in [0, 1) for each stream and step; the two are broadcast.

    They are float64 with 53 random bits, or float32 with 24 where the device has no float64 (Apple's).

    >>> one = uniforms(torch.tensor([seed_state(7)]), torch.tensor([3]), DrawPurpose.SAMPLE)
    >>> many = uniforms(torch.tensor([[seed_state(0)], [seed_state(7)]]), torch.arange(5), DrawPurpose.SAMPLE)
    >>> many.shape, bool(many[1, 3] == one)
    (torch.Size([2, 5]), True)
    """
    # SplitMix64, one step of which is a sum and a mixing: its k-th number is found without those before it.
    numbers = _mix(streams + (steps * len(DrawPurpose) + (use + 1)) * GOLDEN)
    bits, dtype = (24, torch.float32) if numbers.device.type == "mps" else (53, torch.float64)
    return _shifted(numbers, 64 - bits).to(dtype) * 2.0**-bits


def sample_categorical(weights: Tensor, numbers: Tensor) -> Tensor:
    """Return the ids [...] that numbers in [0, 1) [...] fall on, where an id takes its share of the weights [..., V].

    Weights need not add up to 1. An id of weight 0 is never drawn; where all weigh 0, the first id is.

    >>> weights = torch.tensor([[0.0, 1.0, 3.0, 0.0]]).expand(3, 4)
    >>> sample_categorical(weights, torch.tensor([0.0, 0.25, 0.999])).tolist()
    [1, 2, 2]
    """
    sums = weights.cumsum(-1, dtype=numbers.dtype)
    ids = torch.searchsorted(sums, numbers[..., None] * sums[..., -1:], right=True)
    ids = ids.clamp(max=weights.shape[-1] - 1)
    # A GPU adds in an order of its own, and a sum may grow by a rounding where nothing was added: the likeliest then.
    real = weights.gather(-1, ids) > 0
    return torch.where(real, ids, weights.argmax(-1, keepdim=True)).squeeze(-1)


def _mix(x: Tensor) -> Tensor:
    """Spread each bit over all others: the finalizer of SplitMix64, in integers that wrap around."""
    x = (x ^ _shifted(x, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ _shifted(x, 27)) * (0x94D049BB133111EB - 2**64)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, places: int) -> Tensor:
    """Shift to the right and fill with zeros; torch's own >> would fill with the sign."""
    return (x >> places) & ((1 << (64 - places)) - 1)
