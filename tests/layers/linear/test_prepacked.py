"""Prepacked linear layers compared with F.linear, and inference copies with their models."""

from __future__ import annotations

import platform
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from spec_strategy import VOCABULARY, specs
from torch import Tensor, nn
from torch.nn import functional as F

import glasshouse as gh
from glasshouse import spec
from glasshouse.layers.linear import prepacked
from glasshouse.layers.linear.fused import linear_from_tensors
from glasshouse.layers.linear.linear import is_plain_linear
from glasshouse.layers.linear.prepacked import ColumnMajorLinear, PrepackedLinear, can_prepack, prepack_linears
from glasshouse.layers.module_swap import SwappedUnembedding, clone_sharing_parameters, swap_linears
from glasshouse.models import Decoder, Encoder, Seq2Seq

needs_prepacking = pytest.mark.skipif(not can_prepack(), reason="this build of torch cannot prepack")


@pytest.fixture
def prepack_small_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepack small weights too, and for inputs of a single row."""
    monkeypatch.setattr(prepacked, "MIN_WORK", 0)
    monkeypatch.setattr(prepacked, "MIN_ROWS", 1)


@pytest.fixture
def fresh_cache() -> Iterator[None]:
    can_prepack.cache_clear()
    yield
    can_prepack.cache_clear()


def run(model: nn.Module, seed: int = 0) -> Tensor:
    ids = torch.randint(0, VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        return model(ids, ids) if isinstance(model, Seq2Seq) else model(ids)


@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64") or not torch.backends.mkldnn.is_available(), reason="needs oneDNN"
)
def test_x86_can_prepack() -> None:
    """Or a fault in the layer itself would skip its tests."""
    assert can_prepack()


@needs_prepacking
def test_by_hand() -> None:
    linear = PrepackedLinear(torch.tensor([[1.0, 2.0], [-3.0, 0.5], [0.0, 4.0]]), torch.tensor([10.0, 20.0, 30.0]))
    rows = {(1.0, 1.0): [13.0, 17.5, 34.0], (2.0, 0.0): [12.0, 14.0, 30.0], (0.0, -2.0): [6.0, 19.0, 22.0]}
    x = torch.tensor([*rows, *rows])
    with torch.no_grad():
        assert linear(x).tolist() == [*rows.values(), *rows.values()]
        assert linear(x.view(2, 3, 2)).tolist() == [list(rows.values())] * 2
        assert linear(x[:1]).tolist() == [[13.0, 17.5, 34.0]]


@pytest.mark.few(3)
@needs_prepacking
@pytest.mark.parametrize("stored", ["as is", "transposed", "a slice of three"])
@pytest.mark.parametrize(("n", "k"), [(768, 768), (1000, 300), (257, 2048)])
@torch.no_grad()
def test_error_is_at_most_that_of_a_plain_sum(n: int, k: int, stored: str) -> None:
    """Libraries sum in different orders, most of them more accurately than one product after the other."""
    torch.manual_seed(0)
    weight, bias = torch.randn(n, k), torch.randn(n)
    if stored == "transposed":  # as GPT-2's weights are
        weight = weight.T.contiguous().T
    elif stored == "a slice of three":
        weight = torch.cat([torch.randn(n, k), weight, torch.randn(n, k)], 1)[:, k : 2 * k]
    linear = PrepackedLinear(weight, bias)
    many = torch.randn(64, k)
    truth = F.linear(many.double(), weight.double(), bias.double())
    plain = torch.zeros(len(many), n)
    for x, w in zip(many.T, weight.T, strict=True):
        plain += x[:, None] * w
    furthest = (plain + bias - truth).square().mean().sqrt()
    margin = 1 + 6 / (2 * n) ** 0.5  # a mean of n squares is off by sqrt(2 / n), its root by half of that
    for shape in [(1,), (4,), (8,), (33,), (2, 5), (3, 2, 2)]:
        rows = many[: torch.Size(shape).numel()]
        result = linear(rows.view(*shape, k))
        assert result.shape == (*shape, n)
        assert (result.view(-1, n) - truth[: len(rows)]).square().mean().sqrt() <= margin * furthest


@needs_prepacking
def test_non_contiguous_inputs() -> None:
    torch.manual_seed(0)
    weight = torch.randn(16, 24)
    linear = PrepackedLinear(weight)
    with torch.no_grad():
        for x in (torch.randn(24, 6).T, torch.randn(2, 24, 3).transpose(1, 2), torch.randn(6, 48)[:, ::2]):
            assert (linear(x) - F.linear(x, weight)).abs().max() < 1e-5
        assert linear(torch.randn(0, 24)).shape == (0, 16)


@settings(max_examples=15, deadline=None)
@given(specs())
def test_clone_sharing_parameters_equals_the_model(s: spec.Spec) -> None:
    model = gh.build(s).eval()
    clone = clone_sharing_parameters(model)
    assert type(clone) is type(model)
    assert clone.spec == model.spec
    assert [(name, type(module)) for name, module in clone.named_modules()] == [
        (name, type(module)) for name, module in model.named_modules()
    ]
    assert not set(clone.modules()) & set(model.modules())
    theirs = dict(model.named_parameters(remove_duplicate=False))
    assert {name: id(weight) for name, weight in clone.named_parameters(remove_duplicate=False)} == {
        name: id(weight) for name, weight in theirs.items()
    }
    assert run(clone).equal(run(model))


def test_hooks_are_cloned_and_new_ones_are_separate() -> None:
    model = gh.build(gh.preset("tiny-decoder")).eval()
    seen: list[str] = []
    model.stack.blocks[0].register_forward_hook(lambda *_: seen.append("forward"))
    model.stack.register_forward_pre_hook(lambda *_: seen.append("before"))
    clone = clone_sharing_parameters(model)
    run(clone)
    assert seen == ["before", "forward"]
    clone.register_forward_hook(lambda *_: seen.append("clone"))
    seen.clear()
    run(model)
    assert seen == ["before", "forward"]


def test_cloning_unusual_modules() -> None:
    """Buffers, a shared module, one that is None, an empty list; compiled code is not cloned."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = self.other = nn.Linear(2, 2)
            self.register_module("none", None)
            self.empty = nn.ModuleList()
            self.register_buffer("kept", torch.ones(1))
            self.register_buffer("dropped", torch.ones(1), persistent=False)
            self.number = 3

        def forward(self, x: Tensor) -> Tensor:
            return self.other(self.one(x)) * self.kept * self.number

    model = Odd().train()
    model.one.eval()
    model._compiled_call_impl = lambda _: None
    clone = clone_sharing_parameters(model)
    assert clone.one is clone.other
    assert clone.one is not model.one
    assert (clone.training, clone.one.training) == (True, False)
    assert clone.none is None
    assert clone.empty is not model.empty
    assert (clone.kept is model.kept, clone.dropped is model.dropped) == (True, True)
    assert clone.state_dict().keys() == model.state_dict().keys()
    assert clone(torch.ones(1, 2)).equal(model.forward(torch.ones(1, 2)))
    clone.one = nn.Linear(2, 2)
    assert model.one is model.other


