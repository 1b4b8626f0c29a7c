"""Metrics of losses, labels and texts, over plain Python numbers and sequences."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Literal

from glasshouse.errors import InputError


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
