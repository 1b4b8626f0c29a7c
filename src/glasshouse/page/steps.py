"""The way of one token through the model, step by step, with the numbers that the modules computed themselves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from glasshouse import spec
from glasshouse.config import Settings, Table, require
from glasshouse.errors import InputError
from glasshouse.inspection import Map, record
from glasshouse.inspection.patterns import softcap_of
from glasshouse.layers.attend import Explicit
from glasshouse.layers.attention import split_heads
from glasshouse.layers.context import Context
from glasshouse.layers.embedding import SegmentEmbedding
from glasshouse.layers.layout import lay_out
from glasshouse.layers.lora import LoRALinear
from glasshouse.layers.mask import Mask, make_mask
from glasshouse.layers.position import LearnedPosition, RotaryPosition, SinusoidalPosition, alibi_slopes
from glasshouse.models import Seq2Seq
from glasshouse.models.heads import Labels, Pool, Vocabulary
from glasshouse.models.stack import Stack
from glasshouse.page import wire
from glasshouse.page.following import logits_at, named
from glasshouse.page.question import Question
from glasshouse.page.trace import Trace, Traces

SHOWN = 12  # keys whose vectors are sent; the scores and weights of all are
CORNER = 8  # rows and columns of a weight matrix
TOP = 8  # tokens or labels
STRONGEST = 12  # neurons
# What each sublayer adds to the stream, and the stream after it.
ADDED = {"attention": "attn_out", "cross": "cross_attn_out", "feedforward": "ffn_out"}
AFTER = {"attention": "resid_mid", "cross": "cross_resid_mid", "feedforward": "resid_post"}


@dataclass(frozen=True)
class Steps(Settings):
    """What happens to one token on its way through the model, in one layer and one head?"""

    question: Question = field(default_factory=Question)
    position: int = -1
    layer: int = 0
    head: int = 0
    side: str = ""  # source: the way through the encoder of an encoder-decoder


@dataclass(frozen=True)
class Way:
    """The stack a token passes, where it stands there, and the layer and head that are looked at."""

    trace: Trace
    prefix: str
    stack: Stack
    ids: Tensor  # [1, S]
    position: int
    layer: int
    head: int

    @property
    def spec(self) -> spec.Spec:
        """What the model is."""
        return self.trace.model.spec

    @property
    def block(self) -> Any:  # noqa: ANN401 - torch types what a module holds as tensor or module
        """The layer."""
        return self.stack.blocks[self.layer]

    @property
    def place(self) -> Tensor:
        """The position as the model counts it, [1, 1]."""
        return lay_out(self.ids).positions[:, self.position : self.position + 1]

    def site(self, name: str, *axes: str) -> str:
        """Return the name of a site of the layer, with the part that is looked at."""
        here = {"head": self.head, "position": self.position, "query": self.position}
        part = ", ".join(f"{axis}={here[axis]}" for axis in axes or ("position",))
        return f"{self.prefix}{name}.{self.layer}[{part}]"

    def stream(self, layer: int) -> Tensor:
        """Return the stream after a layer, [S, D]; before the first where that is -1."""
        return self.trace.site(f"{self.prefix}embed" if layer < 0 else f"{self.prefix}resid_post.{layer}")


def steps(traces: Traces, ask: Steps) -> Table:
    """Return the steps of a token in order: each with what goes in, what comes out and the weights between."""
    trace = traces.of(ask.question)
    way = _way(trace, ask)
    with torch.no_grad():
        cards = [*_embedding(way), *_block(way), *_reading(way)]
    edited = {one.site.partition("[")[0] for one in ask.question.edits}
    for card in cards:
        card["changed"] = str(card["site"]).partition("[")[0] in edited
    return {
        "position": way.position,
        "layer": way.layer,
        "head": way.head,
        "side": ask.side,
        "n_layers": len(way.stack.blocks),
        "token": wire.tokens([int(way.ids[0, way.position])], trace.tok)[0],
        "cards": cards,
    }


def _way(trace: Trace, ask: Steps) -> Way:
    model = trace.model
    if ask.side not in ("", "source"):
        raise InputError(f"side is {ask.side!r}, but it must be 'source' or left out.")
    if ask.side and not isinstance(model, Seq2Seq):
        raise InputError("side is 'source', but only an encoder-decoder has a source; leave it out.")
    source = isinstance(model, Seq2Seq) and ask.side == "source"
    prefix, stack = trace.prefix, trace.stack
    if isinstance(model, Seq2Seq) and source:
        prefix, stack = "encoder.", model.encoder
    ids = trace.inputs[0 if source else -1]
    length, depth, n_heads = ids.shape[1], len(stack.blocks), model.spec.n_heads
    require(-length <= ask.position < length, "position", ask.position, f"within 0 and {length - 1}")
    require(0 <= ask.layer < depth, "layer", ask.layer, f"within 0 and {depth - 1}")
    require(0 <= ask.head < n_heads, "head", ask.head, f"within 0 and {n_heads - 1}")
    return Way(trace, prefix, stack, ids, ask.position % length, ask.layer, ask.head)


def _card(node: str, kind: str, site: str = "", **held: object) -> Table:
    """Return a step: where in the model it belongs, what kind it is, the site its output stands at, its numbers."""
    return {"node": node, "kind": kind, "site": site, **{name: _sent(one) for name, one in held.items()}}


def _sent(value: object) -> object:
    match value:
        case Tensor():
            return wire.packed(value)
        case float():
            return wire.number(value)
        case _:
            return value


# From the token to the first block ----------------------------------------------------------------------------


def _embedding(way: Way) -> list[Table]:
    model, position = way.trace.model, way.stack.position
    one = int(way.ids[0, way.position])
    table = model.token.table.weight
    first = max(0, min(one - 2, len(table) - 5))
    rows, x = table[first : first + 5, :CORNER], table[one]
    cards = [_card("embed", "embed", id=one, first=first, rows=rows, shape=list(table.shape), y=x)]
    if model.token.scale != 1.0:
        x, before = x * model.token.scale, x
        cards.append(_card("embed", "scale", x=before, by=model.token.scale, y=x))
    segment = getattr(model, "segment", None)
    if isinstance(segment, SegmentEmbedding):
        x, before = segment(x[None, None], None)[0, 0], x
        cards.append(_card("embed", "segment", x=before, added=segment.table.weight[0], y=x))
    if isinstance(position, LearnedPosition | SinusoidalPosition):
        x, before = position.embed(x[None, None], way.place)[0, 0], x
        if isinstance(position, LearnedPosition):
            row = int(way.place) + position.offset
            told: Table = {"row": row, "added": position.table.weight[row]}
        else:
            told = {"layout": "pairs" if position.interleaved else "halves", "added": position.codes(way.place)[0, 0]}
        cards.append(_card("embed", "position", x=before, y=x, how=way.spec.position.kind, **told))
    if not isinstance(way.stack.embed_norm, nn.Identity):
        cards.append(_norm("embed", way.stack.embed_norm, x))
    site = f"{way.prefix}embed[position={way.position}]"
    cards[-1] |= {"y": wire.packed(way.stream(-1)[way.position]), "site": site}
    return cards


def _norm(node: str, norm: Any, x: Tensor, y: Tensor | None = None, site: str = "") -> Table:  # noqa: ANN401
    """Return a norm with what it measures of a vector."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    numbers: Table = {"eps": float(norm.eps or torch.finfo(x.dtype).eps)}
    if isinstance(norm, nn.LayerNorm):
        numbers |= {"how": "layer", "mean": float(wide.mean()), "variance": float(wide.var(correction=0))}
        if norm.bias is not None:
            numbers["bias"] = norm.bias
    else:
        numbers |= {"how": "rms", "square": float(wide.square().mean())}
    return _card(node, "norm", site, x=x, gain=norm.weight, y=norm(x) if y is None else y, **numbers)


