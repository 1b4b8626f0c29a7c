"""Heads: from a stack's vectors to what is asked of the model. All take the same three things."""

from __future__ import annotations

from typing import assert_never

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from glasshouse import spec
from glasshouse.layers.feedforward import make_activation
from glasshouse.layers.norm import make_norm


class NoHead(nn.Module):
    """The vectors as they are."""

    def forward(self, x: Tensor, real: Tensor | None, table: Tensor) -> Tensor:
        """Map vectors x [B, S, D], of which `real` [B, S] are no padding, with the token table [V, D]."""
        return x


class Vocabulary(nn.Module):
    """Logits over the vocabulary: how well each token's vector fits."""

    def __init__(self, transform: nn.Module, scale: float, bias: int) -> None:
        super().__init__()
        self.transform = transform
        self.scale = scale
        self.bias = nn.Parameter(torch.empty(bias)) if bias else None

    def forward(self, x: Tensor, real: Tensor | None, table: Tensor) -> Tensor:
        """Map vectors x [B, S, D] to logits [B, S, V]."""
        x = self.transform(x)
        x = x if self.scale == 1.0 else x * self.scale
        return F.linear(x, self.matrix(table), self.bias)

    def matrix(self, table: Tensor) -> Tensor:
        """Return the unembedding [V, D]: tied, the token table itself."""
        return table


class OwnVocabulary(Vocabulary):
    """Logits through a matrix that is not the token table."""

    def __init__(self, transform: nn.Module, scale: float, bias: int, vocab_size: int, d_model: int) -> None:
        super().__init__(transform, scale, bias)
        self.weight = nn.Parameter(torch.empty(vocab_size, d_model))

    def matrix(self, table: Tensor) -> Tensor:
        """Return the unembedding [V, D]."""
        return self.weight


class Pool(nn.Module):
    """One vector a sequence: its first real token's, its last's, or the mean of all."""

    def __init__(self, pooling: spec.Pooling, dense: nn.Module) -> None:
        super().__init__()
        self.pick = {"first": first_token, "mean": mean_of_tokens, "last": last_token}[pooling]
        self.dense = dense

    def forward(self, x: Tensor, real: Tensor | None, table: Tensor) -> Tensor:
        """Map vectors x [B, S, D] to [B, D]."""
        everywhere = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        return self.dense(self.pick(x, everywhere if real is None else real))


def first_token(x: Tensor, real: Tensor) -> Tensor:
    """Return the vector of the first real token of each row."""
    return x[torch.arange(len(x), device=x.device), real.int().argmax(1)]


def last_token(x: Tensor, real: Tensor) -> Tensor:
    """Return the vector of the last real token of each row."""
    return x[torch.arange(len(x), device=x.device), real.shape[1] - 1 - real.int().flip(1).argmax(1)]


def mean_of_tokens(x: Tensor, real: Tensor) -> Tensor:
    """Return the mean over the real tokens of each row; 0 where there is none."""
    weight = real.to(x.dtype)[..., None]
    return torch.where(real[..., None], x, 0).sum(1) / weight.sum(1).clamp(min=1)


class Labels(nn.Module):
    """Logits over labels, for each token or for what a pool made of them."""

    def __init__(self, pool: nn.Module, d_model: int, n_labels: int, dropout: float) -> None:
        super().__init__()
        self.pool = pool
        self.drop = nn.Dropout(dropout)
        self.classify = nn.Linear(d_model, n_labels)

    def forward(self, x: Tensor, real: Tensor | None, table: Tensor) -> Tensor:
        """Map vectors x [B, S, D] to logits [B, n_labels], or [B, S, n_labels] without a pool."""
        return self.classify(self.drop(self.pool(x, real, table)))


def make_head(s: spec.Spec) -> nn.Module:
    """Build the head a spec asks for."""
    scale = s.d_model**-0.5 if s.logit_scale else 1.0

    def dense(wanted: bool) -> nn.Module:
        return nn.Sequential(nn.Linear(s.d_model, s.d_model), nn.Tanh()) if wanted else nn.Identity()

    def vocabulary(tied: bool, bias: bool, transform: nn.Module) -> Vocabulary:
        n_bias = s.vocab_size if bias else 0
        if tied:
            return Vocabulary(transform, scale, n_bias)
        return OwnVocabulary(transform, scale, n_bias, s.vocab_size, s.d_model)

    match s.head:
        case spec.NoHead():
            return NoHead()
        case spec.Pooled(pooling, with_dense):
            return Pool(pooling, dense(with_dense))
        case spec.NextToken(tied, bias):
            return vocabulary(tied, bias, nn.Identity())
        case spec.MaskedToken(tied, bias, True):
            activation, norm = make_activation(s.feedforward), make_norm(s.norm, s.d_model)
            return vocabulary(tied, bias, nn.Sequential(nn.Linear(s.d_model, s.d_model), activation, norm))
        case spec.MaskedToken(tied, bias):
            return vocabulary(tied, bias, nn.Identity())
        case spec.SequenceLabel(n_labels, pooling, with_dense):
            return Labels(Pool(pooling, dense(with_dense)), s.d_model, n_labels, s.dropout)
        case spec.TokenLabel(n_labels):
            return Labels(NoHead(), s.d_model, n_labels, s.dropout)
        case _:
            assert_never(s.head)
