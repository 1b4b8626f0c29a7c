"""BERT, RoBERTa, XLM-RoBERTa and DistilBERT: post-norm encoders with learned positions and an embedding norm."""

from __future__ import annotations

from dataclasses import replace

from glasshouse.hub.families.config_reader import ConfigReader
from glasshouse.hub.families.family import PLAIN, ConfigDict, Family, KeyMapping
from glasshouse.spec import Spec

BASE: ConfigDict = {
    "kind": "encoder",
    "position": {"kind": "learned"},
    "norm": {"kind": "layer"},
    "norm_placement": "post",
    "final_norm": False,
    "embed_norm": True,
    "init": "normal",
}
KEY_MAPPINGS = (
    KeyMapping("vocab_size", "vocab_size", 30_522),
    KeyMapping("hidden_size", "d_model", 768),
    KeyMapping("num_hidden_layers", "n_layers", 12),
    KeyMapping("num_attention_heads", "n_heads", 12),
    KeyMapping("intermediate_size", "d_ff", 3072),
    KeyMapping("hidden_act", "feedforward", "gelu", PLAIN),
    KeyMapping("max_position_embeddings", "max_len", 512),
    KeyMapping("type_vocab_size", "n_segments", 2),
    KeyMapping("layer_norm_eps", "norm.eps", 1e-12),
    KeyMapping("hidden_dropout_prob", "dropout", 0.1),
    KeyMapping("attention_probs_dropout_prob", "attention_dropout", 0.1),
)
IGNORED_KEYS = ("classifier_dropout", "initializer_range")


def adjust_bert(keys: ConfigReader, table: ConfigDict) -> None:
    """Use one dropout for embeddings and sublayers; refuse the relative positions of some variants."""
    table["embed_dropout"] = table["dropout"]
    keys.expect("position_embedding_type", "absolute")


def extra_bert(spec: Spec) -> ConfigDict:
    """Return at least one segment type, which transformers requires."""
    return {"type_vocab_size": max(1, getattr(spec, "n_segments", 0))}


def trunk(stem: str) -> dict[str, str]:
    """Return the tensor names of everything below the head."""
    layer = f"{stem}.encoder.layer.*"
    return {
        "token_embedding.table": f"{stem}.embeddings.word_embeddings",
        "segment.table": f"{stem}.embeddings.token_type_embeddings",
        "stack.position.table": f"{stem}.embeddings.position_embeddings",
        "stack.embed_norm": f"{stem}.embeddings.LayerNorm",
        "stack.blocks.*.attention.layer.query": f"{layer}.attention.self.query",
        "stack.blocks.*.attention.layer.key": f"{layer}.attention.self.key",
        "stack.blocks.*.attention.layer.value": f"{layer}.attention.self.value",
        "stack.blocks.*.attention.layer.out": f"{layer}.attention.output.dense",
        "stack.blocks.*.attention.norm": f"{layer}.attention.output.LayerNorm",
        "stack.blocks.*.feedforward.layer.up": f"{layer}.intermediate.dense",
        "stack.blocks.*.feedforward.layer.down": f"{layer}.output.dense",
        "stack.blocks.*.feedforward.norm": f"{layer}.output.LayerNorm",
    }


SEQUENCE_CLASSIFICATION: ConfigDict = {"kind": "sequence_classification", "pooling": "first", "dense": True}
MASKED_TOKEN: ConfigDict = {"kind": "masked_token", "transform": True}


def heads(name: str) -> ConfigDict:
    """Return the heads of the classes that BERT and RoBERTa have in transformers."""
    return {
        f"{name}ForMaskedLM": MASKED_TOKEN,
        f"{name}Model": {"kind": "none"},
        f"{name}ForSequenceClassification": SEQUENCE_CLASSIFICATION,
        f"{name}ForTokenClassification": {"kind": "token_classification"},
    }


def tied_tensors(stem: str, lm_head: str) -> dict[str, tuple[str, ...]]:
    """Return the tensors that a file may contain under another name as well."""
    return {
        f"{stem}.embeddings.word_embeddings.weight": (f"{lm_head}.decoder.weight",),
        f"{lm_head}.decoder.bias": (f"{lm_head}.bias",),  # unused by an untied head
    }


BERT = Family(
    model_type="bert",
    base=BASE,
    key_mappings=KEY_MAPPINGS,
    heads={**heads("Bert"), "BertForPreTraining": MASKED_TOKEN},
    names={
        **trunk("bert"),
        "head.transform.0": "cls.predictions.transform.dense",
        "head.transform.2": "cls.predictions.transform.LayerNorm",
        "head.weight": "cls.predictions.decoder.weight",
        "head.bias": "cls.predictions.decoder.bias",
        "head.pool.dense.0": "bert.pooler.dense",
        "head.classifier": "classifier",
    },
    prefix="bert.",
    tied_tensors=tied_tensors("bert", "cls.predictions"),
    ignored_tensors=r"bert\.embeddings\.position_ids|bert\.pooler\..*|cls\.seq_relationship\..*|cls\.predictions\.bias",
    ignored_keys=(
        *IGNORED_KEYS,
        "directionality",  # in the first checkpoints only, like the next five
        "pooler_fc_size",
        "pooler_num_attention_heads",
        "pooler_num_fc_layers",
        "pooler_size_per_head",
        "pooler_type",
    ),
    adjust=adjust_bert,
    extra=extra_bert,
)


