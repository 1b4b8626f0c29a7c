"""Cross-entropy, accuracy and other metrics of batches, summed over the positions of their loss masks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from glasshouse.data import Batch
from glasshouse.errors import InputError
from glasshouse.objectives.loss import cross_entropy
from glasshouse.objectives.metrics import bits_per_byte, perplexity
from glasshouse.text import Tokenizer


@dataclass(frozen=True)
class MetricSums:
    """Sums over targets: loss, correct predictions, targets and their bytes; and those of an objective's own metrics.

    `others` has for each further metric its sum and how many values that is the sum of.

    >>> teacher = MetricSums(1.0, 1, 2, others={"teacher_loss": (3.0, 2)})
    >>> (teacher + teacher).metrics()["teacher_loss"]
    1.5
    """

    loss: float = 0.0  # in nats
    n_correct: float = 0  # a tie may count as half
    n_targets: int = 0
    bytes: int = 0  # of the target tokens; 0 if targets are not text
    others: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def __add__(self, other: MetricSums) -> MetricSums:
        names = {**self.others, **other.others}
        pairs = {name: (self.others.get(name, (0, 0)), other.others.get(name, (0, 0))) for name in names}
        return MetricSums(
            self.loss + other.loss,
            self.n_correct + other.n_correct,
            self.n_targets + other.n_targets,
            self.bytes + other.bytes,
            {name: (one[0] + two[0], one[1] + two[1]) for name, (one, two) in pairs.items()},
        )

    def reduced(self, reduce: Callable[[Tensor], Tensor]) -> MetricSums:
        """Return the sums over processes, which have the same metrics; `reduce` sums a tensor over them."""
        own = [self.loss, self.n_correct, self.n_targets, self.bytes]
        flat = [number for pair in self.others.values() for number in pair]
        loss, correct, targets, n_bytes, *rest = reduce(torch.tensor(own + flat, dtype=torch.float64)).tolist()
        others = dict(zip(self.others, zip(rest[::2], rest[1::2], strict=True), strict=True))
        return MetricSums(loss, correct, int(targets), int(n_bytes), others)

    def metrics(self) -> dict[str, float]:
        """Return the means by name.

        >>> MetricSums(loss=2.772588722239781, n_correct=1, n_targets=2, bytes=4).metrics()
        {'loss': 1.3862943611198906, 'perplexity': 4.0, 'accuracy': 0.5, 'bits_per_byte': 1.0}
        """
        if not self.n_targets:
            raise InputError("there are no targets to evaluate on; give more text.")
        loss = self.loss / self.n_targets
        found = {"loss": loss, "perplexity": perplexity(loss), "accuracy": self.n_correct / self.n_targets}
        found |= {"bits_per_byte": bits_per_byte(self.loss, self.bytes)} if self.bytes else {}
        return found | {name: total / count for name, (total, count) in self.others.items()}


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
