"""Writes to a KV cache on a GPU: keys and values of a layer, and a row of all layers, each as one kernel."""

# ruff: noqa: ANN001, ANN202, N803 (Triton reads a kernel's annotations and names)
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import importlib.util

from torch import Tensor

TILE = 2048  # numbers per program, at most
BLOCK = 4096  # numbers that a program copies

available = importlib.util.find_spec("triton") is not None  # it comes with torch for CUDA

if available:
    import triton
    import triton.language as tl

    @triton.jit(do_not_specialize=["length", "row_batch", "row_seq"])
    def _write(
        keys_ptr, values_ptr, row_ptr, offset_ptr, k_ptr, v_ptr, length,
        cache_row, cache_head, cache_seq, row_batch, row_seq, k_batch, k_head, k_seq, v_batch, v_head, v_seq,
        HEADS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        token = tl.program_id(0).to(tl.int64)
        batch, seq = token // length, token % length
        heads, columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[:, None], tl.arange(0, PADDED)[None, :]
        inside = (heads < HEADS) & (columns < WIDTH)
        row, offset = tl.load(row_ptr + batch * row_batch + seq * row_seq), tl.load(offset_ptr + token)
        at = row * cache_row + heads.to(tl.int64) * cache_head + offset * cache_seq + columns
        k = tl.load(k_ptr + batch * k_batch + heads * k_head + seq * k_seq + columns, mask=inside)
        v = tl.load(v_ptr + batch * v_batch + heads * v_head + seq * v_seq + columns, mask=inside)
        tl.store(keys_ptr + at, k.to(keys_ptr.dtype.element_ty), mask=inside)
        tl.store(values_ptr + at, v.to(values_ptr.dtype.element_ty), mask=inside)

    @triton.jit(do_not_specialize=["source", "target", "first", "count"])
    def _copy(
        pool_ptr, source, target, first, count, layer_stride, row_stride, head_stride,
        HEADS: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        layer, head = tl.program_id(0).to(tl.int64) // HEADS, tl.program_id(0).to(tl.int64) % HEADS
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        base = pool_ptr + layer * layer_stride + head * head_stride + first + at
        moved = tl.load(base + source.to(tl.int64) * row_stride, mask=at < count)
        tl.store(base + target.to(tl.int64) * row_stride, moved, mask=at < count)


def write_kv(keys: Tensor, values: Tensor, rows: Tensor, offsets: Tensor, k: Tensor, v: Tensor) -> None:
    """Write k and v [B, H_kv, S, d] to offsets [B, S] of rows, which broadcast to [B, S], of a layer's cache."""
    batch, heads, length, width = k.shape
    k, v = (one if one.stride(-1) == 1 else one.contiguous() for one in (k, v))
    rows = rows.expand(batch, length)
    padded, block, blocks = tile(heads, width)
    _write[(batch * length, blocks)](
        keys, values, rows, offsets.contiguous(), k, v, length,
        *keys.stride()[:3], *rows.stride(), *k.stride()[:3], *v.stride()[:3],
        HEADS=heads, WIDTH=width, PADDED=padded, BLOCK=block, num_warps=2,
    )  # fmt: skip


def copy_row(pool: Tensor, source: int, target: int, start: int, stop: int) -> None:
    """Copy offsets `start` to `stop` of a row of a contiguous pool [2, layers, B, H_kv, offsets, d]."""
    _, _, _, heads, _, width = pool.shape
    count = (stop - start) * width
    _copy[(pool.shape[0] * pool.shape[1] * heads, triton.cdiv(count, BLOCK))](
        pool, source, target, start * width, count, *pool.stride()[1:4], HEADS=heads, BLOCK=BLOCK
    )


def tile(heads: int, width: int) -> tuple[int, int, int]:
    """Return the padded width, the heads per program, and the programs per token."""
    padded = triton.next_power_of_2(width)
    block = min(triton.next_power_of_2(heads), max(1, TILE // padded))
    return padded, block, triton.cdiv(heads, block)
