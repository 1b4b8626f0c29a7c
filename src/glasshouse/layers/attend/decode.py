"""Decode attention over the KV cache on a GPU: loads only the cached keys of each sequence.

Torch's fused kernels load the whole allocated cache and mask the rest; in decoding, loading the cache is most of
the work.
"""

# ruff: noqa: ANN001, ANN202, N803 (Triton reads a kernel's annotations and names)
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import importlib.util
import math

import torch
from torch import Tensor

BLOCK = 64  # keys per iteration
MAX_ROWS = 64  # queries times heads of a group, per program
PROGRAMS = 264  # two per multiprocessor of a large GPU: fewer leave it idle
WARPS, STAGES = 2, 3

available = importlib.util.find_spec("triton") is not None  # it comes with torch for CUDA

if available:
    import triton
    import triton.language as tl

    @triton.jit
    def _attend(
        q_ptr, k_ptr, v_ptr, count_ptr, cache_row_ptr, z_ptr, top_ptr, sum_ptr,
        q_batch, q_head, q_seq, k_batch, k_head, k_seq, v_batch, v_head, v_seq,
        GROUP: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
        BLOCK: tl.constexpr, SPLITS: tl.constexpr, EXACT: tl.constexpr, SCALE: tl.constexpr,
    ):  # fmt: skip
        batch, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        heads = tl.num_programs(1)
        rows, columns = tl.arange(0, ROWS), tl.arange(0, PADDED)
        query, member = rows // GROUP, rows % GROUP  # all queries of the heads that share these keys
        real, inside = rows < GROUP * QUERIES, columns < WIDTH
        counts = tl.load(count_ptr + batch * QUERIES + query, mask=real, other=0)  # keys of each query
        q_at = batch * q_batch + (head * GROUP + member) * q_head + query * q_seq
        q = tl.load(q_ptr + q_at[:, None] + columns[None, :], mask=real[:, None] & inside[None, :], other=0.0)

        longest = tl.max(counts, 0)
        share = tl.cdiv(tl.cdiv(longest, BLOCK), SPLITS) * BLOCK
        start, stop = split * share, tl.minimum((split + 1) * share, longest)
        top = tl.full([ROWS], -1e30, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        z = tl.zeros([ROWS, PADDED], tl.float32)
        cache_row = tl.load(cache_row_ptr + batch).to(tl.int64)  # the row that these queries attend to
        k_base = k_ptr + cache_row * k_batch + head * k_head
        v_base = v_ptr + cache_row * v_batch + head * v_head
        for first in range(start, stop, BLOCK):
            keys = first + tl.arange(0, BLOCK)
            there = (keys < stop)[:, None] & inside[None, :]
            k = tl.load(k_base + keys[:, None] * k_seq + columns[None, :], mask=there, other=0.0)
            v = tl.load(v_base + keys[:, None] * v_seq + columns[None, :], mask=there, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee" if EXACT else "tf32") * SCALE  # base-2 exponents
            scores = tl.where((keys[None, :] < counts[:, None]) & (keys < stop)[None, :], scores, -1e30)
            higher = tl.maximum(top, tl.max(scores, 1))
            shrink = tl.exp2(top - higher)
            weights = tl.exp2(scores - higher[:, None])
            weights = tl.where(scores > -1e29, weights, 0.0)
            total = total * shrink + tl.sum(weights, 1)
            z = z * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee" if EXACT else "tf32")
            top = higher

        if SPLITS == 1:
            z = z / tl.maximum(total, 1e-30)[:, None]
            out = (batch * QUERIES + query) * heads * GROUP + head * GROUP + member
        else:
            out = ((batch * heads + head) * SPLITS + split) * ROWS + rows
            tl.store(top_ptr + out, top, mask=real)
            tl.store(sum_ptr + out, total, mask=real)
        there = real[:, None] & inside[None, :]
        tl.store(z_ptr + out[:, None] * WIDTH + columns[None, :], z.to(z_ptr.dtype.element_ty), mask=there)

    @triton.jit
    def _combine(
        split_ptr, top_ptr, sum_ptr, z_ptr,
        GROUP: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
        SPLITS: tl.constexpr,
    ):  # fmt: skip
        """Combine the splits of the keys, each with its own maximum score."""
        batch, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
        rows, columns = tl.arange(0, ROWS), tl.arange(0, PADDED)
        query, member = rows // GROUP, rows % GROUP
        real, inside = rows < GROUP * QUERIES, columns < WIDTH
        there = real[:, None] & inside[None, :]
        top = tl.full([ROWS], -1e30, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        z = tl.zeros([ROWS, PADDED], tl.float32)
        for split in range(SPLITS):
            at = ((batch * heads + head) * SPLITS + split) * ROWS + rows
            split_top = tl.load(top_ptr + at, mask=real, other=-1e30)
            higher = tl.maximum(top, split_top)
            shrink, share = tl.exp2(top - higher), tl.exp2(split_top - higher)
            total = total * shrink + tl.load(sum_ptr + at, mask=real, other=0.0) * share
            split_z = tl.load(split_ptr + at[:, None] * WIDTH + columns[None, :], mask=there, other=0.0)
            z = z * shrink[:, None] + split_z * share[:, None]
            top = higher
        z = z / tl.maximum(total, 1e-30)[:, None]
        out = (batch * QUERIES + query) * heads * GROUP + head * GROUP + member
        tl.store(z_ptr + out[:, None] * WIDTH + columns[None, :], z.to(z_ptr.dtype.element_ty), mask=there)


def is_supported(device: torch.device, dtype: torch.dtype, rows: int) -> bool:
    """Whether the kernel supports `rows` queries times heads of a group."""
    return available and device.type == "cuda" and dtype != torch.float64 and rows <= MAX_ROWS


# A custom op: torch.compile would pass pointers without their alignment, which halves the speed of the loads, so it
# must not trace the kernel.
@torch.library.custom_op("glasshouse::decode_attention", mutates_args=())
def decode_attention(q: Tensor, k: Tensor, v: Tensor, key_counts: Tensor, rows: Tensor, scale: float) -> Tensor:
    """Attend with q [N, H, Q, d] over the first `key_counts` [N, Q] keys of cache rows [N]; return [N, Q, H, d]."""
    count, heads, queries, width = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    padded_rows = max(16, triton.next_power_of_2(group * queries))
    splits = max(1, min(PROGRAMS // (count * kv_heads), -(-k.shape[2] // (2 * BLOCK))))
    sizes = {
        "GROUP": group,
        "QUERIES": queries,
        "ROWS": padded_rows,
        "WIDTH": width,
        "PADDED": max(16, triton.next_power_of_2(width)),
        "SPLITS": splits,
    }
    z = q.new_empty(count, queries, heads, width)
    piece = z if splits == 1 else q.new_empty((count, kv_heads, splits, padded_rows, width), dtype=torch.float32)
    top, total = q.new_empty((2, *(piece.shape[:-1] if splits > 1 else (0,))), dtype=torch.float32)
    _attend[(count, kv_heads, splits)](
        q, k, v, key_counts, rows, piece, top, total,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        BLOCK=BLOCK, EXACT=q.dtype == torch.float32, SCALE=scale / math.log(2), **sizes,
        num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    if splits > 1:
        _combine[(count, kv_heads)](piece, top, total, z, **sizes)
    return z


@decode_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, key_counts: Tensor, rows: Tensor, scale: float) -> Tensor:
    count, heads, queries, width = q.shape
    return q.new_empty(count, queries, heads, width)


def attend(q: Tensor, k: Tensor, v: Tensor, key_counts: Tensor, rows: Tensor, scale: float) -> Tensor:
    """Attend with q [B, H, Q, d] over the first `key_counts` [B, Q] keys of rows of k and v [*, H_kv, K, d].

    `rows` [B] is the row of k and v that each row of queries attends to; or, [1, Q] with B = 1, that of each query.
    """
    if rows.dim() == 2:
        z: Tensor = decode_attention(q.permute(2, 1, 0, 3), k, v, key_counts.T.contiguous(), rows[0], scale)
        return z.permute(1, 2, 0, 3)
    z = decode_attention(q, k, v, key_counts.contiguous(), rows, scale)
    return z.transpose(1, 2)
