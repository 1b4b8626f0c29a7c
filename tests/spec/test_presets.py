"""Presets: their published parameter counts, and overrides."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

import glasshouse as gh
from glasshouse import config, spec
from glasshouse.spec import catalog


def gpt2(d: int, layers: int) -> int:
    block = (d * 3 * d + 3 * d) + (d * d + d) + (d * 4 * d + 4 * d) + (4 * d * d + d) + 2 * 2 * d
    return 50_257 * d + 1024 * d + layers * block + 2 * d


def llama(vocabulary: int, d: int, layers: int, heads: int, kv_heads: int, d_ff: int) -> int:
    attention = 2 * d * d + 2 * d * (d // heads) * kv_heads
    return vocabulary * d + layers * (attention + 3 * d * d_ff + 2 * d) + d


def vaswani(d: int, d_ff: int) -> int:
    feedforward = d * d_ff + d_ff + d_ff * d + d
    encoder = 4 * d * d + feedforward + 2 * 2 * d
    decoder = 8 * d * d + feedforward + 3 * 2 * d
    return 37_000 * d + 6 * encoder + 6 * decoder


def bert(d: int, layers: int) -> int:
    block = 4 * (d * d + d) + (d * 4 * d + 4 * d) + (4 * d * d + d) + 2 * 2 * d
    head = d * d + d + 2 * d + 30_522
    return (30_522 + 512 + 2) * d + 2 * d + layers * block + head


def t5(d: int, d_ff: int, heads: int) -> int:
    encoder = 6 * (4 * d * d + 2 * d * d_ff + 2 * d) + d + 32 * heads
    decoder = 6 * (8 * d * d + 2 * d * d_ff + 3 * d) + d + 32 * heads
    return 32_128 * d + encoder + decoder


def qwen3(vocabulary: int, d: int, layers: int, heads: int, kv_heads: int, d_ff: int) -> int:
    return llama(vocabulary, d, layers, heads, kv_heads, d_ff) + vocabulary * d + layers * 2 * (d // heads)


def modern(vocabulary: int, d: int, layers: int, heads: int, d_ff: int) -> int:
    block = 4 * d * d + 2 * d * d_ff + 2 * d + 2 * (d // heads)
    value_embedding = vocabulary * d + d * heads  # of every second layer: a vector for each token, a gate for each head
    return 2 * vocabulary * d + layers * block + layers // 2 * value_embedding + 2 * d


COUNTS = {
    "vaswani-base": vaswani(512, 2048),
    "vaswani-big": vaswani(1024, 4096),
    "vaswani-encoder": 37_000 * 512 + 6 * (4 * 512 * 512 + 2 * 512 * 2048 + 2048 + 512 + 2 * 2 * 512),
    "gpt2": gpt2(768, 12),
    "gpt2-medium": gpt2(1024, 24),
    "gpt2-large": gpt2(1280, 36),
    "gpt2-xl": gpt2(1600, 48),
    "bert-base": bert(768, 12),
    "t5-small": t5(512, 2048, 8),
    "llama-small": llama(49_152, 576, 30, 9, 3, 1536),
    "llama-1b": llama(128_256, 2048, 16, 32, 8, 8192),
    "qwen3-small": qwen3(8192, 384, 6, 6, 2, 1024),
    "modern-small": modern(8192, 384, 6, 6, 1536),
    "modern-base": modern(32_768, 768, 12, 6, 3072),
}

# What the papers, or the checkpoints themselves, say of their size.
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "bert-base": 109_514_298,
    "t5-small": 60_506_624,
    "llama-small": 134_515_008,
    "llama-1b": 1_235_814_400,
}


@pytest.mark.parametrize("name", gh.presets())
def test_parameter_counts_match_the_built_model(name: str) -> None:
    s = gh.preset(name)
    counted = sum(weight.numel() for weight in gh.build(s, device="meta").parameters())
    assert gh.count_parameters(s) == counted == COUNTS.get(name, counted) == PUBLISHED.get(name, counted)
    assert name in COUNTS or name.startswith("tiny-")


@pytest.mark.parametrize("name", gh.presets())
def test_every_preset_runs_at_a_small_size(name: str) -> None:
    s = gh.preset(name, vocab_size=50, d_model=48, n_layers=1, n_heads=12 if "llama" in name else 6)
    model = gh.build(s).eval()
    ids = torch.randint(0, 50, (2, 7))
    out = model(ids, ids) if isinstance(s, spec.Seq2SeqSpec) else model(ids)
    assert out.shape == (2, 7, 48 if isinstance(s.head, spec.NoHead) else 50)  # the hidden states themselves
    assert out.isfinite().all()


def test_derived_sizes_scale_with_given_ones() -> None:
    s = gh.preset("llama-1b", d_model=128, n_heads=8)
    assert (s.d_ff, s.n_kv_heads, s.d_head) == (512, 2, 16)
    assert gh.preset("llama-small", n_heads=4, d_model=64).n_kv_heads == 1  # a third of four cannot be had
    assert gh.preset("llama-1b", n_heads=8, n_kv_heads=8, d_ff=10).n_kv_heads == 8
    assert gh.preset("gpt2", d_model=64, n_heads=4, d_ff=10).d_ff == 10
    both = gh.preset("vaswani-base", n_layers=3)
    assert (both.n_layers, both.n_encoder_layers) == (3, 3)
    assert gh.preset("t5-small", n_layers=3, n_encoder_layers=1).n_encoder_layers == 1


def test_another_vocabulary_drops_the_special_ids() -> None:
    assert gh.preset("gpt2").end_ids == (50_256,)
    small = gh.preset("gpt2", vocab_size=65)
    assert (small.start_id, small.end_ids, small.pad_id) == (None, (), None)
    assert gh.preset("gpt2", vocab_size=65, end_ids=[3]).end_ids == (3,)


def test_unknown_names_suggest_the_nearest() -> None:
    with pytest.raises(gh.ConfigError, match=r"there is no preset 'gpt-2'; did you mean gpt2\?"):
        gh.preset("gpt-2")
    with pytest.raises(gh.ConfigError, match=r"n_layerz is not a setting of 'decoder'; did you mean n_layers\?"):
        gh.preset("gpt2", n_layerz=2)


def test_the_default_attention_is_not_written() -> None:
    """Files and fingerprints are those of before `attention` was a setting."""
    table = config.dump(spec.preset("gpt2"))
    assert "attention" not in table
    assert spec.parse(table) == spec.parse(table | {"attention": {"kind": "softmax"}}) == spec.preset("gpt2")


def test_type_checkers_are_told_the_kind_of_every_preset() -> None:
    told = {"decoder": catalog.DecoderPreset, "encoder": catalog.EncoderPreset, "seq2seq": catalog.Seq2SeqPreset}
    known = {name: kind for kind, names in told.items() for name in get_args(names)}
    assert known == {name: gh.preset(name).kind for name in gh.presets()}
