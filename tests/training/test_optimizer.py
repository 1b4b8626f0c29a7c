"""The optimizers against their formulas, written out, and against torch's."""

from __future__ import annotations

import copy
import io
import json
import math
from collections.abc import Callable

import pytest
import torch
from examples import up_to
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.nn import functional as F

import glasshouse as gh
from glasshouse.config import dump, parse
from glasshouse.errors import ConfigError, InputError
from glasshouse.training import optimizer as module
from glasshouse.training.optimizer import (
    NS_COEFFICIENTS,
    AdamW,
    Muon,
    MuonAdamW,
    Optimizer,
    make_optimizer,
    newton_schulz,
    set_lr,
)

EVERYTHING = Muon(
    momentum_warmup=3, beta2=0.9, cautious=True, embedding=AdamW(lr=0.01, beta1=0.8), head=AdamW(weight_decay=0.2)
)
CHOICES: list[Optimizer] = [AdamW(), Muon(), EVERYTHING]
FINE = torch.finfo(torch.float64).eps / 2
COARSE = torch.finfo(torch.float32).eps / 2


def off_by(size: int, unit: float) -> float:
    """Return how far an orthogonalised matrix, `size` long and wide at most, may be from the exact one.

    A step multiplies an error that is there by the slope of the quintic, at most 3.9 in size where singular values
    can be (3.4445 at 0, 3.88 at 1.2), and adds that of three products of sums of `size` terms that come to at most
    1.2^2 or so: 8 size unit. Over five steps, 8 size unit (1 + 3.9 + ... + 3.9^4) < 2500 size unit.
    """
    return 2500 * size * unit


def quintic(s: Tensor, steps: int = 5) -> Tensor:
    a, b, c = NS_COEFFICIENTS
    for _ in range(steps):
        s = a * s + b * s**3 + c * s**5
    return s


def by_svd(matrix: Tensor, steps: int = 5) -> Tensor:
    """Do to the singular values, one by one, what the products of matrices do to them all."""
    matrix = matrix.double()
    u, s, v = torch.linalg.svd(matrix / max(float(matrix.norm()), 1e-7), full_matrices=False)
    return u * quintic(s, steps) @ v


def grow(kind: str = "decoder", dtype: torch.dtype = torch.float32, **choices: object) -> nn.Module:
    sizes = {"vocab_size": 13, "d_model": 8, "n_layers": 2, "n_heads": 2, "d_ff": 12, "max_len": 16}
    torch.manual_seed(0)
    return gh.build(gh.spec.parse({"kind": kind, **sizes, **choices}), dtype=dtype)


def give_gradients(model: nn.Module, seed: int, skip: str = "none") -> None:
    made = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        drawn = torch.randn(weight.shape, generator=made, dtype=weight.dtype)
        weight.grad = None if skip in name else drawn


def muon_part(optimizer: torch.optim.Optimizer) -> set[str]:
    return {name for group in optimizer.param_groups if group["kind"] == "muon" for name in group["param_names"]}


# Which weight goes where ------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("position", ["learned", "relative"])
@pytest.mark.parametrize("kind", ["decoder", "encoder", "seq2seq"])
def test_every_parameter_appears_once_and_only_matrices_decay(kind: str, position: str, choice: Optimizer) -> None:
    head = {"kind": "masked_token", "tied": True} if kind == "encoder" else {"kind": "next_token", "bias": True}
    model = grow(kind, head=head, position=position, qk_norm=True, norm="layer")
    groups = make_optimizer(model, choice).param_groups
    named = dict(model.named_parameters())
    names = [name for group in groups for name in group["param_names"]]
    assert sorted(names) == sorted(named)
    assert [named[name] for name in names] == [weight for group in groups for weight in group["params"]]
    decays = {name for group in groups if group["weight_decay"] > 0 for name in group["param_names"]}
    assert decays == {name for name, weight in named.items() if weight.dim() == 2}
    assert not any("norm" in name or "bias" in name for name in decays)


