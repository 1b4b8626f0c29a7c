"""Generation with CUDA graphs and the decode attention kernel."""

from __future__ import annotations

import random

import pytest
import torch
from torch.nn import functional as F

import glasshouse as gh
from glasshouse.generation.engine.prefill import Prefill
from glasshouse.generation.sampling.logits_kernels import argmax, token_logprobs, top_logprobs
from glasshouse.layers.attend import decode as decode_attention
from glasshouse.layers.linear.matvec import make_matvec_linear

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "queries", "width", "capacity"),
    [(1, 8, 2, 1, 64, 700), (3, 4, 1, 3, 24, 70), (64, 32, 8, 1, 64, 384), (2, 4, 4, 16, 128, 130)],
)
def test_decode_attention_equals_attention_with_a_dense_mask(
    batch: int, heads: int, kv_heads: int, queries: int, width: int, capacity: int, dtype: torch.dtype
) -> None:
    q = torch.randn(batch, heads, queries, width, device="cuda", dtype=dtype)
    k, v = torch.randn(2, batch + 2, kv_heads, capacity + 1, width, device="cuda", dtype=dtype)[..., 1:, :]
    rows = torch.randperm(batch + 2, device="cuda")[:batch]
    key_counts = torch.randint(1, capacity - queries, (batch, 1), device="cuda") + torch.arange(
        queries, device="cuda"
    )
    mask = (torch.arange(capacity, device="cuda") < key_counts[..., None])[:, None]
    exact = F.scaled_dot_product_attention(
        *(x.double() for x in (q, k[rows], v[rows])), attn_mask=mask, scale=0.2, enable_gqa=True
    )
    result = decode_attention.attend(q, k, v, key_counts, rows, 0.2)
    # A result is a mean of values. In float32 it is summed within each block and over the blocks, one rounding for
    # each; in bfloat16 weights and result are rounded to that, and sums need not be counted.
    roundings = decode_attention.BLOCK + capacity // decode_attention.BLOCK if dtype == torch.float32 else 2
    assert (result - exact).abs().max() <= roundings * torch.finfo(dtype).eps / 2 * v.abs().max()
    if queries == 1:  # the same as one packed row of tokens, each with its own cache row
        flat = decode_attention.attend(q.permute(2, 1, 0, 3), k, v, key_counts.T, rows[None], 0.2)
        assert flat.permute(2, 1, 0, 3).equal(result)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width"), [(3072, 2048), (1, 1), (77, 768), (50, 8200)])