# One layer ----------------------------------------------------------------------------------------------------


def _block(way: Way) -> Iterator[Table]:
    seen = _inside(way)
    x = seen["resid_pre"]
    if way.layer > 0:
        yield _card("layers", "arrive", way.site("resid_pre"), y=x)
    for part in ADDED:
        if hasattr(way.block, part):
            yield from _sublayer(way, part, x, seen)
            x = seen[AFTER[part]]


def _inside(way: Way) -> dict[str, Tensor]:
    """Return what stands within the layer at the position: its block is called once more on what it was given."""
    trace, cross = way.trace, hasattr(way.block, "cross")
    wanted = ["resid_pre", "z", "attn_out", "resid_mid", "hidden", "ffn_out", "resid_post"]
    wanted += ["cross_z", "cross_attn_out", "cross_resid_mid"] if cross else []
    names = {name: way.site(name) for name in wanted}
    kept = {name: trace.traces.get(trace.question, site) for name, site in names.items()}
    if any(value is None for value in kept.values()):
        x = way.stream(way.layer - 1)[None]
        context = _context(way, x.dtype)

        def call() -> dict[str, Tensor]:
            with record(trace.model, *names.values()) as seen:
                way.block(x, context)
            return {name: seen[site] for name, site in names.items()}

        found = trace.run(call)
        for name, value in found.items():
            trace.traces.put(trace.question, names[name], value)
        return {name: value[0] for name, value in found.items()}
    return {name: value[0] for name, value in kept.items() if isinstance(value, Tensor)}


