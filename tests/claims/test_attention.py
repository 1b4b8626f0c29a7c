"""Attention: statements A1 to A10 and A12."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import glasshouse as gh
from claims.document import documented_rows
from glasshouse.layers.attend import Explicit, Fused
from glasshouse.layers.mask import Mask
from glasshouse.spec import DecoderSpec

Grow = Callable[..., Any]
Watch = Callable[[nn.Module], list[Any]]
Agree = Callable[..., None]
Attend = Fused | Explicit

PLAIN = {"position": "none", "qkv_bias": False}
POSITIONS = ("sinusoidal", "learned", "rotary", "relative", "alibi")
KERNELS = (Fused, Explicit)


def random_ids(*shape: int) -> Tensor:
    return torch.randint(23, shape)


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def hide_nothing(*shape: int) -> Tensor:
    """Return a mask without padding, which makes a model draw the causal order itself, not leave it to the kernel."""
    return torch.ones(shape, dtype=torch.bool)


def first_attention(model: nn.Module) -> Any:  # noqa: ANN401 - modules are looked into by name
    return model.stack.blocks[0].attention.layer


def attention_weights(attend: Attend, q: Tensor, k: Tensor, mask: Mask) -> Tensor:
    """Return the weights [B, H, Q, K] a kernel uses: what it gives when value j is the unit vector e_j."""
    unit = torch.eye(k.shape[2], dtype=k.dtype).expand(*k.shape[:3], -1)
    return attend(q, k, unit.contiguous(), mask)


def softmax(scores: list[float]) -> list[float]:
    powers = [math.exp(score - max(scores)) for score in scores]
    return [power / sum(powers) for power in powers]


def retrieve(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Look one query [d] up against keys [n, d]: the mean of the values [n, d], weighted by the softmax."""
    scores = [sum(a * b for a, b in zip(query.tolist(), key.tolist(), strict=True)) for key in keys]
    weights = softmax([score / math.sqrt(len(query)) for score in scores])
    return sum((weight * value for weight, value in zip(weights, values, strict=True)), torch.zeros_like(query))


