"""BLEU and chrF, computed by sacrebleu so that scores are comparable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from glasshouse.errors import InputError

References = Sequence[str] | Sequence[Sequence[str]]


@dataclass(frozen=True)
class Score:
    """A score from 0 to 100 and sacrebleu's signature; report both.

    >>> Score(31.4, "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0").value
    31.4
    """

    value: float
    signature: str


def bleu(predictions: Sequence[str], references: References) -> Score:
    """Return corpus BLEU with sacrebleu's tokenizer 13a.

    References are one list as long as the predictions, or several such lists, each by another translator.

    >>> score = bleu(["The cat sat on the mat."], ["The cat sat on the mat."])
    >>> round(score.value, 6), score.signature.split("|")[:3]
    (100.0, ['nrefs:1', 'case:mixed', 'eff:no'])
    """
    return _score("BLEU", predictions, references)


def chrf(predictions: Sequence[str], references: References) -> Score:
    """Return corpus chrF2: character n-grams up to 6, recall weighted twice.

    References are as for `bleu`.

    >>> score = chrf(["Die Katze saß da."], [["Die Katze saß da."], ["Da saß die Katze."]])
    >>> round(score.value, 6), score.signature.split("|")[:1]
    (100.0, ['nrefs:2'])
    """
    return _score("CHRF", predictions, references)


def _score(name: str, predictions: Sequence[str], references: References) -> Score:
    _check_texts("predictions", predictions)
    if not predictions:
        raise InputError("predictions are empty; pass at least one.")
    lists = _as_lists(references)
    for number, translations in enumerate(lists, start=1):
        _check_texts(f"list {number} of the references", translations)
        if len(translations) != len(predictions):  # sacrebleu would silently score the common part
            raise InputError(
                f"list {number} of the references has {len(translations)} texts for {len(predictions)} predictions, "
                "but they must have the same length."
            )
    try:
        from sacrebleu.metrics import METRICS
    except ImportError:
        raise InputError(
            "BLEU and chrF are computed by sacrebleu, which is not installed; "
            "run pip install 'glasshouse[translation]'."
        ) from None
    metric = METRICS[name]()
    return Score(metric.corpus_score(predictions, lists).score, str(metric.get_signature()))


def _as_lists(references: References) -> Sequence[Sequence[str]]:
    one = [reference for reference in references if isinstance(reference, str)]
    several = [reference for reference in references if not isinstance(reference, str)]
    if isinstance(references, str) or (one and several):
        raise InputError(
            "references mix texts and lists of texts, or are one text; pass one list of texts or several."
        )
    return several or [one]


def _check_texts(name: str, texts: Sequence[str]) -> None:
    several = isinstance(texts, Sequence) and not isinstance(texts, str)
    if not several or not all(isinstance(text, str) for text in texts):
        raise InputError(f"{name} must be a list of texts, but is {texts!r:.40}; pass a list such as ['a text'].")
