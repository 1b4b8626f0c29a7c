"""The likeliest token of each row, and how likely a token is: on a GPU, rows are read in parts side by side."""

# ruff: noqa: ANN001, ANN202, N803 (Triton reads a kernel's annotations and names)
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

PART = 4096  # logits that one program reads

available = importlib.util.find_spec("triton") is not None  # it comes with torch for CUDA

if available:
    import triton
    import triton.language as tl

    @triton.jit
    def _read(x_ptr, top_ptr, place_ptr, sum_ptr, row_stride, length, parts, PART: tl.constexpr):
        row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
        places = part * PART + tl.arange(0, PART)
        x = tl.load(x_ptr + row * row_stride + places, mask=places < length, other=float("-inf")).to(tl.float32)
        top = tl.max(x, 0)
        place = tl.min(tl.where((x == top) & (places < length), places, length - 1), 0)  # the first of equals
        base = tl.where(top == float("-inf"), 0.0, top)  # else a difference of infinities
        out = row * parts + part
        tl.store(top_ptr + out, top)
        tl.store(place_ptr + out, place)
        tl.store(sum_ptr + out, tl.sum(tl.exp(x - base), 0))

    @triton.jit
    def _gather(top_ptr, place_ptr, sum_ptr, best_ptr, total_ptr, length, parts, PADDED: tl.constexpr):
        row = tl.program_id(0)
        part = tl.arange(0, PADDED)
        there = part < parts
        tops = tl.load(top_ptr + row * parts + part, mask=there, other=float("-inf"))
        places = tl.load(place_ptr + row * parts + part, mask=there, other=length)
        sums = tl.load(sum_ptr + row * parts + part, mask=there, other=0.0)
        top = tl.max(tops, 0)
        base = tl.where(top == float("-inf"), 0.0, top)
        best = tl.min(tl.where(tops == top, places, length - 1), 0)  # of numbers that are none, the last
        tl.store(best_ptr + row, best.to(tl.int64))
        tl.store(total_ptr + row, base + tl.log(tl.sum(sums * tl.exp(tops - base), 0)))


def argmax(logits: Tensor) -> Tensor:
    """Return the id of the largest of logits [..., V], the first of equals.

    >>> argmax(torch.tensor([[0.0, 3.0, 3.0], [0.0, 0.0, 0.0]]))
    tensor([1, 0])
    """
    return _survey(logits)[0] if _takes(logits) else logits.argmax(-1)


def token_logprobs(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the log-probabilities [n] of ids [n] by raw logits [n, V]: float32, or float64 as the logits.

    >>> token_logprobs(torch.tensor([[0.0, 0.0]]), torch.tensor([1])).exp()
    tensor([0.5000])
    """
    if _takes(logits):
        return logits.gather(-1, ids[:, None])[:, 0].float() - _survey(logits)[1]
    exact = logits if logits.dtype == torch.float64 else logits.float()
    return exact.log_softmax(-1).gather(-1, ids[:, None])[:, 0]


def _takes(logits: Tensor) -> bool:
    return available and logits.is_cuda and logits.dtype != torch.float64 and logits.stride(-1) == 1


def _survey(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the id of the largest of logits [..., V], and the logarithm of the sum of their exponentials."""
    rows = logits.reshape(-1, logits.shape[-1])
    count, length = rows.shape
    parts = -(-length // PART)
    top, total_of_part = rows.new_empty((2, count, parts), dtype=torch.float32)
    place = rows.new_empty((count, parts), dtype=torch.int32)
    best, total = rows.new_empty(count, dtype=torch.int64), rows.new_empty(count, dtype=torch.float32)
    _read[(count, parts)](rows, top, place, total_of_part, rows.stride(0), length, parts, PART=PART, num_warps=8)
    _gather[(count,)](top, place, total_of_part, best, total, length, parts, PADDED=triton.next_power_of_2(parts))
    return best.view(logits.shape[:-1]), total.view(logits.shape[:-1])
