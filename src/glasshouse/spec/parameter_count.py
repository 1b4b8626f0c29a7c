"""Parameter counts computed from a spec, without building the model."""

from __future__ import annotations

from typing import assert_never

from glasshouse.spec.head import (
    Head,
    MaskedToken,
    NextToken,
    NoHead,
    Pooled,
    SequenceClassification,
    TokenClassification,
)
from glasshouse.spec.model import EncoderSpec, Seq2SeqSpec, Spec, TransformerSpec
from glasshouse.spec.norm import LayerNorm
from glasshouse.spec.position import Learned, Relative


def count_by_arithmetic(spec: Spec) -> int:
    """Count the parameters of a model without registered parts, of any size, in no time.

    >>> from glasshouse.spec import preset
    >>> f"{count_by_arithmetic(preset('gpt2')):,}"
    '124,439,808'
    """
    total = spec.vocab_size * spec.d_model + _head(spec.head, spec)
    match spec:
        case Seq2SeqSpec():
            total += _stack(spec, spec.n_encoder_layers)
            total += _stack(spec, spec.n_layers, cross=True)
        case EncoderSpec():
            total += spec.n_segments * spec.d_model + _stack(spec, spec.n_layers)
        case _:
            total += _stack(spec, spec.n_layers)
    return total


def _stack(s: TransformerSpec, n_layers: int, *, cross: bool = False) -> int:
    norms = (3 if cross else 2) * (2 if s.norm_placement == "sandwich" else 1)
    block = (2 if cross else 1) * _attention(s) + _feedforward(s) + norms * _norm(s, s.d_model)
    values = s.value_embeddings * (n_layers // 2) * _value_embedding(s)  # a loop would take minutes for absurd depths
    once = s.embed_norm + s.final_norm - (not s.first_norm)
    return _positions(s) + n_layers * block + values + once * _norm(s, s.d_model)


def _attention(s: TransformerSpec) -> int:
    d_query, d_key = s.n_heads * s.d_head, s.n_kv_heads * s.d_head
    matrices = s.d_model * (d_query + 2 * d_key) + d_query * s.d_model
    biases = s.qkv_bias * (d_query + 2 * d_key) + s.out_bias * s.d_model
    widths = (d_query, d_key) if s.qk_norm_over == "projection" else (s.d_head, s.d_head)
    return matrices + biases + s.qk_norm * sum(_norm(s, width) for width in widths)


def _value_embedding(s: TransformerSpec) -> int:
    return (s.vocab_size * s.d_head + s.d_model) * s.n_kv_heads  # the table and the gate


def _feedforward(s: TransformerSpec) -> int:
    d_up = s.d_ff * (2 if s.feedforward.gated else 1)
    return s.d_model * d_up + s.d_ff * s.d_model + s.ffn_bias * (d_up + s.d_model)


def _norm(s: TransformerSpec, width: int) -> int:
    return width * (2 if isinstance(s.norm, LayerNorm) and s.norm.bias else 1)


def _positions(s: TransformerSpec) -> int:
    match s.position:
        case Learned():
            return (s.max_len + s.position.offset) * s.d_model
        case Relative():
            return s.position.n_buckets * s.n_heads
        case _:
            return 0


def _head(head: Head, s: TransformerSpec) -> int:
    dense = (s.d_model + 1) * s.d_model  # a linear layer from d_model to d_model
    match head:
        case NoHead():
            return 0
        case Pooled():
            return head.dense * dense
        case NextToken():
            return _unembedding(head, s) + head.n_draft_heads * dense
        case MaskedToken():
            transform = dense - (not head.transform_bias) * s.d_model + _norm(s, s.d_model)
            return _unembedding(head, s) + head.transform * transform
        case SequenceClassification():
            given = dense - (not head.dense_bias) * s.d_model
            given += (head.dense_kind == "transform") * _norm(s, s.d_model)
            return head.dense * given + (s.d_model + head.bias) * head.n_labels
        case TokenClassification():
            return (s.d_model + 1) * head.n_labels
        case _:
            assert_never(head)


def _unembedding(head: NextToken | MaskedToken, s: TransformerSpec) -> int:
    return (not head.tied) * s.vocab_size * s.d_model + head.bias * s.vocab_size
