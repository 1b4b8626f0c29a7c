"""The loss: cross-entropy at the positions of the loss mask. Most objectives differ only in their batches.

There is no host sync and no branch on values here, so that `torch.compile` can take model and loss as one graph.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from glasshouse.data import Batch
from glasshouse.models.heads import ShardedLogits, Unprojected
from glasshouse.objectives.loss.linear import linear_cross_entropy
from glasshouse.objectives.loss.softmax_gradient import IGNORED
from glasshouse.objectives.loss.vocabulary_parallel import vocabulary_parallel_cross_entropy

LossFn = Callable[[nn.Module, Batch, float], Tensor]  # of model, batch and label smoothing; a sum over targets


def compute_loss(model: nn.Module, batch: Batch, smoothing: float = 0.0) -> Tensor:
    """Return the cross-entropy in nats, summed over the positions of the loss mask.

    Next tokens, masked tokens, targets of a source, labels and the assistant's turns of a conversation share this
    loss: the batch has the inputs, the targets and the loss mask. `smoothing` is label smoothing: the probability
    mass of each target that is spread evenly over all classes.

    >>> import torch, glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder"))
    >>> ids = torch.tensor([[1, 2, 3]])
    >>> nn.init.zeros_(model.head.weight)[0, 0].item()  # all tokens are equally likely
    0.0
    >>> batch = Batch(ids, targets=ids + 1, loss_mask=torch.tensor([[True, True, False]]))
    >>> torch.isclose(compute_loss(model, batch).exp(), torch.tensor(256.0**2))
    tensor(True)
    """
    return cross_entropy(batch.forward(model), batch, smoothing)


def cross_entropy(logits: Tensor | Unprojected | ShardedLogits, batch: Batch, smoothing: float = 0.0) -> Tensor:
    """Return the cross-entropy in nats, summed over the positions of the loss mask.

    The logits may be those that a `DeferredHead` leaves to be computed; then they are never all in memory. Or they
    are those of one of several processes that share a vocabulary.
    """
    # Boolean indexing instead would make the host wait for a GPU.
    targets = batch.targets.masked_fill(~batch.loss_mask, IGNORED)
    if isinstance(logits, Unprojected):
        x, weight, bias, cap = logits
        if batch.target_positions is not None:
            x = x.gather(1, batch.target_positions[..., None].expand(-1, -1, x.shape[-1]))
            targets = targets.gather(1, batch.target_positions)
        return linear_cross_entropy(x.flatten(0, -2), weight, bias, targets.flatten(), smoothing, cap)
    if isinstance(logits, ShardedLogits):
        return vocabulary_parallel_cross_entropy(logits, targets.flatten(), smoothing)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(
        logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="sum", label_smoothing=smoothing
    )


def reference_precision(logits: Tensor) -> AbstractContextManager[object]:
    """Return the context in which a frozen model computes beside a trained one, from the logits of that.

    The weights of the frozen one are in float32, those of a `LowPrecisionCopy` are not.
    """
    return autocast(logits.device, logits.dtype if logits.dtype.itemsize == 2 else torch.float32)


def autocast(device: torch.device, autocast_dtype: torch.dtype) -> AbstractContextManager[object]:
    """Return a context of mixed precision: float32 weights, matrix products in `autocast_dtype`."""
    return nullcontext() if autocast_dtype == torch.float32 else torch.autocast(device.type, autocast_dtype)
