"""The encoder: a bidirectional transformer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from glasshouse import spec
from glasshouse.layers.attend.layout import make_layout
from glasshouse.layers.embedding import NoSegments, SegmentEmbedding, TokenEmbedding
from glasshouse.models.heads import make_head
from glasshouse.models.stack import Stack


class Encoder(nn.Module):
    """Token and segment embeddings, bidirectional stack, head.

    >>> import torch, glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-encoder", head={"kind": "sequence_classification", "n_labels": 3}))
    >>> model(torch.tensor([[1, 2, 0], [1, 2, 3]]), lengths=torch.tensor([2, 3])).shape
    torch.Size([2, 3])
    """

    __call__: Callable[..., Tensor]  # torch's returns Any

    def __init__(self, s: spec.EncoderSpec) -> None:
        super().__init__()
        self.spec = s
        self.token_embedding = TokenEmbedding(s)
        self.segment = SegmentEmbedding(s.n_segments, s.d_model) if s.n_segments else NoSegments()
        self.stack = Stack(s, s.n_layers, causal=False)
        self.head = make_head(s)
        self.tokenizer_fingerprint: str | None = None  # of the tokenizer it was trained with; another is refused
        self.extra_files: dict[str, Any] = {}  # further files of a loaded model by name, written again by save

    def forward(
        self,
        ids: Tensor,
        *,
        lengths: Tensor | None = None,
        mask: Tensor | None = None,
        documents: Tensor | None = None,
        segments: Tensor | None = None,
    ) -> Tensor:
        """Map ids [B, S] to the head's output: logits over the vocabulary or labels, or vectors.

        `lengths` [B] or `mask` [B, S] (True: not padding) mark padding, `documents` [B, S] numbers the documents of
        packed sequences, `segments` [B, S] are the segment (token type) ids.
        """
        x = self.segment(self.token_embedding(ids), segments)
        layout = make_layout(ids, lengths=lengths, mask=mask, documents=documents)
        x = self.stack(x, layout)
        return self.head(x, layout, self.token_embedding.table.weight)
