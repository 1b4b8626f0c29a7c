"""Figures of attention, A1 to A16, beside loops over queries and keys, and recordings of a second forward pass."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import glasshouse as gh
from claims.figures import (
    LIMIT,
    WIDE,
    Below,
    Drawn,
    Opened,
    bundled,
    check_strongest,
    dot,
    elsewhere,
    labels,
    near,
    on,
    same,
    size,
    softmax,
)
from glasshouse.hub.published import published_configs


def attention(one: Opened) -> nn.Module:
    return one.stack.blocks[one.layer].attention.layer


def key_value_head(one: Opened) -> int:
    """Return the head whose keys and values the selected head uses: groups are neighbours."""
    s = one.model.spec
    groups = torch.arange(s.n_heads).chunk(s.n_kv_heads)
    (found,) = (kv for kv, heads in enumerate(groups) if one.head in heads.tolist())
    return found


def projected(one: Opened) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v of the selected head as the model's own modules return them, [S, d] each."""
    layer, width = attention(one), one.model.spec.d_head
    found = one.outputs(layer.query, layer.key, layer.value)
    heads = (one.head, key_value_head(one), key_value_head(one))
    q, k, v = (all_heads.split(width, -1)[head][:LIMIT] for all_heads, head in zip(found, heads, strict=True))
    return q, k, v


@on("A1", "gpt2", "python-3m", "bert", "gemma")
def test_figure_a1(drawn: Drawn) -> None:
    one, s = drawn.model, drawn.model.model.spec
    assert drawn.shapes == [
        [("x", [one.shown, s.d_model]), ("Wq", [s.d_model, s.d_head]), ("q", [one.shown, s.d_head])]
    ]
    for name, expected, matrix in zip("qkv", projected(one), drawn.matrices, strict=True):
        assert matrix.title == f"{name} of head {one.head}"
        assert matrix.rows == one.labels
        same(matrix.values, expected[:, :WIDE])
    largest = float(projected(one)[2].abs().max())
    assert drawn.facts == {
        "heads": s.n_heads,
        "d_head": s.d_head,
        "heads x d_head": sum(s.d_head for _ in range(s.n_heads)),
        "D": s.d_model,
        "v, largest difference from gh.record": Below(1e-5 * largest),
    }


@on("A2", "gpt2", "python-3m", "bert")
def test_figure_a2(drawn: Drawn) -> None:
    one, s = drawn.model, drawn.model.model.spec
    layer = attention(one)
    q, k, _ = projected(one)  # of which the biases are taken away again
    shared, d = key_value_head(one), s.d_head
    q = q if layer.query.bias is None else q - layer.query.bias.detach()[one.head * d : (one.head + 1) * d]
    k = k if layer.key.bias is None else k - layer.key.bias.detach()[shared * d : (shared + 1) * d]
    assert drawn.shapes == [
        [
            ("x", [one.shown, s.d_model]),
            ("M = Wq Wk^T", [s.d_model, s.d_model]),
            ("x^T", [s.d_model, one.shown]),
            ("scores", [one.shown, one.shown]),
        ]
    ]
    (matrix,) = drawn.matrices
    scores = [[dot(a, b) / d**0.5 for b in k.tolist()] for a in q.tolist()]
    same(matrix.values, scores)
    assert matrix.rows == matrix.columns == one.labels
    # The squares of the singular values of A B^T are the eigenvalues of (A^T A)(B^T B).
    wq = layer.query.weight.detach().double()[one.head * d : (one.head + 1) * d].T
    wk = layer.key.weight.detach().double()[shared * d : (shared + 1) * d].T
    squares = torch.linalg.eigvals((wq.T @ wq) @ (wk.T @ wk)).real.clamp(min=0).sqrt().sort(descending=True).values
    (curve,) = drawn.lines
    points = curve.series["size"]
    assert curve.log
    assert [x for x, _ in points] == [*range(1, min(s.d_model, 2 * d) + 1)]
    same([y for _, y in points], [*squares.tolist(), *[0.0] * (len(points) - d)])
    largest = max(abs(value) for row in scores for value in row)
    assert drawn.facts == {
        "d_head": d,
        "rank of M": d,
        "largest difference between x_i M x_j^T and q_i . k_j": Below(1e-5 * largest),
    }
    assert drawn.texts == ["Before biases, norms and rotations of q and k, where the model has them."]


