"""GPT-2: a pre-norm decoder with learned positions and a fused QKV matrix; matrices are stored as [in, out]."""

from __future__ import annotations

from glasshouse.hub.families.config_reader import ConfigReader
from glasshouse.hub.families.family import LAST_TOKEN, PLAIN, ConfigDict, Family, KeyMapping, transposed
from glasshouse.spec import Spec


def adjust(keys: ConfigReader, table: ConfigDict) -> None:
    """Read the scale of the scores; refuse a per-layer scale, which no published model uses."""
    if not keys.get_typed("scale_attn_weights", True):
        table["attention_scale"] = 1.0
    keys.expect("scale_attn_by_inverse_layer_idx", False)


def extra(spec: Spec) -> ConfigDict:
    """Return the key for the scale of the scores."""
    return {"scale_attn_weights": spec.attention_scale is None}


GPT2 = Family(
    model_type="gpt2",
    base={"kind": "decoder", "position": "learned", "norm": {"kind": "layer"}},
    key_mappings=(
        KeyMapping("vocab_size", "vocab_size", 50_257),
        KeyMapping("n_positions", "max_len", 1024),
        KeyMapping("n_embd", "d_model", 768),
        KeyMapping("n_layer", "n_layers", 12),
        KeyMapping("n_head", "n_heads", 12),
        KeyMapping("n_inner", "d_ff", 0),
        KeyMapping("activation_function", "feedforward", "gelu_new", PLAIN),
        KeyMapping("layer_norm_epsilon", "norm.eps", 1e-5),
        KeyMapping("resid_pdrop", "dropout", 0.1),
        KeyMapping("embd_pdrop", "embed_dropout", 0.1),
        KeyMapping("attn_pdrop", "attention_dropout", 0.1),
    ),
    heads={
        "GPT2LMHeadModel": {"kind": "next_token"},
        "GPT2Model": {"kind": "none"},
        "GPT2ForSequenceClassification": LAST_TOKEN,
    },
    names={
        "token_embedding.table": "transformer.wte",
        "stack.position.table": "transformer.wpe",
        "stack.blocks.*.attention.norm": "transformer.h.*.ln_1",
        "stack.blocks.*.attention.layer.query": transposed("transformer.h.*.attn.c_attn", 0, 3),
        "stack.blocks.*.attention.layer.key": transposed("transformer.h.*.attn.c_attn", 1, 3),
        "stack.blocks.*.attention.layer.value": transposed("transformer.h.*.attn.c_attn", 2, 3),
        "stack.blocks.*.attention.layer.out": transposed("transformer.h.*.attn.c_proj"),
        "stack.blocks.*.feedforward.norm": "transformer.h.*.ln_2",
        "stack.blocks.*.feedforward.layer.up": transposed("transformer.h.*.mlp.c_fc"),
        "stack.blocks.*.feedforward.layer.down": transposed("transformer.h.*.mlp.c_proj"),
        "stack.norm": "transformer.ln_f",
        "head.weight": "lm_head.weight",
        "head.classifier": "score",
    },
    prefix="transformer.",
    tied_tensors={"transformer.wte.weight": ("lm_head.weight",)},
    ignored_tensors=r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",  # the causal mask, saved by older versions
    ignored_keys=(
        "initializer_range",
        "n_ctx",
        "reorder_and_upcast_attn",
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
    ),
    adjust=adjust,
    extra=extra,
)
