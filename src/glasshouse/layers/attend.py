"""Attention kernels without parameters: softmax(q k^T) v, fused or explicit, with the same results."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention

from glasshouse.layers import decode_attention
from glasshouse.layers.mask import Mask


def make_attend(scale: float, dropout: float, softcap: float | None) -> Fused | Explicit:
    """Build the fastest kernel for these settings: no fused one supports a soft-cap."""
    return Fused(scale, dropout) if softcap is None else Explicit(scale, dropout, softcap)


class Fused(nn.Module):
    """Torch's fused attention, or FlexAttention for block masks; attention weights are never materialised."""

    def __init__(self, scale: float, dropout: float) -> None:
        super().__init__()
        self.scale = scale
        self.dropout = dropout

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        """Attend with q [B, H, Q, d] over k and v [B, H_kv, K, d]; return [B, H, Q, d]."""
        grouped = q.shape[1] != k.shape[1]
        if mask.block_mask is not None:
            # Scaled here: FlexAttention compiles anew for each scale.
            return _flex()(q * self.scale, k, v, block_mask=mask.block_mask, scale=1.0, enable_gqa=grouped)
        if mask.key_counts is not None and mask.cache_rows is not None:
            return decode_attention.attend(q, k, v, mask.key_counts, mask.cache_rows, self.scale)
        dense = mask.dense
        if dense is not None and dense.is_floating_point():
            dense = dense.to(q.dtype)  # under autocast the two may differ
        if grouped and q.shape[2] == 1:
            return self.forward_folded(q, k, v, dense)
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=dense,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=mask.causal,
            scale=self.scale,
            enable_gqa=grouped,
        )

    def forward_folded(self, q: Tensor, k: Tensor, v: Tensor, dense: Tensor | None) -> Tensor:
        """Attend with one query per head, the heads of a group folded into queries: each key is loaded once."""
        folded = (q.shape[0], k.shape[1], -1, q.shape[3])
        if dense is not None and dense.shape[1] > 1:
            dense = dense.reshape(dense.shape[0], k.shape[1], -1, dense.shape[3])
        z = F.scaled_dot_product_attention(
            q.reshape(folded),
            k,
            v,
            attn_mask=dense,
            dropout_p=self.dropout if self.training else 0.0,
            scale=self.scale,
        )
        return z.reshape(q.shape)

    def extra_repr(self) -> str:
        return f"scale={self.scale:.4g}, dropout={self.dropout}"


class Explicit(nn.Module):
    """Attention with explicit scores and weights, which can be recorded and edited; slower than `Fused`."""

    def __init__(self, scale: float, dropout: float, softcap: float | None = None) -> None:
        super().__init__()
        self.scale = scale
        self.dropout = dropout
        self.softcap = softcap

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        """Attend with q [B, H, Q, d] over k and v [B, H_kv, K, d]; return [B, H, Q, d]."""
        weights = self.pattern(self.scores(q, k, mask)).to(v.dtype)
        return F.dropout(weights, self.dropout, self.training) @ repeat_kv(v, q.shape[1])

    def scores(self, q: Tensor, k: Tensor, mask: Mask) -> Tensor:
        """Return the softmax input, [B, H, Q, K]; -inf where a key is masked."""
        scores = (q * self.scale) @ repeat_kv(k, q.shape[1]).transpose(-2, -1)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))  # as in the fused kernels
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        visible = mask.to_dense(q.shape[2], k.shape[2], q.device)
        if visible is None:
            return scores
        return scores.masked_fill(~visible, -torch.inf) if visible.dtype == torch.bool else scores + visible

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


def _flex() -> Callable[..., Any]:
    return cast(Any, flex_attention) if torch.compiler.is_compiling() else _compiled_flex()


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    # Eager FlexAttention materialises the scores, so it stays compiled while hooks make the rest run eagerly, and
    # beyond eight shapes, torch's default recompile limit.
    more_recompiles = torch._dynamo.config.patch(recompile_limit=64)
    return cast(
        Callable[..., Any], torch.compiler.set_stance("default")(more_recompiles(torch.compile(flex_attention)))
    )
