"""LoRA by hand, its initialisation, and over specs of every kind: no effect at first, the same when merged.

Models run in float64: rounding is 1e-16 of the largest entry, a few dozen operations deep, and 1e-10 leaves margin
for that and nothing else.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from examples import up_to
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from spec_strategy import VOCABULARY, specs
from torch import Tensor, nn

import glasshouse as gh
from glasshouse import spec
from glasshouse.generation.engine.inference_model import prepare_for_inference
from glasshouse.layers import lora
from glasshouse.layers.linear.frozen_quantized import frozen_quantized_layers
from glasshouse.layers.linear.linear import Linear, is_plain_linear
from glasshouse.layers.lora import FrozenWeights, LoRA, LoRALinear
from glasshouse.layers.module_swap import clone_sharing_parameters
from glasshouse.models import Model, Seq2Seq


def make(s: spec.Spec) -> Model:
    """Build a model with random weights, so that no block is close to the identity."""
    model = gh.build(s, dtype=torch.float64).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.3)
    return model


def tiny(kind: str = "tiny-decoder") -> Model:
    torch.manual_seed(3)
    return make(gh.preset(kind, d_model=16, n_heads=2, n_kv_heads=2, d_ff=24, vocab_size=VOCABULARY))


def randomise(model: nn.Module) -> None:
    """Move lora_b away from zero, as training does."""
    for name, tensor in lora.adapter_state_dict(model).items():
        if name.endswith(".lora_b"):
            tensor.normal_(std=0.3)


@torch.no_grad()
def logits_of(model: Model) -> Tensor:
    ids = torch.arange(14).view(2, 7) * 5 % VOCABULARY
    return model(ids, ids) if isinstance(model, Seq2Seq) else model(ids)


def test_by_hand() -> None:
    base = nn.Linear(2, 2)
    layer = LoRALinear(base, LoRA(rank=1, alpha=3.0))
    with torch.no_grad():
        base.weight.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        base.bias.copy_(torch.tensor([10.0, 20.0]))
        layer.lora_a.copy_(torch.tensor([[1.0, -1.0]]))
        layer.lora_b.copy_(torch.tensor([[2.0], [0.5]]))
    # The base layer gives 5 + 2 + 10 and 15 + 4 + 20; the adapter 5 - 1 = 4, times 2 and 0.5, times 3 / 1.
    assert layer(torch.tensor([5.0, 1.0])).tolist() == [17 + 24, 39 + 6]
    merged = layer.merged()
    assert merged is base
    assert merged.weight.tolist() == [[1 + 6, 2 - 6], [3 + 1.5, 4 - 1.5]]
    assert merged.bias.tolist() == [10, 20]


def test_initial_weights_are_those_of_nn_linear_and_zero() -> None:
    torch.manual_seed(5)
    expected = nn.Linear(6, 4, bias=False).weight
    base = nn.Linear(6, 3)
    torch.manual_seed(5)
    layer = LoRALinear(base, LoRA(rank=4))
    assert layer.lora_a.equal(expected)
    assert layer.lora_b.equal(torch.zeros(3, 4))


@settings(max_examples=up_to(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    specs(),
    st.sets(st.sampled_from(["query", "key", "value", "out", "up", "down", "*"]), min_size=1),
    st.integers(1, 5),
)
def test_no_effect_at_first_and_the_same_when_merged(s: spec.Spec, targets: set[str], rank: int) -> None:
    model = make(s)
    names = list(model.state_dict())
    before = logits_of(model)
    lora.attach(model, LoRA(rank=rank, alpha=3.0, dropout=0.5, targets=tuple(sorted(targets))))
    assert logits_of(model).equal(before)  # bit-exact

    stacks = [m for m in model.modules() if isinstance(m, gh.models.stack.Stack)]
    inside = [m for stack in stacks for block in stack.blocks for m in block.named_modules()]
    adapted = {name.split(".")[-1] for name, module in inside if isinstance(module, LoRALinear)}
    left = {name.split(".")[-1] for name, module in inside if is_plain_linear(module)} - {"base"}
    every = {"query", "key", "value", "out", "up", "down"} | ({"gate"} if gated(s) else set())
    assert adapted == (every if "*" in targets else targets)
    assert left == every - adapted

    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert trained == set(lora.adapter_state_dict(model))

    randomise(model)
    attached = logits_of(model)
    lora.merge(model)
    assert list(model.state_dict()) == names
    assert all(weight.requires_grad for weight in model.parameters())
    assert (logits_of(model) - attached).abs().max() <= 1e-10 * max(1.0, float(attached.abs().max()))


def gated(s: spec.Spec) -> bool:
    """Return whether layers have a linear layer named gate: in the feed-forward layer, or for value embeddings."""
    depth = max(s.n_layers, getattr(s, "n_encoder_layers", 0))
    return isinstance(s.feedforward, spec.SwiGLU | spec.GeGLU) or s.has_value_embedding(min(1, depth - 1))


@pytest.mark.parametrize("kind", ["tiny-decoder", "tiny-encoder", "tiny-seq2seq"])
def test_training_step_changes_only_the_adapter(kind: str) -> None:
    model = tiny(kind)
    before = logits_of(model)
    lora.attach(model, LoRA(rank=2, targets=("*",)))
    randomise(model)
    started = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], lr=0.1)
    ids = torch.arange(7)[None]
    (model(ids, ids) if isinstance(model, Seq2Seq) else model(ids)).square().mean().backward()
    optimizer.step()
    own = lora.adapter_state_dict(model).keys()
    for name, weight in model.state_dict().items():
        assert weight.equal(started[name]) == (name not in own), name
    assert not logits_of(model).equal(before)


def test_dropout_follows_the_mode_of_the_model() -> None:
    model = tiny()
    lora.attach(model, LoRA(dropout=0.5))
    randomise(model)
    assert logits_of(model).equal(logits_of(model))  # adapters follow the model's eval mode
    layer = model.get_submodule("stack.blocks.0.attention.layer.query").train()
    x = torch.randn(5, 16, dtype=torch.float64)
    torch.manual_seed(7)
    out = layer(x)
    torch.manual_seed(7)
    dropped = nn.functional.dropout(x, 0.5)
    expected = layer.base(x) + dropped @ layer.lora_a.T @ layer.lora_b.T * 2.0  # alpha / rank = 16 / 8
    assert (out - expected).abs().max() <= 1e-13 * expected.abs().max()


def test_hooks_see_the_whole_layer_once_and_can_be_removed() -> None:
    model = tiny()
    path = "stack.blocks.0.attention.layer.query"
    seen: list[Tensor] = []
    handle = model.get_submodule(path).register_forward_hook(lambda module, inputs, out: seen.append(out))
    lora.attach(model, LoRA())
    randomise(model)
    logits_of(model)
    assert len(seen) == 1
    lora.merge(model)
    logits_of(model)
    assert len(seen) == 2
    # One product of 16 numbers with the sum of two matrices, or two products: 1e-15 and a little.
    assert (seen[0] - seen[1]).abs().max() <= 1e-13 * seen[0].abs().max()
    handle.remove()
    logits_of(model)
    assert len(seen) == 2


def test_merge_does_not_change_a_copy_that_shares_weights() -> None:
    model = tiny()
    lora.attach(model, LoRA())
    randomise(model)
    clone, before = clone_sharing_parameters(model), logits_of(model)
    lora.merge(model)
    assert logits_of(clone).equal(before)


@pytest.mark.parametrize("weights", ["own", "copy"])
@pytest.mark.parametrize("slots", [1, 8])
def test_inference_copy_equals_the_model(weights: str, slots: int) -> None:
    model = tiny().float()
    lora.attach(model, LoRA(dropout=0.5, targets=("*",)))
    randomise(model)
    expected = logits_of(model)
    # float32: sums of at most 24 numbers in another order through two layers, some hundred roundings of 6e-8.
    difference = (logits_of(prepare_for_inference(model, weights, slots)) - expected).abs().max()  # type: ignore[arg-type, type-var]
    assert difference <= 1e-5 * expected.abs().max()


def test_adapter_can_be_loaded_into_another_model() -> None:
    one, two = tiny(), tiny()
    for model in (one, two):
        lora.attach(model, LoRA(rank=3))
    randomise(one)
    assert not logits_of(two).equal(logits_of(one))
    lora.load_adapter(two, lora.adapter_state_dict(one))
    assert logits_of(two).equal(logits_of(one))


def test_mismatched_adapter_changes_nothing() -> None:
    model, other = tiny(), tiny()
    lora.attach(model, LoRA(rank=3))
    lora.attach(other, LoRA(rank=4))
    randomise(other)
    good = lora.adapter_state_dict(model)
    before = {name: tensor.clone() for name, tensor in good.items()}
    first = "stack.blocks.0.attention.layer.query.lora_a"
    for tensors, message in (
        (lora.adapter_state_dict(other), rf"{first} has shape \[4, 16\], but the model's has \[3, 16\]"),
        ({name: good[name] for name in good if name != first}, f"the adapter lacks {first}"),
        (good | {"stack.strange": torch.ones(1)}, "the model lacks stack.strange"),
    ):
        with pytest.raises(gh.InputError, match=message):
            lora.load_adapter(model, tensors)
        assert all(tensor.equal(before[name]) for name, tensor in lora.adapter_state_dict(model).items())


def test_unknown_target_suggests_the_nearest_and_freezes_nothing() -> None:
    model = tiny()
    with pytest.raises(gh.InputError, match=r"targets names 'querry', but .* did you mean query\?"):
        lora.attach(model, LoRA(targets=("value", "querry")))
    assert all(weight.requires_grad for weight in model.parameters())
    assert not lora.lora_layers(model)


def test_attaching_twice_or_merging_without_lora_raises() -> None:
    model = tiny()
    for needs in (lora.merge, lambda model: lora.load_adapter(model, {})):
        with pytest.raises(gh.InputError, match="the model has no LoRA; attach it first"):
            needs(model)
    lora.attach(model, LoRA(targets=("out",)))
    with pytest.raises(gh.InputError, match="merge it first"):
        lora.attach(model, LoRA())


@pytest.mark.parametrize(
    ("field", "value"),
    [("rank", 0), ("rank", 2.5), ("alpha", 0.0), ("alpha", float("inf")), ("dropout", 1.0), ("targets", ())],
)
def test_invalid_settings(field: str, value: object) -> None:
    with pytest.raises(gh.ConfigError, match=field):
        LoRA(**{field: value})  # type: ignore[arg-type]


def test_settings_round_trip() -> None:
    config = LoRA(rank=4, targets=("*",))
    assert gh.config.parse(LoRA, gh.config.dump(config)) == config


def test_the_smallest_settings_are_valid_and_the_next_below_are_not() -> None:
    LoRA(rank=1, alpha=2**-30, dropout=0.0).check()
    for wrong in ({"rank": 0}, {"alpha": 0.0}, {"alpha": float("inf")}, {"dropout": 1.0}, {"targets": ()}):
        with pytest.raises(gh.ConfigError, match=rf"lora\.{next(iter(wrong))}"):
            LoRA(**wrong).check()


# On quantized weights


def large(kind: str) -> Model:
    """A model whose layers all have a multiple of 32 inputs."""
    torch.manual_seed(3)
    sizes = {"d_model": 32, "n_heads": 2, "n_kv_heads": 2, "d_ff": 64, "vocab_size": VOCABULARY, "n_layers": 1}
    return make(gh.preset(kind, **sizes, dropout=0.0))


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("kind", ["tiny-decoder", "tiny-encoder", "tiny-seq2seq"])
def test_quantized_it_is_lora_on_the_dequantized_weights(kind: str, weights: FrozenWeights) -> None:
    model = large(kind)
    plain, names = copy.deepcopy(model), list(model.state_dict())
    config = LoRA(rank=2, targets=("query", "down"), weights=weights)
    linears = lora.block_linears(plain)
    lora.attach(model, config)
    frozen = frozen_quantized_layers(model)
    assert {name.removesuffix(".base") for name in frozen} == linears.keys()  # those without an adapter, too
    with torch.no_grad():
        for name, layer in frozen.items():
            linears[name.removesuffix(".base")].weight.copy_(layer.weight)
    base = copy.deepcopy(plain)
    lora.attach(plain, replace(config, weights="own"))
    lora.load_adapter(plain, lora.adapter_state_dict(model))
    randomise(model)
    lora.load_adapter(plain, lora.adapter_state_dict(model))

    ids = torch.arange(14).view(2, 7) * 5 % VOCABULARY
    for one in (model, plain):
        (one(ids, ids) if isinstance(one, Seq2Seq) else one(ids)).square().mean().backward()
    trained = {name: weight.grad for name, weight in model.named_parameters() if weight.requires_grad}
    assert set(trained) == set(lora.adapter_state_dict(model))
    for name, grad in trained.items():
        expected = plain.get_parameter(name).grad
        assert grad is not None
        assert expected is not None
        assert (grad - expected).abs().max() <= 1e-10 * expected.abs().max(), name
    attached = logits_of(model)
    assert (attached - logits_of(plain)).abs().max() <= 1e-10 * attached.abs().max()

    # Merged it is a plain model again, of the weights that it was trained on and the update.
    lora.merge(model)
    assert list(model.state_dict()) == names
    assert all(weight.requires_grad for weight in model.parameters())
    assert (logits_of(model) - attached).abs().max() <= 1e-10 * attached.abs().max()
    without = {
        name for name in names if name.removesuffix(".weight") in linears.keys() - lora.lora_layers(plain).keys()
    }
    assert without
    assert all(model.state_dict()[name].equal(base.state_dict()[name]) for name in without)


def test_what_is_trained_whole_is_not_quantized() -> None:
    model = large("tiny-decoder")
    down = "stack.blocks.0.feedforward.layer.down"
    lora.attach(model, LoRA(targets=("query",), weights="int4", modules_to_save=(down,)))
    assert type(model.get_submodule(down)) is Linear
    assert f"{down}.weight" in lora.adapter_state_dict(model)
    assert len(frozen_quantized_layers(model)) == len(lora.block_linears(large("tiny-decoder"))) - 1


def test_int4_needs_groups_of_inputs_and_otherwise_changes_nothing() -> None:
    model = tiny()
    before = logits_of(model)
    with pytest.raises(gh.InputError, match=r"query has 16 inputs, which is no multiple of 32; use 'int8'\."):
        lora.attach(model, LoRA(weights="int4"))
    assert all(weight.requires_grad for weight in model.parameters())
    assert logits_of(model).equal(before)
    lora.attach(model, LoRA(weights="int8"))


@pytest.mark.parametrize("weights", ["own", "copy"])
def test_an_inference_copy_on_quantized_weights_equals_the_model(weights: str) -> None:
    model = large("tiny-decoder").float()
    lora.attach(model, LoRA(weights="int4"))
    randomise(model)
    expected = logits_of(model)
    # float32: sums of at most 64 numbers in another order through one layer, some hundred roundings of 6e-8.
    difference = (logits_of(prepare_for_inference(model, weights, 8)) - expected).abs().max()  # type: ignore[arg-type, type-var]
    assert difference <= 1e-5 * expected.abs().max()


# What is trained beside it


@pytest.mark.parametrize("kind", ["tiny-decoder", "tiny-seq2seq"])
@pytest.mark.parametrize("tied", [True, False])
def test_rows_of_tokens_are_trained_and_no_others(kind: str, tied: bool) -> None:
    torch.manual_seed(3)
    s = gh.preset(kind, d_model=16, n_heads=2, n_kv_heads=2, d_ff=24, vocab_size=VOCABULARY, dropout=0.0)
    model = make(replace(s, head=spec.NextToken(tied=tied)))
    before, plain = logits_of(model), copy.deepcopy(model)
    ids = (3, 5)
    choice = LoRA(rank=2, token_ids=ids, modules_to_save=("stack.norm",) if kind == "tiny-decoder" else ())
    lora.attach(model, choice)
    assert logits_of(model).equal(before)

    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    assert sum("rows" in name for name in trained) == (1 if tied else 2)
    assert set(lora.adapter_state_dict(model)) == {name.replace("parametrizations.weight.0.", "") for name in trained}
    tokens = torch.tensor([[3, 5, 7, 1]])
    loss = model(tokens, tokens) if kind == "tiny-seq2seq" else model(tokens)
    loss.square().mean().backward()
    with torch.no_grad():
        for weight in trained.values():
            assert weight.grad is not None
            weight -= 0.1 * weight.grad
    trained_logits = logits_of(model)
    assert not trained_logits.allclose(before)

    # Where only some rows are trained, the gradient is that of these rows in a model that is trained whole.
    whole = plain(tokens, tokens) if kind == "tiny-seq2seq" else plain(tokens)
    whole.square().mean().backward()
    for name in ("token_embedding.table", *([] if tied else ["head"])):
        grad, rows = plain.get_parameter(f"{name}.weight").grad, model.get_submodule(name).parametrizations.weight[0]
        assert grad is not None
        torch.testing.assert_close(rows.rows.grad, grad[list(ids)])

    other = copy.deepcopy(plain)
    lora.attach(other, choice)
    lora.load_adapter(other, lora.adapter_state_dict(model))
    assert logits_of(other).equal(trained_logits)
    lora.merge(model)
    torch.testing.assert_close(logits_of(model), trained_logits, rtol=1e-10, atol=1e-10)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    table, old = model.token_embedding.table.weight, plain.token_embedding.table.weight
    changed = (table != old).any(1).nonzero().flatten().tolist()
    assert changed == list(ids)


def test_a_matrix_that_is_trained_whole_has_no_rows_of_its_own() -> None:
    model = make(replace(tiny().spec, head=spec.NextToken(tied=False)))
    lora.attach(model, LoRA(token_ids=(3,), modules_to_save=("token_embedding",)))
    assert [*lora.trained_rows(model)] == ["head"]
    assert model.token_embedding.table.weight.requires_grad
    assert "token_embedding.table.weight" in lora.adapter_state_dict(model)
    lora.merge(model)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (LoRA(token_ids=(VOCABULARY,)), f"token_ids has {VOCABULARY}, but the vocabulary has {VOCABULARY} tokens"),
        (
            LoRA(modules_to_save=("stack.nrm",)),
            r"modules_to_save has 'stack\.nrm', which matches no module; did you mean",
        ),
        (
            LoRA(modules_to_save=("stack.blocks.0",)),
            r"matches stack\.blocks\.0, but stack\.blocks\.0\..* gets an adapter",
        ),
    ],
)
def test_what_cannot_be_trained_beside_it_is_named(choice: LoRA, message: str) -> None:
    model = tiny()
    with pytest.raises(gh.InputError, match=message):
        lora.attach(model, choice)
    assert all(weight.requires_grad for weight in model.parameters())
