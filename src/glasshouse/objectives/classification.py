"""Classification: labels of texts, or tags of their words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from glasshouse import spec
from glasshouse.config import JsonDict, did_you_mean
from glasshouse.data import Batch, ClassificationDataset, Corpus, TokenClassificationDataset
from glasshouse.data.encoding import classifier_ends
from glasshouse.errors import InputError
from glasshouse.models import Model, with_classifier
from glasshouse.objectives.metrics import SHOWN, Example, MetricSums, Report, f1
from glasshouse.objectives.objective import Evaluation, Objective, items_for_tokens

L = TypeVar("L", ClassificationDataset, TokenClassificationDataset)


class _Classification(Objective[L]):
    """What labels and tags share: a head for the labels of the corpus, and F1 as a metric."""

    model_kinds = ("decoder", "encoder")

    def check_model(self, s: spec.Spec, corpus: Corpus) -> None:
        """Raise for a model with fewer labels than the corpus."""
        head = _head(s)
        if head.n_labels < len(corpus.labels):
            raise InputError(f"the model has {head.n_labels} labels, but the corpus has {len(corpus.labels)}.")

    def head_settings(self, corpus: Corpus) -> JsonDict:
        """Return the labels of the corpus."""
        return {"n_labels": len(corpus.labels), "labels": list(corpus.labels)}

    def fit_head(self, model: Model, corpus: Corpus) -> Model:
        """Return the model with a new classifier, unless it has one for the labels of the corpus."""
        if (model.spec.head.kind, getattr(model.spec.head, "labels", ())) == (self.head_kind, corpus.labels):
            return model
        per_token = self.head_kind == spec.TokenClassification.kind
        classifier = with_classifier(model, len(corpus.labels), per_token=per_token)
        classifier.spec = replace(classifier.spec, head=replace(_head(classifier.spec), labels=corpus.labels))
        return classifier

    def samples_for_tokens(self, corpus: Corpus, tokens: int, seq_len: int) -> int:
        """Return how many texts have about `tokens` tokens, truncated as they are."""
        return items_for_tokens(corpus.lengths[:, :1].clip(max=seq_len - 2), tokens)

    def _predict(self, evaluation: Evaluation, samples: L) -> tuple[MetricSums, Sequence[str], list[Tensor]]:
        """Evaluate; return the sums, the model's label names and the predicted label ids of each sample."""
        names, numbers = _match_labels(evaluation.model, evaluation.corpus)
        predicted: list[Tensor] = []
        hook = evaluation.model.register_forward_hook(lambda *call: predicted.extend(call[-1].argmax(-1).cpu()))
        try:
            sums = evaluation.sums(_RelabelledDataset(samples, numbers))
        finally:
            hook.remove()
        return sums, names, predicted


class SequenceClassification(_Classification[ClassificationDataset]):
    """The label of each text."""

    models = "sequence classification"
    head_kind = "sequence_classification"
    data_kind = "labelled"

    def make_dataset(
        self, corpus: Corpus, *, batch_size: int, seq_len: int, seed: int = 0, start_id: int | None = None
    ) -> ClassificationDataset:
        """Return texts between a start and an end token, truncated to `seq_len` ids."""
        return ClassificationDataset(corpus, batch_size, max_len=seq_len, seed=seed)

    def dataset_for(
        self, s: spec.Spec, corpus: Corpus, *, batch_size: int, seq_len: int, seed: int = 0
    ) -> ClassificationDataset:
        """Return texts as `gh.classify` gives them to the model, truncated to `seq_len` ids."""
        ends = classifier_ends(s, corpus.tokenizer)
        return ClassificationDataset(corpus, batch_size, max_len=seq_len, seed=seed, ends=ends)

    def evaluate(self, evaluation: Evaluation, samples: ClassificationDataset) -> Report:
        """Evaluate loss, accuracy and F1 of the labels."""
        sums, names, predicted = self._predict(evaluation, samples)
        items = [evaluation.corpus.item(item) for item in samples.items(range(evaluation.count))]
        references = [evaluation.corpus.labels[int(label[0])] for _, label in items]
        predictions = [names[int(number)] for number in predicted]
        texts = [evaluation.tok.decode(text) for text, _ in items[:SHOWN]]
        examples = list(map(Example, texts, references, predictions))
        return evaluation.report(sums, _label_metrics(sums, predictions, references), examples)


class TokenClassification(_Classification[TokenClassificationDataset]):
    """The tag of each word."""

    models = "token classification"
    head_kind = "token_classification"
    data_kind = "tagged"

    def make_dataset(
        self, corpus: Corpus, *, batch_size: int, seq_len: int, seed: int = 0, start_id: int | None = None
    ) -> TokenClassificationDataset:
        """Return texts, truncated to `seq_len` ids."""
        return TokenClassificationDataset(corpus, batch_size, max_len=seq_len, seed=seed)

    def evaluate(self, evaluation: Evaluation, samples: TokenClassificationDataset) -> Report:
        """Evaluate loss, accuracy and F1 of the tags."""
        sums, names, predicted = self._predict(evaluation, samples)
        references: list[str] = []
        predictions: list[str] = []
        examples: list[Example] = []
        for item, labels in zip(samples.items(range(evaluation.count)), predicted, strict=True):
            ids, tags = (part[: samples.max_len - 2] for part in evaluation.corpus.item(item))
            starts = np.flatnonzero(tags)
            expected = [evaluation.corpus.labels[number - 1] for number in tags[starts].tolist()]
            found = [names[number] for number in labels[starts + 1].tolist()]  # after the start token
            references += expected
            predictions += found
            if len(examples) < SHOWN:
                words = [evaluation.tok.decode(word).strip() for word in np.split(ids, starts)[1:]]
                reference, prediction = (
                    " ".join(map("/".join, zip(words, one, strict=True))) for one in (expected, found)
                )
                examples.append(Example(evaluation.tok.decode(ids), reference, prediction))
        return evaluation.report(sums, _label_metrics(sums, predictions, references), examples)


def _head(s: spec.Spec) -> spec.SequenceClassification | spec.TokenClassification:
    assert isinstance(s.head, spec.SequenceClassification | spec.TokenClassification)
    return s.head


def _label_metrics(sums: MetricSums, predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    metrics = {name: value for name, value in sums.metrics().items() if name != "perplexity"}
    return metrics | {"f1": f1(predictions, references, average="macro")}


def _match_labels(model: Model, corpus: Corpus) -> tuple[Sequence[str], Tensor]:
    """Return the label names of a model, and its label id for each label of the corpus.

    A model without label names is assumed to use the label ids of the corpus.
    """
    head = _head(model.spec)
    if not head.labels:
        spare = [f"label {number}" for number in range(len(corpus.labels), head.n_labels)]
        return [*corpus.labels, *spare], torch.arange(len(corpus.labels))
    for label in corpus.labels:
        if label not in head.labels:
            raise InputError(
                f"the corpus has the label {label!r}, which the model lacks; {did_you_mean(label, head.labels)}"
            )
    return head.labels, torch.tensor([head.labels.index(label) for label in corpus.labels])


@dataclass(frozen=True)
class _RelabelledDataset:
    """Labelled or tagged samples with the label ids of a model."""

    samples: ClassificationDataset | TokenClassificationDataset
    numbers: Tensor  # by label id of the corpus

    def __len__(self) -> int:
        return len(self.samples)

    def batch(self, numbers: Sequence[int]) -> Batch:
        batch = self.samples.batch(numbers)
        return replace(batch, targets=self.numbers[batch.targets])

    def origin(self, number: int) -> str:
        return self.samples.origin(number)
