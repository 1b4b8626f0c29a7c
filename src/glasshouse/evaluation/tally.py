"""How a model's answers fare, summed over the places of batches that count."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from glasshouse.data import Batch, Samples
from glasshouse.errors import InputError
from glasshouse.evaluation.measures import bits_per_byte, perplexity
from glasshouse.text import Tokenizer

IGNORED = -100  # what cross_entropy takes for a place that does not count


@dataclass(frozen=True)
class Tally:
    """Sums over places: what the answers cost, how many were right, how many were asked for, of how many bytes."""

    loss: float = 0.0  # in nats
    right: int = 0
    asked: int = 0
    bytes: int = 0  # that the right answers spell; 0 where answers are no text

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.loss + other.loss, self.right + other.right, self.asked + other.asked, self.bytes + other.bytes
        )

    def figures(self) -> dict[str, float]:
        """Return the means by name.

        >>> Tally(loss=2.772588722239781, right=1, asked=2, bytes=4).figures()
        {'loss': 1.3862943611198906, 'perplexity': 4.0, 'accuracy': 0.5, 'bits_per_byte': 1.0}
        """
        if not self.asked:
            raise InputError("nothing was asked of the model, so there is no figure; give more text.")
        loss = self.loss / self.asked
        found = {"loss": loss, "perplexity": perplexity(loss), "accuracy": self.right / self.asked}
        return found | ({"bits_per_byte": bits_per_byte(self.loss, self.bytes)} if self.bytes else {})


def cross_entropy(logits: Tensor, batch: Batch, smoothing: float = 0.0) -> Tensor:
    """Return the sum of the cross-entropies, in nats, over the places of a batch that count."""
    targets = batch.targets.masked_fill(~batch.loss, IGNORED)  # picked out, they would make the host wait for a GPU
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(
        logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="sum", label_smoothing=smoothing
    )


@torch.no_grad()
def tally(model: nn.Module, batch: Batch, sizes: Tensor | None = None) -> Tally:
    """Ask a model without teaching it; `sizes` says how many bytes each id spells."""
    logits = batch.answer(model)
    right = (logits.argmax(-1) == batch.targets) & batch.loss
    spelled = 0 if sizes is None else int(sizes[batch.targets[batch.loss]].sum())
    return Tally(float(cross_entropy(logits, batch)), int(right.sum()), int(batch.loss.sum()), spelled)


def byte_sizes(tok: Tokenizer) -> Tensor:
    """Return how many bytes each id of a tokenizer spells, [V]; special tokens spell none."""
    spelled = {number: b"" if number in tok.special_ids else tok.decode_bytes([number]) for number in tok.ids}
    sizes = torch.zeros(max(spelled) + 1, dtype=torch.long)
    for number, text in spelled.items():
        sizes[number] = len(text)
    return sizes


def read_through(
    model: nn.Module,
    samples: Samples,
    rows: int,
    *,
    most: int | None = None,
    sizes: Tensor | None = None,
    compute: torch.dtype = torch.float32,
    before: Callable[[], None] = lambda: None,
) -> Tally:
    """Ask a model about each sample of an epoch, or the first `most`, so many `rows` at a time.

    `before` is called before each batch. The model is in the mode it was in, afterwards.
    """
    device = next(model.parameters()).device
    sizes = None if sizes is None else sizes.to(device)
    count = len(samples) if most is None else min(most, len(samples))
    was_training = model.training
    model.eval()
    total = Tally()
    try:
        for start in range(0, count, rows):
            before()
            batch = samples.batch(range(start, min(start + rows, count))).to(device)
            with computing(device, compute):
                total += tally(model, batch, sizes)
    finally:
        model.train(was_training)
    return total


def computing(device: torch.device, compute: torch.dtype) -> AbstractContextManager[object]:
    """Return a context in which float32 weights are multiplied in another type."""
    return nullcontext() if compute == torch.float32 else torch.autocast(device.type, compute)
