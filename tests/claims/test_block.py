"""The block: statements B1 to B5 and B7."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import glasshouse as gh
from glasshouse.spec import DecoderSpec

Grow = Callable[..., Any]
Watch = Callable[[nn.Module], list[Any]]
Agree = Callable[..., None]


def random_ids(*shape: int) -> Tensor:
    return torch.randint(23, shape)


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def layer_norm(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    """Normalise one vector at a time, by the formula."""
    result = torch.empty_like(x)
    for row, out in zip(x.view(-1, x.shape[-1]), result.view(-1, x.shape[-1]), strict=True):
        values = row.tolist()
        mean = sum(values) / len(values)
        variance = sum((value - mean) ** 2 for value in values) / len(values)
        deviation = math.sqrt(variance + norm.eps)
        for i, value in enumerate(values):
            out[i] = (value - mean) / deviation * norm.weight[i].item() + norm.bias[i].item()
    return result


def sublayers(block: Any) -> list[Any]:  # noqa: ANN401 - modules are looked into by name
    return [part for part in (block.attention, getattr(block, "cross", None), block.feedforward) if part is not None]


def run(model: nn.Module, ids: Tensor) -> Tensor:
    """Call a model of any kind; a seq2seq reads the ids backwards and writes them."""
    return model(ids.flip(1), ids) if hasattr(model, "encoder") else model(ids)


def last_stack(model: nn.Module) -> Any:  # noqa: ANN401
    return model.decoder if hasattr(model, "encoder") else model.stack


# B1 and B2 --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("kind", ["decoder", "encoder", "seq2seq"])
def test_b1_norm_before_and_norm_after(
    grow: Grow, watch: Watch, agree: Agree, kind: str, order: str, training: bool
) -> None:
    """Each block is x + drop(layer(norm(x))) or norm(x + drop(layer(x))), sublayer by sublayer, dropout included."""
    rate = 0.3
    model = grow(kind, norm_placement=order, dropout=rate).train(training)
    blocks = [(block, watch(block)) for block in last_stack(model).blocks]
    with torch.no_grad():
        run(model, random_ids(2, 5))
        for block, calls in blocks:
            x, ctx = calls[0].args
            torch.manual_seed(1)
            actual = block(x, ctx)
            torch.manual_seed(1)  # the same draws, as long as dropout falls on the same things in the same order
            for part in sublayers(block):
                if order == "before":
                    x = x + F.dropout(part.layer(layer_norm(x, part.norm), ctx), rate, training)
                else:
                    x = layer_norm(x + F.dropout(part.layer(x, ctx), rate, training), part.norm)
            agree(actual, x)


@pytest.mark.parametrize("kind", ["decoder", "encoder", "seq2seq"])
def test_b1_one_norm_after_the_last_block(grow: Grow, watch: Watch, agree: Agree, kind: str) -> None:
    """Norm-before ends in one more norm; norm-after, as published, hands the last block's output on."""
    model = grow(kind)
    stack = last_stack(model)
    last, whole = watch(stack.blocks[-1]), watch(stack)
    with torch.no_grad():
        run(model, random_ids(2, 5))
    agree(whole[0].output, layer_norm(last[0].output, stack.norm))

    for name in ("vaswani-base", "bert-base"):
        spec = gh.preset(name, n_layers=2, d_model=16, n_heads=4, vocab_size=23)
        model = gh.build(spec, dtype=torch.float64).eval()
        stack = last_stack(model)
        last, whole = watch(stack.blocks[-1]), watch(stack)
        run(model, random_ids(2, 5))
        assert spec.norm_placement == "post"
        assert torch.equal(whole[0].output, last[0].output)


@pytest.mark.parametrize("size", [1.0, 1e-3, 100.0])
def test_b2_layer_norm_by_the_formula(grow: Grow, agree: Agree, size: float) -> None:
    """(x - mean) / sqrt(population variance + epsilon) * scale + shift; at size 1e-3 epsilon is most of the root."""
    norm = grow("decoder").stack.blocks[0].attention.norm
    x = randn(3, 5, 16) * size + size
    agree(norm(x), layer_norm(x, norm))


