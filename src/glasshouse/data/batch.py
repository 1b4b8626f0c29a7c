"""A batch: the inputs of a model, its targets and the loss mask."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from glasshouse.errors import InputError


@dataclass(frozen=True)
class Batch:
    """Sequences of ids with their targets.

    `ids` is the input of a decoder or an encoder; in an encoder-decoder, `source` is the encoder's input and `ids`
    the decoder's.

    >>> ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    >>> batch = Batch(ids, targets=ids + 1, loss_mask=ids > 2)
    >>> [len(micro_batch) for micro_batch in batch.microbatches(2)]
    [1, 1]
    """

    ids: Tensor  # [B, S]
    targets: Tensor  # [B, S], or [B] for labels
    loss_mask: Tensor  # like targets: True where the target counts
    documents: Tensor | None = None  # [B, S]: document index within the sequence
    lengths: Tensor | None = None  # [B]: number of ids that are not padding
    source: Tensor | None = None  # [B, T]
    source_lengths: Tensor | None = None  # [B]
    # [B, M]: every position of the loss mask, and others where a sequence has fewer than M; only they need logits
    target_positions: Tensor | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def n_tokens(self) -> int:
        """Number of input ids, without padding."""
        ids = self.ids.numel() if self.lengths is None else int(self.lengths.sum())
        return ids + (0 if self.source_lengths is None else int(self.source_lengths.sum()))

    def forward(self, model: nn.Module) -> Tensor:
        """Run the model on the inputs."""
        if self.source is None:
            return model(self.ids, documents=self.documents, lengths=self.lengths)
        return model(self.source, self.ids, lengths=self.source_lengths, target_lengths=self.lengths)

    def to(self, device: torch.device | str) -> Batch:
        """Copy the batch to a device, without blocking."""
        if torch.device(device).type != "cuda":
            return self._each(lambda tensor: tensor.to(device))
        # From pageable memory, the host would wait for the copy.
        return self._each(
            lambda tensor: tensor if tensor.is_cuda else tensor.pin_memory().to(device, non_blocking=True)
        )

    def padded(self, multiple: int, max_len: int | None = None) -> Batch:
        """Pad sequences that have lengths to a width that is a multiple, or to `max_len` if that is less.

        >>> ids = torch.tensor([[1, 2, 3], [4, 5, 0]])
        >>> batch = Batch(ids, targets=ids, loss_mask=ids > 0, lengths=torch.tensor([3, 2]))
        >>> [batch.padded(multiple, max_len=6).ids.shape[1] for multiple in (1, 4, 8)]
        [3, 4, 6]
        """

        def pad(tensor: Tensor) -> Tensor:
            width = tensor.shape[1]
            wanted = -(-width // multiple) * multiple
            more = max(0, (wanted if max_len is None else min(wanted, max_len)) - width)
            return F.pad(tensor, (0, more)) if more else tensor

        names = [] if self.source_lengths is None else ["source"]
        if self.lengths is not None:
            alike = (each.name for each in fields(self) if each.name not in ("source", "target_positions"))
            names += [name for name in alike if getattr(getattr(self, name), "shape", None) == self.ids.shape]
        return replace(self, **{name: pad(getattr(self, name)) for name in names})

    def microbatches(self, count: int) -> list[Batch]:
        """Split into micro-batches of equal size, for gradient accumulation."""
        if count < 1:
            raise InputError(f"count is {count}, but a batch is split into at least 1 micro-batch.")
        size = -(-len(self) // count)

        def cut(tensor: Tensor, at: int) -> Tensor:
            rows = len(tensor) // len(self)  # of one sample
            return tensor[at * rows : (at + size) * rows]

        return [self._each(lambda tensor, at=at: cut(tensor, at)) for at in range(0, len(self), size)]

    def _each(self, change: Any) -> Batch:  # noqa: ANN401 - a lambda with a default argument
        given = ((each.name, getattr(self, each.name)) for each in fields(self))
        return replace(self, **{name: change(tensor) for name, tensor in given if tensor is not None})


@dataclass(frozen=True)
class PairBatch(Batch):
    """Pairs of texts: rows 2i and 2i + 1 of `ids` and `lengths` are pair i.

    `targets` [B, 2] has a number for each text, equal for equal texts; `loss_mask` [B] says which pairs count.

    >>> ids = torch.tensor([[1, 2], [3, 4], [5, 6], [1, 2]])
    >>> batch = PairBatch(ids, targets=torch.tensor([[8, 9], [7, 8]]), loss_mask=torch.tensor([True, True]))
    >>> len(batch), [micro_batch.ids.tolist() for micro_batch in batch.microbatches(2)]
    (2, [[[1, 2], [3, 4]], [[5, 6], [1, 2]]])
    """

    def __len__(self) -> int:
        return len(self.loss_mask)


@dataclass(frozen=True)
class PreferenceBatch(Batch):
    """Pairs of answers to prompts: rows 2k and 2k + 1 are the chosen and the rejected answer to prompt k.

    A pair is one target: `targets` and `loss_mask` have one entry for each pair.

    >>> ids = torch.tensor([[1, 2], [1, 3], [4, 5], [4, 6]])
    >>> pairs = torch.zeros(2, dtype=torch.long)
    >>> batch = PreferenceBatch(ids, pairs, pairs == 0, answers=ids + 1, answer_mask=ids > 1)
    >>> len(batch), batch.microbatches(2)[1].ids.tolist()
    (2, [[4, 5], [4, 6]])
    """

    answers: Tensor = field(kw_only=True)  # [2B, S]: the next id at each position
    answer_mask: Tensor = field(kw_only=True)  # [2B, S]: True where it is one of the answer

    def __len__(self) -> int:
        return len(self.targets)

    def sequences(self) -> Batch:
        """Return each prompt with its answer as a sequence of its own, with the tokens of the answer as targets."""
        return Batch(self.ids, self.answers, self.answer_mask, lengths=self.lengths)
