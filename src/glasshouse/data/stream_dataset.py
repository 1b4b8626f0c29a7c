"""Samples of an iterable dataset, such as torch's IterableDataset: in its own order, read as training needs them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any

from torch import Tensor

from glasshouse.config import JsonDict
from glasshouse.data.batch import Batch
from glasshouse.data.map_dataset import collate, fields_of
from glasshouse.errors import InputError

KEPT_ITEMS = 4096  # behind the last one that was asked for: threads prefetch batches in any order
KEPT_STATES = 256


class StreamDataset:
    """Sample k is the k-th item of an iterable, which begins again where it ends; items are as in `MapDataset`.

    Where the iterable has `state_dict` and `load_state_dict`, it can be continued where it was; its `set_epoch`, if
    there is one, is called when it begins again.

    >>> stream = StreamDataset([[1, 2, 3], [4, 5]])
    >>> [stream.batch([k]).ids.tolist() for k in range(3)]
    [[[1, 2]], [[4]], [[1, 2]]]
    """

    def __init__(self, items: Iterable[Any], *, max_len: int | None = None) -> None:
        self.items, self.max_len = items, max_len
        self.limits: dict[str, int] = {}
        self._iterator: Iterator[Any] | None = None
        self._epoch, self._read, self._began = 0, 0, 0  # items read in all, and before this epoch
        self._rows: dict[int, dict[str, Tensor]] = {}
        self._states: dict[int, JsonDict] = {}  # before the item of this number was read
        self._lock = threading.Lock()

    @property
    def size(self) -> int | None:
        """The number of samples in an epoch, if the iterable has a length."""
        return len(self.items) if isinstance(self.items, Sized) else None

    def __len__(self) -> int:
        """Return the number of samples in an epoch; raise if that is not known."""
        if (size := self.size) is None:
            raise InputError("the dataset is a stream without a length; give train.steps instead of train.epochs.")
        return size

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the samples with these indices, padded on the right to the longest."""
        with self._lock:
            self._remember_state()
            while self._read <= max(indices):
                self._read_item()
            for number in [one for one in self._rows if one < max(indices) - KEPT_ITEMS]:
                del self._rows[number]
            if gone := [one for one in indices if one not in self._rows]:
                raise InputError(f"item {gone[0]} of the dataset is gone; the samples of a stream are read in order.")
            return collate([self._rows[index] for index in indices])

    def origin(self, index: int) -> str:
        """Describe where in the dataset a sample comes from."""
        return f"item {index} of the stream"

    def state_at(self, number: int) -> JsonDict | None:
        """Return the state of the iterable from which the sample of this number can be read; None if it has none."""
        with self._lock:
            self._remember_state()
            return self._states.get(max((one for one in self._states if one <= number), default=-1))

    def seek(self, number: int, state: JsonDict | None) -> None:
        """Continue with the sample of this number, from a saved state unless that is where the stream is."""
        with self._lock:
            here = number <= self._read and all(one in self._rows for one in range(number, self._read))
            if here and (number == 0 or state is not None):
                return
            if state is None or not hasattr(self.items, "load_state_dict"):
                raise InputError(
                    f"the run goes on at item {number} of {type(self.items).__name__}, a stream that cannot be set "
                    "to it; give it state_dict and load_state_dict, or give a map-style dataset."
                )
            self._rows.clear()
            self._states.clear()
            self._iterator = None
            self._read, self._epoch, self._began = state["item"], state["epoch"], state["began"]
            self.items.load_state_dict(state["state"])

    def _remember_state(self) -> None:
        if not hasattr(self.items, "state_dict"):
            return
        state = self.items.state_dict()
        try:
            copied = json.loads(json.dumps(state))
        except (TypeError, ValueError) as error:
            raise InputError(
                f"state_dict() of the dataset cannot be saved ({error}); return numbers, texts, lists and dicts."
            ) from None
        where = {"item": self._read, "epoch": self._epoch, "began": self._began}
        self._states[self._read] = {**where, "state": copied}
        while len(self._states) > KEPT_STATES:
            del self._states[min(self._states)]

    def _read_item(self) -> None:
        while True:
            if self._iterator is None:
                self._iterator = iter(self.items)
            try:
                item = next(self._iterator)
            except StopIteration:
                if self._read == self._began:
                    raise InputError(
                        f"the dataset has no items after {self._read}; give an iterable with items, which begins "
                        "again each time, as torch's IterableDataset does."
                    ) from None
                self._iterator, self._epoch, self._began = None, self._epoch + 1, self._read
                if hasattr(self.items, "set_epoch"):
                    self.items.set_epoch(self._epoch)
                continue
            self._rows[self._read] = fields_of(item, self._read, self.max_len, self.limits)
            self._read += 1
            return