def test_muon_takes_the_matrices_inside_the_blocks() -> None:
    inside = muon_part(make_optimizer(grow("seq2seq", position="relative"), Muon()))
    maps = ["attention.layer.query", "attention.layer.key", "attention.layer.value", "attention.layer.out"]
    forward = ["feedforward.layer.up", "feedforward.layer.down"]
    cross = [one.replace("attention", "cross") for one in maps]
    encoder = {f"encoder.blocks.{i}.{one}.weight" for i in range(2) for one in maps + forward}
    decoder = {f"decoder.blocks.{i}.{one}.weight" for i in range(2) for one in maps + cross + forward}
    assert inside == encoder | decoder


def test_embeddings_and_the_matrix_of_the_head_have_settings_of_their_own() -> None:
    model = grow(head={"kind": "next_token", "tied": False, "bias": True}, position="learned")
    groups = make_optimizer(model, EVERYTHING).param_groups
    tables = {"token_embedding.table.weight", "stack.position.table.weight"}
    assert {name for group in groups if group["lr"] == 0.01 for name in group["param_names"]} == tables
    (head,) = [group for group in groups if group["weight_decay"] == 0.2]
    assert head["param_names"] == ["head.weight"]
    model = grow(head={"kind": "next_token", "tied": True}, position="learned")
    tied = make_optimizer(model, EVERYTHING).param_groups
    (head,) = [group for group in tied if group["weight_decay"] == 0.2]
    assert head["param_names"] == ["token_embedding.table.weight"]
    assert [group["param_names"] for group in tied if group["lr"] == 0.01] == [["stack.position.table.weight"]]


def test_a_tied_matrix_is_updated_once() -> None:
    """A table that is named twice, with a gradient of 1 everywhere, goes down by the rate, not by twice as much."""
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    model[1].weight = model[0].weight
    before = model[0].weight.detach().clone()
    optimizer = make_optimizer(model, AdamW(lr=0.1, weight_decay=0.0))
    model[0].weight.grad = torch.ones(5, 4)
    optimizer.step()
    assert [len(group["params"]) for group in optimizer.param_groups] == [1]
    # Adam's first step is the sign of the gradient; eps and rounding are far below 1e-6.
    assert torch.allclose(before - model[0].weight, torch.full((5, 4), 0.1), atol=1e-6)


@pytest.mark.parametrize("choice", CHOICES)
def test_frozen_parameters_are_left_out(choice: Optimizer) -> None:
    model = grow()
    for name, weight in model.named_parameters():
        weight.requires_grad_(".0." in name)
    names = {name for group in make_optimizer(model, choice).param_groups for name in group["param_names"]}
    assert names == {name for name, _ in model.named_parameters() if ".0." in name}


@pytest.mark.parametrize("choice", CHOICES)
def test_nothing_to_train(choice: Optimizer) -> None:
    with pytest.raises(InputError, match="nothing to train; unfreeze some"):
        make_optimizer(grow().requires_grad_(False), choice)
    with pytest.raises(InputError, match="nothing to train"):
        make_optimizer(nn.ReLU(), choice)


def test_muon_without_a_trainable_matrix() -> None:
    model = grow()
    model.stack.blocks.requires_grad_(False)
    with pytest.raises(InputError, match="choose adamw"):
        make_optimizer(model, Muon())


@pytest.mark.parametrize("choice", CHOICES)
def test_a_parameter_without_a_gradient_is_unchanged_and_has_no_state(choice: Optimizer) -> None:
    model = grow()
    optimizer = make_optimizer(model, choice)
    before = copy.deepcopy(model.state_dict())
    give_gradients(model, 1, skip="blocks.1.")
    optimizer.step()
    for name, weight in model.named_parameters():
        assert weight.equal(before[name]) == ("blocks.1." in name), name
        assert (weight in optimizer.state and len(optimizer.state[weight]) > 0) == ("blocks.1." not in name), name


# Rates ------------------------------------------------------------------------------------------------------


def test_set_lr_scales_the_initial_lr_of_every_group() -> None:
    optimizer = make_optimizer(grow(), Muon(lr=0.5, adamw=AdamW(lr=0.25)))
    for factor in (0.5, 0.0, 1.0, 0.125):  # from the first rate every time, not from the last
        set_lr(optimizer, factor)
        assert [group["lr"] for group in optimizer.param_groups] == [0.5 * factor, 0.25 * factor, 0.25 * factor]


