"""What a registered module gives itself stays: drawn modules are built, trained, resumed, saved and loaded."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from process_groups import in_processes
from runs import assert_same, losses, table, weights
from torch import Tensor, nn

import glasshouse as gh
from glasshouse import device
from glasshouse.layers.attention import Attention
from glasshouse.layers.context import Context
from glasshouse.layers.linear.linear import Linear
from glasshouse.training import Run, train
from glasshouse.training.distributed.fsdp import check_shardable
from glasshouse.training.logging import plots

IDS = torch.tensor([[3, 14, 15, 9], [26, 5, 35, 8]])


@dataclass(frozen=True)
class Drawn(gh.spec.SoftmaxAttention):
    """Softmax attention that has more than its class: what, the settings say."""

    kind: ClassVar[str] = "drawn"
    features: tuple[str, ...] = ()


class DrawnAttention(Attention):
    """Self-attention with parameters, buffers and layers of every sort."""

    def __init__(self, s: gh.spec.TransformerSpec, index: int) -> None:
        super().__init__(s, index)
        assert isinstance(s.attention, Drawn)
        self.features, width = s.attention.features, s.d_model
        if "parameter" in self.features:
            self.temperature = nn.Parameter(torch.full((s.n_heads,), 1.5))
        if "scalar" in self.features:
            self.gain = nn.Parameter(torch.tensor(0.5 + index))
        if "identity" in self.features:
            self.mix = nn.Linear(width, width)
            nn.init.eye_(self.mix.weight)
            nn.init.constant_(self.mix.bias, 0.25)
        if "inherited" in self.features:
            nn.init.eye_(self.value.weight[: len(self.value.weight)])
        if "running" in self.features:
            self.register_buffer("running", torch.ones(width))
        if "constant" in self.features:
            self.register_buffer("constant", torch.tensor([[0.5]]))
        if "counter" in self.features:
            self.register_buffer("counter", torch.tensor(7))
        if "table" in self.features:
            self.register_buffer("table", torch.linspace(0.5, 1.5, width), persistent=False)
        if "attribute" in self.features:
            self.plain = torch.linspace(1.0, 2.0, width)
        if "tied" in self.features:
            self.there, self.back = (nn.Linear(width, width, bias=False) for _ in range(2))
            self.back.weight = self.there.weight
        if "nested" in self.features:
            layers = [nn.Sequential(nn.Linear(width, 4), nn.GELU(), nn.Linear(4, width)) for _ in range(2)]
            self.nested = nn.ModuleDict({"layers": nn.ModuleList(layers), "norm": nn.LayerNorm(width)})
        if "declared" in self.features:
            self.by_spec = Linear(width, width)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        for name in self.features:
            x = getattr(self, f"with_{name}")(x)
        return super().forward(x, ctx)

    def with_parameter(self, x: Tensor) -> Tensor:
        return x * self.temperature.mean()

    def with_scalar(self, x: Tensor) -> Tensor:
        return x * self.gain

    def with_identity(self, x: Tensor) -> Tensor:
        return self.mix(x)

    def with_inherited(self, x: Tensor) -> Tensor:
        return x

    def with_running(self, x: Tensor) -> Tensor:
        if self.training:
            self.running.mul_(0.9).add_(x.detach().abs().mean((0, 1)), alpha=0.1)
        return x / self.running

    def with_constant(self, x: Tensor) -> Tensor:
        return x * self.constant

    def with_counter(self, x: Tensor) -> Tensor:
        if self.training:
            self.counter.add_(1)
        return x * self.counter / (self.counter + 1)

    def with_table(self, x: Tensor) -> Tensor:
        return x * self.table

    def with_attribute(self, x: Tensor) -> Tensor:
        return x * self.plain

    def with_tied(self, x: Tensor) -> Tensor:
        return self.back(self.there(x))

    def with_nested(self, x: Tensor) -> Tensor:
        for layer in self.nested["layers"]:  # type: ignore[union-attr]
            x = x + layer(x)
        return self.nested["norm"](x)

    def with_declared(self, x: Tensor) -> Tensor:
        return x + self.by_spec(x)


# What each gives itself.
VALUES = {
    "parameter": {"temperature": torch.full((4,), 1.5)},
    "scalar": {"gain": torch.tensor(1.5)},  # of the second layer
    "identity": {"mix.weight": torch.eye(64), "mix.bias": torch.full((64,), 0.25)},
    "inherited": {"value.weight": torch.eye(32, 64)},
    "running": {"running": torch.ones(64)},
    "constant": {"constant": torch.tensor([[0.5]])},
    "counter": {"counter": torch.tensor(7)},
    "table": {"table": torch.linspace(0.5, 1.5, 64)},
    "nested": {"nested.norm.weight": torch.ones(64)},
    "declared": {"by_spec.bias": torch.zeros(64)},
}
FEATURES = ["parameter", "scalar", "identity", "inherited", "running", "counter", "table", "attribute", "tied"]
FEATURES += ["nested", "declared", "constant"]


def draw(number: int) -> tuple[str, ...]:
    """Draw four features; each is in one of the first three modules."""
    order = random.Random(number // 3).sample(FEATURES, len(FEATURES))
    return tuple(sorted(order[4 * (number % 3) :][:4]))


DRAWN = [draw(number) for number in range(10)]
every_module = pytest.mark.parametrize("features", DRAWN, ids="+".join)


@pytest.fixture(autouse=True)
def _registered() -> None:
    gh.register(Drawn, DrawnAttention)


def make(features: tuple[str, ...]) -> gh.models.Model:
    torch.manual_seed(1)
    return gh.build(gh.preset("tiny-decoder", n_kv_heads=2, attention={"kind": "drawn", "features": features})).eval()


def layer_of(model: gh.models.Model, number: int = 1) -> DrawnAttention:
    layer = model.get_submodule(f"stack.blocks.{number}.attention.layer")
    assert isinstance(layer, DrawnAttention)
    return layer


def tensors(module: nn.Module) -> dict[str, Tensor]:
    every = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}
    return {name: tensor.detach() for name, tensor in every.items()}


def test_every_feature_is_drawn() -> None:
    assert {one for features in DRAWN[:3] for one in features} == {*FEATURES}


@every_module
def test_a_module_keeps_the_values_that_it_gives_itself(features: tuple[str, ...], tmp_path: Path) -> None:
    model = make(features)
    layer, own = layer_of(model), tensors(layer_of(model))
    for feature in features:
        for name, value in VALUES.get(feature, {}).items():
            assert own[name].equal(value), name
    assert all(tensor.isfinite().all() for tensor in tensors(model).values())
    assert layer.query.weight.std().item() == pytest.approx(0.02, rel=0.1)  # 4,096 draws, so 1% is one deviation
    if "declared" in features:
        assert layer.by_spec.weight.std().item() == pytest.approx(0.02, rel=0.1)

    counted = sum({id(weight): weight.numel() for weight in model.parameters()}.values())
    assert gh.count_parameters(model.spec) == counted

    with torch.no_grad():  # so that loading must read them
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.01)
        for name in {"running", "counter"} & {*features}:
            getattr(layer, name).add_(3)
    gh.save(model, None, tmp_path / "model")
    loaded = gh.load(tmp_path / "model")[0]
    for found in (loaded, copy.deepcopy(model), copy.deepcopy(loaded)):
        there, here = tensors(found), tensors(model)
        assert there.keys() == here.keys()
        for name, tensor in here.items():
            assert there[name].equal(tensor), name
            assert there[name].dtype == tensor.dtype
        assert found(IDS).equal(model(IDS))
        if "tied" in features:
            assert layer_of(found).there.weight is layer_of(found).back.weight
        assert sum(weight.numel() for weight in found.parameters()) == counted
    with pytest.raises(gh.ConfigError, match="no transformers family can express this model"):
        gh.hub.export(model, None, tmp_path / "exported")
    if set(features) <= {"parameter", "scalar", "identity", "inherited", "tied", "nested", "declared"}:
        half = gh.load(tmp_path / "model", dtype="bfloat16")[0]
        assert {tensor.dtype for tensor in tensors(half).values()} == {torch.bfloat16}


def settings_of(features: tuple[str, ...], data_folder: Path, out: str, **choices: Any) -> dict[str, Any]:  # noqa: ANN401
    settings = table(data_folder, out=out, schedule="constant", **choices)
    model = {"preset": "tiny-decoder", "n_kv_heads": 2, "attention": {"kind": "drawn", "features": list(features)}}
    return {**settings, "model": model}


@pytest.mark.few(1)
@every_module
def test_a_resumed_run_equals_an_uninterrupted_one(features: tuple[str, ...], data_folder: Path) -> None:
    for out, steps in (("whole", 6), ("resumed", 3), ("resumed", 6)):
        train(Run.from_dict(settings_of(features, data_folder, out, steps=steps)), progress=False)
    assert_same(data_folder, "resumed", "whole")
    saved = weights(data_folder, "whole")
    for name, tensor in saved.items():
        assert tensor.isfinite().all(), name
    if "counter" in features:  # a call for each batch of the gradient accumulation, in both layers
        assert {int(saved[f"stack.blocks.{layer}.attention.layer.counter"]) for layer in (0, 1)} == {7 + 6 * 3}


# Not what depends on the batches of a process, and scalars, which are refused.
SHARED = tuple(one for one in FEATURES if one not in ("running", "counter", "scalar"))


def _train(rank: int, world_size: int, settings: dict[str, Any]) -> None:
    device.measure_peak_flops = lambda *_, **__: 1e12
    plots.draw = lambda *_: []
    gh.register(Drawn, DrawnAttention)
    train(Run.from_dict(settings), progress=False)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["shard", "replicate"])
@pytest.mark.parametrize("features", [SHARED, ("nested",)], ids="+".join)
def test_two_processes_train_what_one_does(
    features: tuple[str, ...], kind: str, data_folder: Path, tmp_path: Path
) -> None:
    settings = settings_of(features, data_folder, "two", steps=4)
    settings["train"]["parallel"] = {"kind": kind}
    settings["model"] |= {"dropout": 0.0, "embed_dropout": 0.0}
    in_processes(tmp_path, 2, _train, settings)
    del settings["train"]["parallel"]
    settings["train"]["out"] = str(data_folder / "one")
    train(Run.from_dict(settings), progress=False)
    assert losses(data_folder, "two") == pytest.approx(losses(data_folder, "one"), rel=1e-5)
    torch.testing.assert_close(weights(data_folder, "two"), weights(data_folder, "one"), rtol=1e-3, atol=1e-4)


# What a module cannot say


class Empty(Attention):
    def __init__(self, s: gh.spec.TransformerSpec, index: int) -> None:
        super().__init__(s, index)
        self.temperature = nn.Parameter(torch.empty(3))


class Lazy(Attention):
    def __init__(self, s: gh.spec.TransformerSpec, index: int) -> None:
        super().__init__(s, index)
        self.mix = nn.LazyLinear(4)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (Empty, r"stack\.blocks\.0\.attention\.layer\.temperature has no values; initialize it in"),
        (Lazy, r"stack\.blocks\.0\.attention\.layer\.mix\.weight has no shape before its first call; give"),
    ],
)
def test_a_parameter_without_values_or_shape_is_named(made: type[Attention], message: str) -> None:
    gh.register(Drawn, made)
    with pytest.raises(gh.ConfigError, match=message):
        gh.build(gh.preset("tiny-decoder", attention="drawn"))


def test_a_scalar_is_refused_by_several_processes() -> None:
    check_shardable(make(("parameter",)))
    with pytest.raises(gh.ConfigError, match=r"attention\.layer\.gain is a scalar, which several processes cannot"):
        check_shardable(make(("scalar",)))


def test_a_kind_needs_no_parameter_count() -> None:
    @dataclass(frozen=True)
    class Bare(gh.spec.Attention):
        kind: ClassVar[str] = "bare"

    gh.register(Bare, Attention)
    s = gh.preset("tiny-decoder")
    assert gh.count_parameters(replace(s, attention=Bare())) == gh.count_parameters(s) == 106_880


def test_loading_draws_nothing(tmp_path: Path) -> None:
    gh.save(make(("tied",)), None, tmp_path / "model")
    before = torch.get_rng_state()
    gh.load(tmp_path / "model")
    assert torch.get_rng_state().equal(before)


def test_settings_of_torch_are_as_before() -> None:
    before = torch.get_deterministic_debug_mode(), torch.initial_seed()
    make(("parameter",))
    assert (torch.get_deterministic_debug_mode(), torch.initial_seed()) == (before[0], 1)
    assert nn.Linear(2, 2).weight.isfinite().all()
    assert Linear(2, 2).weight.isfinite().all()
