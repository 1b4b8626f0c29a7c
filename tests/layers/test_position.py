"""Position encodings compared with their formulas and with transformers."""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, T5Config
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding
from transformers.models.t5.modeling_t5 import T5Attention

import glasshouse as gh
from glasshouse import InputError, spec
from glasshouse.layers.position import RelativePosition, RotaryPosition, alibi_slopes, make_position


def make(choice: spec.Position, *, causal: bool = True, n_heads: int = 4, max_len: int = 16) -> object:
    s = gh.preset("tiny-decoder", position=choice, d_model=32, d_head=8, n_heads=n_heads, max_len=max_len)
    return make_position(s, causal)


def test_sinusoidal_halves_equal_marian() -> None:
    theirs = MarianSinusoidalPositionalEmbedding(512, 32)
    theirs.weight = torch.nn.Parameter(theirs.create_weight(), requires_grad=False)
    encodings = make(spec.Sinusoidal("halves")).encodings(torch.arange(512)[None])[0]
    assert (encodings - theirs.weight).abs().max() < 1e-7  # they round to float32


def test_sinusoidal_pairs_are_halves_interleaved() -> None:
    position = torch.tensor([[0, 3, 700]])
    pairs, halves = (make(spec.Sinusoidal(layout)).encodings(position) for layout in ("pairs", "halves"))
    assert torch.equal(pairs[..., 0::2], halves[..., :16])
    assert torch.equal(pairs[..., 1::2], halves[..., 16:])
    for t in range(3):
        for k in range(16):
            angle = position[0, t].item() / 10_000 ** (2 * k / 32)
            assert pairs[0, t, 2 * k].item() == pytest.approx(math.sin(angle), abs=1e-12)


def test_learned_positions_offset_and_limit() -> None:
    position = make(spec.Learned(offset=2), max_len=3)
    torch.nn.init.normal_(position.table.weight)
    added = position.embed(torch.zeros(1, 3, 32), torch.arange(3)[None])
    assert torch.equal(added[0], position.table.weight[2:5])
    with pytest.raises(InputError, match=r"the sequence is 4 long, but max_len is 3"):
        position.embed(torch.zeros(1, 4, 32), torch.arange(4)[None])


SCALINGS = [
    (spec.NoScaling(), {"rope_type": "default"}),
    (spec.LinearScaling(4.0), {"rope_type": "linear", "factor": 4.0}),
    (
        spec.Llama3Scaling(8.0, 1.0, 4.0, 64),
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    (spec.YarnScaling(4.0, 64), {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}),
    (
        spec.YarnScaling(16.0, 32, beta_fast=16.0, beta_slow=2.0, attention_factor=1.5),
        {
            "rope_type": "yarn",
            "factor": 16.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "attention_factor": 1.5,
        },
    ),
]


@pytest.mark.parametrize("d_head", [8, 64, 128])
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize(("scaling", "theirs"), SCALINGS, ids=lambda value: getattr(value, "kind", ""))
def test_rotary_and_scaling_equal_llama(
    scaling: spec.NoScaling | spec.LinearScaling | spec.Llama3Scaling | spec.YarnScaling,
    theirs: dict[str, object],
    theta: float,
    d_head: int,
) -> None:
    config = LlamaConfig(
        hidden_size=4 * d_head,
        num_attention_heads=4,
        max_position_embeddings=256,
        rope_parameters={"rope_theta": theta, **theirs},
    )
    positions = torch.tensor([[0, 1, 7, 63, 200], [5, 4, 3, 2, 255]])
    q, k = torch.randn(2, 2, 4, 5, d_head)
    cos, sin = LlamaRotaryEmbedding(config)(q, positions)
    expected = apply_rotary_pos_emb(q, k, cos, sin)
    rotary = spec.Rotary(theta, "halves", scaling)
    position = make_position(gh.preset("tiny-decoder", position=rotary, d_head=d_head), causal=True)
    rotate = position.rotation(positions, torch.float32)
    for ours, reference in zip((rotate(q), rotate(k)), expected, strict=True):
        # Both compute angles in float32: an angle of 255 may differ by a rounding, 255 * 2**-24 = 1.5e-5.
        assert (ours - reference).abs().max() < 3e-5 * reference.abs().max()


def test_rotary_pairs_are_halves_with_permuted_coordinates() -> None:
    x = torch.randn(1, 2, 5, 8)
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])  # evens first
    positions = torch.arange(5)[None]
    pairs, halves = (make(spec.Rotary(layout=layout)).rotation(positions, x.dtype) for layout in ("pairs", "halves"))
    assert torch.equal(pairs(x)[..., order], halves(x[..., order]))


