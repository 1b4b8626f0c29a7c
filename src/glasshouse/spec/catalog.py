"""Presets: published architectures by name, the `modern` ones, which learn fastest here, and `tiny` ones."""

from __future__ import annotations

from typing import Any, Literal, cast, overload

from glasshouse import config
from glasshouse.errors import ConfigError
from glasshouse.spec.init import Init
from glasshouse.spec.model import DecoderSpec, EncoderSpec, Seq2SeqSpec, Spec
from glasshouse.spec.position import Position

ConfigDict = dict[str, Any]

# For type checkers: what a preset, and the model that is built from it, is.
DecoderPreset = Literal[
    "gpt2",
    "gpt2-medium",
    "gpt2-large",
    "gpt2-xl",
    "llama-small",
    "llama-1b",
    "qwen3-small",
    "modern-small",
    "modern-base",
    "tiny-decoder",
]
EncoderPreset = Literal["bert-base", "vaswani-encoder", "tiny-encoder"]
Seq2SeqPreset = Literal["vaswani-base", "vaswani-big", "t5-small", "tiny-seq2seq"]

_VASWANI: ConfigDict = {
    "kind": "seq2seq",
    "vocab_size": 37_000,
    "d_model": 512,
    "n_layers": 6,
    "n_heads": 8,
    "d_ff": 2048,
    "position": "sinusoidal",
    "norm_placement": "post",
    "final_norm": False,
    "feedforward": "relu",
    "embed_scale": True,
    "qkv_bias": False,
    "out_bias": False,
    "dropout": 0.1,
    "embed_dropout": 0.1,
    "init": "xavier",
}

_GPT2: ConfigDict = {
    "kind": "decoder",
    "vocab_size": 50_257,
    "d_model": 768,
    "n_layers": 12,
    "n_heads": 12,
    "d_ff": 3072,
    "max_len": 1024,
    "position": "learned",
    "feedforward": {"kind": "gelu", "tanh": True},
    "dropout": 0.1,
    "attention_dropout": 0.1,
    "embed_dropout": 0.1,
    "init": "depth_scaled",
    "start_id": 50_256,
    "end_ids": [50_256],
}

_BERT: ConfigDict = {
    "kind": "encoder",
    "vocab_size": 30_522,
    "d_model": 768,
    "n_layers": 12,
    "n_heads": 12,
    "d_ff": 3072,
    "max_len": 512,
    "position": "learned",
    "norm": {"kind": "layer", "eps": 1e-12},
    "norm_placement": "post",
    "final_norm": False,
    "feedforward": "gelu",
    "embed_norm": True,
    "n_segments": 2,
    "dropout": 0.1,
    "attention_dropout": 0.1,
    "embed_dropout": 0.1,
    "init": "normal",
    "pad_id": 0,
}

_T5: ConfigDict = {
    "kind": "seq2seq",
    "vocab_size": 32_128,
    "d_model": 512,
    "n_layers": 6,
    "n_heads": 8,
    "d_ff": 2048,
    "max_len": 512,
    "position": "relative",
    "norm": "rms",
    "feedforward": "relu",
    "logit_scale": True,
    "qkv_bias": False,
    "out_bias": False,
    "ffn_bias": False,
    "attention_scale": 1.0,
    "dropout": 0.1,
    "attention_dropout": 0.1,
    "embed_dropout": 0.1,
    "init": "normal",
    "start_id": 0,
    "end_ids": [1],
    "pad_id": 0,
}

_LLAMA: ConfigDict = {
    "kind": "decoder",
    "position": "rotary",
    "norm": {"kind": "rms", "eps": 1e-5},
    "feedforward": "swiglu",
    "qkv_bias": False,
    "out_bias": False,
    "ffn_bias": False,
    "init": "normal",
}

_QWEN3: ConfigDict = {
    **_LLAMA,
    "norm": "rms",
    "qk_norm": True,
    "init": "zero_output",
    "head": {"kind": "next_token", "tied": False},
}

# What learned fastest (docs/lab/training-gpu.md#time-to-a-loss). No published family has all of it, so it cannot be
# exported; its KV cache is that of multi-head attention, and most of its embeddings are value embeddings.
_MODERN: ConfigDict = {
    **_QWEN3,
    "feedforward": "relu2",
    "embed_norm": True,
    "value_embeddings": True,
    "logit_softcap": 15.0,
}

_TINY: ConfigDict = {"vocab_size": 256, "d_model": 64, "n_layers": 2, "n_heads": 4, "d_ff": 128, "max_len": 128}

