"""The walkthrough: what each layer computes at one position, step by step and with its numbers.

`steps`, `embed_step`, `rotate_step`, `bias_step` and `norm_statistics` are generic functions: a package that adds a
kind of layer registers its steps beside it, by `@walkthrough.steps.register`; otherwise one step shows the layer's
name, input and output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import singledispatch

import torch
from torch import Tensor, nn

from glasshouse.layers.attention import Attention, CrossAttention, MultiHeadAttention, ProjectionNorm
from glasshouse.layers.feedforward import FeedForward, GatedFeedForward
from glasshouse.layers.norm import LayerNorm, RMSNorm
from glasshouse.layers.position import (
    AlibiPosition,
    LearnedPosition,
    Position,
    RelativePosition,
    RotaryPosition,
    SinusoidalPosition,
    alibi_slopes,
    rotate_halves,
)
from glasshouse.layers.sublayer import Sublayer
from glasshouse.layers.value_embedding import ValueEmbedding

SHOWN = 12  # keys whose vectors are part of a step; scores and weights are those of all
STRONGEST = 12  # neurons named in a step


@dataclass(frozen=True, kw_only=True)
class WalkthroughStep:
    """One step: its tensors and numbers by name, and the site of its output.

    A step with a title is drawn from title, formula and tensors; without one, the page has a picture for its name.
    """

    name: str
    numbers: Mapping[str, object] = field(default_factory=dict)
    site: str = ""  # without the stack's prefix and the layer's number: "z"
    index: Mapping[str, int] = field(default_factory=dict)  # of the site
    title: str = ""
    formula: str = ""
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class LinearStep(WalkthroughStep):
    """A linear layer, whose rows from `first` on map x to y."""

    linear: nn.Module
    x: Tensor
    y: Tensor
    first: int = 0


@dataclass(frozen=True, kw_only=True)
class NormStep(WalkthroughStep):
    """A norm."""

    name: str = "norm"
    norm: nn.Module
    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class TokenView:
    """One position of a forward pass, and the activations recorded there, as the steps of a layer need them."""

    x: Tensor  # [D], the layer's input
    ids: Tensor  # [1, S]
    # By site, at this position; scores and patterns of the selected head; whole inputs of a kernel, [H, S, d].
    seen: Callable[[str], Tensor]
    index: int  # of the token
    head: int
    positions: Tensor  # [1, S], the position ids of the sequence
    encoding: Position
    causal: bool
    memory: Tensor | None = None  # [source, D], the encoder's output

    @property
    def position(self) -> Tensor:
        """The position id of the token, [1, 1]."""
        return self.positions[:, self.index : self.index + 1]


@singledispatch
def steps(layer: Sublayer, token: TokenView) -> Iterator[WalkthroughStep]:
    """Yield what a layer computes at one position; the last step is its output."""
    y = layer.residual_projection(token.seen(layer.residual_input).flatten())
    numbers = {"x": token.x, "y": y}
    yield WalkthroughStep(name="layer", title=type(layer).__name__, formula="y = f(x)", numbers=numbers)


@steps.register
def attention_steps(layer: Attention, token: TokenView) -> Iterator[WalkthroughStep]:
    """Yield the steps of one head, then of the output projection; the key shown is the token's own."""
    keys = _Keys(token.x, token.index, SHOWN - 3, token.encoding, token.causal, layer.window)
    yield from _head_steps(layer, token, keys)