# RoBERTa's positions start at 2: the first two rows of its table are for padding.
OFFSET = 2


def adjust_roberta(keys: ConfigReader, table: ConfigDict) -> None:
    """Subtract the unused positions from max_len."""
    adjust_bert(keys, table)
    keys.expect("pad_token_id", OFFSET - 1, None)
    table["max_len"] -= OFFSET


def extra_roberta(spec: Spec) -> ConfigDict:
    """Add them back; the offset follows from pad_token_id, which is therefore fixed."""
    fixed = {"max_position_embeddings": spec.max_len + OFFSET, "pad_token_id": OFFSET - 1}
    return extra_bert(spec) | fixed


ROBERTA = Family(
    model_type="roberta",
    base={**BASE, "position": {"kind": "learned", "offset": OFFSET}},
    key_mappings=(KEY_MAPPINGS[0]._replace(default=50_265), *KEY_MAPPINGS[1:]),
    heads=heads("Roberta"),
    names={
        **trunk("roberta"),
        "head.transform.0": "lm_head.dense",
        "head.transform.2": "lm_head.layer_norm",
        "head.weight": "lm_head.decoder.weight",
        "head.bias": "lm_head.decoder.bias",
        "head.pool.dense.0": "classifier.dense",
        "head.classifier": "classifier.out_proj",
    },
    prefix="roberta.",
    tied_tensors=tied_tensors("roberta", "lm_head"),
    ignored_tensors=r"roberta\.embeddings\.position_ids|roberta\.pooler\..*|lm_head\.bias",
    ignored_keys=IGNORED_KEYS,
    adjust=adjust_roberta,
    extra=extra_roberta,
)


# The same with another vocabulary, and saved as RoBERTa, which comes first.
XLM_ROBERTA = replace(ROBERTA, model_type="xlm-roberta", key_mappings=KEY_MAPPINGS, heads=heads("XLMRoberta"))


def adjust_distilbert(keys: ConfigReader, table: ConfigDict) -> None:
    """Use one dropout for embeddings and sublayers."""
    table["embed_dropout"] = table["dropout"]


DISTILBERT = Family(
    model_type="distilbert",
    base={**BASE, "norm": {"kind": "layer", "eps": 1e-12}},
    key_mappings=(
        KeyMapping("vocab_size", "vocab_size", 30_522),
        KeyMapping("dim", "d_model", 768),
        KeyMapping("n_layers", "n_layers", 6),
        KeyMapping("n_heads", "n_heads", 12),
        KeyMapping("hidden_dim", "d_ff", 3072),
        KeyMapping("activation", "feedforward", "gelu", PLAIN),
        KeyMapping("max_position_embeddings", "max_len", 512),
        KeyMapping("dropout", "dropout", 0.1),
        KeyMapping("attention_dropout", "attention_dropout", 0.1),
    ),
    heads={
        "DistilBertForMaskedLM": MASKED_TOKEN,
        "DistilBertModel": {"kind": "none"},
        "DistilBertForTokenClassification": {"kind": "token_classification"},
        "DistilBertForSequenceClassification": {**SEQUENCE_CLASSIFICATION, "dense_kind": "relu"},
    },
    names={
        "token_embedding.table": "distilbert.embeddings.word_embeddings",
        "stack.position.table": "distilbert.embeddings.position_embeddings",
        "stack.embed_norm": "distilbert.embeddings.LayerNorm",
        "stack.blocks.*.attention.layer.query": "distilbert.transformer.layer.*.attention.q_lin",
        "stack.blocks.*.attention.layer.key": "distilbert.transformer.layer.*.attention.k_lin",
        "stack.blocks.*.attention.layer.value": "distilbert.transformer.layer.*.attention.v_lin",
        "stack.blocks.*.attention.layer.out": "distilbert.transformer.layer.*.attention.out_lin",
        "stack.blocks.*.attention.norm": "distilbert.transformer.layer.*.sa_layer_norm",
        "stack.blocks.*.feedforward.layer.up": "distilbert.transformer.layer.*.ffn.lin1",
        "stack.blocks.*.feedforward.layer.down": "distilbert.transformer.layer.*.ffn.lin2",
        "stack.blocks.*.feedforward.norm": "distilbert.transformer.layer.*.output_layer_norm",
        "head.transform.0": "vocab_transform",
        "head.transform.2": "vocab_layer_norm",
        "head.weight": "vocab_projector.weight",
        "head.bias": "vocab_projector.bias",
        "head.pool.dense.0": "pre_classifier",
        "head.classifier": "classifier",
    },
    prefix="distilbert.",
    tied_tensors={"distilbert.embeddings.word_embeddings.weight": ("vocab_projector.weight",)},
    ignored_tensors=r"distilbert\.embeddings\.position_ids",
    # Sinusoidal positions are stored in the position table like learned ones.
    ignored_keys=("initializer_range", "qa_dropout", "seq_classif_dropout", "sinusoidal_pos_embds", "tie_weights_"),
    adjust=adjust_distilbert,
)