def random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@on("A3", "gpt2")
def test_figure_a3(drawn: Drawn) -> None:
    width = 2 ** int(drawn.value)
    q, keys = torch.randn(1024, generator=random(0)).tolist(), torch.randn(12, 1024, generator=random(1)).tolist()
    scores = [dot(q[:width], key[:width]) for key in keys]
    divisors = {"scaled": math.sqrt(width), "not scaled": 1.0, "by the model's width, 8 heads": math.sqrt(8 * width)}
    for (name, by), bars in zip(divisors.items(), drawn.bars, strict=True):
        assert bars.title == f"softmax of 12 scores, {name}"
        assert bars.names == [f"key {i}" for i in range(12)]
        same(bars.values, softmax([score / by for score in scores]))
        assert bars.most == 1
    assert drawn.facts == {"d_head": width}
    (table,) = drawn.tables
    assert table.head == [
        "d_head",
        "variance, scaled",
        "not scaled",
        "by the model's width",
        "gradient, scaled",
        "not scaled",
    ]
    assert [row[0] for row in table.rows] == [4, 16, 64, 256, 1024]
    for row in table.rows:
        rng, d = random(row[0]), row[0]
        q, k = torch.randn(200, 1, d, generator=rng), torch.randn(200, 32, d, generator=rng)
        pull = torch.randn(200, 1, 32, generator=rng)
        raw = torch.einsum("rqd,rkd->rqk", q, k)
        spread = statistics.variance(raw.flatten().tolist())
        assert row[1:4] == [near(spread / d), near(spread), near(spread / (8 * d))]
        for by, shown in ((math.sqrt(d), row[4]), (1.0, row[5])):
            given = (raw / by).requires_grad_()
            with torch.enable_grad():
                (gradient,) = torch.autograd.grad((given.softmax(-1) * pull).sum(), given)
            assert shown == near(statistics.median_low([size(one) for one in gradient[:, 0].tolist()]))


@on("A4", "gpt2", "python-3m", "bert", "gemma")
def test_figure_a4(drawn: Drawn) -> None:
    one, n = drawn.model, drawn.model.shown
    q, k = one.record(f"q.{one.layer}", f"k.{one.layer}")
    q, k = q[one.head], k[key_value_head(one)]
    cap = one.model.spec.attention_softcap
    scores = []
    for i in range(n):
        row = [dot(q[i].tolist(), k[j].tolist()) / math.sqrt(one.model.spec.d_head) for j in range(n)]
        row = row if cap is None else [cap * math.tanh(score / cap) for score in row]
        scores.append([score if j in one.visible(i) else -math.inf for j, score in enumerate(row)])
    hidden = [[-math.inf if score == -math.inf else 0.0 for score in row] for row in scores]
    mask, shown, weights = drawn.matrices
    assert mask.values.tolist() == hidden
    same(shown.values, scores)
    expected = [softmax(row) for row in scores]
    same(weights.values, [[a + b for a, b in zip(*rows, strict=True)] for rows in zip(expected, hidden, strict=True)])
    for matrix in (mask, shown, weights):
        assert matrix.rows == matrix.columns == one.labels
    assert drawn.facts == {
        "masked weights": sum(n - len(one.visible(i)) for i in range(n)),
        "largest of them": 0.0,
        "smallest row sum": near(1, 1e-5),
    }


