"""Soft-capping, of attention scores and of logits."""

from __future__ import annotations

import torch
from torch import Tensor


def softcap(x: Tensor, cap: float | None) -> Tensor:
    """Return cap * tanh(x / cap), which is near x for small x and between -cap and cap; x itself without a cap.

    >>> softcap(torch.tensor([0.1, 100.0]), 5.0)
    tensor([0.1000, 5.0000])
    """
    return x if cap is None else cap * torch.tanh(x / cap)
