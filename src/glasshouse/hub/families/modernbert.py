"""ModernBERT: a pre-norm encoder with rotary positions, gated layers, and a sliding window in two layers of three."""

from __future__ import annotations

from glasshouse.errors import StoreError
from glasshouse.hub.families.config_reader import ConfigReader
from glasshouse.hub.families.family import GATED, ConfigDict, Family, KeyMapping, fused_gate, fused_qkv
from glasshouse.hub.families.gemma2 import TYPES, repeated
from glasshouse.hub.families.gemma3 import read_rotations, write_rotations
from glasshouse.hub.families.llama import windows_of
from glasshouse.spec import MaskedToken, Rotary, SequenceClassification, Spec

THETA, LOCAL_THETA = 160_000.0, 10_000.0
EVERY = 3  # of so many layers the first attends to everything
POOLINGS: ConfigDict = {"cls": "first", "mean": "mean"}


def adjust(keys: ConfigReader, table: ConfigDict) -> None:
    """Read biases, sliding windows, both rotations, and the layers of a head before its logits."""
    table["qkv_bias"] = table["out_bias"] = keys.get_typed("attention_bias", False)
    table["ffn_bias"] = keys.get_typed("mlp_bias", False)
    every, width = keys.get_int("global_attn_every_n_layers", EVERY), keys.get_int("local_attention", 128)
    for name, value, least in (("global_attn_every_n_layers", every, 1), ("local_attention", width, 0)):
        if value < least:
            raise StoreError(f"{keys.source!r} has {name} = {value}, but it must be at least {least}.")
    n_layers = table["n_layers"]
    types = keys.get("layer_types") or [TYPES[number % every == 0] for number in range(n_layers)]
    # The width is that of both sides together, without the token itself, which our window counts.
    table["windows"] = repeated(windows_of(keys, types, width // 2 + 1, n_layers))
    keys.expect("rope_scaling", None)
    read_rotations(keys, table, {"global_rope_theta": THETA, "local_rope_theta": LOCAL_THETA})
    head, bias = table["head"], keys.get_typed("classifier_bias", False)
    pooling = keys.get_choice("classifier_pooling", "cls", POOLINGS)
    if head["kind"] == MaskedToken.kind:
        head["transform_bias"] = bias
    elif head["kind"] == SequenceClassification.kind:
        head |= {"pooling": pooling, "dense_bias": bias}
    keys.expect("classifier_activation", keys.get_typed("hidden_activation", "gelu"))


def extra(spec: Spec) -> ConfigDict:
    """Return what `adjust` reads."""
    windows = [spec.window(number) for number in range(spec.n_layers)]
    result: ConfigDict = {
        "attention_bias": spec.qkv_bias,
        "mlp_bias": spec.ffn_bias,
        "local_attention": 2 * max(max(windows) - 1, 0),
        "layer_types": [TYPES[not window] for window in windows],
    }
    every = len(spec.windows)
    if [not window for window in windows] == [number % every == 0 for number in range(spec.n_layers)]:
        result["global_attn_every_n_layers"] = every  # which older versions of transformers read
    if isinstance(spec.position, Rotary):
        result |= write_rotations(spec, spec.position, ("global_rope_theta", "local_rope_theta"))
    match spec.head:
        case MaskedToken(bias=bias, transform_bias=transform_bias):
            result |= {"decoder_bias": bias, "classifier_bias": transform_bias}
        case SequenceClassification(pooling=pooling, dense_bias=bias):
            name = next((name for name, ours in POOLINGS.items() if ours == pooling), "cls")
            result |= {"classifier_bias": bias, "classifier_pooling": name}
    return result


LAYER, BLOCK = "model.layers.*", "stack.blocks.*"

MODERNBERT = Family(
    model_type="modernbert",
    base={
        "kind": "encoder",
        "position": {"kind": "rotary"},
        "norm": {"kind": "layer"},
        "embed_norm": True,
        "first_norm": False,
        "init": "normal",
    },
    key_mappings=(
        KeyMapping("vocab_size", "vocab_size", 50_368),
        KeyMapping("hidden_size", "d_model", 768),
        KeyMapping("intermediate_size", "d_ff", 1152),
        KeyMapping("num_hidden_layers", "n_layers", 22),
        KeyMapping("num_attention_heads", "n_heads", 12),
        KeyMapping("hidden_activation", "feedforward", "gelu", GATED),
        KeyMapping("classifier_activation", "feedforward", "gelu", GATED),  # which must be the same
        KeyMapping("max_position_embeddings", "max_len", 8192),
        KeyMapping("norm_eps", "norm.eps", 1e-5),
        KeyMapping("norm_bias", "norm.bias", False),
        KeyMapping("mlp_dropout", "dropout", 0.0),
        KeyMapping("attention_dropout", "attention_dropout", 0.0),
        KeyMapping("embedding_dropout", "embed_dropout", 0.0),
    ),
    heads={
        "ModernBertForMaskedLM": {"kind": "masked_token", "transform": True},
        "ModernBertModel": {"kind": "none"},
        "ModernBertForSequenceClassification": {
            "kind": "sequence_classification",
            "dense": True,
            "dense_kind": "transform",
        },
    },
    names={
        "token_embedding.table": "model.embeddings.tok_embeddings",
        "stack.embed_norm": "model.embeddings.norm",
        f"{BLOCK}.attention.norm": f"{LAYER}.attn_norm",
        **fused_qkv(f"{LAYER}.attn.Wqkv", "in turn"),
        f"{BLOCK}.attention.layer.out": f"{LAYER}.attn.Wo",
        f"{BLOCK}.feedforward.norm": f"{LAYER}.mlp_norm",
        **fused_gate(f"{LAYER}.mlp.Wi"),
        f"{BLOCK}.feedforward.layer.down": f"{LAYER}.mlp.Wo",
        "stack.norm": "model.final_norm",
        "head.transform.0": "head.dense",
        "head.transform.2": "head.norm",
        "head.pool.dense.0": "head.dense",
        "head.pool.dense.2": "head.norm",
        "head.weight": "decoder.weight",
        "head.bias": "decoder.bias",
        "head.classifier": "classifier",
    },
    prefix="model.",
    tied_tensors={"model.embeddings.tok_embeddings.weight": ("decoder.weight",)},
    ignored_keys=(
        "classifier_dropout",
        "cls_token_id",
        "decoder_bias",  # the tensors say it
        "deterministic_flash_attn",
        "initializer_cutoff_factor",
        "initializer_range",
        "layer_norm_eps",  # in the first checkpoints only, like the next three; `norm_eps` is what counts
        "position_embedding_type",
        "reference_compile",
        "repad_logits_with_grad",
        "sparse_pred_ignore_index",
        "sparse_prediction",
    ),
    adjust=adjust,
    extra=extra,
)
