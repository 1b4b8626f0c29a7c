"""Base class of objectives: the data and the head that one needs, its batches, its loss and its evaluation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from glasshouse import registry
from glasshouse.config import JsonDict
from glasshouse.data import Batch, Corpus, Dataset
from glasshouse.data.corpus import Kind
from glasshouse.models import Model
from glasshouse.objectives.loss.cross_entropy import compute_loss
from glasshouse.objectives.metrics import Example, MetricSums, Report, evaluate_batch, exact_match
from glasshouse.spec import Spec
from glasshouse.text import Tokenizer

D = TypeVar("D", bound=Dataset)
Pair = tuple[list[int], list[int]]  # the ids of a prompt and of its reference


class Objective(registry.Kind, ABC, Generic[D]):
    """A training objective for one kind of data: its dataset, head, loss and evaluation; `registry` lists them all.

    A subclass names the models and the data that it is for and makes their dataset. It may have a head, a loss,
    metrics and an evaluation of its own; by default the loss is cross-entropy. One that `train.objective` names is
    also a frozen dataclass of its settings, registered in `choice` or by `gh.register`.

    >>> from glasshouse.objectives import CausalLM
    >>> CausalLM().data_kind, CausalLM().fits("decoder", "next_token"), CausalLM().fits("encoder", "masked_token")
    ('text', True, False)
    """

    models: ClassVar[str]  # what it trains, in the sentence for a mismatch
    model_kinds: ClassVar[tuple[str, ...]]
    head_kind: ClassVar[str | None] = None  # None: any
    data_kind: ClassVar[Kind | None]  # None: any, as it adds to the objective that model and data decide
    compares_answers: ClassVar[bool] = False  # whether its metrics need a model that can generate
    parallel: ClassVar[bool] = True  # whether several processes can share the model
    whole_batch: ClassVar[bool] = False  # whether its loss compares the samples of a batch, so that none is split
    sequences_per_sample: ClassVar[int] = 1  # that a forward pass has for each sample of a batch

    def fits(self, model_kind: object, head_kind: object) -> bool:
        """Return whether it applies to a model of this kind with a head of this kind."""
        return model_kind in self.model_kinds and self.head_kind in (None, head_kind)

    def check_model(self, s: Spec, corpus: Corpus) -> None:
        """Raise for a model that fits, but not on this corpus."""

    def prepare(self, model: Model, corpus: Corpus, seq_len: int) -> Objective[Any]:
        """Return the objective with all it needs to train a model on a corpus; by default itself.

        A run calls it once, on its device, with the initial weights: also when it is resumed, before the weights of
        a checkpoint are loaded. One that needs another model (a reference, a teacher) returns a copy that has it.
        """
        return self

    def tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer of the data, where neither the settings nor a pretrained model has one; None: any."""
        return None

    def extra_parameters(self, model: Model) -> int:
        """Return how many parameters of other models it keeps in memory; `model` may be on the meta device."""
        return 0

    def frozen_models(self) -> dict[str, Model]:
        """Return the models that `prepare` loaded or copied, by name; a run is not resumed with other weights."""
        return {}

    def head_settings(self, corpus: Corpus) -> JsonDict:
        """Return the settings of a new model's head that the data decide; with none, the model keeps its head."""
        return {}

    def fit_head(self, model: Model, corpus: Corpus) -> Model:
        """Return a pretrained model with a head for the data: itself, or a copy with another head."""
        return model

    def finish(self, model: Model) -> Model:
        """Return the model that a run saves in the end: itself, or a copy without what only training needs."""
        return model

    @abstractmethod
    def make_dataset(
        self, corpus: Corpus, *, batch_size: int, seq_len: int, seed: int = 0, start_id: int | None = None
    ) -> D:
        """Return the samples of a corpus; `start_id` is the one of the model."""

    def dataset_for(self, s: Spec, corpus: Corpus, *, batch_size: int, seq_len: int, seed: int = 0) -> D:
        """Return the samples of a corpus as a model reads them."""
        return self.make_dataset(corpus, batch_size=batch_size, seq_len=seq_len, seed=seed, start_id=s.start_id)

    @abstractmethod
    def samples_for_tokens(self, corpus: Corpus, tokens: int, seq_len: int) -> int:
        """Return how many samples have about `tokens` tokens in total; at most as many as there are."""

    def loss(self, model: nn.Module, batch: Batch, smoothing: float = 0.0) -> Tensor:
        """Return the loss of a batch, summed over its targets; see `compute_loss`."""
        return compute_loss(model, batch, smoothing)

    def token_bytes(self, tok: Tokenizer) -> Tensor | None:
        """Return the number of bytes of each token id, if bits per byte are a metric."""
        return None

    def evaluate_batch(self, model: nn.Module, batch: Batch, token_bytes: Tensor | None = None) -> MetricSums:
        """Return the sums of the metrics over the targets of a batch, without gradients."""
        return evaluate_batch(model, batch, token_bytes)

    def evaluate(self, evaluation: Evaluation, samples: D) -> Report:
        """Evaluate a model on the samples: metrics, and a few examples."""
        return evaluation.report(evaluation.sums(samples))


@dataclass(frozen=True)
class Evaluation(ABC):
    """One evaluation of a model on data, and what it does for the objective."""

    model: Model  # in eval mode
    tok: Tokenizer
    corpus: Corpus
    seq_len: int
    count: int  # samples to evaluate on
    n_generate: int  # items to generate answers for

    @property
    def max_len(self) -> int:
        """Maximum length of prompt and answer."""
        return max(self.seq_len, self.model.spec.max_len)

    @abstractmethod
    def sums(self, samples: Dataset) -> MetricSums:
        """Return the sums of the objective's metrics over the first `count` samples."""

    @abstractmethod
    def generate(
        self, pairs: Sequence[Pair], max_new_tokens: int, *, end: int, show_special: bool = False
    ) -> list[Example]:
        """Generate after each prompt; `show_special` keeps the role tokens of a chat in the prompt's text."""

    def report(
        self, sums: MetricSums, metrics: dict[str, float] | None = None, examples: Sequence[Example] = ()
    ) -> Report:
        """Return a report with these metrics, by default those of the sums."""
        found = sums.metrics() if metrics is None else metrics
        return Report(self.corpus.kind, found, sums.n_targets, list(examples))

    def report_answers(
        self, sums: MetricSums, pairs: Sequence[Pair], *, end: int, show_special: bool = False
    ) -> Report:
        """Generate answers and compare them with the references; the report has all of them as examples."""
        # An answer longer than twice the longest reference is wrong anyway.
        limit = min(self.seq_len, 2 * max((len(reference) for _, reference in pairs), default=0) + 1)
        examples = self.generate(pairs, limit, end=end, show_special=show_special)
        metrics = sums.metrics()
        if examples:
            predictions, references = [one.prediction for one in examples], [one.reference for one in examples]
            metrics["exact_match"] = exact_match(predictions, references)
        return replace(self.report(sums, metrics, examples), n_generated=len(examples))


def items_for_tokens(lengths: NDArray[np.int64], tokens: int) -> int:
    """Return how many of the items with these lengths [items, sequences] have about `tokens` tokens in total.

    >>> items_for_tokens(np.array([[3, 2], [6, 1]]), tokens=7)
    1
    """
    mean = float(lengths.sum(1).mean()) if len(lengths) else 1.0
    return max(1, min(round(tokens / max(mean, 1.0)), len(lengths)))