@pytest.mark.parametrize("choice", CHOICES)
def test_at_lr_zero_nothing_changes(choice: Optimizer) -> None:
    model = grow()
    optimizer = make_optimizer(model, choice)
    before = copy.deepcopy(model.state_dict())
    give_gradients(model, 1)
    set_lr(optimizer, 0.0)
    optimizer.step()
    assert all(weight.equal(before[name]) for name, weight in model.state_dict().items())


# AdamW ------------------------------------------------------------------------------------------------------


def written_out(start: float, gradients: list[float], rates: list[float], decay: float, c: AdamW) -> float:
    """AdamW on one number."""
    weight, m, v = start, 0.0, 0.0
    for t, (g, lr) in enumerate(zip(gradients, rates, strict=True), start=1):
        m = c.beta1 * m + (1 - c.beta1) * g
        v = c.beta2 * v + (1 - c.beta2) * g * g
        weight -= lr * decay * weight
        weight -= lr * (m / (1 - c.beta1**t)) / (math.sqrt(v / (1 - c.beta2**t)) + c.eps)
    return weight


@pytest.mark.parametrize("fused", [True, None])
@pytest.mark.parametrize("around", [lambda choice: choice, lambda choice: Muon(adamw=choice)], ids=["adamw", "muon"])
def test_adamw_equals_its_formula(around: Callable[[AdamW], Optimizer], fused: bool | None) -> None:
    """Alone, and for the other parameters with Muon: element by element, in Python."""
    choice = AdamW(lr=0.1, beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=0.3)
    model = grow(dtype=torch.float64, head={"kind": "next_token", "bias": True})
    nn.init.normal_(model.head.bias)
    start = copy.deepcopy(model.state_dict())
    optimizer = make_optimizer(model, around(choice))
    for group in optimizer.param_groups:
        if group["kind"] == "adamw":
            assert group["fused"] is True  # the CPU has it, whatever the type
            group["fused"] = fused
    factors, seen = [1.0, 0.5, 2.0, 0.25], {name: [] for name in start}
    for seed, factor in enumerate(factors):
        give_gradients(model, seed)
        for name, weight in model.named_parameters():
            seen[name].append(weight.grad.flatten().tolist())
        set_lr(optimizer, factor)
        optimizer.step()
    rates = [0.1 * factor for factor in factors]
    checked = 0
    for name, weight in model.named_parameters():
        if name in muon_part(optimizer):
            continue
        decay = 0.3 if weight.dim() == 2 else 0.0
        for i, (first, last) in enumerate(
            zip(start[name].flatten().tolist(), weight.flatten().tolist(), strict=True)
        ):
            # A few dozen operations in float64 on numbers of order 1.
            assert last == pytest.approx(
                written_out(first, [g[i] for g in seen[name]], rates, decay, choice), abs=1e-13
            )
        checked += 1
    assert checked > 4


def test_adamw_equals_torch() -> None:
    model, twin = grow(), grow()
    ours = make_optimizer(model, Muon(adamw=AdamW(lr=0.01, weight_decay=0.2)))
    rest = [weight for name, weight in twin.named_parameters() if name not in muon_part(ours)]
    matrices, others = [w for w in rest if w.dim() == 2], [w for w in rest if w.dim() == 1]
    theirs = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.2}, {"params": others, "weight_decay": 0.0}],
        lr=0.01,
        betas=(0.9, 0.95),
        fused=True,
    )
    for seed in range(3):
        give_gradients(model, seed)
        give_gradients(twin, seed)
        ours.step()
        theirs.step()
    for (name, weight), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        if name not in muon_part(ours):
            assert weight.equal(other)  # the same kernel
            assert all(value.equal(theirs.state[other][key]) for key, value in ours.state[weight].items())


# Muon: the matrix that is made ------------------------------------------------------------------------------


def with_values(rows: int, columns: int, values: list[float], seed: int) -> Tensor:
    """Draw a matrix with these singular values, in float64."""
    torch.manual_seed(seed)
    u = torch.linalg.qr(torch.randn(rows, len(values), dtype=torch.float64)).Q
    v = torch.linalg.qr(torch.randn(columns, len(values), dtype=torch.float64)).Q
    return u * torch.tensor(values, dtype=torch.float64) @ v.mT


