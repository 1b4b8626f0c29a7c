"""Attention: each kind with its settings; sizes such as n_heads are the spec's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from glasshouse import registry
from glasshouse.config import Settings


class Attention(Settings, registry.Kind):
    """What a model asks of its self-attention. Cross-attention is softmax attention with every kind."""

    build_arguments = "the spec and the index of the layer"


@dataclass(frozen=True)
class SoftmaxAttention(Attention):
    """softmax(q k^T) v; multi-head, grouped-query and multi-query by `n_kv_heads`."""

    kind: ClassVar[str] = "softmax"


registry.add(SoftmaxAttention)
