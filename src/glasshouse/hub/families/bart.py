"""BART and Marian: post-norm encoder-decoders with a bias on the logits.

BART has learned positions with an offset of 2 and an embedding norm; Marian has sinusoidal positions in halves.
"""

from __future__ import annotations

import functools

from glasshouse.errors import StoreError
from glasshouse.hub.families.config_reader import ConfigReader
from glasshouse.hub.families.family import PLAIN, ConfigDict, Family, KeyMapping, as_row
from glasshouse.spec import Spec

BASE: ConfigDict = {
    "kind": "seq2seq",
    "norm": {"kind": "layer", "eps": 1e-5},
    "norm_placement": "post",
    "final_norm": False,
    "init": "normal",
}
KEY_MAPPINGS = (
    KeyMapping("vocab_size", "vocab_size", 50_265),
    KeyMapping("d_model", "d_model", 1024),
    KeyMapping("encoder_layers", "n_encoder_layers", 12),
    KeyMapping("decoder_layers", "n_layers", 12),
    KeyMapping("encoder_attention_heads", "n_heads", 16),
    KeyMapping("encoder_ffn_dim", "d_ff", 4096),
    KeyMapping("max_position_embeddings", "max_len", 1024),
    KeyMapping("activation_function", "feedforward", "gelu", PLAIN),
    KeyMapping("scale_embedding", "embed_scale", False),
    KeyMapping("dropout", "dropout", 0.1),
    KeyMapping("attention_dropout", "attention_dropout", 0.0),
)


def adjust(keys: ConfigReader, table: ConfigDict, marian: bool) -> None:
    """Raise StoreError for stacks of different width, and for options of related models in older configs."""
    table["embed_dropout"] = table["dropout"]
    for name, default, encoder in (("attention_heads", 16, table["n_heads"]), ("ffn_dim", 4096, table["d_ff"])):
        if (decoder := keys.get_int(f"decoder_{name}", default)) != encoder:
            raise StoreError(
                f"{keys.source!r} has decoder_{name} = {decoder}, but the encoder has {encoder}; both must be equal."
            )
    keys.expect("normalize_before", False)
    keys.expect("add_final_layer_norm", False)
    keys.expect("add_bias_logits", False)
    keys.expect("static_position_embeddings", marian)
    keys.expect("normalize_embedding", not marian)
    if marian:
        keys.expect("share_encoder_decoder_embeddings", True)
        keys.expect("decoder_vocab_size", table["vocab_size"], None)


def extra(spec: Spec) -> ConfigDict:
    """Return the widths of the decoder, which are the encoder's."""
    return {"decoder_attention_heads": spec.n_heads, "decoder_ffn_dim": spec.d_ff}


def stack(ours: str) -> ConfigDict:
    """Return the tensor names of one stack."""
    layer = f"model.{ours}.layers.*"
    return {
        f"{ours}.position.table": f"model.{ours}.embed_positions",
        f"{ours}.embed_norm": f"model.{ours}.layernorm_embedding",
        f"{ours}.blocks.*.attention.layer.query": f"{layer}.self_attn.q_proj",
        f"{ours}.blocks.*.attention.layer.key": f"{layer}.self_attn.k_proj",
        f"{ours}.blocks.*.attention.layer.value": f"{layer}.self_attn.v_proj",
        f"{ours}.blocks.*.attention.layer.out": f"{layer}.self_attn.out_proj",
        f"{ours}.blocks.*.attention.norm": f"{layer}.self_attn_layer_norm",
        f"{ours}.blocks.*.feedforward.layer.up": f"{layer}.fc1",
        f"{ours}.blocks.*.feedforward.layer.down": f"{layer}.fc2",
        f"{ours}.blocks.*.feedforward.norm": f"{layer}.final_layer_norm",
    }


NAMES: ConfigDict = {
    "token_embedding.table": "model.shared",
    **stack("encoder"),
    **stack("decoder"),
    "decoder.blocks.*.cross.layer.query": "model.decoder.layers.*.encoder_attn.q_proj",
    "decoder.blocks.*.cross.layer.key": "model.decoder.layers.*.encoder_attn.k_proj",
    "decoder.blocks.*.cross.layer.value": "model.decoder.layers.*.encoder_attn.v_proj",
    "decoder.blocks.*.cross.layer.out": "model.decoder.layers.*.encoder_attn.out_proj",
    "decoder.blocks.*.cross.norm": "model.decoder.layers.*.encoder_attn_layer_norm",
    "head.weight": "lm_head.weight",
    "head.bias": as_row("final_logits_bias"),
}

like_bart = functools.partial(
    Family,
    names=NAMES,
    prefix="model.",
    tied_tensors={
        "model.shared.weight": (
            "model.encoder.embed_tokens.weight",
            "model.decoder.embed_tokens.weight",
            "lm_head.weight",
        )
    },
    ignored_keys=(
        "activation_dropout",
        "classif_dropout",
        "classifier_dropout",
        "decoder_layerdrop",
        "encoder_layerdrop",
        "extra_pos_embeddings",
        "init_std",
        "num_hidden_layers",
    ),
    extra=extra,
)
BART = like_bart(
    model_type="bart",
    base={**BASE, "position": {"kind": "learned", "offset": 2}, "embed_norm": True},
    key_mappings=KEY_MAPPINGS,
    heads={"BartForConditionalGeneration": {"kind": "next_token"}, "BartModel": {"kind": "none"}},
    ignored_tensors=r"model\.(en|de)coder\.version",
    adjust=functools.partial(adjust, marian=False),
)
MARIAN = like_bart(
    model_type="marian",
    base={**BASE, "position": {"kind": "sinusoidal", "layout": "halves"}},
    key_mappings=(KEY_MAPPINGS[0]._replace(default=58_101), *KEY_MAPPINGS[1:]),
    heads={"MarianMTModel": {"kind": "next_token"}, "MarianModel": {"kind": "none"}},
    ignored_tensors=r"model\.(en|de)coder\.embed_positions\.weight",  # sinusoids, saved by older versions
    adjust=functools.partial(adjust, marian=True),
)
