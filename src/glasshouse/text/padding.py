"""Rows of ids as one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def pad(rows: Sequence[Sequence[int]], pad_id: int = 0) -> tuple[Tensor, Tensor]:
    """Return rows of ids as one tensor [B, S], padded on the right, and their lengths [B].

    >>> ids, lengths = pad([[5, 6, 7], [8]])
    >>> ids.tolist(), lengths.tolist()
    ([[5, 6, 7], [8, 0, 0]], [3, 1])
    """
    import torch  # so that tokenizers load without it

    width = max(map(len, rows), default=0)
    padded = [[*row, *[pad_id] * (width - len(row))] for row in rows]
    ids = torch.tensor(padded, dtype=torch.long).reshape(len(rows), width)
    return ids, torch.tensor([len(row) for row in rows], dtype=torch.long)
