"""Inspection on a GPU: the same values as on a CPU, with compiled code, block masks and CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import glasshouse as gh
from glasshouse.models import Model

GPU = torch.device("cuda")
SIZE = {"vocab_size": 100, "d_model": 128, "n_heads": 4, "n_layers": 2, "max_len": 512}


def make(name: str = "qwen3-small", **settings: object) -> Model:
    torch.manual_seed(0)
    shape = SIZE | {"n_kv_heads": 2} | settings
    return gh.build(gh.preset(name, **shape, dropout=0.0, embed_dropout=0.0, init="normal"), device=GPU).eval()


def draw(rows: int, length: int) -> Tensor:
    return torch.randint(0, 100, (rows, length), generator=torch.Generator().manual_seed(1)).to(GPU)


def close(a: Tensor, b: Tensor, tolerance: float) -> None:
    hidden = b.isinf()
    assert torch.equal(hidden.cpu(), a.isinf().cpu())
    a, b = a.cpu().double()[~hidden.cpu()], b.cpu().double()[~hidden.cpu()]
    assert (a - b).norm() <= tolerance * b.norm()


@pytest.mark.parametrize("arguments", ["nothing", "lengths", "documents"])
@pytest.mark.parametrize("settings", [{}, {"windows": (64, 0)}, {"position": "alibi"}], ids=str)
@torch.no_grad()
def test_every_site_equals_the_cpu_in_float64(settings: dict[str, object], arguments: str) -> None:
    model, ids = make(**settings), draw(2, 200)
    call = {
        "nothing": {},
        "lengths": {"lengths": torch.tensor([200, 150], device=GPU)},
        "documents": {"documents": (torch.arange(200, device=GPU) // 70).expand(2, 200)},
    }[arguments]
    with gh.record(model, "*") as seen:
        model(ids, **call)
    exact = gh.build(model.spec, dtype=torch.float64).eval()
    exact.load_state_dict(model.state_dict())
    with gh.record(exact, "*") as expected:
        exact(ids.cpu(), **{name: value.cpu() for name, value in call.items()})
    real = slice(0, 150 if arguments == "lengths" else 200)
    for name, value in seen.items():
        assert value.is_cuda
        at = (1, slice(None), real) if value.dim() == 4 else (1, real)
        close(value[at], expected[name][at], 1e-4)  # two layers deep; angles and products in float32


@torch.no_grad()
def test_bfloat16_patterns_equal_the_kernel() -> None:
    model, ids = make().bfloat16(), draw(2, 300)
    with gh.record(model, "pattern.*", "v.*", "z.*") as seen:
        model(ids)
    for layer in range(2):
        pattern, v, z = (seen[f"{name}.{layer}"] for name in ("pattern", "v", "z"))
        assert pattern.dtype == torch.float32
        attended = pattern @ v.repeat_interleave(2, 1).float()
        close(attended, z, 1e-2)  # z and the weights are rounded to eight bits


@torch.no_grad()
def test_compiled_model_can_be_recorded_and_stays_compiled() -> None:
    torch.compiler.reset()
    model, ids = make(), draw(2, 64)
    compiled = torch.compile(model)
    before = compiled(ids)
    with gh.record(compiled, "resid_post.*", "pattern.1[query=-1]") as seen, gh.edit(compiled, {"z.0": 0.0}):
        changed = compiled(ids)
    assert len(seen) == 3
    assert not torch.equal(changed, before)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert torch.equal(compiled(ids), before)


@torch.no_grad()
def test_recording_does_not_materialise_block_masks() -> None:
    """Sixteen heads of 8,192 x 8,192 scores would be 4 GiB."""
    model = make(n_heads=16, n_kv_heads=16, d_model=256, n_layers=1, max_len=8192)
    ids, documents = draw(1, 8192), (torch.arange(8192, device=GPU) // 3000)[None]
    model(ids, documents=documents)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with gh.record(model, "pattern.0[head=3, query=8000:]") as seen:
        model(ids, documents=documents)
    assert torch.cuda.max_memory_allocated() - before < 2**29
    weights = seen["pattern.0"][0]
    assert not weights[:, :6000].any()  # of other documents
    close(weights.sum(-1), torch.ones(192), 1e-5)


@torch.no_grad()
def test_generation_with_recording_and_edits() -> None:
    model = make()
    prompts = [draw(1, n)[0].tolist() for n in (3, 40, 17)]
    plain = gh.generate(model, None, prompts, max_new_tokens=12)
    seen = gh.generate(model, None, prompts, max_new_tokens=12, record=("resid_post.1", "pattern.0"))
    for one, prompt, two in zip(plain, prompts, seen, strict=True):
        whole = torch.tensor([prompt + two.ids[:-1]], device=GPU)
        with gh.record(model, "resid_post.1", "pattern.0") as expected:
            model(whole)
        for name in ("resid_post.1", "pattern.0"):
            close(two.recording[name], expected[name][0], 1e-4)
        assert len(one.ids) == len(two.ids)
    with gh.edit(model, {"z.1": gh.ablate_head(0, 1), "pattern.0": gh.ablate_head(2)}):
        edited = gh.generate(model, None, prompts, max_new_tokens=12)
        for prompt, one in zip(prompts, edited, strict=True):
            ids = torch.tensor([prompt + one.ids[:-1]], device=GPU)
            logits = model(ids)[0, len(prompt) - 1 :].log_softmax(-1)
            chosen = logits.gather(1, torch.tensor(one.ids, device=GPU)[:, None])
            assert (logits.max(-1).values - chosen[:, 0]).max() < 1e-3  # ties may fall either way
    assert [one.ids for one in gh.generate(model, None, prompts, max_new_tokens=12)] == [one.ids for one in plain]


@pytest.mark.parametrize("name", ["z.0", "pattern.0"])
@torch.no_grad()
def test_recording_around_cuda_graphs_raises(name: str) -> None:
    model = make()
    with pytest.raises(gh.InputError, match="pass its name to generate as record"), gh.record(model, name):
        gh.generate(model, None, [[1, 2, 3]], max_new_tokens=8)