def test_b2_scale_and_shift_are_learned_and_vectors_apart(grow: Grow) -> None:
    """Both have D trained numbers, 1 and 0 at first; changing one vector changes that vector's result alone."""
    norm = grow("decoder").stack.blocks[0].attention.norm
    x = randn(3, 5, 16)
    norm(x).square().sum().backward()
    for parameter in (norm.weight, norm.bias):
        assert parameter.shape == (16,)
        assert (parameter.grad != 0).all()
    other = x.clone()
    other[1, 2] = randn(16)
    changed = (norm(other) != norm(x)).any(-1)
    assert changed.nonzero().tolist() == [[1, 2]]

    fresh = gh.build(gh.preset("gpt2", n_layers=1, d_model=16, n_heads=4, vocab_size=23)).stack.norm
    assert torch.equal(fresh.weight, torch.ones(16))
    assert torch.equal(fresh.bias, torch.zeros(16))


# B3 ---------------------------------------------------------------------------------------------------------


def test_b3_two_maps_with_a_relu_between(grow: Grow, watch: Watch, agree: Agree) -> None:
    """At each position alone: up to d_ff, negative numbers to 0, and back, with one set of weights a layer."""
    model = grow("decoder", feedforward="relu")
    layers = [block.feedforward.layer for block in model.stack.blocks]
    calls = [watch(layer) for layer in layers]
    with torch.no_grad():
        model(random_ids(2, 5))
    for layer, seen in zip(layers, calls, strict=True):
        x, output = seen[0].args[0], seen[0].output
        for b in range(2):
            for i in range(5):
                hidden = [
                    max(0.0, (row @ x[b, i] + bias).item())
                    for row, bias in zip(layer.up.weight, layer.up.bias, strict=True)
                ]
                assert len(hidden) == model.spec.d_ff
                back = sum(number * column for number, column in zip(hidden, layer.down.weight.T, strict=True))
                agree(output[b, i], (back + layer.down.bias).detach())


def test_b3_positions_do_not_talk_and_layers_do_not_share(grow: Grow, watch: Watch) -> None:
    """Another vector at position j changes row j alone; no two layers have a weight in common or alike."""
    model = grow("decoder", feedforward="relu", n_layers=3)
    calls = [watch(block.feedforward.layer) for block in model.stack.blocks]
    model(random_ids(2, 5))
    for block, seen in zip(model.stack.blocks, calls, strict=True):
        x, ctx = seen[0].args
        other = x.clone()
        other[1, 3] = randn(16)
        changed = (block.feedforward.layer(other, ctx) != seen[0].output).any(-1)
        assert changed.nonzero().tolist() == [[1, 3]]
    places, values = set(), []
    for block in model.stack.blocks:
        layer = block.feedforward.layer
        places |= {parameter.data_ptr() for parameter in layer.parameters()}
        values += [layer.up.weight, layer.down.weight.T]
    assert len(places) == 3 * 4
    assert all((a != b).all() for n, a in enumerate(values) for b in values[:n])


def test_b3_the_original_sizes() -> None:
    """Every feed-forward layer of the original goes from 512 to 2048 and back, and has a ReLU."""
    model = gh.build(gh.preset("vaswani-base"), device="meta")
    layers = [block.feedforward.layer for stack in (model.encoder, model.decoder) for block in stack.blocks]
    assert len(layers) == 6 + 6
    for layer in layers:
        assert (layer.up.in_features, layer.up.out_features) == (512, 2048)
        assert (layer.down.in_features, layer.down.out_features) == (2048, 512)
        numbers = torch.linspace(-3, 3, 13)
        assert layer.activation(numbers).tolist() == [max(0.0, number) for number in numbers.tolist()]


# B4 ---------------------------------------------------------------------------------------------------------


def embedding_by_hand(model: nn.Module, ids: Tensor, position: str) -> Tensor:
    """Return token vectors, which sinusoidal positions scale by sqrt(D), plus positions, [B, S, D]."""
    stack = last_stack(model)
    vectors = model.token_embedding.table.weight.detach()[ids] * (math.sqrt(16) if position == "sinusoidal" else 1.0)
    for i in range(ids.shape[1]):
        if position == "learned":
            vectors[:, i] += stack.position.table.weight[i].detach()
        if position == "sinusoidal":
            angles = [i / 10_000 ** (2 * k / 16) for k in range(8)]
            code = [f(angle) for angle in angles for f in (math.sin, math.cos)]
            vectors[:, i] += torch.tensor(code, dtype=torch.float64)
    return vectors


