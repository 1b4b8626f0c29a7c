"""Where each token of a batch stands: at which position, in which document, real or padding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from glasshouse.errors import InputError


@dataclass(frozen=True)
class Layout:
    """Positions count the real tokens of a document from 0. B is 1 where all rows are alike."""

    positions: Tensor  # [B, S]
    real: Tensor | None = None  # [B, S] bool, None: all of them
    documents: Tensor | None = None  # [B, S] counted from 0 along the row, None: one a row
    document_ids: Tensor | None = None  # [B, S] the numbers the caller gave them, which tie a target to its source
    prefix_lengths: Tensor | None = None  # [B, S] how many tokens of its document see each other both ways
    right_padded: bool = False  # all padding stands at the end of its row
    ordered: bool = False  # token t of a row stands at position t


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
    """Work out where the tokens of ids [B, S] stand.

    `lengths` [B] or `mask` [B, S] (True for real) tell padding; `documents` [B, S] numbers packed documents;
    `prefix` [B] or [B, S] says how many leading tokens of a document see each other both ways; `start` [B] is
    what a cache already holds of each row, or [B, S] the position of each token itself; `side` is put before these
    names in errors.

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
        _expect(prefix_lengths, "prefix", ids.shape if getattr(prefix_lengths, "ndim", 0) == 2 else ids.shape[:1])
        prefix_lengths = (prefix_lengths if prefix_lengths.dim() == 2 else prefix_lengths[:, None]).expand(ids.shape)
    # Without a cache, padding at the end goes on counting, so that it lies in the future of every real token.
    trailing = lengths is not None and start is None
    if start is not None and start.dim() == 2:
        return Layout(start, real)
    positions = _positions(ids, None if trailing else real, numbers)
    if start is not None:
        if len(start) != len(ids):
            raise InputError(f"the cache has {len(start)} rows, but this call has {len(ids)}; make one that fits.")
        positions = positions + start[:, None]
        if prefix_lengths is not None:
            _check_prefix(prefix_lengths, start + (ids.shape[1] if real is None else real.sum(1)))
    return Layout(positions, real, numbers, documents, prefix_lengths, trailing)


def _check_prefix(prefix_lengths: Tensor, held: Tensor) -> None:
    if prefix_lengths.is_cpu and not torch.compiler.is_compiling() and bool((prefix_lengths > held[:, None]).any()):
        longest, least = int(prefix_lengths.max()), int(held.min())
        raise InputError(
            f"prefix holds {longest}, but with this call a row has {least} tokens in the cache; "
            "give the whole prefix in one call."
        )


def _real(ids: Tensor, lengths: Tensor | None, mask: Tensor | None, side: str) -> Tensor | None:
    if lengths is not None and mask is not None:
        raise InputError(f"{side}lengths and {side}mask were both given; they tell the same, so leave one out.")
    if lengths is not None:
        _expect(lengths, f"{side}lengths", ids.shape[:1])
        if lengths.is_cpu and not torch.compiler.is_compiling():
            low, high = (int(value) for value in lengths.aminmax())
            if low < 0 or high > ids.shape[1]:
                wrong = low if low < 0 else high
                raise InputError(
                    f"{side}lengths holds {wrong}, but a row has {ids.shape[1]} tokens; stay within 0 and that."
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
    after = counted.cumsum(1)  # real tokens up to and with this one
    if documents is not None:
        begin = torch.searchsorted(documents, documents)  # the place where each token's document begins
        after = after - (after - counted).gather(1, begin)
    return (after - 1).clamp(min=0)  # padding ahead of the first token stands at 0, where nobody looks


def _expect(tensor: Tensor, name: str, shape: torch.Size) -> None:
    if not isinstance(tensor, Tensor):
        raise InputError(f"{name} is a {type(tensor).__name__}, but it must be a tensor of shape {list(shape)}.")
    if tensor.shape != shape:
        raise InputError(f"{name} has shape {list(tensor.shape)}, but with these ids it must have {list(shape)}.")
