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

BuildModel = Callable[..., Any]
RecordCalls = Callable[[nn.Module], list[Any]]
AssertClose = Callable[..., None]


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


def sublayers(block: Any) -> list[Any]:  # noqa: ANN401 - modules are accessed by name
    return [part for part in (block.attention, getattr(block, "cross", None), block.feedforward) if part is not None]


def run(model: nn.Module, ids: Tensor) -> Tensor:
    """Call a model of any kind; a seq2seq gets the reversed ids as its source."""
    return model(ids.flip(1), ids) if hasattr(model, "encoder") else model(ids)


def last_stack(model: nn.Module) -> Any:  # noqa: ANN401
    return model.decoder if hasattr(model, "encoder") else model.stack


# B1 and B2 --------------------------------------------------------------------------------------------------


@pytest.mark.few(6)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("placement", ["pre", "post"])
@pytest.mark.parametrize("kind", ["decoder", "encoder", "seq2seq"])
def test_b1_pre_norm_and_post_norm(
    build_model: BuildModel,
    record_calls: RecordCalls,
    assert_close: AssertClose,
    kind: str,
    placement: str,
    training: bool,
) -> None:
    """Each block is x + drop(layer(norm(x))) or norm(x + drop(layer(x))), sublayer by sublayer, dropout included."""
    rate = 0.3
    model = build_model(kind, norm_placement=placement, dropout=rate).train(training)
    blocks = [(block, record_calls(block)) for block in last_stack(model).blocks]
    with torch.no_grad():
        run(model, random_ids(2, 5))
        for block, calls in blocks:
            x, ctx = calls[0].args
            torch.manual_seed(1)
            actual = block(x, ctx)
            torch.manual_seed(
                1
            )  # the same random numbers, as long as dropout is applied to the same tensors in the same order
            for part in sublayers(block):
                if placement == "pre":
                    x = x + F.dropout(part.layer(layer_norm(x, part.norm), ctx), rate, training)
                else:
                    x = layer_norm(x + F.dropout(part.layer(x, ctx), rate, training), part.norm)
            assert_close(actual, x)


@pytest.mark.parametrize("kind", ["decoder", "encoder", "seq2seq"])
def test_b1_final_norm_after_the_last_block(
    build_model: BuildModel, record_calls: RecordCalls, assert_close: AssertClose, kind: str
) -> None:
    """Pre-norm ends in a final norm; post-norm, as published, returns the last block's output."""
    model = build_model(kind)
    stack = last_stack(model)
    last, whole = record_calls(stack.blocks[-1]), record_calls(stack)
    with torch.no_grad():
        run(model, random_ids(2, 5))
    assert_close(whole[0].output, layer_norm(last[0].output, stack.norm))

    for name in ("vaswani-base", "bert-base"):
        spec = gh.preset(name, n_layers=2, d_model=16, n_heads=4, vocab_size=23)
        model = gh.build(spec, dtype=torch.float64).eval()
        stack = last_stack(model)
        last, whole = record_calls(stack.blocks[-1]), record_calls(stack)
        run(model, random_ids(2, 5))
        assert spec.norm_placement == "post"
        assert torch.equal(whole[0].output, last[0].output)


@pytest.mark.parametrize("size", [1.0, 1e-3, 100.0])
def test_b2_layer_norm_formula(build_model: BuildModel, assert_close: AssertClose, size: float) -> None:
    """(x - mean) / sqrt(population variance + epsilon) * scale + shift; at size 1e-3 epsilon dominates the root."""
    norm = build_model("decoder").stack.blocks[0].attention.norm
    x = randn(3, 5, 16) * size + size
    assert_close(norm(x), layer_norm(x, norm))


def test_b2_scale_and_shift_are_trained_and_vectors_are_independent(build_model: BuildModel) -> None:
    """Both are trained vectors of size D, initially 1 and 0; changing one input vector changes only its output."""
    norm = build_model("decoder").stack.blocks[0].attention.norm
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


def test_b3_up_relu_down(build_model: BuildModel, record_calls: RecordCalls, assert_close: AssertClose) -> None:
    """At each position: up to d_ff, ReLU, and back down, with one set of weights per layer."""
    model = build_model("decoder", feedforward="relu")
    layers = [block.feedforward.layer for block in model.stack.blocks]
    calls = [record_calls(layer) for layer in layers]
    with torch.no_grad():
        model(random_ids(2, 5))
    for layer, recorded in zip(layers, calls, strict=True):
        x, output = recorded[0].args[0], recorded[0].output
        for b in range(2):
            for i in range(5):
                hidden = [
                    max(0.0, (row @ x[b, i] + bias).item())
                    for row, bias in zip(layer.up.weight, layer.up.bias, strict=True)
                ]
                assert len(hidden) == model.spec.d_ff
                back = sum(number * column for number, column in zip(hidden, layer.down.weight.T, strict=True))
                assert_close(output[b, i], (back + layer.down.bias).detach())


