"""The training loss: cross-entropy at the positions of the loss mask. Tasks differ only in their batches."""

from __future__ import annotations

from torch import Tensor, nn

from glasshouse.data import Batch
from glasshouse.evaluation.eval_loop import cross_entropy


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