@st.composite
def matrices(draw: st.DrawFn) -> tuple[Tensor, int]:
    """Return a matrix and its rank: tall, wide or square, of full rank or less, down to 0."""
    rows, columns = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    rank = draw(st.integers(0, min(rows, columns)))
    values = draw(st.lists(st.floats(0.05, 1.0), min_size=rank, max_size=rank))
    return with_values(rows, columns, values, draw(st.integers(0, 99))), rank


def move_of(gradient: Tensor) -> Tensor:
    """Return what a first step of Muon takes away from a matrix of zeros, at a rate of 1, before its scale."""
    weight = nn.Parameter(torch.zeros_like(gradient))
    group = {"params": [weight], "kind": "muon", "lr": 1.0, "momentum": 0.95, "weight_decay": 0.0, "ns_steps": 5}
    weight.grad = gradient
    MuonAdamW([group]).step()
    rows, columns = gradient.shape
    return -weight.detach() / max(1, rows / columns) ** 0.5


@settings(max_examples=up_to(150), deadline=None)
@given(matrices(), st.sampled_from([1e-4, 1.0, 1e4]))
def test_singular_values_end_in_the_expected_range(drawn: tuple[Tensor, int], scale: float) -> None:
    """The step has singular values between 0.6818 and 1.2024, as many as the gradient has, and its vectors.

    By hand: p(s) = 3.4445 s - 4.775 s^3 + 2.0315 s^5 has p' = 0 where s^2 = (14.325 -+ 8.078) / 20.315, that is at
    0.5545, where p is 1.2024, and at 1.0501, where it is 0.6818; p(1.2024) = 0.947, so it maps this band into itself.
    Divided by the norm, our singular values are at least 0.05 / sqrt(12) = 0.0144 and at most 1. Below 0.5545 p
    only rises: 0.0144 -> 0.0496 -> 0.170 -> 0.563. So after four steps all are in the band, and so after the fifth.
    """
    matrix, rank = drawn
    gradient = (matrix * scale).float()
    move = move_of(gradient).double()
    # The gradient is rounded to float32 and so may gain singular values of about 1e-7; 485 = 3.4445^5 is the most
    # that these can grow by.
    within = off_by(12, COARSE) + 485 * 12 * COARSE
    s = torch.linalg.svdvals(move)
    assert bool((s[:rank] > 0.6818 - within).all())
    assert bool((s[:rank] < 1.2024 + within).all())
    assert bool((s[rank:] < within).all())
    assert torch.allclose(move, by_svd(matrix * scale), rtol=0, atol=within)
    # The same vectors: compared with the polar factor U V', each singular value is off by its own distance to 1.
    if rank == min(matrix.shape):
        u, _, v = torch.linalg.svd(matrix, full_matrices=False)
        assert torch.linalg.matrix_norm(move - u @ v, 2) < 1 - 0.6818 + within


@settings(max_examples=up_to(100), deadline=None)
@given(matrices(), st.integers(1, 6))
def test_newton_schulz_equals_the_polynomial_of_singular_values(drawn: tuple[Tensor, int], steps: int) -> None:
    matrix, _ = drawn
    unit = matrix / matrix.norm().clamp(min=1e-7)
    # off_by counts five steps; a sixth makes an error at most 3.9 times as large.
    atol = 4 * off_by(12, FINE)
    assert torch.allclose(newton_schulz(unit[None], steps)[0], by_svd(matrix, steps), rtol=0, atol=atol)


@pytest.mark.parametrize("shape", [(3, 3), (2, 5), (5, 2), (1, 1)])
def test_a_zero_gradient_changes_nothing(shape: tuple[int, int]) -> None:
    assert move_of(torch.zeros(shape)).eq(0).all()


