"""Embeddings and positions: statements E1 to E3, P1 to P5 and P7."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import glasshouse as gh
from glasshouse.layers.attend.layout import Layout

BuildModel = Callable[..., Any]
RecordCalls = Callable[[nn.Module], list[Any]]
AssertClose = Callable[..., None]

POSITIONS = ("none", "sinusoidal", "learned", "rotary", "relative", "alibi")
KINDS = ("decoder", "encoder", "seq2seq")


def random_ids(*shape: int) -> Tensor:
    return torch.randint(23, shape)


def run(model: nn.Module, ids: Tensor) -> Tensor:
    """Call a model of any kind; a seq2seq gets the same ids as source and target."""
    return model(ids, ids) if hasattr(model, "encoder") else model(ids)


# E1 ---------------------------------------------------------------------------------------------------------


def test_e1_embedding_lookup_and_shape(build_model: BuildModel, record_calls: RecordCalls) -> None:
    """B x S ids become B x S x D, each vector the embedding row of its id; blocks keep that shape."""
    model = build_model("decoder", n_layers=3)
    embedded, blocks = record_calls(model.token_embedding), [record_calls(block) for block in model.stack.blocks]
    ids = random_ids(2, 5)
    model(ids)
    vectors = embedded[0].output
    assert vectors.shape == (2, 5, model.spec.d_model)
    for b in range(2):
        for i in range(5):
            assert torch.equal(vectors[b, i], model.token_embedding.table.weight[ids[b, i]])
    assert all(block[0].output.shape == vectors.shape for block in blocks)


def test_e1_row_i_is_position_i_in_every_layer(build_model: BuildModel, record_calls: RecordCalls) -> None:
    """With attention ablated, changing the id at position i of one sequence changes only row i, in every layer."""
    model = build_model("encoder", n_layers=3)
    for block in model.stack.blocks:
        nn.init.zeros_(block.attention.layer.out.weight)
    layers = [record_calls(block) for block in model.stack.blocks]
    ids = random_ids(2, 5)
    model(ids)
    for i in range(5):
        other = ids.clone()
        other[1, i] = (ids[1, i] + 1) % 23
        model(other)
        only_i = torch.zeros(2, 5, dtype=torch.bool)
        only_i[1, i] = True
        for calls in layers:
            changed = (calls[-1].output != calls[0].output).any(-1)
            assert torch.equal(changed, only_i)


# E2 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scaled", [False, True])
def test_e2_lookup_equals_one_hot_matmul(build_model: BuildModel, assert_close: AssertClose, scaled: bool) -> None:
    """The lookup equals one-hot(ids) times the V x D embedding matrix, in value and gradient."""
    embedding = build_model("decoder", embed_scale=scaled).token_embedding
    table = embedding.table.weight
    ids = torch.tensor([[3, 7, 3], [0, 22, 3]])
    one_hot = torch.zeros(2, 3, 23, dtype=torch.float64)
    for b in range(2):
        for i in range(3):
            one_hot[b, i, ids[b, i]] = 1
    product = one_hot @ table * (math.sqrt(16) if scaled else 1)
    assert table.shape == (23, 16)
    assert torch.equal(embedding(ids), product)

    pull = torch.randn(2, 3, 16, dtype=torch.float64)
    (by_lookup,) = torch.autograd.grad((embedding(ids) * pull).sum(), table)
    (by_product,) = torch.autograd.grad((product * pull).sum(), table)
    assert_close(by_lookup, by_product)


@pytest.mark.parametrize("kind", KINDS)
def test_e2_untied_embedding_gradient_is_zero_in_unused_rows(build_model: BuildModel, kind: str) -> None:
    """With an untied head the embedding's gradient is exactly 0 in rows of unused ids; tied, in none."""
    ids = torch.tensor([[3, 7, 3, 11], [0, 22, 3, 7]])
    used = {3, 7, 11, 0, 22}
    for tied in (False, True):
        head = {"kind": "masked_token" if kind == "encoder" else "next_token", "tied": tied}
        model = build_model(kind, head=head)
        F.cross_entropy(run(model, ids).flatten(0, 1), ids.flatten()).backward()
        reached = {row for row, grad in enumerate(model.token_embedding.table.weight.grad) if grad.abs().max() > 0}
        assert reached == (set(range(23)) if tied else used)


# E3 ---------------------------------------------------------------------------------------------------------


