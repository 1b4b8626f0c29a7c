"""Heads: language-model heads, poolers and classifiers, all with the same three inputs."""

from __future__ import annotations

from typing import NamedTuple, assert_never

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F

from glasshouse import spec
from glasshouse.errors import InputError
from glasshouse.layers.attend.layout import Layout
from glasshouse.layers.feedforward import make_activation
from glasshouse.layers.linear.linear import Linear
from glasshouse.layers.norm import make_norm
from glasshouse.layers.softcap import softcap


class NoHead(nn.Module):
    """The hidden states unchanged."""

    def forward(self, x: Tensor, layout: Layout, table: Tensor) -> Tensor:
        """Map hidden states x [B, S, D]; `table` is the token embedding matrix [V, D]."""
        return x


class Unprojected(NamedTuple):
    """What makes logits: x @ weight.T + bias, with a soft-cap if there is one."""

    x: Tensor  # [..., D]
    weight: Tensor  # [V, D]
    bias: Tensor | None  # [V]
    softcap: float | None

    def logits(self) -> Tensor:
        """Return the logits [..., V]."""
        return softcap(F.linear(self.x, self.weight, self.bias), self.softcap)


class ShardedLogits(NamedTuple):
    """The logits of a part of the vocabulary, the rest of which other processes have (tensor parallelism)."""

    logits: Tensor  # [..., classes of this process]
    first: int  # the class of the first of them
    n_classes: int
    group: dist.ProcessGroup


class DraftHead(nn.Module):
    """Predicts the hidden state of a later token from that of an earlier one (a Medusa head).

    A head with a transformer block of its own would need a KV cache of its own.
    """

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.project = Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        """Map hidden states x [..., D] to [..., D]."""
        return x + F.silu(self.project(x))


class LMHead(nn.Module):
    """Language-model head: logits over the vocabulary, tied to the token embedding.

    Its draft heads, if any, are run by the caller: `forward` does not run them.
    """

    def __init__(self, s: spec.TransformerSpec, transform: nn.Module, bias: bool, n_draft_heads: int = 0) -> None:
        super().__init__()
        self.transform = transform
        self.scale = s.d_model**-0.5 if s.logit_scale else 1.0
        self.softcap = s.logit_softcap
        self.bias = nn.Parameter(torch.empty(s.vocab_size)) if bias else None
        self.drafts = nn.ModuleList(DraftHead(s.d_model) for _ in range(n_draft_heads)) if n_draft_heads else None

    def forward(self, x: Tensor, layout: Layout, table: Tensor) -> Tensor:
        """Map hidden states x [B, S, D] to logits [B, S, V]."""
        return self.unprojected(x, table).logits()

    def unprojected(self, x: Tensor, table: Tensor) -> Unprojected:
        """Return what makes the logits."""
        x = self.transform(x)
        x = x if self.scale == 1.0 else x * self.scale
        return Unprojected(x, self.unembedding(table), self.bias, self.softcap)

    def unembedding(self, table: Tensor) -> Tensor:
        """Return the unembedding matrix [V, D]: the token embedding itself."""
        return table


class UntiedLMHead(LMHead):
    """Language-model head with its own unembedding matrix."""

    def __init__(self, s: spec.TransformerSpec, transform: nn.Module, bias: bool, n_draft_heads: int = 0) -> None:
        super().__init__(s, transform, bias, n_draft_heads)
        self.weight = nn.Parameter(torch.empty(s.vocab_size, s.d_model))

    def unembedding(self, table: Tensor) -> Tensor:
        """Return the unembedding matrix [V, D]."""
        return self.weight


class DeferredHead(nn.Module):
    """A language-model head up to its last matmul, for a loss that never holds all logits in memory."""

    def __init__(self, head: LMHead) -> None:
        super().__init__()
        self.head = head

    def forward(self, x: Tensor, layout: Layout, table: Tensor) -> Unprojected:
        """Map hidden states x [B, S, D] to what makes the logits."""
        return self.head.unprojected(x, table)


class Pooler(nn.Module):
    """One vector per sequence: of its first token, its last token, or the mean over all, without padding."""

    def __init__(self, pooling: spec.Pooling, dense: nn.Module) -> None:
        super().__init__()
        self.pick = {"first": first_token, "mean": mean_of_tokens, "last": last_token}[pooling]
        self.dense = dense

    def forward(self, x: Tensor, layout: Layout, table: Tensor) -> Tensor:
        """Map hidden states x [B, S, D] to [B, D]."""
        if layout.documents is not None:
            raise InputError(
                "documents were given, but this head pools each sequence; give one document per sequence."
            )
        no_padding = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        return self.dense(self.pick(x, no_padding if layout.real is None else layout.real))


def first_token(x: Tensor, real: Tensor) -> Tensor:
    """Return the vector of the first token of each sequence that is not padding."""
    return x[torch.arange(len(x), device=x.device), real.int().argmax(1)]


def last_token(x: Tensor, real: Tensor) -> Tensor:
    """Return the vector of the last token of each sequence that is not padding."""
    return x[torch.arange(len(x), device=x.device), real.shape[1] - 1 - real.int().flip(1).argmax(1)]


def mean_of_tokens(x: Tensor, real: Tensor) -> Tensor:
    """Return the mean over the tokens of each sequence without padding; 0 if all is padding."""
    weight = real.to(x.dtype)[..., None]
    return torch.where(real[..., None], x, 0).sum(1) / weight.sum(1).clamp(min=1)


class Classifier(nn.Module):
    """Classification head: logits over labels, per token or per pooled sequence."""

    def __init__(self, pool: nn.Module, d_model: int, n_labels: int, dropout: float, bias: bool = True) -> None:
        super().__init__()
        self.pool = pool
        self.drop = nn.Dropout(dropout)
        self.classifier = Linear(d_model, n_labels, bias=bias)

    def forward(self, x: Tensor, layout: Layout, table: Tensor) -> Tensor:
        """Map hidden states x [B, S, D] to logits [B, n_labels], or [B, S, n_labels] without pooling."""
        return self.classifier(self.drop(self.pool(x, layout, table)))


def make_head(s: spec.Spec) -> nn.Module:
    """Build the head of a spec."""

    def dense(kind: spec.DenseKind, bias: bool = True) -> nn.Module:
        linear = Linear(s.d_model, s.d_model, bias=bias)
        match kind:
            case "tanh":
                return nn.Sequential(linear, nn.Tanh())
            case "relu":
                return nn.Sequential(linear, nn.ReLU())
            case "transform":
                return nn.Sequential(linear, make_activation(s.feedforward), make_norm(s.norm, s.d_model))

    match s.head:
        case spec.NoHead():
            return NoHead()
        case spec.Pooled(pooling=pooling, dense=with_dense):
            return Pooler(pooling, dense("tanh") if with_dense else nn.Identity())
        case spec.NextToken(tied, bias, n_draft_heads):
            return (LMHead if tied else UntiedLMHead)(s, nn.Identity(), bias, n_draft_heads)
        case spec.MaskedToken(tied, bias, with_transform, transform_bias):
            transform = dense("transform", transform_bias) if with_transform else nn.Identity()
            return (LMHead if tied else UntiedLMHead)(s, transform, bias)
        case spec.SequenceClassification(n_labels, pooling, with_dense, _, bias, kind, dense_bias):
            pool = Pooler(pooling, dense(kind, dense_bias) if with_dense else nn.Identity())
            return Classifier(pool, s.d_model, n_labels, s.dropout, bias)
        case spec.TokenClassification(n_labels):
            return Classifier(NoHead(), s.d_model, n_labels, s.dropout)
        case _:
            assert_never(s.head)