@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4)])
def test_batched_products_equal_single_ones(shape: tuple[int, int]) -> None:
    """Each matrix is divided by its own norm and meets none of the others."""
    torch.manual_seed(0)
    many = torch.randn(7, *shape, dtype=torch.float64)
    many /= torch.linalg.matrix_norm(many, keepdim=True)
    together = newton_schulz(many, 5)
    for one, expected in zip(many, together, strict=True):
        assert torch.allclose(newton_schulz(one[None], 5)[0], expected, rtol=0, atol=2 * off_by(9, FINE))


def test_stacks_of_any_size_give_the_same_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def train(most: int) -> tuple[dict[str, Tensor], list[int]]:
        monkeypatch.setattr(module, "STACKED", most)
        sizes: list[int] = []
        monkeypatch.setattr(module, "newton_schulz", lambda x, steps: sizes.append(len(x)) or newton_schulz(x, steps))
        model = grow()
        optimizer = make_optimizer(model, Muon())
        for seed in range(2):
            give_gradients(model, seed)
            for i, weight in enumerate(model.stack.blocks.parameters()):
                weight.grad *= 10.0 ** (i % 5)  # norms far apart
            optimizer.step()
        return model.state_dict(), sizes

    together, few = train(2**26)
    threes, some = train(3 * 64)
    alone, many = train(0)
    # In each of two blocks: four maps of 8 x 8, one of 12 x 8 and one of 8 x 12.
    assert few == [8, 2, 2] * 2
    assert some == [3, 3, 2, 2, 2] * 2
    assert many == [1] * 12 * 2
    for name, weight in together.items():
        # Each of two steps is off by at most so much, times the rate and a scale of at most sqrt(12 / 8).
        atol = 2 * 2 * 0.02 * 1.5**0.5 * off_by(12, COARSE)
        assert torch.allclose(weight, threes[name], rtol=0, atol=atol)
        assert torch.allclose(weight, alone[name], rtol=0, atol=atol)


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_products_use_the_compute_dtype_of_the_device(monkeypatch: pytest.MonkeyPatch, narrow: torch.dtype) -> None:
    """And a gradient far too small for a narrow type gives, bit for bit, the step of the same one times 2^20."""
    seen: list[torch.dtype] = []
    monkeypatch.setattr(module, "newton_schulz", lambda x, steps: seen.append(x.dtype) or newton_schulz(x, steps))
    torch.manual_seed(0)
    gradient = torch.randn(12, 8)
    plain = move_of(gradient)
    monkeypatch.setattr(module, "compute_dtype", lambda device: narrow)
    large, small = move_of(gradient), move_of(gradient * 2**-20)
    assert seen == [torch.float32, narrow, narrow]
    assert large.dtype == torch.float32
    assert not large.equal(plain)
    assert large.equal(small)


# Muon: the whole rule ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "unit"), [(torch.float32, COARSE), (torch.float64, FINE)])
@pytest.mark.parametrize(("momentum", "decay", "steps"), [(0.95, 0.5, 5), (0.0, 0.0, 5), (0.6, 2.0, 3)])
@pytest.mark.parametrize(("beta2", "cautious"), [(0.0, False), (0.9, False), (0.0, True)])
def test_muon_equals_its_formula(
    monkeypatch: pytest.MonkeyPatch,
    momentum: float,
    decay: float,
    steps: int,
    beta2: float,
    cautious: bool,
    dtype: torch.dtype,
    unit: float,
) -> None:
    """Momentum, where it leads, singular values one by one, decay and scale: in float64, matrix after matrix."""
    monkeypatch.setattr(module, "compute_dtype", lambda device: dtype)
    model = grow(dtype=dtype)
    choice = Muon(lr=0.1, momentum=momentum, weight_decay=decay, ns_steps=steps, beta2=beta2, cautious=cautious)
    optimizer = make_optimizer(model, choice)
    weights = {name: dict(model.named_parameters())[name] for name in muon_part(optimizer)}
    expected = {name: weight.detach().clone().double() for name, weight in weights.items()}
    average = {name: torch.zeros_like(weight) for name, weight in expected.items()}
    squares = {name: [0.0] * len(weight) for name, weight in expected.items()}
    factors = [1.0, 0.5, 0.1, 2.0]
    for seed, factor in enumerate(factors):
        give_gradients(model, seed)
        set_lr(optimizer, factor)
        optimizer.step()
        for name, weight in weights.items():
            gradient, rate = weight.grad.double(), 0.1 * factor
            average[name] = momentum * average[name] + (1 - momentum) * gradient
            ahead = momentum * average[name] + (1 - momentum) * gradient
            rows, columns = weight.shape
            scale = math.sqrt(rows / columns) if rows > columns else 1.0
            update = by_svd(ahead, steps)
            if beta2:
                squares[name] = [
                    beta2 * mean + (1 - beta2) * float(row @ row) / columns
                    for mean, row in zip(squares[name], update, strict=True)
                ]
                norm = float(update.norm())
                update = torch.stack([row / math.sqrt(mean) for row, mean in zip(update, squares[name], strict=True)])
                update *= norm / float(update.norm())
            decays = (update * expected[name] > 0) if cautious else 1.0
            expected[name] = expected[name] * (1 - rate * decay * decays) - rate * scale * update
    # Each step is off by its rate and scale times what rounding makes of the orthogonal matrix.
    atol = 0.1 * sum(factors) * 1.5**0.5 * off_by(12, unit)
    for name, weight in weights.items():
        assert torch.allclose(weight.detach().double(), expected[name], rtol=0, atol=atol), name
        # Sums of four products of numbers below 4.
        buffer = optimizer.state[weight]["momentum_buffer"].double()
        assert torch.allclose(buffer, average[name], rtol=0, atol=32 * unit)


