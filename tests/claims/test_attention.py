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
from glasshouse.layers.attend.backends import Explicit, Sdpa
from glasshouse.layers.attend.kernel import Attend, Backend, Situation
from glasshouse.layers.attend.mask import Mask
from glasshouse.spec import DecoderSpec

BuildModel = Callable[..., Any]
RecordCalls = Callable[[nn.Module], list[Any]]
AssertClose = Callable[..., None]

PLAIN = {"position": "none", "qkv_bias": False}
POSITIONS = ("sinusoidal", "learned", "rotary", "relative", "alibi")
BACKENDS = (Sdpa, Explicit)


def random_ids(*shape: int) -> Tensor:
    return torch.randint(23, shape)


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def no_padding(*shape: int) -> Tensor:
    """Return an all-True padding mask, which makes a model build a dense causal mask and not use the kernel's."""
    return torch.ones(shape, dtype=torch.bool)


def first_attention(model: nn.Module) -> Any:  # noqa: ANN401 - modules are accessed by name
    return model.stack.blocks[0].attention.layer


def prepare(backend: type[Backend], q: Tensor, k: Tensor, mask: Mask) -> Backend:
    return backend.prepare(Situation(mask, q.shape[2], k.shape[2], q.device, q.dtype, q.shape[3]))


def attention_weights(attend: Attend, q: Tensor, k: Tensor, backend: Backend) -> Tensor:
    """Return the weights [B, H, Q, K] a backend uses: what it gives when value j is the unit vector e_j."""
    unit = torch.eye(k.shape[2], dtype=k.dtype).expand(*k.shape[:3], -1)
    return attend(q, k, unit.contiguous(), backend)


def softmax(scores: list[float]) -> list[float]:
    powers = [math.exp(score - max(scores)) for score in scores]
    return [power / sum(powers) for power in powers]


