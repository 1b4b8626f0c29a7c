"""What is asked of a model: the right answer where it counts. Kinds of training differ in their batches alone."""

from __future__ import annotations

from torch import Tensor, nn

from glasshouse.data import Batch
from glasshouse.evaluation.eval_loop import cross_entropy


def compute_loss(model: nn.Module, batch: Batch, smoothing: float = 0.0) -> Tensor:
    """Return the sum of the cross-entropies, in nats, over the places of a batch that count.

    Next tokens, masked tokens, the target of a source, labels and the assistant's part of a conversation are all the
    same question: the batch says what to read, where an answer counts and what it is. With `smoothing`, so much of
    each target is spread evenly over all classes.

    >>> import torch, glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder"))
    >>> ids = torch.tensor([[1, 2, 3]])
    >>> nn.init.zeros_(model.head.weight)[0, 0].item()  # then every token is as likely as any other
    0.0
    >>> batch = Batch(ids, targets=ids + 1, loss_mask=torch.tensor([[True, True, False]]))
    >>> torch.isclose(compute_loss(model, batch).exp(), torch.tensor(256.0**2))
    tensor(True)
    """
    return cross_entropy(batch.forward(model), batch, smoothing)
