"""Samples of any map-style dataset, such as torch's: shuffled each epoch, padded and put into batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from glasshouse.data.batch import Batch
from glasshouse.data.shuffle import Shuffled
from glasshouse.errors import InputError

IGNORE_INDEX = -100  # a target that does not count, as in torch's cross_entropy
FIELDS = ("ids", "targets", "source")


class Items(Protocol):
    """A map-style dataset."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...  # noqa: ANN401 - an item of any kind


class MapDataset:
    """The samples of a map-style dataset, items `start` to `stop`.

    An item is the ids of a sequence, whose targets are the next ids; or a pair of ids and targets; or a dict of
    `ids`, `targets` and, for an encoder-decoder, `source`. There are as many targets as ids, each the one that is
    predicted at its position, or one, the label of the sequence; -100 does not count.

    >>> dataset = MapDataset([[5, 6, 7], ([1, 2], [-100, 3])])
    >>> batch = dataset.batch([0, 1])
    >>> batch.ids.tolist(), batch.targets.tolist(), batch.loss_mask.tolist()
    ([[1, 2], [5, 6]], [[0, 3], [6, 7]], [[False, True], [True, True]])
    """

    def __init__(
        self, items: Items, *, start: int = 0, stop: int | None = None, max_len: int | None = None, seed: int = 0
    ) -> None:
        self.items, self.max_len = items, max_len
        self.limits: dict[str, int] = {}  # the number of values that a field can have, once the model is known
        self.start, self.stop = start, len(items) if stop is None else stop
        if self.stop <= self.start:
            raise InputError(f"the dataset has {len(items)} items, which are too few; give more.")
        self.order = Shuffled(self.stop - self.start, seed)

    def __len__(self) -> int:
        """Return the number of samples in an epoch."""
        return self.order.n

    def numbers(self, indices: Sequence[int]) -> list[int]:
        """Return the number of the item that each sample is."""
        return [self.start + number for number in self.order(np.asarray(indices, np.int64))[1].tolist()]

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the samples with these indices, padded on the right to the longest."""
        return collate([fields_of(self.items[one], one, self.max_len, self.limits) for one in self.numbers(indices)])

    def origin(self, index: int) -> str:
        """Describe where in the dataset a sample comes from."""
        return f"item {self.numbers([index])[0]}"


def fields_of(item: Any, number: int, max_len: int | None, limits: Mapping[str, int]) -> dict[str, Tensor]:  # noqa: ANN401
    """Return the fields of an item, after checking them; `limits` has the number of values that a field can have."""
    if not isinstance(item, Mapping):
        pair = isinstance(item, tuple) and len(item) == 2
        item = dict(zip(FIELDS, item if pair else (item[:-1], item[1:]), strict=False))
    if not {"ids", "targets"} <= item.keys() <= {*FIELDS}:
        raise InputError(
            f"item {number} of the dataset has {', '.join(map(str, item))}, but it must have ids and targets, "
            "and source for an encoder-decoder."
        )
    fields = {name: _integers(value, name, number) for name, value in item.items()}
    ids, targets = fields["ids"], fields["targets"]
    if ids.dim() != 1 or not len(ids) or targets.dim() > 1 or (targets.dim() == 1 and len(targets) != len(ids)):
        raise InputError(
            f"item {number} of the dataset has ids of shape {list(ids.shape)} and targets of shape "
            f"{list(targets.shape)}, but it must have as many targets as ids, or one label."
        )
    if max_len is not None and len(ids) > max_len:
        raise InputError(
            f"item {number} of the dataset has {len(ids)} ids, but data.seq_len is {max_len}; shorten it, "
            "or raise data.seq_len."
        )
    for name, count in limits.items():
        values = fields.get(name, ids)
        wrong = values[(values < 0) & ~((values == IGNORE_INDEX) & (name == "targets")) | (values >= count)]
        if wrong.numel():
            kind = "classes" if name == "targets" and count != limits["ids"] else "tokens in its vocabulary"
            raise InputError(
                f"item {number} of the dataset has {int(wrong.flatten()[0])} among its {name}, but the model has "
                f"{count} {kind}; give numbers from 0 to {count - 1}{', or -100' if name == 'targets' else ''}."
            )
    return fields


def _integers(value: Any, name: str, number: int) -> Tensor:  # noqa: ANN401 - as the item has it
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"item {number} of the dataset has {name} that are no numbers ({error}).") from None
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise InputError(
            f"item {number} of the dataset has {name} of type {tensor.dtype}, but token ids and labels are integers; "
            "convert them."
        )
    return tensor.long()


def collate(rows: Sequence[Mapping[str, Tensor]]) -> Batch:
    """Return items as a batch, padded on the right to the longest."""
    ids, lengths = _pad([row["ids"] for row in rows])
    given = [row["targets"] for row in rows]
    targets = torch.stack(given) if given[0].dim() == 0 else _pad(given, IGNORE_INDEX)[0]
    mask = targets != IGNORE_INDEX
    source, source_lengths = _pad([row["source"] for row in rows]) if "source" in rows[0] else (None, None)
    return Batch(
        ids,
        targets.masked_fill(~mask, 0),
        mask,
        lengths=None if int(lengths.min()) == ids.shape[1] else lengths,  # attention without padding is faster
        source=source,
        source_lengths=source_lengths,
    )


def _pad(rows: Sequence[Tensor], value: int = 0) -> tuple[Tensor, Tensor]:
    """Return rows padded on the right to the longest, and their lengths."""
    padded = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=value)
    return padded, torch.tensor([len(row) for row in rows])
