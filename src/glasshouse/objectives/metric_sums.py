"""Cross-entropy and accuracy of batches, summed over the positions of their loss masks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from glasshouse.data import Batch
from glasshouse.errors import InputError
from glasshouse.objectives.loss import cross_entropy
from glasshouse.objectives.metrics import bits_per_byte, perplexity
from glasshouse.text import Tokenizer


@dataclass(frozen=True)
class MetricSums:
    """Sums over targets: loss, correct predictions, targets and their bytes."""

    loss: float = 0.0  # in nats
    n_correct: int = 0
    n_targets: int = 0
    bytes: int = 0  # of the target tokens; 0 if targets are not text

    def __add__(self, other: MetricSums) -> MetricSums:
        return MetricSums(
            self.loss + other.loss,
            self.n_correct + other.n_correct,
            self.n_targets + other.n_targets,
            self.bytes + other.bytes,
        )

    def reduced(self, reduce: Callable[[Tensor], Tensor]) -> MetricSums:
        """Return the sums over processes; `reduce` sums a tensor over them."""
        values = reduce(torch.tensor([self.loss, self.n_correct, self.n_targets, self.bytes], dtype=torch.float64))
        loss, *counts = values.tolist()
        return MetricSums(loss, *map(int, counts))

    def metrics(self) -> dict[str, float]:
        """Return the means by name.

        >>> MetricSums(loss=2.772588722239781, n_correct=1, n_targets=2, bytes=4).metrics()
        {'loss': 1.3862943611198906, 'perplexity': 4.0, 'accuracy': 0.5, 'bits_per_byte': 1.0}
        """
        if not self.n_targets:
            raise InputError("there are no targets to evaluate on; give more text.")
        loss = self.loss / self.n_targets
        found = {"loss": loss, "perplexity": perplexity(loss), "accuracy": self.n_correct / self.n_targets}
        return found | ({"bits_per_byte": bits_per_byte(self.loss, self.bytes)} if self.bytes else {})


@torch.no_grad()
def evaluate_batch(model: nn.Module, batch: Batch, token_bytes: Tensor | None = None) -> MetricSums:
    """Evaluate one batch without gradients; `token_bytes` is the number of bytes of each token id."""
    logits = batch.forward(model)
    correct = (logits.argmax(-1) == batch.targets) & batch.loss_mask
    n_bytes = 0 if token_bytes is None else int(token_bytes[batch.targets[batch.loss_mask]].sum())
    return MetricSums(float(cross_entropy(logits, batch)), int(correct.sum()), int(batch.loss_mask.sum()), n_bytes)


def token_bytes(tok: Tokenizer) -> Tensor:
    """Return the number of bytes of each token id, [V]; 0 for special tokens."""
    decoded = {number: b"" if number in tok.special_ids else tok.decode_bytes([number]) for number in tok.ids}
    sizes = torch.zeros(max(decoded) + 1, dtype=torch.long)
    for number, text in decoded.items():
        sizes[number] = len(text)
    return sizes
