"""The folders of gated models: Llama's names and keys, and one more tensor."""

from dataclasses import replace

from glasshouse.hub.families.family import KeyMapping
from glasshouse.hub.families.llama import LLAMA

GATED_LLAMA = replace(
    LLAMA,
    model_type="gated-llama",
    base={**LLAMA.base, "attention": {"kind": "gated"}},
    key_mappings=(*LLAMA.key_mappings, KeyMapping("gate_bias", "attention.bias", True)),
    heads={"GatedLlamaForCausalLM": {"kind": "next_token"}},
    names={**LLAMA.names, "stack.blocks.*.attention.layer.gate": "model.layers.*.self_attn.g_proj"},
)
