"""The decoder: a causal transformer that predicts the next token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from glasshouse import spec
from glasshouse.layers.attend.layout import make_layout
from glasshouse.layers.cache import Cache, CacheView
from glasshouse.layers.embedding import TokenEmbedding
from glasshouse.models.heads import make_head
from glasshouse.models.stack import Stack


class Decoder(nn.Module):
    """Token embedding, causal stack, head.

    >>> import torch, glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder"))
    >>> model(torch.tensor([[1, 2, 3]])).shape
    torch.Size([1, 3, 256])
    """

    __call__: Callable[..., Tensor]  # torch's returns Any

    def __init__(self, s: spec.DecoderSpec) -> None:
        super().__init__()
        self.spec = s
        self.token_embedding = TokenEmbedding(s)
        self.stack = Stack(s, s.n_layers, causal=True)
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
        prefix_lengths: Tensor | None = None,
        cache: CacheView | None = None,
        logits_to_keep: Tensor | None = None,
    ) -> Tensor:
        """Map ids [B, S] to next-token logits [B, S, V].

        `lengths` [B] or `mask` [B, S] (True: not padding) mark padding, `documents` [B, S] numbers the documents of
        packed sequences, `prefix_lengths` [B] is the length of a bidirectional prefix. With a `cache` the ids
        continue those of the last call. `logits_to_keep` [N] lists the positions to compute logits for; default all.
        """
        x = self.token_embedding(ids)
        start = None if cache is None else cache.start_positions()
        layout = make_layout(
            ids, lengths=lengths, mask=mask, documents=documents, prefix_lengths=prefix_lengths, start=start
        )
        x = self.stack(x, layout, cache)
        if logits_to_keep is not None:
            x = x[:, logits_to_keep]
        return self.head(x, layout, self.token_embedding.table.weight)

    def make_cache(self, batch: int, max_len: int, *, chunk: int | None = None) -> Cache:
        """Allocate a KV cache for `batch` sequences of up to `max_len` tokens.

        If no call has more than `chunk` tokens per sequence, layers with a sliding window cache little more than it.
        """
        return Cache(self.stack.kv_shapes(), batch, max_len, chunk=chunk, like=self.token_embedding.table.weight)
