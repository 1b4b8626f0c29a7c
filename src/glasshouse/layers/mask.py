"""Which keys a query may see: one rule, drawn in the form that the kernel at hand takes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from glasshouse.layers.layout import Layout

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # batch, head, query, key -> may see


@dataclass(frozen=True)
class Mask:
    """The same rule in one of four forms: nothing to hide, plain causal order, a dense tensor, or blocks."""

    causal: bool = False  # each query sees the keys up to its own place, and the kernel knows how
    dense: Tensor | None = None  # broadcasts to [B, H, Q, K]: bool, True where seen; or float, to be added
    blocks: BlockMask | None = None  # FlexAttention's form, for a rule too large to draw


def make_mask(
    queries: Layout,
    keys: Layout,
    *,
    causal: bool,
    window: int = 0,
    bias: Tensor | None = None,
    flex: bool = False,
) -> Mask:
    """Draw the mask of one attention layer; `flex` allows blocks, where a dense mask would be large.

    >>> row = Layout(torch.arange(3)[None])
    >>> make_mask(row, row, causal=True)
    Mask(causal=True, dense=None, blocks=None)
    >>> make_mask(row, row, causal=True, window=2).dense.long()
    tensor([[[[1, 0, 0],
              [1, 1, 0],
              [0, 1, 1]]]])
    """
    same = queries is keys
    n_queries, n_keys = queries.positions.shape[1], keys.positions.shape[1]
    if same and window >= n_keys:
        window = 0  # wider than the text
    # Padding at the end lies in the future of every real token, so the causal order hides it already.
    hidden = keys.real is not None and not (same and causal and keys.trailing and queries.prefix is None)
    packed = queries.documents is not None and keys.documents is not None
    if not (hidden or packed or window or (causal and (queries.prefix is not None or not same))):
        if bias is None:
            return Mask(causal=causal)
        if not causal:
            return Mask(dense=bias)

    batch = max(len(t) for layout in (queries, keys) for t in _tensors(layout))
    rule = _rule(queries, keys, batch, causal=causal, window=window, hidden=hidden, packed=packed)
    if flex and bias is None and (packed or window) and queries.positions.is_cuda:
        draw = create_block_mask if torch.compiler.is_compiling() else _compiled_draw()
        return Mask(blocks=draw(rule, batch if batch > 1 else None, None, n_queries, n_keys))
    b, q, k = (torch.arange(n, device=queries.positions.device) for n in (batch, n_queries, n_keys))
    seen = rule(b[:, None, None, None], b[:1], q[:, None], k)
    if bias is not None:
        return Mask(dense=bias.masked_fill(~seen, -torch.inf))
    return Mask(dense=seen)


def _rule(
    queries: Layout, keys: Layout, batch: int, *, causal: bool, window: int, hidden: bool, packed: bool
) -> Rule:
    # Rows of one batch may share one row of positions; the rule indexes by row, so that one is spread over all.
    q_position, k_position = queries.positions.expand(batch, -1), keys.positions.expand(batch, -1)

    def rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = []
        if causal:
            behind = k_position[b, k] <= q_position[b, q]
            if queries.prefix is not None:
                prefix = queries.prefix[b, q]
                behind = behind | ((q_position[b, q] < prefix) & (k_position[b, k] < prefix))
            seen.append(behind)
        if window:
            seen.append((k_position[b, k] - q_position[b, q]).abs() < window)
        if hidden:
            assert keys.real is not None
            seen.append(keys.real[b, k])
        if packed:
            assert queries.documents is not None
            assert keys.documents is not None
            seen.append(queries.documents[b, q] == keys.documents[b, k])
        return functools.reduce(torch.logical_and, seen)

    return rule


def _tensors(layout: Layout) -> list[Tensor]:
    return [t for t in (layout.positions, layout.real, layout.documents, layout.prefix) if t is not None]


@functools.cache
def _compiled_draw() -> Callable[..., Any]:
    return torch.compile(create_block_mask)  # uncompiled, it would draw the dense mask first
