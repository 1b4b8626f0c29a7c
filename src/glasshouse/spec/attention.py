"""Attention: each kind with its settings and its parameters; sizes such as n_heads are the spec's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from glasshouse.config import Settings

if TYPE_CHECKING:
    from glasshouse.spec.model import TransformerSpec


@dataclass(frozen=True)
class SoftmaxAttention(Settings):
    """softmax(q k^T) v; multi-head, grouped-query and multi-query by `n_kv_heads`."""

    kind: ClassVar[str] = "softmax"

    def n_parameters(self, s: TransformerSpec) -> int:
        """Return the number of parameters of one layer, of self-attention or of cross-attention."""
        d_query, d_key = s.n_heads * s.d_head, s.n_kv_heads * s.d_head
        matrices = s.d_model * (d_query + 2 * d_key) + d_query * s.d_model
        biases = s.qkv_bias * (d_query + 2 * d_key) + s.out_bias * s.d_model
        return matrices + biases + s.qk_norm * 2 * s.norm.n_parameters(s.d_head)


Attention = SoftmaxAttention  # the union of all kinds
