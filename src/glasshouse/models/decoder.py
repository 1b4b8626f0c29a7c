"""The decoder: each position sees itself and those before it, and says what comes next."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from glasshouse import spec
from glasshouse.layers.cache import Cache
from glasshouse.layers.embedding import TokenEmbedding
from glasshouse.layers.layout import make_layout
from glasshouse.models.heads import make_head
from glasshouse.models.stack import Stack


class Decoder(nn.Module):
    """Tokens, a causal stack, a head.

    >>> import torch, glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder"))
    >>> model(torch.tensor([[1, 2, 3]])).shape
    torch.Size([1, 3, 256])
    """

    def __init__(self, s: spec.DecoderSpec) -> None:
        super().__init__()
        self.spec = s
        self.token_embedding = TokenEmbedding(s)
        self.stack = Stack(s, s.n_layers, causal=True)
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
        prefix_lengths: Tensor | None = None,
        cache: Cache | None = None,
        logits_to_keep: Tensor | None = None,
    ) -> Tensor:
        """Map ids [B, S] to logits [B, S, V] of the token after each.

        `lengths` [B] or `mask` [B, S] (True: real) tell padding, `documents` [B, S] numbers texts packed in one
        row, `prefix` [B] counts leading tokens that see each other both ways. With a `cache` the ids go on where
        the last call ended. `keep` names the places along the row whose logits are wanted, if not all are.
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
        """Make room for the keys and values of `max_len` tokens in each of `batch` rows.

        Where no call will bring more than `chunk` tokens a row, layers with a window keep little more than that.
        """
        return Cache(self.spec, batch, max_len, chunk=chunk, like=self.token_embedding.table.weight)