@on("A5", "gpt2", "python-3m", "bert")
def test_figure_a5(drawn: Drawn) -> None:
    one, count = drawn.model, int(drawn.value)
    (pattern,) = one.record(f"pattern.{one.layer}")
    step = pattern[one.head, :LIMIT, :LIMIT].double()
    steps = step.tolist()
    walk = [float(i == one.position) for i in range(one.shown)]
    for _ in range(count):
        walk = [dot(walk, (row[j] for row in steps)) for j in range(one.shown)]
    power = torch.eye(one.shown, dtype=torch.float64)
    for _ in range(count):
        power = power @ step
    (bars,) = drawn.bars
    name = f"where a walk from “{one.labels[one.position]}” is after {count} steps"
    check_strongest(bars, name, one.labels, walk)
    assert bars.most == 1
    (matrix,) = drawn.matrices
    assert (matrix.title, matrix.row) == (f"A to the power {count}", one.position)
    assert matrix.rows == matrix.columns == one.labels
    same(matrix.values, power)
    assert drawn.facts == {
        "steps": count,
        "sum of the row": near(1, 1e-4),
        "share at the first token": near(walk[0]),
    }


@on("A6", "gpt2", "python-3m", "bert", "gemma")
def test_figure_a6(drawn: Drawn) -> None:
    one, s = drawn.model, drawn.model.model.spec
    heads, out = drawn.matrices
    z, recorded = one.record(f"z.{one.layer}", f"attn_out.{one.layer}")
    assert heads.rows == [f"head {i}" for i in range(s.n_heads)]
    assert heads.row == one.head
    same(heads.values, z[:, one.position, :WIDE])
    width = s.n_heads * s.d_head
    assert drawn.shapes == [[("joined", [1, width]), ("Wo", [width, s.d_model]), ("output", [1, s.d_model])]]
    layer = attention(one)
    joined = [value for head in range(s.n_heads) for value in z[head, one.position].tolist()]
    bias = [0.0] * s.d_model if layer.out.bias is None else layer.out.bias.tolist()
    rows = layer.out.weight.tolist()
    expected = [dot(row, joined) + added for row, added in zip(rows, bias, strict=True)]
    assert out.title == f"the output, its first {min(48, s.d_model)} of {s.d_model}"
    same(out.values, [expected[:48]])
    if s.norm_placement == "sandwich":  # the output is normalised before it is added
        mean_square = math.fsum(value * value for value in expected) / len(expected)
        gain = one.stack.blocks[one.layer].attention.norm_out.weight.tolist()
        expected = [g * value / math.sqrt(mean_square + s.norm.eps) for g, value in zip(gain, expected, strict=True)]
    same(recorded[one.position], expected)
    assert drawn.facts == {"largest difference from gh.record": Below(1e-5 * max(map(abs, expected)))}


@on("A7", "gpt2", "python-3m", "bert", "gemma")
def test_figure_a7(drawn: Drawn) -> None:
    one = drawn.model
    pattern, z = (found[one.head] for found in one.record(f"pattern.{one.layer}", f"z.{one.layer}"))
    shown = pattern[:LIMIT, :LIMIT]
    seen = one.position + 1 if one.causal else one.shown
    (bars,) = drawn.bars
    whom = "itself and those before" if one.causal else "all"
    name = f"one lookup: “{one.labels[one.position]}” against {whom}"
    check_strongest(bars, name, one.labels, [float(shown[one.position, j]) for j in range(seen)])
    assert bars.most == 1
    (matrix,) = drawn.matrices
    same(matrix.values, shown)
    assert matrix.rows == matrix.columns == one.labels
    assert matrix.row == one.position
    assert drawn.facts == {
        "lookups": one.shown,
        "largest difference from the one product": Below(1e-5 * float(z.abs().max())),
    }


@on("A8", "gpt2", "python-3m")
def test_figure_a8(drawn: Drawn) -> None:
    one, by = drawn.model, int(drawn.value)
    ids = [number % 256 for number in one.ids[: one.shown]]
    order = [(i - by) % len(ids) for i in range(len(ids))]
    choices = {"dropout": 0.0, "embed_dropout": 0.0, "init": "xavier"}
    expected = {}
    for name, kind, position in (
        ("no positions, no mask", "encoder", "none"),
        ("sinusoids", "encoder", "sinusoidal"),
        ("a causal mask", "decoder", "none"),
    ):
        torch.manual_seed(0)
        model = gh.build(gh.preset(f"tiny-{kind}", position=position, **choices)).eval()
        with torch.no_grad():
            before = model(torch.tensor([ids]))[0]
            after = model(torch.tensor([[ids[i] for i in order]]))[0]
        apart = max(float((after[place] - before[i]).abs().max()) for place, i in enumerate(order))
        expected[name] = apart / float(before.abs().max())
    (bars,) = drawn.bars
    assert bars.names == [*expected]
    assert bars.values[0] == Below(1e-5)
    assert bars.values[1:] == [pytest.approx(value, rel=1e-3, abs=1e-6) for value in [*expected.values()][1:]]
    assert (min(bars.values[1:]) > 0.1) == (by > 0)
    assert drawn.facts == {"moved by": by, "without positions and mask": bars.values[0]}
    assert drawn.texts == ["Small models as initialised, on these tokens moved around in a circle."]


