"""Kinds that the package does not have: everything that asks the layers works on them without knowing them.

An attention with an output gate, a feed-forward layer whose activation is a product, a position embedding that is a
multiple of one learned vector, and a norm by the largest coordinate. Each is a dataclass, a module and a call of
`gh.register`.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import glasshouse as gh
from glasshouse import config, spec
from glasshouse.inspection import walkthrough as layer_walkthrough
from glasshouse.layers import lora
from glasshouse.layers.attention import Attention, merge_heads, split_heads
from glasshouse.layers.context import Context
from glasshouse.layers.embedding import Embedding
from glasshouse.layers.flops import FlopCount
from glasshouse.layers.linear.linear import Linear
from glasshouse.layers.norm import Norm
from glasshouse.layers.position import Position
from glasshouse.layers.sublayer import NEURONS, VECTORS, LayerSite, Sublayer
from glasshouse.models.flops import FlopEstimator
from glasshouse.page.forward_pass import ForwardPass, PagePrompt
from glasshouse.page.model_loader import ModelLoader
from glasshouse.page.trace import TraceCache
from glasshouse.page.views.walkthrough import Walkthrough, walkthrough
from glasshouse.web import to_json


@dataclass(frozen=True)
class GatedAttention(spec.SoftmaxAttention):
    """Softmax attention whose heads are multiplied by a gate before the output projection."""

    kind: ClassVar[str] = "gated"


class OutputGate(nn.Module):
    def forward(self, z: Tensor, gate: Tensor) -> Tensor:
        return z * gate.sigmoid()


class GatedAttentionLayer(Attention):
    residual_input = "gated_z"

    def __init__(self, s: spec.TransformerSpec, index: int) -> None:
        super().__init__(s, index)
        self.gate = Linear(s.d_model, s.n_heads * s.d_head, bias=False)
        self.output_gate = OutputGate()

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        q, k, v, gate = (split_heads(one(x), self.d_head) for one in (self.query, self.key, self.value, self.gate))
        return self.out(merge_heads(self.output_gate(self.attend_heads(q, k, v, ctx), gate)))

    def sites(self) -> list[LayerSite]:
        return [*super().sites(), LayerSite("gated_z", VECTORS, "output_gate", "output")]

    def add_flops(self, count: FlopCount, trained: bool) -> bool:
        count.add(self.gate, trained)
        return super().add_flops(count, trained)


@layer_walkthrough.steps.register
def _(layer: GatedAttentionLayer, token: layer_walkthrough.TokenView) -> Iterator[layer_walkthrough.WalkthroughStep]:
    *most, out = layer_walkthrough.attention_steps(layer, token)
    yield from most
    gate = layer.gate(token.x)
    yield layer_walkthrough.LinearStep(name="gate", title="Output gate", linear=layer.gate, x=token.x, y=gate)
    yield out


@dataclass(frozen=True)
class Bilinear(spec.FeedForward):
    """The product of two linear layers, projected down."""

    kind: ClassVar[str] = "bilinear"
    gated: ClassVar[bool] = True


class BilinearFeedForward(Sublayer):
    residual_input = "hidden"

    def __init__(self, s: spec.TransformerSpec) -> None:
        super().__init__()
        self.left = Linear(s.d_model, s.d_ff, bias=s.ffn_bias)
        self.right = Linear(s.d_model, s.d_ff, bias=s.ffn_bias)
        self.down = Linear(s.d_ff, s.d_model, bias=s.ffn_bias)

    @property
    def residual_projection(self) -> nn.Linear:
        return self.down

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        return self.down(self.left(x) * self.right(x))

    def sites(self) -> list[LayerSite]:
        return [LayerSite("hidden", NEURONS, "down", 0)]


@dataclass(frozen=True)
class Ramp(spec.Position):
    """A learned vector times the position, up to a tenth of max_len positions."""

    kind: ClassVar[str] = "ramp"

    def limit(self, max_len: int) -> int:
        return max_len // 10


class RampPosition(Position):
    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.slope = Embedding(1, d_model)

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + positions[..., None] * self.slope.weight[0]


@dataclass(frozen=True)
class MaxNorm(spec.Norm):
    """Divide by the largest absolute coordinate, and scale."""

    kind: ClassVar[str] = "max"


class MaxNormLayer(Norm):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        return x / x.abs().amax(-1, keepdim=True) * self.gain

    def frozen(self, x: Tensor, direction: Tensor) -> tuple[Tensor, Tensor | float]:
        return direction * self.gain / x.abs().amax(-1, keepdim=True), 0.0


KINDS: dict[str, object] = {
    "attention": GatedAttention(),
    "feedforward": Bilinear(),
    "position": Ramp(),
    "norm": MaxNorm(),
}


@pytest.fixture(autouse=True)
def _registered() -> None:
    gh.register(GatedAttention, GatedAttentionLayer)
    gh.register(Bilinear, BilinearFeedForward)
    gh.register(Ramp, lambda s, causal: RampPosition(s.d_model))
    gh.register(MaxNorm, lambda settings, width: MaxNormLayer(width))


def make(*names: str, **settings: Any) -> gh.models.Decoder:  # noqa: ANN401
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "d_model": 32, "n_heads": 4, "n_kv_heads": 2, "d_ff": 48, "max_len": 320}
    table = config.dump(gh.preset("tiny-decoder", **sizes))
    s = replace(spec.parse(table), **{name: KINDS[name] for name in names}, init=spec.Normal(0.3), **settings)
    model = gh.build(s)
    assert isinstance(model, gh.models.Decoder)
    return model.eval()


EACH = [(name,) for name in KINDS] + [tuple(KINDS)]
every_kind = pytest.mark.parametrize("names", EACH, ids=["+".join(names) for names in EACH])
IDS = torch.tensor([[3, 14, 15, 9, 26, 5], [35, 8, 9, 7, 9, 3]])


@every_kind
def test_parameters_initialization_and_adapters(names: tuple[str, ...]) -> None:
    model = make(*names)
    assert gh.count_parameters(model.spec) == sum(weight.numel() for weight in model.parameters())
    started = gh.build(replace(model.spec, init=spec.ZeroOutput()))
    x = started.token_embedding(IDS)
    first = started.stack.position.embed(x, torch.arange(6).expand(2, 6))
    with gh.record(started, "resid_pre.0", "resid_post.1") as seen:
        started(IDS)
    torch.testing.assert_close(seen["resid_pre.0"], first)
    assert torch.equal(seen["resid_post.1"], seen["resid_pre.0"])  # every block starts as the identity
    linears = lora.block_linears(model)
    assert ("stack.blocks.0.attention.layer.gate" in linears) == ("attention" in names)
    assert ("stack.blocks.1.feedforward.layer.left" in linears) == ("feedforward" in names)


@pytest.mark.few(4)
@every_kind
@pytest.mark.parametrize("frozen", [(), ("token_embedding", "stack.position", "stack.blocks.0")])
def test_flops_equal_torchs_count(names: tuple[str, ...], frozen: tuple[str, ...]) -> None:
    model = make(*names).train()
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    with FlopCounterMode(display=False) as counter:
        model(IDS).sum().backward()
    counts = counter.get_flop_counts()["Global"]
    counted = sum(number for op, number in counts.items() if "bmm" not in str(op) and "mm" in str(op))
    flops = FlopEstimator(model)
    flops.stack.scores = 0  # which torch does not count on a CPU
    assert flops(IDS) == counted


@every_kind
def test_sites_and_contributions_to_the_residual_stream(names: tuple[str, ...]) -> None:
    model = make(*names)
    new = [f"gated_z.{layer}" for layer in range(2)] if "attention" in names else []
    absent = {
        "feedforward": ["gate.", "hidden_pre"],
        "norm": ["attn_norm_scale", "ffn_norm_scale", "final_norm_scale"],
    }
    lacks = tuple(site for name in names for site in absent.get(name, []))  # what these kinds do not name
    plain = [name for name in gh.inspection.sites(make()) if not name.startswith(lacks)]
    assert sorted(gh.inspection.sites(model)) == sorted([*plain, *new])
    with gh.record(model, "*") as seen:
        logits = model(IDS)
    for layer in range(2):
        for part, given in (("attention", "gated_z" if new else "z"), ("feedforward", "hidden")):
            project: Any = model.get_submodule(f"stack.blocks.{layer}.{part}.layer").residual_projection
            values = seen[f"{given}.{layer}"]
            made = project(merge_heads(values) if part == "attention" else values)
            torch.testing.assert_close(seen[f"{'attn' if part == 'attention' else 'ffn'}_out.{layer}"], made)
    found = gh.attribute(model, IDS, token=7, neurons=[0])
    assert found.heads.shape == (2, 2, 4)
    torch.testing.assert_close(sum(found.components().values()), logits[:, -1, 7], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.neurons[0].sum(1), found.feedforward[:, 0], rtol=1e-4, atol=1e-4)
    assert gh.head_scores(model, IDS).induction.shape == (2, 4)
    with gh.edit(model, {"z.0": gh.ablate_head(1)}):
        assert not torch.equal(model(IDS), logits)


@every_kind
def test_generation_with_a_cache(names: tuple[str, ...]) -> None:
    model = make(*names)
    prompts = [[3, 14, 15], [9, 26, 5, 35, 8]]
    engine = gh.Engine(model, None, slots=1, max_len=20)  # fuses what shares an input
    requests = [engine.submit(prompt, gh.SamplingParams(max_new_tokens=8)) for prompt in prompts]
    engine.run()
    for prompt, request in zip(prompts, requests, strict=True):
        ids = list(prompt)
        for _ in range(8):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
        assert request.completions()[0].ids == ids[len(prompt) :]


def test_the_limit_of_a_position_is_asked_of_it() -> None:
    model = make("position")
    assert (model.spec.max_len, model.spec.position_limit) == (320, 32)
    with pytest.raises(gh.GlasshouseError, match="32"):
        gh.Engine(model, None, max_len=33)
    with pytest.raises(gh.GlasshouseError, match="the text has 33 tokens, but the limit is 32"):
        step_through(model, PagePrompt(" ".join(["1"] * 33)))


@every_kind
def test_saved_and_loaded(names: tuple[str, ...], tmp_path: Path) -> None:
    model = make(*names)
    gh.save(model, None, tmp_path / "model")
    again, _ = gh.load(tmp_path / "model")
    assert again.spec == model.spec
    assert torch.equal(again(IDS), model(IDS))


def unpack(packed: dict[str, Any]) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(packed["f32"])), dtype=torch.float32).view(packed["shape"])


def step_through(model: gh.models.Model, prompt: PagePrompt, **params: int) -> list[dict[str, Any]]:
    request = Walkthrough(ForwardPass(prompt), **params)
    found = walkthrough(TraceCache(ModelLoader.from_model(model, None)), request)
    cards: list[dict[str, Any]] = json.loads(to_json(found))["cards"]
    return cards


@pytest.mark.few(6)
@every_kind
@pytest.mark.parametrize("placement", ["pre", "post", "sandwich", "output", "parallel"])
def test_step_through(names: tuple[str, ...], placement: str) -> None:
    model = make(*names, norm_placement=placement)
    cards = step_through(model, PagePrompt("3 14 15 9 26 5"), position=4, layer=1, head=2)
    sites = [card["site"] for card in cards if card["site"]]
    with gh.record(model, *sites) as seen:
        model(IDS[:1])
    for card in cards:
        if card["site"] and card["kind"] != "join":
            torch.testing.assert_close(unpack(card["y"]), seen[card["site"]][0], rtol=1e-4, atol=1e-5)
    titles = {card["title"] for card in cards if "title" in card}
    expected = {
        "attention": "Output gate",
        "feedforward": "BilinearFeedForward",
        "position": "Add position embedding",
        "norm": "MaxNormLayer",
    }
    assert titles == {expected[name] for name in names}