@pytest.mark.parametrize("shape", [(6, 6), (5, 8), (9, 3)])
def test_muon_equals_torch(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int]) -> None:
    """With its bfloat16, and our float32, replaced by float64 all that is left between them is rounding."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    monkeypatch.setattr(module, "compute_dtype", lambda device: torch.float64)
    torch.manual_seed(0)
    ours, theirs = nn.Parameter(torch.randn(shape, dtype=torch.float64)), nn.Parameter(torch.empty(0))
    theirs.data = ours.detach().clone()
    settings = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.3}
    one = MuonAdamW([{"params": [ours], "kind": "muon", "ns_steps": 5, **settings}])
    two = torch.optim.Muon([theirs], **settings, adjust_lr_fn="original")
    for _ in range(5):
        ours.grad = torch.randn(shape, dtype=torch.float64)
        theirs.grad = ours.grad.clone()
        one.step()
        two.step()
    # Five steps, each off by the rate, the scale and twice what float64 makes of the orthogonal matrix.
    assert torch.allclose(ours, theirs, rtol=0, atol=5 * 0.1 * 3**0.5 * 2 * off_by(9, FINE))


@pytest.mark.parametrize("shape", [(5, 7), (7, 5), (8, 8), (16, 32)])
def test_muon_equals_torch_in_bfloat16(shape: tuple[int, int]) -> None:
    """As it comes, torch's works in bfloat16: off by its roundings, which can be followed where all s are one."""
    a, b, c = NS_COEFFICIENTS
    rank, unit = min(shape), 2**-9
    gradient = with_values(*shape, [3.0] * rank, 0).float()
    theirs = nn.Parameter(torch.zeros(shape))
    theirs.grad = gradient.clone()
    torch.optim.Muon([theirs], lr=1.0, weight_decay=0.0).step()

    # Errors in Frobenius norm over sqrt(rank). The gradient is rounded as it is cast and as it is divided; then each
    # step rounds X X', b X X' + c (X X')^2 and the new X. What is off grows by p' along X and by p / s across it.
    s = rank**-0.5
    error = 2 * unit * s
    for _ in range(5):
        new = a * s + b * s**3 + c * s**5
        rounded = s**3 * abs(b + 2 * c * s**2) + abs(b * s**3 + c * s**5) + new
        error = max(abs(a + 3 * b * s**2 + 5 * c * s**4), new / s) * error + unit * rounded
        s = new
    scale = max(1, shape[0] / shape[1]) ** 0.5
    assert error < 0.1 * s  # or it would say nothing
    assert torch.linalg.matrix_norm(-theirs.detach() / scale - move_of(gradient)) < error * rank**0.5


