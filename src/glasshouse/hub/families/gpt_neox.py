"""GPT-NeoX (Pythia): attention and feed-forward side by side, partial rotation, a QKV matrix fused head by head."""

from __future__ import annotations

from glasshouse.errors import StoreError
from glasshouse.hub.families.config_reader import ConfigReader
from glasshouse.hub.families.family import LAST_TOKEN, PLAIN, ConfigDict, Family, KeyMapping, fused_qkv
from glasshouse.hub.families.llama import read_rotary, write_rotary
from glasshouse.spec import Rotary, Spec

FRACTION, THETA = 0.25, 10_000.0  # of the rotation, if a config has neither


def adjust(keys: ConfigReader, table: ConfigDict) -> None:
    """Read biases, the rotation under the names of old and new configs, and whether the residual is parallel."""
    table["qkv_bias"] = table["out_bias"] = keys.get_typed("attention_bias", True)
    table["norm_placement"] = "parallel" if keys.get_typed("use_parallel_residual", True) else "pre"
    table["embed_dropout"] = table["dropout"]
    fraction, theta = keys.get_typed("rotary_pct", FRACTION), keys.get_typed("rotary_emb_base", THETA)
    if (other := keys.get_typed("rope_theta", theta)) != theta and "rotary_emb_base" in keys.table:
        raise StoreError(f"{keys.source!r} has rope_theta = {other} and rotary_emb_base = {theta}; remove one.")
    read_rotary(keys, table, theta=theta, fraction=fraction)


def extra(spec: Spec) -> ConfigDict:
    """Return biases, the rotation under both names, and whether the residual is parallel."""
    result = {
        "attention_bias": spec.qkv_bias,
        "use_parallel_residual": spec.norm_placement == "parallel",
        **write_rotary(spec),
    }
    if isinstance(spec.position, Rotary):
        result |= {"rotary_pct": spec.position.fraction, "rotary_emb_base": spec.position.theta}
        result["rope_parameters"]["partial_rotary_factor"] = spec.position.fraction
    return result


LAYER = "gpt_neox.layers.*"

GPT_NEOX = Family(
    model_type="gpt_neox",
    base={"kind": "decoder", "position": {"kind": "rotary"}, "norm": {"kind": "layer"}, "init": "normal"},
    key_mappings=(
        KeyMapping("vocab_size", "vocab_size", 50_432),
        KeyMapping("hidden_size", "d_model", 6144),
        KeyMapping("intermediate_size", "d_ff", 24_576),
        KeyMapping("num_hidden_layers", "n_layers", 44),
        KeyMapping("num_attention_heads", "n_heads", 64),
        KeyMapping("max_position_embeddings", "max_len", 2048),
        KeyMapping("hidden_act", "feedforward", "gelu", PLAIN),
        KeyMapping("layer_norm_eps", "norm.eps", 1e-5),
        KeyMapping("hidden_dropout", "dropout", 0.0),
        KeyMapping("attention_dropout", "attention_dropout", 0.0),
    ),
    heads={
        "GPTNeoXForCausalLM": {"kind": "next_token"},
        "GPTNeoXModel": {"kind": "none"},
        "GPTNeoXForSequenceClassification": LAST_TOKEN,
    },
    names={
        "token_embedding.table": "gpt_neox.embed_in",
        "stack.blocks.*.attention.norm": f"{LAYER}.input_layernorm",
        **fused_qkv(f"{LAYER}.attention.query_key_value", "each head"),
        "stack.blocks.*.attention.layer.out": f"{LAYER}.attention.dense",
        "stack.blocks.*.feedforward.norm": f"{LAYER}.post_attention_layernorm",
        "stack.blocks.*.feedforward.layer.up": f"{LAYER}.mlp.dense_h_to_4h",
        "stack.blocks.*.feedforward.layer.down": f"{LAYER}.mlp.dense_4h_to_h",
        "stack.norm": "gpt_neox.final_layer_norm",
        "head.weight": "embed_out.weight",
        "head.classifier": "score",
    },
    prefix="gpt_neox.",
    # The head's name in files of transformers 5 and in those of all versions, which each reads.
    tied_tensors={
        "embed_out.weight": ("lm_head.weight",),
        "gpt_neox.embed_in.weight": ("embed_out.weight",),
    },
    ignored_tensors=r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",  # of older versions
    # Dropouts under the names of the first checkpoints.
    ignored_keys=("initializer_range", "classifier_dropout", "attention_probs_dropout_prob", "hidden_dropout_prob"),
    tied=False,
    adjust=adjust,
    extra=extra,
)
