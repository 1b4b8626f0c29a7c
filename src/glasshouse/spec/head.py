"""Heads: what a model computes from its hidden states, each kind with its settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from glasshouse.config import Settings, require, require_positive

Pooling = Literal["first", "mean", "last"]


@dataclass(frozen=True)
class NoHead(Settings):
    """The hidden states, [batch, length, d_model]."""

    kind: ClassVar[str] = "none"


@dataclass(frozen=True)
class Pooled(Settings):
    """One vector per sequence, [batch, d_model]; `dense` adds BERT's linear layer and tanh."""

    kind: ClassVar[str] = "pooled"
    pooling: Pooling = "mean"  # the token whose hidden state is taken, or their mean
    dense: bool = False  # a linear layer and tanh after pooling, as in BERT
    normalize: bool = False  # gh.embed scales its vectors to unit length


@dataclass(frozen=True)
class NextToken(Settings):
    """Causal language-model head: logits over the vocabulary, with tied embeddings or its own matrix.

    Draft heads predict the tokens after the next one, for speculative decoding; they do not change the logits.
    """

    kind: ClassVar[str] = "next_token"
    tied: bool = True  # the unembedding is the token embedding
    bias: bool = False  # a bias on the logits
    # linear layers that predict the second next token, the third and so on (multi-token prediction); 0: none
    n_draft_heads: int = field(default=0, metadata={"omit_default": True})

    def check(self) -> None:
        require(self.n_draft_heads >= 0, "next_token.n_draft_heads", self.n_draft_heads, "0 or more")


@dataclass(frozen=True)
class MaskedToken(Settings):
    """Masked language-model head; `transform` adds BERT's linear layer, activation and norm before the logits."""

    kind: ClassVar[str] = "masked_token"
    tied: bool = True  # the unembedding is the token embedding
    bias: bool = True  # a bias on the logits
    transform: bool = True  # a linear layer, activation and norm before the logits, as in BERT
    transform_bias: bool = field(default=True, metadata={"omit_default": True})  # a bias on that linear layer

    def check(self) -> None:
        require(self.transform or self.transform_bias, "masked_token.transform_bias", False, "true without transform")


DenseKind = Literal["tanh", "relu", "transform"]


@dataclass(frozen=True)
class SequenceClassification(Settings):
    """Logits over labels per sequence; `dense` adds BERT's linear layer and tanh before them, or another's."""

    kind: ClassVar[str] = "sequence_classification"
    n_labels: int  # number of classes; in a run it comes from the data
    pooling: Pooling = "first"  # the token whose hidden state is taken, or their mean
    dense: bool = True  # a linear layer and tanh before the logits, as in BERT
    labels: tuple[str, ...] = ()  # names of the classes, if any; in a run they come from the data
    bias: bool = field(default=True, metadata={"omit_default": True})  # a bias on the logits
    # what follows the linear layer of `dense`: a tanh as in BERT, a ReLU as in DistilBERT, or, as in ModernBERT and
    # before the logits of masked tokens, the model's activation and norm
    dense_kind: DenseKind = field(default="tanh", metadata={"omit_default": True})
    dense_bias: bool = field(default=True, metadata={"omit_default": True})  # a bias on the linear layer of `dense`

    def check(self) -> None:
        require_labels(self)
        for name, value, default in (("kind", self.dense_kind, "tanh"), ("bias", self.dense_bias, True)):
            rule = f"{default!r} unless dense is true"
            require(self.dense or value == default, f"sequence_classification.dense_{name}", value, rule)


@dataclass(frozen=True)
class TokenClassification(Settings):
    """Logits over labels per token."""

    kind: ClassVar[str] = "token_classification"
    n_labels: int  # number of classes; in a run it comes from the data
    labels: tuple[str, ...] = ()  # names of the classes, if any; in a run they come from the data

    def check(self) -> None:
        require_labels(self)


def require_labels(head: SequenceClassification | TokenClassification) -> None:
    """Raise ConfigError for fewer than one label, or for another number of names."""
    require_positive(head, "n_labels")
    rule = f"{head.n_labels} different names, or none"
    fits = len(head.labels) in (0, head.n_labels) and len(set(head.labels)) == len(head.labels)
    require(fits, f"{head.kind}.labels", head.labels, rule)


Head = NoHead | Pooled | NextToken | MaskedToken | SequenceClassification | TokenClassification
