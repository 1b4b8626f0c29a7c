"""T5 1.0 and 1.1 (Flan): no biases, unscaled scores, a relative position bias shared by the layers of a stack."""

from __future__ import annotations

from glasshouse.hub.families.config_reader import ConfigReader
from glasshouse.hub.families.family import ConfigDict, Family, KeyMapping
from glasshouse.spec import Spec

FEEDFORWARD: ConfigDict = {
    "relu": {"kind": "relu"},
    "gated-gelu": {"kind": "geglu", "tanh": True},  # the tanh form, despite its name
    "gated-silu": {"kind": "swiglu"},
    "gelu": {"kind": "gelu", "tanh": False},
    "gelu_new": {"kind": "gelu", "tanh": True},
    "silu": {"kind": "silu"},
}


def adjust(keys: ConfigReader, table: ConfigDict) -> None:
    """Read whether the logits are scaled, as in 1.0; older configs imply it by tie_word_embeddings."""
    table["logit_scale"] = keys.get_typed("scale_decoder_outputs", keys.get_typed("tie_word_embeddings", True))
    # Derived from feed_forward_proj and saved with it; transformers gives them precedence.
    gate, _, word = keys.get_typed("feed_forward_proj", "relu").rpartition("-")
    keys.expect("is_gated_act", gate == "gated")
    keys.expect("dense_act_fn", "gelu_new" if gate and word == "gelu" else word)
    table["embed_dropout"] = table["attention_dropout"] = table["dropout"]
    table["n_layers"] = table["n_layers"] or table["n_encoder_layers"]


def extra(spec: Spec) -> ConfigDict:
    """Return the logit scale under both keys, for older versions of transformers."""
    return {"scale_decoder_outputs": spec.logit_scale, "tie_word_embeddings": spec.logit_scale}


def stack(ours: str, feedforward: int) -> ConfigDict:
    """Return the tensor names of one stack, with the index of its feed-forward sublayer."""
    block, last = f"{ours}.block.*.layer.0", f"{ours}.block.*.layer.{feedforward}"
    return {
        f"{ours}.position.table": f"{ours}.block.0.layer.0.SelfAttention.relative_attention_bias",
        f"{ours}.blocks.*.attention.norm": f"{block}.layer_norm",
        f"{ours}.blocks.*.attention.layer.query": f"{block}.SelfAttention.q",
        f"{ours}.blocks.*.attention.layer.key": f"{block}.SelfAttention.k",
        f"{ours}.blocks.*.attention.layer.value": f"{block}.SelfAttention.v",
        f"{ours}.blocks.*.attention.layer.out": f"{block}.SelfAttention.o",
        f"{ours}.blocks.*.feedforward.norm": f"{last}.layer_norm",
        f"{ours}.blocks.*.feedforward.layer.gate": f"{last}.DenseReluDense.wi_0",
        f"{ours}.blocks.*.feedforward.layer.up": f"{last}.DenseReluDense.wi",
        f"{ours}.blocks.*.feedforward.layer.down": f"{last}.DenseReluDense.wo",
        f"{ours}.norm": f"{ours}.final_layer_norm",
    }


def rename(name: str, spec: Spec) -> str:
    """Rename the up projection, which is the second of two in a gated feed-forward layer."""
    return name.replace(".wi.", ".wi_1.") if spec.feedforward.gated else name


T5 = Family(
    model_type="t5",
    base={
        "kind": "seq2seq",
        "position": {"kind": "relative"},
        "norm": {"kind": "rms"},
        "qkv_bias": False,
        "out_bias": False,
        "ffn_bias": False,
        "attention_scale": 1.0,
        "init": "normal",
    },
    key_mappings=(
        KeyMapping("vocab_size", "vocab_size", 32_128),
        KeyMapping("d_model", "d_model", 512),
        KeyMapping("d_kv", "d_head", 64),
        KeyMapping("d_ff", "d_ff", 2048),
        KeyMapping("num_layers", "n_encoder_layers", 6),
        KeyMapping("num_decoder_layers", "n_layers", 0),
        KeyMapping("num_heads", "n_heads", 8),
        KeyMapping("n_positions", "max_len", 512),
        KeyMapping("relative_attention_num_buckets", "position.n_buckets", 32),
        KeyMapping("relative_attention_max_distance", "position.max_distance", 128),
        KeyMapping("feed_forward_proj", "feedforward", "relu", FEEDFORWARD),
        KeyMapping("layer_norm_epsilon", "norm.eps", 1e-6),
        KeyMapping("dropout_rate", "dropout", 0.1),
    ),
    heads={"T5ForConditionalGeneration": {"kind": "next_token"}, "T5Model": {"kind": "none"}},
    names={
        "token_embedding.table": "shared",
        **stack("encoder", feedforward=1),
        **stack("decoder", feedforward=2),
        "decoder.blocks.*.cross.norm": "decoder.block.*.layer.1.layer_norm",
        "decoder.blocks.*.cross.layer.query": "decoder.block.*.layer.1.EncDecAttention.q",
        "decoder.blocks.*.cross.layer.key": "decoder.block.*.layer.1.EncDecAttention.k",
        "decoder.blocks.*.cross.layer.value": "decoder.block.*.layer.1.EncDecAttention.v",
        "decoder.blocks.*.cross.layer.out": "decoder.block.*.layer.1.EncDecAttention.o",
        "head.weight": "lm_head.weight",
    },
    tied_tensors={"shared.weight": ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")},
    ignored_tensors=r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
    ignored_keys=("classifier_dropout", "initializer_factor"),
    tied=None,
    adjust=adjust,
    extra=extra,
    rename=rename,
)
