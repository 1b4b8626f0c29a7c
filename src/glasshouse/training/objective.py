"""What is asked of a model: the right answer where it counts. Kinds of training differ in their batches alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from glasshouse.data import Batch

IGNORED = -100  # what cross_entropy takes for a place that does not count


def loss_of(model: nn.Module, batch: Batch, smoothing: float = 0.0) -> Tensor:
    """Return the sum of the cross-entropies, in nats, over the places of a batch that count.

    Next tokens, masked tokens, the target of a source, labels and the assistant's part of a conversation are all the
    same question: the batch says what to read, where an answer counts and what it is. With `smoothing`, so much of
    each target is spread evenly over all classes.

    >>> import glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder"))
    >>> ids = torch.tensor([[1, 2, 3]])
    >>> nn.init.zeros_(model.head.weight)[0, 0].item()  # then every token is as likely as any other
    0.0
    >>> batch = Batch(ids, targets=ids + 1, loss=torch.tensor([[True, True, False]]))
    >>> torch.isclose(loss_of(model, batch).exp(), torch.tensor(256.0**2))
    tensor(True)
    """
    return _cross_entropy(batch.answer(model), batch, smoothing)


@dataclass(frozen=True)
class Tally:
    """How a model's answers fare, summed over the places that count."""

    loss: float  # in nats
    right: int
    asked: int

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.loss + other.loss, self.right + other.right, self.asked + other.asked)


@torch.no_grad()
def tally(model: nn.Module, batch: Batch) -> Tally:
    """Ask a model without teaching it."""
    logits = batch.answer(model)
    right = (logits.argmax(-1) == batch.targets) & batch.loss
    return Tally(float(_cross_entropy(logits, batch, 0.0)), int(right.sum()), int(batch.loss.sum()))


def _cross_entropy(logits: Tensor, batch: Batch, smoothing: float) -> Tensor:
    targets = batch.targets.masked_fill(~batch.loss, IGNORED)  # picked out, they would make the host wait for a GPU
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(
        logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="sum", label_smoothing=smoothing
    )
