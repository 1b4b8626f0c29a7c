"""Attention-head scores: current, previous and first token, duplicate token, induction, entropy and distance."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from glasshouse.errors import InputError
from glasshouse.inspection.display.html import Drawing, Heatmap, HtmlDisplay
from glasshouse.inspection.inputs.stack_input import StackInput, make_stack_input
from glasshouse.inspection.inputs.text_input import Input, encode_inputs
from glasshouse.inspection.sites import unwrap_model
from glasshouse.text import Tokenizer

# The scores that are attention weight on certain keys, in the order of the fields.
ON_KEYS = ("current_token", "previous", "first", "duplicate", "induction", "marked")
HEADS = ("layer", "head")
HALFWAY = 0.5  # from the uniform baseline to 1: above it, a head has the type of that score
HALF_THE_KEYS = math.log(2)  # nats below maximum entropy: what uniform attention over half of the keys lacks


@dataclass(frozen=True, eq=False, repr=False)
class HeadScores(HtmlDisplay):
    """Scores of each attention head on a text: means over its queries; NaN where no query counts."""

    axes: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "current_token": HEADS,
        "previous": HEADS,
        "first": HEADS,
        "duplicate": HEADS,
        "induction": HEADS,
        "marked": HEADS,
        "entropy": HEADS,
        "distance": HEADS,
        "normalized_entropy": HEADS,
    }
    current_token: Tensor  # weight on the token itself, over queries that see another
    previous: Tensor  # weight on the previous token
    first: Tensor  # weight on the first token, over the queries after it
    duplicate: Tensor  # weight on other occurrences of the same token, over tokens that have one
    induction: Tensor  # weight on the tokens after other occurrences of the same token, over tokens that have one
    marked: Tensor  # weight on the tokens that the caller marked, over queries that see one
    entropy: Tensor  # in nats
    distance: Tensor  # mean attended distance, in tokens
    normalized_entropy: Tensor  # entropy divided by its maximum: 1 is uniform attention
    uniform_baseline: dict[str, Tensor]  # [layer]: each score under uniform attention over the visible keys
    head_types: list[list[str]]  # [layer][head]: the score that stands out, by `classify_heads`; "" if none does

    def _drawings(self) -> list[Drawing]:
        layers, heads = self.previous.shape
        rows, columns = [f"layer {layer}" for layer in range(layers)], [f"head {head}" for head in range(heads)]
        known = {name: getattr(self, name) for name in self.axes if not getattr(self, name).isnan().all()}
        return [Heatmap(each, rows, columns, name) for name, each in known.items()]


def head_scores(
    model: nn.Module,
    *inputs: Input,
    marked: Tensor | None = None,
    stack: str | None = None,
    tok: Tokenizer | None = None,
    **model_kwargs: Any,  # noqa: ANN401 - whatever the model takes
) -> HeadScores:
    """Score every attention head on a text, in one forward pass and without materializing a whole pattern.

    Other occurrences of a token are those before it in its document, or in an encoder those on both sides; keys
    outside a sliding window get weight 0. `marked` [B, S] marks further tokens to score: ends of lines, or an answer
    somewhere in the text. Padding is excluded. In an encoder-decoder it is the decoder's self-attention that is
    scored, or with `stack="encoder"` the encoder's. With `tok` the input may be a text, or several.

    The shorter the text, the higher the scores by chance: on four tokens, uniform attention puts 0.36 of its weight
    on the previous token. `uniform_baseline` has these scores, and `head_types` compares with them.

    >>> import glasshouse as gh
    >>> from glasshouse.inspection.head_scoring import head_scores, repeated_tokens
    >>> model = gh.build(gh.preset("tiny-decoder"))
    >>> scores = head_scores(model, repeated_tokens(256, 8))
    >>> scores.induction.shape, scores.head_types[0]
    (torch.Size([2, 4]), ['broad', 'broad', 'broad', 'broad'])
    >>> with gh.edit(model, {"pattern.1[head=2]": torch.eye(16)}):
    ...     head_scores(model, repeated_tokens(256, 8)).head_types[1][2]
    'current_token'
    """
    whole = unwrap_model(model)
    text = make_stack_input(whole, *encode_inputs(whole, inputs, model_kwargs, tok), stack)
    patterns = text.sites("pattern")
    depth, heads, (rows, length) = len(patterns), whole.spec.n_heads, text.ids.shape
    exact = torch.promote_types(whole.token_embedding.table.weight.dtype, torch.float32)

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=exact, device=text.ids.device)

    if marked is not None and marked.shape != text.ids.shape:
        raise InputError(
            f"marked has shape {list(marked.shape)}, but the ids have {list(text.ids.shape)}; give one for each."
        )
    chosen = torch.zeros_like(text.ids, dtype=torch.bool) if marked is None else marked.to(text.ids.device).bool()
    weight, uniform_weight, n_queries = (zeros(depth, some, len(ON_KEYS)) for some in (heads, 1, 1))
    distance, uniform_distance = zeros(depth, heads), zeros(depth)
    entropy, n_keys = zeros(depth, rows, heads, length), zeros(depth, rows, 1, length)

    @lru_cache(maxsize=1)  # a short text is one tile, the same in every layer
    def key_masks(start: int, stop: int) -> Tensor:
        return _key_masks(text, slice(start, stop), chosen)

    def read_pattern(layer: int, queries: slice, pattern: Tensor) -> None:
        masks = key_masks(queries.start, queries.stop)
        weight[layer] += torch.einsum("bhqk,nbqk->hn", pattern, masks.to(pattern))
        n_queries[layer] += masks.any(-1).sum((1, 2))
        distance[layer] += torch.einsum("bhqk,bqk->h", pattern, _distances(text, queries).to(pattern))
        entropy[layer, :, :, queries] = torch.special.entr(pattern).sum(-1)

    def read_scores(layer: int, queries: slice, scores: Tensor) -> None:
        visible = (scores > -torch.inf).to(exact)
        n_keys[layer, :, 0, queries] = visible.sum(-1)
        uniform = visible / visible.sum(-1, keepdim=True).clamp(min=1)
        masks = key_masks(queries.start, queries.stop).to(exact)
        uniform_weight[layer, 0] += torch.einsum("bqk,nbqk->n", uniform, masks)
        uniform_distance[layer] += (uniform * _distances(text, queries)).sum()

    hooks = []
    for layer, (scores, pattern) in enumerate(zip(text.sites("scores"), patterns, strict=True)):
        hooks += text.tiled_hooks(scores, partial(read_scores, layer), head=0)  # all heads of a layer share the mask
        hooks += text.tiled_hooks(pattern, partial(read_pattern, layer))
    text.run(hooks, until=f"attn_out.{depth - 1}")

    real = text.real[:, None]
    has_choice = real & (n_keys >= 2)
    on_keys = dict(zip(ON_KEYS, (weight / n_queries).unbind(-1), strict=True))
    uniform = dict(zip(ON_KEYS, (uniform_weight / n_queries)[:, 0].unbind(-1), strict=True))
    return HeadScores(
        **on_keys,
        entropy=_mean(entropy, real),
        distance=distance / real.sum(),
        normalized_entropy=_mean(entropy / n_keys.log(), has_choice),
        uniform_baseline={
            **uniform,
            "entropy": _mean(n_keys.clamp(min=1).log(), real)[:, 0],
            "distance": uniform_distance / real.sum(),
            "normalized_entropy": zeros(depth) + 1,
        },
        head_types=classify_heads(on_keys, uniform, _mean(n_keys.log() - entropy, has_choice)),
    )


def classify_heads(
    scores: Mapping[str, Tensor], uniform_baseline: Mapping[str, Tensor], entropy_gap: Tensor
) -> list[list[str]]:
    """Return the type of each head [layer][head]: the score that stands out; "" if none does.

    A score [layer, head] stands out if it is more than halfway from its uniform baseline [layer] to 1. If several
    do, the one furthest along wins. A score whose baseline is above 0.5 is ignored. Otherwise a head is "broad" if
    its `entropy_gap` to uniform attention is below ln 2 nats: it attends to more than half of the visible keys.

    >>> classify_heads({"previous": torch.tensor([[0.9, 0.4, 0.4]])}, {"previous": torch.tensor([0.36])},
    ...            torch.tensor([[0.8, 0.0, 0.9]]))
    [['previous', 'broad', '']]
    """
    types, above = ["", *scores], [torch.zeros_like(entropy_gap)]
    for name, score in scores.items():
        base = uniform_baseline[name][:, None]
        counts = (score > base) & (base <= 0.5)  # False for NaN
        above.append(((score - base) / (1 - base)).where(counts, 0))
    highest, which = torch.stack(above).max(0)
    return [
        [
            types[number] if share > HALFWAY else "broad" if gap < HALF_THE_KEYS else ""
            for share, number, gap in zip(*layer, strict=True)
        ]
        for layer in zip(highest.tolist(), which.tolist(), entropy_gap.tolist(), strict=True)
    ]


def repeated_tokens(vocab_size: int, length: int, rows: int = 4, seed: int = 0) -> Tensor:
    """Return sequences of random tokens repeated once, [rows, 2 * length], which induction heads respond to.

    >>> ids = repeated_tokens(100, length=5, rows=2)
    >>> ids.shape, ids[:, :5].equal(ids[:, 5:])
    (torch.Size([2, 10]), True)
    """
    for name, value in (("vocab_size", vocab_size), ("length", length), ("rows", rows)):
        if value < 1:
            raise InputError(f"{name} is {value}, but it must be at least 1.")
    tokens = torch.randint(vocab_size, (rows, length), generator=torch.Generator().manual_seed(seed))
    return tokens.repeat(1, 2)


def _key_masks(text: StackInput, queries: slice, chosen: Tensor) -> Tensor:
    """Return for each score in ON_KEYS the keys that count for some queries, [score, B, queries, keys]."""
    key = torch.arange(text.ids.shape[1], device=text.ids.device)
    query = key[queries, None]
    previous = text.previous
    same_document = _same_document(text, queries)
    visible = same_document & ((key <= query) | (not text.stack.causal))
    starts = same_document & (previous < 0)[:, None]

    def same_token(index: Tensor) -> Tensor:
        """Whether the tokens at some indices [B, keys] equal the query's token, at another index."""
        equal = text.ids.gather(1, index.clamp(min=0))[:, None] == text.ids[:, queries, None]
        where = index[:, None]
        return equal & (where >= 0) & ((where < query) if text.stack.causal else (where != query))

    return torch.stack(
        [
            same_document & (key == query) & (visible.sum(-1, keepdim=True) >= 2),
            same_document & (key == previous[:, queries, None]),
            starts & (previous[:, queries, None] >= 0),
            same_document & same_token(key.expand(text.ids.shape)),
            same_document & same_token(previous),
            visible & chosen[:, None],
        ]
    )


def _distances(text: StackInput, queries: slice) -> Tensor:
    """Return the distance in tokens between queries and keys of one document, 0 elsewhere, [B, queries, keys]."""
    positions = text.layout.positions
    distance = (positions[:, queries, None] - positions[:, None]).abs()
    return distance.where(_same_document(text, queries), 0)


def _same_document(text: StackInput, queries: slice) -> Tensor:
    """Return which queries and keys are tokens of one document, not padding, [B, queries, keys]."""
    real, documents = text.real, text.documents
    return real[:, queries, None] & real[:, None] & (documents[:, queries, None] == documents[:, None])


def _mean(values: Tensor, where: Tensor) -> Tensor:
    """Return the mean of values [layer, B, head, query] over sequences and queries where True, [layer, head]."""
    where = where.expand_as(values)
    return values.where(where, 0).sum((1, 3)) / where.sum((1, 3))
