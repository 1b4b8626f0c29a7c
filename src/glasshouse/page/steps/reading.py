"""From the last layer to what the model says."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from glasshouse.config import JsonDict
from glasshouse.layers.lora import LoRALinear
from glasshouse.models.heads import Classifier, LMHead, Pooler
from glasshouse.page import wire
from glasshouse.page.following import logits_at, named
from glasshouse.page.steps.card import CORNER, card, linear_card, norm_card
from glasshouse.page.steps.way import Way, memory_of

TOP = 8  # tokens or labels


def reading_steps(way: Way) -> Iterator[JsonDict]:
    """Yield what is made of the stream after the last layer: logits, labels, vectors, or what a decoder looks at."""
    depth, trace = len(way.stack.blocks), way.trace
    x = way.stream(depth - 1)[way.position]
    here = f"[position={way.position}]"
    if way.layer < depth - 1:
        yield card("onward", "leave", f"{way.prefix}resid_post.{depth - 1}{here}", y=x)
    to_decoder = way.prefix != trace.prefix
    final = memory_of(trace)[way.position] if to_decoder else trace.site(f"{way.prefix}final")[way.position]
    if not isinstance(way.stack.norm, nn.Identity):
        yield norm_card("final", way.stack.norm, x, final, f"{way.prefix}final{here}")
    head = trace.model.head
    if to_decoder:
        yield card("memory", "memory", y=final)
    elif isinstance(head, LMHead):
        yield from _vocabulary(way, head, final)
    elif isinstance(head, Classifier):
        logits = logits_at(trace, way.position)
        pooled = isinstance(head.pool, Pooler)
        yield card("head", "labels", x=final, pooled=pooled, top=_top(way, logits, len(logits)), count=len(logits))
    else:
        yield card("head", "vectors", y=final, pooled=isinstance(head, Pooler))


def _vocabulary(way: Way, head: LMHead, x: Tensor) -> Iterator[JsonDict]:
    if isinstance(head.transform, nn.Sequential):
        linear, activation, norm = head.transform
        assert isinstance(linear, nn.Linear | LoRALinear)
        bent = activation(linear(x))
        yield linear_card("head", "transform", linear, x, linear(x)) | {
            "bent": wire.packed(bent),
            "how": way.spec.feedforward.kind,
        }
        yield norm_card("head", norm, bent)
        x = norm(bent)
    logits = logits_at(way.trace, way.position)
    top = _top(way, logits, TOP)
    ids = [one["id"] for one in top]
    matrix = head.unembedding(way.trace.model.token_embedding.table.weight)
    told: JsonDict = {} if head.bias is None else {"bias": head.bias[ids]}
    tied = matrix is way.trace.model.token_embedding.table.weight
    told |= {"rows": matrix[ids, :CORNER], "shape": list(matrix.shape), "top": top, "tied": tied}
    yield card("head", "logits", x=x, by=head.scale, **told)
    yield card("head", "probabilities", top=top, count=len(logits), total=float(logits.logsumexp(-1)))


def _top(way: Way, logits: Tensor, count: int) -> list[JsonDict]:
    """Return the likeliest tokens or labels, with their logits and probabilities."""
    chances = logits.softmax(-1)
    best = chances.topk(min(count, len(logits))).indices.tolist()
    return [
        {**name, "logit": wire.number(logits[one]), "probability": wire.number(chances[one])}
        for one, name in zip(best, named(way.trace, best), strict=True)
    ]
