"""Attention as retrieval, and what sharing keys costs: statements A14 to A16."""

from __future__ import annotations

import inspect
import math
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import glasshouse as gh
from glasshouse.layers.attend.kernel import repeat_kv

BuildModel = Callable[..., Any]
AssertClose = Callable[..., None]


def retrieve(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """softmax(q . k) v over the prefix, one position and one key at a time."""
    rows = []
    for i, query in enumerate(queries):
        scores = [sum(a * b for a, b in zip(query.tolist(), key.tolist(), strict=True)) for key in keys[: i + 1]]
        powers = [math.exp(score - max(scores)) for score in scores]
        rows.append(sum(power * value for power, value in zip(powers, values, strict=False)) / sum(powers))
    return torch.stack([row for row in rows if isinstance(row, Tensor)])


def one_head(build_model: BuildModel) -> tuple[Any, Any, Tensor]:
    """Return a layer with one head as wide as the model and scale 1, what it needs besides x, and an x."""
    choices = {"position": "none", "qkv_bias": False, "out_bias": False, "attention_scale": 1.0}
    model = build_model("decoder", n_heads=1, n_kv_heads=1, n_layers=1, **choices)
    entered: list[Any] = []
    layer = model.stack.blocks[0].attention.layer
    layer.register_forward_pre_hook(lambda _, args: entered.append(args))
    model(torch.randint(23, (1, 7)))
    return layer, entered[0][1], torch.randn(1, 7, 16, dtype=torch.float64)


def test_a14_identity_projections_are_retrieval_by_dot_products(
    build_model: BuildModel, assert_close: AssertClose
) -> None:
    layer, ctx, x = one_head(build_model)
    with torch.no_grad():
        for linear in (layer.query, layer.key, layer.value, layer.out):
            linear.weight.copy_(torch.eye(16))
        assert_close(layer(x, ctx)[0], retrieve(x[0], x[0], x[0]))


def test_a14_projections_generalise_it(build_model: BuildModel, assert_close: AssertClose) -> None:
    layer, ctx, x = one_head(build_model)
    with torch.no_grad():
        q, k, v = (x[0] @ linear.weight.T for linear in (layer.query, layer.key, layer.value))
        assert_close(layer(x, ctx)[0], retrieve(q, k, v) @ layer.out.weight.T)


def test_a15_own_score_is_among_the_highest_more_often_than_by_chance() -> None:
    model, tok = gh.load("python-3m")
    assert tok is not None
    ids = torch.tensor([tok.encode(inspect.getsource(textwrap))[:96]])
    with torch.no_grad(), gh.record(model, "scores.*") as seen:
        model(ids)
    shares = {1: [], 3: []}
    for layer in range(model.spec.n_layers):
        for head in seen[f"scores.{layer}"][0]:
            ranks = [sorted(row[: i + 1].tolist(), reverse=True).index(row[i].item()) for i, row in enumerate(head)]
            for count, each in shares.items():  # from the first query on whose choice is not certain
                each.append([rank < count for rank in ranks[count:]])
    print()
    for count, each in shares.items():
        share = sum(map(sum, each)) / sum(map(len, each))
        even = sum(count / (i + 1) for i in range(count, ids.shape[1])) / (ids.shape[1] - count)
        heads = sum(sum(one) > len(one) / 2 for one in each)
        print(f"A15 itself in the first {count}: {share:.3f} of heads and positions, {even:.3f} by an even choice; "
              f"in most positions of {heads} of {len(each)} heads")  # fmt: skip
        assert share > 3 * even
        assert heads < len(each) / 2  # but in most heads a token does not score itself so high
    assert max(sum(one) / len(one) for one in shares[1]) > 0.9  # some heads attend to the token itself


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a16_products_per_token_by_arithmetic(build_model: BuildModel, groups: int) -> None:
    """Of width 16, with 4 heads of 4: Wq and Wo are 16 x 16, Wk and Wv 16 x (4 * groups)."""
    layer = build_model("decoder", n_kv_heads=groups).stack.blocks[0].attention.layer
    linears = (layer.query, layer.key, layer.value, layer.out)
    assert sum(linear.weight.numel() for linear in linears) == 16 * 16 * 2 + 16 * 4 * groups * 2


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a16_heads_that_share_keys_differ_by_their_queries_alone(build_model: BuildModel, groups: int) -> None:
    """With the query of one head in all of them, as many patterns are left as there are key-value heads."""
    model = build_model("decoder", n_kv_heads=groups, position="none")
    query = model.stack.blocks[0].attention.layer.query
    with torch.no_grad():
        query.weight.copy_(query.weight[:4].repeat(4, 1))
        if query.bias is not None:
            query.bias.copy_(query.bias[:4].repeat(4))
        with gh.record(model, "pattern.0", "k.0") as seen:
            model(torch.randint(23, (1, 6)))
    patterns = seen["pattern.0"][0].flatten(1)
    distances = torch.cdist(patterns, patterns)
    group = torch.arange(4) // (4 // groups)
    assert torch.equal(distances < 1e-12, group[:, None] == group)
    assert repeat_kv(seen["k.0"], 4).shape[1] == 4
