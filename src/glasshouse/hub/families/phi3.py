"""Phi-3 and Phi-4: Llama's parts, with one matrix for queries, keys and values, and one for gate and up."""

from __future__ import annotations

from glasshouse.hub.families.config_reader import ConfigReader
from glasshouse.hub.families.family import ConfigDict, KeyMapping, fused_gate, fused_qkv
from glasshouse.hub.families.llama import NAMES, heads, llama, read_rotary, with_defaults, write_rotary
from glasshouse.spec import Rotary, Spec


def adjust(keys: ConfigReader, table: ConfigDict) -> None:
    """Read the sliding window, the same in every layer, and the rotation."""
    table["windows"] = [keys.get("sliding_window") or 0]
    fraction = keys.get_typed("partial_rotary_factor", 1.0)
    keys.expect("attention_bias", False)
    read_rotary(keys, table, fraction=fraction)


def extra(spec: Spec) -> ConfigDict:
    """Return the sliding window and the rotation."""
    result = {"sliding_window": spec.windows[0] or None, **write_rotary(spec)}
    if isinstance(spec.position, Rotary):
        result["partial_rotary_factor"] = result["rope_parameters"]["partial_rotary_factor"] = spec.position.fraction
    return result


PHI3 = llama(
    model_type="phi3",
    key_mappings=(
        *(
            mapping._replace(default=1e-5) if mapping.hf_key == "rms_norm_eps" else mapping
            for mapping in with_defaults(
                vocab_size=32_064, hidden_size=3072, intermediate_size=8192, max_position_embeddings=4096
            )
            if mapping.hf_key != "head_dim"  # always hidden_size / num_attention_heads
        ),
        KeyMapping("resid_pdrop", "dropout", 0.0),
    ),
    names={
        **NAMES,
        **fused_qkv("model.layers.*.self_attn.qkv_proj", "in turn"),
        **fused_gate("model.layers.*.mlp.gate_up_proj"),
    },
    # Without scaling no position has another rotation; embeddings have no dropout whatever the config says.
    ignored_keys=("initializer_range", "original_max_position_embeddings", "embd_pdrop"),
    heads=heads("Phi3"),
    adjust=adjust,
    extra=extra,
)
