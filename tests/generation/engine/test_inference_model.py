"""The inference copy of a model: same outputs, hooks and other layer types kept, bounded memory."""

from __future__ import annotations

import gc
import shutil
from typing import Any

import pytest
import torch
from examples import first_of
from torch import Tensor, nn

import glasshouse as gh
from glasshouse.generation.engine.inference_model import prepare_for_inference, weight_copy_bytes
from glasshouse.layers.attention import FusedQKVAttention
from glasshouse.layers.linear import prepacked

SLOTS = (1, 2, 8)


@pytest.fixture(autouse=True)
def _prepack_small_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepack small weights too."""
    monkeypatch.setattr(prepacked, "MIN_WORK", 0)


def make_model(kind: str = "llama-small", **settings: object) -> Any:  # noqa: ANN401 (any model)
    torch.manual_seed(2)
    shape = {"n_layers": 2, "d_model": 32, "n_heads": 4, "d_ff": 48, "vocab_size": 64, "max_len": 32}
    return gh.build(gh.preset(kind, **(shape | settings))).eval()


def logits_of(model: nn.Module, rows: int = 2) -> Tensor:
    ids = torch.arange(rows * 5).view(rows, 5) % 64
    with torch.no_grad():
        return model(ids, ids) if isinstance(model, gh.models.Seq2Seq) else model(ids)


@pytest.mark.few(8)
@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("weights", ["own", "copy"])
@pytest.mark.parametrize("kind", ["llama-small", "gpt2", "t5-small", "vaswani-base"])
def test_outputs_equal_the_model(kind: str, weights: Any, slots: int) -> None:  # noqa: ANN401 (a literal)
    model = make_model(kind, dropout=0.5)
    tree = prepare_for_inference(model.train(), weights, slots)
    assert model.training
    expected = logits_of(model.eval())
    for rows in (1, 2):
        # Sums of at most 48 numbers in another order, through two layers: some hundred roundings of 6e-8.
        difference = (logits_of(tree, rows) - expected[:rows]).abs().max()
        assert difference <= 1e-5 * expected.abs().max()
    assert any(isinstance(one, FusedQKVAttention) for one in tree.modules()) == (weights == "copy" and slots != 2)


@pytest.mark.few(6)
@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize(
    "path",
    [
        "stack.blocks.0.attention",
        "stack.blocks.0.attention.layer",
        "stack.blocks.0.attention.layer.query",
        "stack.blocks.0.attention.layer.attend",
        "stack.blocks.0.attention.layer.out",
        "stack.blocks.0.attention.drop",
        "stack.blocks.0.feedforward.layer",
        "stack.blocks.0.feedforward.layer.up",
        "stack.blocks.0.feedforward.layer.down",
        "head",
    ],
)
def test_hooks_on_any_module_are_called(path: str, slots: int) -> None:
    model = make_model(init={"kind": "normal", "std": 0.2})
    plain, calls = logits_of(prepare_for_inference(model, "copy", slots)), []
    model.get_submodule(path).register_forward_hook(lambda _module, _args, out: calls.append(1) or -2 * out)
    hooked = logits_of(prepare_for_inference(model, "copy", slots))
    expected = logits_of(model)
    assert (plain - expected).abs().max() > 0.05 * expected.abs().max()  # the hook changes the output
    assert (hooked - expected).abs().max() <= 1e-5 * expected.abs().max()
    calls.clear()
    logits_of(prepare_for_inference(model, "int8", slots))
    assert calls == [1]


@pytest.mark.parametrize("slots", SLOTS)
def test_subclasses_of_linear_are_not_replaced(slots: int) -> None:
    class Twice(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    model = make_model()
    layer = model.stack.blocks[1].attention.layer
    for name in ("query", "out"):
        other = Twice(32, 32, bias=False)
        other.weight = getattr(layer, name).weight
        setattr(layer, name, other)
    expected = logits_of(model)
    assert (
        logits_of(prepare_for_inference(model, "copy", slots)) - expected
    ).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("slots", first_of([*SLOTS]))
@pytest.mark.parametrize("weights", ["own", "copy", "int8", "int4"])
def test_weights_are_copied_at_most_once(weights: Any, slots: int) -> None:  # noqa: ANN401 (a literal)
    model = make_model(d_model=128, vocab_size=512, d_ff=256)
    before = tensor_bytes()
    tree = prepare_for_inference(model, weights, slots)
    small = 2**16  # norms; of int8, sixteen bytes a row for scales and sums
    assert tensor_bytes() - before <= weight_copy_bytes(model, weights) + small
    assert tree is not model


def tensor_bytes() -> int:
    gc.collect()
    there = [one for one in gc.get_objects() if type(one) in (Tensor, nn.Parameter)]
    opaque = sum(one.numel() * one.element_size() for one in there if one.is_mkldnn)
    storages = (one.untyped_storage() for one in there if not one.is_mkldnn)
    return opaque + sum({one.data_ptr(): one.nbytes() for one in storages}.values())


def test_autocast_and_other_dtypes() -> None:
    model = make_model()
    with torch.autocast("cpu", torch.bfloat16):
        for slots in SLOTS:
            assert logits_of(prepare_for_inference(model, "copy", slots)).isfinite().all()
    wide = make_model().double()
    for slots in SLOTS:
        assert logits_of(prepare_for_inference(wide, "copy", slots)).equal(logits_of(wide))


@pytest.mark.long
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler")
def test_compiled_steps_on_the_cpu_give_the_same_tokens() -> None:
    """With int4, and a head in int8: what torch compiles by itself needs no test of ours."""
    model = make_model(n_layers=1, d_ff=64, init={"kind": "normal", "std": 0.2})
    texts = []
    for compiled in (False, True):
        engine = gh.Engine(model, slots=1, max_len=16, weights="int4", compile=compiled)
        request = engine.submit([1, 2, 3], max_new_tokens=4)
        engine.run()
        texts.append(request.ids)
    assert texts[0] == texts[1]