@on("A9", "gpt2", "python-3m", "bert")
def test_figure_a9(drawn: Drawn) -> None:
    one = drawn.model
    if not one.causal:
        one = elsewhere(one, "python-3m")
        assert drawn.texts[0].startswith("The open model is no decoder; this shows python-3m")
    depth, at = one.model.spec.n_layers, min(int(drawn.value), one.shown - 1)
    ids = one.inputs[0][:, : one.shown]
    other = ids.tolist()
    other[0][at] = (other[0][at] + 1) % one.model.spec.vocab_size
    streams = []
    names = [*(f"resid_pre.{i}" for i in range(depth)), f"resid_post.{depth - 1}"]
    for given in (ids, torch.tensor(other)):
        with torch.no_grad(), gh.record(one.model, *names) as seen:
            one.model(given)
        streams.append([seen[name][0] for name in names])
    change = [[size((a[i] - b[i]).tolist()) for i in range(one.shown)] for a, b in zip(*streams, strict=True)]
    largest = max(map(max, change))
    (matrix,) = drawn.matrices
    share = "as a share of the largest in its row"
    assert matrix.title == f"change of the residual stream {share}, token {at} replaced by the next id"
    assert matrix.rows == ["embedding", *(f"layer {i}" for i in range(depth))]
    assert matrix.columns == one.labels
    same(matrix.values, [[value / max(row) for value in row] for row in change], 1e-4)
    assert drawn.facts == {
        "token replaced": at,
        "largest change before it": Below(1e-5 * largest),
        "largest change from it on": near(largest, 1e-3),
    }


@on("A10", "dates-1m", "python-3m")
def test_figure_a10(drawn: Drawn) -> None:
    one = drawn.model
    if drawn.name != "dates-1m":
        assert drawn.texts[:-1] == [
            "The open model has no encoder; this shows dates-1m, which comes with the package."
        ]
        layer, head, there = min(one.layer, 1), min(one.head, 3), bundled("dates-1m")
        source, target = there.inputs
        (made,) = gh.generate(there.model, there.tok, [source[0].tolist()], max_new_tokens=12)
        target = torch.tensor([[*target[0].tolist(), *(i for i in made.ids if i not in there.model.spec.end_ids)]])
        one = there
    else:
        assert drawn.texts[:-1] == []
        layer, head, (source, target) = one.layer, one.head, one.inputs
    assert drawn.texts[-1].startswith("A row is where the decoder looks with that token as its last input")
    with torch.no_grad(), gh.record(one.model, f"decoder.cross_q.{layer}", f"decoder.cross_k.{layer}") as seen:
        one.model(source, target)
    q, k = (seen[f"decoder.cross_{name}.{layer}"][0, head].tolist() for name in "qk")
    weights = [softmax([dot(a, b) / math.sqrt(one.model.spec.d_head) for b in k]) for a in q]
    (matrix,) = drawn.matrices
    assert matrix.title == f"layer {layer}, head {head}: rows of the target attend to columns of the source"
    same(matrix.values, [row[:LIMIT] for row in weights[:LIMIT]])
    assert matrix.rows == labels(target[0].tolist(), one.tok)[:LIMIT]
    assert matrix.columns == labels(source[0].tolist(), one.tok)[:LIMIT]
    assert drawn.facts == {
        "queries, from the decoder": target.shape[1],
        "keys, from the encoder": source.shape[1],
        "smallest row sum": near(1, 1e-5),
    }