def test_matvec_equals_a_matmul(rows: int, width: int, dtype: torch.dtype) -> None:
    weight, x = (
        torch.randn(rows, width, device="cuda", dtype=dtype),
        torch.randn(1, 1, width, device="cuda").to(dtype),
    )
    bias = torch.randn(rows, device="cuda", dtype=dtype)
    layer = make_matvec_linear(weight, bias)
    assert layer is not None
    products = x.double() * weight.double()  # [1, N, K]
    exact = products.sum(-1) + bias
    # A column of the block is summed in turn, then all of them by halves; result and bias are rounded to the dtype.
    roundings = -(-width // 1024) + 10
    error = roundings * 2**-24 * products.abs().sum(-1) + torch.finfo(dtype).eps * (exact.abs() + bias.abs())
    assert ((layer(x)[0] - exact).abs() <= error).all()
    many = torch.randn(3, width, device="cuda").to(dtype)
    assert layer(many).equal(F.linear(many, weight, bias))
    assert make_matvec_linear(weight.T, None) is None or 1 in weight.shape  # not contiguous
    assert make_matvec_linear(weight.double(), None) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_kernels_equal_torch(dtype: torch.dtype) -> None:
    logits = (3 * torch.randn(5, 12_288, device="cuda")).to(dtype)  # three full blocks
    logits[1, 123] = logits[1, 7000] = 50.0  # the first on ties
    logits[2] = -torch.inf
    logits[3, :5000] = -torch.inf
    best = argmax(logits)
    assert best.tolist() == [int(row.argmax()) for row in logits.cpu()]
    assert 0 <= int(argmax(torch.full_like(logits, torch.nan)).max()) < 12_288  # any valid id
    picked = torch.tensor([0, 123, 5, 9000, 10_000], device="cuda")
    expected = logits.double().log_softmax(-1).gather(-1, picked[:, None])[:, 0]
    result = token_logprobs(logits, picked)
    assert result[2].isnan() == expected[2].isnan()
    # Sums of 4,096 exponentials by halves, then of three: fifteen roundings of 6e-8, and one of a number up to 60.
    assert torch.allclose(result.double(), expected, rtol=0, atol=1e-5, equal_nan=True)


SETTINGS: list[dict[str, object]] = [
    {},
    {"n_kv_heads": 1, "position": {"kind": "rotary"}},
    {"position": {"kind": "alibi"}},
    {"windows": (5, 0), "position": {"kind": "rotary"}},
    {"attention_softcap": 5.0},
]


def build(settings: dict[str, object]) -> gh.models.Decoder:
    torch.manual_seed(3)
    # Wide initial weights: two logits are then rarely closer than float32 can tell.
    spec = gh.preset("tiny-decoder", max_len=96, init={"kind": "normal", "std": 0.3}, end_ids=(7,), **settings)
    model = gh.build(spec, device="cuda").eval()
    assert isinstance(model, gh.models.Decoder)
    return model


def assert_most_probable(
    model: torch.nn.Module, prompts: list[list[int]], requests: list[gh.generation.Request]
) -> None:
    """Check that each generated token is the most probable one by a pass without a cache, up to rounding."""
    for prompt, request in zip(prompts, requests, strict=True):
        if not request.ids:  # ended at the first token
            continue
        ids = torch.tensor([prompt + request.ids], device="cuda")
        with torch.no_grad():
            logits = model(ids)[0, len(prompt) - 1 : -1].double()
        chosen = logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
        # The generated token is the most probable, or equal up to rounding.
        assert (logits.amax(1) - chosen).max() < 1e-3
        assert torch.tensor(request.logprobs).allclose(
            logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0].float().cpu(), atol=1e-3
        )
        assert request.finish_reason == "stop" or len(request.ids) == request.limit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width", "k"), [(1, 7, 7), (3, 1023, 20), (64, 1025, 5), (5, 50_257, 20)])