def test_b3_positions_are_independent_and_layers_share_no_weights(
    build_model: BuildModel, record_calls: RecordCalls
) -> None:
    """Changing the vector at position j changes only row j; no two layers share a weight or a value."""
    model = build_model("decoder", feedforward="relu", n_layers=3)
    calls = [record_calls(block.feedforward.layer) for block in model.stack.blocks]
    model(random_ids(2, 5))
    for block, recorded in zip(model.stack.blocks, calls, strict=True):
        x, ctx = recorded[0].args
        other = x.clone()
        other[1, 3] = randn(16)
        changed = (block.feedforward.layer(other, ctx) != recorded[0].output).any(-1)
        assert changed.nonzero().tolist() == [[1, 3]]
    addresses, values = set(), []
    for block in model.stack.blocks:
        layer = block.feedforward.layer
        addresses |= {parameter.data_ptr() for parameter in layer.parameters()}
        values += [layer.up.weight, layer.down.weight.T]
    assert len(addresses) == 3 * 4
    assert all((a != b).all() for n, a in enumerate(values) for b in values[:n])


def test_b3_original_sizes() -> None:
    """Every feed-forward layer of the original goes from 512 to 2048 and back, with a ReLU."""
    model = gh.build(gh.preset("vaswani-base"), device="meta")
    layers = [block.feedforward.layer for stack in (model.encoder, model.decoder) for block in stack.blocks]
    assert len(layers) == 6 + 6
    for layer in layers:
        assert (layer.up.in_features, layer.up.out_features) == (512, 2048)
        assert (layer.down.in_features, layer.down.out_features) == (2048, 512)
        numbers = torch.linspace(-3, 3, 13)
        assert layer.activation(numbers).tolist() == [max(0.0, number) for number in numbers.tolist()]


# B4 ---------------------------------------------------------------------------------------------------------


def reference_embedding(model: nn.Module, ids: Tensor, position: str) -> Tensor:
    """Return token embeddings, scaled by sqrt(D) for sinusoidal positions, plus position embeddings, [B, S, D]."""
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


@pytest.mark.few(5)
@pytest.mark.parametrize("position", ["none", "learned", "sinusoidal", "rotary"])
@pytest.mark.parametrize("kind", ["decoder", "encoder", "seq2seq"])
def test_b4_residual_stream_is_the_sum_of_sublayer_outputs(
    build_model: BuildModel, record_calls: RecordCalls, assert_close: AssertClose, kind: str, position: str
) -> None:
    """Before the final norm, the residual stream is the embedding plus the output of every sublayer so far."""
    model = build_model(kind, position=position, n_layers=4)
    stack = last_stack(model)
    added = [[record_calls(part.layer) for part in sublayers(block)] for block in stack.blocks]
    blocks, final = [record_calls(block) for block in stack.blocks], record_calls(stack.norm)
    ids = random_ids(2, 5)
    with torch.no_grad():
        run(model, ids)
    stream = reference_embedding(model, ids, position)
    for parts, block in zip(added, blocks, strict=True):
        stream = stream + sum(part[0].output for part in parts)
        assert_close(block[0].output, stream)
    assert_close(final[0].args[0], stream)


def patched_rows(
    model: nn.Module, ids: Tensor, record_calls: RecordCalls, layer: int, row: int, freeze: bool = False
) -> list[list[int]]:
    """Add noise to one head's output at one position of one layer; return which positions differ after each layer.

    With `freeze`, attention outputs of later layers are fixed to their values before the patch.
    """
    blocks = model.stack.blocks
    after = [record_calls(block) for block in blocks]
    attentions = [record_calls(block.attention.layer) for block in blocks]
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


@pytest.mark.parametrize("norm_placement", ["pre", "post"])
@pytest.mark.parametrize("position", ["learned", "rotary", "alibi"])
def test_b4_patched_head_spreads_only_through_attention(
    build_model: BuildModel, record_calls: RecordCalls, position: str, norm_placement: str
) -> None:
    """A head patched at position i changes only i in its layer, i and after in later layers, none in earlier ones."""
    length, layer, row = 6, 1, 2
    model = build_model("decoder", position=position, norm_placement=norm_placement, n_layers=4)
    ids = random_ids(2, length)
    onward = list(range(row, length))
    assert patched_rows(model, ids, record_calls, layer, row) == [[], [row], onward, onward]


def test_b4_only_attention_moves_information(build_model: BuildModel, record_calls: RecordCalls) -> None:
    """With attention outputs frozen, the patch stays at position i through all later layers."""
    model = build_model("decoder", n_layers=4)
    assert patched_rows(model, random_ids(2, 6), record_calls, 1, 2, freeze=True) == [[], [2], [2], [2]]


