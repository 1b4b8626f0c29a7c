"""First values: each rule gives the spread it names, and the generator's seed decides all of them."""

from __future__ import annotations

import math

import pytest
import torch

import glasshouse as gh
from glasshouse import spec
from glasshouse.layers.layout import lay_out

SIZE = {"vocab_size": 500, "d_model": 128, "n_heads": 4, "n_layers": 3, "d_ff": 512}


def spread(tensor: torch.Tensor) -> float:
    return float(tensor.detach().double().std())


def near(std: float) -> object:
    return pytest.approx(std, rel=0.03)  # of 16,384 draws and more, the standard deviation is known to 0.6%


def make(init: spec.Init, name: str = "gpt2") -> torch.nn.Module:
    torch.manual_seed(0)
    return gh.build(gh.preset(name, init=init, **SIZE))


def test_normal() -> None:
    model = make(spec.Normal(0.05))
    block = model.stack.blocks[0]
    for weight in (model.token.table.weight, block.attention.layer.key.weight, block.attention.layer.out.weight):
        assert spread(weight) == near(0.05)


def test_depth_scaled_divides_what_writes_to_the_stream() -> None:
    block = make(spec.DepthScaled(0.05)).stack.blocks[2]
    assert spread(block.attention.layer.key.weight) == near(0.05)
    for weight in (block.attention.layer.out.weight, block.feedforward.layer.down.weight):
        assert spread(weight) == near(0.05 / math.sqrt(6))  # three layers of two writes


def test_depth_scaled_counts_three_writes_in_a_block_with_cross_attention() -> None:
    model = make(spec.DepthScaled(0.05), "t5-small")
    assert spread(model.encoder.blocks[0].feedforward.layer.down.weight) == near(0.05 / math.sqrt(6))
    assert spread(model.decoder.blocks[0].cross.layer.out.weight) == near(0.05 / math.sqrt(9))


def test_zero_output_makes_every_block_the_identity() -> None:
    model = make(spec.ZeroOutput()).eval()
    ids = torch.randint(0, 500, (2, 6))
    expected = model.stack.position.embed(model.token(ids), torch.arange(6)[None])
    assert torch.equal(model.stack(model.token(ids), lay_out(ids)), model.stack.norm(expected))


def test_xavier_looks_at_the_size_of_each_map() -> None:
    model = make(spec.Xavier(), "llama-small")
    attention = model.stack.blocks[0].attention.layer
    for weight in (attention.query.weight, attention.key.weight, attention.value.weight):
        bound = math.sqrt(6 / (128 + len(weight)))  # fan in and fan out of this map alone
        assert float(weight.detach().abs().max()) == pytest.approx(bound, rel=0.01)
        assert spread(weight) == near(bound / math.sqrt(3))
    assert spread(model.token.table.weight) == near(128**-0.5)


@pytest.mark.parametrize("name", gh.presets())
def test_every_parameter_gets_a_value_and_the_seed_decides_it(name: str) -> None:
    s = gh.preset(name, vocab_size=40, d_model=48, n_layers=2, n_heads=12)
    models = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        models.append(gh.build(s))
    assert models[0].training
    changed = False
    for (parameter_name, a), b, c in zip(
        models[0].named_parameters(), models[1].parameters(), models[2].parameters(), strict=True
    ):
        assert a.isfinite().all(), parameter_name
        assert torch.equal(a, b)
        changed = changed or not torch.equal(a, c)
        if parameter_name.endswith("bias"):
            assert not a.any()
        elif "norm" in parameter_name:
            assert a.eq(1).all()
    assert changed
