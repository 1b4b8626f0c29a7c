"""The report of an evaluation: metrics, and a few examples of what the model predicts."""

from __future__ import annotations

from dataclasses import dataclass, field

from glasshouse.data.corpus import Kind

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
