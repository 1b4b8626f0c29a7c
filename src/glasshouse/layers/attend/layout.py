"""Positions, documents and padding of the tokens of a batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from glasshouse.errors import InputError
from glasshouse.layers.host_reads import can_read


@dataclass(frozen=True)
class Layout:
    """Positions count the real tokens of a document from 0. B is 1 where all rows are equal."""

    positions: Tensor  # [B, S]
    real: Tensor | None = None  # [B, S] bool, False for padding; None: no padding
    documents: Tensor | None = None  # [B, S] numbered from 0 along the row; None: one per row
    document_ids: Tensor | None = None  # [B, S] the caller's document ids, which match targets with sources
    prefix_lengths: Tensor | None = None  # [B, S] leading tokens of the document with bidirectional attention
    right_padded: bool = False  # all padding is at the end of its row
    ordered: bool = False  # token t of a row is at position t
    ids: Tensor | None = None  # [B, S]; None: of keys in a cache


def make_layout(
    ids: Tensor,
    *,
    lengths: Tensor | None = None,
    mask: Tensor | None = None,
    documents: Tensor | None = None,
    prefix_lengths: Tensor | None = None,
    start: Tensor | None = None,
    side: str = "",
) -> Layout:
    """Return the layout of ids [B, S].

    `lengths` [B] or `mask` [B, S] (True for real tokens) mark padding; `documents` [B, S] are ids of packed
    documents; `prefix_lengths` [B] or [B, S] count leading tokens of a document with bidirectional attention;
    `start` [B] is the number of cached tokens of each row, or [B, S] the position of each token; `side` is prefixed
    to these names in errors.

    >>> make_layout(torch.zeros(1, 5), documents=torch.tensor([[7, 7, 7, 3, 3]])).positions
    tensor([[0, 1, 2, 0, 1]])
    """
    real = _real(ids, lengths, mask, side)
    numbers = None
    if documents is not None:
        _expect(documents, f"{side}documents", ids.shape)
        changed = documents[:, 1:] != documents[:, :-1]
        numbers = torch.cat([torch.zeros_like(documents[:, :1]), changed.long().cumsum(1)], 1)
    if prefix_lengths is not None:
        _expect(
            prefix_lengths, "prefix_lengths", ids.shape if getattr(prefix_lengths, "ndim", 0) == 2 else ids.shape[:1]
        )
        prefix_lengths = (prefix_lengths if prefix_lengths.dim() == 2 else prefix_lengths[:, None]).expand(ids.shape)
    # Without a cache, right padding continues the positions, so that the causal mask hides it from real tokens.
    right_padded = lengths is not None and start is None
    if start is not None and start.dim() == 2:
        return Layout(start, real, ids=ids)
    positions = _positions(ids, None if right_padded else real, numbers)
    if start is not None:
        if len(start) != len(ids):
            raise InputError(f"the cache has {len(start)} rows, but this call has {len(ids)}; make one of that size.")
        positions = positions + start[:, None]
        if prefix_lengths is not None:
            _check_prefix(prefix_lengths, start + (ids.shape[1] if real is None else real.sum(1)))
    return Layout(positions, real, numbers, documents, prefix_lengths, right_padded, ids=ids)


def _check_prefix(prefix_lengths: Tensor, cached: Tensor) -> None:
    if can_read(prefix_lengths) and bool((prefix_lengths > cached[:, None]).any()):
        longest, shortest = int(prefix_lengths.max()), int(cached.min())
        raise InputError(
            f"prefix_lengths contains {longest}, but with this call a row has {shortest} tokens in the cache; "
            "pass the whole prefix in one call."
        )


def _real(ids: Tensor, lengths: Tensor | None, mask: Tensor | None, side: str) -> Tensor | None:
    if lengths is not None and mask is not None:
        raise InputError(f"{side}lengths and {side}mask were both given; both describe padding, so leave one out.")
    if lengths is not None:
        _expect(lengths, f"{side}lengths", ids.shape[:1])
        if can_read(lengths):
            low, high = (int(value) for value in lengths.aminmax())
            if low < 0 or high > ids.shape[1]:
                wrong = low if low < 0 else high
                raise InputError(
                    f"{side}lengths contains {wrong}, but a row has {ids.shape[1]} tokens; use 0 to {ids.shape[1]}."
                )
        return torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
    if mask is not None:
        _expect(mask, f"{side}mask", ids.shape)
        if mask.dtype != torch.bool:
            raise InputError(f"{side}mask has type {mask.dtype}, but it must be torch.bool, True for real tokens.")
    return mask


def _positions(ids: Tensor, real: Tensor | None, documents: Tensor | None) -> Tensor:
    if real is None and documents is None:
        return torch.arange(ids.shape[1], device=ids.device)[None]
    counted = torch.ones(ids.shape, dtype=torch.long, device=ids.device) if real is None else real.long()
    after = counted.cumsum(1)  # real tokens up to and including this one
    if documents is not None:
        begin = torch.searchsorted(documents, documents)  # index where each token's document begins
        after = after - (after - counted).gather(1, begin)
    return (after - 1).clamp(min=0)  # left padding is at position 0, masked


def _expect(tensor: Tensor, name: str, shape: torch.Size) -> None:
    if not isinstance(tensor, Tensor):
        raise InputError(f"{name} is a {type(tensor).__name__}, but it must be a tensor of shape {list(shape)}.")
    if tensor.shape != shape:
        raise InputError(f"{name} has shape {list(tensor.shape)}, but with these ids it must have {list(shape)}.")