@needs_prepacking
@pytest.mark.usefixtures("prepack_small_weights")
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(specs(), st.integers(0, 99))
def test_prepacking_changes_only_the_clone(s: spec.Spec, seed: int) -> None:
    torch.manual_seed(seed)
    model = gh.build(s).eval()
    modules, state = list(model.named_modules()), {name: t.clone() for name, t in model.state_dict().items()}
    before = run(model, seed)
    clone = clone_sharing_parameters(model)
    prepack_linears(clone, rows=8)
    assert not any(is_plain_linear(module) for module in clone.modules())
    assert isinstance(clone.head, SwappedUnembedding) == isinstance(s.head, spec.NextToken | spec.MaskedToken)
    assert [(name, id(module)) for name, module in model.named_modules()] == [(n, id(m)) for n, m in modules]
    assert all(t.equal(state[name]) for name, t in model.state_dict().items())
    assert run(model, seed).equal(before)
    # Rounding at 6e-8 a sum; norms of tiny vectors and three layers make it a few hundred times as large.
    assert (run(clone, seed) - before).abs().max() <= 1e-4 * (1 + before.abs().max())


@needs_prepacking
@pytest.mark.usefixtures("prepack_small_weights")
@pytest.mark.parametrize("head", [spec.MaskedToken(True, True, True), spec.MaskedToken(False, False, True)])
def test_head_keeps_its_transform(head: spec.MaskedToken) -> None:
    torch.manual_seed(0)
    model = gh.build(gh.preset("tiny-encoder", head=head, logit_scale=True, logit_softcap=0.5)).eval()
    clone = clone_sharing_parameters(model)
    prepack_linears(clone, rows=8)
    assert isinstance(clone.head, SwappedUnembedding)
    assert isinstance(clone.head.transform[0], PrepackedLinear)
    expected = run(model)
    assert (run(clone) - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("tied", [True, False])
@needs_prepacking
def test_large_head_is_prepacked_whether_tied_or_not(tied: bool) -> None:
    torch.manual_seed(0)
    s = gh.preset("tiny-decoder", vocab_size=2**13, logit_scale=True, head={"kind": "next_token", "tied": tied})
    model = gh.build(s).eval()
    nn.init.normal_(model.token_embedding.table.weight)
    clone = clone_sharing_parameters(model)
    prepack_linears(clone, rows=8)
    assert isinstance(clone.head, SwappedUnembedding)
    assert isinstance(clone.head.matmul, PrepackedLinear)
    assert not any(isinstance(module, PrepackedLinear) for module in clone.stack.modules())  # 64 x 256 is too small
    expected = run(model)
    assert (run(clone) - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert clone.make_cache(1, 4).keys[0].dtype == torch.float32


def test_unsupported_layers_are_not_replaced() -> None:
    for layer in (nn.Linear(1024, 511), nn.Linear(1024, 512).double(), nn.Linear(1024, 512, device="meta")):
        tree = nn.Sequential(layer)
        prepack_linears(tree, rows=8)
        assert tree[0] is layer


def test_single_rows_use_column_major_weights() -> None:
    torch.manual_seed(0)
    by_rows, by_columns = nn.Linear(300, 200), nn.Linear(200, 300)
    by_columns.weight = nn.Parameter(torch.randn(200, 300).T)
    tree = nn.Sequential(by_rows, by_columns)
    clone = clone_sharing_parameters(tree)
    prepack_linears(clone, rows=1)
    clone[1].bias = None
    by_columns.register_parameter("bias", None)
    for shape in [(300,), (1, 300), (1, 1, 300), (4, 300), (2, 3, 300)]:
        x = torch.randn(shape)
        assert clone(x).shape == tree(x).shape
        assert (clone(x) - tree(x)).abs().max() <= 1e-5 * tree(x).abs().max()
    assert clone(torch.randn(1, 0, 300)).shape == (1, 0, 300)
    for layer in clone:
        assert isinstance(layer, ColumnMajorLinear)
        assert layer.weight.stride(0) == 1
    assert clone[1].weight.data_ptr() == by_columns.weight.data_ptr()  # already column-major: no copy
    assert by_rows.weight.stride(1) == 1


@pytest.mark.usefixtures("fresh_cache")
def test_no_prepacking_without_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(1024, 512)
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_acl_supported", lambda: False)
    tree = nn.Sequential(layer)
    prepack_linears(tree, rows=8)
    assert tree[0] is layer
    monkeypatch.undo()
    can_prepack.cache_clear()
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    prepack_linears(tree, rows=8)
    assert tree[0] is layer


@pytest.mark.parametrize("kind", ["tiny-decoder", "tiny-encoder", "tiny-seq2seq"])
def test_swap_linears_visits_every_weight_once(kind: str) -> None:
    model: Decoder | Encoder | Seq2Seq = gh.build(gh.preset(kind))
    clone = clone_sharing_parameters(model)
    visited: list[tuple[Tensor, Tensor | None]] = []

    def note(weight: Tensor, bias: Tensor | None) -> nn.Module | None:
        visited.append((weight, bias))
        return None if len(visited) % 2 else nn.Identity()

    swap_linears(clone, note)
    expected = [(layer.weight, layer.bias) for layer in model.modules() if isinstance(layer, nn.Linear)]
    if hasattr(model.head, "unembedding"):
        expected.append((model.head.unembedding(model.token_embedding.table.weight), model.head.bias))
    assert sorted(map(id, (w for w, _ in visited))) == sorted(map(id, (w for w, _ in expected)))
    assert {id(w): id(b) for w, b in visited} == {id(w): id(b) for w, b in expected}
    swapped = sum(is_plain_linear(module) for module in model.modules())
    swapped -= sum(is_plain_linear(module) for module in clone.modules())
    assert swapped + isinstance(clone.head, SwappedUnembedding) == len(expected) // 2


def test_a_linear_layer_from_tensors_has_their_bias() -> None:
    weight, bias, x = torch.randn(3, 5), torch.randn(3), torch.randn(2, 5)
    assert linear_from_tensors(weight, bias)(x).equal(F.linear(x, weight, bias))
    assert linear_from_tensors(weight, None)(x).equal(F.linear(x, weight))
