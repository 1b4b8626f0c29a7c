"""The encoder: every position sees every other."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from glasshouse import spec
from glasshouse.layers.embedding import NoSegments, SegmentEmbedding, TokenEmbedding
from glasshouse.layers.layout import make_layout
from glasshouse.models.heads import make_head
from glasshouse.models.stack import Stack


class Encoder(nn.Module):
    """Tokens and segments, a stack that looks both ways, a head.

    >>> import torch, glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-encoder", head={"kind": "sequence_classification", "n_labels": 3}))
    >>> model(torch.tensor([[1, 2, 0], [1, 2, 3]]), lengths=torch.tensor([2, 3])).shape
    torch.Size([2, 3])
    """

    def __init__(self, s: spec.EncoderSpec) -> None:
        super().__init__()
        self.spec = s
        self.token_embedding = TokenEmbedding(s)
        self.segment = SegmentEmbedding(s.n_segments, s.d_model) if s.n_segments else NoSegments()
        self.stack = Stack(s, s.n_layers, causal=False)
        self.head = make_head(s)
        self.tokenizer_fingerprint: str | None = (
            None  # the fingerprint of the one it was trained with; another is refused
        )
        self.extra_files: dict[
            str, Any
        ] = {}  # what was published with the weights, by file, for whoever saves them again

    def forward(
        self,
        ids: Tensor,
        *,
        lengths: Tensor | None = None,
        mask: Tensor | None = None,
        documents: Tensor | None = None,
        segments: Tensor | None = None,
    ) -> Tensor:
        """Map ids [B, S] to what the head gives: logits [B, S, V], labels, or vectors.

        `lengths` [B] or `mask` [B, S] (True: real) tell padding, `documents` [B, S] numbers texts packed in one
        row, `segments` [B, S] says which segment a token belongs to.
        """
        x = self.segment(self.token_embedding(ids), segments)
        layout = make_layout(ids, lengths=lengths, mask=mask, documents=documents)
        x = self.stack(x, layout)
        return self.head(x, layout, self.token_embedding.table.weight)
