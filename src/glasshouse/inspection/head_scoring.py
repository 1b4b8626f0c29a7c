"""What heads do: how much each looks at itself, at the token before, at the first, at its like, and how widely."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from glasshouse.errors import InputError
from glasshouse.inspection.html_display import HtmlDisplay, heatmap
from glasshouse.inspection.sites import unwrap_model
from glasshouse.inspection.stack_input import StackInput, make_stack_input

# The scores that are weight on certain keys, in the order of the fields.
ON_KEYS = ("self", "previous", "first", "duplicate", "induction", "marked")
HEADS = ("layer", "head")
HALFWAY = 0.5  # from what an even head scores to all of the weight: past it, a head is named after the score
HALF_THE_KEYS = math.log(2)  # nats below an even head's entropy; who looks evenly at half of its keys lacks as much


@dataclass(frozen=True, eq=False)
class HeadScores(HtmlDisplay):
    """What each head of each layer does on a text: means over its queries; NaN where no query is asked."""

    axes: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "self": HEADS,
        "previous": HEADS,
        "first": HEADS,
        "duplicate": HEADS,
        "induction": HEADS,
        "marked": HEADS,
        "entropy": HEADS,
        "distance": HEADS,
        "broad": HEADS,
    }
    current_token: Tensor  # weight on the token itself, of those that may look at another
    previous: Tensor  # weight on the token just before
    first: Tensor  # weight on the first token, of those after it
    duplicate: Tensor  # weight on other places of the same token, of tokens that have one
    induction: Tensor  # weight on what followed other places of the same token, of tokens that have one
    marked: Tensor  # weight on the tokens that the caller marked, of those with one before them
    entropy: Tensor  # in nats
    distance: Tensor  # to what is looked at, in tokens
    normalized_entropy: Tensor  # entropy as a share of the most there can be: 1 is an even bag of words
    uniform_baseline: dict[
        str, Tensor
    ]  # [layer]: each score of a head that spreads its weight evenly over all it may see
    head_types: list[
        list[str]
    ]  # [layer][head]: the score that stands out, as `classify_heads` says; "" where none does

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

    The shorter a text, the more any head scores: of four tokens, one that looks everywhere alike has 0.36 of its
    weight on the token before. `even` holds what such a head scores, and `names` compares with it.

    >>> import glasshouse as gh
    >>> from glasshouse.inspection.head_scoring import head_scores, repeated
    >>> model = gh.build(gh.preset("tiny-decoder"))
    >>> scores = head_scores(model, repeated(256, 8))
    >>> scores.induction.shape, scores.names[0]
    (torch.Size([2, 4]), ['broad', 'broad', 'broad', 'broad'])
    >>> with gh.edit(model, {"pattern.1[head=2]": torch.eye(16)}):
    ...     head_scores(model, repeated(256, 8)).names[1][2]
    'self'
    """
    whole = unwrap_model(model)
    text = make_stack_input(whole, inputs, call, stack)
    patterns = text.sites("pattern")
    depth, heads, (rows, length) = len(patterns), whole.spec.n_heads, text.ids.shape
    exact = torch.promote_types(whole.token_embedding.table.weight.dtype, torch.float32)

    def none(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=exact, device=text.ids.device)

    if marked is not None and marked.shape != text.ids.shape:
        raise InputError(
            f"marked has shape {list(marked.shape)}, but the ids have {list(text.ids.shape)}; give one for each."
        )
    chosen = torch.zeros_like(text.ids, dtype=torch.bool) if marked is None else marked.to(text.ids.device).bool()
    weight, even_weight, asked = (none(depth, some, len(ON_KEYS)) for some in (heads, 1, 1))
    distance, even_distance = none(depth, heads), none(depth)
    entropy, keys = none(depth, rows, heads, length), none(depth, rows, 1, length)

    @lru_cache(maxsize=1)  # a short text is one tile, the same in every layer
    def marks_of(start: int, stop: int) -> Tensor:
        return _marks(text, slice(start, stop), chosen)

    def read_weights(layer: int, queries: slice, pattern: Tensor) -> None:
        marks = marks_of(queries.start, queries.stop)
        weight[layer] += torch.einsum("bhqk,nbqk->hn", pattern, marks.to(pattern))
        asked[layer] += marks.any(-1).sum((1, 2))
        distance[layer] += torch.einsum("bhqk,bqk->h", pattern, _distances(text, queries).to(pattern))
        entropy[layer, :, :, queries] = torch.special.entr(pattern).sum(-1)

    def spread_evenly(layer: int, queries: slice, scores: Tensor) -> None:
        seen = (scores > -torch.inf).to(exact)
        keys[layer, :, 0, queries] = seen.sum(-1)
        even = seen / seen.sum(-1, keepdim=True).clamp(min=1)
        even_weight[layer, 0] += torch.einsum("bqk,nbqk->n", even, marks_of(queries.start, queries.stop).to(exact))
        even_distance[layer] += (even * _distances(text, queries)).sum()

    uses = []
    for layer, (scores, pattern) in enumerate(zip(text.sites("scores"), patterns, strict=True)):
        uses += text.tiled_hooks(
            scores, partial(spread_evenly, layer), head=0
        )  # all heads of a layer may see the same
        uses += text.tiled_hooks(pattern, partial(read_weights, layer))
    text.run(uses, until=f"attn_out.{depth - 1}")

    real = text.real[:, None]
    choosing = real & (keys >= 2)
    on_keys = dict(zip(ON_KEYS, (weight / asked).unbind(-1), strict=True))
    even = dict(zip(ON_KEYS, (even_weight / asked)[:, 0].unbind(-1), strict=True))
    return HeadScores(
        **on_keys,
        entropy=_mean(entropy, real),
        distance=distance / real.sum(),
        normalized_entropy=_mean(entropy / keys.log(), choosing),
        uniform_baseline={
            **even,
            "entropy": _mean(keys.clamp(min=1).log(), real)[:, 0],
            "distance": even_distance / real.sum(),
            "broad": none(depth) + 1,
        },
        head_types=classify_heads(on_keys, even, _mean(keys.log() - entropy, choosing)),
    )


