"""GPT-2: learned positions, norms before, one fused matrix for queries, keys and values, kept as [in, out]."""

from __future__ import annotations

from glasshouse.hub.family import PLAIN, Family, Row, Table, transposed
from glasshouse.hub.keys import Keys
from glasshouse.spec import Spec


def adjust(keys: Keys, table: Table) -> None:
    """Read the one switch that changes scores; refuse the one that no published model turns on."""
    if not keys.value("scale_attn_weights", True):
        table["attention_scale"] = 1.0
    keys.expect("scale_attn_by_inverse_layer_idx", False)


def extra(spec: Spec) -> Table:
    """Write that switch."""
    return {"scale_attn_weights": spec.attention_scale is None}


GPT2 = Family(
    model_type="gpt2",
    base={"kind": "decoder", "position": "learned", "norm": {"kind": "layer"}},
    rows=(
        Row("vocab_size", "vocab_size", 50_257),
        Row("n_positions", "max_len", 1024),
        Row("n_embd", "d_model", 768),
        Row("n_layer", "n_layers", 12),
        Row("n_head", "n_heads", 12),
        Row("n_inner", "d_ff", 0),
        Row("activation_function", "feedforward", "gelu_new", PLAIN),
        Row("layer_norm_epsilon", "norm.eps", 1e-5),
        Row("resid_pdrop", "dropout", 0.1),
        Row("embd_pdrop", "embed_dropout", 0.1),
        Row("attn_pdrop", "attention_dropout", 0.1),
    ),
    heads={"GPT2LMHeadModel": {"kind": "next_token"}, "GPT2Model": {"kind": "none"}},
    names={
        "token.table": "transformer.wte",
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
    },
    prefix="transformer.",
    copies={"transformer.wte.weight": ("lm_head.weight",)},
    unused=r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",  # the causal mask, saved by old versions
    inert=(
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
