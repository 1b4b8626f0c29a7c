"""Attention of a few queries a row over a cache, on a GPU: reads no more of the cache than each row holds.

Torch's fused kernels read all that a cache has room for and hide the rest with a mask; when one token is written at
a time, reading the cache is most of the work.
"""

# ruff: noqa: ANN001, ANN202, N803 (Triton reads a kernel's annotations and names)
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import importlib.util
import math

import torch
from torch import Tensor

BLOCK = 64  # keys read at a time
MOST_ROWS = 64  # queries of a group of heads that one program works on
PROGRAMS = 264  # two for each multiprocessor of a large GPU: fewer programs leave it idle

available = importlib.util.find_spec("triton") is not None  # it comes with torch for CUDA

if available:
    import triton
    import triton.language as tl

    @triton.jit
    def _attend(
        q_ptr, k_ptr, v_ptr, seen_ptr, z_ptr, top_ptr, sum_ptr,
        q_batch, q_head, q_place, k_batch, k_head, k_place, v_batch, v_head, v_place,
        GROUP: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
        BLOCK: tl.constexpr, PARTS: tl.constexpr, EXACT: tl.constexpr, SCALE: tl.constexpr,
    ):  # fmt: skip
        batch, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        rows, columns = tl.arange(0, ROWS), tl.arange(0, PADDED)
        place, member = rows // GROUP, rows % GROUP  # all queries of the heads that share these keys
        real, inside = rows < GROUP * QUERIES, columns < WIDTH
        seen = tl.load(seen_ptr + batch * QUERIES + place, mask=real, other=0)  # keys that each query sees
        q_at = batch * q_batch + (head * GROUP + member) * q_head + place * q_place
        q = tl.load(q_ptr + q_at[:, None] + columns[None, :], mask=real[:, None] & inside[None, :], other=0.0)

        longest = tl.max(seen, 0)
        share = tl.cdiv(tl.cdiv(longest, BLOCK), PARTS) * BLOCK
        start, stop = part * share, tl.minimum((part + 1) * share, longest)
        top = tl.full([ROWS], -1e30, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        z = tl.zeros([ROWS, PADDED], tl.float32)
        k_base = k_ptr + batch.to(tl.int64) * k_batch + head * k_head
        v_base = v_ptr + batch.to(tl.int64) * v_batch + head * v_head
        for first in range(start, stop, BLOCK):
            keys = first + tl.arange(0, BLOCK)
            there = (keys < stop)[:, None] & inside[None, :]
            k = tl.load(k_base + keys[:, None] * k_place + columns[None, :], mask=there, other=0.0)
            v = tl.load(v_base + keys[:, None] * v_place + columns[None, :], mask=there, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee" if EXACT else "tf32") * SCALE  # in powers of two
            scores = tl.where((keys[None, :] < seen[:, None]) & (keys < stop)[None, :], scores, -1e30)
            higher = tl.maximum(top, tl.max(scores, 1))
            shrink = tl.exp2(top - higher)
            weights = tl.exp2(scores - higher[:, None])
            weights = tl.where(scores > -1e29, weights, 0.0)
            total = total * shrink + tl.sum(weights, 1)
            z = z * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee" if EXACT else "tf32")
            top = higher

        out = ((batch * tl.num_programs(1) + head) * PARTS + part) * ROWS + rows
        if PARTS == 1:
            z = z / tl.maximum(total, 1e-30)[:, None]
        else:
            tl.store(top_ptr + out, top)
            tl.store(sum_ptr + out, total)
        tl.store(z_ptr + out[:, None] * WIDTH + columns[None, :], z.to(z_ptr.dtype.element_ty), mask=inside[None, :])


def takes(device: torch.device, dtype: torch.dtype, rows: int) -> bool:
    """Whether there is a kernel for so many queries, those of all heads of a group together."""
    return available and device.type == "cuda" and dtype != torch.float64 and rows <= MOST_ROWS


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    """Attend with q [B, H, Q, d] over the first `seen` [B, Q] keys and values of k and v [B, H_kv, K, d]."""
    batch, heads, queries, width = q.shape
    group = heads // k.shape[1]
    rows = max(16, triton.next_power_of_2(group * queries))
    parts = max(1, min(PROGRAMS // (batch * k.shape[1]), -(-k.shape[2] // (2 * BLOCK))))
    shape = (batch, k.shape[1], parts, rows)
    z = torch.empty((*shape, width), device=q.device, dtype=q.dtype if parts == 1 else torch.float32)
    top, total = torch.empty((2, *(shape if parts > 1 else (0,))), device=q.device)
    _attend[(batch, k.shape[1], parts)](
        q, k, v, seen, z, top, total,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        GROUP=group, QUERIES=queries, ROWS=rows, WIDTH=width, PADDED=max(16, triton.next_power_of_2(width)),
        BLOCK=BLOCK, PARTS=parts, EXACT=q.dtype == torch.float32, SCALE=scale / math.log(2),
        num_warps=4, num_stages=3,
    )  # fmt: skip
    if parts == 1:
        z = z[:, :, 0]
    else:
        share = torch.exp2(top - top.amax(2, keepdim=True))  # each part has its own largest score
        z = (z * share[..., None]).sum(2) / (total * share).sum(2).clamp(min=1e-30)[..., None]
    z = z[:, :, : group * queries].view(batch, k.shape[1], queries, group, width)
    return z.transpose(2, 3).reshape(q.shape).to(q.dtype)