def _context(way: Way, dtype: torch.dtype) -> Context:
    """Return what the layers of the stack are told beside the stream, as the stack itself does."""
    layout = lay_out(way.ids)
    rotate, masks = way.stack.position.rotation(layout.positions, dtype), way.stack.masks(layout, None, dtype)
    if not hasattr(way.block, "cross"):
        return Context(rotate, masks)
    source = lay_out(way.trace.inputs[0])
    seen = make_mask(layout, source, causal=False, dtype=dtype)
    return Context(rotate, masks, memory=_memory(way.trace)[None], memory_mask=seen)


def _memory(trace: Trace) -> Tensor:
    """Return what the encoder hands to the decoder, [S, D]."""
    assert isinstance(trace.model, Seq2Seq)
    encoder = trace.model.encoder
    last = trace.site(f"encoder.resid_post.{len(encoder.blocks) - 1}")[None]
    read: Tensor = trace.run(lambda: encoder.norm(last))[0]
    return read


def _sublayer(way: Way, part: str, x: Tensor, seen: dict[str, Tensor]) -> Iterator[Table]:
    """Yield the steps of a sublayer, its norms where they stand, and the sum with the stream."""
    residual, order = way.block.get_submodule(part), way.spec.norm_order
    added, after = seen[ADDED[part]], seen[AFTER[part]]
    given = x
    if order != "after":
        given = residual.norm(x)
        yield _norm(f"{part}.norm", residual.norm, x, given)
    inner = _feedforward if part == "feedforward" else _attention
    *most, last = inner(way, part, given, seen)
    yield from most
    if order == "sandwich":  # what the layer gives, the norm takes
        yield last
        made = _raw(residual.layer, part, seen)
        yield _norm(f"{part}.norm_out", residual.norm_out, made, added, way.site(ADDED[part]))
    else:
        yield last | {"y": wire.packed(added), "site": way.site(ADDED[part])}
    if order == "after":
        total = x + added
        yield _card(f"{part}.add", "add", x=x, added=added, y=total)
        yield _norm(f"{part}.norm", residual.norm, total, after, way.site(AFTER[part]))
    else:
        yield _card(f"{part}.add", "add", way.site(AFTER[part]), x=x, added=added, y=after)


def _raw(layer: Any, part: str, seen: dict[str, Tensor]) -> Tensor:  # noqa: ANN401
    """Return what a layer gives, before anything is done to it."""
    made: Tensor = (
        layer.down(seen["hidden"]) if part == "feedforward" else layer.out(seen[f"{_mark(part)}z"].flatten())
    )
    return made