def pad(rows: list[Tensor], side: str) -> tuple[Tensor, Tensor]:
    """Pad with random ids, so that a leak would show, to beyond the longest length."""
    length = max(map(len, rows)) + 2
    ids, real = random_ids(len(rows), length), torch.zeros(len(rows), length, dtype=torch.bool)
    for b, row in enumerate(rows):
        begin = {"right": 0, "left": length - len(row), "both": 1}[side]
        ids[b, begin : begin + len(row)] = row
        real[b, begin : begin + len(row)] = True
    return ids, real


def losses_and_gradients(
    model: nn.Module, logits: list[Tensor], labels: list[Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    loss = torch.stack([F.cross_entropy(x, y, reduction="sum") for x, y in zip(logits, labels, strict=True)])
    names, parameters = zip(*model.named_parameters(), strict=True)
    return loss, dict(zip(names, torch.autograd.grad(loss.sum(), parameters), strict=True))


@pytest.mark.few(18)
@pytest.mark.parametrize("padding", ["right by lengths", "right by mask", "left by mask", "both by mask"])
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_e3_padding_does_not_change_real_positions(
    build_model: BuildModel, assert_close: AssertClose, kind: str, position: str, padding: str
) -> None:
    """Each sequence of a padded batch, with an empty one in it, has the logits, loss and gradients it has alone."""
    model = build_model(kind, position=position)
    side, _, form = padding.split()
    rows = [random_ids(n) for n in (5, 2, 7)]
    sources = [random_ids(n) for n in (3, 6, 4)]
    labels = [random_ids(len(row)) for row in rows]

    def padding_arguments(real: Tensor, prefix: str = "") -> dict[str, Tensor]:
        return {f"{prefix}lengths": real.sum(1)} if form == "lengths" else {f"{prefix}mask": real}

    empty = torch.empty(0, dtype=torch.long)
    ids, real = pad([*rows, empty], side)
    if kind == "seq2seq":
        source, source_real = pad([*sources, empty], side)
        alone = [model(x[None], y[None])[0] for x, y in zip(sources, rows, strict=True)]
        padded = model(source, ids, **padding_arguments(source_real), **padding_arguments(real, "target_"))
    else:
        alone = [model(row[None])[0] for row in rows]
        padded = model(ids, **padding_arguments(real))
    assert padded.isfinite().all()
    together = [padded[b][real[b]] for b in range(len(rows))]

    for one, same in zip(together, alone, strict=True):
        assert_close(one, same)
    loss, gradients = losses_and_gradients(model, together, labels)
    expected_loss, expected = losses_and_gradients(model, alone, labels)
    assert_close(loss, expected_loss)
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=1e-12 * largest)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("pooling", ["first", "mean", "last"])
def test_e3_padding_does_not_change_pooled_output(
    build_model: BuildModel, assert_close: AssertClose, pooling: str, side: str
) -> None:
    """The pooled output of a padded sequence is that of the sequence alone."""
    model = build_model("encoder", head={"kind": "sequence_classification", "n_labels": 3, "pooling": pooling})
    rows = [random_ids(n) for n in (5, 2, 7)]
    ids, real = pad(rows, side)
    assert_close(model(ids, mask=real), torch.cat([model(row[None]) for row in rows]))


# P1 to P4: sinusoidal positions -----------------------------------------------------------------------------


def sinusoids(model: nn.Module, positions: Tensor) -> Tensor:
    """Return the sinusoidal position embeddings [S, D] at positions [S]."""
    zeros = torch.zeros(1, len(positions), model.spec.d_model, dtype=torch.float64)
    return model.stack.position.embed(zeros, positions[None])[0]


def frequency(k: int, width: int) -> float:
    return 10_000 ** (-2 * k / width)


def test_p1_sinusoidal_formula(build_model: BuildModel) -> None:
    """Dimensions 2k and 2k + 1 of position t hold the sine and cosine of t / 10000^(2k/D)."""
    width = 32
    codes = sinusoids(build_model("decoder", position="sinusoidal", d_model=width), torch.arange(600))
    for t in range(0, 600, 7):
        for k in range(width // 2):
            angle = t / 10_000 ** (2 * k / width)
            # The rounding error of an angle below 600, a few ulps, is less than 600 * 2**-50.
            assert abs(codes[t, 2 * k].item() - math.sin(angle)) < 600 * 2**-50
            assert abs(codes[t, 2 * k + 1].item() - math.cos(angle)) < 600 * 2**-50


def test_p1_sinusoidal_embedding_is_added_to_token_embedding(
    build_model: BuildModel, record_calls: RecordCalls, assert_close: AssertClose
) -> None:
    """The first block's input is the token embedding plus the sinusoidal embedding of its position, from 0."""
    model = build_model("decoder", position="sinusoidal", embed_scale=False)
    first = record_calls(model.stack.blocks[0])
    ids = random_ids(2, 9)
    model(ids)
    code = torch.tensor(
        [[f(t * frequency(k, 16)) for k in range(8) for f in (math.sin, math.cos)] for t in range(9)],
        dtype=torch.float64,
    )
    assert_close(first[0].args[0], model.token_embedding.table.weight[ids] + code)


@pytest.mark.parametrize("offset", [1, 5, 100, -3])
def test_p2_offset_is_a_rotation(build_model: BuildModel, assert_close: AssertClose, offset: int) -> None:
    """One matrix, a rotation per pair that depends only on the offset, maps every t's embedding to t + offset's."""
    width = 32
    model = build_model("decoder", position="sinusoidal", d_model=width)
    matrix = torch.zeros(width, width, dtype=torch.float64)
    for k in range(width // 2):
        cos, sin = math.cos(offset * frequency(k, width)), math.sin(offset * frequency(k, width))
        pair = slice(2 * k, 2 * k + 2)
        matrix[pair, pair] = torch.tensor([[cos, sin], [-sin, cos]], dtype=torch.float64)
    assert_close(matrix @ matrix.T, torch.eye(width, dtype=torch.float64))
    assert_close(torch.linalg.det(matrix), torch.tensor(1.0, dtype=torch.float64))
    start = torch.arange(3, 600)
    assert_close(sinusoids(model, start) @ matrix.T, sinusoids(model, start + offset))


def test_p3_injective_bounded_and_of_constant_norm(build_model: BuildModel, assert_close: AssertClose) -> None:
    """The embeddings of 2,048 positions are distinct, with coordinates within 1 and norm sqrt(D/2)."""
    for width in (16, 64):
        codes = sinusoids(build_model("decoder", position="sinusoidal", d_model=width), torch.arange(2048))
        distances = torch.cdist(codes, codes, compute_mode="donot_use_mm_for_euclid_dist")
        nearest = distances.fill_diagonal_(math.inf).min().item()
        print(f"\nP3 width {width}: the two nearest of 2048 embeddings are {nearest:.3f} apart")
        assert nearest > 1e-3
        assert codes.abs().max() <= 1
        assert_close(codes.norm(dim=-1), torch.full((2048,), math.sqrt(width / 2), dtype=torch.float64))


def test_p3_deterministic_for_any_sequence_length(build_model: BuildModel) -> None:
    """A position's embedding is bit-equal in short and long sequences, in another model and with another seed."""
    model = build_model("decoder", position="sinusoidal")
    longest = sinusoids(model, torch.arange(700))
    torch.manual_seed(1)
    other = build_model("decoder", position="sinusoidal", max_len=999)
    for length in (1, 10, 333, 700):
        assert torch.equal(sinusoids(other, torch.arange(length)), longest[:length])


def test_p3_distance_depends_only_on_offset(build_model: BuildModel, assert_close: AssertClose) -> None:
    """The distance of positions t and t + n is sqrt(sum over pairs of 2 - 2 cos(n w)) for every t."""
    codes = sinusoids(build_model("decoder", position="sinusoidal"), torch.arange(600))
    for offset in (1, 2, 17, 250):
        squared = sum(2 - 2 * math.cos(offset * frequency(k, 16)) for k in range(8))
        distance = (codes[offset:] - codes[:-offset]).norm(dim=-1)
        assert_close(distance, torch.full_like(distance, math.sqrt(squared)))


def test_p4_extends_past_training_length_without_parameters(build_model: BuildModel) -> None:
    """With max_len 8, sinusoidal has as many parameters as with 4,096 and runs on 64 tokens; learned does not."""
    short, long = (build_model("decoder", position="sinusoidal", max_len=n) for n in (8, 4096))
    count = [sum(p.numel() for p in model.parameters()) for model in (short, long)]
    assert count[0] == count[1]
    assert list(short.stack.position.parameters()) == []
    assert short(random_ids(1, 64)).isfinite().all()

    learned = build_model("decoder", position="learned", max_len=8)
    assert sum(p.numel() for p in learned.parameters()) == count[0] + 8 * 16
    with pytest.raises(gh.InputError, match="max_len is 8"):
        learned(random_ids(1, 9))


@pytest.mark.parametrize("width", [16, 64, 512])
def test_p4_wavelengths_are_geometric(build_model: BuildModel, width: int) -> None:
    """Measured wavelengths are a geometric sequence from 2 pi to 2 pi * 10000^(1 - 2/D)."""
    codes = sinusoids(build_model("decoder", position="sinusoidal", d_model=width), torch.arange(100))
    sin, cos = codes[:, 0::2], codes[:, 1::2]
    # The angle from one position to the next is at most 1 radian, so no full turn is missed.
    angle = torch.atan2(sin[1:] * cos[:-1] - cos[1:] * sin[:-1], cos[1:] * cos[:-1] + sin[1:] * sin[:-1])
    wavelengths = (2 * math.pi / angle.mean(0)).tolist()
    print(f"\nP4 width {width}: wavelengths {wavelengths[0]:.4f} to {wavelengths[-1]:.1f} positions")
    # The smallest angle, about 1e-4, has an error of 2**-53, so the wavelength a relative one of about 1e-12.
    assert math.isclose(wavelengths[0], 2 * math.pi, rel_tol=1e-10)
    assert math.isclose(wavelengths[-1], 2 * math.pi * 10_000 ** (1 - 2 / width), rel_tol=1e-10)
    for shorter, longer in itertools.pairwise(wavelengths):
        assert math.isclose(longer / shorter, 10_000 ** (2 / width), rel_tol=1e-10)


def test_p4_sign_flips_like_the_bits_of_a_counter(build_model: BuildModel) -> None:
    """Over N positions a sine changes sign floor(N w / pi) times, fewer with each pair, like a counter's bits."""
    count, width = 4096, 16
    sines = sinusoids(build_model("decoder", position="sinusoidal", d_model=width), torch.arange(1, count))[:, 0::2]
    flips = (sines.sign().diff(dim=0) != 0).sum(0).tolist()
    bits = [sum((n >> bit) & 1 != ((n - 1) >> bit) & 1 for n in range(1, count)) for bit in range(8)]
    print(f"\nP4 sign flips over {count} positions: {flips}; flips of a counter's bits: {bits}")
    assert flips == [math.floor((count - 1) * frequency(k, width) / math.pi) for k in range(8)]
    assert flips == sorted(flips, reverse=True)
    assert bits == sorted(bits, reverse=True)


# P5: learned positions --------------------------------------------------------------------------------------


def test_p5_learned_positions_are_randomly_initialised() -> None:
    """Each position has a random vector of width D, with the standard deviation of the spec."""
    spec = gh.preset("gpt2", n_layers=1, d_model=48, n_heads=4, vocab_size=50, max_len=200)
    first, second = (gh.build(spec).stack.position.table.weight for _ in range(2))
    assert first.shape == (200, 48)
    assert not torch.equal(first, second)
    # The relative error of a sample standard deviation over n samples is 1 / sqrt(2 n).
    spread = 5 / math.sqrt(2 * first.numel())
    assert abs(first.std().item() / spec.init.std - 1) < spread
    assert abs(first.mean().item()) < 5 * spec.init.std / math.sqrt(first.numel())


@pytest.mark.parametrize("offset", [0, 2])
def test_p5_learned_positions_are_added_to_token_embeddings(
    build_model: BuildModel, record_calls: RecordCalls, assert_close: AssertClose, offset: int
) -> None:
    """The first block's input is the token embedding plus the position embedding at position + offset."""
    model = build_model("decoder", position={"kind": "learned", "offset": offset})
    first = record_calls(model.stack.blocks[0])
    ids = random_ids(2, 9)
    model(ids)
    for b in range(2):
        for i in range(9):
            expected = model.token_embedding.table.weight[ids[b, i]] + model.stack.position.table.weight[i + offset]
            assert_close(first[0].args[0][b, i], expected)


def test_p5_learned_positions_are_trained(build_model: BuildModel) -> None:
    """An optimizer step changes the embeddings of the positions used, and only those."""
    model = build_model("decoder", position="learned")
    table = model.stack.position.table.weight
    before = table.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = random_ids(2, 9)
    F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
    optimizer.step()
    changed = (table != before).any(-1)
    assert changed.tolist() == [position < 9 for position in range(model.spec.max_len)]


def test_p5_a_lookup_is_a_product_with_the_one_hot_matrix(build_model: BuildModel, assert_close: AssertClose) -> None:
    """I_P, S x L with ones on the diagonal, times the table gives what is added to S tokens."""
    model = build_model("decoder", position="learned")
    position, (length, width) = model.stack.position, model.stack.position.table.weight.shape
    for s in (1, 9, length):
        one_hot = [[float(row == column) for column in range(length)] for row in range(s)]
        product = torch.tensor(one_hot, dtype=torch.float64) @ position.table.weight
        added = position.embed(torch.zeros(1, s, width, dtype=torch.float64), torch.arange(s)[None])[0]
        assert_close(added, product)


# P7: rotary positions ---------------------------------------------------------------------------------------

ROTARY = {
    "halves": {"kind": "rotary"},
    "pairs": {"kind": "rotary", "layout": "pairs", "theta": 500.0},
    "linear": {"kind": "rotary", "scaling": {"kind": "linear", "factor": 4.0}},
    "llama3": {
        "kind": "rotary",
        "scaling": {
            "kind": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_len": 64,
        },
    },
    "yarn": {"kind": "rotary", "scaling": {"kind": "yarn", "factor": 4.0, "original_max_len": 64}},
}


def same_token_scores(model: nn.Module, record_calls: RecordCalls, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Repeat one token; return the scores [H, S, S], and q and k [H, d] at position 0."""
    kernel = record_calls(model.stack.blocks[0].attention.layer.attend)
    model(torch.full((1, length), 5))
    q, k = (x.detach()[0] for x in kernel[0].args[:2])
    return q @ k.transpose(-2, -1), q[:, 0], k[:, 0]


@pytest.mark.parametrize("choice", ROTARY)
def test_p7_rotary_scores_depend_only_on_offset(
    build_model: BuildModel, record_calls: RecordCalls, choice: str
) -> None:
    """With the same query and key at every position, scores of equal offset agree and others differ."""
    length = 64
    scores, q, k = same_token_scores(
        build_model("decoder", position=ROTARY[choice], d_model=32), record_calls, length
    )
    # Angles are float32 by design: the rounding error of an angle t is t * 2**-24, of its sine and cosine 2**-24
    # more, for the query and for the key; a rotation by a changes the score by at most a |q| |k|.
    allowed = 4 * (length + 1) * 2**-24 * (q.norm(dim=-1) * k.norm(dim=-1))
    for offset in range(length):
        same = scores.diagonal(-offset, dim1=-2, dim2=-1)
        assert ((same - same[:, :1]).abs().amax(1) < allowed).all()
    by_offset = scores[:, :, 0]
    assert (by_offset.amax(1) - by_offset.amin(1) > 1000 * allowed).all()


@pytest.mark.parametrize("choice", ["halves", "pairs"])
def test_p7_rotary_score_is_a_sum_of_rotated_pairs(
    build_model: BuildModel, record_calls: RecordCalls, choice: str
) -> None:
    """The score at offset n is the real part of the sum over pairs of q * conj(k) * e^(i n w), pairs as complex."""
    length, d = 40, 8
    model = build_model("decoder", position=ROTARY[choice], d_model=4 * d)
    scores, q, k = same_token_scores(model, record_calls, length)
    first, second = (slice(0, 4), slice(4, 8)) if choice == "halves" else (slice(0, 8, 2), slice(1, 8, 2))
    pairs = torch.complex(q[:, first], q[:, second]) * torch.complex(k[:, first], k[:, second]).conj()
    # As above; the frequencies, too, are float32, with a relative error of a few times 2**-24.
    allowed = 8 * (length + 1) * 2**-24 * pairs.abs().sum(-1)
    for i in range(length):
        for j in range(length):
            angles = [(i - j) * model.spec.position.theta ** (-2 * n / d) for n in range(d // 2)]
            rotations = torch.tensor([complex(math.cos(a), math.sin(a)) for a in angles], dtype=torch.complex128)
            assert ((pairs @ rotations).real - scores[:, i, j]).abs().lt(allowed).all()


@pytest.mark.parametrize("position", ["rotary", "relative", "alibi", "sinusoidal", "learned"])
def test_p7_rotary_model_is_shift_invariant(build_model: BuildModel, position: str) -> None:
    """Shifting all positions by 500 does not change a rotary stack's output, and does with absolute positions."""
    shift, length = 500, 12
    model = build_model("decoder", position=position, max_len=1024)
    x = model.token_embedding(random_ids(2, length))
    here = model.stack(x, Layout(torch.arange(length)[None]))
    there = model.stack(x, Layout(torch.arange(length)[None] + shift))
    change = ((there - here).abs().max() / here.abs().max()).item()
    if position in ("sinusoidal", "learned"):
        assert change > 0.01
    else:
        # Rounding of float32 angles again; two layers with scores of order 10 may each amplify it tenfold.
        assert change < (100 * shift * 2**-24 if position == "rotary" else 1e-12)