@pytest.mark.parametrize("position", ["none", "learned", "sinusoidal", "rotary"])
@pytest.mark.parametrize("kind", ["decoder", "encoder", "seq2seq"])
def test_b4_the_stream_is_the_sum_of_what_was_added(
    grow: Grow, watch: Watch, agree: Agree, kind: str, position: str
) -> None:
    """Ahead of the final norm, each vector is its embedding plus every sublayer's output, in every layer."""
    model = grow(kind, position=position, n_layers=4)
    stack = last_stack(model)
    added = [[watch(part.layer) for part in sublayers(block)] for block in stack.blocks]
    blocks, final = [watch(block) for block in stack.blocks], watch(stack.norm)
    ids = random_ids(2, 5)
    with torch.no_grad():
        run(model, ids)
    stream = embedding_by_hand(model, ids, position)
    for parts, block in zip(added, blocks, strict=True):
        stream = stream + sum(part[0].output for part in parts)
        agree(block[0].output, stream)
    agree(final[0].args[0], stream)


def patched_rows(
    model: nn.Module, ids: Tensor, watch: Watch, layer: int, row: int, freeze: bool = False
) -> list[list[int]]:
    """Add noise to one head's output at one row of one layer; return which rows differ after each layer.

    With `freeze`, all attention of the layers after it gives what it gave before the patch.
    """
    blocks = model.stack.blocks
    after = [watch(block) for block in blocks]
    attentions = [watch(block.attention.layer) for block in blocks]
    with torch.no_grad():
        model(ids)

        def patch(_: nn.Module, args: object, z: Tensor) -> Tensor:
            z = z.clone()
            z[:, 1, row] += randn(*z[:, 1, row].shape)
            return z

        hooks = [blocks[layer].attention.layer.attend.register_forward_hook(patch)]
        if freeze:
            for n in range(layer + 1, len(blocks)):
                before = attentions[n][0].output
                hooks.append(blocks[n].attention.layer.register_forward_hook(lambda *_, before=before: before))
        model(ids)
        for hook in hooks:
            hook.remove()
    changed = [(calls[1].output != calls[0].output).any(-1).any(0) for calls in after]
    return [rows.nonzero().flatten().tolist() for rows in changed]


@pytest.mark.parametrize("norm_placement", ["before", "after"])
@pytest.mark.parametrize("position", ["learned", "rotary", "alibi"])
def test_b4_a_patched_head_moves_forward_only_through_attention(
    grow: Grow, watch: Watch, position: str, norm_placement: str
) -> None:
    """One head patched at row i: its layer changes in row i alone, later layers in i and after, earlier in none."""
    length, layer, row = 6, 1, 2
    model = grow("decoder", position=position, norm_placement=norm_placement, n_layers=4)
    ids = random_ids(2, length)
    onward = list(range(row, length))
    assert patched_rows(model, ids, watch, layer, row) == [[], [row], onward, onward]


def test_b4_attention_alone_moves_information(grow: Grow, watch: Watch) -> None:
    """With attention held at what it gave before, the patch stays in row i through all later layers."""
    model = grow("decoder", n_layers=4)
    assert patched_rows(model, random_ids(2, 6), watch, 1, 2, freeze=True) == [[], [2], [2], [2]]


