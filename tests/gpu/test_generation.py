"""Generation where it runs as captured graphs, with a kernel that reads what a cache holds and no more."""

from __future__ import annotations

import random

import pytest
import torch
from torch.nn import functional as F

import glasshouse as gh
from glasshouse.layers import held

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "queries", "width", "room"),
    [(1, 8, 2, 1, 64, 700), (3, 4, 1, 3, 24, 70), (64, 32, 8, 1, 64, 384), (2, 4, 4, 16, 128, 130)],
)
def test_the_kernel_equals_attention_over_a_drawn_mask(
    batch: int, heads: int, kv_heads: int, queries: int, width: int, room: int, dtype: torch.dtype
) -> None:
    q = torch.randn(batch, heads, queries, width, device="cuda", dtype=dtype)
    k, v = torch.randn(2, batch, kv_heads, room + 1, width, device="cuda", dtype=dtype)[..., 1:, :]
    seen = torch.randint(1, room - queries, (batch, 1), device="cuda") + torch.arange(queries, device="cuda")
    mask = (torch.arange(room, device="cuda") < seen[..., None])[:, None]
    exact = F.scaled_dot_product_attention(
        *(x.double() for x in (q, k, v)), attn_mask=mask, scale=0.2, enable_gqa=True
    )
    peer = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.2, enable_gqa=True)
    result = held.attend(q, k, v, seen, 0.2)
    largest = exact.abs().max()
    # As exact as torch's own kernels, but for the rounding of the result itself.
    assert (result - exact).abs().max() <= 2 * (peer - exact).abs().max() + torch.finfo(dtype).eps * largest


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"n_kv_heads": 1, "position": {"kind": "rotary"}},
        {"position": {"kind": "alibi"}},
        {"windows": (5, 0), "position": {"kind": "rotary"}},
        {"attention_softcap": 5.0},
    ],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_graph_writes_what_the_model_would(settings: dict[str, object], compiled: bool) -> None:
    if compiled and settings:
        pytest.skip("one is enough: compiling takes long")
    torch.manual_seed(3)
    random.seed(3)
    # Wide first values: two logits are then rarely closer than float32 can tell.
    spec = gh.preset("tiny-decoder", max_len=96, init={"kind": "normal", "std": 0.3}, end_ids=(7,), **settings)
    model = gh.build(spec, device="cuda").eval()
    prompts = [[random.randrange(256) for _ in range(random.randint(1, 40))] for _ in range(24)]
    engine = gh.Engine(model, slots=6, max_len=96, chunk=16, compile=compiled)
    requests = [engine.submit(prompt, max_new_tokens=5 + i % 20) for i, prompt in enumerate(prompts)]
    engine.run()
    for prompt, request in zip(prompts, requests, strict=True):
        if not request.ids:  # ended at once
            continue
        ids = torch.tensor([prompt + request.ids], device="cuda")
        with torch.no_grad():
            logits = model(ids)[0, len(prompt) - 1 : -1].double()
        chosen = logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
        # The token that was written is the likeliest, or as likely as rounding can tell.
        assert (logits.amax(1) - chosen).max() < 1e-3
        assert torch.tensor(request.logprobs).allclose(
            logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0].float().cpu(), atol=1e-3
        )
        assert request.finish_reason == "stop" or len(request.ids) == request.limit


def test_sampling_on_a_gpu_gives_the_tokens_of_the_cpu() -> None:
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
