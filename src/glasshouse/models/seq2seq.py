"""The encoder-decoder: an encoder of the source, and a decoder of the target with cross-attention to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from glasshouse import spec
from glasshouse.errors import InputError
from glasshouse.layers.attend.layout import Layout, make_layout
from glasshouse.layers.cache import Cache, CacheView, SourceCache
from glasshouse.layers.embedding import TokenEmbedding
from glasshouse.models.heads import make_head
from glasshouse.models.stack import Stack


class Seq2Seq(nn.Module):
    """Token embedding, encoder, decoder with cross-attention, head.

    >>> import torch, glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-seq2seq"))
    >>> model(torch.tensor([[5, 6, 7, 8]]), torch.tensor([[1, 2]])).shape
    torch.Size([1, 2, 256])
    """

    __call__: Callable[..., Tensor]  # torch's returns Any

    def __init__(self, s: spec.Seq2SeqSpec) -> None:
        super().__init__()
        self.spec = s
        self.token_embedding = TokenEmbedding(s)
        self.encoder = Stack(s, s.n_encoder_layers, causal=False)
        self.decoder = Stack(s, s.n_layers, causal=True, cross=True)
        self.head = make_head(s)
        self.tokenizer_fingerprint: str | None = None  # of the tokenizer it was trained with; another is refused
        self.extra_files: dict[str, Any] = {}  # further files of a loaded model by name, written again by save

    def forward(
        self,
        source: Tensor | None,
        target: Tensor,
        *,
        lengths: Tensor | None = None,
        mask: Tensor | None = None,
        documents: Tensor | None = None,
        target_lengths: Tensor | None = None,
        target_mask: Tensor | None = None,
        target_documents: Tensor | None = None,
        cache: CacheView | None = None,
        logits_to_keep: Tensor | None = None,
    ) -> Tensor:
        """Map source ids [B, S] and the decoder's input [B, T], which is not shifted here, to logits [B, T, V].

        `lengths`, `mask` and `documents` are the source's, those with `target_` the target's; a document of the
        target attends to the source's document of the same number. With a `cache` the target continues that of the
        last call, and None for the source means the cached one. `logits_to_keep` [N] lists the target positions to
        compute logits for; default all.
        """
        x = self.token_embedding(target, "target")
        start = None if cache is None else cache.start_positions()
        layout = make_layout(
            target,
            lengths=target_lengths,
            mask=target_mask,
            documents=target_documents,
            start=start,
            side="target_",
        )
        memory = None
        if source is not None:
            if len(source) != len(target):
                raise InputError(f"source has batch size {len(source)}, but target has {len(target)}; give pairs.")
            if (documents is None) != (target_documents is None):
                raise InputError("documents and target_documents go together; give both or neither.")
            source_layout = make_layout(source, lengths=lengths, mask=mask, documents=documents)
            memory = self.encoder(self.token_embedding(source, "source"), source_layout)
            if cache is not None:
                self._cache_source(memory, source_layout, cache.source)
        elif cache is None or cache.source is None or not cache.source.filled:
            raise InputError("source is None, but no source is cached; give a source.")
        elif not (lengths is mask is documents is None):
            raise InputError("lengths, mask or documents were given without a source; give them with it.")
        if cache is not None and cache.source is not None:
            memory, source_layout = None, cache.source.layout()
        x = self.decoder(x, layout, cache, memory, source_layout)
        if logits_to_keep is not None:
            x = x[:, logits_to_keep]
        return self.head(x, layout, self.token_embedding.table.weight)

    def encode_source(
        self, source: Tensor, cache: CacheView, *, lengths: Tensor | None = None, rows: Tensor | None = None
    ) -> None:
        """Encode a source [B, S] into the cache, by default into all of its rows, or else into `rows` [B].

        Later calls then take None for the source.
        """
        layout = make_layout(source, lengths=lengths)
        memory = self.encoder(self.token_embedding(source, "source"), layout)
        cached = cache.source if cache.source is None or rows is None else cache.source.at(rows)
        self._cache_source(memory, layout, cached)

    def _cache_source(self, memory: Tensor, layout: Layout, cached: SourceCache | None) -> None:
        if cached is None:
            raise InputError("the cache has no room for a source; make one with this model's make_cache.")
        cached.store_layout(layout)
        for index, layer in enumerate(self.decoder.attention_layers("cross")):
            cached.store(index, *layer.project_source(memory))

    def make_cache(
        self, batch: int, max_len: int, source_len: int | None = None, *, chunk: int | None = None
    ) -> Cache:
        """Allocate a KV cache for `max_len` target tokens and `source_len` (default `max_len`) source tokens."""
        like, source_len = self.token_embedding.table.weight, max_len if source_len is None else source_len
        source = SourceCache(self.decoder.kv_shapes("cross"), batch, source_len, like=like)
        return Cache(self.decoder.kv_shapes(), batch, max_len, chunk=chunk, source=source, like=like)