def by_hand(
    x: Tensor,
    source: Tensor,
    query: tuple[Tensor, Tensor],
    key: tuple[Tensor, Tensor],
    value: tuple[Tensor, Tensor],
    out: nn.Linear,
    n_heads: int,
    causal: bool,
    groups: int,
) -> Tensor:
    """Attend from x [B, Q, D] over the source [B, K, D], one head and one position at a time.

    Matrices and biases stand as in nn.Linear; each of `groups` pairs of key and value heads serves as many
    query heads, in order.
    """
    per_group = n_heads // groups
    rows = []
    for mine, theirs in zip(x, source, strict=True):
        heads = []
        for head in range(n_heads):
            wq, bq = (part.chunk(n_heads)[head] for part in query)
            wk, bk = (part.chunk(groups)[head // per_group] for part in key)
            wv, bv = (part.chunk(groups)[head // per_group] for part in value)
            q, k, v = mine @ wq.T + bq, theirs @ wk.T + bk, theirs @ wv.T + bv
            ends = [i + 1 if causal else len(theirs) for i in range(len(mine))]
            heads.append(torch.stack([retrieve(q[i], k[:end], v[:end]) for i, end in enumerate(ends)]))
        rows.append(torch.cat(heads, -1) @ out.weight.T + out.bias)
    return torch.stack(rows)


def self_attention_by_hand(attention: Any, x: Tensor, n_heads: int, causal: bool, groups: int) -> Tensor:  # noqa: ANN401
    projections = (attention.query, attention.key, attention.value)
    nothing = torch.zeros((), dtype=x.dtype)
    parts = [(p.weight, nothing.expand(len(p.weight)) if p.bias is None else p.bias) for p in projections]
    return by_hand(x, x, *parts, attention.out, n_heads, causal, groups)


# A1 and A2 --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("d_head", [0, 6])
def test_a1_each_head_has_its_own_projections(grow: Grow, watch: Watch, agree: Agree, d_head: int) -> None:
    """Per head, q, k and v are x times a D x d_head matrix each; d_head is D / heads unless it is given."""
    model = grow("decoder", **PLAIN, d_head=d_head)
    attention = first_attention(model)
    width = d_head or 16 // 4
    inputs, kernel = watch(attention), watch(attention.attend)
    model(random_ids(2, 5))
    x, received = inputs[0].args[0], kernel[0].args[:3]
    projections = (attention.query, attention.key, attention.value)
    for matrices, actual in zip([p.weight for p in projections], received, strict=True):
        assert actual.shape == (2, 4, 5, width)
        for head in range(4):
            matrix = matrices[head * width : (head + 1) * width].T
            assert matrix.shape == (16, width)
            for b in range(2):
                for i in range(5):
                    agree(actual[b, head, i], sum(x[b, i, d] * matrix[d] for d in range(16)))


def test_a1_d_model_is_often_heads_times_d_head() -> None:
    """In the original, GPT-2, BERT, T5 and Llama, D = heads * d_head, though nothing asks for it."""
    for name in ("vaswani-base", "vaswani-big", "gpt2", "gpt2-xl", "bert-base", "t5-small", "llama-1b"):
        spec = gh.preset(name)
        assert spec.d_model == spec.n_heads * spec.d_head, name


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("d_head", [4, 8])
def test_a2_score_is_a_bilinear_form_of_low_rank(
    grow: Grow, watch: Watch, agree: Agree, d_head: int, kernel: type[Attend]
) -> None:
    """Log-weights differ as q_i . k_j / sqrt(d_head) do, which is x_i M x_j / sqrt(d_head), M of rank d_head."""
    model = grow("encoder", **PLAIN, d_head=d_head)
    attention = first_attention(model)
    inputs, calls = watch(attention), watch(attention.attend)
    model(random_ids(2, 7))
    x, (q, k, _, mask) = inputs[0].args[0], calls[0].args
    # Small, so that no weight is too small to take the logarithm of.
    x, q, k = x / 2, q / 2, k / 2
    weights = attention_weights(kernel(attention.attend.scale, 0.0), q, k, mask)
    relative = weights.log() - weights.log()[..., :1]
    wq, wk = attention.query.weight, attention.key.weight
    for head in range(4):
        rows = slice(head * d_head, (head + 1) * d_head)
        matrix = wq[rows].T @ wk[rows]
        assert matrix.shape == (16, 16)
        assert torch.linalg.matrix_rank(matrix) == d_head
        for b in range(2):
            scores, bilinear = (torch.empty(7, 7, dtype=torch.float64) for _ in range(2))
            for i in range(7):
                for j in range(7):
                    scores[i, j] = torch.dot(q[b, head, i], k[b, head, j]) / math.sqrt(d_head)
                    bilinear[i, j] = x[b, i] @ matrix @ x[b, j] / math.sqrt(d_head)
            agree(bilinear, scores)
            # A weight of e^-20 carries the rounding of one of order 1, so 2**-52 * e^20 at worst: about 1e-7.
            agree(relative[b, head], scores - scores[:, :1], within=1e-7)


# A3 ---------------------------------------------------------------------------------------------------------


def test_a3_dividing_keeps_scores_and_gradients_alike_at_any_width() -> None:
    """Divided, scores have variance 1 and softmax gradients one size at any width; undivided, d and next to 0."""
    rows, keys = 400, 32
    documented = [[float(cell) for cell in row] for row in documented_rows("| d_head |")]
    print()
    divided_gradients, plain_gradients = [], []
    for width in (4, 16, 64, 256, 1024):
        spec = DecoderSpec(vocab_size=2, d_model=8, n_heads=2, d_head=width, n_layers=1)
        divided = Explicit(first_attention(gh.build(spec)).attend.scale, 0.0)
        q, k, pull = torch.randn(rows, 1, 1, width), torch.randn(rows, 1, keys, width), torch.randn(rows, 1, 1, keys)
        figures = []
        for kernel in (divided, Explicit(1.0, 0.0)):
            scores = kernel.scores(q, k, Mask()).requires_grad_()
            (gradient,) = torch.autograd.grad((kernel.pattern(scores) * pull).sum(), scores)
            figures.append((scores.var().item(), gradient.norm(dim=-1).median().item()))
        (variance, alive), (plain_variance, dead) = figures
        print(
            f"A3 width {width}: variance of scores {variance:.2f} divided, {plain_variance:.1f} not; "
            f"median norm of the softmax's gradient {alive:.3f} divided, {dead:.1e} not"
        )
        # Platforms may draw other numbers: 10% is twice the spread of the noisiest figure, the variance at width 4.
        assert documented.pop(0) == pytest.approx([width, variance, plain_variance, alive, dead], rel=0.1)
        # Rows share a query, whose squared length varies by 2 / d of itself; then come the draws of single scores.
        spread = 5 * math.sqrt(2 / (width * rows) + (2 + 6 / width) / (rows * keys))
        assert abs(variance - 1) < spread
        assert abs(plain_variance / width - 1) < spread
        divided_gradients.append(alive)
        plain_gradients.append(dead)
    assert not documented
    # Softmax of 32 unit-variance scores; at width 4 the scores are not yet normal, so a quarter is allowed.
    assert max(divided_gradients) < 1.25 * min(divided_gradients)
    assert plain_gradients[1:] == sorted(plain_gradients[1:], reverse=True)
    assert plain_gradients[-1] < 1e-2 * divided_gradients[-1]


# A4 ---------------------------------------------------------------------------------------------------------


def random_mask(n: int) -> Tensor:
    """Return who sees whom, [2, 1, n, n]: about half, query 1 of row 0 no key at all, every other query its own."""
    seen = (torch.rand(2, 1, n, n) < 0.5) | torch.eye(n, dtype=torch.bool)
    seen[0, :, 1] = False
    return seen


def added(seen: Tensor) -> Tensor:
    return torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -math.inf)


@pytest.mark.parametrize("form", ["bool", "float"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a4_a_mask_is_added_before_the_softmax(agree: Agree, kernel: type[Attend], form: str) -> None:
    """Weights are the softmax of scores plus 0 or -infinity, and exactly 0 wherever -infinity was added."""
    n = d = 8
    q, k, seen = randn(2, 3, n, d), randn(2, 3, n, d), random_mask(n)
    weights = attention_weights(kernel(d**-0.5, 0.0), q, k, Mask(dense=seen if form == "bool" else added(seen)))
    assert (weights[~seen.expand(-1, 3, -1, -1)] == 0).all()
    mask = added(seen)
    for b in range(2):
        for head in range(3):
            for i in range(n):
                if (b, i) == (0, 1):
                    continue  # nothing is allowed there
                scores = [torch.dot(q[b, head, i], k[b, head, j]).item() / math.sqrt(d) for j in range(n)]
                expected = softmax([score + mask[b, 0, i, j].item() for j, score in enumerate(scores)])
                agree(weights[b, head, i], torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize(
    ("kernel", "form"),
    list(itertools.product([Fused, Explicit], ["bool", "float", "float with gradient"])),
)
def test_a4_nothing_allowed_gives_zero(kernel: type[Attend], form: str, kv_heads: int, dtype: torch.dtype) -> None:
    """A query that may see nothing gets exactly 0, passes back exactly 0, and makes no NaN anywhere."""
    n = d = 8
    q, k, v = (randn(2, heads, n, d).to(dtype).requires_grad_() for heads in (4, kv_heads, kv_heads))
    seen = random_mask(n)
    dense = seen if form == "bool" else added(seen).to(dtype).requires_grad_("gradient" in form)
    attend = kernel(d**-0.5, 0.0)
    z = attend(q, k, v, Mask(dense=dense))
    assert (z[0, :, 1] == 0).all()
    others = torch.ones(2, n, dtype=torch.bool)
    others[0, 1] = False
    assert (z.transpose(1, 2)[others] != 0).all()

    pull = randn(2, 4, n, d).to(dtype)
    inputs = [q, k, v, *([dense] if dense.requires_grad else [])]
    gradients = torch.autograd.grad((z * pull).sum(), inputs)
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert (gradients[0][0, :, 1] == 0).all()
    if dense.requires_grad:
        assert (gradients[3][0, :, 1] == 0).all()
    # Keys and values feel only the other queries: leave the blind query's output out, and nothing changes.
    elsewhere = torch.autograd.grad(
        (attend(q, k, v, Mask(dense=dense)) * pull * others[:, None, :, None]).sum(), inputs
    )
    for gradient, same in zip(gradients, elsewhere, strict=True):
        assert torch.equal(gradient, same)


# A5 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_a5_each_row_is_a_distribution_over_what_it_sees(
    grow: Grow, watch: Watch, agree: Agree, kind: str, drawn: bool, kernel: type[Attend]
) -> None:
    """Weights are positive where allowed, sum to 1, and are P(j | i) = e^score(i, j) / sum of e^score(i, .)."""
    n = 4
    model = grow(kind)
    attention = first_attention(model)
    calls = watch(attention.attend)
    model(random_ids(2, n), mask=hide_nothing(2, n) if drawn else None)
    q, k, _, mask = calls[0].args
    weights = attention_weights(kernel(attention.attend.scale, 0.0), q, k, mask)
    for b in range(2):
        for head in range(4):
            for i in range(n):
                context = range(i + 1 if kind == "decoder" else n)
                powers = {j: math.exp(torch.dot(q[b, head, i], k[b, head, j]).item() / 2) for j in context}
                expected = [powers.get(j, 0.0) / sum(powers.values()) for j in range(n)]
                agree(weights[b, head, i], torch.tensor(expected, dtype=torch.float64))
                assert [weight > 0 for weight in weights[b, head, i].tolist()] == [j in context for j in range(n)]
    agree(weights.sum(-1), torch.ones(2, 4, n, dtype=torch.float64))


def test_a5_weights_are_the_matrix_of_a_markov_chain(grow: Grow, watch: Watch, agree: Agree) -> None:
    """Powers of A stay row-stochastic, and a causal chain, which cannot leave position 0, ends there."""
    model = grow("decoder")
    attention = first_attention(model)
    calls = watch(attention.attend)
    model(random_ids(1, 4))
    q, k, _, mask = calls[0].args
    step = attention_weights(attention.attend, q, k, mask)[0]
    chance = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    walked = step
    for _ in range(20):
        chance = chance @ step[0]
        agree(chance.sum(), torch.tensor(1.0, dtype=torch.float64))
        walked = walked @ step
        assert (walked >= 0).all()
        agree(walked.sum(-1), torch.ones(4, 4, dtype=torch.float64))
    ended = torch.linalg.matrix_power(step, 2**20)
    agree(ended, torch.eye(4, dtype=torch.float64)[0].expand(4, 4, 4), within=1e-9)


# A6 and A7 --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("d_head", [0, 6])
@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_a6_heads_are_concatenated_and_projected(
    grow: Grow, watch: Watch, agree: Agree, kind: str, d_head: int
) -> None:
    """The layer equals, worked head by head, weighted sums of values, joined and times Wo; it keeps x's shape."""
    model = grow(kind, position="none", d_head=d_head)
    attention = first_attention(model)
    calls, kernel = watch(attention), watch(attention.attend)
    model(random_ids(2, 6))
    x, output = calls[0].args[0], calls[0].output
    assert attention.out.weight.T.shape == (4 * (d_head or 4), 16)
    assert output.shape == x.shape
    agree(output, self_attention_by_hand(attention, x, 4, causal=kind == "decoder", groups=4))

    # The weighted sum on its own: output i of a head is the sum over j of weight(i, j) times v_j.
    q, k, v, mask = kernel[0].args
    weights = attention_weights(attention.attend, q, k, mask)
    z = kernel[0].output
    for i in range(6):
        agree(z[:, :, i], sum(weights[:, :, i, j, None] * v[:, :, j] for j in range(6)))


@pytest.mark.parametrize("drawn", [False, True])
def test_a7_one_product_is_as_many_retrievals(grow: Grow, watch: Watch, agree: Agree, drawn: bool) -> None:
    """Row i of one pass over S positions is the lookup of x_i against x_0 .. x_i, and of the layer run on those."""
    model = grow("decoder", position="none")
    attention = first_attention(model)
    calls, kernel = watch(attention), watch(attention.attend)
    ids = random_ids(2, 7)
    model(ids, mask=hide_nothing(2, 7) if drawn else None)
    (q, k, v, _), z, output = kernel[0].args, kernel[0].output, calls[0].output
    for i in range(7):
        for b in range(2):
            for head in range(4):
                alone = retrieve(q[b, head, i], k[b, head, : i + 1], v[b, head, : i + 1])
                agree(z[b, head, i], alone)
        model(ids[:, : i + 1])
        agree(calls[-1].output[:, -1], output[:, i])


def test_a7_the_scores_are_one_square_product(agree: Agree) -> None:
    """Entry (i, j) of the S x S scores is the one dot product of query i and key j."""
    q, k = randn(1, 2, 6, 5), randn(1, 2, 6, 5)
    scores = Explicit(5**-0.5, 0.0).scores(q, k, Mask())
    assert scores.shape == (1, 2, 6, 6)
    for head in range(2):
        for i in range(6):
            for j in range(6):
                agree(scores[0, head, i, j], torch.dot(q[0, head, i], k[0, head, j]) / math.sqrt(5))


# A8 and A9 --------------------------------------------------------------------------------------------------


def test_a8_without_positions_and_mask_order_means_nothing(grow: Grow, agree: Agree) -> None:
    """Without positions and mask, permuted tokens give the outputs permuted alike, for every permutation tried."""
    model = grow("encoder", position="none")
    ids = random_ids(2, 6)
    before = model(ids)
    for _ in range(5):
        order = torch.randperm(6)
        agree(model(ids[:, order]), before[:, order])


@pytest.mark.parametrize(("kind", "position"), [("decoder", "none"), *(("encoder", name) for name in POSITIONS)])
def test_a8_a_causal_mask_or_positions_bring_order_in(grow: Grow, kind: str, position: str) -> None:
    """With a causal mask, or with any kind of position, permuted tokens give other outputs."""
    model = grow(kind, position=position)
    ids = torch.tensor([[1, 2, 3, 4, 5, 6]])
    before, order = model(ids), torch.tensor([3, 0, 5, 1, 4, 2])
    assert (model(ids[:, order]) - before[:, order]).abs().max() > 0.01 * before.abs().max()


CAUSAL = {
    "none": {"position": "none"},
    **{name: {"position": name} for name in POSITIONS},
    "grouped": {"n_kv_heads": 2},
    "window": {"windows": [0, 3]},
    "soft-cap": {"attention_softcap": 5.0},
    "norm-after": {"norm_placement": "post"},
}


@pytest.mark.parametrize("choice", CAUSAL)
@pytest.mark.parametrize("kind", ["decoder", "seq2seq"])
def test_a9_a_later_token_changes_nothing_before_it(grow: Grow, watch: Watch, kind: str, choice: str) -> None:
    """Another token j leaves every row before j of every layer bit-equal and changes row j, in logits too."""
    model = grow(kind, **CAUSAL[choice])
    stack = model.decoder if kind == "seq2seq" else model.stack
    layers = [*(watch(block) for block in stack.blocks), watch(model)]
    source, ids = random_ids(2, 5), random_ids(2, 7)

    def call(target: Tensor) -> None:
        model(source, target) if kind == "seq2seq" else model(target)

    call(ids)
    for j in range(7):
        other = ids.clone()
        other[:, j] = (ids[:, j] + 1) % 23
        call(other)
        for calls in layers:
            changed = (calls[-1].output != calls[0].output).any(-1)
            assert not changed[:, :j].any()
            assert changed[:, j].all()


@pytest.mark.parametrize("drawn", [False, True])
def test_a9_no_gradient_flows_from_a_position_to_a_later_token(grow: Grow, watch: Watch, drawn: bool) -> None:
    """The gradient of position i's logits is exactly 0 at the vectors after i and not 0 at those up to it."""
    model = grow("decoder")
    embedded = watch(model.token)
    logits = model(random_ids(1, 6), mask=hide_nothing(1, 6) if drawn else None)
    for i in range(6):
        pull = randn(23)
        (gradient,) = torch.autograd.grad((logits[0, i] * pull).sum(), embedded[0].output, retain_graph=True)
        assert (gradient[0].abs().amax(-1) > 0).tolist() == [j <= i for j in range(6)]


# A10 --------------------------------------------------------------------------------------------------------


def compare_cross_attention(model: nn.Module, watch: Watch, agree: Agree, groups: int) -> None:
    """Hold each layer's cross-attention to the hand-worked one, given the decoder's and the encoder's vectors."""
    crosses = [block.cross.layer for block in model.decoder.blocks]
    encoder, calls = watch(model.encoder), [watch(cross) for cross in crosses]
    model(random_ids(2, 5), random_ids(2, 4))
    memory = encoder[0].output
    for cross, seen in zip(crosses, calls, strict=True):
        query, key, value = ((p.weight, p.bias) for p in (cross.query, cross.key, cross.value))
        x, output = seen[0].args[0], seen[0].output
        agree(output, by_hand(x, memory, query, key, value, cross.out, 4, causal=False, groups=groups))


def test_a10_cross_attention_reads_the_encoder(grow: Grow, watch: Watch, agree: Agree) -> None:
    """Worked by hand: queries from the decoder's vectors, keys and values from the encoder's, all of them seen."""
    compare_cross_attention(grow("seq2seq"), watch, agree, groups=4)


def test_a10_what_comes_from_where(grow: Grow, watch: Watch) -> None:
    """Another source changes keys and values but no query of the first layer; another target only the queries."""
    model = grow("seq2seq")
    calls = watch(model.decoder.blocks[0].cross.layer.attend)
    source, target = random_ids(2, 5), random_ids(2, 4)
    model(source, target)
    model((source + 1) % 23, target)
    model(source, (target + 1) % 23)
    first, other_source, other_target = (call.args[:3] for call in calls)
    assert [torch.equal(a, b) for a, b in zip(first, other_source, strict=True)] == [True, False, False]
    assert [torch.equal(a, b) for a, b in zip(first, other_target, strict=True)] == [False, True, True]


# A12 --------------------------------------------------------------------------------------------------------


def multi_query_by_hand(attention: Any, x: Tensor) -> Tensor:  # noqa: ANN401
    """One key and one value a position, the same for all four heads of width 4; causal."""
    q, k, v = (x @ p.weight.T + p.bias for p in (attention.query, attention.key, attention.value))
    rows = []
    for b in range(len(x)):
        for i in range(x.shape[1]):
            heads = [retrieve(one, k[b, : i + 1], v[b, : i + 1]) for one in q[b, i].split(4)]
            rows.append(torch.cat(heads) @ attention.out.weight.T + attention.out.bias)
    return torch.stack(rows).view_as(x)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a12_groups_share_keys_and_values(
    grow: Grow, watch: Watch, agree: Agree, kernel: type[Attend], groups: int
) -> None:
    """Grouped attention equals the hand-worked one; one group equals multi-query, a group a head multi-head."""
    model = grow("decoder", position="none", n_kv_heads=groups)
    attention = first_attention(model)
    attention.attend = kernel(attention.attend.scale, 0.0)
    calls, inner = watch(attention), watch(attention.attend)
    model(random_ids(2, 6))
    x, output = calls[0].args[0], calls[0].output
    assert [part.shape[1] for part in inner[0].args[:3]] == [4, groups, groups]
    agree(output, self_attention_by_hand(attention, x, 4, causal=True, groups=groups))
    if groups == 1:
        agree(output, multi_query_by_hand(attention, x))


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a12_groups_share_keys_and_values_of_the_source(grow: Grow, watch: Watch, agree: Agree, groups: int) -> None:
    """Cross-attention in groups equals the hand-worked one too."""
    compare_cross_attention(grow("seq2seq", n_kv_heads=groups), watch, agree, groups)


def copied(shared: Tensor, groups: int) -> Tensor:
    """Write each group's rows out once for each of its heads, as a multi-head layer would hold them."""
    return torch.cat([part for group in shared.chunk(groups) for part in [group] * (4 // groups)])


@pytest.mark.parametrize("kind", ["decoder", "encoder", "seq2seq"])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a12_grouped_is_multi_head_with_copies(grow: Grow, agree: Agree, groups: int, kind: str) -> None:
    """A multi-head model that holds each group's keys and values once a head has the grouped model's logits."""
    grouped, full = grow(kind, position="rotary", n_kv_heads=groups), grow(kind, position="rotary", n_kv_heads=4)
    state = {}
    for name, value in grouped.state_dict().items():
        state[name] = copied(value, groups) if ".key." in name or ".value." in name else value
    full.load_state_dict(state)
    args = (random_ids(2, 5), random_ids(2, 6)) if kind == "seq2seq" else (random_ids(2, 6),)
    agree(grouped(*args), full(*args))
