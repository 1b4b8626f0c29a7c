"""The steps of one attention head at one position, from the projections to the output."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from glasshouse.layers.position import Position
from glasshouse.layers.step import LinearStep, NormStep, Step
from glasshouse.layers.sublayer import TokenView

if TYPE_CHECKING:
    from glasshouse.layers.attention import MultiHeadAttention

SHOWN = 12  # keys whose vectors are part of a step; scores and weights are those of all


@dataclass(frozen=True)
class Keys:
    """The keys that a head attends to, and the one whose vectors are shown."""

    x: Tensor  # [D], what its key and value are computed from
    of: int  # the token
    before: int  # how many keys are shown before it
    encoding: Position
    causal: bool
    window: int


def head_steps(layer: MultiHeadAttention, token: TokenView, keys: Keys) -> Iterator[Step]:
    """Yield the steps of one head, then of the output projection."""
    weights, z = token.seen(f"{layer.prefix}pattern"), token.seen(f"{layer.prefix}z")
    yield from _vector_steps(layer, token, keys)
    first = max(0, min(keys.of - keys.before, len(weights) - SHOWN))
    yield from _score_steps(layer, token, keys, first)
    v = token.seen(f"{layer.prefix}v")[token.head * layer.n_kv_heads // layer.n_heads]
    gathered = {"first": first, "weights": weights, "rows": v[first : first + SHOWN], "y": z[token.head]}
    here = {"head": token.head, "position": token.index}
    yield Step(name="gather", numbers=gathered, site=f"{layer.prefix}z", index=here)
    numbers = {"heads": z, "y": z.flatten()}
    yield Step(name="join", numbers=numbers, site=f"{layer.prefix}z", index={"position": token.index})
    x = token.seen(layer.residual_input).flatten()
    yield LinearStep(name="out", linear=layer.out, x=x, y=layer.out(x))


def _vector_steps(layer: MultiHeadAttention, token: TokenView, keys: Keys) -> Iterator[Step]:
    """Yield the query of the token, and the key and value of token `of`, as the kernel receives them."""
    head, d_head, prefix = token.head, layer.d_head, layer.prefix
    shared = head * layer.n_kv_heads // layer.n_heads
    q_last = token.seen(f"{prefix}q")[head, token.index]
    k_last, v_last = (token.seen(f"{prefix}{name}")[shared, keys.of] for name in "kv")
    q_at, k_at = {"head": head, "position": token.index}, {"head": shared, "position": keys.of}
    normed, rotates = not isinstance(layer.q_norm, nn.Identity), keys.encoding.rotates
    q, k = q_last, k_last
    if normed or rotates:  # otherwise the projections are the kernel's inputs
        q = layer.query(token.x[None, None])[0, 0].unflatten(0, (-1, d_head))[head]
        k = layer.key(keys.x[None, None])[0, 0].unflatten(0, (-1, d_head))[shared]

    def projection(name: str, linear: nn.Module, x: Tensor, y: Tensor, row: int) -> LinearStep:
        numbers = {"of": keys.of, "kv": shared}
        return LinearStep(name=name, linear=linear, x=x, y=y, first=row * d_head, numbers=numbers)

    query = projection("query", layer.query, token.x, q, head)
    key = projection("key", layer.key, keys.x, k, shared)
    value = projection("value", layer.value, keys.x, v_last, shared)
    plain = not (normed or rotates)
    yield replace(query, site=f"{prefix}q", index=q_at) if plain else query
    yield replace(key, site=f"{prefix}k", index=k_at) if plain else key
    yield replace(value, site=f"{prefix}v", index=k_at)
    if normed:
        q_normed, k_normed = (layer.q_norm(q), layer.k_norm(k)) if rotates else (q_last, k_last)
        norms: list[Step] = [
            NormStep(norm=layer.q_norm, x=q, y=q_normed, numbers={"of": keys.of, "what": "q"}),
            NormStep(norm=layer.k_norm, x=k, y=k_normed, numbers={"of": keys.of, "what": "k"}),
        ]
        ends = [(f"{prefix}q", q_at), (f"{prefix}k", k_at)]
        for step, (site, index) in zip(norms, ends, strict=True):
            yield step if rotates else replace(step, site=site, index=index)
        q, k = q_normed, k_normed
    if rotates:
        numbers: dict[str, object] = {"x": q, "y": q_last, "x_key": k, "y_key": k_last}
        yield replace(keys.encoding.rotate_step(token.position, numbers), site=f"{prefix}q", index=q_at)


def _score_steps(layer: MultiHeadAttention, token: TokenView, keys: Keys, first: int) -> Iterator[Step]:
    """Yield the steps from q · k to the attention weights."""
    prefix, shared = layer.prefix, token.head * layer.n_kv_heads // layer.n_heads
    q, k = token.seen(f"{prefix}q")[token.head, token.index], token.seen(f"{prefix}k")[shared]
    scale, cap = layer.attend.scale, layer.attend.softcap
    # As the explicit kernel computes them.
    now = ((q[None, None, None] * scale) @ k[None, None].transpose(-2, -1))[0, 0, 0]
    now = now.to(torch.promote_types(now.dtype, torch.float32))
    numbers = {"q": q, "rows": k[first : first + SHOWN], "by": scale, "y": now}
    made = [Step(name="scores", numbers=numbers)]
    if cap is not None:
        now, before = cap * torch.tanh(now / cap), now
        made.append(Step(name="softcap", numbers={"x": before, "cap": cap, "y": now}))
    bias = keys.encoding.bias(token.position, token.positions)
    if bias is not None:
        added = bias[0, token.head, 0].to(now.dtype)
        now, before = now + added, now
        made.append(keys.encoding.bias_step(token.head, {"x": before, "added": added, "y": now}))
    scores, weights = token.seen(f"{prefix}scores"), token.seen(f"{prefix}pattern")
    visible = scores > -torch.inf
    if keys.causal or keys.window or not bool(visible.all()):
        counts = {"n_seen": int(visible.sum()), "n_keys": len(scores), "window": keys.window}
        made.append(Step(name="mask", numbers={"x": now, "seen": visible.to(torch.uint8), **counts}))
    here = {"head": token.head, "query": token.index}
    made[-1] = replace(made[-1], numbers={**made[-1].numbers, "y": scores}, site=f"{prefix}scores", index=here)
    numbers = {"x": scores, "y": weights, "largest": int(weights.argmax())}
    made.append(Step(name="softmax", numbers=numbers, site=f"{prefix}pattern", index=here))
    yield from (replace(step, numbers={**step.numbers, "first": first}) for step in made)
