"""Cross-entropy of logits whose vocabulary is split over processes; no process ever has all of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from glasshouse.models.heads import ShardedLogits
from glasshouse.objectives.loss.softmax_gradient import IGNORED


def vocabulary_parallel_cross_entropy(logits: ShardedLogits, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Return the cross-entropy in nats, summed over targets [N] that are not -100; the same in every process."""
    rows, first, n_classes, group = logits
    result: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        rows.flatten(0, -2), targets, first, n_classes, label_smoothing, group
    )
    return result


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        logits: Tensor,
        targets: Tensor,
        first: int,
        n_classes: int,
        smoothing: float,
        group: dist.ProcessGroup,
    ) -> Tensor:
        exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
        top = exact.amax(-1)
        dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        own = targets - first
        is_own = (own >= 0) & (own < logits.shape[1])
        wanted = exact.gather(1, own.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
        sums = torch.stack(
            [(exact - top[:, None]).exp().sum(-1), torch.where(is_own, wanted, 0), exact.sum(-1) / n_classes]
        )
        dist.all_reduce(sums, group=group)
        normalizer, counted = top + sums[0].log(), targets != IGNORED
        losses = torch.where(counted, normalizer - (1 - smoothing) * sums[1] - smoothing * sums[2], 0)

        gradient = (exact - normalizer[:, None]).exp() - smoothing / n_classes
        classes = torch.arange(logits.shape[1], device=logits.device)
        gradient = gradient - (classes == own[:, None]).to(exact.dtype) * (1 - smoothing)
        ctx.save_for_backward(torch.where(counted[:, None], gradient, 0).to(logits.dtype))
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        (gradient,) = ctx.saved_tensors
        return (gradient * upstream.to(gradient.dtype), None, None, None, None, None)
