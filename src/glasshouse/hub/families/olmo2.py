"""OLMo 2: Llama's parts, with norms on the sublayers' outputs and on the whole query and key projections."""

from __future__ import annotations

from glasshouse.hub.families.config_reader import ConfigReader
from glasshouse.hub.families.family import ConfigDict
from glasshouse.hub.families.llama import BASE, NAMES, heads, llama, read_rotary, with_defaults, write_rotary
from glasshouse.spec import Spec


def adjust(keys: ConfigReader, table: ConfigDict) -> None:
    """Read biases; one key sets those of all attention projections."""
    table["qkv_bias"] = table["out_bias"] = keys.get_typed("attention_bias", False)
    read_rotary(keys, table)


def extra(spec: Spec) -> ConfigDict:
    """Return biases and RoPE settings."""
    return {"attention_bias": spec.qkv_bias, **write_rotary(spec)}


ATTENTION, FEEDFORWARD = "stack.blocks.*.attention", "stack.blocks.*.feedforward"
NORMS = {
    f"{ATTENTION}.norm_out": "model.layers.*.post_attention_layernorm",
    f"{ATTENTION}.layer.q_norm.norm": "model.layers.*.self_attn.q_norm",
    f"{ATTENTION}.layer.k_norm.norm": "model.layers.*.self_attn.k_norm",
    f"{FEEDFORWARD}.norm_out": "model.layers.*.post_feedforward_layernorm",
}

OLMO2 = llama(
    model_type="olmo2",
    base={**BASE, "norm_placement": "output", "qk_norm": True, "qk_norm_over": "projection"},
    key_mappings=tuple(
        mapping._replace(default=1e-5) if mapping.hf_key == "rms_norm_eps" else mapping
        for mapping in with_defaults(vocab_size=50_304)
        if mapping.hf_key != "head_dim"  # always hidden_size / num_attention_heads
    ),
    names={name: theirs for name, theirs in NAMES.items() if not name.endswith("norm")}
    | {"stack.norm": NAMES["stack.norm"], **NORMS},
    heads=heads("Olmo2"),
    adjust=adjust,
    extra=extra,
)
