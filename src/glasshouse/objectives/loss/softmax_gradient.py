"""Cross-entropy of logits and its gradient in one pass over memory: a Triton kernel on a GPU, else by torch."""

# ruff: noqa: ANN001, ANN202, N803 (Triton reads a kernel's annotations and names)
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from glasshouse.layers.softcap import softcap

IGNORED = -100  # ignore_index of cross_entropy
BLOCK, WARPS = 2048, 4  # logits of a row per iteration

available = importlib.util.find_spec("triton") is not None  # it comes with torch for CUDA

if available:
    import triton
    import triton.language as tl

    @triton.jit
    def _load(row_ptr, columns, width, CAP: tl.constexpr):
        x = tl.load(row_ptr + columns, mask=columns < width, other=0.0).to(tl.float32)
        return CAP * (2 * tl.sigmoid(2 / CAP * x) - 1) if CAP > 0 else x  # CAP * tanh(x / CAP)

    @triton.jit
    def _kernel(
        logits_ptr, target_ptr, loss_ptr, width, n_classes, smoothing,
        CAP: tl.constexpr, BLOCK: tl.constexpr, IGNORED: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        target = tl.load(target_ptr + row)
        counted = target != IGNORED
        logits_row = logits_ptr + row * width
        top, total, sum_of_logits = float("-inf"), 0.0, 0.0
        for start in range(0, width, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            # `width` is a multiple of 16, which lets the loads be wide; `n_classes` is applied to what was loaded.
            x = _load(logits_row, columns, width, CAP)
            x = tl.where(columns < n_classes, x, float("-inf"))
            new_top = tl.maximum(top, tl.max(x, 0))
            total = total * tl.exp(top - new_top) + tl.sum(tl.exp(x - new_top), 0)
            sum_of_logits += tl.sum(tl.where(columns < n_classes, x, 0.0), 0)
            top = new_top
        normalizer = top + tl.log(total)
        wanted = _load(logits_row, tl.where(counted, target, 0), width, CAP)
        loss = normalizer - (1 - smoothing) * wanted - smoothing * sum_of_logits / n_classes
        tl.store(loss_ptr + row, tl.where(counted, loss, 0.0))
        for start in range(0, width, BLOCK):  # the row is still in the L2 cache
            columns = start + tl.arange(0, BLOCK)
            x = _load(logits_row, columns, width, CAP)
            gradient = tl.exp(x - normalizer) - smoothing / n_classes
            gradient = tl.where(columns == target, gradient - (1 - smoothing), gradient)
            gradient = tl.where(counted & (columns < n_classes), gradient, 0.0)
            if CAP > 0:
                gradient *= 1 - (x / CAP) * (x / CAP)
            tl.store(logits_row + columns, gradient.to(logits_ptr.dtype.element_ty), mask=columns < width)


def softmax_gradient(
    logits: Tensor, targets: Tensor, n_classes: int, smoothing: float, cap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy of each row of logits [N, V], and the gradient of their sum, [N, V].

    With a cap they are soft-capped, and the gradient is of the logits before. Only the first `n_classes` logits of a
    row count; a row whose target is -100 has neither loss nor gradient. On a GPU, the gradient takes the place of
    the logits.

    >>> losses, gradient = softmax_gradient(torch.zeros(1, 4), torch.tensor([1]), n_classes=2, smoothing=0.0)
    >>> losses.exp(), gradient
    (tensor([2.]), tensor([[ 0.5000, -0.5000,  0.0000,  0.0000]]))
    """
    if available and logits.is_cuda and logits.dtype != torch.float64:
        return _by_kernel(logits, targets, n_classes, smoothing, cap)
    exact = softcap(logits.to(torch.promote_types(logits.dtype, torch.float32)), cap)
    classes, counted = torch.arange(logits.shape[1], device=logits.device), targets[:, None] != IGNORED
    normalizer = torch.where(classes < n_classes, exact, -torch.inf).logsumexp(-1, keepdim=True)
    wanted = exact.gather(1, targets[:, None].clamp(min=0))
    mean = exact[:, :n_classes].mean(-1, keepdim=True)
    losses = torch.where(counted, normalizer - (1 - smoothing) * wanted - smoothing * mean, 0)
    share = (classes == targets[:, None]).to(exact.dtype) * (1 - smoothing) + smoothing / n_classes
    gradient = torch.where(counted & (classes < n_classes), (exact - normalizer).exp() - share, 0)
    gradient = gradient if cap is None else gradient * (1 - (exact / cap) ** 2)
    return losses[:, 0], gradient.to(logits.dtype)


def _by_kernel(
    logits: Tensor, targets: Tensor, n_classes: int, smoothing: float, cap: float | None
) -> tuple[Tensor, Tensor]:
    losses, width = logits.new_empty(len(logits), dtype=torch.float32), logits.shape[1]
    inputs = (logits, targets, losses, width, n_classes, smoothing)
    _kernel[(len(logits),)](*inputs, CAP=cap or 0.0, BLOCK=BLOCK, IGNORED=IGNORED, num_warps=WARPS)
    return losses, logits
