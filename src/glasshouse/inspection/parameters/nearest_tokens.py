"""The tokens whose embedding or unembedding is nearest to a vector."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from glasshouse.errors import InputError
from glasshouse.inspection.display.html import Bars, Drawing, Heatmap, HtmlDisplay, labels, not_drawn
from glasshouse.inspection.parameters.by_head import weights
from glasshouse.inspection.parameters.low_rank import exact
from glasshouse.inspection.sites import unwrap_model
from glasshouse.models import check_tokenizer
from glasshouse.text import Tokenizer

MAX_SCORES = 2**24  # in memory at once
MAX_ROWS = 32  # drawn, of several vectors

Matrix = Literal["unembedding", "embedding"]
Similarity = Literal["dot", "cosine"]
SIMILARITIES: dict[Similarity, str] = {"dot": "dot product", "cosine": "cosine similarity"}


@dataclass(frozen=True, eq=False, repr=False)
class NearestTokens(HtmlDisplay):
    """The tokens nearest to each vector, and their scores: dot products or cosine similarities, largest first."""

    axes: ClassVar[Mapping[str, tuple[str, ...]]] = {"ids": ("...", "rank"), "scores": ("...", "rank")}
    ids: Tensor
    scores: Tensor
    by: Matrix
    similarity: Similarity
    tok: Tokenizer | None = None

    @property
    def str_tokens(self) -> list[list[str]]:
        """The tokens as text, one list for each vector; ids as text if no tok was given.

        >>> import glasshouse as gh
        >>> model, tok = gh.load("python-3m")
        >>> vector = gh.weights(model).W_U[:, tok.encode(" def")[0]]
        >>> gh.nearest(model, vector, k=1, similarity="cosine", tok=tok).str_tokens
        [['␣def']]
        """
        return [labels(row, self.tok) for row in self.ids.reshape(-1, self.ids.shape[-1])]

    def _drawings(self) -> list[Drawing]:
        caption = f"tokens of the nearest {self.by}, by {SIMILARITIES[self.similarity]}"
        words, scores = self.str_tokens, self.scores.reshape(-1, self.scores.shape[-1])
        if len(words) == 1:
            return [Bars(scores[0], words[0], caption)]
        rows = [f"vector {number}" for number in range(min(len(words), MAX_ROWS))]
        columns = [str(rank) for rank in range(scores.shape[1])]
        caption += not_drawn(vectors=len(words) - MAX_ROWS)
        return [Heatmap(scores[:MAX_ROWS], rows, columns, caption, words[:MAX_ROWS])]


def nearest(
    model: nn.Module,
    vector: Tensor,
    k: int = 10,
    *,
    by: Matrix = "unembedding",
    similarity: Similarity = "dot",
    tok: Tokenizer | None = None,
) -> NearestTokens:
    """Return the `k` tokens whose unembedding, or embedding, is most similar to a vector, or to each of [..., D].

    With the dot product and the unembedding these are the logits that the vector adds, but for the final norm and the
    bias: what a head, a neuron (a row of `gh.weights(model).W_out`) or a steering vector writes.

    >>> import torch, glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder"))
    >>> found = gh.nearest(model, gh.weights(model).W_E[[7, 9]], k=3, by="embedding", similarity="cosine")
    >>> found.ids.shape, found.ids[:, 0]
    (torch.Size([2, 3]), tensor([7, 9]))
    """
    for name, given, known in (("by", by, get_args(Matrix)), ("similarity", similarity, get_args(Similarity))):
        if given not in known:
            raise InputError(f"{name} is {given!r}, but it must be {' or '.join(map(repr, known))}.")
    whole = unwrap_model(model)
    vocab_size, width = whole.spec.vocab_size, whole.spec.d_model
    if not isinstance(vector, Tensor) or not vector.is_floating_point() or vector.shape[-1:] != (width,):
        shown = f"of {vector.dtype} {list(vector.shape)}" if isinstance(vector, Tensor) else repr(vector)
        raise InputError(
            f"vector is {shown}, but it must be a tensor of floating-point numbers [..., {width}]; give one of the "
            "residual stream's width, d_model."
        )
    if not isinstance(k, int) or not 1 <= k <= vocab_size:
        raise InputError(f"k is {k!r}, but it must be from 1 to {vocab_size}, the size of the vocabulary.")
    if tok is not None:
        check_tokenizer(whole, tok)
    with torch.no_grad():
        found = weights(whole)
        matrix = exact(found.W_U.mT if by == "unembedding" else found.W_E)
        vectors = vector.to(matrix).reshape(-1, width)
        if similarity == "cosine":
            matrix, vectors = F.normalize(matrix, dim=-1), F.normalize(vectors, dim=-1)
        chunks = [(part @ matrix.T).topk(k) for part in vectors.split(max(1, MAX_SCORES // vocab_size))]
        scores, ids = (torch.cat(one).reshape(*vector.shape[:-1], k) for one in zip(*chunks, strict=True))
    return NearestTokens(ids, scores, by, similarity, tok)