@steps.register
def _(layer: CrossAttention, token: TokenView) -> Iterator[WalkthroughStep]:
    """Yield the steps of one head, then of the output projection; the key shown has the largest weight."""
    assert token.memory is not None
    of = int(token.seen("cross_pattern").argmax())
    keys = _Keys(token.memory[of], of, SHOWN // 2, Position(), causal=False, window=0)
    yield from _head_steps(layer, token, keys)


@steps.register
def _(layer: FeedForward, token: TokenView) -> Iterator[WalkthroughStep]:
    """Yield the projection up, the activation and the projection down."""
    yield from _neuron_steps(layer, token, {})


@steps.register
def _(layer: GatedFeedForward, token: TokenView) -> Iterator[WalkthroughStep]:
    """Yield the gate, and the steps of a layer without one."""
    gate = layer.gate(token.x)
    yield LinearStep(name="gate", linear=layer.gate, x=token.x, y=gate)
    yield from _neuron_steps(layer, token, {"gate": gate})


def _neuron_steps(layer: FeedForward, token: TokenView, gate: dict[str, Tensor]) -> Iterator[WalkthroughStep]:
    """Yield the steps; `gate` is the gate of each neuron, if there is one."""
    up, hidden = layer.up(token.x), token.seen("hidden")
    yield LinearStep(name="up", linear=layer.up, x=token.x, y=up)
    strongest = hidden.abs().topk(min(STRONGEST, len(hidden))).indices.tolist()
    numbers = {"x": up, "y": hidden, "how": layer.kind, "strongest": strongest, **gate}
    yield WalkthroughStep(name="activate", numbers=numbers, site="hidden", index={"position": token.index})
    yield LinearStep(name="down", linear=layer.down, x=hidden, y=layer.down(hidden))


@singledispatch
def embed_step(encoding: Position, x: Tensor, position: Tensor) -> WalkthroughStep | None:
    """Return the step that adds the embedding of a position [1, 1] to x [D]; None if there is none."""
    if type(encoding).embed is Position.embed:
        return None
    y = encoding.embed(x[None, None], position)[0, 0]
    numbers = {"x": x, "p": y - x, "y": y}
    return WalkthroughStep(name="position", title="Add position embedding", formula="y = x + p", numbers=numbers)


@embed_step.register
def _(encoding: SinusoidalPosition, x: Tensor, position: Tensor) -> WalkthroughStep:
    numbers = {
        "x": x,
        "added": encoding.encodings(position)[0, 0],
        "y": encoding.embed(x[None, None], position)[0, 0],
    }
    layout = "pairs" if encoding.interleaved else "halves"
    return WalkthroughStep(name="position", numbers={**numbers, "how": "sinusoidal", "layout": layout})


@embed_step.register
def _(encoding: LearnedPosition, x: Tensor, position: Tensor) -> WalkthroughStep:
    row = int(position) + encoding.offset
    numbers = {"x": x, "added": encoding.table.weight[row], "y": encoding.embed(x[None, None], position)[0, 0]}
    return WalkthroughStep(name="position", numbers={**numbers, "how": "learned", "row": row})


@singledispatch
def rotate_step(encoding: Position, position: Tensor, numbers: dict[str, object]) -> WalkthroughStep:
    """Return the step of the rotation at a position [1, 1], with a query and a key before and after."""
    return WalkthroughStep(name="rotate", title="Rotate q and k", formula="y = R x", numbers=numbers)


@rotate_step.register
def _(encoding: RotaryPosition, position: Tensor, numbers: dict[str, object]) -> WalkthroughStep:
    layout = "halves" if encoding.rotate_pairs is rotate_halves else "pairs"
    angles = position.float() * encoding.frequencies(position.device)
    settings = {"layout": layout, "width": encoding.d_head, "theta": encoding.theta, "scaling": encoding.scaling}
    settings |= {"by": encoding.attention_factor, "angles": angles[0], "place": int(position)}
    return WalkthroughStep(name="rotate", numbers={**numbers, **settings})


@singledispatch
def bias_step(encoding: Position, head: int, numbers: dict[str, object]) -> WalkthroughStep:
    """Return the step of the bias of one head, with the scores before and after."""
    return WalkthroughStep(name="bias", title="Position bias", formula="y_j = x_j + added_j", numbers=numbers)


@bias_step.register
def _(encoding: RelativePosition, head: int, numbers: dict[str, object]) -> WalkthroughStep:
    return WalkthroughStep(name="bias", numbers={**numbers, "how": "relative"})


@bias_step.register
def _(encoding: AlibiPosition, head: int, numbers: dict[str, object]) -> WalkthroughStep:
    slope = float(alibi_slopes(encoding.n_heads, torch.device("cpu"))[head])
    return WalkthroughStep(name="bias", numbers={**numbers, "how": "alibi", "slope": slope})


@singledispatch
def norm_statistics(norm: nn.Module, x: Tensor) -> dict[str, object]:
    """Return what a norm measures of x [D], its settings and weights; or a title."""
    return {"title": type(norm).__name__, "formula": "y = norm(x)"}


@norm_statistics.register
def _(norm: nn.Identity, x: Tensor) -> dict[str, object]:
    return {"title": "no norm", "formula": "y = x"}


@norm_statistics.register
def _(norm: LayerNorm, x: Tensor) -> dict[str, object]:
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    measured = {"mean": float(x.mean()), "variance": float(x.var(correction=0))}
    bias = {} if norm.bias is None else {"bias": norm.bias}
    return {"how": "layer", **measured, "eps": norm.eps, "gain": norm.weight, **bias}


@norm_statistics.register
def _(norm: RMSNorm, x: Tensor) -> dict[str, object]:
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return {"how": "rms", "square": float(x.square().mean()), "eps": norm.eps, "gain": norm.weight}


@dataclass(frozen=True)
class _Keys:
    """The keys that a head attends to, and the one whose vectors are shown."""

    x: Tensor  # [D], what its key and value are computed from
    of: int  # the token
    before: int  # how many keys are shown before it
    encoding: Position
    causal: bool
    window: int


def _head_steps(layer: MultiHeadAttention, token: TokenView, keys: _Keys) -> Iterator[WalkthroughStep]:
    """Yield the steps of one head, then of the output projection."""
    weights, z = token.seen(f"{layer.prefix}pattern"), token.seen(f"{layer.prefix}z")
    yield from _vector_steps(layer, token, keys)
    first = max(0, min(keys.of - keys.before, len(weights) - SHOWN))
    yield from _score_steps(layer, token, keys, first)
    v = token.seen(f"{layer.prefix}v")[token.head * layer.n_kv_heads // layer.n_heads]
    gathered = {"first": first, "weights": weights, "rows": v[first : first + SHOWN], "y": z[token.head]}
    here = {"head": token.head, "position": token.index}
    yield WalkthroughStep(name="gather", numbers=gathered, site=f"{layer.prefix}z", index=here)
    numbers = {"heads": z, "y": z.flatten()}
    yield WalkthroughStep(name="join", numbers=numbers, site=f"{layer.prefix}z", index={"position": token.index})
    x = token.seen(layer.residual_input).flatten()
    yield LinearStep(name="out", linear=layer.out, x=x, y=layer.out(x))


def _vector_steps(layer: MultiHeadAttention, token: TokenView, keys: _Keys) -> Iterator[WalkthroughStep]:
    """Yield the query of the token, and the key and value of token `of`, as the kernel receives them."""
    head, d_head, prefix = token.head, layer.d_head, layer.prefix
    shared = head * layer.n_kv_heads // layer.n_heads
    q_last = token.seen(f"{prefix}q")[head, token.index]
    k_last, v_last = (token.seen(f"{prefix}{name}")[shared, keys.of] for name in "kv")
    q_at, k_at = {"head": head, "position": token.index}, {"head": shared, "position": keys.of}
    normed, rotates = not isinstance(layer.q_norm, nn.Identity), keys.encoding.rotates
    q, k = q_last, k_last
    if normed or rotates:  # otherwise the projections are the kernel's inputs
        queries = layer.query(token.x[None, None])[0, 0].unflatten(0, (-1, d_head))
        all_keys = layer.key(keys.x[None, None])[0, 0].unflatten(0, (-1, d_head))
        q, k = queries[head], all_keys[shared]

    def projection(name: str, linear: nn.Module, x: Tensor, y: Tensor, row: int) -> LinearStep:
        numbers = {"of": keys.of, "kv": shared}
        return LinearStep(name=name, linear=linear, x=x, y=y, first=row * d_head, numbers=numbers)

    query = projection("query", layer.query, token.x, q, head)
    key = projection("key", layer.key, keys.x, k, shared)
    added = getattr(layer, "value_embedding", None)
    v = v_last
    if isinstance(added, ValueEmbedding):
        v = layer.value(keys.x[None, None])[0, 0].unflatten(0, (-1, d_head))[shared]
    value = projection("value", layer.value, keys.x, v, shared)
    plain = not (normed or rotates)
    yield replace(query, site=f"{prefix}q", index=q_at) if plain else query
    yield replace(key, site=f"{prefix}k", index=k_at) if plain else key
    if isinstance(added, ValueEmbedding):
        yield value
        yield _value_embedding_step(added, token, keys, v, v_last, k_at)
    else:
        yield replace(value, site=f"{prefix}v", index=k_at)
    if normed:
        norms = [_norm_step(layer.q_norm, queries, head), _norm_step(layer.k_norm, all_keys, shared)]
        ends = [("q", q_at, q_last), ("k", k_at, k_last)]
        for step, (what, index, last) in zip(norms, ends, strict=True):
            said = replace(step, numbers={**step.numbers, "of": keys.of, "what": what})
            yield said if rotates else replace(said, y=last, site=f"{prefix}{what}", index=index)
        q, k = (step.y for step in norms)
    if rotates:
        numbers: dict[str, object] = {"x": q, "y": q_last, "x_key": k, "y_key": k_last}
        yield replace(rotate_step(keys.encoding, token.position, numbers), site=f"{prefix}q", index=q_at)


def _value_embedding_step(
    embedding: ValueEmbedding, token: TokenView, keys: _Keys, x: Tensor, y: Tensor, index: Mapping[str, int]
) -> WalkthroughStep:
    """Return the step that adds the embedding of token `of` to its value x [d] of one head."""
    added = embedding.table.weight[token.ids[0, keys.of]].unflatten(0, (-1, len(x)))[index["head"]]
    gate = 2 * torch.sigmoid(embedding.gate(keys.x))[index["head"]]
    return WalkthroughStep(
        name="value_embedding",
        numbers={"x": x, "e": added, "g": gate[None], "y": y},
        site="v",
        index=index,
        title="Value embedding",
        formula="y = x + g e",
        why="The head moves what the token itself is (e), as far as its gate (g, from 0 to 2) opens.",
    )


def _norm_step(norm: nn.Module, x: Tensor, head: int) -> NormStep:
    """Return the norm of one of the queries or keys x [H, d] of a token, which may be over all of them."""
    if not isinstance(norm, ProjectionNorm):
        return NormStep(norm=norm, x=x[head], y=norm(x[head]))
    # What it measures is of all heads; its gain and bias are shown for this one.
    measured = norm_statistics(norm.norm, x.flatten()).items()
    own = {name: one.view_as(x)[head] if isinstance(one, Tensor) else one for name, one in measured}
    y = norm.norm(x.flatten()).view_as(x)[head]
    return NormStep(norm=norm.norm, x=x[head], y=y, numbers={**own, "heads": len(x)})


def _score_steps(layer: MultiHeadAttention, token: TokenView, keys: _Keys, first: int) -> Iterator[WalkthroughStep]:
    """Yield the steps from q · k to the attention weights."""
    prefix, shared = layer.prefix, token.head * layer.n_kv_heads // layer.n_heads
    q, k = token.seen(f"{prefix}q")[token.head, token.index], token.seen(f"{prefix}k")[shared]
    scale, cap = layer.attend.scale, layer.attend.softcap
    # As the explicit kernel computes them.
    now = ((q[None, None, None] * scale) @ k[None, None].transpose(-2, -1))[0, 0, 0]
    now = now.to(torch.promote_types(now.dtype, torch.float32))
    numbers = {"q": q, "rows": k[first : first + SHOWN], "by": scale, "y": now}
    made = [WalkthroughStep(name="scores", numbers=numbers)]
    if cap is not None:
        now, before = cap * torch.tanh(now / cap), now
        made.append(WalkthroughStep(name="softcap", numbers={"x": before, "cap": cap, "y": now}))
    bias = keys.encoding.bias(token.position, token.positions)
    if bias is not None:
        added = bias[0, token.head, 0].to(now.dtype)
        now, before = now + added, now
        made.append(bias_step(keys.encoding, token.head, {"x": before, "added": added, "y": now}))
    scores, weights = token.seen(f"{prefix}scores"), token.seen(f"{prefix}pattern")
    visible = scores > -torch.inf
    if keys.causal or keys.window or not bool(visible.all()):
        counts = {"n_seen": int(visible.sum()), "n_keys": len(scores), "window": keys.window}
        made.append(WalkthroughStep(name="mask", numbers={"x": now, "seen": visible.to(torch.uint8), **counts}))
    here = {"head": token.head, "query": token.index}
    made[-1] = replace(made[-1], numbers={**made[-1].numbers, "y": scores}, site=f"{prefix}scores", index=here)
    numbers = {"x": scores, "y": weights, "largest": int(weights.argmax())}
    made.append(WalkthroughStep(name="softmax", numbers=numbers, site=f"{prefix}pattern", index=here))
    yield from (replace(step, numbers={**step.numbers, "first": first}) for step in made)
