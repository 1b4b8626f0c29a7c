"""Attention scores and weights recomputed from queries and keys, only the requested ones and a tile at a time.

The forward pass itself uses a fused kernel, which never materializes them. A map keeps the queries and keys of a
call, from which any slice is computed later.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from glasshouse.inspection.sites import Index, Selection, Site
from glasshouse.layers.attend.kernel import Attend, repeat_kv
from glasshouse.layers.attend.mask import Mask

TILE = {"cpu": 2**20, "cuda": 2**26}  # scores at once: on a CPU few enough for its caches, on a GPU many
EVERY = slice(None)


class AttendCall(NamedTuple):
    """The attention of a layer and its arguments in one call."""

    attend: Attend
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask
    backend: str  # its name


@dataclass(frozen=True, eq=False)
class AttentionMap:
    """The attention of one layer in one call; it stores queries and keys, not their products, to save memory."""

    site: Site
    kernel: AttendCall

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Batch, heads, queries and keys."""
        q, k = self.kernel.q, self.kernel.k
        return (q.shape[0], q.shape[1], q.shape[2], k.shape[2])

    @property
    def n_bytes(self) -> int:
        """Memory of queries, keys, values and bias, which are most of it."""
        tensors = [self.kernel.q, self.kernel.k, self.kernel.v, self.kernel.mask.bias]
        return sum(one.numel() * one.element_size() for one in tensors if one is not None)

    def weights(self, head: Index = EVERY, query: Index = EVERY, key: Index = EVERY) -> Tensor:
        """Return attention weights [B, head, query, key]; an integer index removes its axis."""
        return self._part("pattern", head, query, key)

    def scores(self, head: Index = EVERY, query: Index = EVERY, key: Index = EVERY) -> Tensor:
        """Return the input of the softmax, [B, head, query, key]."""
        return self._part("scores", head, query, key)

    def _part(self, point: str, head: Index, query: Index, key: Index) -> Tensor:
        site = replace(self.site, hook_point=point)  # type: ignore[arg-type]
        attend, q, k, _, mask, _ = self.kernel
        return recompute_attention(Selection(site, (EVERY, head, query, key)), attend, q, k, mask)


@torch.no_grad()
def recompute_attention(selection: Selection, attend: Attend, q: Tensor, k: Tensor, mask: Mask) -> Tensor:
    """Return the selected slice of the scores or the pattern of q [B, H, Q, d] and k [B, H_kv, K, d].

    The result is that of the explicit backend, with less memory and without gradients.
    """
    shape = (*q.shape[:3], k.shape[2])
    selection.check(shape)
    rows, heads, queries, keys = (
        # An integer index is a range of one here; its axis is removed at the end.
        range(size)[one if isinstance(one, slice) else slice(one, one + 1 or None)]
        for one, size in zip(selection.index, shape, strict=True)
    )
    group, exact = q.shape[1] // k.shape[1], torch.promote_types(q.dtype, torch.float32)
    result = q.new_empty((len(rows), len(heads), len(queries), len(keys)), dtype=exact)
    if result.numel():
        shared = range(heads.start // group, -(-heads.stop // group))  # the KV heads of these query heads
        q = q[_as_slice(rows), _as_slice(heads), _as_slice(queries)].to(exact) * attend.scale
        k = repeat_kv(k[_as_slice(rows), _as_slice(shared)].to(exact), len(shared) * group)
        k = k[:, heads.start % group :][:, : len(heads)].transpose(2, 3)
        max_scores = TILE.get(q.device.type, TILE["cpu"])
        step = min(len(queries), max(1, max_scores // shape[3]))
        for start in range(0, len(queries), step):
            dense = mask.to_dense(shape[2], shape[3], q.device, _as_slice(queries[start : start + step]))
            bias = None if dense is None else _mask_bias(dense, q, rows, heads)
            n_heads = max(1, max_scores // (step * shape[3])) if step == len(queries) else 1
            for row, first in itertools.product(range(len(rows)), range(0, len(heads), n_heads)):
                tile = (row, slice(first, first + n_heads), slice(start, start + step))
                out = result[tile] if len(keys) == shape[3] else result.new_empty(result[tile].shape[:2] + shape[3:])
                torch.bmm(q[tile], k[row, tile[1]], out=out)
                _finish(out, selection, attend.softcap, None if bias is None else _bias_of(bias, row, tile[1]))
                if len(keys) < shape[3]:
                    result[tile] = out[..., _as_slice(keys)]
    return result[tuple(slice(None) if isinstance(one, slice) else 0 for one in selection.index)]


def _finish(scores: Tensor, selection: Selection, softcap: float | None, bias: Tensor | None) -> None:
    """Turn products [H, Q, K] into the input of the softmax, or its output, in place."""
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    if bias is not None:
        scores.add_(bias)
    if selection.site.hook_point == "pattern":
        torch.softmax(scores, -1, out=scores)
        if bias is not None:  # the softmax of a fully masked query is NaN
            scores.masked_fill_((bias == -torch.inf).all(-1, keepdim=True), 0)


def _mask_bias(mask: Tensor, like: Tensor, rows: range, heads: range) -> Tensor:
    """Return what a mask adds to the scores of some rows and heads, [B or 1, H or 1, Q, K]."""
    mask = mask[(None,) * (4 - mask.dim())]
    mask = mask[_as_slice(rows) if len(mask) > 1 else ...]
    mask = mask[:, _as_slice(heads)] if mask.shape[1] > 1 else mask
    if mask.dtype == torch.bool:
        mask = like.new_zeros(()).masked_fill(~mask, -torch.inf)
    return mask.to(like.dtype)


def _bias_of(bias: Tensor, row: int, heads: slice) -> Tensor:
    one = bias[row if len(bias) > 1 else 0]
    return one[heads] if len(one) > 1 else one


def _as_slice(span: range) -> slice:
    return slice(span.start, span.stop)
