"""What a model is given at a step, and what is asked of it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from glasshouse.errors import InputError


@dataclass(frozen=True)
class Batch:
    """Rows of ids and what the model should say about them.

    A decoder or an encoder reads `ids`; an encoder-decoder reads `source` and, as the decoder's input, `ids`.

    >>> ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    >>> batch = Batch(ids, targets=ids + 1, loss=ids > 2)
    >>> [len(part) for part in batch.split(2)]
    [1, 1]
    """

    ids: Tensor  # [B, S]
    targets: Tensor  # [B, S], or [B] for labels
    loss_mask: Tensor  # like targets: True where the answer counts
    documents: Tensor | None = None  # [B, S]: which text of its row an id belongs to
    lengths: Tensor | None = None  # [B]: how many ids of a row are real
    source: Tensor | None = None  # [B, T]
    source_lengths: Tensor | None = None  # [B]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def n_tokens(self) -> int:
        """How many ids the model reads, padding apart."""
        ids = self.ids.numel() if self.lengths is None else int(self.lengths.sum())
        return ids + (0 if self.source_lengths is None else int(self.source_lengths.sum()))

    def forward(self, model: nn.Module) -> Tensor:
        """Run the model on what it is to read."""
        if self.source is None:
            return model(self.ids, documents=self.documents, lengths=self.lengths)
        return model(self.source, self.ids, lengths=self.source_lengths, target_lengths=self.lengths)

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch on another device, without waiting for it."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def microbatches(self, count: int) -> list[Batch]:
        """Cut the rows into equal parts, for gradients that are added up over several passes."""
        if count < 1:
            raise InputError(f"parts is {count}, but a batch is cut into at least 1.")
        rows = -(-len(self) // count)
        return [self._each(lambda tensor, at=at: tensor[at : at + rows]) for at in range(0, len(self), rows)]

    def _each(self, change: Any) -> Batch:  # noqa: ANN401 - a lambda with a default has no type to write
        given = ((field.name, getattr(self, field.name)) for field in fields(self))
        return replace(self, **{name: change(tensor) for name, tensor in given if tensor is not None})
