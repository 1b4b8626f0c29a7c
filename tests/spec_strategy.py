"""Specs drawn by hypothesis from the whole space of variants, small enough to run in milliseconds; two by name."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from glasshouse import spec

VOCABULARY = 11

# What the fields of a decoder are in two families: not all of its variants are in the others.
SHAPES: dict[str, dict[str, Any]] = {
    "neox": {
        "position": {"kind": "rotary", "fraction": 0.5},
        "norm_placement": "parallel",
        "norm": {"kind": "layer"},
    },
    "gemma2": {
        "position": {"kind": "rotary"},
        "norm_placement": "sandwich",
        "windows": (4, 0),
        "attention_softcap": 2.0,
        "logit_softcap": 2.0,
        "feedforward": {"kind": "geglu", "tanh": True},
        "n_kv_heads": 2,
    },
    "gemma3_text": {
        "position": {"kind": "rotary", "theta": 1e3, "local_theta": 50.0},
        "norm_placement": "sandwich",
        "windows": (4, 4, 0),
        "qk_norm": True,
        "feedforward": {"kind": "geglu", "tanh": True},
        "n_kv_heads": 2,
    },
    "phi3": {
        "position": {"kind": "rotary", "fraction": 0.5},
        "norm": {"kind": "rms"},
        "feedforward": "swiglu",
        "n_kv_heads": 2,
        "windows": (4,),
    },
    "olmo2": {
        "position": {"kind": "rotary"},
        "norm_placement": "output",
        "qk_norm": True,
        "qk_norm_over": "projection",
        "n_kv_heads": 2,
    },
}

positions = st.one_of(
    st.just(spec.NoPosition()),
    st.builds(spec.Sinusoidal, layout=st.sampled_from(["pairs", "halves"])),
    st.builds(spec.Learned, offset=st.sampled_from([0, 2])),
    st.builds(
        spec.Rotary,
        theta=st.sampled_from([100.0, 10_000.0]),
        layout=st.sampled_from(["halves", "pairs"]),
        scaling=st.sampled_from(
            [
                spec.NoScaling(),
                spec.LinearScaling(4.0),
                spec.Llama3Scaling(8.0, 1.0, 4.0, 16),
                spec.YarnScaling(4.0, 16),
                spec.YarnScaling(4.0, 16, beta_fast=16.0, beta_slow=2.0, attention_factor=1.5),
            ]
        ),
        fraction=st.sampled_from([1.0, 0.7]),  # of heads of 4 or 6, where it rotates 2 or 4
        local_theta=st.sampled_from([None, 50.0]),
    ),
    st.builds(spec.Relative, n_buckets=st.sampled_from([4, 8]), max_distance=st.sampled_from([6, 20])),
    st.just(spec.Alibi()),
)
norms = st.one_of(
    st.builds(spec.LayerNorm, eps=st.sampled_from([1e-5, 1e-3]), bias=st.booleans()),
    st.builds(spec.RMSNorm, eps=st.sampled_from([1e-6, 1e-3])),
)
feedforwards = st.one_of(
    st.just(spec.Relu()),
    st.just(spec.ReluSquared()),
    st.builds(spec.Gelu, tanh=st.booleans()),
    st.just(spec.Silu()),
    st.just(spec.SwiGLU()),
    st.builds(spec.GeGLU, tanh=st.booleans()),
)
inits = st.sampled_from(
    [spec.Normal(), spec.Xavier(), spec.DepthScaled(), spec.ZeroOutput(0.1), spec.FanIn(0.1, 0.1)]
)
poolings = st.sampled_from(["first", "mean", "last"])
next_token = st.builds(spec.NextToken, tied=st.booleans(), bias=st.booleans())
heads = st.one_of(
    next_token,
    st.builds(spec.MaskedToken, tied=st.booleans(), bias=st.booleans(), transform=st.booleans()),
    st.builds(spec.MaskedToken, transform_bias=st.just(False)),
    st.builds(
        spec.SequenceClassification,
        n_labels=st.sampled_from([1, 3]),
        pooling=poolings,
        dense=st.booleans(),
        bias=st.booleans(),
    ),
    st.builds(spec.TokenClassification, n_labels=st.just(3)),
    st.builds(spec.Pooled, pooling=poolings, dense=st.booleans()),
    st.just(spec.NoHead()),
)


@st.composite
def specs(draw: st.DrawFn) -> spec.Spec:
    """Draw a valid spec of any of the three kinds."""
    kind = draw(st.sampled_from(["decoder", "encoder", "seq2seq"]))
    placements = ["pre", "post", "sandwich", "output"]
    n_heads = draw(st.sampled_from([1, 2, 3, 4]))
    qk_norm = draw(st.booleans())
    placement = draw(st.sampled_from(placements if kind == "seq2seq" else [*placements, "parallel"]))
    fields = {
        "vocab_size": VOCABULARY,
        "d_model": n_heads * draw(st.sampled_from([4, 6])),
        "n_layers": draw(st.integers(1, 3)),
        "n_heads": n_heads,
        "n_kv_heads": draw(st.sampled_from([n for n in range(1, n_heads + 1) if n_heads % n == 0])),
        "d_head": draw(st.sampled_from([0, 6])),
        "d_ff": draw(st.sampled_from([0, 5])),
        "max_len": 16,
        "position": draw(positions),
        "norm": draw(norms),
        "norm_placement": placement,
        "first_norm": placement != "pre" or draw(st.booleans()),
        "final_norm": draw(st.booleans()),
        "feedforward": draw(feedforwards),
        "embed_norm": draw(st.booleans()),
        "embed_scale": draw(st.booleans()),
        "logit_scale": draw(st.booleans()),
        "logit_softcap": draw(st.sampled_from([None, 5.0])),
        "qkv_bias": draw(st.booleans()),
        "out_bias": draw(st.booleans()),
        "ffn_bias": draw(st.booleans()),
        "qk_norm": qk_norm,
        "qk_norm_over": draw(st.sampled_from(["head", "projection"])) if qk_norm else "head",
        "value_embeddings": draw(st.booleans()),
        "attention_scale": draw(st.sampled_from([None, 1.0])),
        "attention_softcap": draw(st.sampled_from([None, 5.0])),
        "windows": draw(st.sampled_from([(0,), (3,), (2, 0)])),
        "dropout": draw(st.sampled_from([0.0, 0.1])),
        "attention_dropout": draw(st.sampled_from([0.0, 0.1])),
        "embed_dropout": draw(st.sampled_from([0.0, 0.1])),
        "init": draw(inits),
        "start_id": draw(st.sampled_from([None, 1])),
        "end_ids": draw(st.sampled_from([(), (2,), (2, 3)])),
        "pad_id": draw(st.sampled_from([None, 0])),
    }
    match kind:
        case "decoder":
            sees_more_than_itself = heads.filter(lambda head: getattr(head, "pooling", None) != "first")
            return spec.DecoderSpec(**fields, head=draw(sees_more_than_itself))
        case "encoder":
            return spec.EncoderSpec(**fields, head=draw(heads), n_segments=draw(st.sampled_from([0, 2])))
        case _:
            head = draw(st.one_of(next_token, st.just(spec.NoHead())))
            return spec.Seq2SeqSpec(**fields, head=head, n_encoder_layers=draw(st.sampled_from([0, 1])))
