"""A model whose modules differ from those of its spec is refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import glasshouse as gh
from glasshouse.errors import InputError
from glasshouse.layers import lora
from glasshouse.models import Model, checked_weights

FFN = "stack.blocks.0.feedforward.layer"


def make(preset: str = "tiny-decoder", **overrides: object) -> Model:
    return gh.build(gh.preset(preset, init="normal", **overrides)).eval()


def put(path: str, module: nn.Module) -> Callable[[Model], object]:
    above, _, last = path.rpartition(".")
    return lambda model: setattr(model.get_submodule(above), last, module)


def grow_table(model: Model) -> None:
    model.token_embedding.table.weight = nn.Parameter(torch.zeros(300, 64))


def add_bias(model: Model) -> None:
    model.get_submodule(f"{FFN}.up").bias = nn.Parameter(torch.zeros(128))


CHANGES: list[tuple[str, Callable[[Model], object]]] = [
    ("stack.blocks.0.feedforward is Linear", put("stack.blocks.0.feedforward", nn.Linear(64, 64))),
    (rf"{FFN}.up is Linear\(in_features=64, out_features=10", put(f"{FFN}.up", nn.Linear(64, 10, bias=False))),
    (rf"{FFN}.activation is Tanh\(\), but the spec has SiLU\(\)", put(f"{FFN}.activation", nn.Tanh())),
    ("stack.norm is RMSNorm.*eps=1.0", lambda model: setattr(model.stack.norm, "eps", 1.0)),
    ("the model has extra.bias, which its spec does not have", put("extra", nn.Linear(3, 3))),
    ("the model has seen, which its spec", lambda model: model.register_buffer("seen", torch.ones(2))),
    ("the model has stack.blocks.2", lambda model: model.stack.blocks.append(copy.deepcopy(model.stack.blocks[0]))),
    ("the model has no module stack.blocks.1,", lambda model: model.stack.blocks.__delitem__(1)),
    (f"the model has no module {FFN}.up", lambda model: delattr(model.get_submodule(FFN), "up")),
    (r"token_embedding.table.weight has shape \[300, 64\], but the spec needs \[256, 64\]", grow_table),
    (f"{FFN}.up is Linear.*bias=True", add_bias),
    (f"the model lacks {FFN}.up.weight", lambda model: setattr(model.get_submodule(f"{FFN}.up"), "weight", None)),
    ("blocks.1.* and .*blocks.0.* share one parameter", lambda m: m.stack.blocks.__setitem__(1, m.stack.blocks[0])),
    ("query is LoRALinear", lambda model: lora.attach(model, lora.LoRA())),
]


@pytest.mark.parametrize(("sentence", "change"), CHANGES, ids=[sentence[:30] for sentence, _ in CHANGES])
def test_changed_modules_are_named(sentence: str, change: Callable[[Model], object]) -> None:
    model = make()
    change(model)
    with pytest.raises(InputError, match=sentence):
        checked_weights(model)


@pytest.mark.parametrize("preset", ["tiny-decoder", "tiny-encoder", "tiny-seq2seq"])
def test_edits_and_merged_lora_are_no_change(preset: str) -> None:
    model = make(preset, dropout=0.1)
    names = [name for name, _ in model.named_parameters()]
    sites = [name for name in gh.inspection.sites(model) if name.endswith("pattern.0")]
    with gh.edit(model, dict.fromkeys(sites, lambda pattern: pattern)):
        assert list(checked_weights(model)) == names
    lora.attach(model, lora.LoRA())
    lora.merge(model)
    assert list(checked_weights(model)) == names
    model.get_submodule("stack" if preset != "tiny-seq2seq" else "encoder").drop = nn.Identity()
    assert list(checked_weights(model)) == names


def test_other_modules_are_refused() -> None:
    with pytest.raises(InputError, match="the model is a Sequential, but"):
        checked_weights(nn.Sequential(make()))