def _mark(part: str) -> str:
    """Return what the names of a part's sites begin with."""
    return "cross_" if part == "cross" else ""


def _linear(
    node: str, kind: str, linear: nn.Linear | LoRALinear, x: Tensor, y: Tensor, first: int = 0, **held: int
) -> Table:
    """Return a linear map, of which `y` is the rows from `first` on: a corner of its matrix, its bias."""
    base = linear.base if isinstance(linear, LoRALinear) else linear
    weight = base.weight[first : first + len(y), :]
    if isinstance(linear, LoRALinear):
        weight = torch.addmm(weight, linear.up[first : first + len(y)], linear.down, alpha=linear.choice.scale)
    told: Table = {} if base.bias is None else {"bias": base.bias[first : first + len(y)]}
    shape = [len(y), len(x)]
    return _card(node, kind, x=x, y=y, weight=weight[:CORNER, :CORNER], shape=shape, **told) | held


# Attention ----------------------------------------------------------------------------------------------------


def _attention(way: Way, part: str, x: Tensor, seen: dict[str, Tensor]) -> Iterator[Table]:
    """Yield the steps of one head, then how all heads are joined."""
    layer, mark = way.block.get_submodule(part).layer, _mark(part)
    attention = way.trace.map(f"{way.prefix}{mark}pattern.{way.layer}")
    weights = attention.weights(head=way.head, query=way.position)[0]
    # Of a source, the token that is looked at most shows how keys and values come about.
    of = int(weights.argmax()) if part == "cross" else way.position
    yield from _vectors(way, part, x, _memory(way.trace)[of] if part == "cross" else x, of, attention)
    first = max(0, min(of - (SHOWN // 2 if part == "cross" else SHOWN - 3), len(weights) - SHOWN))
    yield from _scores(way, part, attention, first)
    v = attention.kernel.v[0, way.head * attention.kernel.v.shape[1] // way.spec.n_heads]
    z = seen[f"{mark}z"]
    shown: Table = {"first": first, "weights": weights, "rows": v[first : first + SHOWN]}
    yield _card(part, "gather", way.site(f"{mark}z", "head", "position"), **shown, y=z[way.head])
    yield _card(part, "join", way.site(f"{mark}z"), heads=z, y=z.flatten())
    yield _linear(part, "out", layer.out, z.flatten(), layer.out(z.flatten()))


def _vectors(way: Way, part: str, x: Tensor, source: Tensor, of: int, attention: Map) -> Iterator[Table]:
    """Yield the query of the token, and the key and value of the token `of`, up to what the kernel was given."""
    layer, mark, s = way.block.get_submodule(part).layer, _mark(part), way.spec
    kernel, shared = attention.kernel, way.head * s.n_kv_heads // s.n_heads
    position = way.stack.position
    turns = part != "cross" and isinstance(position, RotaryPosition)
    last = {"q": kernel.q[0, way.head, way.position], "k": kernel.k[0, shared, of], "v": kernel.v[0, shared, of]}
    sites = {"q": way.site(f"{mark}q", "head", "position")} | {
        name: f"{way.prefix}{mark}{name}.{way.layer}[head={shared}, position={of}]" for name in ("k", "v")
    }
    q, k = last["q"], last["k"]
    told: Table = {"of": of, "kv": shared}
    plain = not (s.qk_norm or turns)  # what the linear maps give is then what the kernel takes
    if not plain:
        q = split_heads(layer.query(x[None, None]), s.d_head)[0, way.head, 0]
        k = split_heads(layer.key(source[None, None]), s.d_head)[0, shared, 0]
    q_site, k_site = (sites["q"], sites["k"]) if plain else ("", "")
    yield _linear(part, "query", layer.query, x, q, way.head * s.d_head, **told) | {"site": q_site}
    yield _linear(part, "key", layer.key, source, k, shared * s.d_head, **told) | {"site": k_site}
    yield _linear(part, "value", layer.value, source, last["v"], shared * s.d_head, **told) | {"site": sites["v"]}
    if s.qk_norm:
        normed = (layer.q_norm(q), layer.k_norm(k)) if turns else (last["q"], last["k"])
        yield _norm(part, layer.q_norm, q, normed[0], "" if turns else sites["q"]) | {"of": of, "what": "q"}
        yield _norm(part, layer.k_norm, k, normed[1], "" if turns else sites["k"]) | {"of": of, "what": "k"}
        q, k = normed
    if isinstance(position, RotaryPosition) and turns:
        yield _card(part, "rotate", sites["q"], x=q, y=last["q"], x_key=k, y_key=last["k"], **_turn(way, position))


def _turn(way: Way, position: RotaryPosition) -> Table:
    """Return by which angle each pair is turned at the position, and which coordinates are pairs."""
    choice = way.spec.position
    assert isinstance(choice, spec.Rotary)
    pairs = torch.arange(0, position.d_head, 2, device=way.ids.device, dtype=torch.float32)
    angles = way.place.float() * position.rescale(1.0 / position.theta ** (pairs / position.d_head))
    told = {"layout": choice.layout, "theta": choice.theta, "scaling": choice.scaling.kind, "place": int(way.place)}
    return {"angles": angles[0], "by": position.attention_factor, **told}


def _scores(way: Way, part: str, attention: Map, first: int) -> Iterator[Table]:
    """Yield what the products of query and keys become on their way to weights: the last is what the softmax gets."""
    kernel, mark = attention.kernel, _mark(part)
    n_keys = kernel.k.shape[2]
    shared = way.head * kernel.k.shape[1] // way.spec.n_heads
    q, k = kernel.q[:, way.head : way.head + 1, way.position : way.position + 1], kernel.k[:, shared : shared + 1]
    now = Explicit(kernel.attend.scale, 0.0).scores(q, k, Mask())[0, 0, 0]
    rows = k[0, 0, first : first + SHOWN]
    made = [_card(part, "scores", q=q[0, 0, 0], rows=rows, first=first, by=kernel.attend.scale, y=now)]
    if (cap := softcap_of(kernel.attend)) is not None:
        made.append(_card(part, "softcap", x=now, cap=cap, first=first))
        now = cap * torch.tanh(now / cap)
        made[-1]["y"] = wire.packed(now)
    bias = None if part == "cross" else way.stack.position.bias(way.place, lay_out(way.ids).positions)
    if bias is not None:
        told: Table = {"how": way.spec.position.kind, "added": bias[0, way.head, 0].to(now.dtype)}
        if told["how"] == "alibi":
            told["slope"] = float(alibi_slopes(way.spec.n_heads, bias.device)[way.head])
        made.append(_card(part, "bias", x=now, first=first, **told))
        now = now + told["added"]
        made[-1]["y"] = wire.packed(now)
    scores = attention.scores(head=way.head, query=way.position)[0]
    seen = scores > -torch.inf
    window = way.spec.window(way.layer) if part == "attention" else 0
    if (way.stack.causal and part == "attention") or window or not bool(seen.all()):
        told = {"seen": seen.to(torch.uint8), "n_seen": int(seen.sum()), "n_keys": n_keys, "window": window}
        made.append(_card(part, "mask", x=now, first=first, **told))
    made[-1] |= {"y": wire.packed(scores), "site": way.site(f"{mark}scores", "head", "query")}
    yield from made
    weights = attention.weights(head=way.head, query=way.position)[0]
    site = way.site(f"{mark}pattern", "head", "query")
    yield _card(part, "softmax", site, x=scores, y=weights, first=first, largest=int(weights.argmax()))


# Feed-forward -------------------------------------------------------------------------------------------------


def _feedforward(way: Way, part: str, x: Tensor, seen: dict[str, Tensor]) -> Iterator[Table]:
    """Yield the steps of the feed-forward layer."""
    layer, hidden = way.block.get_submodule(part).layer, seen["hidden"]
    up = layer.up(x)
    gate = layer.gate(x) if hasattr(layer, "gate") else None
    if gate is not None:
        yield _linear(part, "gate", layer.gate, x, gate)
    yield _linear(part, "up", layer.up, x, up)
    strongest = hidden.abs().topk(min(STRONGEST, len(hidden))).indices.tolist()
    told: Table = {} if gate is None else {"gate": gate}
    kind = way.spec.feedforward
    how = kind.kind + ("_tanh" if getattr(kind, "tanh", False) else "")
    yield _card(part, "activate", way.site("hidden"), x=up, y=hidden, how=how, strongest=strongest, **told)
    yield _linear(part, "down", layer.down, hidden, layer.down(hidden))


# From the last layer to what the model says -------------------------------------------------------------------


def _reading(way: Way) -> Iterator[Table]:
    depth, trace = len(way.stack.blocks), way.trace
    x = way.stream(depth - 1)[way.position]
    here = f"[position={way.position}]"
    if way.layer < depth - 1:
        yield _card("onward", "leave", f"{way.prefix}resid_post.{depth - 1}{here}", y=x)
    to_decoder = way.prefix != trace.prefix
    final = _memory(trace)[way.position] if to_decoder else trace.site(f"{way.prefix}final")[way.position]
    if not isinstance(way.stack.norm, nn.Identity):
        yield _norm("final", way.stack.norm, x, final, f"{way.prefix}final{here}")
    head = trace.model.head
    if to_decoder:
        yield _card("memory", "memory", y=final)
    elif isinstance(head, Vocabulary):
        yield from _vocabulary(way, head, final)
    elif isinstance(head, Labels):
        logits = logits_at(trace, way.position)
        pooled = isinstance(head.pool, Pool)
        yield _card("head", "labels", x=final, pooled=pooled, top=_top(way, logits, len(logits)), count=len(logits))
    else:
        yield _card("head", "vectors", y=final, pooled=isinstance(head, Pool))


def _vocabulary(way: Way, head: Vocabulary, x: Tensor) -> Iterator[Table]:
    if isinstance(head.transform, nn.Sequential):
        linear, activation, norm = head.transform
        assert isinstance(linear, nn.Linear | LoRALinear)
        bent = activation(linear(x))
        yield _linear("head", "transform", linear, x, linear(x)) | {
            "bent": wire.packed(bent),
            "how": way.spec.feedforward.kind,
        }
        yield _norm("head", norm, bent)
        x = norm(bent)
    logits = logits_at(way.trace, way.position)
    top = _top(way, logits, TOP)
    ids = [one["id"] for one in top]
    matrix = head.matrix(way.trace.model.token.table.weight)
    told: Table = {} if head.bias is None else {"bias": head.bias[ids]}
    tied = matrix is way.trace.model.token.table.weight
    told |= {"rows": matrix[ids, :CORNER], "shape": list(matrix.shape), "top": top, "tied": tied}
    yield _card("head", "logits", x=x, by=head.scale, **told)
    yield _card("head", "probabilities", top=top, count=len(logits), total=float(logits.logsumexp(-1)))


def _top(way: Way, logits: Tensor, count: int) -> list[Table]:
    """Return the likeliest tokens or labels, with their logits and probabilities."""
    chances = logits.softmax(-1)
    best = chances.topk(min(count, len(logits))).indices.tolist()
    return [
        {**name, "logit": wire.number(logits[one]), "probability": wire.number(chances[one])}
        for one, name in zip(best, named(way.trace, best), strict=True)
    ]


def opening(traces: Traces, question: Question, state: Table) -> list[tuple[str, Table]]:
    """Return what the view asks when it opens."""
    model = traces.subject.at(question.moment).model
    source = isinstance(model, Seq2Seq) and state.get("stepsSide") == "source"
    depth = model.spec.n_encoder_layers if source else model.spec.n_layers  # type: ignore[union-attr]
    at: Table = {"layer": min(state["layer"], depth - 1), "head": min(state["head"], model.spec.n_heads - 1)}
    if source:
        length = traces.of(question).inputs[0].shape[1]
        at |= {"position": min(state["key"], length - 1), "side": "source"}
    else:
        at["position"] = state["token"]
    return [("steps", {"question": question.table(), **at})]
