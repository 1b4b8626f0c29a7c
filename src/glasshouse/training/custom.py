"""What a caller brings to a run in place of what its settings choose: callbacks, objective, optimizer, dataset."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from glasshouse.errors import InputError
from glasshouse.objectives import Objective
from glasshouse.objectives.loss import LossFn

if TYPE_CHECKING:
    from glasshouse.training.loop import Trainer

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


class Callback:
    """Called by the training loop; override what you need.

    `trainer.setup.model` is the model, `trainer.stop()` ends the run after the current step. Steps run ahead on a
    GPU: in `on_step_end` the weights may be those of the next step. In several processes each calls its own.

    >>> class StopBelow(Callback):
    ...     def on_step_end(self, trainer, step, metrics):
    ...         if metrics["loss"] < 0.5:
    ...             trainer.stop()
    """

    def on_train_begin(self, trainer: Trainer) -> None:
        """Before the first step, also after a resume."""

    def on_step_end(self, trainer: Trainer, step: int, metrics: dict[str, Any]) -> None:
        """After a step; numbers that are added to `metrics` are written to metrics.jsonl with the others."""

    def on_validation_end(self, trainer: Trainer, step: int, metrics: dict[str, float]) -> None:
        """After a validation."""

    def on_checkpoint(self, trainer: Trainer, step: int) -> None:
        """After a checkpoint was handed to the thread that writes it."""

    def on_train_end(self, trainer: Trainer) -> None:
        """After the last step, before the model is saved."""


@dataclass(frozen=True)
class Custom:
    """The arguments of `train` beside the settings."""

    callbacks: Sequence[Callback] = ()
    objective: Objective[Any] | LossFn | None = None
    optimizer: MakeOptimizer | None = None
    dataset: Any = None  # map-style, or a pair of them: for training and validation

    def __post_init__(self) -> None:
        if unknown := [one for one in self.callbacks if not isinstance(one, Callback)]:
            raise InputError(f"callbacks has {unknown[0]!r}, but each must be a gh.training.Callback.")
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
    def names(self) -> dict[str, str]:
        """What was brought that changes the result, by name: a resumed run must bring the same.

        >>> from glasshouse.objectives import CausalLM
        >>> Custom(objective=CausalLM()).names
        {'objective': 'glasshouse.objectives.causal_lm.CausalLM'}
        """
        brought = {
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


ITEMS = {"__getitem__", "batch"}  # a dataset of torch, or of `glasshouse.data`
WANTED = {
    "dataset": "a dataset with a length and items, such as torch's, or a pair of them for training and validation, "
    "of which the first may be an iterable",
    "objective": "an Objective or a loss function of model, batch and label smoothing",
    "optimizer": "a function that takes the model and returns a torch.optim.Optimizer",
}

ARGUMENTS = {"objective": 3, "optimizer": 1}  # of a function


def _takes(function: Callable[..., object], count: int) -> bool:
    """Whether a function can be called with so many arguments.

    >>> _takes(lambda model, batch: 0, 3), _takes(lambda *given: 0, 3)
    (False, True)
    """
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    except ValueError:  # one of C has no signature: its call will say
        return True
    return True


def _qualified(value: object) -> str:
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"
