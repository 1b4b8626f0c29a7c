"""Triton kernels for the argmax and the log-sum-exp of logits, which split each row over several programs."""

# ruff: noqa: ANN001, ANN202, N803 (Triton reads a kernel's annotations and names)
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

BLOCK, TOP_BLOCK = 4096, 1024  # logits per program; where the largest are wanted, those of few blocks are sorted

available = importlib.util.find_spec("triton") is not None  # it comes with torch for CUDA

if available:
    import triton
    import triton.language as tl

    @triton.jit
    def _reduce_block(x_ptr, max_ptr, argmax_ptr, sum_ptr, row_stride, length, n_blocks, BLOCK: tl.constexpr):
        row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
        columns = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * row_stride + columns, mask=columns < length, other=float("-inf")).to(tl.float32)
        top = tl.max(x, 0)
        index = tl.min(tl.where((x == top) & (columns < length), columns, length - 1), 0)  # the first on ties
        base = tl.where(top == float("-inf"), 0.0, top)  # avoids inf - inf
        out = row * n_blocks + block
        tl.store(max_ptr + out, top)
        tl.store(argmax_ptr + out, index)
        tl.store(sum_ptr + out, tl.sum(tl.exp(x - base), 0))

    @triton.jit
    def _combine_blocks(max_ptr, argmax_ptr, sum_ptr, best_ptr, lse_ptr, length, n_blocks, PADDED: tl.constexpr):
        row = tl.program_id(0)
        block = tl.arange(0, PADDED)
        valid = block < n_blocks
        tops = tl.load(max_ptr + row * n_blocks + block, mask=valid, other=float("-inf"))
        indices = tl.load(argmax_ptr + row * n_blocks + block, mask=valid, other=length)
        sums = tl.load(sum_ptr + row * n_blocks + block, mask=valid, other=0.0)
        top = tl.max(tops, 0)
        base = tl.where(top == float("-inf"), 0.0, top)
        best = tl.min(tl.where(tops == top, indices, length - 1), 0)  # for NaN, the last
        tl.store(best_ptr + row, best.to(tl.int64))
        tl.store(lse_ptr + row, base + tl.log(tl.sum(sums * tl.exp(tops - base), 0)))


def argmax(logits: Tensor) -> Tensor:
    """Return the argmax of logits [..., V], the first on ties.

    >>> argmax(torch.tensor([[0.0, 3.0, 3.0], [0.0, 0.0, 0.0]]))
    tensor([1, 0])
    """
    return _argmax_and_lse(logits)[0] if _is_supported(logits) else logits.argmax(-1)


def token_logprobs(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the log-probabilities of ids [n] or [n, k] by raw logits [n, V]: float32, or float64 as the logits.

    >>> token_logprobs(torch.tensor([[0.0, 0.0]]), torch.tensor([1])).exp()
    tensor([0.5000])
    """
    listed = ids.reshape(len(ids), -1)
    if _is_supported(logits):
        logprobs = logits.gather(1, listed).float() - _argmax_and_lse(logits)[1][:, None]
    else:
        exact = logits if logits.dtype == torch.float64 else logits.float()
        logprobs = exact.log_softmax(1).gather(1, listed)
    return logprobs.view_as(ids)


def top_logprobs(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest log-probabilities [n, k] by raw logits [n, V], largest first, and their ids [n, k].

    >>> top_logprobs(torch.tensor([[0.0, 2.0, 1.0]]), 2)[1]
    tensor([[1, 2]])
    """
    if _is_supported(logits):
        return _top_of_blocks(logits, min(k, logits.shape[-1]))
    exact = logits if logits.dtype == torch.float64 else logits.float()
    values, ids = exact.log_softmax(-1).topk(min(k, logits.shape[-1]))
    return values, ids


def _is_supported(logits: Tensor) -> bool:
    return available and logits.is_cuda and logits.dtype != torch.float64 and logits.stride(-1) == 1


def _argmax_and_lse(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the argmax and the log-sum-exp of logits [..., V]."""
    _, best, lse = _reduce(logits.reshape(-1, logits.shape[-1]), BLOCK)
    return best.view(logits.shape[:-1]), lse.view(logits.shape[:-1])


def _top_of_blocks(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest log-probabilities [n, k] and their ids, which are in the k blocks of largest maxima."""
    length = logits.shape[-1]
    block_max, _, lse = _reduce(logits, TOP_BLOCK)
    blocks = block_max.topk(min(k, block_max.shape[1])).indices
    ids = (blocks[..., None] * TOP_BLOCK + torch.arange(TOP_BLOCK, device=logits.device)).flatten(1)
    found = logits.gather(1, ids.clamp(max=length - 1)).float().masked_fill(ids >= length, float("-inf"))
    values, places = found.topk(k)
    return values - lse[:, None], ids.gather(1, places)


def _reduce(rows: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return each block's maximum [n, V / size] of rows [n, V], and each row's argmax and log-sum-exp [n]."""
    count, length = rows.shape
    n_blocks = -(-length // size)
    block_max, block_sum = rows.new_empty((2, count, n_blocks), dtype=torch.float32)
    block_argmax = rows.new_empty((count, n_blocks), dtype=torch.int32)
    best, lse = rows.new_empty(count, dtype=torch.int64), rows.new_empty(count, dtype=torch.float32)
    blocks = block_max, block_argmax, block_sum
    warps = max(1, size // 512)
    _reduce_block[(count, n_blocks)](rows, *blocks, rows.stride(0), length, n_blocks, BLOCK=size, num_warps=warps)
    _combine_blocks[(count,)](*blocks, best, lse, length, n_blocks, PADDED=triton.next_power_of_2(n_blocks))
    return block_max, best, lse
