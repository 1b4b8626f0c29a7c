"""Custom objects passed to `train` in place of settings: a model, an objective or loss, an optimizer, a dataset."""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn

from glasshouse import config
from glasshouse.data import Batches, Dataset, MapDataset
from glasshouse.data.stream_dataset import StreamDataset
from glasshouse.errors import InputError
from glasshouse.models import Model, check_tokenizer, checked_weights
from glasshouse.objectives import Objective
from glasshouse.objectives.loss.cross_entropy import LossFn
from glasshouse.spec import Seq2SeqSpec, Spec
from glasshouse.text import Tokenizer
from glasshouse.training.run import Data, NewModel, Run
from glasshouse.training.setup.datasets import Datasets, given_tokenizer

Base = tuple[Model, Tokenizer | None]  # a model to start from
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
SAMPLED = 64  # samples read for the mean length and the fingerprint
ITEMS = {"__getitem__", "batch"}  # a dataset of torch, or of `glasshouse.data`
WANTED = {
    "dataset": "a dataset with a length and items, such as torch's, or a pair of them for training and validation, "
    "of which the first may be an iterable",
    "objective": "an Objective or a loss function of model, batch and label smoothing",
    "model": "a model of gh.build or gh.load, or a pair of it and its tokenizer",
    "optimizer": "a function that takes the model and returns a torch.optim.Optimizer",
}
ARGUMENTS = {"objective": 3, "optimizer": 1}  # of a function


@dataclass(frozen=True)
class Custom:
    """The arguments of `train` that replace settings."""

    objective: Objective[Any] | LossFn | None = None
    optimizer: MakeOptimizer | None = None
    dataset: Any = None  # map-style, or a pair of them: for training and validation
    model: Model | tuple[Model, Tokenizer] | None = None

    def __post_init__(self) -> None:
        if self.model is not None and not isinstance(self._model[0], Model):
            raise InputError(f"model is a {type(self.model).__name__}, but it must be {WANTED['model']}.")
        for one in self._datasets:
            has_items = hasattr(one, "__len__") and ITEMS & {*dir(one)}
            if isinstance(one, type | str) or not (has_items or is_stream(one)):
                raise InputError(f"dataset is {one!r}, but it must be {WANTED['dataset']}.")
        for name in ("objective", "optimizer"):
            given = getattr(self, name)
            if isinstance(given, type) or not (given is None or callable(given) or isinstance(given, Objective)):
                raise InputError(f"{name} is {given!r}, but it must be {WANTED[name]}.")
            if given is not None and not isinstance(given, Objective) and not _takes(given, ARGUMENTS[name]):
                raise InputError(f"{name} is {given!r}, which takes other arguments; it must be {WANTED[name]}.")

    @property
    def _datasets(self) -> tuple[Any, ...]:
        pair = isinstance(self.dataset, tuple) and len(self.dataset) == 2
        return () if self.dataset is None else self.dataset if pair else (self.dataset,)

    @property
    def _model(self) -> tuple[Any, Tokenizer | None]:
        return self.model if isinstance(self.model, tuple) and len(self.model) == 2 else (self.model, None)

    def with_model(self, run: Run) -> Run:
        """Return the run with the spec of the model that is given, if one is, in place of its own."""
        if self.model is None:
            return run
        if run.unchosen is not None:
            raise InputError("model is given, but train.minutes is to choose one; set train.steps, too.")
        return replace(run, model=NewModel(None, config.dump(self._model[0].spec)))

    def base(self, data: Data) -> Base | None:
        """Return the model that is given and its tokenizer: its own or the one of the data settings."""
        if self.model is None:
            return None
        model, own = self._model
        checked_weights(model)  # as checkpoints have them
        tok = given_tokenizer(data) if own is None else own
        if tok is not None:
            check_tokenizer(model, tok)
        elif self.dataset is None:
            raise InputError("model has no tokenizer; give model=(model, tok), or set data.tokenizer=FOLDER.")
        return model, tok

    @property
    def names(self) -> dict[str, str]:
        """The qualified name of each custom object, by argument; they must be the same on resume.

        >>> from glasshouse.objectives import CausalLM
        >>> Custom(objective=CausalLM()).names
        {'objective': 'glasshouse.objectives.causal_lm.CausalLM'}
        """
        brought = {
            "model": self._model[0],
            "objective": self.objective,
            "optimizer": self.optimizer,
            "dataset": next(iter(self._datasets), None),
        }
        return {name: _qualified(one) for name, one in brought.items() if one is not None}

    def choose_objective(self, setting: Objective[Any] | None) -> Objective[Any] | None:
        """Return the objective given, or else the one of the settings; None if model and data decide."""
        return self.objective if isinstance(self.objective, Objective) else setting

    def with_loss(self, objective: Objective[Any]) -> Objective[Any]:
        """Return the objective with the loss that was given, if one was."""
        if self.objective is None or isinstance(self.objective, Objective):
            return objective
        changed = copy.copy(objective)
        object.__setattr__(changed, "loss", self.objective)  # which a frozen dataclass of settings allows
        return changed

    def make_optimizer(self, model: nn.Module, default: Callable[[], torch.optim.Optimizer]) -> torch.optim.Optimizer:
        """Return the optimizer: the one given, whose learning rates the schedule scales, or the default."""
        if self.optimizer is None:
            return default()
        made = self.optimizer(model)
        if not isinstance(made, torch.optim.Optimizer):
            raise InputError(f"optimizer returned {made!r}, but it must return a torch.optim.Optimizer.")
        for group in made.param_groups:
            group.setdefault("initial_lr", group["lr"])
        return made


def is_stream(dataset: object) -> bool:
    """Whether a dataset can only be iterated, as torch's IterableDataset.

    >>> is_stream(iter([])), is_stream([])
    (True, False)
    """
    from torch.utils.data import IterableDataset

    if isinstance(dataset, IterableDataset):  # which inherits __getitem__, and raises there
        return True
    return hasattr(dataset, "__iter__") and not ITEMS & {*dir(dataset)}


def _takes(function: Callable[..., object], count: int) -> bool:
    """Whether a function can be called with so many arguments.

    >>> _takes(lambda model, batch: 0, 3), _takes(lambda *given: 0, 3)
    (False, True)
    """
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    except ValueError:  # a C function without a signature: the call itself will raise
        return True
    return True


def _qualified(value: object) -> str:
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


@dataclass(frozen=True)
class CustomDatasets:
    """The samples to train on and to validate on, and the tokenizer, if there is one."""

    tok: Tokenizer | None
    train: Dataset
    validation: Dataset

    @property
    def fingerprint(self) -> str:
        """The number of samples and a hash of the first ones; it must be the same on resume."""
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
        """Set the upper bounds of ids and labels, known once there is a spec, that batches are checked for."""
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
    """Return the number of samples in an epoch; None for a stream of unknown length."""
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
    """Describe the sizes of the training and the validation set."""
    if isinstance(datasets, CustomDatasets):
        size = size_of(datasets.train)
        samples = "a stream of samples" if size is None else f"{size:,} samples"
        return f"{samples} for training, {len(datasets.validation):,} for validation"
    train, validation = datasets.train, datasets.validation
    columns = ", ".join(train.manifest.get("columns", ()))
    kind = train.kind + (f" (columns {columns})" if columns else "")
    items = f"{len(train):,} item{'' if len(train) == 1 else 's'}"
    return f"{kind}: {train.n_tokens:,} in {items} for training, {validation.n_tokens:,} for validation"
