"""Steps from the last layer to the output."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from glasshouse.config import JsonDict
from glasshouse.layers.lora import LoRALinear
from glasshouse.models.heads import Classifier, LMHead, Pooler
from glasshouse.page import serialization
from glasshouse.page.views.next_token import describe_outputs, logits_at
from glasshouse.page.views.walkthrough.card import CORNER, card, linear_card, norm_card
from glasshouse.page.views.walkthrough.token_path import TokenPath, memory_of

TOP = 8  # tokens or labels


def unembedding_steps(path: TokenPath) -> Iterator[JsonDict]:
    """Yield the steps after the last layer: logits, labels, vectors, or the encoder output."""
    depth, trace = len(path.stack.blocks), path.trace
    x = path.residual(depth - 1)[path.position]
    here = f"[position={path.position}]"
    if path.layer < depth - 1:
        yield card("onward", "leave", f"{path.prefix}resid_post.{depth - 1}{here}", y=x)
    to_decoder = path.prefix != trace.prefix
    final = memory_of(trace)[path.position] if to_decoder else trace.activation(f"{path.prefix}final")[path.position]
    if not isinstance(path.stack.norm, nn.Identity):
        yield norm_card("final", path.stack.norm, x, final, f"{path.prefix}final{here}")
    head = trace.model.head
    if to_decoder:
        yield card("memory", "memory", y=final)
    elif isinstance(head, LMHead):
        yield from _vocabulary(path, head, final)
    elif isinstance(head, Classifier):
        logits = logits_at(trace, path.position)
        pooled = isinstance(head.pool, Pooler)
        yield card("head", "labels", x=final, pooled=pooled, top=_top(path, logits, len(logits)), count=len(logits))
    else:
        yield card("head", "vectors", y=final, pooled=isinstance(head, Pooler))


def _vocabulary(path: TokenPath, head: LMHead, x: Tensor) -> Iterator[JsonDict]:
    if isinstance(head.transform, nn.Sequential):
        linear, activation, norm = head.transform
        assert isinstance(linear, nn.Linear | LoRALinear)
        bent = activation(linear(x))
        yield linear_card("head", "transform", linear, x, linear(x)) | {
            "bent": serialization.encode_tensor(bent),
            "how": path.spec.feedforward.kind,
        }
        yield norm_card("head", norm, bent)
        x = norm(bent)
    logits = logits_at(path.trace, path.position)
    top = _top(path, logits, TOP)
    ids = [one["id"] for one in top]
    matrix = head.unembedding(path.trace.model.token_embedding.table.weight)
    told: JsonDict = {} if head.bias is None else {"bias": head.bias[ids]}
    tied = matrix is path.trace.model.token_embedding.table.weight
    told |= {"rows": matrix[ids, :CORNER], "shape": list(matrix.shape), "top": top, "tied": tied}
    yield card("head", "logits", x=x, by=head.scale, cap=head.softcap, **told)
    yield card("head", "probabilities", top=top, count=len(logits), total=float(logits.logsumexp(-1)))


def _top(path: TokenPath, logits: Tensor, count: int) -> list[JsonDict]:
    """Return the most likely tokens or labels, with logits and probabilities."""
    chances = logits.softmax(-1)
    best = chances.topk(min(count, len(logits))).indices.tolist()
    return [
        {
            **name,
            "logit": serialization.finite_or_none(logits[one]),
            "probability": serialization.finite_or_none(chances[one]),
        }
        for one, name in zip(best, describe_outputs(path.trace, best), strict=True)
    ]
