"""Several copies of a prompt run as one batch, each with another place changed: as many passes at once as fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from glasshouse.inspection.editing import edit
from glasshouse.inspection.forward_pass import check_full_sequence
from glasshouse.inspection.sites import unwrap_model

MAX_ELEMENTS = 2**25  # numbers in the largest tensor of a pass

EditAt = Callable[[Tensor, int], None]  # changes a value [B, ...] at one place, where it stands


@dataclass(frozen=True, eq=False)
class BatchedEdits:
    """A prompt to be measured with one thing changed at a time."""

    model: nn.Module
    inputs: tuple[Tensor, ...]
    call: Mapping[str, Any]
    metric: Callable[[Tensor], Tensor]  # of the output of one copy
    n_outputs: int  # numbers in the output of one copy

    def __post_init__(self) -> None:
        check_full_sequence({"cache": self.call.get("cache")})  # places to keep are fine

    def metric_per_edit(self, site: str, change: EditAt, n_places: int, n_values: int) -> Tensor:
        """Return the measure with each place of a site, which holds so many values, changed alone, [place]."""
        widest = sum(ids.numel() for ids in self.inputs) * unwrap_model(self.model).spec.d_ff
        at_once = max(1, MAX_ELEMENTS // max(widest, self.n_outputs, n_values))
        measured: list[Tensor] = []
        for start in range(0, n_places, at_once):
            places = range(start, min(start + at_once, n_places))
            with edit(self.model, {site: partial(_change_each, change, places)}):
                output = self._run(len(places))
            measured += [self.metric(one) for one in output.chunk(len(places))]
        return torch.stack(measured)

    def _run(self, copies: int) -> Tensor:
        # All that a model is told has a row for each row of ids, but for the places to keep.
        told = {name: given if name == "keep" else _repeated(given, copies) for name, given in self.call.items()}
        return self.model(*(_repeated(given, copies) for given in self.inputs), **told)


def _change_each(change: EditAt, places: range, value: Tensor) -> Tensor:
    """Return a value [copies * B, ...] with another place changed in each copy."""
    copies = value.unflatten(0, (len(places), -1)).clone()
    for copy, place in zip(copies, places, strict=True):
        change(copy, place)
    return copies.flatten(0, 1)


def _repeated(given: object, copies: int) -> object:
    return given.repeat(copies, *(1 for _ in given.shape[1:])) if isinstance(given, Tensor) else given