def head_scores(ids: list[int], pattern: list[list[float]], causal: bool) -> dict[str, float]:
    """Return what a head looks at, query by query: the mean weight on some keys over queries that have such keys."""
    n = len(ids)
    found: dict[str, list[float]] = {}
    for i in range(n):
        others = range(i) if causal else [j for j in range(n) if j != i]
        same_token = [j for j in others if ids[j] == ids[i]]
        keys = {
            "current token: itself": [i] if others else [],
            "previous token": [i - 1] if i else [],
            "first token": [0] if i else [],
            "the same token before": same_token,
            "what followed the same token": [j + 1 for j in same_token if j + 1 < n],
        }
        for kind, some in keys.items():
            if some:
                found.setdefault(kind, []).append(sum(pattern[i][j] for j in some))
        if others:
            visible = i + 1 if causal else n
            entropy = -sum(w * math.log(w) for w in pattern[i][:visible] if w > 0)
            found.setdefault("broad: entropy over that of uniform attention", []).append(entropy / math.log(visible))
            found.setdefault("gap", []).append(math.log(visible) - entropy)
    return {kind: sum(values) / len(values) for kind, values in found.items()}


TYPES = {
    "current token: itself": "current token",
    "previous token": "previous",
    "first token": "first",
    "the same token before": "duplicate",
    "what followed the same token": "induction",
}


@on("A11", "gpt2", "python-3m", "bert", "dates-1m")
def test_figure_a11(drawn: Drawn) -> None:
    one, n = drawn.model, len(drawn.model.ids)
    depth, heads = one.model.spec.n_layers, one.model.spec.n_heads
    patterns = one.record(*(f"pattern.{layer}" for layer in range(depth)))
    scores = [[head_scores(one.ids, head.tolist(), one.causal) for head in layer] for layer in patterns]
    uniform = [[1 / (i + 1) if j <= i else 0.0 for j in range(n)] if one.causal else [1 / n] * n for i in range(n)]
    even = head_scores(one.ids, uniform, one.causal)
    most, types = drawn.tables
    assert most.head == ["looks at", "layer.head", "score", "uniform attention"]
    kinds = [kind for kind in (*TYPES, "broad: entropy over that of uniform attention") if kind in even]
    assert [row[0] for row in most.rows] == kinds
    for kind, at, best, by_chance in most.rows:
        layer, head = map(int, at.split("."))
        assert best == near(max(one[kind] for row in scores for one in row), 1e-3)
        assert scores[layer][head][kind] == near(best, 1e-3)
        assert by_chance == near(even[kind], 1e-3)

    def type_of(found: dict[str, float]) -> str:
        """The score furthest from even attention to 1, if more than halfway; broad within ln 2 of even attention."""
        above = {
            TYPES[kind]: (found[kind] - even[kind]) / (1 - even[kind])
            for kind in TYPES
            if kind in even and even[kind] <= 0.5
        }
        best = max(above, key=above.__getitem__)
        return best if above[best] > 0.5 else "broad" if found["gap"] < math.log(2) else "none"

    assert types.head == ["layer", *(f"head {i}" for i in range(heads))]
    assert types.rows == [[i, *map(type_of, row)] for i, row in enumerate(scores)]
    assert drawn.texts == [
        "The type of a head is the score that is more than halfway from uniform attention to 1; broad: its entropy "
        "is within ln 2 of that of uniform attention; none: neither."
    ]


def divisors(n: int) -> list[int]:
    return [one for one in range(1, n + 1) if n / one == int(n / one)]


