"""What heads do: how much each looks at the token before, at the first, at its like, and how widely."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from glasshouse.errors import InputError
from glasshouse.inspection.drawing import Drawn, heatmap
from glasshouse.inspection.reading import Reading, read_in
from glasshouse.inspection.sites import plain

# The scores that are weight on certain keys, in the order of the fields.
ON_KEYS = ("previous", "first", "duplicate", "induction", "marked")
HEADS = ("layer", "head")


@dataclass(frozen=True, eq=False)
class HeadScores(Drawn):
    """What each head of each layer does on a text: means over its queries; NaN where no query is asked."""

    axes: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "previous": HEADS,
        "first": HEADS,
        "duplicate": HEADS,
        "induction": HEADS,
        "marked": HEADS,
        "entropy": HEADS,
        "distance": HEADS,
        "broad": HEADS,
    }
    previous: Tensor  # weight on the token just before
    first: Tensor  # weight on the first token, of those after it
    duplicate: Tensor  # weight on other places of the same token, of tokens that have one
    induction: Tensor  # weight on what followed other places of the same token, of tokens that have one
    marked: Tensor  # weight on the tokens that the caller marked, of those with one before them
    entropy: Tensor  # in nats
    distance: Tensor  # to what is looked at, in tokens
    broad: Tensor  # entropy as a share of the most there can be: 1 is an even bag of words

    def _drawing(self) -> str:
        layers, heads = self.previous.shape
        rows, columns = [f"layer {layer}" for layer in range(layers)], [f"head {head}" for head in range(heads)]
        known = {name: getattr(self, name) for name in self.axes if not getattr(self, name).isnan().all()}
        return "".join(heatmap(each, rows=rows, columns=columns, caption=name) for name, each in known.items())


def head_scores(
    model: nn.Module,
    *inputs: Tensor,
    marked: Tensor | None = None,
    stack: str | None = None,
    **call: Any,  # noqa: ANN401 - whatever the model takes
) -> HeadScores:
    """Score what each attention head does on a text, in one pass and without ever holding a whole pattern.

    Other places of a token are those before it in its document, or in an encoder those on both sides; what a window
    hides counts as not looked at. `marked` [B, S] says which tokens to ask about besides: the ends of lines, or an
    answer somewhere in the text. Padding counts nowhere. In an encoder-decoder it is the decoder's attention to
    itself that is scored, or with `stack="encoder"` that of the encoder.

    >>> import glasshouse as gh
    >>> from glasshouse.inspection.scoring import head_scores, repeated
    >>> model = gh.build(gh.preset("tiny-decoder"))
    >>> scores = head_scores(model, repeated(256, 8))
    >>> scores.induction.shape
    torch.Size([2, 4])
    """
    whole = plain(model)
    text = read_in(whole, inputs, call, stack)
    patterns = text.sites("pattern")
    depth, heads, (rows, length) = len(patterns), whole.spec.n_heads, text.ids.shape
    exact = torch.promote_types(whole.token.table.weight.dtype, torch.float32)

    def none(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=exact, device=text.ids.device)

    if marked is not None and marked.shape != text.ids.shape:
        raise InputError(
            f"marked has shape {list(marked.shape)}, but the ids have {list(text.ids.shape)}; give one for each."
        )
    chosen = torch.zeros_like(text.ids, dtype=torch.bool) if marked is None else marked.to(text.ids.device).bool()
    weight, asked = none(depth, heads, len(ON_KEYS)), none(depth, 1, len(ON_KEYS))
    distance, entropy, keys = none(depth, heads), none(depth, rows, heads, length), none(depth, rows, 1, length)

    @lru_cache(maxsize=1)  # a short text is one tile, the same in every layer
    def marks_of(start: int, stop: int) -> Tensor:
        return _marks(text, slice(start, stop), chosen)

    def read_weights(layer: int, queries: slice, pattern: Tensor) -> None:
        marks = marks_of(queries.start, queries.stop)
        weight[layer] += torch.einsum("bhqk,nbqk->hn", pattern, marks.to(pattern))
        asked[layer] += marks.any(-1).sum((1, 2))
        distance[layer] += torch.einsum("bhqk,bqk->h", pattern, _distances(text, queries).to(pattern))
        entropy[layer, :, :, queries] = torch.special.entr(pattern).sum(-1)

    def count_keys(layer: int, queries: slice, scores: Tensor) -> None:
        keys[layer, :, 0, queries] = (scores > -torch.inf).sum(-1).to(exact)

    uses = []
    for layer, (scores, pattern) in enumerate(zip(text.sites("scores"), patterns, strict=True)):
        uses += text.tiles(scores, partial(count_keys, layer), head=0)  # all heads of a layer may see the same
        uses += text.tiles(pattern, partial(read_weights, layer))
    text.run(uses, until=f"attn_out.{depth - 1}")

    real = text.real[:, None]
    return HeadScores(
        **dict(zip(ON_KEYS, (weight / asked).unbind(-1), strict=True)),
        entropy=_mean(entropy, real),
        distance=distance / real.sum(),
        broad=_mean(entropy / keys.log(), real & (keys >= 2)),
    )


def repeated(vocab_size: int, length: int, rows: int = 4, seed: int = 0) -> Tensor:
    """Return random tokens said twice, [rows, 2 * length]: a text on which a head that does induction shows it.

    >>> ids = repeated(100, length=5, rows=2)
    >>> ids.shape, ids[:, :5].equal(ids[:, 5:])
    (torch.Size([2, 10]), True)
    """
    for name, value in (("vocab_size", vocab_size), ("length", length), ("rows", rows)):
        if value < 1:
            raise InputError(f"{name} is {value}, but it must be at least 1.")
    said = torch.randint(vocab_size, (rows, length), generator=torch.Generator().manual_seed(seed))
    return said.repeat(1, 2)


def _marks(text: Reading, queries: slice, chosen: Tensor) -> Tensor:
    """Return for each score in ON_KEYS which keys some queries are asked about, [score, B, queries, keys]."""
    places = torch.arange(text.ids.shape[1], device=text.ids.device)
    place, key = places[queries, None], places
    before = text.before
    same_text = _pairs(text, queries)
    starts = same_text & (before < 0)[:, None]

    def is_like(other: Tensor) -> Tensor:
        """Whether the tokens at some places [B, keys] are the same as the query's, and other ones."""
        like = text.ids.gather(1, other.clamp(min=0))[:, None] == text.ids[:, queries, None]
        where = other[:, None]
        return like & (where >= 0) & ((where < place) if text.stack.causal else (where != place))

    return torch.stack(
        [
            same_text & (key == before[:, queries, None]),
            starts & (before[:, queries, None] >= 0),
            same_text & is_like(key.expand(text.ids.shape)),
            same_text & is_like(before),
            same_text & chosen[:, None] & ((key <= place) | (not text.stack.causal)),
        ]
    )


def _distances(text: Reading, queries: slice) -> Tensor:
    """Return how many tokens lie between queries and keys of one text, and 0 elsewhere, [B, queries, keys]."""
    positions = text.layout.positions
    apart = (positions[:, queries, None] - positions[:, None]).abs()
    return apart.where(_pairs(text, queries), 0)


def _pairs(text: Reading, queries: slice) -> Tensor:
    """Return which queries and keys are real tokens of one document, [B, queries, keys]."""
    real, documents = text.real, text.documents
    return real[:, queries, None] & real[:, None] & (documents[:, queries, None] == documents[:, None])


def _mean(values: Tensor, where: Tensor) -> Tensor:
    """Return the mean of values [layer, B, head, query] over the rows and queries that are asked, [layer, head]."""
    where = where.expand_as(values)
    return values.where(where, 0).sum((1, 3)) / where.sum((1, 3))