def classify_heads(
    scores: Mapping[str, Tensor], uniform_baseline: Mapping[str, Tensor], lacking: Tensor
) -> list[list[str]]:
    """Name each head [layer][head] after the score that stands out; "" where none does.

    A score [layer, head] stands out when it is more than halfway from an even head's [layer] to 1: the head is then
    closer to one that does nothing else than to one that looks everywhere alike. Of several, the one furthest along
    gives the name. A score of which an even head has more than half tells nothing. Else a head is "broad" while it is
    `lacking` less than ln 2 nats of an even head's entropy: it looks at more than half of what it may see.

    >>> classify_heads({"previous": torch.tensor([[0.9, 0.4, 0.4]])}, {"previous": torch.tensor([0.36])},
    ...            torch.tensor([[0.8, 0.0, 0.9]]))
    [['previous', 'broad', '']]
    """
    known, above = ["", *scores], [torch.zeros_like(lacking)]
    for name, score in scores.items():
        base = uniform_baseline[name][:, None]
        telling = (score > base) & (base <= 0.5)  # NaN is neither
        above.append(((score - base) / (1 - base)).where(telling, 0))
    most, which = torch.stack(above).max(0)
    return [
        [
            known[number] if share > HALFWAY else "broad" if less < HALF_THE_KEYS else ""
            for share, number, less in zip(*layer, strict=True)
        ]
        for layer in zip(most.tolist(), which.tolist(), lacking.tolist(), strict=True)
    ]


def repeated_tokens(vocab_size: int, length: int, rows: int = 4, seed: int = 0) -> Tensor:
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


def _marks(text: StackInput, queries: slice, chosen: Tensor) -> Tensor:
    """Return for each score in ON_KEYS which keys some queries are asked about, [score, B, queries, keys]."""
    places = torch.arange(text.ids.shape[1], device=text.ids.device)
    place, key = places[queries, None], places
    before = text.previous
    same_text = _pairs(text, queries)
    within = same_text & ((key <= place) | (not text.stack.causal))
    starts = same_text & (before < 0)[:, None]

    def is_like(other: Tensor) -> Tensor:
        """Whether the tokens at some places [B, keys] are the same as the query's, and other ones."""
        like = text.ids.gather(1, other.clamp(min=0))[:, None] == text.ids[:, queries, None]
        where = other[:, None]
        return like & (where >= 0) & ((where < place) if text.stack.causal else (where != place))

    return torch.stack(
        [
            same_text & (key == place) & (within.sum(-1, keepdim=True) >= 2),
            same_text & (key == before[:, queries, None]),
            starts & (before[:, queries, None] >= 0),
            same_text & is_like(key.expand(text.ids.shape)),
            same_text & is_like(before),
            within & chosen[:, None],
        ]
    )


def _distances(text: StackInput, queries: slice) -> Tensor:
    """Return how many tokens lie between queries and keys of one text, and 0 elsewhere, [B, queries, keys]."""
    positions = text.layout.positions
    apart = (positions[:, queries, None] - positions[:, None]).abs()
    return apart.where(_pairs(text, queries), 0)


def _pairs(text: StackInput, queries: slice) -> Tensor:
    """Return which queries and keys are real tokens of one document, [B, queries, keys]."""
    real, documents = text.real, text.documents
    return real[:, queries, None] & real[:, None] & (documents[:, queries, None] == documents[:, None])


def _mean(values: Tensor, where: Tensor) -> Tensor:
    """Return the mean of values [layer, B, head, query] over the rows and queries that are asked, [layer, head]."""
    where = where.expand_as(values)
    return values.where(where, 0).sum((1, 3)) / where.sum((1, 3))
