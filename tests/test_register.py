"""Registering kinds, and entry points of other packages: what is refused, when they are imported."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import glasshouse as gh
from glasshouse import registry, spec
from glasshouse.hub import FAMILIES
from glasshouse.hub.families.family import Family
from glasshouse.layers.feedforward import FeedForward
from glasshouse.page.manifest import VIEWS, views
from glasshouse.page.view import View
from glasshouse.training.schedule import Cosine

BROKEN = EntryPoint("mine", "a_package_that_is_not_there", "group")


@dataclass(frozen=True)
class Mish(spec.FeedForward):
    kind: ClassVar[str] = "mish"
    slope: float = 1.0


def make_mish(s: spec.TransformerSpec) -> FeedForward:
    return FeedForward(s, nn.Mish())


def activation(s: spec.Spec) -> nn.Module:
    return gh.build(s).get_submodule("stack.blocks.0.feedforward.layer.activation")


def test_a_kind_works_in_toml_with_its_settings(tmp_path: Path) -> None:
    gh.register(Mish, make_mish)
    (tmp_path / "run.toml").write_text(
        '[model]\npreset = "tiny-decoder"\nfeedforward = { kind = "mish", slope = 2 }\n[data]\n[train]\n'
    )
    run = gh.Run.load(tmp_path / "run.toml")
    s = gh.preset("tiny-decoder", **run.model.fields)  # type: ignore[union-attr]
    assert s.feedforward == Mish(2.0)
    assert isinstance(activation(s), nn.Mish)
    with pytest.raises(gh.ConfigError, match=r"feedforward.slop is not a setting of 'mish'; did you mean slope"):
        gh.preset("tiny-decoder", feedforward={"kind": "mish", "slop": 2})


def test_a_name_that_is_taken_is_refused_and_a_cell_that_runs_again_replaces_its_kind() -> None:
    gh.register(Mish, make_mish)
    before = gh.preset("tiny-decoder", feedforward="mish")

    @dataclass(frozen=True)
    class Other(spec.FeedForward):
        kind = "mish"

    with pytest.raises(gh.InputError, match=r"Other is named 'mish', which test_register.Mish already is"):
        gh.register(Other, make_mish)

    @dataclass(frozen=True)
    class Rotated(spec.Position):
        kind = "rotary"

    with pytest.raises(gh.InputError, match=r"'rotary', which glasshouse.spec.position.Rotary already is"):
        gh.register(Rotated, make_mish)
    again = dataclass(frozen=True)(type("Mish", (spec.FeedForward,), {"kind": "mish", "__module__": __name__}))
    gh.register(again, lambda s: FeedForward(s, nn.Hardswish()))
    assert isinstance(activation(gh.preset("tiny-decoder", feedforward="mish")), nn.Hardswish)
    assert isinstance(activation(replace(before, n_layers=1)), nn.Mish)  # a spec of before has the kind of before


@dataclass(frozen=True)
class Field(spec.Norm):
    kind: str = "field"


@dataclass(frozen=True)
class Nameless(spec.Norm):
    pass


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ((Mish,), "Mish is registered without build; give the function that builds it from the spec."),
        ((Mish, "mish"), "build is 'mish', but it must be a function of the spec."),
        ((nn.Mish,), "<class 'torch.nn.*> cannot be registered: it must be a dataclass that derives from gh.spec"),
        ((Mish(),), "Mish(slope=1.0) cannot be registered"),
        ((Field, print), 'kind is a field of Field; write kind: ClassVar[str] = "field" instead.'),
        ((Nameless, print), "the kind of Nameless is None, but it must be a name of its own, as in TOML."),
    ],
)
def test_what_is_no_kind_is_refused_in_one_sentence(given: tuple[Any, ...], sentence: str) -> None:
    with pytest.raises(gh.InputError) as error:
        gh.register(*given)
    assert sentence.partition("*")[0] in str(error.value)
    assert "mish" not in spec.FeedForward.kinds


def test_an_unregistered_kind_is_refused_by_name() -> None:
    sentence = "feedforward is Mish(slope=1.0), which is not registered; call gh.register(Mish, ...) first."
    with pytest.raises(gh.ConfigError) as error:
        gh.preset("tiny-decoder", feedforward=Mish())
    assert str(error.value) == sentence
    with pytest.raises(gh.ConfigError, match=r"^feedforward.kind is 'mish', but .* one of 'relu', .*'geglu', or"):
        gh.preset("tiny-decoder", feedforward="mish")
    with pytest.raises(gh.ConfigError, match=r"^train.objective.kind is 'mine', but .* one of 'dpo', .*, or be reg"):
        gh.Run.load("stdlib", "train.objective=mine")


def test_what_is_built_is_checked() -> None:
    gh.register(Mish, lambda s: nn.Mish())
    with pytest.raises(gh.InputError, match=r"'mish' was built as Mish, but it must be a glasshouse.*Sublayer"):
        gh.build(gh.preset("tiny-decoder", feedforward="mish"))


def test_a_kind_derived_from_another_needs_no_build_of_its_own() -> None:
    @dataclass(frozen=True)
    class Long(spec.Rotary):
        kind = "long"
        theta: float = 1e6

    gh.register(Long)
    model = gh.build(gh.preset("tiny-decoder", position="long"))
    assert model.stack.position.theta == 1e6  # type: ignore[union-attr]


@dataclass(frozen=True)
class Sgd(gh.training.Optimizer):
    kind: ClassVar[str] = "sgd"
    momentum: float = 0.9


@dataclass(frozen=True)
class Halving(gh.training.Schedule):
    kind: ClassVar[str] = "halving"
    every: int = 2

    def after_warmup(self, step: int, steps: int) -> float:
        return 0.5 ** (step // self.every)


def test_an_optimizer_and_a_schedule_of_ones_own(tmp_path: Path) -> None:
    gh.register(Sgd, lambda settings, model: torch.optim.SGD(model.parameters(), settings.lr, settings.momentum))
    gh.register(Halving)
    (tmp_path / "a.txt").write_text("to be or not to be " * 60)
    train = {"steps": 5, "batch_tokens": 32, "lr": 0.5, "out": str(tmp_path / "run"), "device": "cpu"}
    table = {
        "model": {"preset": "tiny-decoder", "n_layers": 1},
        "data": {"path": str(tmp_path / "a.txt"), "seq_len": 8, "vocab_size": 263},
        "train": {**train, "optimizer": {"kind": "sgd", "momentum": 0.5}, "schedule": {"kind": "halving"}},
    }
    used = []

    class Rates(gh.training.Callback):
        def on_step_end(self, trainer: gh.training.Trainer, step: int, metrics: dict[str, Any]) -> None:
            used.append(metrics["lr"])
            assert isinstance(trainer.train_step.optimizer, torch.optim.SGD)

    gh.train(gh.Run.from_dict(table), progress=False, callbacks=[Rates()])
    assert used == [0.5, 0.5, 0.25, 0.25, 0.125]
    assert gh.Run.load(tmp_path / "run").train.optimizer == Sgd(lr=1e-3, momentum=0.5)


# Entry points -----------------------------------------------------------------------------------------------


@pytest.fixture
def declared(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, EntryPoint]]:
    """Entry points by group and name, which a test fills."""
    found: dict[str, dict[str, EntryPoint]] = {}
    monkeypatch.setattr(registry, "entry_points", lambda group: found.get(group, {}))
    registry.load_entry_points.cache_clear()
    yield found  # type: ignore[misc]
    registry.load_entry_points.cache_clear()


def test_a_package_that_cannot_be_imported_is_named_and_breaks_nothing_else(
    declared: dict[str, dict[str, EntryPoint]], tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    groups = (registry.KINDS, registry.FAMILIES, registry.RECIPES, registry.VIEWS)
    declared |= {group: {"mine": BROKEN} for group in groups}
    gh.build(gh.preset("tiny-decoder"))
    gh.Run.load("stdlib")
    assert not recwarn.list
    sentence = r"the package a_package_that_is_not_there could not be imported \(ModuleNotFoundError: .*'mine' of gl"
    with pytest.warns(UserWarning, match=sentence), pytest.raises(gh.ConfigError, match=r"position.kind is 'ramp'"):
        gh.preset("tiny-decoder", position="ramp")
    with pytest.raises(gh.InputError, match=sentence):
        gh.Run.load("mine")
    assert "mine" in gh.training.recipes()
    with pytest.warns(UserWarning, match=sentence):
        assert views() == VIEWS
    with pytest.warns(UserWarning, match=sentence):  # none of ours has qk_norm with learned positions
        gh.save(gh.build(gh.preset("tiny-decoder", qk_norm=True, position="learned")), None, tmp_path / "model")
    config = (tmp_path / "model/config.json").read_text()
    assert '"model_type": "glasshouse"' in config
    (tmp_path / "model/config.json").write_text(config.replace('"model_type": "glasshouse"', '"model_type": "mine"'))
    with pytest.raises(gh.InputError, match=sentence):
        gh.load(tmp_path / "model")
    declared.clear()
    with pytest.raises(
        gh.StoreError, match=r"model_type = 'mine', which is not supported; gpt2, .* a package that adds"
    ):
        gh.load(tmp_path / "model")


def test_a_wrong_object_and_a_name_that_is_taken(declared: dict[str, dict[str, EntryPoint]]) -> None:
    declared[registry.FAMILIES] = {"mine": EntryPoint("mine", "math:pi", registry.FAMILIES)}
    with pytest.raises(gh.InputError, match=r"'mine' in glasshouse.families, which is a float, but .* a Family"):
        registry.load_entry_point(registry.FAMILIES, "mine", Family)
    declared[registry.VIEWS] = {
        "tokens": EntryPoint("tokens", "glasshouse.page.views.tokenization:VIEW", registry.VIEWS),
        "other": EntryPoint("other", "test_register:OTHER", registry.VIEWS),
        "third": EntryPoint("third", "test_register:THIRD", registry.VIEWS),
    }
    with pytest.warns(UserWarning, match="the page leaves out the view") as caught:
        assert views() == VIEWS
    assert [str(one.message).partition(": ")[2].split()[0] for one in caught] == ["'tokens'", "'lens'", "'next'"]
    # Ours comes first, so that no package changes what is loaded.
    declared[registry.RECIPES] = {"stdlib": BROKEN}
    assert gh.Run.load("stdlib").data.path == ("stdlib",)
    assert "gpt2" in FAMILIES


OTHER = View("other", "Other", {"lens": VIEWS["residual"].endpoints["lens"]}, lambda traces, forward_pass, state: [])

THIRD = replace(OTHER, name="third", endpoints={"next": VIEWS["residual"].endpoints["lens"]})  # of the page


@pytest.mark.long
def test_importing_and_building_look_for_no_package(tmp_path: Path) -> None:
    code = (
        "import sys, glasshouse as gh\n"
        "gh.preset('gpt2'), gh.Run\n"
        "from glasshouse import registry\n"
        "gh.build(gh.preset('tiny-decoder', position='rotary')), gh.Run.load('stdlib')\n"
        "print(registry.entry_points.cache_info().misses)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "0"


def test_schedules_keep_their_names() -> None:
    assert Cosine in gh.training.Schedule.kinds.values()
    assert set(gh.training.Schedule.kinds) == {"constant", "cosine", "linear", "wsd", "inverse_sqrt"}