@on("A12", "gpt2", "python-3m", "dates-1m")
def test_figure_a12(drawn: Drawn) -> None:
    n, own = 8, drawn.model.model.spec
    chosen = [1, 2, 4, 8][int(drawn.value)]
    counts = sorted({n, chosen, 1}, reverse=True)
    for count, matrix in zip(counts, drawn.matrices, strict=True):
        kind = "multi-head" if count == n else "multi-query" if count == 1 else f"grouped-query, {count} groups"
        assert matrix.title == f"{kind}: which key-value head each head uses"
        assert matrix.rows == [f"head {i}" for i in range(n)]
        assert matrix.columns == [f"kv {i}" for i in range(count)]
        # The key of a group is that of its neighbours, as torch's own grouped attention has it.
        used = torch.nn.functional.scaled_dot_product_attention(
            torch.ones(1, n, 1, 4), torch.ones(1, count, 1, 4), torch.eye(count)[None, :, None], enable_gqa=True
        )
        assert matrix.values.tolist() == used[0, :, 0].tolist()
    assert drawn.facts == {
        "heads": n,
        "key-value heads": chosen,
        "the open model has": f"{own.n_kv_heads} for {own.n_heads} heads",
        "largest difference from multi-head with repeated keys and values": Below(1e-12),
    }


def cached_bytes(one: Opened, n_kv_heads: int) -> int:
    """Return the bytes of a token's keys and values, 16 bits each, counted in the tensors of a second model."""
    s = replace(one.model.spec, n_kv_heads=n_kv_heads, vocab_size=8, start_id=None, end_ids=(), pad_id=None)
    model = gh.build(s, dtype=torch.bfloat16).eval()
    names = [f"{one.prefix}{name}.{i}" for name in "kv" for i in range(s.n_layers)]
    with torch.no_grad(), gh.record(model, *names) as seen:
        model(*([torch.zeros(1, 1, dtype=torch.long)] * len(one.inputs)))
    return sum(seen[name].numel() * seen[name].element_size() for name in names)


@on("A13", "gpt2", "python-3m", "dates-1m")
def test_figure_a13(drawn: Drawn) -> None:
    one, count = drawn.model, int(drawn.value)
    s = one.model.spec
    (bars,) = drawn.bars
    assert bars.title == f"bytes of the cache for {count:,} tokens, by number of key-value heads"
    assert bars.rows == [(f"{kv} of {s.n_heads}", count * cached_bytes(one, kv)) for kv in divisors(s.n_heads)]
    assert drawn.facts == {
        "this model has": f"{s.n_kv_heads} of {s.n_heads}",
        "bytes a token": cached_bytes(one, s.n_kv_heads),
        "smaller than multi-head by a factor of": cached_bytes(one, s.n_heads) / cached_bytes(one, s.n_kv_heads),
    }
    assert drawn.texts == ["In 16-bit numbers: 2 (key and value) x 2 bytes x layers x key-value heads x d_head."]


@on("A14", "gpt2", "python-3m", "bert")
def test_figure_a14(drawn: Drawn) -> None:
    one, n = drawn.model, drawn.model.shown
    x = one.record("embed")[0][:LIMIT].tolist()
    scores = [[dot(x[i], x[j]) for j in range(i + 1)] for i in range(n)]
    weights = [softmax(row) for row in scores]
    first, second = drawn.matrices
    for matrix, rows in ((first, scores), (second, weights)):
        same(matrix.values, [[*row, *[-math.inf] * (n - len(row))] for row in rows])
        assert matrix.rows == matrix.columns == one.labels
        assert matrix.row == one.position
    found = [math.fsum(w * x[j][c] for j, w in enumerate(weights[one.position])) for c in range(len(x[0]))]
    cosine = [dot(found, x[j]) / (size(found) * size(x[j])) for j in range(one.position + 1)]
    (bars,) = drawn.bars
    check_strongest(bars, f"what “{one.labels[one.position]}” retrieved: cosine to each token", one.labels, cosine)
    assert bars.most == 1
    largest = max(abs(value) for row in x for value in row)
    assert drawn.facts == {
        "largest difference from the layer with identity matrices": Below(2e-5 * largest),
        "mean weight on the token itself": near(sum(weights[i][i] for i in range(n)) / n),
    }


