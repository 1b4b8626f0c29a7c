"""Parameter counts computed from a spec, without building the model."""

from __future__ import annotations

from typing import assert_never

from glasshouse.spec.components import (
    GeGLU,
    LayerNorm,
    Learned,
    MaskedToken,
    NextToken,
    NoHead,
    Pooled,
    Relative,
    SequenceClassification,
    SwiGLU,
    TokenClassification,
)
from glasshouse.spec.model import EncoderSpec, Seq2SeqSpec, Spec, TransformerSpec


def count_parameters(spec: Spec) -> int:
    """Count the parameters of a model.

    >>> from glasshouse.spec import preset
    >>> f"{count_parameters(preset('gpt2')):,}"
    '124,439,808'
    """
    total = spec.vocab_size * spec.d_model + _head(spec)
    match spec:
        case Seq2SeqSpec():
            total += _stack(spec, spec.n_encoder_layers, attentions=1)
            total += _stack(spec, spec.n_layers, attentions=2)
        case EncoderSpec():
            total += spec.n_segments * spec.d_model + _stack(spec, spec.n_layers, attentions=1)
        case _:
            total += _stack(spec, spec.n_layers, attentions=1)
    return total


def _stack(spec: TransformerSpec, n_layers: int, attentions: int) -> int:
    position = 0
    if isinstance(spec.position, Learned):
        position = (spec.max_len + spec.position.offset) * spec.d_model
    if isinstance(spec.position, Relative):
        position = spec.position.n_buckets * spec.n_heads
    sublayers = attentions + 1
    norms = sublayers * (2 if spec.norm_placement == "sandwich" else 1)
    block = attentions * _attention(spec) + _feedforward(spec) + norms * _norm(spec, spec.d_model)
    outside = (spec.embed_norm + spec.final_norm) * _norm(spec, spec.d_model)
    return position + n_layers * block + outside


def _attention(spec: TransformerSpec) -> int:
    d_query, d_key = spec.n_heads * spec.d_head, spec.n_kv_heads * spec.d_head
    matrices = spec.d_model * (d_query + 2 * d_key) + d_query * spec.d_model
    biases = spec.qkv_bias * (d_query + 2 * d_key) + spec.out_bias * spec.d_model
    return matrices + biases + spec.qk_norm * 2 * _norm(spec, spec.d_head)


def _feedforward(spec: TransformerSpec) -> int:
    d_up = spec.d_ff * (2 if isinstance(spec.feedforward, SwiGLU | GeGLU) else 1)
    return spec.d_model * d_up + spec.d_ff * spec.d_model + spec.ffn_bias * (d_up + spec.d_model)


def _norm(spec: TransformerSpec, width: int) -> int:
    return width * (2 if isinstance(spec.norm, LayerNorm) and spec.norm.bias else 1)


def _head(spec: Spec) -> int:
    vocab_size, d_model = spec.vocab_size, spec.d_model
    dense = d_model * d_model + d_model
    match spec.head:
        case NextToken(tied, bias):
            return (not tied) * vocab_size * d_model + bias * vocab_size
        case MaskedToken(tied, bias, transform):
            return (not tied) * vocab_size * d_model + bias * vocab_size + transform * (dense + _norm(spec, d_model))
        case SequenceClassification(n_labels, _, with_dense):
            return with_dense * dense + d_model * n_labels + n_labels
        case TokenClassification(n_labels):
            return d_model * n_labels + n_labels
        case Pooled(_, with_dense):
            return with_dense * dense
        case NoHead():
            return 0
        case _:
            assert_never(spec.head)