# B5 ---------------------------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("placement", ["pre", "post"])
def test_b5_residual_connections_preserve_gradients(placement: str) -> None:
    """At 24 layers with standard deviation 0.02, gradients vanish before the first layer without the `x +`."""
    # Without norms, the first layer's whole gradient vanishes. With them, it is scaled up again on the way back, but
    # reaches only the embedding of position 0, which every layer averages in; later tokens get no gradient.
    spec = DecoderSpec(
        vocab_size=64,
        d_model=64,
        n_heads=4,
        n_layers=24,
        max_len=16,
        norm_placement=placement,
        final_norm=placement == "pre",
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
                if placement == "pre":
                    x = part.layer(norm(x), ctx) + (x if residual else 0)
                else:
                    x = norm(part.layer(x, ctx) + (x if residual else 0))
        logits = model.head(model.stack.norm(x), None, model.token_embedding.table.weight)
        if residual and norms:  # then this is the model itself
            torch.testing.assert_close(logits, whole, rtol=1e-12, atol=1e-12)
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        start.retain_grad()
        loss.backward()
        gradient_norms = (
            gradient_norm(model.stack.blocks[0]),
            gradient_norm(model.stack.blocks[-1]),
            start.grad[:, -1].norm().item(),
        )
        if norms and not residual:
            assert start.grad[:, 0].norm() > 0.999 * start.grad.norm()
        print(
            f"B5 {placement}-norm, {'with' if residual else 'without'} residual connections, "
            f"{'with' if norms else 'without'} norms: gradient norm {gradient_norms[0]:.1e} at the first layer, "
            f"{gradient_norms[1]:.1e} at the last, "
            f"{gradient_norms[2]:.1e} at the last token's embedding"
        )
        return gradient_norms

    for norms in (True, False):
        first, last, token = gradients(True, norms)
        assert 0.1 < first / last < 100  # not vanished: the same order as the last layer's
        vanished_first, vanished_last, vanished_token = gradients(False, norms)
        assert vanished_token < 1e-20 * token
        if not norms:
            assert vanished_first < 1e-30 * first
            assert vanished_last > 0.1 * last  # the last layer still gets its full gradient


def gradient_norm(module: nn.Module) -> float:
    """Return the gradient norm over all parameters that have a gradient."""
    parts = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    return math.sqrt(sum(part.square().sum().item() for part in parts))


# B7 ---------------------------------------------------------------------------------------------------------


@pytest.mark.few(3)
@pytest.mark.parametrize("placement", ["pre", "post"])
@pytest.mark.parametrize("kind", ["decoder", "encoder", "seq2seq"])
def test_b7_dropout_only_in_training(build_model: BuildModel, kind: str, placement: str) -> None:
    """In eval mode every rate is bit-equal to rate 0; in training mode two calls differ unless the rate is 0."""
    ids = random_ids(2, 5)
    rates = {"dropout": 0.3, "attention_dropout": 0.2, "embed_dropout": 0.1}
    torch.manual_seed(5)
    without = build_model(kind, norm_placement=placement)
    torch.manual_seed(5)
    with_dropout = build_model(kind, norm_placement=placement, **rates)
    assert torch.equal(run(with_dropout, ids), run(without, ids))
    assert torch.equal(run(without.train(), ids), run(without.eval(), ids))
    for name in rates:
        model = build_model(kind, norm_placement=placement, **{name: 0.3}).train()
        assert not torch.equal(run(model, ids), run(model, ids))


@pytest.mark.parametrize("placement", ["pre", "post"])
@pytest.mark.parametrize("kind", ["decoder", "encoder", "seq2seq"])
def test_b7_dropout_is_on_each_sublayer_output(
    build_model: BuildModel, record_calls: RecordCalls, kind: str, placement: str
) -> None:
    """Each element a sublayer adds to the residual stream is 0 or its output divided by 1 - p."""
    rate = 0.3
    model = build_model(kind, norm_placement=placement, dropout=rate).train()
    dropped = total = 0
    parts = [part for block in last_stack(model).blocks for part in sublayers(block)]
    calls = [(record_calls(part), record_calls(part.layer), record_calls(part.norm)) for part in parts]
    with torch.no_grad():
        run(model, random_ids(8, 20))
    for wrapper, layer, norm in calls:
        x, output = wrapper[0].args[0], layer[0].output
        received = (wrapper[0].output if placement == "pre" else norm[0].args[0]) - x
        tolerance = 1e-12 * max(x.abs().max(), output.abs().max())
        kept = (received - output / (1 - rate)).abs() < tolerance
        zero = received.abs() < tolerance
        assert (kept | zero).all()
        dropped, total = dropped + zero.sum().item(), total + zero.numel()
    # The standard deviation of a fraction of n samples is sqrt(p (1 - p) / n).
    assert abs(dropped / total - rate) < 5 * math.sqrt(rate * (1 - rate) / total)
