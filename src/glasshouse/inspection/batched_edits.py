"""Many edits of one prompt in batched forward passes: copies of the prompt, each with another edit."""

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

MAX_ELEMENTS = 2**25  # in the largest tensor of a forward pass

EditAt = Callable[[Tensor, int], None]  # edits an activation [B, ...] at one index, in place


@dataclass(frozen=True, eq=False)
class BatchedEdits:
    """A prompt whose metric is computed under one edit at a time."""

    model: nn.Module
    inputs: tuple[Tensor, ...]
    model_kwargs: Mapping[str, Any]
    metric: Callable[[Tensor], Tensor]  # of the output of one copy
    n_outputs: int  # elements in the output of one copy

    def __post_init__(self) -> None:
        check_full_sequence({"cache": self.model_kwargs.get("cache")})  # logits_to_keep is allowed

    def metric_per_edit(self, site: str, edit_at: EditAt, n_edits: int, n_elements: int) -> Tensor:
        """Return the metric under each edit of a site, whose activation has `n_elements`, [edit]."""
        widest = sum(ids.numel() for ids in self.inputs) * unwrap_model(self.model).spec.d_ff
        batch_size = max(1, MAX_ELEMENTS // max(widest, self.n_outputs, n_elements))
        values: list[Tensor] = []
        for start in range(0, n_edits, batch_size):
            indices = range(start, min(start + batch_size, n_edits))
            with edit(self.model, {site: partial(_edit_each, edit_at, indices)}):
                output = self._run(len(indices))
            values += [self.metric(one) for one in output.chunk(len(indices))]
        return torch.stack(values)

    def _run(self, copies: int) -> Tensor:
        # Every keyword but logits_to_keep has a batch axis.
        kwargs = {
            name: given if name == "logits_to_keep" else _repeat(given, copies)
            for name, given in self.model_kwargs.items()
        }
        return self.model(*(_repeat(given, copies) for given in self.inputs), **kwargs)


def _edit_each(edit_at: EditAt, indices: range, value: Tensor) -> Tensor:
    """Return an activation [copies * B, ...] with another index edited in each copy."""
    copies = value.unflatten(0, (len(indices), -1)).clone()
    for copy, index in zip(copies, indices, strict=True):
        edit_at(copy, index)
    return copies.flatten(0, 1)


def _repeat(given: object, copies: int) -> object:
    return given.repeat(copies, *(1 for _ in given.shape[1:])) if isinstance(given, Tensor) else given
