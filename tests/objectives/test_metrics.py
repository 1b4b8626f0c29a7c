"""Metrics: by hand, and F1 against precision and recall of each label."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from glasshouse.errors import InputError
from glasshouse.evaluation import accuracy, bits_per_byte, exact_match, f1, perplexity

pairs = st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from("abcd")), min_size=1)


def slow_f1(predicted: list[str], expected: list[str], labels: list[str]) -> Fraction:
    """The mean over labels of the harmonic mean of precision and recall, where 0/0 is 0."""

    def share(part: int, whole: int) -> Fraction:
        return Fraction(part, whole) if whole else Fraction(0)

    total = Fraction(0)
    for label in labels:
        right = sum(p == label and e == label for p, e in zip(predicted, expected, strict=True))
        precision = share(right, predicted.count(label))
        recall = share(right, expected.count(label))
        total += 2 * precision * recall / (precision + recall) if right else 0
    return total / len(labels)


def test_losses_by_hand() -> None:
    assert perplexity(0.0) == 1.0
    assert perplexity(math.log(256)) == pytest.approx(
        256, rel=1e-14, abs=0
    )  # ln 256 is rounded by 2**-53 * 5.5 at most
    assert perplexity(1e6) == math.inf
    assert math.isnan(perplexity(math.nan))
    # 100 bytes of 8 bits each, whatever number of tokens they were
    assert bits_per_byte(100 * math.log(256), n_bytes=100) == pytest.approx(8, rel=1e-14, abs=0)
    assert bits_per_byte(0.0, n_bytes=3) == 0.0


def test_labels_by_hand() -> None:
    assert accuracy(["a", "b", "c"], ["a", "c", "c"]) == 2 / 3
    assert accuracy((1,), range(1, 2)) == 1.0
    # a: right 2, predicted 3, expected 2: 4/5. b: right 0: 0. c: never expected: 0. d: never predicted: 0.
    predicted, expected = ["a", "a", "a", "c", "b"], ["a", "a", "b", "d", "d"]
    assert f1(predicted, expected, average="macro") == pytest.approx(0.8 / 4, rel=1e-15, abs=0)
    assert f1(predicted, expected, average="micro") == 2 / 5
    assert f1([0, 1], [1, 0], average="macro") == f1([0, 1], [1, 0], average="micro") == 0.0


def test_exact_match_by_hand() -> None:
    assert exact_match(["\t42 ", "4 2", "FOUR", "four.", ""], ["42", "4  2", "four", "four", " \n"]) == 2 / 5


@given(pairs)
def test_f1_against_precision_and_recall(drawn: list[tuple[str, str]]) -> None:
    predicted, expected = [p for p, _ in drawn], [e for _, e in drawn]
    labels = sorted({*predicted, *expected})
    # A quotient a label, their sum and its quotient: four labels at most, six roundings of 2**-53.
    macro = f1(predicted, expected, average="macro")
    assert macro == pytest.approx(float(slow_f1(predicted, expected, labels)), rel=1e-15, abs=0)
    assert macro == f1(expected, predicted, average="macro")
    assert f1(predicted, expected, average="micro") == accuracy(predicted, expected)


@given(pairs, st.randoms())
def test_the_order_of_items_does_not_matter(drawn: list[tuple[str, str]], random: object) -> None:
    shuffled = drawn.copy()
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    for average in ("macro", "micro"):
        one, other = (
            f1([p for p, _ in some], [e for _, e in some], average=average)  # type: ignore[arg-type]
            for some in (drawn, shuffled)
        )
        assert one == other


def test_invalid_arguments_are_refused() -> None:
    for measure in (
        accuracy,
        lambda p, e: f1(p, e, average="macro"),
        lambda p, e: f1(p, e, average="micro"),
    ):
        with pytest.raises(InputError, match="predictions and references are empty"):
            measure([], [])
        with pytest.raises(InputError, match="predictions has 2 items and references 1, but"):
            measure(["a", "b"], ["a"])
        with pytest.raises(InputError, match=r"references is a Tensor, but it must be a list; call \.tolist\(\)"):
            measure([1, 2], torch.tensor([1, 2]))
    with pytest.raises(InputError, match="predictions and references are empty"):
        exact_match([], [])
    with pytest.raises(InputError, match="predictions has 1 items and references 2"):
        exact_match(["a"], ["a", "b"])
    with pytest.raises(InputError, match=r"references is one text, but it must be a list of texts; pass \[text\]"):
        exact_match(["y", "e", "s"], "yes")
    with pytest.raises(InputError, match="average is 'mean', but it must be 'macro' or 'micro'"):
        f1(["a"], ["a"], average="mean")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"loss_per_token is -0\.5, but"):
        perplexity(-0.5)
    with pytest.raises(InputError, match=r"total_loss_in_nats is -0\.5, but"):
        bits_per_byte(-0.5, n_bytes=1)
    with pytest.raises(InputError, match="n_bytes is 0, but bits per byte need at least one byte"):
        bits_per_byte(1.0, n_bytes=0)
