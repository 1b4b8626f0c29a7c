"""Endpoints for attention maps: small maps of all heads, and tiles of one head's map."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from glasshouse.config import JsonDict, require
from glasshouse.inspection import AttentionMap
from glasshouse.layers.attend.mask import Mask
from glasshouse.page import serialization
from glasshouse.page.trace import TraceCache
from glasshouse.page.views.attention.layer_map import MASKED, HeadParams, LayerParams, mask_of

EVERY = slice(None)
TILE = 256  # cells per side of a tile
SMALL = 40  # maximum cells per side of a small map
STRIP = 2**20  # weights in memory at once
KEPT_FROM = 2  # level from which a whole row of tiles is cached, as tiles are small there


@dataclass(frozen=True)
class Maps(LayerParams):
    """Parameters of the small maps of a layer."""


def maps(traces: TraceCache, params: Maps) -> JsonDict:
    """Return a max-pooled map of each head, [head, row, column].

    A byte is 0 where masked, else 1 + 254 times the square root of the weight, which resolves small weights. For long
    texts only every `stride`-th query is computed.
    """
    found = params.map(traces)
    _, heads, queries, keys = found.shape
    tall, wide = -(-queries // SMALL), -(-keys // SMALL)
    stride = min(tall, max(1, math.ceil(queries * keys / STRIP)))
    places = range(0, queries, stride)
    some = found if stride == 1 else _subset(found, places)
    rows = torch.tensor([place // tall for place in places], device=found.kernel.q.device)
    made = torch.zeros((heads, -(-queries // tall), -(-keys // wide)), dtype=torch.uint8)
    for head in range(heads):
        seen = _seen(some, head, slice(0, len(places)))
        columns = F.max_pool1d(seen, wide, ceil_mode=True)
        small = columns.new_full(made.shape[1:], MASKED)
        small.scatter_reduce_(0, rows[:, None].expand_as(columns), columns, "amax")
        made[head] = torch.where(small < 0, 0.0, 1 + (254 * small.clamp(min=0).sqrt()).round()).to(torch.uint8)
    return {"maps": serialization.encode_tensor(made), "pool_size": [tall, wide], "stride": stride}


@dataclass(frozen=True)
class Tile(HeadParams):
    """Parameters of one tile of a head's map."""

    level: int = 0
    row: int = 0
    column: int = 0


def tile(traces: TraceCache, params: Tile) -> JsonDict:
    """Return a tile of one head's map, max-pooled over squares of side 2 ** level; -1 is masked."""
    found = params.map(traces)
    queries, keys = found.shape[2:]
    top = levels(queries, keys) - 1
    require(0 <= params.level <= top, "level", params.level, f"within 0 and {top}")
    span = TILE * 2**params.level
    for name, place, size in (("row", params.row, queries), ("column", params.column, keys)):
        require(0 <= place < -(-size // span), name, place, f"within 0 and {-(-size // span) - 1}")
    if params.level < KEPT_FROM:
        cells = _pooled(found, params, slice(params.column * span, min((params.column + 1) * span, keys)))
    else:
        # A weight needs the softmax over its whole row, so one tile costs as much as the whole row of tiles.
        name = f"{found.site.name}.tiles.{params.head}.{params.level}.{params.row}"
        row = traces.get(params.forward_pass, name)
        if not isinstance(row, Tensor):
            row = _pooled(found, params, EVERY)
            traces.put(params.forward_pass, name, row)
        cells = row[:, params.column * TILE : (params.column + 1) * TILE]
    return {"cells": serialization.encode_tensor(cells)}


def _pooled(found: AttentionMap, params: Tile, keys: slice) -> Tensor:
    """Return the cells of a row of tiles over some keys, computed strip by strip."""
    side = 2**params.level
    first, last = params.row * TILE * side, min((params.row + 1) * TILE * side, found.shape[2])
    step = max(1, STRIP // (found.shape[3] * side)) * side  # a multiple of the pooling size
    strips = []
    for start in range(first, last, step):
        seen = _seen(found, params.head, slice(start, min(start + step, last)), keys)
        strips.append(seen if side == 1 else F.max_pool2d(seen[None], side, ceil_mode=True)[0])
    return torch.cat(strips)


def levels(queries: int, keys: int) -> int:
    """Return the number of zoom levels of a map: the last one is a single tile.

    >>> levels(256, 30), levels(257, 30), levels(8192, 8192)
    (1, 2, 6)
    """
    return 1 + max(0, math.ceil(math.log2(max(queries, keys) / TILE)))


def _subset(found: AttentionMap, places: range) -> AttentionMap:
    """Return the map of a subset of queries."""
    kernel = found.kernel
    queries, keys = found.shape[2:]
    part = slice(places.start, places.stop, places.step)
    dense = kernel.mask.to_dense(queries, keys, kernel.q.device, part)
    if dense is not None and dense.dtype == torch.bool:
        dense = kernel.q.new_zeros(()).masked_fill(~dense, -torch.inf)
    return AttentionMap(found.site, kernel._replace(q=kernel.q[:, :, part], mask=Mask(bias=dense)))


def _seen(found: AttentionMap, head: int, queries: slice, keys: slice = EVERY) -> Tensor:
    """Return the weights of some queries of a head on some keys [queries, keys], MASKED where masked."""
    weights = found.weights(head, queries, keys)[0]
    mask = mask_of(found, head, queries)
    if mask is None:
        return weights
    part = mask[..., keys]
    return weights.masked_fill(~part if part.dtype == torch.bool else part == -torch.inf, MASKED)
