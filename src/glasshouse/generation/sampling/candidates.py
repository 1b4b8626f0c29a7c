"""The candidates that each generated token was drawn from, kept in a few bytes per token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

COLUMNS = 3  # of a row of the sampler: id, probability, log-probability


class Candidate(NamedTuple):
    """A token that could have been drawn."""

    id: int
    probability: float  # of being drawn: after penalties, bias, temperature, top_k, top_p and min_p
    logprob: float  # by the model's raw logits


class Draw(NamedTuple):
    """One drawn token, and the best candidates for it, the most probable first."""

    token: Candidate
    candidates: list[Candidate]


class Draws:
    """The draws of one request, in order, each with `n_candidates` candidates.

    A token that ended the request is the last of them, though it is not part of the output.

    >>> draws = Draws(n_candidates=2)
    >>> draws.add(np.array([[5, 0.25, -1.5], [3, 0.75, -0.5], [5, 0.25, -1.5]]))
    >>> len(draws), draws[0].token.id, [one.probability for one in draws[0].candidates]
    (1, 5, [0.75, 0.25])
    """

    def __init__(self, n_candidates: int) -> None:
        self.n_candidates = n_candidates
        self._data = bytearray()  # float64, which has every id and every probability exactly

    def add(self, row: np.ndarray) -> None:
        """Add a draw as the sampler returns it: the drawn token, and then the candidates, [1 + k, 3]."""
        self.n_candidates = min(self.n_candidates, len(row) - 1)  # a vocabulary may have fewer
        self._data += row[: 1 + self.n_candidates].astype(np.float64, copy=False).tobytes()

    def truncate(self, count: int) -> None:
        """Keep the first `count` draws."""
        del self._data[count * self._row_bytes :]

    @property
    def n_bytes(self) -> int:
        """The size in bytes."""
        return len(self._data)

    def __len__(self) -> int:
        return len(self._data) // self._row_bytes

    def __getitem__(self, index: int) -> Draw:
        if not 0 <= index < len(self):
            raise IndexError(index)
        numbers = np.frombuffer(self._data, np.float64, count=self._row_bytes // 8, offset=index * self._row_bytes)
        token, *others = (Candidate(int(row[0]), *row[1:].tolist()) for row in numbers.reshape(-1, COLUMNS))
        return Draw(token, others)

    def __iter__(self) -> Iterator[Draw]:
        return (self[index] for index in range(len(self)))

    @property
    def _row_bytes(self) -> int:
        return 8 * COLUMNS * (1 + self.n_candidates)
