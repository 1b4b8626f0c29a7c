"""A dataset that a caller brings in place of the data of the settings."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from typing import Any

from glasshouse.data import Batches, Dataset, MapDataset
from glasshouse.data.stream_dataset import StreamDataset
from glasshouse.errors import InputError
from glasshouse.spec import Seq2SeqSpec, Spec
from glasshouse.text import Tokenizer
from glasshouse.training.custom import is_stream
from glasshouse.training.datasets import Datasets, given_tokenizer
from glasshouse.training.run import Run

SAMPLED = 64  # samples whose lengths and contents stand for all


@dataclass(frozen=True)
class CustomDatasets:
    """The samples to train on and to validate on, and the tokenizer, if there is one."""

    tok: Tokenizer | None
    train: Dataset
    validation: Dataset

    @property
    def fingerprint(self) -> str:
        """The number of samples and a hash of the first: a resumed run must be given the same."""
        digest = hashlib.sha256()
        batch = self.train.batch(range(self._sampled))
        for field in fields(batch):
            if (tensor := getattr(batch, field.name)) is not None:
                digest.update(tensor.numpy().tobytes())
        size = size_of(self.train)
        return f"{'a stream' if size is None else f'{size:,} samples'} {digest.hexdigest()[:12]}"

    @property
    def _sampled(self) -> int:
        return min(SAMPLED, size_of(self.train) or SAMPLED)

    def limit(self, s: Spec) -> None:
        """Have ids and labels checked against the model, which was not known when the dataset was given."""
        n_classes = getattr(s.head, "n_labels", s.vocab_size)
        for one in (self.train, self.validation):
            if isinstance(one, MapDataset | StreamDataset):
                one.limits |= {"ids": s.vocab_size, "targets": n_classes}
                if isinstance(s, Seq2SeqSpec):
                    one.limits["source"] = s.vocab_size

    def samples_for_tokens(self, tokens: int) -> int:
        """Return how many samples have about `tokens` tokens in total; at most as many as there are."""
        batch = self.train.batch(range(self._sampled))
        wanted = max(1, round(tokens * len(batch) / batch.n_tokens))
        return min(wanted, size_of(self.train) or wanted)

    def batches(self, batch_tokens: int, **share: int) -> Batches:
        """Return the training batches; a dataset that was made for a batch size keeps it."""
        size = getattr(self.train, "batch_size", None) or self.samples_for_tokens(batch_tokens)
        return Batches(self.train, size, **share)


def size_of(samples: Dataset) -> int | None:
    """Return the number of samples in an epoch; None for a stream that does not say."""
    return samples.size if isinstance(samples, StreamDataset) else len(samples)


def _has_batches(dataset: object) -> bool:
    """Whether it is a dataset of `glasshouse.data`; other libraries, too, have a method `batch`."""
    return hasattr(dataset, "batch") and hasattr(dataset, "origin")


AnyDatasets = Datasets | CustomDatasets


def custom_datasets(dataset: Any, run: Run, known: Tokenizer | None) -> CustomDatasets:  # noqa: ANN401 - as given
    """Return the samples of a map-style dataset, or of two, for training and validation.

    Of one, the last part of the items, `data.val_fraction`, is held out for validation. The first of two may be an
    iterable, which is a stream; so may the second, whose items are all read now. `known` is the tokenizer of the base
    model.
    """
    choices: dict[str, Any] = {"max_len": run.data.seq_len, "seed": run.train.seed}
    tok = known if run.data.tokenizer is None else given_tokenizer(run.data)
    if isinstance(dataset, tuple) and len(dataset) == 2:
        train: Any = StreamDataset(dataset[0], max_len=run.data.seq_len) if is_stream(dataset[0]) else dataset[0]
        held_out = list(dataset[1]) if is_stream(dataset[1]) else dataset[1]
        made: list[Any] = [one if _has_batches(one) else MapDataset(one, **choices) for one in (train, held_out)]
        return CustomDatasets(tok, *made)
    if is_stream(dataset):
        raise InputError(
            f"dataset is a {type(dataset).__name__}, a stream, which cannot be split; give a pair of datasets, for "
            "training and validation."
        )
    if _has_batches(dataset):
        raise InputError(
            f"dataset is a {type(dataset).__name__}, whose samples cannot be split; give a pair of datasets, for "
            "training and validation."
        )
    size = len(dataset) - max(1, round(len(dataset) * run.data.val_fraction))
    validation = MapDataset(dataset, start=max(0, size), **choices)
    return CustomDatasets(tok, MapDataset(dataset, stop=size, **choices), validation)


def describe_tokens(datasets: AnyDatasets) -> str:
    """Return how much there is to train and to validate on."""
    if isinstance(datasets, CustomDatasets):
        size = size_of(datasets.train)
        samples = "a stream of samples" if size is None else f"{size:,} samples"
        return f"{samples} for training, {len(datasets.validation):,} for validation"
    train, validation = datasets.train, datasets.validation
    columns = ", ".join(train.manifest.get("columns", ()))
    kind = train.kind + (f" (columns {columns})" if columns else "")
    items = f"{len(train):,} item{'' if len(train) == 1 else 's'}"
    return f"{kind}: {train.n_tokens:,} in {items} for training, {validation.n_tokens:,} for validation"