# B5 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["before", "after"])
def test_b5_residual_paths_keep_gradients_alive(order: str) -> None:
    """At 24 layers of deviation 0.02, gradients die on the way to the first layer where the `x +` is left out."""
    # With the norms left out too, all of the first layer's gradient is gone. With them kept, they scale it up again
    # on the way, but it reaches the vector of position 0 alone, which every layer averages in; the vectors of
    # later tokens feel nothing.
    spec = DecoderSpec(
        vocab_size=64,
        d_model=64,
        n_heads=4,
        n_layers=24,
        max_len=16,
        norm_placement=order,
        final_norm=order == "before",
        feedforward={"kind": "relu"},
        init={"kind": "normal", "std": 0.02},
    )
    model = gh.build(spec, dtype=torch.float64)
    entered: dict[str, Any] = {}
    model.stack.blocks[0].register_forward_pre_hook(lambda _, args: entered.update(x=args[0], ctx=args[1]))
    ids = torch.randint(64, (2, 17))
    print()

    def gradients(residual: bool, norms: bool) -> tuple[float, float, float]:
        model.zero_grad()
        whole = model(ids[:, :-1])
        start, ctx = entered["x"], entered["ctx"]
        x = start
        for block in model.stack.blocks:
            for part in (block.attention, block.feedforward):
                norm = part.norm if norms else nn.Identity()
                if order == "before":
                    x = part.layer(norm(x), ctx) + (x if residual else 0)
                else:
                    x = norm(part.layer(x, ctx) + (x if residual else 0))
        logits = model.head(model.stack.norm(x), None, model.token_embedding.table.weight)
        if residual and norms:  # then this is the model itself
            torch.testing.assert_close(logits, whole, rtol=1e-12, atol=1e-12)
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        start.retain_grad()
        loss.backward()
        figures = (
            gradient_norm(model.stack.blocks[0]),
            gradient_norm(model.stack.blocks[-1]),
            start.grad[:, -1].norm().item(),
        )
        if norms and not residual:
            assert start.grad[:, 0].norm() > 0.999 * start.grad.norm()
        print(
            f"B5 norm-{order}, {'with' if residual else 'without'} residual paths, {'with' if norms else 'without'} "
            f"norms: gradient norm {figures[0]:.1e} at the first layer, {figures[1]:.1e} at the last, "
            f"{figures[2]:.1e} at the last token's vector"
        )
        return figures

    for norms in (True, False):
        first, last, token = gradients(True, norms)
        assert 0.1 < first / last < 100  # alive: of one order with the last layer's
        gone_first, gone_last, gone_token = gradients(False, norms)
        assert gone_token < 1e-20 * token
        if not norms:
            assert gone_first < 1e-30 * first
            assert gone_last > 0.1 * last  # it left the head in full strength


def gradient_norm(module: nn.Module) -> float:
    """Return the norm of the gradient of all parameters that took part."""
    parts = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    return math.sqrt(sum(part.square().sum().item() for part in parts))


# B7 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("kind", ["decoder", "encoder", "seq2seq"])
def test_b7_dropout_acts_in_training_only(grow: Grow, kind: str, order: str) -> None:
    """In eval mode every rate gives what rate 0 gives, bit for bit; in training two calls differ, at rate 0 not."""
    ids = random_ids(2, 5)
    rates = {"dropout": 0.3, "attention_dropout": 0.2, "embed_dropout": 0.1}
    torch.manual_seed(5)
    dry = grow(kind, norm_placement=order)
    torch.manual_seed(5)
    wet = grow(kind, norm_placement=order, **rates)
    assert torch.equal(run(wet, ids), run(dry, ids))
    assert torch.equal(run(dry.train(), ids), run(dry.eval(), ids))
    for name in rates:
        model = grow(kind, norm_placement=order, **{name: 0.3}).train()
        assert not torch.equal(run(model, ids), run(model, ids))


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("kind", ["decoder", "encoder", "seq2seq"])
def test_b7_dropout_sits_on_each_sublayers_output(grow: Grow, watch: Watch, kind: str, order: str) -> None:
    """Of what each sublayer gave, the stream receives some numbers as 0 and the others divided by 1 - p."""
    rate = 0.3
    model = grow(kind, norm_placement=order, dropout=rate).train()
    dropped = total = 0
    parts = [part for block in last_stack(model).blocks for part in sublayers(block)]
    seen = [(watch(part), watch(part.layer), watch(part.norm)) for part in parts]
    with torch.no_grad():
        run(model, random_ids(8, 20))
    for wrapper, layer, norm in seen:
        x, gave = wrapper[0].args[0], layer[0].output
        received = (wrapper[0].output if order == "before" else norm[0].args[0]) - x
        tolerance = 1e-12 * max(x.abs().max(), gave.abs().max())
        kept = (received - gave / (1 - rate)).abs() < tolerance
        zero = received.abs() < tolerance
        assert (kept | zero).all()
        dropped, total = dropped + zero.sum().item(), total + zero.numel()
    # A share of n draws is spread by sqrt(p (1 - p) / n).
    assert abs(dropped / total - rate) < 5 * math.sqrt(rate * (1 - rate) / total)
