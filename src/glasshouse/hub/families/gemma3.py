"""Gemma 3 (text): Gemma 2's norms, with norms on queries and keys, and another rotation in layers with a window."""

from __future__ import annotations

from collections.abc import Mapping

from glasshouse.errors import StoreError
from glasshouse.hub.families.config_reader import ConfigReader
from glasshouse.hub.families.family import LAST_TOKEN, ConfigDict, minus_one
from glasshouse.hub.families.gemma2 import KEY_MAPPINGS, NORMS, TYPES, read_scale, repeated
from glasshouse.hub.families.llama import BASE, NAMES, llama, read_rotary, windows_of, write_rotary
from glasshouse.spec import Rotary, Spec

THETA, LOCAL_THETA = 1e6, 10_000.0
LOCAL, FULL = TYPES
PATTERN = 6  # every so many layers one attends to everything


def adjust(keys: ConfigReader, table: ConfigDict) -> None:
    """Read biases, the soft-cap of the logits, the scale of the scores, sliding windows and both rotations."""
    table["qkv_bias"] = table["out_bias"] = keys.get_typed("attention_bias", False)
    table["logit_softcap"] = keys.get("final_logit_softcapping")
    keys.expect("attn_logit_softcapping", None)
    read_scale(keys, table)
    n_layers, pattern = table["n_layers"], keys.get_int("sliding_window_pattern", PATTERN)
    if pattern < 1:
        raise StoreError(f"{keys.source!r} has sliding_window_pattern = {pattern}, but it must be at least 1.")
    types = keys.get("layer_types") or [TYPES[(number + 1) % pattern == 0] for number in range(n_layers)]
    table["windows"] = repeated(windows_of(keys, types, keys.get_int("sliding_window", 4096), n_layers))
    keys.expect("use_bidirectional_attention", None, False)
    read_rotations(keys, table, {"rope_theta": THETA, "rope_local_base_freq": LOCAL_THETA})


def read_rotations(keys: ConfigReader, table: ConfigDict, thetas: Mapping[str, float]) -> None:
    """Read the rotation of each type of layer: `rope_parameters` by type, or keys of older configs.

    `thetas` are the keys and the defaults of the bases, that of layers with a window last.
    """
    (key, theta), (local_key, local_theta) = thetas.items()
    given = keys.get("rope_parameters") or {}
    local = given.get(LOCAL) if isinstance(given, dict) else None
    if given and not isinstance(local, dict):
        raise StoreError(
            f"{keys.source!r} has rope_parameters = {given!r}, but it must have one for each layer type."
        )
    old = {"rope_theta": keys.get(key), "rope_scaling": keys.get("rope_scaling")}
    read_rotary(
        ConfigReader({**old, "rope_parameters": given.get(FULL)}, keys.source, keys.ignore), table, theta=theta
    )
    local_theta = keys.get_typed(local_key, local_theta)
    if local:
        rope = ConfigReader(local, keys.source, keys.ignore)
        rope.expect("rope_type", "default")
        local_theta = rope.get_typed("rope_theta", local_theta)
        rope.reject_unused(())
    table["position"]["local_theta"] = local_theta


def extra(spec: Spec) -> ConfigDict:
    """Return what `adjust` reads."""
    windows = [spec.window(number) for number in range(spec.n_layers)]
    result = {
        "attention_bias": spec.qkv_bias,
        "final_logit_softcapping": spec.logit_softcap,
        "attn_logit_softcapping": None,
        "query_pre_attn_scalar": round((spec.attention_scale or spec.d_head**-0.5) ** -2),
        "sliding_window": max(windows) or 4096,
        "layer_types": [TYPES[not window] for window in windows],
    }
    if isinstance(spec.position, Rotary):
        result |= write_rotations(spec, spec.position, ("rope_theta", "rope_local_base_freq"))
    return result


def write_rotations(spec: Spec, position: Rotary, keys: tuple[str, str]) -> ConfigDict:
    """Return the rotation of each type of layer, with the bases also under the `keys` of older configs."""
    full, local_theta = write_rotary(spec), position.local_theta or position.theta
    local = {"rope_type": "default", "rope_theta": local_theta}
    bases = dict(zip(keys, (full.pop("rope_theta"), local_theta), strict=True))
    return {**full, "rope_parameters": {FULL: full["rope_parameters"], LOCAL: local}, **bases}


ATTENTION = "stack.blocks.*.attention.layer"
HEAD_NORMS = {f"{ATTENTION}.{one}": minus_one(NAMES[f"{ATTENTION}.{one}"]) for one in ("q_norm", "k_norm")}
SIZES = {"vocab_size": 262_208, "max_position_embeddings": 131_072}

GEMMA3 = llama(
    model_type="gemma3_text",
    base={**BASE, "norm_placement": "sandwich", "embed_scale": True, "qk_norm": True},
    key_mappings=tuple(
        mapping._replace(default=SIZES.get(mapping.hf_key, mapping.default)) for mapping in KEY_MAPPINGS
    ),
    names={**NAMES, **NORMS, **HEAD_NORMS},
    # What the layer types were derived from is not what counts.
    ignored_keys=("initializer_range", "hidden_act", "cache_implementation", "_sliding_window_pattern"),
    tied=True,
    heads={
        "Gemma3ForCausalLM": {"kind": "next_token"},
        "Gemma3TextModel": {"kind": "none"},
        "Gemma3TextForSequenceClassification": LAST_TOKEN,
    },
    adjust=adjust,
    extra=extra,
)