def attend_one(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attend from one query [d] to keys [n, d]: the mean of the values [n, d], weighted by the softmax."""
    scores = [sum(a * b for a, b in zip(query.tolist(), key.tolist(), strict=True)) for key in keys]
    weights = softmax([score / math.sqrt(len(query)) for score in scores])
    return sum((weight * value for weight, value in zip(weights, values, strict=True)), torch.zeros_like(query))


def reference_attention(
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

    Matrices and biases are as in nn.Linear; each of `groups` key-value heads serves as many query heads, in order.
    """
    per_group = n_heads // groups
    rows = []
    for queries, memory in zip(x, source, strict=True):
        heads = []
        for head in range(n_heads):
            wq, bq = (part.chunk(n_heads)[head] for part in query)
            wk, bk = (part.chunk(groups)[head // per_group] for part in key)
            wv, bv = (part.chunk(groups)[head // per_group] for part in value)
            q, k, v = queries @ wq.T + bq, memory @ wk.T + bk, memory @ wv.T + bv
            ends = [i + 1 if causal else len(memory) for i in range(len(queries))]
            heads.append(torch.stack([attend_one(q[i], k[:end], v[:end]) for i, end in enumerate(ends)]))
        rows.append(torch.cat(heads, -1) @ out.weight.T + out.bias)
    return torch.stack(rows)


def reference_self_attention(attention: Any, x: Tensor, n_heads: int, causal: bool, groups: int) -> Tensor:  # noqa: ANN401
    projections = (attention.query, attention.key, attention.value)
    zero = torch.zeros((), dtype=x.dtype)
    parts = [(p.weight, zero.expand(len(p.weight)) if p.bias is None else p.bias) for p in projections]
    return reference_attention(x, x, *parts, attention.out, n_heads, causal, groups)


# A1 and A2 --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("d_head", [0, 6])
def test_a1_each_head_has_its_own_projections(
    build_model: BuildModel, record_calls: RecordCalls, assert_close: AssertClose, d_head: int
) -> None:
    """Per head, q, k and v are x times a D x d_head matrix each; d_head is D / heads unless it is given."""
    model = build_model("decoder", **PLAIN, d_head=d_head)
    attention = first_attention(model)
    width = d_head or 16 // 4
    inputs, kernel = record_calls(attention), record_calls(attention.attend)
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
                    assert_close(actual[b, head, i], sum(x[b, i, d] * matrix[d] for d in range(16)))


def test_a1_d_model_is_often_heads_times_d_head() -> None:
    """In the original, GPT-2, BERT, T5 and Llama, D = heads * d_head, though nothing requires it."""
    for name in ("vaswani-base", "vaswani-big", "gpt2", "gpt2-xl", "bert-base", "t5-small", "llama-1b"):
        spec = gh.preset(name)
        assert spec.d_model == spec.n_heads * spec.d_head, name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("d_head", [4, 8])
def test_a2_score_is_a_low_rank_bilinear_form(
    build_model: BuildModel, record_calls: RecordCalls, assert_close: AssertClose, d_head: int, backend: type[Backend]
) -> None:
    """Log-weights differ as q_i . k_j / sqrt(d_head) = x_i M x_j / sqrt(d_head) do, with M of rank d_head."""
    model = build_model("encoder", **PLAIN, d_head=d_head)
    attention = first_attention(model)
    inputs, calls = record_calls(attention), record_calls(attention.attend)
    model(random_ids(2, 7))
    x, (q, k, _, given) = inputs[0].args[0], calls[0].args
    # Small, so that no weight is too small to take the logarithm of.
    x, q, k = x / 2, q / 2, k / 2
    weights = attention_weights(attention.attend, q, k, prepare(backend, q, k, given.mask))
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
            assert_close(bilinear, scores)
            # A weight of e^-20 has the rounding error of one of order 1, so 2**-52 * e^20 at worst: about 1e-7.
            assert_close(relative[b, head], scores - scores[:, :1], within=1e-7)


# A3 ---------------------------------------------------------------------------------------------------------


def test_a3_scaling_keeps_score_variance_and_gradients_at_any_width() -> None:
    """Scaled, scores have variance 1 and softmax gradients the same norm at any width; unscaled, d and nearly 0."""
    rows, keys = 400, 32
    documented = [[float(cell) for cell in row] for row in documented_rows("| d_head |")]
    print()
    scaled_gradients, unscaled_gradients = [], []
    for width in (4, 16, 64, 256, 1024):
        spec = DecoderSpec(vocab_size=2, d_model=8, n_heads=2, d_head=width, n_layers=1)
        scaled = Attend(first_attention(gh.build(spec)).attend.scale, 0.0)
        q, k, pull = torch.randn(rows, 1, 1, width), torch.randn(rows, 1, keys, width), torch.randn(rows, 1, 1, keys)
        measured = []
        for kernel in (scaled, Attend(1.0, 0.0)):
            scores = kernel.scores(q, k, None).requires_grad_()
            (gradient,) = torch.autograd.grad((kernel.pattern(scores) * pull).sum(), scores)
            measured.append((scores.var().item(), gradient.norm(dim=-1).median().item()))
        (variance, gradient_norm), (unscaled_variance, unscaled_norm) = measured
        print(
            f"A3 width {width}: variance of scores {variance:.2f} scaled, {unscaled_variance:.1f} unscaled; "
            f"median norm of the softmax gradient {gradient_norm:.3f} scaled, {unscaled_norm:.1e} unscaled"
        )
        # Random numbers may differ by platform: 10% is twice the spread of the noisiest one, the variance at width 4.
        expected = [width, variance, unscaled_variance, gradient_norm, unscaled_norm]
        assert documented.pop(0) == pytest.approx(expected, rel=0.1)
        # Scores of a row share a query, whose squared norm varies by 2 / d of itself; then single scores vary.
        spread = 5 * math.sqrt(2 / (width * rows) + (2 + 6 / width) / (rows * keys))
        assert abs(variance - 1) < spread
        assert abs(unscaled_variance / width - 1) < spread
        scaled_gradients.append(gradient_norm)
        unscaled_gradients.append(unscaled_norm)
    assert not documented
    # Softmax of 32 unit-variance scores; at width 4 the scores are not yet normal, so a quarter is allowed.
    assert max(scaled_gradients) < 1.25 * min(scaled_gradients)
    assert unscaled_gradients[1:] == sorted(unscaled_gradients[1:], reverse=True)
    assert unscaled_gradients[-1] < 1e-2 * scaled_gradients[-1]


# A4 ---------------------------------------------------------------------------------------------------------


def random_mask(n: int) -> Tensor:
    """Return a random mask [2, 1, n, n]: query 1 of row 0 sees no key, every other query about half and its own."""
    visible = (torch.rand(2, 1, n, n) < 0.5) | torch.eye(n, dtype=torch.bool)
    visible[0, :, 1] = False
    return visible


def additive(visible: Tensor) -> Tensor:
    return torch.zeros(visible.shape, dtype=torch.float64).masked_fill(~visible, -math.inf)


@pytest.mark.parametrize("form", ["bool", "float"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a4_mask_is_added_before_the_softmax(assert_close: AssertClose, backend: type[Backend], form: str) -> None:
    """Weights are the softmax of scores plus 0 or -infinity, and exactly 0 wherever -infinity was added."""
    n = d = 8
    q, k, visible = randn(2, 3, n, d), randn(2, 3, n, d), random_mask(n)
    weights = attention_weights(
        Attend(d**-0.5, 0.0), q, k, backend(Mask(), dense=visible if form == "bool" else additive(visible))
    )
    assert (weights[~visible.expand(-1, 3, -1, -1)] == 0).all()
    mask = additive(visible)
    for b in range(2):
        for head in range(3):
            for i in range(n):
                if (b, i) == (0, 1):
                    continue  # fully masked
                scores = [torch.dot(q[b, head, i], k[b, head, j]).item() / math.sqrt(d) for j in range(n)]
                expected = softmax([score + mask[b, 0, i, j].item() for j, score in enumerate(scores)])
                assert_close(weights[b, head, i], torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize(
    ("backend", "form"),
    list(itertools.product(BACKENDS, ["bool", "float", "float with gradient"])),
)
def test_a4_fully_masked_row_gives_zero(backend: type[Backend], form: str, kv_heads: int, dtype: torch.dtype) -> None:
    """A fully masked query has output and gradient exactly 0, and causes no NaN anywhere."""
    n = d = 8
    q, k, v = (randn(2, heads, n, d).to(dtype).requires_grad_() for heads in (4, kv_heads, kv_heads))
    visible = random_mask(n)
    dense = visible if form == "bool" else additive(visible).to(dtype).requires_grad_("gradient" in form)
    attend = Attend(d**-0.5, 0.0)
    z = attend(q, k, v, backend(Mask(), dense=dense))
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
    # Keys and values get gradients from the other queries only: excluding the masked query's output changes nothing.
    elsewhere = torch.autograd.grad(
        (attend(q, k, v, backend(Mask(), dense=dense)) * pull * others[:, None, :, None]).sum(), inputs
    )
    for gradient, same in zip(gradients, elsewhere, strict=True):
        assert torch.equal(gradient, same)


# A5 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_a5_weights_are_a_distribution_over_visible_keys(
    build_model: BuildModel,
    record_calls: RecordCalls,
    assert_close: AssertClose,
    kind: str,
    dense: bool,
    backend: type[Backend],
) -> None:
    """Weights are positive where allowed, sum to 1, and are P(j | i) = e^score(i, j) / sum of e^score(i, .)."""
    n = 4
    model = build_model(kind)
    attention = first_attention(model)
    calls = record_calls(attention.attend)
    model(random_ids(2, n), mask=no_padding(2, n) if dense else None)
    q, k, _, given = calls[0].args
    weights = attention_weights(attention.attend, q, k, prepare(backend, q, k, given.mask))
    for b in range(2):
        for head in range(4):
            for i in range(n):
                context = range(i + 1 if kind == "decoder" else n)
                powers = {j: math.exp(torch.dot(q[b, head, i], k[b, head, j]).item() / 2) for j in context}
                expected = [powers.get(j, 0.0) / sum(powers.values()) for j in range(n)]
                assert_close(weights[b, head, i], torch.tensor(expected, dtype=torch.float64))
                assert [weight > 0 for weight in weights[b, head, i].tolist()] == [j in context for j in range(n)]
    assert_close(weights.sum(-1), torch.ones(2, 4, n, dtype=torch.float64))


def test_a5_weights_are_a_markov_transition_matrix(
    build_model: BuildModel, record_calls: RecordCalls, assert_close: AssertClose
) -> None:
    """Powers of the weights stay row-stochastic, and a causal chain, which cannot leave position 0, ends there."""
    model = build_model("decoder")
    attention = first_attention(model)
    calls = record_calls(attention.attend)
    model(random_ids(1, 4))
    q, k, _, given = calls[0].args
    step = attention_weights(attention.attend, q, k, given)[0]
    distribution = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    power = step
    for _ in range(20):
        distribution = distribution @ step[0]
        assert_close(distribution.sum(), torch.tensor(1.0, dtype=torch.float64))
        power = power @ step
        assert (power >= 0).all()
        assert_close(power.sum(-1), torch.ones(4, 4, dtype=torch.float64))
    limit = torch.linalg.matrix_power(step, 2**20)
    assert_close(limit, torch.eye(4, dtype=torch.float64)[0].expand(4, 4, 4), within=1e-9)


# A6 and A7 --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("d_head", [0, 6])
@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_a6_heads_are_concatenated_and_projected(
    build_model: BuildModel, record_calls: RecordCalls, assert_close: AssertClose, kind: str, d_head: int
) -> None:
    """The layer equals weighted sums of values head by head, concatenated and times Wo; the shape is kept."""
    model = build_model(kind, position="none", d_head=d_head)
    attention = first_attention(model)
    calls, kernel = record_calls(attention), record_calls(attention.attend)
    model(random_ids(2, 6))
    x, output = calls[0].args[0], calls[0].output
    assert attention.out.weight.T.shape == (4 * (d_head or 4), 16)
    assert output.shape == x.shape
    assert_close(output, reference_self_attention(attention, x, 4, causal=kind == "decoder", groups=4))

    # The weighted sum on its own: output i of a head is the sum over j of weight(i, j) times v_j.
    q, k, v, given = kernel[0].args
    weights = attention_weights(attention.attend, q, k, given)
    z = kernel[0].output
    for i in range(6):
        assert_close(z[:, :, i], sum(weights[:, :, i, j, None] * v[:, :, j] for j in range(6)))


@pytest.mark.parametrize("dense", [False, True])
def test_a7_parallel_attention_equals_sequential_lookups(
    build_model: BuildModel, record_calls: RecordCalls, assert_close: AssertClose, dense: bool
) -> None:
    """Row i of one pass over S positions equals attention from x_i to x_0 .. x_i, and the layer run on that alone."""
    model = build_model("decoder", position="none")
    attention = first_attention(model)
    calls, kernel = record_calls(attention), record_calls(attention.attend)
    ids = random_ids(2, 7)
    model(ids, mask=no_padding(2, 7) if dense else None)
    (q, k, v, _), z, output = kernel[0].args, kernel[0].output, calls[0].output
    for i in range(7):
        for b in range(2):
            for head in range(4):
                alone = attend_one(q[b, head, i], k[b, head, : i + 1], v[b, head, : i + 1])
                assert_close(z[b, head, i], alone)
        model(ids[:, : i + 1])
        assert_close(calls[-1].output[:, -1], output[:, i])


def test_a7_scores_are_one_matmul(assert_close: AssertClose) -> None:
    """Entry (i, j) of the S x S scores is the dot product of query i and key j."""
    q, k = randn(1, 2, 6, 5), randn(1, 2, 6, 5)
    scores = Attend(5**-0.5, 0.0).scores(q, k, None)
    assert scores.shape == (1, 2, 6, 6)
    for head in range(2):
        for i in range(6):
            for j in range(6):
                assert_close(scores[0, head, i, j], torch.dot(q[0, head, i], k[0, head, j]) / math.sqrt(5))


# A8 and A9 --------------------------------------------------------------------------------------------------


def test_a8_permutation_equivariant_without_positions_and_mask(
    build_model: BuildModel, assert_close: AssertClose
) -> None:
    """Without positions and mask, permuted tokens give equally permuted outputs."""
    model = build_model("encoder", position="none")
    ids = random_ids(2, 6)
    before = model(ids)
    for _ in range(5):
        order = torch.randperm(6)
        assert_close(model(ids[:, order]), before[:, order])


@pytest.mark.parametrize(("kind", "position"), [("decoder", "none"), *(("encoder", name) for name in POSITIONS)])
def test_a8_causal_mask_or_positions_break_equivariance(build_model: BuildModel, kind: str, position: str) -> None:
    """With a causal mask, or with any kind of position, permuted tokens give other outputs."""
    model = build_model(kind, position=position)
    ids = torch.tensor([[1, 2, 3, 4, 5, 6]])
    before, order = model(ids), torch.tensor([3, 0, 5, 1, 4, 2])
    assert (model(ids[:, order]) - before[:, order]).abs().max() > 0.01 * before.abs().max()


CAUSAL = {
    "none": {"position": "none"},
    **{name: {"position": name} for name in POSITIONS},
    "grouped": {"n_kv_heads": 2},
    "window": {"windows": [0, 3]},
    "soft-cap": {"attention_softcap": 5.0},
    "post-norm": {"norm_placement": "post"},
}


@pytest.mark.few(8)
@pytest.mark.parametrize("choice", CAUSAL)
@pytest.mark.parametrize("kind", ["decoder", "seq2seq"])
def test_a9_later_token_changes_nothing_before_it(
    build_model: BuildModel, record_calls: RecordCalls, kind: str, choice: str
) -> None:
    """Changing token j leaves rows before j of every layer and of the logits bit-equal, and changes row j."""
    model = build_model(kind, **CAUSAL[choice])
    stack = model.decoder if kind == "seq2seq" else model.stack
    layers = [*(record_calls(block) for block in stack.blocks), record_calls(model)]
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


@pytest.mark.parametrize("dense", [False, True])
def test_a9_no_gradient_to_later_tokens(build_model: BuildModel, record_calls: RecordCalls, dense: bool) -> None:
    """The gradient of position i's logits is exactly 0 at embeddings after i and not 0 up to i."""
    model = build_model("decoder")
    embedded = record_calls(model.token_embedding)
    logits = model(random_ids(1, 6), mask=no_padding(1, 6) if dense else None)
    for i in range(6):
        pull = randn(23)
        (gradient,) = torch.autograd.grad((logits[0, i] * pull).sum(), embedded[0].output, retain_graph=True)
        assert (gradient[0].abs().amax(-1) > 0).tolist() == [j <= i for j in range(6)]


# A10 --------------------------------------------------------------------------------------------------------


def compare_cross_attention(
    model: nn.Module, record_calls: RecordCalls, assert_close: AssertClose, groups: int
) -> None:
    """Compare each layer's cross-attention with the reference, given decoder and encoder hidden states."""
    crosses = [block.cross.layer for block in model.decoder.blocks]
    encoder, calls = record_calls(model.encoder), [record_calls(cross) for cross in crosses]
    model(random_ids(2, 5), random_ids(2, 4))
    memory = encoder[0].output
    for cross, recorded in zip(crosses, calls, strict=True):
        query, key, value = ((p.weight, p.bias) for p in (cross.query, cross.key, cross.value))
        x, output = recorded[0].args[0], recorded[0].output
        assert_close(
            output, reference_attention(x, memory, query, key, value, cross.out, 4, causal=False, groups=groups)
        )


def test_a10_cross_attention_matches_reference(
    build_model: BuildModel, record_calls: RecordCalls, assert_close: AssertClose
) -> None:
    """Queries come from the decoder's hidden states, keys and values from the encoder's output, unmasked."""
    compare_cross_attention(build_model("seq2seq"), record_calls, assert_close, groups=4)


def test_a10_queries_from_decoder_keys_and_values_from_encoder(
    build_model: BuildModel, record_calls: RecordCalls
) -> None:
    """Another source changes keys and values but not the queries of the first layer; another target only queries."""
    model = build_model("seq2seq")
    calls = record_calls(model.decoder.blocks[0].cross.layer.attend)
    source, target = random_ids(2, 5), random_ids(2, 4)
    model(source, target)
    model((source + 1) % 23, target)
    model(source, (target + 1) % 23)
    first, other_source, other_target = (call.args[:3] for call in calls)
    assert [torch.equal(a, b) for a, b in zip(first, other_source, strict=True)] == [True, False, False]
    assert [torch.equal(a, b) for a, b in zip(first, other_target, strict=True)] == [False, True, True]


# A12 --------------------------------------------------------------------------------------------------------


def reference_multi_query(attention: Any, x: Tensor) -> Tensor:  # noqa: ANN401
    """One key and one value per position, shared by all four heads of width 4; causal."""
    q, k, v = (x @ p.weight.T + p.bias for p in (attention.query, attention.key, attention.value))
    rows = []
    for b in range(len(x)):
        for i in range(x.shape[1]):
            heads = [attend_one(one, k[b, : i + 1], v[b, : i + 1]) for one in q[b, i].split(4)]
            rows.append(torch.cat(heads) @ attention.out.weight.T + attention.out.bias)
    return torch.stack(rows).view_as(x)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a12_grouped_query_attention_matches_reference(
    build_model: BuildModel, record_calls: RecordCalls, assert_close: AssertClose, backend: type[Backend], groups: int
) -> None:
    """Grouped-query attention equals the reference; one group equals multi-query, one group per head multi-head."""
    model = build_model("decoder", position="none", n_kv_heads=groups)
    attention = first_attention(model)
    model.stack.backends = (backend,)
    calls, inner = record_calls(attention), record_calls(attention.attend)
    model(random_ids(2, 6))
    x, output = calls[0].args[0], calls[0].output
    assert [part.shape[1] for part in inner[0].args[:3]] == [4, groups, groups]
    assert_close(output, reference_self_attention(attention, x, 4, causal=True, groups=groups))
    if groups == 1:
        assert_close(output, reference_multi_query(attention, x))


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a12_grouped_query_cross_attention_matches_reference(
    build_model: BuildModel, record_calls: RecordCalls, assert_close: AssertClose, groups: int
) -> None:
    """Grouped-query cross-attention equals the reference, too."""
    compare_cross_attention(build_model("seq2seq", n_kv_heads=groups), record_calls, assert_close, groups)


def repeat_kv(shared: Tensor, groups: int) -> Tensor:
    """Repeat each group's rows once per head, as a multi-head layer stores them."""
    return torch.cat([part for group in shared.chunk(groups) for part in [group] * (4 // groups)])


@pytest.mark.parametrize("kind", ["decoder", "encoder", "seq2seq"])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a12_grouped_query_equals_multi_head_with_repeated_kv(
    build_model: BuildModel, assert_close: AssertClose, groups: int, kind: str
) -> None:
    """A multi-head model with each group's keys and values repeated per head has the grouped model's logits."""
    grouped, full = (
        build_model(kind, position="rotary", n_kv_heads=groups),
        build_model(kind, position="rotary", n_kv_heads=4),
    )
    state = {}
    for name, value in grouped.state_dict().items():
        state[name] = repeat_kv(value, groups) if ".key." in name or ".value." in name else value
    full.load_state_dict(state)
    args = (random_ids(2, 5), random_ids(2, 6)) if kind == "seq2seq" else (random_ids(2, 6),)
    assert_close(grouped(*args), full(*args))