_PRESETS: dict[str, ConfigDict] = {
    "vaswani-base": _VASWANI,
    "vaswani-big": {**_VASWANI, "d_model": 1024, "n_heads": 16, "d_ff": 4096, "dropout": 0.3},
    # The left half of the original, on its own: the encoder of the lecture notes.
    "vaswani-encoder": {**_VASWANI, "kind": "encoder", "head": "none"},
    "gpt2": _GPT2,
    "gpt2-medium": {**_GPT2, "d_model": 1024, "n_layers": 24, "n_heads": 16, "d_ff": 4096},
    "gpt2-large": {**_GPT2, "d_model": 1280, "n_layers": 36, "n_heads": 20, "d_ff": 5120},
    "gpt2-xl": {**_GPT2, "d_model": 1600, "n_layers": 48, "n_heads": 25, "d_ff": 6400},
    "bert-base": _BERT,
    "t5-small": _T5,
    "llama-small": {
        **_LLAMA,
        "vocab_size": 49_152,
        "d_model": 576,
        "n_layers": 30,
        "n_heads": 9,
        "n_kv_heads": 3,
        "d_ff": 1536,
        "max_len": 2048,
    },
    "llama-1b": {
        **_LLAMA,
        "vocab_size": 128_256,
        "d_model": 2048,
        "n_layers": 16,
        "n_heads": 32,
        "n_kv_heads": 8,
        "d_ff": 8192,
        "max_len": 131_072,
        "position": {
            "kind": "rotary",
            "theta": 500_000.0,
            "scaling": {
                "kind": "llama3",
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_len": 8192,
            },
        },
        "start_id": 128_000,
        "end_ids": [128_001],
    },
    "qwen3-small": {
        **_QWEN3,
        "vocab_size": 8192,
        "d_model": 384,
        "n_layers": 6,
        "n_heads": 6,
        "n_kv_heads": 2,
        "d_ff": 1024,
        "max_len": 512,
    },
    "modern-small": {
        **_MODERN,
        "vocab_size": 8192,
        "d_model": 384,
        "n_layers": 6,
        "n_heads": 6,
        "n_kv_heads": 6,
        "d_ff": 1536,
        "max_len": 512,
    },
    "modern-base": {
        **_MODERN,
        "vocab_size": 32_768,
        "d_model": 768,
        "n_layers": 12,
        "n_heads": 6,
        "n_kv_heads": 6,
        "d_ff": 3072,
        "max_len": 2048,
    },
    "tiny-decoder": {**_QWEN3, **_TINY, "n_kv_heads": 2},
    "tiny-encoder": {**_BERT, **_TINY},
    "tiny-seq2seq": {**_VASWANI, **_TINY},
}


def presets() -> list[str]:
    """List the names of the presets.

    >>> presets()[:3]
    ['vaswani-base', 'vaswani-big', 'vaswani-encoder']
    """
    return list(_PRESETS)


@overload
def preset(name: DecoderPreset, **overrides: object) -> DecoderSpec: ...
@overload
def preset(name: EncoderPreset, **overrides: object) -> EncoderSpec: ...
@overload
def preset(name: Seq2SeqPreset, **overrides: object) -> Seq2SeqSpec: ...
@overload
def preset(name: str, **overrides: object) -> Spec: ...
def preset(name: str, **overrides: object) -> Spec:
    """Return the spec of a preset, with some of its fields overridden.

    Unless given, d_ff scales with d_model and n_kv_heads with n_heads. Another vocab_size means another tokenizer, so
    the preset's special token ids are dropped. Overriding the position with sinusoidal also sets the embedding scale
    and weight initialization that it needs.

    >>> spec = preset("gpt2", n_layers=2, d_model=64, n_heads=4)
    >>> spec.d_ff, spec.d_head
    (256, 16)
    >>> preset("gpt2", position={"kind": "rotary", "theta": 500_000}).position.theta
    500000.0
    """
    if name not in _PRESETS:
        raise ConfigError(f"there is no preset {name!r}; {config.did_you_mean(name, _PRESETS)}")
    if "kind" in overrides:
        raise ConfigError(f"kind is {overrides['kind']!r}, but a preset's kind is fixed; choose another preset.")
    base = dict(_PRESETS[name])
    if "vocab_size" in overrides:
        for special in ("start_id", "end_ids", "pad_id"):
            base.pop(special, None)
    if "position" in overrides and _own_init(overrides["position"]) and not _own_init(base["position"]):
        base.pop("init")
    return parse({**base, **_scaled_sizes(base, overrides), **overrides})


def _own_init(position: object) -> Init | None:
    found = config.parse(cast(Any, Position), position, "position")
    return cast(Position, found).init


def _scaled_sizes(base: ConfigDict, overrides: ConfigDict) -> ConfigDict:
    derived = {}
    d_model, n_heads = overrides.get("d_model"), overrides.get("n_heads")
    if isinstance(d_model, int):
        derived["d_ff"] = base["d_ff"] * d_model // base["d_model"]
    if isinstance(n_heads, int) and n_heads > 0 and "n_kv_heads" in base:
        share = max(1, base["n_kv_heads"] * n_heads // base["n_heads"])
        derived["n_kv_heads"] = next(n for n in range(share, 0, -1) if n_heads % n == 0)
    return derived


def parse(table: ConfigDict) -> Spec:
    """Build a spec from plain values, as in TOML or JSON; `config.dump` is the inverse.

    >>> parse(config.dump(preset("t5-small"))) == preset("t5-small")
    True
    """
    return cast(Spec, config.parse(cast(Any, Spec), table))
