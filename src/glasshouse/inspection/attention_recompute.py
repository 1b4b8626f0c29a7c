"""Scores and attention weights worked out from queries and keys: those asked for, a tile at a time.

The pass itself goes through a fused kernel, which never holds them.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from glasshouse.inspection.sites import Selection
from glasshouse.layers.attend import Explicit, Fused, repeat_kv
from glasshouse.layers.mask import Mask

TILE = {"cpu": 2**20, "cuda": 2**26}  # scores at once: on a CPU few enough to stay near the cores, on a GPU many


def softcap_of(attend: Fused | Explicit) -> float | None:
    """Return how far the scores of a kernel may go: the fused one knows no limit."""
    return attend.softcap if isinstance(attend, Explicit) else None


@torch.no_grad()
def recompute_attention(asked: Selection, attend: Fused | Explicit, q: Tensor, k: Tensor, mask: Mask) -> Tensor:
    """Return the part of the scores or of the pattern that is asked for, of q [B, H, Q, d] and k [B, H_kv, K, d].

    It is what `Explicit` gives, without what that holds on the way; there is no way back for gradients.
    """
    shape = (*q.shape[:3], k.shape[2])
    asked.check(shape)
    rows, heads, queries, keys = (
        # A single index is a span of one here, and gives its axis up in the end.
        range(size)[one if isinstance(one, slice) else slice(one, one + 1 or None)]
        for one, size in zip(asked.index, shape, strict=True)
    )
    group, exact = q.shape[1] // k.shape[1], torch.promote_types(q.dtype, torch.float32)
    made = q.new_empty((len(rows), len(heads), len(queries), len(keys)), dtype=exact)
    if made.numel():
        shared = range(heads.start // group, -(-heads.stop // group))  # the key heads of these
        q = q[_cut(rows), _cut(heads), _cut(queries)].to(exact) * attend.scale
        k = repeat_kv(k[_cut(rows), _cut(shared)].to(exact), len(shared) * group)
        k = k[:, heads.start % group :][:, : len(heads)].transpose(2, 3)
        most = TILE.get(q.device.type, TILE["cpu"])
        step = min(len(queries), max(1, most // shape[3]))
        for start in range(0, len(queries), step):
            seen = mask.to_dense(shape[2], shape[3], q.device, _cut(queries[start : start + step]))
            hiding = None if seen is None else _hiding(seen, q, rows, heads)
            some = max(1, most // (step * shape[3])) if step == len(queries) else 1  # heads
            for row, first in itertools.product(range(len(rows)), range(0, len(heads), some)):
                here = (row, slice(first, first + some), slice(start, start + step))
                room = made[here] if len(keys) == shape[3] else made.new_empty(made[here].shape[:2] + shape[3:])
                torch.bmm(q[here], k[row, here[1]], out=room)
                _finish(room, asked, softcap_of(attend), None if hiding is None else _of(hiding, row, here[1]))
                if len(keys) < shape[3]:
                    made[here] = room[..., _cut(keys)]
    return made[tuple(slice(None) if isinstance(one, slice) else 0 for one in asked.index)]


def _finish(scores: Tensor, asked: Selection, softcap: float | None, hiding: Tensor | None) -> None:
    """Make of products [H, Q, K] what the softmax receives, or what it gives, in place."""
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    if hiding is not None:
        scores.add_(hiding)
    if asked.site.hook_point == "pattern":
        torch.softmax(scores, -1, out=scores)
        if hiding is not None:  # of a row with nothing to see, a softmax makes NaN
            scores.masked_fill_((hiding == -torch.inf).all(-1, keepdim=True), 0)


def _hiding(seen: Tensor, like: Tensor, rows: range, heads: range) -> Tensor:
    """Return what a mask adds to scores, [B or 1, H or 1, Q, K], of some rows and heads: one where all are alike."""
    seen = seen[(None,) * (4 - seen.dim())]
    seen = seen[_cut(rows) if len(seen) > 1 else ...]
    seen = seen[:, _cut(heads)] if seen.shape[1] > 1 else seen
    if seen.dtype == torch.bool:
        seen = like.new_zeros(()).masked_fill(~seen, -torch.inf)
    return seen.to(like.dtype)


def _of(hiding: Tensor, row: int, heads: slice) -> Tensor:
    one = hiding[row if len(hiding) > 1 else 0]
    return one[heads] if len(one) > 1 else one


def _cut(span: range) -> slice:
    return slice(span.start, span.stop)
