"""FLOPs of a training step, summed over the `add_flops` of its layers."""

from __future__ import annotations

from torch import Tensor

from glasshouse.layers.flops import FlopCount, is_trained, product
from glasshouse.models.builder import Model
from glasshouse.models.encoder import Encoder
from glasshouse.models.seq2seq import Seq2Seq


class FlopEstimator:
    """FLOPs of the matrix products in the forward and backward pass of a batch; other operations are negligible.

    A weight matrix costs 2 FLOPs per token and element in the forward pass, 2 more for its own gradient if it is
    trained, and 2 more for that of its input if anything before it is trained: 6 if everything is trained.

    >>> import torch, glasshouse as gh
    >>> model = gh.build(gh.preset("gpt2", n_layers=2, d_model=64, n_heads=4, vocab_size=100))
    >>> ids = torch.zeros(3, 32, dtype=torch.long)
    >>> matrices = 2 * 12 * 64**2 + 100 * 64
    >>> FlopEstimator(model)(ids) == 3 * 32 * (6 * matrices + 12 * 2 * 64 * 32)
    True
    """

    def __init__(self, model: Model) -> None:
        self.source_stack, self.stack, self.head = FlopCount(), FlopCount(), FlopCount()
        embedded = is_trained(model.token_embedding)
        if isinstance(model, Seq2Seq):
            self.stack.memory_trained = self.source_stack.add(model.encoder, embedded)
            vectors = self.stack.add(model.decoder, embedded)
        else:
            if isinstance(model, Encoder):
                embedded = embedded or is_trained(model.segment)
            vectors = self.stack.add(model.stack, embedded)
        vectors = self.head.add(model.head, vectors)
        if getattr(model.spec.head, "tied", False):
            self.head.maps += product(model.token_embedding.table.weight, vectors)
        self.pools = hasattr(model.spec.head, "pooling")  # the head then has one vector per sequence

    def __call__(self, ids: Tensor, source: Tensor | None = None) -> int:
        """Return the FLOPs of a batch of ids [B, S], padding included; with a source, ids are the target."""
        (batch_size, length), source_len = ids.shape, 0 if source is None else source.shape[1]
        per_token = self.stack.maps + self.stack.scores * length + self.stack.cross_scores * source_len
        per_source = self.stack.cross_maps + self.source_stack.maps + self.source_stack.scores * source_len
        head = self.head.maps * (1 if self.pools else length)
        return batch_size * (length * per_token + source_len * per_source + head)

    def attention(self, ids: Tensor, source: Tensor | None = None) -> int:
        """Return the FLOPs of a batch that are products of queries, keys, patterns and values."""
        (batch_size, length), source_len = ids.shape, 0 if source is None else source.shape[1]
        own = length * (self.stack.scores * length + self.stack.cross_scores * source_len)
        return batch_size * (own + self.source_stack.scores * source_len**2)
