"""Parameter counts computed from a spec, without building the model."""

from __future__ import annotations

from glasshouse.spec.model import EncoderSpec, Seq2SeqSpec, Spec, TransformerSpec


def count_by_arithmetic(spec: Spec) -> int:
    """Count the parameters of a model without registered parts, of any size, in no time.

    >>> from glasshouse.spec import preset
    >>> f"{count_by_arithmetic(preset('gpt2')):,}"
    '124,439,808'
    """
    total = spec.vocab_size * spec.d_model + spec.head.n_parameters(spec)
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
    norm = s.norm.n_parameters(s.d_model)
    norms = (3 if cross else 2) * (2 if s.norm_placement == "sandwich" else 1)
    attention = s.attention.n_parameters(s) + cross * s.attention.n_cross_parameters(s)
    block = attention + s.feedforward.n_parameters(s) + norms * norm
    return s.position.n_parameters(s) + n_layers * block + (s.embed_norm + s.final_norm) * norm
