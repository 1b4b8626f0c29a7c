"""Endpoint for every number of one query-key pair."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from glasshouse.config import JsonDict, require
from glasshouse.inspection import AttentionMap
from glasshouse.page import serialization
from glasshouse.page.trace import TraceCache
from glasshouse.page.views.attention.layer_map import MASKED, HeadParams, mask_of

LISTED = 8  # keys listed per query
WHOLE = 2**20  # weights up to which a whole map is computed


@dataclass(frozen=True)
class QueryKey(HeadParams):
    """Parameters of one query-key pair."""

    query: int = 0
    key: int = 0


def query_key(traces: TraceCache, params: QueryKey) -> JsonDict:
    """Return every number of one query-key pair, the attention weights of the query, and the head output z."""
    found = params.map(traces)
    _, heads, queries, keys = found.shape
    require(0 <= params.query < queries, "query", params.query, f"within 0 and {queries - 1}")
    require(0 <= params.key < keys, "key", params.key, f"within 0 and {keys - 1}")
    kernel = found.kernel
    group = heads // kernel.k.shape[1]
    shared = params.head // group
    exact = torch.promote_types(kernel.q.dtype, torch.float32)
    q = kernel.q[0, params.head, params.query].to(exact)
    k, v = kernel.k[0, shared, params.key].to(exact), kernel.v[0, shared].to(exact)
    # On its own a row is summed in another order than in a matrix: with the others it has the bits of `record`.
    start, stop = (0, queries) if queries * keys <= WHOLE else (params.query, params.query + 1)
    weights, row = (
        of(params.head, slice(start, stop))[0, params.query - start] for of in (found.weights, found.scores)
    )
    there = (row > -torch.inf).nonzero()[:, 0]
    top = there[weights[there].argsort(descending=True, stable=True)[:LISTED]]
    largest = row.max()
    bias = _added(found, params.head, params.query, params.key)
    return {
        "q": serialization.encode_tensor(q),
        "k": serialization.encode_tensor(k),
        "products": serialization.encode_tensor(q * k),
        "sum": serialization.finite_or_none((q * k).sum()),
        "scale": float(kernel.attend.scale),
        "softcap": kernel.attend.softcap,
        "bias": serialization.finite_or_none(bias),  # None: masked
        "score": serialization.finite_or_none(row[params.key]),
        "largest": serialization.finite_or_none(largest),
        "total": serialization.finite_or_none((row - largest).exp().sum()),
        "weight": serialization.finite_or_none(weights[params.key]),
        "weights": serialization.encode_tensor(torch.where(row > -torch.inf, weights, MASKED)),
        "seen": len(there),
        "top": [{"key": int(one), "weight": float(weights[one]), "score": float(row[one])} for one in top],
        "v": serialization.encode_tensor(v[params.key]),
        "weighted_value": serialization.encode_tensor(weights[params.key] * v[params.key]),
        "z": serialization.encode_tensor(weights @ v),
        "kv_head": shared,
        "group": group,
    }


def _added(found: AttentionMap, head: int, query: int, key: int) -> float:
    """Return the mask and position bias of one score."""
    mask = mask_of(found, head, slice(query, query + 1))
    if mask is None:
        return 0.0
    one = mask.expand(1, found.shape[3])[0, key]
    return float(one) if one.dtype != torch.bool else 0.0 if one else -math.inf
