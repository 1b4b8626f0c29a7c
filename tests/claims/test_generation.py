"""KV cache size: statement A13."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import glasshouse as gh

BuildModel = Callable[..., Any]
AssertClose = Callable[..., None]

GROUPS = [1, 2, 4]  # key-value heads of the 4 heads: one, several, all


def random_ids(*shape: int) -> Tensor:
    return torch.randint(23, shape)


# A13 --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("kind", ["decoder", "seq2seq"])
def test_a13_each_token_caches_a_key_and_value_per_layer_and_kv_head(
    build_model: BuildModel, kind: str, groups: int
) -> None:
    """Prefill writes a key and a value of width 4 for each token, layer and key-value head."""
    model = build_model(kind, n_kv_heads=groups)
    cache = model.make_cache(3, 9)
    source, ids = random_ids(3, 5), random_ids(3, 7)
    with torch.no_grad():
        if kind == "seq2seq":
            model(source, ids, cache=cache)
        else:
            model(ids, cache=cache)
    tokens = 3 * 7 + (3 * 5 if kind == "seq2seq" else 0)  # cross-attention caches the source
    tensors = [*cache.keys, *cache.values]
    if kind == "seq2seq":
        tensors += [*cache.source.keys, *cache.source.values]
    assert sum(int(tensor.count_nonzero()) for tensor in tensors) == tokens * 2 * 2 * groups * 4


@pytest.mark.parametrize("groups", GROUPS)
def test_a13_cache_bytes_by_arithmetic(build_model: BuildModel, groups: int) -> None:
    """A sequence of the cache has one slot per token and one for padding."""
    token = 2 * 2 * groups * 4 * 8  # keys and values, layers, groups, width, bytes of a float64
    decoder, seq2seq = build_model("decoder", n_kv_heads=groups), build_model("seq2seq", n_kv_heads=groups)
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
def test_a13_bytes_per_token_shrink_by_heads_over_kv_heads(dtype: torch.dtype, size: int) -> None:
    """Llama 1B (32 heads of width 64, 16 layers) with 1, its own 8, and 32 key-value heads."""
    found = {}
    for groups in (1, 8, 32):
        model = gh.build(gh.preset("llama-1b", n_kv_heads=groups), device="meta", dtype=dtype)
        found[groups] = model.make_cache(1, 101).n_bytes - model.make_cache(1, 100).n_bytes
        print(f"\nA13 bytes per token, {dtype}, {groups} of 32 heads: {found[groups]:,}")
    assert found[32] == 2 * 16 * 32 * 64 * size
    assert found[32] == 4 * found[8] == 32 * found[1]


@pytest.mark.parametrize("groups", GROUPS)
def test_a13_cached_decoding_equals_full_pass(
    build_model: BuildModel, assert_close: AssertClose, groups: int
) -> None:
    """Decoding token by token from the cache gives the logits of one pass over the whole text."""
    model = build_model("decoder", position="rotary", n_kv_heads=groups)
    ids = random_ids(2, 8)
    cache = model.make_cache(2, 8)
    with torch.no_grad():
        steps = [model(ids[:, i : i + 1], cache=cache) for i in range(8)]
        assert_close(torch.cat(steps, 1), model(ids))
