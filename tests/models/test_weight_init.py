"""Weight initialization: each scheme has its standard deviation, and the seed determines every weight."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import glasshouse as gh
from glasshouse import config, spec
from glasshouse.hub.families.bart import MARIAN
from glasshouse.layers.attend.layout import make_layout

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
    for weight in (
        model.token_embedding.table.weight,
        block.attention.layer.key.weight,
        block.attention.layer.out.weight,
    ):
        assert spread(weight) == near(0.05)


def test_depth_scaled_divides_the_residual_projections() -> None:
    block = make(spec.DepthScaled(0.05)).stack.blocks[2]
    assert spread(block.attention.layer.key.weight) == near(0.05)
    for weight in (block.attention.layer.out.weight, block.feedforward.layer.down.weight):
        assert spread(weight) == near(0.05 / math.sqrt(6))  # three layers of two residual projections


def test_depth_scaled_counts_three_residual_projections_with_cross_attention() -> None:
    model = make(spec.DepthScaled(0.05), "t5-small")
    assert spread(model.encoder.blocks[0].feedforward.layer.down.weight) == near(0.05 / math.sqrt(6))
    assert spread(model.decoder.blocks[0].cross.layer.out.weight) == near(0.05 / math.sqrt(9))


def test_zero_output_makes_every_block_the_identity() -> None:
    model = make(spec.ZeroOutput()).eval()
    ids = torch.randint(0, 500, (2, 6))
    expected = model.stack.position.embed(model.token_embedding(ids), torch.arange(6)[None])
    assert torch.equal(model.stack(model.token_embedding(ids), make_layout(ids)), model.stack.norm(expected))


def test_fan_in_depends_on_the_inputs_of_each_matrix() -> None:
    torch.manual_seed(0)
    head = {"kind": "next_token", "tied": False}
    model = gh.build(gh.preset("gpt2", init=spec.FanIn(0.7, 0.003), **SIZE, head=head))
    block = model.stack.blocks[1]
    for weight in (block.attention.layer.value.weight, block.feedforward.layer.up.weight):
        assert spread(weight) == near(128**-0.5)
    assert spread(model.token_embedding.table.weight) == near(0.7)
    assert spread(model.head.weight) == near(0.003)
    for weight in (block.attention.layer.out.weight, block.feedforward.layer.down.weight):
        assert not weight.any()


def test_fan_in_makes_embeddings_small_that_are_tied_to_the_head() -> None:
    model = make(spec.FanIn(0.7, 0.003), "gpt2")
    assert spread(model.token_embedding.table.weight) == near(128**-0.5)
    assert spread(model.stack.position.table.weight) == near(128**-0.5)


def test_xavier_depends_on_the_shape_of_each_matrix() -> None:
    model = make(spec.Xavier(), "llama-small")
    attention = model.stack.blocks[0].attention.layer
    for weight in (attention.query.weight, attention.key.weight, attention.value.weight):
        bound = math.sqrt(6 / (128 + len(weight)))  # fan-in and fan-out of this matrix alone
        assert float(weight.detach().abs().max()) == pytest.approx(bound, rel=0.01)
        assert spread(weight) == near(bound / math.sqrt(3))
    assert spread(model.token_embedding.table.weight) == near(128**-0.5)


@pytest.mark.few(6)
@pytest.mark.slow
@pytest.mark.parametrize("name", gh.presets())
def test_every_parameter_is_initialized_by_the_seed(name: str) -> None:
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


POSITION: dict[str, Any] = {"position": "sinusoidal"}
BARE: dict[str, Any] = {"vocab_size": 500, "n_layers": 1, "n_heads": 4, **POSITION}
OPTIONS = {
    "decoder": lambda d: spec.DecoderSpec(d_model=d, **BARE),
    "encoder": lambda d: spec.EncoderSpec(d_model=d, **BARE),
    "seq2seq": lambda d: spec.Seq2SeqSpec(d_model=d, **BARE),
    "from a file": lambda d: spec.parse({"kind": "decoder", "d_model": d, **BARE}),
    "preset": lambda d: gh.preset("tiny-decoder", d_model=d, n_layers=1, vocab_size=500, **POSITION),
    "preset, by class": lambda d: gh.preset(
        "bert-base", d_model=d, n_layers=1, vocab_size=500, position=spec.Sinusoidal()
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("d_model", [48, 384])
@pytest.mark.parametrize("name", OPTIONS)
def test_sinusoidal_positions_do_not_dominate_the_embeddings(name: str, d_model: int) -> None:
    torch.manual_seed(0)
    model = gh.build(OPTIONS[name](d_model))
    ids = torch.arange(400)[None]
    tokens = model.token_embedding(ids).detach()
    stack = model.encoder if name == "seq2seq" else model.stack
    positions = stack.position.embed(torch.zeros_like(tokens), ids)
    # Each pair of a sine and a cosine has norm 1, and each number of a scaled token vector variance 1.
    ratio = positions.norm(dim=-1).mean() / tokens.norm(dim=-1).mean()
    assert float(ratio) == pytest.approx(math.sqrt(1 / 2), rel=0.03)


def test_explicit_embed_scale_and_init_are_kept() -> None:
    plain = spec.DecoderSpec(d_model=64, **BARE, embed_scale=False, init="depth_scaled")
    assert (plain.embed_scale, plain.init) == (False, spec.DepthScaled())
    assert spec.parse(config.dump(plain)) == plain
    half = gh.preset("gpt2", position="sinusoidal", init=spec.Normal())
    assert (half.embed_scale, half.init) == (True, spec.Normal())
    for name in gh.presets():  # no other default has moved
        s = gh.preset(name)
        assert s.embed_scale == isinstance(s.position, spec.Sinusoidal)
    other = spec.DecoderSpec(vocab_size=9, d_model=8, n_layers=1, n_heads=2)
    assert (other.embed_scale, other.init) == (False, spec.DepthScaled())
    for scaled in (False, True):  # set by a published config, or left to its default
        table = {"model_type": "marian", "architectures": ["MarianMTModel"], "eos_token_id": 0, "pad_token_id": 1}
        table |= {"encoder_layers": 1, "decoder_layers": 1}
        table |= {"scale_embedding": True} if scaled else {}
        published = MARIAN.spec_from_config(table, {"final_logits_bias"}, (), "config.json")
        assert (published.embed_scale, published.init) == (scaled, spec.Normal())


@pytest.mark.parametrize(("name", "more"), [("vaswani-base", {}), ("gpt2", {"embed_scale": True}), ("gpt2", {})])
def test_learned_positions_are_as_large_as_token_embeddings(name: str, more: dict[str, Any]) -> None:
    """Scaled or not, both have d_model numbers of one standard deviation, so that the ratio of their norms is 1."""
    torch.manual_seed(0)
    model = gh.build(
        gh.preset(name, position="learned", d_model=256, n_heads=4, n_layers=1, vocab_size=500, max_len=500, **more)
    )
    tables = {key: weight for key, weight in model.named_parameters() if key.endswith("position.table.weight")}
    assert tables
    scale = 16 if model.spec.embed_scale else 1  # the square root of 256
    tokens = scale * model.token_embedding.table.weight.norm(dim=1).mean()
    std = {"vaswani-base": 1 / 16, "gpt2": 0.02}[name]
    for positions in tables.values():
        norm = positions.norm(dim=1).mean()
        assert float(tokens / norm) == pytest.approx(1, rel=0.02)
        assert float(norm) == pytest.approx(16 * std * scale, rel=0.02)
