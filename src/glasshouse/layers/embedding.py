"""Token and segment embeddings."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from glasshouse import spec
from glasshouse.errors import InputError
from glasshouse.layers.host_reads import can_read
from glasshouse.layers.linear.linear import is_left_to_spec


class Embedding(nn.Embedding):
    """nn.Embedding that is initialized by the spec's init when `gh.build` makes it, and by torch otherwise.

    >>> with torch.device("meta"):
    ...     Embedding(3, 2).weight.device
    device(type='meta')
    """

    def reset_parameters(self) -> None:
        if not is_left_to_spec(self.weight):
            super().reset_parameters()


class TokenEmbedding(nn.Module):
    """Token embedding, scaled by sqrt(d_model) if the spec says so."""

    def __init__(self, s: spec.TransformerSpec) -> None:
        super().__init__()
        self.table = Embedding(s.vocab_size, s.d_model)
        self.scale = s.d_model**0.5 if s.embed_scale else 1.0

    def forward(self, ids: Tensor, name: str = "ids") -> Tensor:
        """Map ids [B, S] to vectors [B, S, D]; `name` is used in errors."""
        check_ids(ids, self.table.num_embeddings, name, "vocab_size")
        vectors: Tensor = self.table(ids)
        return vectors if self.scale == 1.0 else vectors * self.scale


class SegmentEmbedding(nn.Module):
    """Segment (token type) embedding, added to the token embeddings (BERT's sentence A and B)."""

    def __init__(self, n_segments: int, d_model: int) -> None:
        super().__init__()
        self.table = Embedding(n_segments, d_model)

    def forward(self, x: Tensor, segments: Tensor | None) -> Tensor:
        """Add the embedding of each token's segment; segment 0 if none are given."""
        if segments is None:
            return x + self.table.weight[0]
        if segments.shape != x.shape[:2]:
            raise InputError(
                f"segments has shape {list(segments.shape)}, but ids has {list(x.shape[:2])}; give one for each id."
            )
        check_ids(segments, self.table.num_embeddings, "segments", "n_segments")
        added: Tensor = x + self.table(segments)
        return added


class NoSegments(nn.Module):
    """Takes the place of `SegmentEmbedding` in models without segments."""

    def forward(self, x: Tensor, segments: Tensor | None) -> Tensor:
        """Return x; raise if segments are given, which would have no effect."""
        if segments is not None:
            raise InputError("segments were given, but the spec has n_segments = 0; leave them out.")
        return x


def check_ids(ids: Tensor, count: int, name: str, limit: str) -> None:
    """Raise unless ids are a [B, S] tensor of integers from 0 to `count` - 1.

    Values are checked on the CPU only: on a GPU that would synchronise host and device at every call.
    """
    if not isinstance(ids, Tensor):
        raise InputError(f"{name} is a {type(ids).__name__}, but it must be a tensor of shape [batch, length].")
    if ids.dim() != 2 or ids.numel() == 0 or ids.dtype not in (torch.int64, torch.int32):
        raise InputError(
            f"{name} has shape {list(ids.shape)} and type {ids.dtype}, but it must be a [batch, length] tensor of "
            "int64 or int32 with at least one row and one token."
        )
    if can_read(ids):
        low, high = (int(value) for value in ids.aminmax())
        if low < 0 or high >= count:
            wrong = low if low < 0 else high
            raise InputError(f"{name} contains {wrong}, but it must be from 0 to {limit} - 1 = {count - 1}.")
