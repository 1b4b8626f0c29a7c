"""Feed-forward layers compared with their formulas, number by number."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from glasshouse import spec
from glasshouse.layers.feedforward import GatedFeedForward, make_feedforward


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def gelu(x: float) -> float:
    return x * 0.5 * (1 + math.erf(x / math.sqrt(2)))


def gelu_tanh(x: float) -> float:
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


FORMULAS: list[tuple[spec.FeedForward, Callable[[float], float]]] = [
    (spec.Relu(), lambda x: max(x, 0)),
    (spec.ReluSquared(), lambda x: max(x, 0) ** 2),
    (spec.Gelu(), gelu),
    (spec.Gelu(tanh=True), gelu_tanh),
    (spec.Silu(), lambda x: x * sigmoid(x)),
    (spec.SwiGLU(), lambda x: x * sigmoid(x)),
    (spec.GeGLU(), gelu),
    (spec.GeGLU(tanh=True), gelu_tanh),
]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("choice", "activation"), FORMULAS, ids=[str(choice) for choice, _ in FORMULAS])
@torch.no_grad()
def test_feedforward_by_the_formula(
    choice: spec.FeedForward, activation: Callable[[float], float], bias: bool
) -> None:
    torch.manual_seed(0)
    s = spec.DecoderSpec(vocab_size=1, d_model=4, n_layers=1, n_heads=1, d_ff=3, feedforward=choice, ffn_bias=bias)
    layer = make_feedforward(s).double()
    gated = isinstance(layer, GatedFeedForward)
    assert gated == isinstance(choice, spec.SwiGLU | spec.GeGLU)
    x = torch.randn(1, 2, 4, dtype=torch.float64)
    out = layer(x, None)
    for i in range(2):

        def into(project: torch.nn.Linear, n: int, i: int = i) -> float:
            total = sum(float(project.weight[n, d] * x[0, i, d]) for d in range(4))
            return total + (float(project.bias[n]) if bias else 0)

        if gated:
            hidden = [activation(into(layer.gate, n)) * into(layer.up, n) for n in range(3)]
        else:
            hidden = [activation(into(layer.up, n)) for n in range(3)]
        for d in range(4):
            expected = sum(float(layer.down.weight[d, n]) * hidden[n] for n in range(3))
            expected += float(layer.down.bias[d]) if bias else 0
            assert float(out[0, i, d]) == pytest.approx(expected, rel=1e-12, abs=1e-14)
