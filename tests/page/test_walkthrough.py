"""The steps of a token: its numbers are those the model computes, and the formulas shown give them.

The reference works with raw weights, one token, head and key at a time, in float64; the compared numbers
were serialized as float32, half a unit of which is 6e-8 of a number, and rotary angles are float32 in the model too.
"""

from __future__ import annotations

import base64
import itertools
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import glasshouse as gh
from glasshouse import config
from glasshouse.errors import GlasshouseError
from glasshouse.inspection import scale
from glasshouse.page.endpoints import endpoints
from glasshouse.page.forward_pass import ForwardPass, PagePrompt, Scale
from glasshouse.page.model_loader import ModelLoader
from glasshouse.page.trace import TraceCache
from glasshouse.page.views.walkthrough import Walkthrough, initial_requests, walkthrough
from glasshouse.web import to_json

TEXT = PagePrompt("3 1 4 0 5 9", "2 6 7")
Named = tuple[str, str, Tensor]  # node, kind, what comes out


def make(kind: str = "tiny-decoder", **settings: object) -> gh.models.Model:
    """Build a small model whose every weight was shaken, so that no part of it does nothing."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 11, "d_model": 16, "n_heads": 4, "d_ff": 24}
    model = gh.build(gh.preset(kind, **(sizes | settings)), dtype=torch.float64).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.3)
    return model


def unpacked(packed: dict[str, Any]) -> Tensor:
    kind = torch.uint8 if "u8" in packed else torch.float32
    data = bytearray(base64.b64decode(packed.get("u8", packed.get("f32"))))
    return torch.frombuffer(data, dtype=kind).reshape(packed["shape"])


def close(a: Tensor, b: Tensor, tolerance: float = 1e-6) -> None:
    assert a.shape == b.shape
    a, b = a.double(), b.detach().double()
    finite = b.isfinite()
    assert torch.equal(a.isfinite(), finite)
    assert (a - b)[finite].abs().max() <= tolerance * max(1.0, float(b[finite].abs().max()))


def answer(
    model: gh.models.Model,
    text: PagePrompt = TEXT,
    forward_pass: ForwardPass | None = None,
    **params: Any,  # noqa: ANN401 - any parameter
) -> dict[str, Any]:
    """Send a request as the page does, with the response through JSON."""
    given = walkthrough(
        TraceCache(ModelLoader.from_model(model, None)), Walkthrough(forward_pass or ForwardPass(text), **params)
    )
    found: dict[str, Any] = json.loads(to_json(given))
    return found


# By hand ------------------------------------------------------------------------------------------------------


class Reference:
    """A transformer written out: vectors of one position at a time, from the weights by their names."""

    def __init__(self, model: gh.models.Model, part: str = "stack") -> None:
        self.s: Any = model.spec
        self.part = part
        self.weights = {name: one.detach() for name, one in model.state_dict().items()}
        self.causal = part != "encoder" and self.s.kind != "encoder"
        self.ids: list[int] = []

    def w(self, name: str) -> Tensor | None:
        return self.weights.get(f"{self.part}.{name}")

    def norm(self, name: str, x: Tensor, inside: bool = True) -> Tensor:
        name = f"{self.part}.{name}" if inside else name
        gain, bias, eps = self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"), self.s.norm.eps
        if self.s.norm.kind == "layer":
            x = x - x.sum() / len(x)
        y = x / torch.sqrt((x * x).sum() / len(x) + eps) * gain
        return y if bias is None else y + bias

    def linear(self, name: str, x: Tensor) -> Tensor:
        weight, bias = self.w(f"{name}.weight"), self.w(f"{name}.bias")
        assert weight is not None
        y = weight @ x
        return y if bias is None else y + bias

    def turned(self, x: Tensor, place: int) -> Tensor:
        y, d = x.clone(), int(len(x) * self.s.position.fraction)
        for i in range(d // 2):
            a, b = (2 * i, 2 * i + 1) if self.s.position.layout == "pairs" else (i, i + d // 2)
            angle = place * self.s.position.theta ** (-2 * i / d)
            y[a] = x[a] * math.cos(angle) - x[b] * math.sin(angle)
            y[b] = x[b] * math.cos(angle) + x[a] * math.sin(angle)
        return y

    def embedded(self, one: int, place: int) -> Iterator[Named]:
        s = self.s
        x = self.weights["token_embedding.table.weight"][one]
        yield "embed", "embed", x
        if s.embed_scale:
            x = x * math.sqrt(s.d_model)
            yield "embed", "scale", x
        if getattr(s, "n_segments", 0):
            x = x + self.weights["segment.table.weight"][0]
            yield "embed", "segment", x
        if s.position.kind == "learned":
            table = self.w("position.table.weight")
            assert table is not None
            x = x + table[place + s.position.offset]
            yield "embed", "position", x
        if s.position.kind == "sinusoidal":
            waves = [(i, place / 10_000 ** (2 * i / s.d_model)) for i in range(s.d_model // 2)]
            code = torch.zeros(s.d_model, dtype=torch.float64)
            for i, angle in waves:
                a, b = (2 * i, 2 * i + 1) if s.position.layout == "pairs" else (i, i + s.d_model // 2)
                code[a], code[b] = math.sin(angle), math.cos(angle)
            x = x + code
            yield "embed", "position", x
        if s.embed_norm:
            x = self.norm("embed_norm", x)
            yield "embed", "norm", x

    def bias(self, head: int, query: int, key: int) -> float:
        if self.s.position.kind == "alibi":
            return -(2.0 ** (-8 / self.s.n_heads * (head + 1))) * abs(query - key)
        table = self.w("position.table.weight")  # near enough that each distance has a bucket of its own
        assert table is not None
        if self.causal:
            return float(table[max(query - key, 0), head])
        ahead = self.s.position.n_buckets // 2 if key > query else 0
        return float(table[ahead + abs(query - key), head])

    def attended(
        self, name: str, part: str, head: int, query: int, given: list[Tensor], read: list[Tensor]
    ) -> Iterator[Named]:
        """Yield the steps of one head for one query; the last is what it gathered."""
        s, own = self.s, part == "attention"
        shared = head // (s.n_heads // s.n_kv_heads)
        rows = slice(head * s.d_head, (head + 1) * s.d_head), slice(shared * s.d_head, (shared + 1) * s.d_head)
        queries = self.linear(f"{name}.layer.query", given[query])
        keys = [self.linear(f"{name}.layer.key", x) for x in read]
        q, k = queries[rows[0]], [x[rows[1]] for x in keys]
        v = [self.linear(f"{name}.layer.value", x)[rows[1]] for x in read]
        stages = [("query", q), ("key", k), ("value", v)]
        gate = self.w(f"{name}.layer.value_embedding.gate.weight")
        if gate is not None:
            table = self.w(f"{name}.layer.value_embedding.table.weight")
            assert table is not None
            scales = [2 / (1 + math.exp(-float(gate[shared] @ x))) for x in read]
            v = [x + by * table[one][rows[1]] for x, by, one in zip(v, scales, self.ids, strict=True)]
            stages += [("value_embedding", v)]
        if s.qk_norm:
            if s.qk_norm_over == "projection":
                q = self.norm(f"{name}.layer.q_norm.norm", queries)[rows[0]]
                k = [self.norm(f"{name}.layer.k_norm.norm", x)[rows[1]] for x in keys]
            else:
                q, k = self.norm(f"{name}.layer.q_norm", q), [self.norm(f"{name}.layer.k_norm", x) for x in k]
            stages += [("norm", q), ("norm", k)]
        if own and s.position.kind == "rotary":
            q, k = self.turned(q, query), [self.turned(x, place) for place, x in enumerate(k)]
            stages += [("rotate", q)]
        by = s.d_head**-0.5 if s.attention_scale is None else s.attention_scale
        scores = torch.stack([q @ x * by for x in k])
        made = [("scores", scores)]
        if s.attention_softcap is not None:
            scores = torch.stack([s.attention_softcap * torch.tanh(x / s.attention_softcap) for x in scores])
            made.append(("softcap", scores))
        if own and s.position.kind in ("alibi", "relative"):
            scores = torch.stack([x + self.bias(head, query, key) for key, x in enumerate(scores)])
            made.append(("bias", scores))
        if own and self.causal:
            scores = torch.stack([x if key <= query else x - math.inf for key, x in enumerate(scores)])
            made.append(("mask", scores))
        weights = torch.exp(scores) / torch.exp(scores).sum()
        z = sum(w * x for w, x in zip(weights, v, strict=True))
        assert isinstance(z, Tensor)
        of = query if own else int(weights.argmax())
        yield from ((part, kind, x[of] if isinstance(x, list) else x) for kind, x in stages)
        yield from ((part, kind, x) for kind, x in made)
        yield part, "softmax", weights
        yield part, "gather", z

    def activated(self, x: Tensor) -> Tensor:
        kind = self.s.feedforward.kind
        if kind == "relu":
            return torch.stack([max(one, one * 0) for one in x])
        if kind == "gelu":
            return torch.stack([one * 0.5 * (1 + math.erf(one / math.sqrt(2))) for one in x])
        return torch.stack([one / (1 + math.exp(-one)) for one in x])

    def fed(self, name: str, x: Tensor) -> Iterator[Named]:
        up = self.linear(f"{name}.layer.up", x)
        if self.s.feedforward.kind == "swiglu":
            gate = self.linear(f"{name}.layer.gate", x)
            yield "feedforward", "gate", gate
            hidden = self.activated(gate) * up
        else:
            hidden = self.activated(up)
        yield "feedforward", "up", up
        yield "feedforward", "activate", hidden
        yield "feedforward", "down", self.linear(f"{name}.layer.down", hidden)

    def sublayer(
        self, name: str, part: str, stream: list[Tensor], memory: list[Tensor], head: int, before: list[Tensor]
    ) -> list[list[Named]]:
        """Return the steps of each position; the last of them is the stream after the sublayer."""
        s = self.s
        bare = s.norm_placement in ("post", "output")
        source = before if s.norm_placement == "parallel" else stream
        given = stream if bare else [self.norm(f"{name}.norm", x) for x in source]
        found: list[list[Named]] = []
        for place, x in enumerate(stream):
            here: list[Named] = [] if bare else [(f"{part}.norm", "norm", given[place])]
            if part == "feedforward":
                here += self.fed(name, given[place])
            else:
                read = memory if part == "cross" else given
                heads = [list(self.attended(name, part, one, place, given, read)) for one in range(s.n_heads)]
                joined = torch.cat([one[-1][2] for one in heads])
                here += [
                    *heads[head],
                    (part, "join", joined),
                    (part, "out", self.linear(f"{name}.layer.out", joined)),
                ]
            added = here[-1][2]
            if s.norm_placement in ("sandwich", "output"):
                added = self.norm(f"{name}.norm_out", added)
                here.append((f"{part}.norm_out", "norm", added))
            here.append((f"{part}.add", "add", x + added))
            if s.norm_placement == "post":
                here.append((f"{part}.norm", "norm", self.norm(f"{name}.norm", x + added)))
            found.append(here)
        return found

    def way(
        self, ids: list[int], position: int, layer: int, head: int, depth: int, memory: list[Tensor] | None = None
    ) -> tuple[list[Named], list[Tensor]]:
        """Return the steps of one token up to the final norm, and the vectors of all tokens there."""
        self.ids = ids
        begun = [list(self.embedded(one, place)) for place, one in enumerate(ids)]
        taken, stream = begun[position], [one[-1][2] for one in begun]
        for number in range(depth):
            if number == layer > 0:
                taken.append(("layers", "arrive", stream[position]))
            before = stream
            for part in ("attention", *(["cross"] if memory else []), "feedforward"):
                here = self.sublayer(f"blocks.{number}.{part}", part, stream, memory or [], head, before)
                stream = [one[-1][2] for one in here]
                if number == layer:
                    taken += here[position]
        if layer < depth - 1:
            taken.append(("onward", "leave", stream[position]))
        if self.s.final_norm:
            stream = [self.norm("norm", x) for x in stream]
            taken.append(("final", "norm", stream[position]))
        return taken, stream


def check(found: dict[str, Any], expected: list[Named]) -> None:
    """Hold the steps to those worked out by hand: the same ones in the same order, with the same numbers."""
    cards = [card for card in found["cards"] if card["node"] not in ("head", "memory")]
    assert [(card["node"], card["kind"]) for card in cards] == [(node, kind) for node, kind, _ in expected]
    for card, (_, _, y) in zip(cards, expected, strict=True):
        close(unpacked(card["y"]), y, 4e-6)


ORDERS, GROUPS = ("pre", "post", "sandwich", "output"), (4, 2, 1)
POSITIONS = ("sinusoidal", "learned", "rotary", "alibi", "relative")
FEEDS, NORMS = ("relu", "gelu", "swiglu"), ("layer", "rms")


# A third of the combinations, shifted so that every pair of choices is among them; `make page` tries them all.
@pytest.mark.few(4)
@pytest.mark.slow
@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize(("position", "order"), list(itertools.product(POSITIONS, (*ORDERS, "parallel"))))
def test_steps_of_a_decoder_match_their_formulas(position: str, order: str, every: int) -> None:
    first = (POSITIONS.index(position) + (*ORDERS, "parallel").index(order)) % every
    combinations = list(enumerate(itertools.product(GROUPS, FEEDS, NORMS)))
    for number, (shared, feed, norm) in combinations[first::every]:
        settings = {
            "n_kv_heads": shared,
            "position": position,
            "norm_placement": order,
            "feedforward": feed,
            "norm": norm,
        }
        model = make(n_layers=2, qk_norm=False, **settings)
        place, layer, head = (5, 0, 3)[number % 3], number % 2, number % 4
        expected, _ = Reference(model).way([3, 1, 4, 0, 5, 9], place, layer, head, 2)
        check(answer(model, position=place, layer=layer, head=head), expected)


EXTRAS: list[dict[str, Any]] = [
    {"position": {"kind": "rotary", "layout": "pairs", "theta": 50.0}, "qk_norm": True, "n_kv_heads": 2},
    {"position": "rotary", "qk_norm": False, "embed_norm": True, "embed_scale": True, "norm": "layer"},
    {"position": {"kind": "sinusoidal", "layout": "halves"}, "attention_softcap": 2.0, "attention_scale": 0.7},
    {"position": {"kind": "learned", "offset": 2}, "final_norm": False, "qk_norm": True, "norm_placement": "post"},
    {"position": "none", "qkv_bias": False, "out_bias": False, "ffn_bias": False, "d_head": 6},
    {"position": "alibi", "attention_softcap": 3.0, "norm": {"kind": "layer", "bias": False}},
    {"position": {"kind": "rotary", "fraction": 0.5}, "norm_placement": "parallel", "norm": "layer"},
    {"position": {"kind": "rotary", "fraction": 0.5, "layout": "pairs"}, "norm_placement": "output"},
    {"position": "rotary", "norm_placement": "output", "qk_norm": True, "qk_norm_over": "projection"},
    {"position": "none", "norm": "layer", "qk_norm": True, "qk_norm_over": "projection", "n_kv_heads": 2},
    {"position": "rotary", "value_embeddings": True, "n_kv_heads": 2, "norm": "rms", "logit_softcap": 2.0},
]


@pytest.mark.parametrize("settings", EXTRAS)
@pytest.mark.parametrize("kind", ["tiny-decoder", "tiny-encoder"])
def test_steps_of_rarer_variants_match_their_formulas(kind: str, settings: dict[str, Any]) -> None:
    feed = {"feedforward": "gelu"} if kind == "tiny-encoder" else {}
    model = make(kind, n_layers=2, **feed, **settings)
    expected, _ = Reference(model).way([3, 1, 4, 0, 5, 9], 2, 1, 3, 2)
    check(answer(model, position=2, layer=1, head=3), expected)


@pytest.mark.few(3)
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("order", ORDERS)
def test_steps_of_an_encoder_decoder_match_their_formulas(position: str, order: str) -> None:
    settings: dict[str, Any] = {"n_layers": 2, "n_encoder_layers": 3, "start_id": 1, "n_kv_heads": 2}
    model = make("tiny-seq2seq", position=position, norm_placement=order, final_norm=order != "post", **settings)
    text = PagePrompt("3 1 4 0 5", "2 6 7")
    source, memory = Reference(model, "encoder").way([3, 1, 4, 0, 5], 3, 1, 2, 3)
    check(answer(model, text, position=3, layer=1, head=2, side="source"), source)
    target, _ = Reference(model, "decoder").way([1, 2, 6, 7], 2, 1, 3, 2, memory)
    check(answer(model, text, position=2, layer=1, head=3), target)


def test_intermediate_values_match_the_formulas() -> None:
    model = make(n_layers=1, position="alibi", norm="layer", n_kv_heads=2, qk_norm=False, embed_scale=True)
    cards = {(card["node"], card["kind"]): card for card in answer(model, position=4, head=3)["cards"]}
    table = model.token_embedding.table.weight
    assert cards["embed", "embed"]["id"] == 5
    close(unpacked(cards["embed", "embed"]["rows"]), table[cards["embed", "embed"]["first"] :][:5, :8])
    assert cards["embed", "scale"]["by"] == 4.0
    x = 4.0 * table[5].detach()
    norm = cards["attention.norm", "norm"]
    assert norm["mean"] == pytest.approx(float(x.sum()) / 16)
    assert norm["variance"] == pytest.approx(float(((x - x.mean()) ** 2).sum()) / 16)
    layer = model.stack.blocks[0].attention.layer
    key = cards["attention", "key"]
    assert (key["kv"], key["of"], key["shape"]) == (1, 4, [4, 16])
    close(unpacked(key["weight"]), layer.key.weight[4:8, :8])
    close(unpacked(cards["attention", "query"]["weight"]), layer.query.weight[12:16, :8])
    bias = cards["attention", "bias"]
    assert bias["slope"] == 2**-8
    close(unpacked(bias["added"])[:5], torch.tensor([-4, -3, -2, -1, 0]) * 2.0**-8)
    mask = cards["attention", "mask"]
    assert unpacked(mask["seen"]).tolist() == [1, 1, 1, 1, 1, 0]
    assert (mask["n_seen"], mask["n_keys"], mask["window"]) == (5, 6, 0)
    assert unpacked(cards["attention", "scores"]["rows"]).shape == (6, 4)


def test_rotary_angles() -> None:
    model = make(position={"kind": "rotary", "theta": 100.0, "layout": "pairs"}, n_layers=1)
    (card,) = (card for card in answer(model, position=3)["cards"] if card["kind"] == "rotate")
    angles, x, y = (unpacked(card[name]) for name in ("angles", "x", "y"))
    assert card["place"] == 3
    close(angles, torch.tensor([3.0, 3.0 * 100 ** (-2 / 4)]))
    before, after = torch.view_as_complex(x.reshape(2, 2)), torch.view_as_complex(y.reshape(2, 2))
    close(torch.view_as_real(before * torch.exp(1j * angles)), torch.view_as_real(after))


@pytest.mark.parametrize(("layer", "theta"), [(0, 100), (1, 9)])
def test_a_layer_with_a_window_has_its_own_angles(layer: int, theta: float) -> None:
    position = {"kind": "rotary", "theta": 100.0, "layout": "pairs", "local_theta": 9.0}
    model = make(position=position, n_layers=2, windows=(0, 8))
    (card,) = (card for card in answer(model, position=3, layer=layer)["cards"] if card["kind"] == "rotate")
    angles, x, y = (unpacked(card[name]) for name in ("angles", "x", "y"))
    close(angles, torch.tensor([3.0, 3.0 * theta ** (-2 / 4)]))
    before, after = torch.view_as_complex(x.reshape(2, 2)), torch.view_as_complex(y.reshape(2, 2))
    close(torch.view_as_real(before * torch.exp(1j * angles)), torch.view_as_real(after))


def test_without_a_first_norm_attention_reads_the_stream_itself() -> None:
    model = make(norm_placement="pre", first_norm=False, n_layers=2)
    first, second = (
        next(card for card in answer(model, layer=layer)["cards"] if card["node"] == "attention.norm")
        for layer in (0, 1)
    )
    assert (first["title"], first["formula"]) == ("no norm", "y = x")
    close(unpacked(first["y"]), unpacked(first["x"]))
    assert second["how"] == "rms"


def test_the_angles_of_a_partial_rotation_are_those_of_its_width() -> None:
    model = make(position={"kind": "rotary", "theta": 100.0, "fraction": 0.5}, n_layers=1)
    (card,) = (card for card in answer(model, position=3)["cards"] if card["kind"] == "rotate")
    assert card["width"] == 2
    close(unpacked(card["angles"]), torch.tensor([3.0]))
    assert torch.equal(unpacked(card["x"])[2:], unpacked(card["y"])[2:])


def test_a_norm_over_all_heads_is_measured_over_all_and_shown_for_one() -> None:
    model = make(n_layers=1, norm="rms", n_kv_heads=2, qk_norm=True, qk_norm_over="projection")
    cards = answer(model, position=4, head=3)["cards"]
    (x,) = (unpacked(card["y"]) for card in cards if card["node"] == "attention.norm")
    norms = {card["what"]: card for card in cards if card["kind"] == "norm" and "what" in card}
    layer = model.stack.blocks[0].attention.layer
    for name, linear, norm, rows, count in (
        ("q", layer.query, layer.q_norm, slice(12, 16), 4),
        ("k", layer.key, layer.k_norm, slice(4, 8), 2),
    ):
        whole = linear.weight @ x.to(linear.weight) + (0 if linear.bias is None else linear.bias)
        assert norms[name]["square"] == pytest.approx(float((whole * whole).sum()) / len(whole), rel=1e-5)
        assert norms[name]["heads"] == count
        close(unpacked(norms[name]["x"]), whole[rows])
        close(unpacked(norms[name]["gain"]), norm.norm.weight[rows])


KINDS = [("tiny-decoder", ""), ("tiny-encoder", ""), ("tiny-seq2seq", ""), ("tiny-seq2seq", "source")]


@pytest.mark.few(3)
@pytest.mark.parametrize(("kind", "side"), KINDS)
@pytest.mark.parametrize("edited", [False, True])
def test_sites_match_record(kind: str, side: str, edited: bool) -> None:
    model = make(kind, n_layers=2)
    prefix = {"": "decoder." if kind == "tiny-seq2seq" else "", "source": "encoder."}[side]
    changed = [f"{prefix}z.1[head=2]", f"{prefix}hidden.1[position=2]"] if edited else []
    forward_pass = ForwardPass(TEXT, edits=tuple(Scale(site, 0.5) for site in changed))
    found = answer(model, forward_pass=forward_pass, position=2, layer=1, head=2, side=side)
    ids = [
        torch.tensor([[3, 1, 4, 0, 5, 9]]),
        torch.tensor([[*([model.spec.start_id] * (model.spec.start_id is not None)), 2, 6, 7]]),
    ]
    inputs = ids if kind == "tiny-seq2seq" else ids[:1]
    with (
        gh.edit(model, {site: scale(0.5) for site in changed}),
        gh.record(model, *(one["site"] for one in found["cards"] if one["site"])) as seen,
    ):
        logits = model(*inputs)
    named = [card for card in found["cards"] if card["site"]]
    assert len(named) >= 10
    for card in named:
        if card["kind"] == "join":
            close(unpacked(card["heads"]), seen[card["site"]][0])
        else:
            close(unpacked(card["y"]), seen[card["site"]][0])
    flagged = {card["kind"] for card in found["cards"] if card["changed"]}
    assert flagged == ({"gather", "join", "activate"} if edited else set())
    if not side:
        own = logits[0, 2].softmax(-1)
        (said,) = (card["top"] for card in found["cards"] if card["kind"] == "probabilities")
        assert [one["id"] for one in said] == own.topk(8).indices.tolist()
        assert [one["probability"] for one in said] == pytest.approx(own.topk(8).values.tolist())
        assert [one["logit"] for one in said] == pytest.approx([float(logits[0, 2, one["id"]]) for one in said])


def test_the_head_of_an_encoder_is_shown_with_its_transform() -> None:
    model = make("tiny-encoder", n_layers=1)
    found = {card["kind"]: card for card in answer(model, position=1)["cards"] if card["node"] == "head"}
    assert list(found) == ["transform", "norm", "logits", "probabilities"]
    reference = Reference(model, "head")
    x = unpacked(found["transform"]["x"]).double()
    y = reference.linear("transform.0", x)
    close(unpacked(found["transform"]["y"]), y)
    bent = reference.activated(y)
    close(unpacked(found["transform"]["bent"]), bent)
    final = reference.norm("transform.2", bent)
    close(unpacked(found["norm"]["y"]), final)
    logits = model.token_embedding.table.weight @ final + model.head.bias
    best = found["logits"]["top"]
    assert [one["logit"] for one in best] == pytest.approx([float(logits[one["id"]]) for one in best], abs=1e-5)
    assert found["probabilities"]["total"] == pytest.approx(float(logits.exp().sum().log()), abs=1e-5)


@pytest.mark.parametrize(
    ("kind", "head", "last"),
    [
        ("tiny-encoder", {"kind": "sequence_classification", "n_labels": 3, "labels": ["a", "b", "c"]}, "labels"),
        ("tiny-encoder", {"kind": "token_classification", "n_labels": 3}, "labels"),
        ("tiny-encoder", {"kind": "pooled"}, "vectors"),
        ("tiny-decoder", {"kind": "none"}, "vectors"),
    ],
)
def test_outputs_of_other_heads(kind: str, head: dict[str, Any], last: str) -> None:
    model = make(kind, head=head)
    card = answer(model, position=1)["cards"][-1]
    assert card["kind"] == last
    if last == "labels":
        logits = model(torch.tensor([[3, 1, 4, 0, 5, 9]]))[0]
        logits = logits if head["kind"] == "sequence_classification" else logits[1]
        assert {one["id"]: one["logit"] for one in card["top"]} == pytest.approx(
            dict(enumerate(logits.tolist())), rel=1e-5
        )


@pytest.mark.parametrize("kind", ["tiny-decoder", "tiny-encoder", "tiny-seq2seq"])
def test_another_layer_or_head_needs_no_forward_pass(kind: str) -> None:
    model = make(kind, n_layers=3)
    traces = TraceCache(ModelLoader.from_model(model, None))
    trace = traces.trace(ForwardPass(TEXT))
    trace.activation(f"{trace.prefix}final")
    passes: list[int] = []
    blocks: list[int] = []
    model.register_forward_pre_hook(lambda *_: passes.append(1))
    for block in trace.stack.blocks:
        block.register_forward_pre_hook(lambda *_: blocks.append(1))
    for layer, head in ((0, 0), (2, 1), (2, 3)):
        walkthrough(traces, Walkthrough(ForwardPass(TEXT), layer=layer, head=head))
    assert (len(passes), len(blocks)) == (0, 2)


def test_of_many_keys_a_few_are_shown_around_the_token() -> None:
    text = PagePrompt(" ".join(str(one % 11) for one in range(40)))
    model = make(n_layers=1, windows=[8])
    for place, first in ((2, 0), (20, 11), (39, 28)):
        cards = {
            card["kind"]: card for card in answer(model, text, position=place)["cards"] if card["node"] == "attention"
        }
        assert cards["scores"]["first"] == cards["gather"]["first"] == first
        assert unpacked(cards["scores"]["rows"]).shape[0] == 12
        seen = [max(0, place - 7) <= key <= place for key in range(40)]
        assert unpacked(cards["mask"]["seen"]).bool().tolist() == seen
        assert cards["mask"]["n_seen"] == sum(seen)
        assert unpacked(cards["softmax"]["y"]).sum() == pytest.approx(1)


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        ({"position": 6}, "position is 6, but it must be within 0 and 5."),
        ({"layer": 2}, "layer is 2, but it must be within 0 and 1."),
        ({"head": -1}, "head is -1, but it must be within 0 and 3."),
        ({"side": "source"}, "side is 'source', but only an encoder-decoder has a source; leave it out."),
        ({"side": "left"}, "side is 'left', but it must be 'source' or left out."),
    ],
)
def test_invalid_selections_are_rejected(ask: dict[str, Any], said: str) -> None:
    with pytest.raises(GlasshouseError) as error:
        answer(make(n_layers=2), **ask)
    assert str(error.value) == said


@pytest.mark.parametrize("kind", ["tiny-decoder", "tiny-seq2seq"])
def test_a_saved_page_includes_the_initial_requests(kind: str) -> None:
    traces = TraceCache(ModelLoader.from_model(make(kind), None))
    state = {"token": 3, "key": 9, "layer": 7, "head": 9, "walkthrough_side": "source"}
    (name, body) = initial_requests(traces, ForwardPass(TEXT), state)[0]
    source = {"side": "source", "position": 5} if kind == "tiny-seq2seq" else {"position": 3}
    assert name == "walkthrough"
    assert body == {"forward_pass": ForwardPass(TEXT).to_json(), "layer": 1, "head": 3, **source}
    endpoints()[name].handler(traces, config.parse(endpoints()[name].params, body))
