"""Cross-entropy from hidden states and the unembedding matrix, without all logits in memory.

The logits of a chunk of tokens are made, turned into the loss and its gradient, and dropped: for a vocabulary of
50,257, those of 32,768 tokens would take 3.3 GB in bfloat16, and their gradient as much.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from glasshouse.objectives.loss.softmax_gradient import softmax_gradient

CHUNK_LOGITS = 2**30  # logits in memory at a time; 2 GiB in bfloat16
ALIGNED = 64  # a multiple of it as vocabulary makes every row of logits start at an aligned address


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """Return the cross-entropy of logits x @ weight.T + bias in nats, summed over targets that are not -100.

    x is [N, D], weight [V, D] and targets [N]. The gradient is computed with the loss, so there is no second one.

    >>> x, weight = torch.zeros(2, 4), torch.ones(8, 4)
    >>> loss = linear_cross_entropy(x, weight, None, torch.tensor([3, -100]))  # of eight equally likely classes
    >>> torch.isclose(loss.exp(), torch.tensor(8.0))
    tensor(True)
    """
    n_classes = len(weight)
    padding = -n_classes % ALIGNED
    if padding:  # their logits are masked
        weight = F.pad(weight, (0, 0, 0, padding))
        bias = bias if bias is None else F.pad(bias, (0, padding))
    result: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        x, weight, bias, targets, n_classes, label_smoothing, softcap, x.requires_grad, weight.requires_grad
    )
    return result


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        n_classes: int,
        smoothing: float,
        softcap: float | None,
        x_needs_grad: bool,
        weight_needs_grad: bool,
    ) -> Tensor:
        # On a GPU the compiler sees one operation: of a loop, it keeps the products of all chunks until their sum.
        compute = _compute_as_one if x.is_cuda else _compute
        loss, *grads = compute(
            x, weight, bias, targets, n_classes, smoothing, softcap, x_needs_grad, weight_needs_grad
        )
        needed = (x_needs_grad, weight_needs_grad, bias is not None)
        ctx.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.save_for_backward(*(grad if wanted else None for grad, wanted in zip(grads, needed, strict=True)))
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        grads = [
            None if grad is None else (grad * upstream).to(dtype)
            for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return (*grads, None, None, None, None, None, None)


def _compute(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    n_classes: int,
    smoothing: float,
    softcap: float | None,
    x_needs_grad: bool,
    weight_needs_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the loss, and its gradients for x, weight and bias; those that are not needed are empty."""
    exact = torch.promote_types(x.dtype, torch.float32)
    loss = torch.zeros((), dtype=exact, device=x.device)
    grads_x: list[Tensor] = []
    grad_weight = torch.zeros_like(weight, dtype=exact) if weight_needs_grad else loss.new_empty(0)
    grad_bias = loss.new_empty(0) if bias is None else torch.zeros_like(bias, dtype=exact)
    size = max(1, CHUNK_LOGITS // len(weight))
    for rows, wanted in zip(x.split(size), targets.split(size), strict=True):
        losses, gradient = softmax_gradient(F.linear(rows, weight, bias), wanted, n_classes, smoothing, softcap)
        loss += losses.sum()
        if bias is not None:
            grad_bias += gradient.sum(0, dtype=exact)
        if x_needs_grad:
            grads_x.append(gradient @ weight)
        if weight_needs_grad:
            grad_weight += gradient.T @ rows
        del gradient  # else it is in memory beside the logits of the next chunk
    return loss, torch.cat(grads_x) if x_needs_grad else x.new_empty(0), grad_weight, grad_bias


_compute_as_one = torch.library.custom_op("glasshouse::linear_cross_entropy", _compute, mutates_args=())


@_compute_as_one.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    n_classes: int,
    smoothing: float,
    softcap: float | None,
    x_needs_grad: bool,
    weight_needs_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    loss = x.new_empty((), dtype=torch.promote_types(x.dtype, torch.float32))
    return (
        loss,
        torch.empty_like(x, memory_format=torch.contiguous_format) if x_needs_grad else x.new_empty(0),
        torch.empty_like(weight, dtype=loss.dtype) if weight_needs_grad else loss.new_empty(0),
        loss.new_empty(0) if bias is None else torch.empty_like(bias, dtype=loss.dtype),
    )