@on("A15", "gpt2", "python-3m", "bert", "gemma")
def test_figure_a15(drawn: Drawn) -> None:
    one, count = drawn.model, int(drawn.value)
    depth, heads = one.model.spec.n_layers, one.model.spec.n_heads
    queries = [*range(count, one.shown)]
    share = []
    for layer in one.record(*(f"scores.{i}" for i in range(depth))):
        row = []
        for head in layer:
            among = 0
            for i in queries:
                among += float(head[i, i]) in sorted(head[i, : one.shown].tolist(), reverse=True)[:count]
            row.append(among / len(queries))
        share.append(row)
    even = [count / len(one.visible(i, layer)) for i in queries for layer in range(depth)]
    (matrix,) = drawn.matrices
    assert matrix.title == f"share of tokens that score themselves among the first {count}"
    assert matrix.rows == [f"layer {i}" for i in range(depth)]
    assert matrix.columns == [f"head {i}" for i in range(heads)]
    same(matrix.values, share)
    flat = [value for row in share for value in row]
    assert drawn.facts == {
        "over all heads and tokens": near(sum(flat) / len(flat)),
        "by an even choice": near(statistics.fmean(even)),
        "heads where most do": sum(value > 0.5 for value in flat),
        "of": depth * heads,
    }


@on("A16", "gpt2", "python-3m", "dates-1m")
def test_figure_a16(drawn: Drawn) -> None:
    one, s = drawn.model, drawn.model.model.spec
    (table,) = drawn.tables
    assert table.head == ["key-value heads", "multiplications", "cached"]
    expected = []
    for kv in divisors(s.n_heads):
        layer = gh.layers.attention.Attention(replace(s, n_kv_heads=kv), 0)
        weights = [linear.weight for linear in (layer.query, layer.key, layer.value, layer.out)]
        expected.append([kv, sum(w.numel() for w in weights), layer.key.out_features + layer.value.out_features])
    assert table.rows == expected
    (pattern,) = one.record(f"pattern.{one.layer}")
    heads = [head[: one.shown, : one.shown].tolist() for head in pattern]
    # What one head gives to a key more than another, of all keys and queries: as much as it gives less elsewhere.
    apart = [
        [
            statistics.fmean(
                sum(max(0.0, p - q) for p, q in zip(x, y, strict=True)) for x, y in zip(a, b, strict=True)
            )
            for b in heads
        ]
        for a in heads
    ]
    (matrix,) = drawn.matrices
    assert matrix.title == f"share of its attention in which a head of layer {one.layer} differs from another"
    assert matrix.rows == matrix.columns == [f"head {i}" for i in range(s.n_heads)]
    same(matrix.values, apart, 1e-4)
    pairs = [apart[i][j] for i in range(s.n_heads) for j in range(s.n_heads) if i != j]
    assert drawn.facts == {
        "key-value heads of this model": s.n_kv_heads,
        "two heads differ in, on average": near(statistics.fmean(pairs), 1e-3),
    }


@on("A17", "gpt2", "python-3m", "dates-1m")
def test_figure_a17(drawn: Drawn) -> None:
    """By the keys of config.json."""
    (table,), s = drawn.tables, drawn.model.model.spec
    assert table.head == ["model", "family", "attention", "heads", "key-value", "positions", "norm", "feed-forward"]
    *published, own = table.rows
    kinds = {"multi-head": 0, "grouped-query": 0, "multi-query": 0}
    for row, (name, config) in zip(published, published_configs().items(), strict=True):
        keys = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads")
        heads = next(config[key] for key in keys if key in config)
        shared = config.get("num_key_value_heads", heads)
        kind = "multi-head" if shared == heads else "multi-query" if shared == 1 else "grouped-query"
        kinds[kind] += 1
        assert row[:5] == [name, config["model_type"], kind, heads, shared]
        bases = {"rope_theta", "rotary_emb_base", "global_rope_theta"}
        assert (row[5] == "rotary") == bool(bases & config.keys())
        assert row[6].startswith("rms") == ("rms_norm_eps" in config or config["model_type"] == "t5")
        assert (row[7] == "swiglu") == (config.get("hidden_act") == "silu")
    kind = "multi-head" if s.n_kv_heads == s.n_heads else "grouped-query"
    assert own[:6] == ["the open model", s.kind, kind, s.n_heads, s.n_kv_heads, s.position.kind]
    (bars,) = drawn.bars
    assert dict(zip(bars.names, bars.values, strict=True)) == kinds
    assert bars.most == len(published)
