"""Figures of the block, B1 to B8, beside norms by hand, torch.nn and stacks composed anew."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import glasshouse as gh
from claims.figures import LIMIT, WIDE, Below, Drawn, near, on, same, size
from glasshouse import notes
from glasshouse.spec import DecoderSpec


def normalised(vector: list[float], eps: float = 1e-5) -> list[float]:
    """Layer norm without gain and shift."""
    mean = statistics.fmean(vector)
    deviation = math.sqrt(statistics.pvariance(vector) + eps)
    return [(value - mean) / deviation for value in vector]


@on("B1", "gpt2", "python-3m", "bert", "gemma", "dates-1m")
def test_figure_b1(drawn: Drawn) -> None:
    one, at = drawn.model, drawn.model.position
    layer = one.layer
    before, f, after = (
        stream[at].tolist() for stream in one.record(f"resid_pre.{layer}", f"attn_out.{layer}", f"resid_mid.{layer}")
    )
    plain = [a + b for a, b in zip(before, f, strict=True)]
    formula, name, other = {
        "pre": ("x + f(norm(x))", "norm(x + f), of the same f", normalised(plain)),
        "sandwich": ("x + norm(f(norm(x)))", "norm(x + f), of the same f", normalised(plain)),
        "post": ("norm(x + f(x))", "x + f, without the norm", plain),
    }[one.model.spec.norm_placement]
    (table,) = drawn.tables
    assert table.head == ["vector", "norm"]
    assert table.rows == [
        ["x, before", near(size(before))],
        ["f, what attention adds", near(size(f))],
        [f"{formula}, after", near(size(after))],
        [name, near(size(other))],
    ]
    (matrix,) = drawn.matrices
    assert matrix.title == f"the first {min(48, len(before))} coordinates"
    assert matrix.rows == ["x", "f", "after"]
    same(matrix.values, [before[:48], f[:48], after[:48]])
    assert drawn.facts == {
        "this model": formula,
        "layer": layer,
        "largest difference from gh.record": Below(1e-5 * max(map(abs, after))),
    }


@on("B2", "gpt2", "python-3m", "bert")
def test_figure_b2(drawn: Drawn) -> None:
    one, by = drawn.model, drawn.value
    x = one.record(f"resid_pre.{one.layer}")[0][one.position].tolist()
    scaled = [by * value for value in x]
    normed = normalised(scaled)

    def row(name: str, v: list[float]) -> list[Any]:
        mean, largest = pytest.approx(statistics.fmean(v), abs=1e-5), max(map(abs, v))
        return [name, mean, near(statistics.pvariance(v)), near(size(v)), near(largest)]

    (table,) = drawn.tables
    assert table.head == ["vector", "mean", "variance", "norm", "largest"]
    assert table.rows == [row("x", x), row(f"{by:g} x", scaled), row("layer norm of it", normed)]
    (matrix,) = drawn.matrices
    assert matrix.title == f"the first {min(48, len(x))} coordinates, each vector by its largest"
    assert matrix.rows == ["x", "normed"]
    tops = [max(map(abs, v)) for v in (scaled, normed)]
    same(matrix.values, [[value / top for value in v[:48]] for v, top in zip((scaled, normed), tops, strict=True)])
    change = max(abs(a - b) for a, b in zip(normalised(x), normed, strict=True))
    assert drawn.facts == {
        "sqrt(D)": near(len(x) ** 0.5, 1e-12),
        "norm of the open model": one.model.spec.norm.kind,
        "largest change by the factor": near(change, 1e-3),
        "largest difference from torch's": Below(1e-6),
    }


@on("B3", "python-3m", "gpt2", "gemma", "bert", "dates-1m")
def test_figure_b3(drawn: Drawn) -> None:
    one, s, layer = drawn.model, drawn.model.model.spec, drawn.model.layer
    part = one.stack.blocks[layer].feedforward
    gated = hasattr(part.layer, "gate")
    act = {"swiglu": "SiLU", "gelu": "GELU", "relu": "ReLU"}[s.feedforward.kind]
    x, y, neurons = ("x", [1, s.d_model]), ("y", [1, s.d_model]), [1, s.d_ff]
    up = [x, ("up", [s.d_model, s.d_ff]), ("u", neurons)]
    down = [(f"{act}(g) ⊙ u" if gated else f"{act}(u)", neurons), ("down", [s.d_ff, s.d_model]), y]
    if gated:
        assert drawn.texts == [
            f"Gated: {act}(g) says, neuron by neuron, how much of u passes; it takes the place of ReLU(u). "
            "The line of code below is that of a layer without a gate."
        ]
        assert drawn.shapes == [[x, ("gate", [s.d_model, s.d_ff]), ("g", neurons)], up, down]
    else:
        assert drawn.texts == []
        assert drawn.shapes == [up, down]
    # The neurons from what the model's own modules return.
    modules = (part.layer.up, part.layer.gate) if gated else (part.layer.up,)
    found = [out[one.position] for out in one.outputs(*modules)]
    activation = {"swiglu": F.silu, "gelu": F.gelu, "relu": F.relu}[s.feedforward.kind]
    neurons = found[0] * activation(found[1]) if gated else activation(found[0])
    (matrix,) = drawn.matrices
    count = 4 * WIDE if s.d_ff >= 4 * WIDE else s.d_ff
    assert matrix.title == f"{count} of its {s.d_ff} neurons at this token"
    assert matrix.values.shape[1] == (WIDE if s.d_ff >= 4 * WIDE else s.d_ff)
    same([value for row in matrix.values.tolist() for value in row], neurons[:count])
    off = sum(value <= 0 for value in neurons.tolist()) / s.d_ff
    out = one.record(f"ffn_out.{layer}")[0][one.position]
    assert drawn.facts == {
        "activation": s.feedforward.kind,
        "neurons that are 0 or below": f"{100 * off:.0f}%",
        "d_ff / D": near(s.d_ff / s.d_model, 1e-12),
        "this token alone, difference from gh.record": Below(1e-5 * float(out.abs().max())),
    }


@on("B4", "gpt2", "python-3m", "dates-1m", "bert", "gemma")
def test_figure_b4(drawn: Drawn) -> None:
    one, depth, at = drawn.model, drawn.model.model.spec.n_layers, drawn.model.position
    kinds = ["attention", "cross", "feedforward"] if one.prefix else ["attention", "feedforward"]
    said = {"attention": "attention", "cross": "cross-attention", "feedforward": "feed-forward"}
    # What a residual connection adds, seen from outside: its output less its input, where no norm comes after.
    names, parts = ["embedding"], [one.record("embed")[0][at]]
    for layer in range(depth):
        for kind in kinds:
            names.append(f"{said[kind]} {layer}")
            part = getattr(one.stack.blocks[layer], kind)
            last = part.norm_out if hasattr(part, "norm_out") else part.layer
            parts += [one.outputs(last)[0][at]]
    (bars,) = drawn.bars
    assert bars.names == names
    assert bars.values == [near(size(part.tolist())) for part in parts]
    total = [math.fsum(part.tolist()[i] for part in parts) for i in range(len(parts[0]))]
    end = one.record(f"resid_post.{depth - 1}")[0][at].tolist()
    apart = max(abs(a - b) for a, b in zip(total, end, strict=True))
    post = one.model.spec.norm_placement == "post"
    more = " (with norms after the sum it is none: they rescale it)" if post else ""
    assert drawn.facts == {
        "norm of their sum": near(size(total)),
        "norm of the stream at the end": near(size(end)),
        f"largest difference of sum and stream{more}": near(apart) if post else Below(1e-4),
    }
    assert post or apart < 1e-4


class Sublayer(nn.Module):
    """A sublayer without its norm, and without its residual connection where `residual` is False."""

    def __init__(self, layer: nn.Module, residual: bool) -> None:
        super().__init__()
        self.layer, self.residual = layer, residual

    def forward(self, x: Tensor, ctx: object) -> Tensor:
        return x + self.layer(x, ctx) if self.residual else self.layer(x, ctx)


@on("B5", "gpt2")
def test_figure_b5(drawn: Drawn) -> None:
    layers = int(drawn.value)
    sizes = {"vocab_size": 64, "d_model": 64, "n_heads": 4, "n_layers": layers, "max_len": 16}
    (curves,) = drawn.lines
    assert (curves.along, curves.log) == ("layers back from the last", True)
    assert [*curves.series] == ["with residual paths", "without"]
    found = {}
    for name, residual in (("with residual paths", True), ("without", False)):
        torch.manual_seed(0)
        s = DecoderSpec(**sizes, feedforward={"kind": "relu"}, init={"kind": "normal", "std": 0.02})
        model: Any = gh.build(s, dtype=torch.float64)
        ids = torch.randint(64, (2, 17))
        for block in model.stack.blocks:
            block.attention = Sublayer(block.attention.layer, residual)
            block.feedforward = Sublayer(block.feedforward.layer, residual)
        loss = torch.log_softmax(model(ids[:, :-1]), -1).gather(-1, ids[:, 1:, None]).mean().neg()
        loss.backward()
        found[name] = [
            math.sqrt(math.fsum(float((w.grad * w.grad).sum()) for w in block.parameters()))
            for block in model.stack.blocks
        ]
        assert [x for x, _ in curves.series[name]] == [*range(layers)]
        assert [y for _, y in curves.series[name]] == [near(y, 1e-6) for y in reversed(found[name])]
    assert drawn.facts == {
        f"gradient at the {which} layer, {name}": near(found[name][at], 1e-6)
        for which, at in (("first", 0), ("last", -1))
        for name in found
    }
    if layers == 24:  # as on the card
        assert (
            "1.2 with residual connections and 4e-70 without (pre-norm, 24 layers)" in notes.statement("B5").measured
        )
        assert f"{found['with residual paths'][0]:.1f}, {found['without'][0]:.0e}" == "1.2, 4e-70"
    (said,) = drawn.texts
    assert "width 64" in said
    assert "standard deviation 0.02" in said


@on("B7", "gpt2", "python-3m")
def test_figure_b7(drawn: Drawn) -> None:
    one, rate = drawn.model, drawn.value
    x = one.record(f"attn_out.{one.layer}")[0][:12, :WIDE]
    torch.manual_seed(0)
    expected = [F.dropout(x, rate), F.dropout(x, rate), x]
    for values, matrix in zip(expected, drawn.matrices, strict=True):
        same(matrix.values, values)
        assert matrix.rows == one.labels[:12]
    first, second, _ = drawn.matrices
    # An entry is 0, or is divided by the share of those that are kept.
    for entry, whole in zip(first.values.flatten().tolist(), x.flatten().tolist(), strict=True):
        assert entry in (0, pytest.approx(whole / (1 - rate), rel=1e-4))
    assert (rate == 0) == torch.equal(first.values, second.values)
    zeros = sum(value == 0 for row in first.values.tolist() for value in row)
    assert drawn.facts == {
        "rate": rate,
        "dropped": f"{100 * zeros / x.numel():.1f}%",
        "those kept are scaled by": near(1 / (1 - rate), 1e-9),
        "evaluation, largest difference from no dropout": 0.0,
    }


@on("B8", "gpt2", "python-3m", "dates-1m")
def test_figure_b8(drawn: Drawn) -> None:
    one, layers, depth = drawn.model, int(drawn.value), drawn.model.model.spec.n_layers
    own, deep = drawn.lines
    stream = [s[:LIMIT] for s in one.record("embed", *(f"resid_post.{layer}" for layer in range(depth)))]
    blocks = one.stack.blocks
    is_post = one.model.spec.norm_placement == "post"
    given = stream[:-1] if is_post else one.outputs(*(block.attention.norm for block in blocks))
    assert own.log
    assert own.series == {
        "mean norm of a token": [
            (i, near(statistics.fmean(size(row) for row in s.tolist()))) for i, s in enumerate(stream)
        ],
        "largest entry of any token": [
            (i, near(max(abs(v) for row in s.tolist() for v in row))) for i, s in enumerate(stream)
        ],
        "mean norm that attention gets": [
            (i, near(statistics.fmean(size(row) for row in s[:LIMIT].tolist()))) for i, s in enumerate(given)
        ],
    }
    sizes = {"d_model": 32, "n_heads": 4, "n_kv_heads": 4, "n_layers": layers, "d_ff": 64, "vocab_size": 32}
    choices = {"position": "none", "norm": "layer", "feedforward": "relu", "qk_norm": False, "init": "xavier"}
    start = torch.randn(1, 8, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found: dict[str, list[float]] = {}
    for name in ("with norms", "without"):
        torch.manual_seed(0)
        model: Any = gh.build(gh.preset("tiny-decoder", **sizes, **choices), dtype=torch.float64).eval()
        for block in model.stack.blocks if name == "without" else ():
            block.attention.norm = block.feedforward.norm = nn.Identity()
        model.token_embedding.forward = returning(start)
        with torch.no_grad(), gh.record(model, "embed", *(f"resid_post.{i}" for i in range(layers))) as seen:
            model(torch.zeros(1, 8, dtype=torch.long))
        outputs = [seen["embed"], *(seen[f"resid_post.{i}"] for i in range(layers))]
        found[name] = [statistics.fmean(size(row) for row in out[0].tolist()) for out in outputs]
    assert deep.title == f"a stack of {layers} layers of width 32 as initialised: mean norm"
    assert deep.log
    assert deep.series == {name: [(i, near(y, 1e-9)) for i, y in enumerate(ys)] for name, ys in found.items()}
    assert drawn.facts == {
        "grows by a factor of, with norms": near(found["with norms"][-1] / found["with norms"][0], 1e-9),
        "grows by a factor of, without norms": near(found["without"][-1] / found["without"][0], 1e-9),
    }


def returning(value: Tensor) -> Callable[..., Tensor]:
    return lambda *_, **__: value
