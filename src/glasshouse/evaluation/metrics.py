"""How well answers fit: of a loss, of labels and of whole texts; all over plain Python numbers and sequences."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Literal

from glasshouse.errors import InputError


def perplexity(loss_per_token: float) -> float:
    """Return e to the mean loss in nats: among how many equally likely tokens the model was as good as choosing.

    Choosing evenly among 4 costs ln 4 a token.

    >>> round(perplexity(math.log(4)), 9)
    4.0
    """
    if loss_per_token < 0:
        raise InputError(f"loss_per_token is {loss_per_token}, but -log of a probability is never below 0.")
    try:
        return math.exp(loss_per_token)
    except OverflowError:  # a loss above 709, as of a model that has gone astray
        return math.inf


def bits_per_byte(total_loss_in_nats: float, n_bytes: int) -> float:
    """Return what a loss summed over a text comes to for each of its bytes, which no tokenizer can flatter.

    Two tokens of ln 16 each, 4 bits, that spell 4 bytes: 8 bits over 4.

    >>> bits_per_byte(2 * math.log(16), n_bytes=4)
    2.0
    """
    if total_loss_in_nats < 0:
        raise InputError(f"total_loss_in_nats is {total_loss_in_nats}, but -log of a probability is never below 0.")
    if n_bytes < 1:
        raise InputError(f"n_bytes is {n_bytes}, but bits a byte need a byte; pass the length of the text in UTF-8.")
    return total_loss_in_nats / math.log(2) / n_bytes


def accuracy(predictions: Sequence[Hashable], references: Sequence[Hashable]) -> float:
    """Return the share of labels that are right, from 0 to 1.

    Three of four:

    >>> accuracy([1, 2, 2, 3], [1, 2, 3, 3])
    0.75
    """
    _check_pairs(predictions, references, "predictions", "references")
    return sum(p == e for p, e in zip(predictions, references, strict=True)) / len(references)


def exact_match(predictions: Sequence[str], references: Sequence[str]) -> float:
    r"""Return the share of texts that equal their reference, from 0 to 1.

    Whitespace around a text does not count; everything else does: case, marks, and whitespace within.

    >>> exact_match([" Paris\n", "paris"], ["Paris", "Paris"])
    0.5
    """
    _check_pairs(predictions, references, "predictions", "references")
    for name, given in (("predictions", predictions), ("references", references)):
        if isinstance(given, str):
            raise InputError(f"{name} is one text, but it must be a list of texts; pass [text].")
    return accuracy([text.strip() for text in predictions], [reference.strip() for reference in references])


def f1(predictions: Sequence[Hashable], references: Sequence[Hashable], average: Literal["macro", "micro"]) -> float:
    """Return 2 right / (predicted + expected): of each label, then the mean ("macro"), or of all at once ("micro").

    The labels are those that occur on either side. One that is never predicted, or never expected, counts 0 in the
    macro mean; one that occurs on neither side does not count. With one label for each item, micro is the accuracy.

    Label a is right once, predicted once and expected twice: 2/3. Label b is right once, predicted twice and expected
    once: 2/3. Label c is right once of once: 1. The mean of those is 7/9; over all, 3 of 4 are right.

    >>> round(f1(["a", "b", "b", "c"], ["a", "a", "b", "c"], average="macro"), 4)
    0.7778
    >>> f1(["a", "b", "b", "c"], ["a", "a", "b", "c"], average="micro")
    0.75
    """
    _check_pairs(predictions, references, "predictions", "references")
    if average not in ("macro", "micro"):
        raise InputError(f"average is {average!r}, but it must be 'macro' or 'micro'.")
    right = Counter(p for p, e in zip(predictions, references, strict=True) if p == e)
    named = Counter(predictions) + Counter(references)
    if average == "micro":
        return 2 * right.total() / named.total()
    return math.fsum(2 * right[label] / named[label] for label in named) / len(named)  # the same in any order


def _check_pairs(given: Sequence[object], references: Sequence[object], name: str, other: str) -> None:
    for named, values in ((name, given), (other, references)):
        if not isinstance(values, Sequence):  # items of a tensor would be compared, and counted, as tensors
            raise InputError(
                f"{named} is a {type(values).__name__}, but it must be a list; .tolist() gives one of a tensor."
            )
    if len(given) != len(references):
        raise InputError(
            f"{name} has {len(given)} items and {other} {len(references)}, but each needs its counterpart."
        )
    if not given:
        raise InputError(f"{name} and {other} are empty, and there is nothing to measure; pass at least one of each.")
