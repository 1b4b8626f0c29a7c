"""Generation: statement A13."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import glasshouse as gh

Grow = Callable[..., Any]
Agree = Callable[..., None]

GROUPS = [1, 2, 4]  # key-value heads of the 4 heads: one, several, all


def random_ids(*shape: int) -> Tensor:
    return torch.randint(23, shape)


# A13 --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("kind", ["decoder", "seq2seq"])
def test_a13_a_token_leaves_two_vectors_a_layer_and_group(grow: Grow, kind: str, groups: int) -> None:
    """What reading fills of an empty cache is a key and a value of width 4 for each token, layer and group."""
    model = grow(kind, n_kv_heads=groups)
    cache = model.make_cache(3, 9)
    source, ids = random_ids(3, 5), random_ids(3, 7)
    with torch.no_grad():
        if kind == "seq2seq":
            model(source, ids, cache=cache)
        else:
            model(ids, cache=cache)
    tokens = 3 * 7 + (3 * 5 if kind == "seq2seq" else 0)  # cross-attention keeps the source's
    tensors = (*cache.keys, *cache.values, *cache.source_keys, *cache.source_values)
    assert sum(int(tensor.count_nonzero()) for tensor in tensors) == tokens * 2 * 2 * groups * 4


@pytest.mark.parametrize("groups", GROUPS)
def test_a13_the_bytes_of_a_cache_by_arithmetic(grow: Grow, groups: int) -> None:
    """A cache takes bytes for the slots of its rows, one a token and one that takes what padding writes."""
    token = 2 * 2 * groups * 4 * 8  # keys and values, layers, groups, width, bytes of a float64
    decoder, seq2seq = grow("decoder", n_kv_heads=groups), grow("seq2seq", n_kv_heads=groups)
    cache = decoder.make_cache(3, 20)
    assert cache.n_bytes == 3 * (20 + 1) * token
    assert sum(tensor.numel() * 8 for tensor in (*cache.keys, *cache.values)) == cache.n_bytes
    assert decoder.make_cache(3, 21).n_bytes - cache.n_bytes == 3 * token
    assert seq2seq.make_cache(3, 20, 11).n_bytes == 3 * (20 + 1 + 11) * token

    engine = gh.Engine(decoder, slots=5, max_len=24)
    assert engine.n_bytes == 5 * (24 + 1) * token
    requests = [engine.submit(random_ids(6).tolist(), max_new_tokens=9) for _ in range(7)]
    engine.run()
    assert all(len(request.ids) == 9 for request in requests)
    assert engine.n_bytes == 5 * (24 + 1) * token  # it never grows


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_a13_bytes_a_token_shrink_by_heads_over_kv_heads(dtype: torch.dtype, size: int) -> None:
    """A published shape of 32 heads and 16 layers of width 64, with one group, its own 8, and one a head."""
    found = {}
    for groups in (1, 8, 32):
        model = gh.build(gh.preset("llama-1b", n_kv_heads=groups), device="meta", dtype=dtype)
        found[groups] = model.make_cache(1, 101).n_bytes - model.make_cache(1, 100).n_bytes
        print(f"\nA13 bytes a token, {dtype}, {groups} of 32 heads: {found[groups]:,}")
    assert found[32] == 2 * 16 * 32 * 64 * size
    assert found[32] == 4 * found[8] == 32 * found[1]


@pytest.mark.parametrize("groups", GROUPS)
def test_a13_the_smaller_cache_is_enough(grow: Grow, agree: Agree, groups: int) -> None:
    """Token by token, from nothing but the cache, come the logits of one pass over the whole text."""
    model = grow("decoder", position="rotary", n_kv_heads=groups)
    ids = random_ids(2, 8)
    cache = model.make_cache(2, 8)
    with torch.no_grad():
        steps = [model(ids[:, i : i + 1], cache=cache) for i in range(8)]
        agree(torch.cat(steps, 1), model(ids))
