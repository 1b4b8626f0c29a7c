"""Invalid specs and calls: one sentence that names the field and the value, before anything is allocated."""

from __future__ import annotations

import resource
import sys

import pytest
import torch

import glasshouse as gh


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"d_model": 65}, "d_model is 65, but it must be a multiple of n_heads = 4 unless d_head is given."),
        ({"n_kv_heads": 3}, "n_kv_heads is 3, but it must be a divisor of n_heads = 4."),
        ({"n_kv_heads": 8}, "n_kv_heads is 8, but it must be a divisor of n_heads = 4."),
        ({"position": "rotary", "d_head": 5}, "d_head is 5, but it must be even, as rotary positions rotate pairs."),
        (
            {"position": {"kind": "rotary", "fraction": 0.0}},
            "rotary.fraction is 0.0, but it must be above 0 and at most 1.",
        ),
        (
            {"position": {"kind": "rotary", "fraction": 1.5}},
            "rotary.fraction is 1.5, but it must be above 0 and at most 1.",
        ),
        (
            {"position": {"kind": "rotary", "fraction": 0.2}},
            "rotary.fraction is 0.2, but it must be a share of d_head = 16 that is even, as pairs are rotated, "
            "not 3.",
        ),
        (
            {"position": {"kind": "rotary", "fraction": 0.05}},
            "rotary.fraction is 0.05, but it must be a share of d_head = 16 that is even, as pairs are rotated, "
            "not 0.",
        ),
        (
            {"qk_norm": False, "qk_norm_over": "projection"},
            "qk_norm_over is 'projection', but it must be 'head' unless qk_norm is true.",
        ),
        (
            {"position": "sinusoidal", "d_model": 15, "d_head": 4},
            "d_model is 15, but it must be even, as sinusoidal positions come in pairs.",
        ),
        ({"d_modell": 64}, "d_modell is not a setting of 'decoder'; did you mean d_model?"),
        (
            {"position": {"kind": "learned", "theta": 1}},
            "position.theta is not a setting of 'learned'; it has offset.",
        ),
        (
            {"attention": "linear"},
            "attention.kind is 'linear', but it must be one of 'softmax', or be registered by a package that is "
            "installed or imported.",
        ),
        (
            {"attention": {"kind": "softmax", "scale": 1}},
            "attention.scale is not a setting of 'softmax'; it has none.",
        ),
        ({"position": {"kind": "rotary", "theta": 0}}, "rotary.theta is 0.0, but it must be above 1."),
        ({"position": {"kind": "learned", "offset": -1}}, "learned.offset is -1, but it must be 0 or above."),
        ({"norm": {"kind": "rms", "eps": float("nan")}}, "rms.eps is nan, but it must be above 0."),
        ({"d_model": -64}, "d_model is -64, but it must be at least 1."),
        ({"n_layers": 0}, "n_layers is 0, but it must be at least 1."),
        ({"n_heads": 0}, "n_heads is 0, but it must be at least 1."),
        ({"n_heads": -4}, "n_heads is -4, but it must be at least 1."),
        ({"d_head": -2}, "d_head is -2, but it must be at least 1, or 0 for d_model / n_heads."),
        ({"vocab_size": -1}, "vocab_size is -1, but it must be at least 1."),
        ({"max_len": 0}, "max_len is 0, but it must be at least 1."),
        ({"d_model": 64.5}, "d_model is 64.5, but it must be a whole number."),
        ({"d_model": "wide"}, "d_model is 'wide', but it must be a whole number."),
        ({"dropout": 1.0}, "dropout is 1.0, but it must be at least 0 and below 1."),
        ({"attention_scale": 0}, "attention_scale is 0.0, but it must be above 0."),
        ({"logit_softcap": 0.0}, "logit_softcap is 0.0, but it must be above 0."),
        ({"attention_softcap": -1.0}, "attention_softcap is -1.0, but it must be above 0."),
        (
            {"windows": [4, -1]},
            "windows is (4, -1), but it must be a list of sizes, 0 for a layer with full attention.",
        ),
        ({"start_id": 256}, "start_id is 256, but it must be an id below vocab_size = 256."),
        ({"end_ids": [1, -1]}, "end_ids is -1, but it must be an id below vocab_size = 256."),
        (
            {"head": {"kind": "token_classification", "n_labels": 0}},
            "token_classification.n_labels is 0, but it must be above 0.",
        ),
        (
            {"head": {"kind": "sequence_classification", "n_labels": 2}},
            "head.pooling is 'first', but it must be last or mean: a decoder's first token attends to no other.",
        ),
        (
            {"first_norm": False, "norm_placement": "post"},
            "first_norm is False, but it must be true unless norm_placement is 'pre', where the first block has a "
            "norm to leave out.",
        ),
        (
            {"head": {"kind": "masked_token", "transform": False, "transform_bias": False}},
            "masked_token.transform_bias is False, but it must be true without transform.",
        ),
        (
            {"head": {"kind": "sequence_classification", "n_labels": 2, "dense": False, "dense_kind": "relu"}},
            "sequence_classification.dense_kind is 'relu', but it must be 'tanh' unless dense is true.",
        ),
        ({"kind": "encoder"}, "kind is 'encoder', but a preset's kind is fixed; choose another preset."),
    ],
)
def test_an_invalid_spec_is_refused_in_one_sentence(settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(gh.ConfigError) as error:
        gh.preset("tiny-decoder", **settings)
    assert isinstance(error.value, ValueError)
    assert str(error.value) == sentence


@pytest.mark.parametrize(
    "settings", [{"d_model": 1_200_000_000}, {"n_layers": 10**9}, {"vocab_size": 10**15}, {"d_ff": 10**12}]
)
def test_a_model_larger_than_the_memory_is_refused_by_arithmetic(settings: dict[str, int]) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(gh.ConfigError, match=r"parameters and needs .* GiB, but the memory of 'cpu' is") as error:
        gh.build(gh.preset("gpt2", **settings))
    name, value = next(iter(settings.items()))
    assert f"{name} = {value}" in str(error.value)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * (1 if sys.platform == "darwin" else 1024)
    assert grown < 100e6


def fresh(name: str = "tiny-decoder", **settings: object) -> torch.nn.Module:
    return gh.build(gh.preset(name, **settings)).eval()


@pytest.mark.parametrize(
    ("ids", "kwargs", "sentence"),
    [
        ([[0, 256]], {}, "ids contains 256, but it must be from 0 to vocab_size - 1 = 255."),
        ([[-1, 5]], {}, "ids contains -1, but it must be from 0 to vocab_size - 1 = 255."),
        (
            [0, 1],
            {},
            "ids has shape [2] and type torch.int64, but it must be a [batch, length] tensor of int64 or int32",
        ),
        ([[0.5]], {}, "ids has shape [1, 1] and type torch.float32, but it must be"),
        ([[]], {}, "ids has shape [1, 0] and type torch.float32, but it must be"),
        ([[1, 2]], {"lengths": [3]}, "lengths contains 3, but a row has 2 tokens"),
        ([[1, 2]], {"lengths": [1, 2]}, "lengths has shape [2], but with these ids it must have [1]."),
        ([[1, 2]], {"mask": [[1, 1]]}, "mask has type torch.int64, but it must be torch.bool"),
        ([[1, 2]], {"mask": [[True]]}, "mask has shape [1, 1], but with these ids it must have [1, 2]."),
        ([[1]], {"mask": [[True]], "lengths": [1]}, "lengths and mask were both given"),
        ([[1, 2]], {"documents": [0, 1]}, "documents has shape [2], but with these ids it must have [1, 2]."),
        (
            [[1, 2]],
            {"prefix_lengths": [[1]]},
            "prefix_lengths has shape [1, 1], but with these ids it must have [1, 2].",
        ),
    ],
)
def test_an_invalid_call_is_refused_in_one_sentence(
    ids: list[object], kwargs: dict[str, list[object]], sentence: str
) -> None:
    with pytest.raises(gh.InputError) as error:
        fresh()(torch.tensor(ids), **{name: torch.tensor(value) for name, value in kwargs.items()})
    assert str(error.value).startswith(sentence)


def test_a_sequence_longer_than_a_learned_table_is_refused() -> None:
    model = fresh("gpt2", d_model=16, n_heads=2, n_layers=1, vocab_size=9, max_len=4)
    model(torch.zeros(1, 4, dtype=torch.long))
    with pytest.raises(gh.InputError, match="the sequence is 5 long, but max_len is 4; shorten it"):
        model(torch.zeros(1, 5, dtype=torch.long))


def test_a_full_cache_is_refused_and_unchanged() -> None:
    model = fresh(init="normal")
    ids = torch.randint(0, 256, (1, 5))
    cache = model.make_cache(1, 4)
    with torch.no_grad():
        model(ids[:, :3], cache=cache)
        with pytest.raises(gh.InputError, match="the cache has max_len = 4 tokens per row, but 5 are needed"):
            model(ids[:, 3:], cache=cache)
        torch.testing.assert_close(model(ids[:, 3:4], cache=cache), model(ids[:, :4])[:, 3:])


def test_incompatible_arguments_are_refused() -> None:
    ids = torch.tensor([[1, 2, 3]])
    decoder, encoder, seq2seq = fresh(), fresh("tiny-encoder", n_segments=0), fresh("tiny-seq2seq")
    with pytest.raises(gh.InputError, match="documents and cache were both given"):
        decoder(ids, documents=torch.zeros_like(ids), cache=decoder.make_cache(1, 8))
    with pytest.raises(gh.InputError, match="the cache has 2 rows, but this call has 1"):
        decoder(ids, cache=decoder.make_cache(2, 8))
    with pytest.raises(gh.InputError, match="segments were given, but the spec has n_segments = 0"):
        encoder(ids, segments=torch.zeros_like(ids))
    with pytest.raises(gh.InputError, match="segments contains 2, but it must be from 0 to n_segments - 1 = 1"):
        fresh("tiny-encoder")(ids, segments=torch.full_like(ids, 2))
    with pytest.raises(gh.InputError, match="source is None, but no source is cached"):
        seq2seq(None, ids)
    with pytest.raises(gh.InputError, match="source has batch size 2, but target has 1"):
        seq2seq(ids.expand(2, -1), ids)
    with pytest.raises(gh.InputError, match="the source is 3 tokens long, but the cache has source_len = 2"):
        seq2seq(ids, ids, cache=seq2seq.make_cache(1, 8, source_len=2))
    with pytest.raises(gh.InputError, match="documents and target_documents go together"):
        seq2seq(ids, ids, documents=torch.zeros_like(ids))
    with pytest.raises(gh.InputError, match="target contains 256, but it must be from"):
        seq2seq(ids, torch.tensor([[256]]))
    with pytest.raises(gh.InputError, match="target_lengths contains 4, but a row has 3 tokens"):
        seq2seq(ids, ids, target_lengths=torch.tensor([4]))
    fresh_cache = seq2seq.make_cache(1, 8)
    with pytest.raises(gh.InputError, match="source is None, but no source is cached"):
        seq2seq(None, ids, cache=fresh_cache)
    seq2seq(ids, ids, cache=fresh_cache)
    with pytest.raises(gh.InputError, match="were given without a source"):
        seq2seq(None, ids, lengths=torch.tensor([2]), cache=fresh_cache)
    with pytest.raises(gh.InputError, match="this head pools each sequence"):
        fresh("tiny-encoder", head="pooled")(ids, documents=torch.zeros_like(ids))
    with pytest.raises(gh.InputError, match="lengths is a list, but it must be a tensor"):
        decoder(ids, lengths=[3])


def test_a_prefix_that_goes_past_a_cached_call_is_refused() -> None:
    decoder, ids = fresh(), torch.tensor([[1, 2, 3]])
    with pytest.raises(
        gh.InputError, match="prefix_lengths contains 4, but with this call a row has 3 tokens in the cache"
    ):
        decoder(ids, prefix_lengths=torch.tensor([4]), cache=decoder.make_cache(1, 8))


@pytest.mark.long
def test_a_compiled_step_past_the_end_of_a_cache_stops_too() -> None:
    model = fresh()
    step, cache = torch.compile(model, backend="eager"), model.make_cache(1, 2)
    with torch.no_grad():
        for _ in range(2):
            step(torch.tensor([[1]]), cache=cache)
        with pytest.raises(IndexError, match="index 3 is out of bounds"):
            step(torch.tensor([[1]]), cache=cache)