def test_top_logprobs_equal_torch(dtype: torch.dtype, rows: int, width: int, k: int) -> None:
    """Distinct logits, some of them next to each other; a row of a wider tensor."""
    order = torch.stack([torch.randperm(width, device="cuda") for _ in range(rows)])
    wide = torch.zeros(rows, width + 3, device="cuda", dtype=dtype)
    wide[:, :width] = (order < 128) * order / 8 - 20.0  # 128 distinct values in either dtype, and one for the rest
    logits = wide[:, :width]
    logits[:, width // 2 :: 11] -= 3.0
    expected, _ = logits.double().log_softmax(-1).topk(k)
    values, ids = top_logprobs(logits, k)
    torch.testing.assert_close(values.double(), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(logits.double().log_softmax(-1).gather(1, ids), expected, rtol=0, atol=1e-5)
    assert all(len(set(row)) == k for row in ids.tolist())


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("compiled", [False, True])
def test_cuda_graphs_generate_what_the_model_would(settings: dict[str, object], compiled: bool) -> None:
    if compiled and settings:
        pytest.skip("one is enough: compiling takes long")
    random.seed(3)
    model = build(settings)
    prompts = [[random.randrange(256) for _ in range(random.randint(1, 40))] for _ in range(24)]
    engine = gh.Engine(model, slots=6, max_len=96, prefill_chunk=16, compile=compiled)
    requests = [engine.submit(prompt, max_new_tokens=5 + i % 20) for i, prompt in enumerate(prompts)]
    engine.run()
    graphs = engine._runner._graphs
    assert graphs is not None
    mixed = any(key[0] == "mixed" for key in graphs._captured)
    assert mixed == model.stack.supports_mixed_prefill(model.token_embedding.table.weight)
    assert_most_probable(model, prompts, requests)


def draw_prompts(count: int) -> list[list[int]]:
    """Return prompts of 1 to 40 tokens, half of them with a common prefix."""
    random.seed(5)
    shared = [random.randrange(256) for _ in range(20)]
    return [
        shared * random.randint(0, 1) + [random.randrange(256) for _ in range(random.randint(1, 20))]
        for _ in range(count)
    ]


@pytest.mark.parametrize("settings", SETTINGS)
def test_batched_prefill_on_a_gpu(settings: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    batches, run_batch = [], Prefill._run_batch
    monkeypatch.setattr(
        Prefill,
        "_run_batch",
        lambda self, forward, prompts: [batches.append(len(prompts)), run_batch(self, forward, prompts)][1],
    )
    model, prompts = build(settings), draw_prompts(60)
    engine = gh.Engine(model, slots=40, max_len=96)
    requests = [engine.submit(prompt, max_new_tokens=5 + i % 20) for i, prompt in enumerate(prompts)]
    engine.run()
    assert any(size > 1 for size in batches) == ("windows" not in settings)
    assert_most_probable(model, prompts, requests)


@pytest.mark.parametrize("weights", ["own", "copy", "int8"])
def test_one_slot_on_a_gpu(weights: gh.generation.Weights) -> None:
    model, prompts = build({"position": {"kind": "rotary"}}), draw_prompts(6)
    engine = gh.Engine(model, slots=1, max_len=96, weights=weights)
    requests = [engine.submit(prompt, max_new_tokens=20) for prompt in prompts]
    engine.run()
    if weights == "int8":  # other tokens, but finite
        assert all(request.error is None for request in requests)
    else:
        assert_most_probable(model, prompts, requests)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batch_invariance_on_a_gpu(dtype: torch.dtype) -> None:
    model, prompts = build({"position": {"kind": "rotary"}}).to(dtype), draw_prompts(20)
    made = {}
    for name, groups in {"together": [prompts], "alone": [[prompt] for prompt in prompts]}.items():
        engine = gh.Engine(model, slots=12, max_len=96, batch_invariant=True)
        made[name] = []
        for group in groups:
            requests = [engine.submit(prompt, max_new_tokens=20) for prompt in group]
            engine.run()
            made[name] += [(request.ids, request.logprobs) for request in requests]
    assert made["together"] == made["alone"]


def test_after_warm_up_no_decode_step_is_captured() -> None:
    engine = gh.Engine(build({}), slots=12, max_len=96)
    engine.warm_up()
    graphs = engine._runner._graphs
    assert graphs is not None
    before = set(graphs._captured)
    for i, prompt in enumerate(draw_prompts(30)):
        engine.submit(prompt, max_new_tokens=1 + i % 9)
    engine.run()
    assert {key[0] for key in set(graphs._captured) - before} <= {"prefill"}


def test_sampling_on_a_gpu_equals_the_cpu() -> None:
    torch.manual_seed(4)
    spec = gh.preset("tiny-decoder", init={"kind": "normal", "std": 0.2})
    model = gh.build(spec, dtype=torch.float64).eval()
    settings = {"max_new_tokens": 20, "temperature": 0.9, "top_p": 0.95, "frequency_penalty": 0.3}
    prompts = [[1, 2, 3], [4], [5, 6]]
    on_cpu = gh.generate(model, None, prompts, seed=11, **settings)
    on_gpu = gh.generate(model.cuda(), None, prompts, seed=11, **settings)
    assert [one.ids for one in on_gpu] == [one.ids for one in on_cpu]
    searched = gh.generate(model, None, prompts, beams=4, max_new_tokens=12, n=4)
    assert [one.ids for one in searched] == [
        one.ids for one in gh.generate(model.cpu(), None, prompts, beams=4, max_new_tokens=12, n=4)
    ]