@pytest.mark.parametrize("layout", ["halves", "pairs"])
def test_a_fraction_of_each_head_is_rotated_as_a_narrower_head_is(layout: Literal["halves", "pairs"]) -> None:
    x, positions = torch.randn(2, 3, 4, 16), torch.arange(4)[None].expand(2, 4)
    partial = make_position(gh.preset("tiny-decoder", position=spec.Rotary(layout=layout, fraction=0.25)), True)
    narrow = make_position(gh.preset("tiny-decoder", position=spec.Rotary(layout=layout), d_head=4), True)
    turned = partial.rotation(positions, x.dtype)(x)
    assert torch.equal(turned[..., :4], narrow.rotation(positions, x.dtype)(x[..., :4]))
    assert torch.equal(turned[..., 4:], x[..., 4:])


def test_rotary_rotates_by_the_angle() -> None:
    rotary = RotaryPosition(2, 10_000.0, make(spec.Rotary()).rotate_pairs, spec.NoScaling())
    rotated = rotary.rotation(torch.tensor([[3]]), torch.float32)(torch.tensor([[[[1.0, 0.0]]]]))
    assert rotated.flatten().tolist() == pytest.approx([math.cos(3), math.sin(3)])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("n_buckets", "max_distance"), [(32, 128), (8, 20), (5, 9)])
def test_relative_buckets_equal_t5(causal: bool, n_buckets: int, max_distance: int) -> None:
    offsets = torch.arange(-300, 301)[None]
    ours = RelativePosition(4, n_buckets, max_distance, causal).bucket(offsets)
    theirs = T5Attention._relative_position_bucket(offsets, not causal, n_buckets, max_distance)
    assert torch.equal(ours, theirs)


def test_relative_bias_equals_t5() -> None:
    config = T5Config(d_model=32, num_heads=4, d_kv=8, is_decoder=False)
    theirs = T5Attention(config, has_relative_attention_bias=True)
    ours = make(spec.Relative(), causal=False)
    ours.table.weight = theirs.relative_attention_bias.weight
    span = torch.arange(40)[None]
    assert torch.equal(ours.bias(span, span), theirs.compute_bias(40, 40))


@pytest.mark.parametrize("n_heads", [1, 2, 3, 6, 8, 12, 25])
def test_alibi_slopes_equal_bloom(n_heads: int) -> None:
    # Bloom's tensor is slope * position, which gives the same softmax as slope * (position - query).
    theirs = build_alibi_tensor(torch.ones(1, 7), n_heads, torch.float32).view(n_heads, 7)
    slopes = alibi_slopes(n_heads, torch.device("cpu"))
    torch.testing.assert_close(slopes[:, None] * torch.arange(7), theirs)


def test_alibi_bias_is_minus_slope_times_distance() -> None:
    bias: Tensor = make(spec.Alibi(), n_heads=2).bias(torch.tensor([[4]]), torch.tensor([[1, 4, 6]]))
    assert bias.flatten().tolist() == pytest.approx([-3 / 16, 0, -2 / 16, -3 / 256, 0, -2 / 256])


def test_no_position_does_nothing() -> None:
    position = make(spec.NoPosition())
    x = torch.randn(1, 2, 32)
    assert position.embed(x, torch.arange(2)[None]) is x
    assert position.rotation(torch.arange(2)[None], x.dtype)(x) is x
    assert position.bias(torch.arange(2)[None], torch.arange(2)[None]) is None