# Keeping and going on ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", CHOICES)
def test_state_survives_safetensors_and_json_bit_for_bit(choice: Optimizer) -> None:
    model = grow()
    optimizer = make_optimizer(model, choice)
    for seed in range(3):
        give_gradients(model, seed, skip="blocks.1." if seed < 2 else "none")
        set_lr(optimizer, 1 / (seed + 1))
        optimizer.step()
    kept = optimizer.state_dict()
    flat = {f"{i}.{key}": value for i, state in kept["state"].items() for key, value in state.items()}
    assert all(isinstance(value, Tensor) for value in flat.values())
    groups, tensors = json.dumps(kept["param_groups"]), save(flat)

    twin = grow()
    twin.load_state_dict(copy.deepcopy(model.state_dict()))
    again = make_optimizer(twin, choice)
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in load(tensors).items():
        index, key = name.split(".")
        state.setdefault(int(index), {})[key] = value
    again.load_state_dict({"state": state, "param_groups": json.loads(groups)})
    assert [group["lr"] for group in again.param_groups] == [group["lr"] for group in optimizer.param_groups]
    assert_trains_on_equally(model, optimizer, twin, again)


def test_state_survives_torch_save() -> None:
    model = grow()
    optimizer = make_optimizer(model, Muon())
    give_gradients(model, 0)
    optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    twin = grow()
    twin.load_state_dict(copy.deepcopy(model.state_dict()))
    again = make_optimizer(twin, Muon())
    again.load_state_dict(torch.load(file, weights_only=True))
    assert_trains_on_equally(model, optimizer, twin, again)


def assert_trains_on_equally(
    model: nn.Module, optimizer: torch.optim.Optimizer, twin: nn.Module, again: torch.optim.Optimizer
) -> None:
    for seed in range(3, 6):
        for one, its in ((model, optimizer), (twin, again)):
            give_gradients(one, seed)
            set_lr(its, 1 / (seed + 1))
            its.step()
    for weight, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert weight.equal(other)
        assert optimizer.state[weight].keys() == again.state[other].keys()
        assert all(value.equal(again.state[other][key]) for key, value in optimizer.state[weight].items())


# Learning ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", [AdamW(lr=0.01), Muon(lr=0.02, adamw=AdamW(lr=0.01))])
def test_a_small_problem_is_learned(choice: Optimizer) -> None:
    """The next token is the last one and 3, modulo 13: from a guess, ln 13 = 2.56, to hardly a doubt."""
    model = grow(position="rotary")
    optimizer = make_optimizer(model, choice)
    row = torch.arange(0, 36, 3) % 13
    ids = (row[None] + torch.arange(13)[:, None]) % 13

    def loss() -> Tensor:
        optimizer.zero_grad()
        result = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        result.backward()
        return result.detach()

    first = float(loss())
    assert first == pytest.approx(math.log(13), abs=0.2)
    for _ in range(100):
        last = optimizer.step(loss)
    assert last is not None
    assert float(last) < 0.1


# Settings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "field", "bad"),
    [
        *[(AdamW, field, bad) for field in ("lr", "eps") for bad in (0.0, -1.0, math.inf, math.nan)],
        *[(AdamW, field, bad) for field in ("beta1", "beta2") for bad in (-0.1, 1.0, math.nan)],
        *[(Muon, "momentum", bad) for bad in (-0.1, 1.0, math.nan)],
        *[(kind, "weight_decay", bad) for kind in (AdamW, Muon) for bad in (-0.1, math.inf, math.nan)],
        *[(Muon, "lr", bad) for bad in (0.0, -1.0, math.inf, math.nan)],
        *[(Muon, "ns_steps", bad) for bad in (0, -1, 2.5)],
        (Muon, "adamw", "sgd"),
    ],
)
def test_invalid_settings_are_refused(choice: type[AdamW | Muon], field: str, bad: object) -> None:
    with pytest.raises(ConfigError, match=rf"{field}(\.kind)? is "):
        choice(**{field: bad})


@pytest.mark.parametrize("choice", [AdamW(lr=0.5), Muon(ns_steps=3, adamw=AdamW(eps=0.1))])
def test_settings_round_trip(choice: Optimizer) -> None:
    assert parse(Optimizer, dump(choice)) == choice  # type: ignore[arg-type]
