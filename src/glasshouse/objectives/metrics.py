"""Metrics of losses, labels and texts, their sums over batches, and the report of an evaluation."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from glasshouse.data import Batch
from glasshouse.data.corpus import Kind
from glasshouse.errors import InputError
from glasshouse.objectives.loss.cross_entropy import cross_entropy
from glasshouse.text import Tokenizer


def perplexity(loss_per_token: float) -> float:
    """Return the exponential of the mean loss in nats.

    A uniform choice among 4 tokens has a loss of ln 4.

    >>> round(perplexity(math.log(4)), 9)
    4.0
    """
    if loss_per_token < 0:
        raise InputError(f"loss_per_token is {loss_per_token}, but -log of a probability is never below 0.")
    try:
        return math.exp(loss_per_token)
    except OverflowError:  # a loss above 709, as of a diverged model
        return math.inf


def bits_per_byte(total_loss_in_nats: float, n_bytes: int) -> float:
    """Return the bits per byte of a loss summed over a text, which do not depend on the tokenizer.

    Two tokens with a loss of ln 16, or 4 bits, each, over 4 bytes: 8 bits over 4.

    >>> bits_per_byte(2 * math.log(16), n_bytes=4)
    2.0
    """
    if total_loss_in_nats < 0:
        raise InputError(f"total_loss_in_nats is {total_loss_in_nats}, but -log of a probability is never below 0.")
    if n_bytes < 1:
        raise InputError(
            f"n_bytes is {n_bytes}, but bits per byte need at least one byte; pass the length of the text in UTF-8."
        )
    return total_loss_in_nats / math.log(2) / n_bytes


def accuracy(predictions: Sequence[Hashable], references: Sequence[Hashable]) -> float:
    """Return the fraction of correct labels, from 0 to 1.

    Three of four:

    >>> accuracy([1, 2, 2, 3], [1, 2, 3, 3])
    0.75
    """
    _check_pairs(predictions, references, "predictions", "references")
    return sum(p == e for p, e in zip(predictions, references, strict=True)) / len(references)


def exact_match(predictions: Sequence[str], references: Sequence[str]) -> float:
    r"""Return the fraction of texts that equal their reference, from 0 to 1.

    Leading and trailing whitespace is ignored; case, punctuation and inner whitespace are not.

    >>> exact_match([" Paris\n", "paris"], ["Paris", "Paris"])
    0.5
    """
    _check_pairs(predictions, references, "predictions", "references")
    for name, given in (("predictions", predictions), ("references", references)):
        if isinstance(given, str):
            raise InputError(f"{name} is one text, but it must be a list of texts; pass [text].")
    return accuracy([text.strip() for text in predictions], [reference.strip() for reference in references])


def f1(predictions: Sequence[Hashable], references: Sequence[Hashable], average: Literal["macro", "micro"]) -> float:
    """Return 2 * correct / (predicted + true), averaged over labels ("macro") or over all items at once ("micro").

    The labels are those that occur in predictions or references. One that occurs in only one of them counts as 0 in
    the macro average. With one label per item, micro F1 is the accuracy.

    Label a is correct once, predicted once and true twice: 2/3. Label b is correct once, predicted twice and true
    once: 2/3. Label c is correct once of once: 1. The mean of those is 7/9; over all, 3 of 4 are correct.

    >>> round(f1(["a", "b", "b", "c"], ["a", "a", "b", "c"], average="macro"), 4)
    0.7778
    >>> f1(["a", "b", "b", "c"], ["a", "a", "b", "c"], average="micro")
    0.75
    """
    _check_pairs(predictions, references, "predictions", "references")
    if average not in ("macro", "micro"):
        raise InputError(f"average is {average!r}, but it must be 'macro' or 'micro'.")
    correct = Counter(p for p, e in zip(predictions, references, strict=True) if p == e)
    named = Counter(predictions) + Counter(references)
    if average == "micro":
        return 2 * correct.total() / named.total()
    return math.fsum(2 * correct[label] / named[label] for label in named) / len(named)  # independent of the order


def _check_pairs(given: Sequence[object], references: Sequence[object], name: str, other: str) -> None:
    for named, values in ((name, given), (other, references)):
        if not isinstance(values, Sequence):  # items of a tensor would be compared, and counted, as tensors
            raise InputError(
                f"{named} is a {type(values).__name__}, but it must be a list; call .tolist() on a tensor."
            )
    if len(given) != len(references):
        raise InputError(
            f"{name} has {len(given)} items and {other} {len(references)}, but they must have the same length."
        )
    if not given:
        raise InputError(f"{name} and {other} are empty; pass at least one of each.")


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
    is_likelihood: bool = True  # whether the loss is -log of a probability, which has a perplexity

    def __add__(self, other: MetricSums) -> MetricSums:
        names = {**self.others, **other.others}
        pairs = {name: (self.others.get(name, (0, 0)), other.others.get(name, (0, 0))) for name in names}
        return MetricSums(
            self.loss + other.loss,
            self.n_correct + other.n_correct,
            self.n_targets + other.n_targets,
            self.bytes + other.bytes,
            {name: (one[0] + two[0], one[1] + two[1]) for name, (one, two) in pairs.items()},
            self.is_likelihood and other.is_likelihood,
        )

    def reduced(self, reduce: Callable[[Tensor], Tensor]) -> MetricSums:
        """Return the sums over processes, which have the same metrics; `reduce` sums a tensor over them."""
        own = [self.loss, self.n_correct, self.n_targets, self.bytes]
        flat = [number for pair in self.others.values() for number in pair]
        loss, correct, targets, n_bytes, *rest = reduce(torch.tensor(own + flat, dtype=torch.float64)).tolist()
        others = dict(zip(self.others, zip(rest[::2], rest[1::2], strict=True), strict=True))
        return MetricSums(loss, correct, int(targets), int(n_bytes), others, self.is_likelihood)

    def metrics(self) -> dict[str, float]:
        """Return the means by name.

        >>> MetricSums(loss=2.772588722239781, n_correct=1, n_targets=2, bytes=4).metrics()
        {'loss': 1.3862943611198906, 'perplexity': 4.0, 'accuracy': 0.5, 'bits_per_byte': 1.0}
        """
        if not self.n_targets:
            raise InputError("there are no targets to evaluate on; give more text.")
        loss = self.loss / self.n_targets
        found = {"loss": loss, **({"perplexity": perplexity(loss)} if self.is_likelihood else {})}
        found["accuracy"] = self.n_correct / self.n_targets
        found |= {"bits_per_byte": bits_per_byte(self.loss, self.bytes)} if self.bytes else {}
        return found | {name: total / count for name, (total, count) in self.others.items()}


@torch.no_grad()
def evaluate_batch(model: nn.Module, batch: Batch, token_bytes: Tensor | None = None) -> MetricSums:
    """Evaluate one batch without gradients; `token_bytes` is the number of bytes of each token id."""
    return sum_metrics(batch.forward(model), batch, token_bytes)


def sum_metrics(logits: Tensor, batch: Batch, token_bytes: Tensor | None = None) -> MetricSums:
    """Return the sums of the metrics of logits over the targets of a batch."""
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


SHOWN = 3  # examples in a report


@dataclass(frozen=True)
class Example:
    """One example: the input, the reference and the model's prediction.

    `n_best` has the texts of a beam search with their scores, best first; the best is the prediction.

    >>> Example(input="yes", reference="ja", prediction="nein").prediction
    'nein'
    """

    input: str
    reference: str
    prediction: str
    n_best: tuple[tuple[float, str], ...] = ()


@dataclass(frozen=True)
class Report:
    """Metrics of an evaluation over `n_targets` tokens or labels, and a few examples.

    `loss` is in nats per target; `accuracy`, `exact_match` and `f1` (macro) are from 0 to 1, `bleu` and `chrf` from
    0 to 100, with sacrebleu's `signatures`.

    Of `n_items` in the data `n_evaluated` were evaluated on, and for `n_generated` of those an answer was generated:
    exact_match, bleu and chrf cover these, all other metrics every evaluated item.

    >>> Report("labelled", {"accuracy": 0.75}, n_targets=4, examples=[]).metrics["accuracy"]
    0.75
    """

    kind: Kind  # of the corpus
    metrics: dict[str, float]
    n_targets: int
    examples: list[Example]
    n_too_long: int = 0  # items dropped because they are too long
    n_items: int = 0  # sequences of running text, or pairs, texts and conversations, without those too long
    n_evaluated: int = 0
    n_generated: int = 0
    signatures: dict[str, str] = field(default_factory=dict)
