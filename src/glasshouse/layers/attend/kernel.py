"""The attention of a layer without its projections: softmax(q k^T) v, computed by a backend chosen for each call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from glasshouse.layers.attend.mask import Mask
from glasshouse.layers.softcap import softcap


@dataclass(frozen=True)
class Situation:
    """What the choice of a backend depends on: the mask of a call, its sizes, and the settings of the layers."""

    mask: Mask
    n_queries: int
    n_keys: int
    device: torch.device
    dtype: torch.dtype
    d_head: int
    group_size: int = 1  # query heads per KV head
    softcap: bool = False
    dropout: bool = False  # attention dropout is active
    cached: bool = False  # keys and values come from a KV cache


@dataclass(frozen=True)
class Backend(ABC):
    """An attention kernel, with the mask of a call in the form that the kernel takes (layers/attend/backends.py)."""

    name: ClassVar[str]
    mask: Mask

    @staticmethod
    @abstractmethod
    def supports(s: Situation) -> bool:
        """Whether the kernel can be used, and is worth it."""

    @classmethod
    @abstractmethod
    def prepare(cls, s: Situation) -> Self:
        """Convert the mask, once for all layers that have it."""

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, settings: Attend) -> Tensor:
        """Attend with q [B, H, Q, d] over k and v [B, H_kv, K, d]; return [B, H, Q, d]."""


class Attend(nn.Module):
    """Attention over given queries, keys and values; it has no parameters."""

    def __init__(self, scale: float, dropout: float, softcap: float | None = None) -> None:
        super().__init__()
        self.scale = scale
        self.dropout = dropout
        self.softcap = softcap

    def forward(self, q: Tensor, k: Tensor, v: Tensor, backend: Backend) -> Tensor:
        """Attend with q [B, H, Q, d] over k and v [B, H_kv, K, d]; return [B, H, Q, d]."""
        return backend.attend(q, k, v, self)

    @property
    def dropout_now(self) -> float:
        """The probability of dropout: 0 outside training."""
        return self.dropout if self.training else 0.0

    def scores(self, q: Tensor, k: Tensor, dense: Tensor | None) -> Tensor:
        """Return the softmax input, [B, H, Q, K], with a dense mask; -inf where a key is masked."""
        scores = (q * self.scale) @ repeat_kv(k, q.shape[1]).transpose(-2, -1)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))  # as in the fused kernels
        scores = softcap(scores, self.softcap)
        if dense is None:
            return scores
        return scores.masked_fill(~dense, -torch.inf) if dense.dtype == torch.bool else scores + dense

    def pattern(self, scores: Tensor) -> Tensor:
        """Return the attention weights; 0 for a query whose keys are all masked, where softmax gives NaN."""
        # The maximum is subtracted first, as exp would overflow; it is clamped for a row of -inf. exp(0) of the
        # maximum is part of the sum, so a sum below 1 is that of a fully masked row.
        top = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)
        weights = torch.exp(scores - top.detach())
        return weights / weights.sum(-1, keepdim=True).clamp(min=1)

    def extra_repr(self) -> str:
        return f"scale={self.scale:.4g}, dropout={self.dropout}, softcap={self.softcap}"


def repeat_kv(kv: Tensor, n_heads: int) -> Tensor:
    """Repeat key or value heads [B, H_kv, K, d] for the query heads of their groups, [B, H, K, d]."""
    return kv.repeat_interleave(n_heads // kv.shape[1], dim=1)
