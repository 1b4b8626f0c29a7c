"""Gemma 2: Llama's parts with norms before and after each sublayer, soft-caps, and windows in every second layer."""

from __future__ import annotations

from glasshouse.errors import StoreError
from glasshouse.hub.families.config_reader import ConfigReader
from glasshouse.hub.families.family import GATED, ConfigDict, KeyMapping, minus_one
from glasshouse.hub.families.llama import (
    BASE,
    NAMES,
    heads,
    llama,
    read_rotary,
    windows_of,
    with_defaults,
    write_rotary,
)
from glasshouse.spec import Spec

CAPS = {"attn_logit_softcapping": ("attention_softcap", 50.0), "final_logit_softcapping": ("logit_softcap", 30.0)}
TYPES = "sliding_attention", "full_attention"  # of the layers, in turn, where the config names none


def adjust(keys: ConfigReader, table: ConfigDict) -> None:
    """Read biases, soft-caps, the scale of the scores and sliding windows."""
    table["qkv_bias"] = table["out_bias"] = keys.get_typed("attention_bias", False)
    for theirs, (ours, default) in CAPS.items():
        table[ours] = None if keys.get(theirs, default) is None else keys.get_typed(theirs, default)
    read_scale(keys, table)
    n_layers = table["n_layers"]
    types = keys.get("layer_types") or [TYPES[number % 2] for number in range(n_layers)]
    table["windows"] = repeated(windows_of(keys, types, keys.get_int("sliding_window", 4096), n_layers))
    keys.expect("use_bidirectional_attention", None, False)
    read_rotary(keys, table)


def read_scale(keys: ConfigReader, table: ConfigDict) -> None:
    """Read the scale of the scores."""
    scalar = keys.get_int("query_pre_attn_scalar", 256)
    if scalar < 1:
        raise StoreError(f"{keys.source!r} has query_pre_attn_scalar = {scalar}, but it must be at least 1.")
    table["attention_scale"] = None if scalar == table["d_head"] else scalar**-0.5


def repeated(windows: list[int]) -> list[int]:
    """Return the shortest list that gives the windows of all layers where it is repeated over them.

    >>> repeated([4, 4, 0, 4, 4]), repeated([0, 0])
    ([4, 4, 0], [0])
    """
    count = len(windows)
    return next(windows[:n] for n in range(1, count + 1) if windows == (windows[:n] * count)[:count])


def extra(spec: Spec) -> ConfigDict:
    """Return what `adjust` reads."""
    windows = [spec.window(number) for number in range(spec.n_layers)]
    scale = spec.attention_scale or spec.d_head**-0.5
    return {
        "attention_bias": spec.qkv_bias,
        **{theirs: getattr(spec, ours) for theirs, (ours, _) in CAPS.items()},
        "query_pre_attn_scalar": round(scale**-2),
        "sliding_window": max(windows) or 4096,
        "layer_types": [TYPES[not window] for window in windows],
        **write_rotary(spec),
    }


ATTENTION, FEEDFORWARD = "stack.blocks.*.attention", "stack.blocks.*.feedforward"
NORMS = {
    f"{ATTENTION}.norm": minus_one("model.layers.*.input_layernorm"),
    f"{ATTENTION}.norm_out": minus_one("model.layers.*.post_attention_layernorm"),
    f"{FEEDFORWARD}.norm": minus_one("model.layers.*.pre_feedforward_layernorm"),
    f"{FEEDFORWARD}.norm_out": minus_one("model.layers.*.post_feedforward_layernorm"),
    "stack.norm": minus_one("model.norm"),
}
SIZES = {
    "vocab_size": 256_000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
}

KEY_MAPPINGS = tuple(
    KeyMapping("hidden_activation", "feedforward", "gelu_pytorch_tanh", GATED)
    if mapping.hf_key == "hidden_act"
    else mapping
    for mapping in with_defaults(**SIZES)
)

GEMMA2 = llama(
    model_type="gemma2",
    base={**BASE, "norm_placement": "sandwich", "embed_scale": True},
    key_mappings=KEY_MAPPINGS,
    names={**NAMES, **NORMS},
    ignored_keys=("initializer_range", "hidden_act", "cache_implementation"),  # `hidden_activation` is what counts
    tied=True,
    heads=heads("Gemma2"),
    adjust=adjust,
    extra=extra,
)
