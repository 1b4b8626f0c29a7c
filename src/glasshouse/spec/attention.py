"""Attention: each kind with its settings and its parameters; sizes such as n_heads are the spec's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from glasshouse import registry
from glasshouse.config import Settings

if TYPE_CHECKING:
    from glasshouse.spec.model import TransformerSpec


class Attention(Settings, registry.Kind):
    """What a model asks of its self-attention. Cross-attention is softmax attention with every kind."""

    build_arguments = "the spec and the index of the layer"

    def n_parameters(self, s: TransformerSpec) -> int:
        """Return the number of parameters of the self-attention of one layer."""
        raise NotImplementedError

    def n_cross_parameters(self, s: TransformerSpec) -> int:
        """Return the number of parameters of the cross-attention of one layer."""
        d_query, d_key = s.n_heads * s.d_head, s.n_kv_heads * s.d_head
        matrices = s.d_model * (d_query + 2 * d_key) + d_query * s.d_model
        biases = s.qkv_bias * (d_query + 2 * d_key) + s.out_bias * s.d_model
        return matrices + biases + s.qk_norm * 2 * s.norm.n_parameters(s.d_head)


@dataclass(frozen=True)
class SoftmaxAttention(Attention):
    """softmax(q k^T) v; multi-head, grouped-query and multi-query by `n_kv_heads`."""

    kind: ClassVar[str] = "softmax"

    def n_parameters(self, s: TransformerSpec) -> int:
        return self.n_cross_parameters(s)


registry.add(SoftmaxAttention)
